"""Answers that must match: a JSON schema, a regular expression, texts or a Lark grammar."""

from __future__ import annotations

import json
import random
import re
import sys
from decimal import Decimal
from typing import Any

import pytest

from megatron_hybrid_prefix.errors import FieldError
from megatron_hybrid_prefix.mcore.engine.sampling import RowSampling
from megatron_hybrid_prefix.text import grammar
from megatron_hybrid_prefix.text.grammar import AnswerGrammar
from tests.harness.bits import bits, exact_harness
from tests.harness.drafts import Drafting
from tests.harness.grammar_walks import END, JSON, TOKENIZER, random_schema, record, walk
from tests.harness.lifecycle_helpers import MODES, EngineHarness, tokens

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
SIZES = {"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 40}, "maxItems": 3}
KINDS = {
    "kind": {"enum": ["one", 2, None]},
    "sizes": SIZES,
    "name": {"type": "string", "maxLength": 5},
    "is_new": {"type": "boolean"},
}
SCHEMA = record(KINDS, 2)
REGEX, CHOICES = r"(ab|c){2,4}-[0-9]{3}", ["yes", "no", 'per"haps', "né"]
LARK = 'start: "(" (start | /[0-9]/)* ")"'
WANTED = ({"json": SCHEMA}, {"regex": REGEX}, {"choice": CHOICES}, {"grammar": LARK})
# What makes a model of random weights come to an end of strings and blanks.
BIAS = [(ord(letter), 6.0) for letter in '"}]),'] + [(ord(blank), -8.0) for blank in " \n\r\t("]


def judge(schema: dict[str, Any], text: str) -> bool:
    """By another library, in exact numbers: 18.00...01 is above 18."""
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    return judge.is_valid(json.loads(text, parse_float=Decimal))


def fits(wanted: dict[str, Any], text: str) -> bool:
    """Whether a whole answer matches."""
    if wanted.keys() & {"json", "json_object"}:
        return judge(wanted.get("json", {"type": "object"}), text)
    if "grammar" in wanted:  # pairs of brackets around digits
        while text != (text := re.sub(r"\([0-9]*\)", "0", text)):
            pass
        return text == "0"
    return text in wanted["choice"] if "choice" in wanted else bool(re.fullmatch(wanted["regex"], text))


def check(wanted: dict[str, Any], request: Any) -> bool:
    """Checks an answer, whole or cut off. Returns whether it is whole."""
    answer = list(request.generated_tokens)
    is_whole = answer[-1] == END
    text = answer[:-1] if is_whole else answer
    if is_whole:
        assert fits(wanted, bytes(text).decode())
    else:
        assert len(answer) == request.sampling_params.num_tokens_to_generate
    followed = AnswerGrammar(wanted, TOKENIZER, 512, [END])
    for at, token in enumerate(answer):
        assert followed.mask(answer[:at])[token // 32] >> token % 32 & 1
    return is_whole


def ask(served: EngineHarness, prompt: list[int], wanted: Any, count: int = 150, end: int = END, **more: Any) -> int:
    options = {"logit_bias": BIAS, "structured_outputs": wanted} | more
    return served.add(prompt, count, params={"termination_id": end}, sampling_options=options)


def mixed(served: EngineHarness) -> tuple[dict[int, Any], list[int]]:
    """Adds constrained and free requests, some with the same prompt. Returns what was asked for by id, and the free ones."""
    asked, free = {}, []
    for seed in range(12):
        prompt, wanted = tokens(1, seed % 5, seed % 3), WANTED[seed % 4]
        options = {"seed": seed, "temperature": (0.0, 0.7, 1.0, 1.6)[seed // 3 % 4], "top_p": (1.0, 0.9)[seed % 2]}
        asked[ask(served, prompt, wanted, 8 if seed == 8 else 150, **options)] = wanted
        free.append(served.add(prompt, 12, sampling_options={"seed": seed, "temperature": 1.0 if seed % 2 else 0.0}))
    return asked, free


@pytest.mark.parametrize("mode", MODES)
def test_answers_match_whatever_runs_beside_them(tiny, mode):
    """Hits, preempted and suspended requests among them; rows without a grammar have the bits that they have alone."""
    served = exact_harness(tiny, async_sched_mode=mode, max_requests=6, blocks=14)
    asked, free = mixed(served)
    served.step(7)
    served.suspend_and_resume()
    served.run()
    whole = [check(wanted, served.finished[number]) for number, wanted in asked.items()]
    assert sum(whole) >= 8 and not whole[8]
    assert any(served.finished[number].num_cached_tokens for number in asked)
    alone = exact_harness(tiny, async_sched_mode=mode)
    for number in free:
        request = served.finished[number]
        options = {"seed": free.index(number), "temperature": float(free.index(number) % 2)}
        again = alone.add(request.prompt_tokens.tolist(), 12, sampling_options=options)
        alone.run()
        assert bits(alone.finished[again]) == bits(request)
    served.check_drained()


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_whatever_a_grammar_lets_through_is_of_the_schema(count):
    """Of schemas as those of JSONSchemaBench. An answer that was cut off is the beginning of one that is, too."""
    texts: list[str] = []
    for seed in range(2 * count):
        dice = random.Random(seed)
        schema = random_schema(dice)
        try:
            AnswerGrammar({"json": schema}, TOKENIZER, 512, [END])
        except FieldError:
            continue
        texts += [walk({"json": schema}, dice, JSON) for _ in range(3)]
        assert all(judge(schema, text) for text in texts[-3:]), (seed, schema)
    assert len(texts) > 3 * count and sum(len(text) > 30 for text in texts) > count and max(map(len, texts)) > 300


@pytest.mark.parametrize("mode", MODES)
def test_preempted_answers_match(tiny, mode):
    served = EngineHarness(tiny, async_sched_mode=mode, blocks=7, slots=4, enable_chunked_prefill=True, max_tokens=128)
    asked = [ask(served, tokens(1, 60, at), {"json_object": True}, 90, seed=1, logit_bias=()) for at in range(4)]
    served.run()
    assert any(len(record.requests) > 1 for record in served.records.values())
    for number in asked:
        check({"json_object": True}, served.finished[number])
    served.check_drained()


def test_without_masks_answers_do_not_match(tiny, monkeypatch):
    monkeypatch.setattr(RowSampling, "_masked", lambda self, logits, rows: logits)
    served = EngineHarness(tiny)
    number = ask(served, tokens(0, 20, 1), {"regex": REGEX}, 10, seed=3)
    served.run()
    with pytest.raises(AssertionError):
        check({"regex": REGEX}, served.finished[number])


def test_log_probs_are_those_of_what_may_come(tiny):
    served = EngineHarness(tiny, logprobs_mode="processed_logprobs")
    forced = ask(served, tokens(0, 20, 1), {"choice": ["only"]}, logit_bias=())
    free = served.add(tokens(0, 20, 1), 3, sampling_options={"seed": 1})
    two = ask(served, tokens(0, 20, 1), {"choice": ["a", "b"]}, logit_bias=())
    served.run()
    assert list(served.finished[forced].generated_log_probs) == [0] * 5
    assert served.finished[two].generated_log_probs[0] < 0 == served.finished[two].generated_log_probs[1]
    reference = served.reference.logits(tokens(0, 20, 1))[-1]
    for number, first, last in ((two, ord("a"), ord("b")), (free, 0, 511)):
        expected = reference[first : last + 1].log_softmax(dim=-1)[served.finished[number].generated_tokens[0] - first]
        assert served.finished[number].generated_log_probs[0] == pytest.approx(expected.item(), abs=1e-4)


def test_min_tokens_bar_the_end_while_something_else_may_come(tiny):
    served = EngineHarness(tiny)
    long, over = (ask(served, tokens(0, 20, 1), {"regex": regex}, 40, min_tokens=10) for regex in ("x*", "x{4}"))
    served.run()
    assert len(served.finished[long].generated_tokens) > 10
    assert bytes(list(served.finished[over].generated_tokens)[:-1]) == b"xxxx"


CHAIN = "start: T0\n" + "\n".join(f"T{at}: T{at + 1}" for at in range(12_000)) + '\nT12000: "a"'
WRONG = {
    "regex": ({"regex": "(a"}, "unclosed group"),
    "keyword": ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "lark": ({"grammar": "start: nothing"}, "cannot be compiled"),
    "two": ({"regex": "a", "choice": ["a"]}, "one of json"),
    "unknown": ({"xml": "a"}, "one of json"),
    "no texts": ({"choice": []}, "one of json"),
    "no text": ({"choice": [""]}, "one of json"),
    "deep": ({"json": json.loads('{"a":' * 900 + "1" + "}" * 900)}, "levels"),
    "infinite": ({"json": {"minimum": float("inf")}}, "cannot be compiled"),
    "long": ({"regex": "a" * 2**19}, "characters"),
    "no text of Lark": ({"grammar": "start: \0"}, "cannot be compiled"),
    "stack": ({"grammar": CHAIN}, "MiB"),
    "memory": ({"json": {"type": "string", "allOf": [{"pattern": f".*{x}.*"} for x in range(20)]}}, "it takes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_compiled_is_refused_in_one_line(tiny, name):
    wanted, why = WRONG[name]
    served = EngineHarness(tiny)
    with pytest.raises(ValueError, match=why) as refused:
        ask(served, [1, 2, 3], wanted)
    assert "structured_outputs" in str(refused.value) and "\n" not in str(refused.value)
    served.check_drained()


def test_what_it_does_not_go_with_is_refused(tiny, tiny_mtp, monkeypatch):
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        ask(Drafting(tiny_mtp, 2), [1, 2], {"regex": "a"})
    served = EngineHarness(tiny)
    with pytest.raises(ValueError, match="no token ends"):
        served.add([1, 2], 3, sampling_options={"structured_outputs": {"regex": "a"}})
    grammar._problem_of.cache_clear()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'megatron-hybrid-prefix\[grammar\]'"):
        ask(served, [1, 2], {"regex": "a"})


def test_a_grammar_follows_any_answer():
    """One that is decoded again, too, and one that ends before the end of the vocabulary."""
    followed = AnswerGrammar({"regex": "ab?"}, TOKENIZER, 512, [END, 300])
    for text, wanted in ((b"", {97}), (b"a", {98, END, 300}), (b"ab", {END, 300}), (b"", {97})):
        assert {at for at in range(512) if followed.mask(list(text))[at // 32] >> at % 32 & 1} == wanted
    with pytest.raises(FieldError):
        AnswerGrammar({"regex": "a"}, TOKENIZER, 512, [-1])
    wide = AnswerGrammar({"json": record({f"name_{at}": {} for at in range(240)})}, TOKENIZER, 512, [END])
    assert wide.mask(b'{"')[ord("n") // 32] and not wide.stuck
    ambiguous = AnswerGrammar({"grammar": 'start: e\ne: e e e | e e | "a" | '}, TOKENIZER, 512, [END])
    assert any(ambiguous.mask(b"a" * at) is None or ambiguous.stuck for at in range(300)), "its masks get dearer"
