"""Token ids over HTTP: in whole answers and streams, as prompts, ends after ``min_tokens``, and an agent's ten turns."""

from __future__ import annotations

import base64
import io
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.serve.chat_template import load_chat_form
from megatron_hybrid_prefix.serve.protocol import read_request
from megatron_hybrid_prefix.text.tokenizer import HuggingFaceTokenizer
from tests.harness.engine_helpers import LOG_PROB_NOISE
from tests.harness.server_process import LIMIT_TOKENS, PROMPT, Endpoint
from tests.harness.tokenizer_folder import make_folder
from tests.serve.test_serve import TOKENIZER, Server, running

GENERATE = "/inference/v1/generate"
ROUTES = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
SAMPLED = {"model": "tiny", "return_token_ids": True, "ignore_eos": True, "temperature": 1, "seed": 3}
SHORT = 32  # tokens of a block
TURNS, ANSWER = 10, 50


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a byte-level BPE tokenizer: many sequences of ids have the same text."""
    return make_folder(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def server(tiny: Any, words: Any) -> Iterator[Server]:
    options = {"tokenizer": HuggingFaceTokenizer(words, 512), "chat": load_chat_form(None, words)}
    fields = {"materialize_only_last_token_logits": False, "block_size_tokens": SHORT}
    with running(tiny, engine_fields=fields, **options) as server:
        yield server


@pytest.fixture(scope="module", params=[0, 2], ids=["no drafts", "drafts"])
def drafting(request: pytest.FixtureRequest, tiny_mtp: Any) -> Iterator[Server]:
    with running(tiny_mtp, engine_fields={"num_speculative_tokens": request.param}) as server:
        yield server


def ask(server: Endpoint, path: str, **body: Any) -> Any:
    status, answer = server.send(path, {"model": "tiny"} | body)
    assert status == 200, answer
    return answer


def chunks(server: Endpoint, path: str, **body: Any) -> list[Any]:
    return server.events(path, {"model": "tiny"} | body)


def log_probs(choice: Any) -> list[Any]:
    """Log-probs of a choice, whole or of a chunk, in the form of its route."""
    found = choice["logprobs"] or {}
    return found.get("token_logprobs") or [entry["logprob"] for entry in found.get("content", ())]


def body_of(kind: str, **more: Any) -> dict[str, Any]:
    if kind == "chat":
        return SAMPLED | {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 2} | more
    return SAMPLED | {"prompt": [PROMPT, [5, 6, 7] * 9], "logprobs": 2} | more


# --- What comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROUTES)
def test_ids_of_prompts_and_answers(server: Server, kind: str) -> None:
    """They are what the engine saw: the same ids as a prompt give the log-probs of the answer."""
    tokenizer = server.app.state.api._served.tokenizer
    answer = ask(server, ROUTES[kind], **body_of(kind, n=2, max_tokens=40, cache_read=False))
    prompts = [answer["prompt_token_ids"]] * 2 if kind == "chat" else [c["prompt_token_ids"] for c in answer["choices"]]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == len(answer["choices"])
    assert len(answer["choices"]) == len(prompts) == (2 if kind == "chat" else 4)
    if kind == "completion":
        assert prompts == [tokenizer.encode_prompt(PROMPT)] * 2 + [[5, 6, 7] * 9] * 2
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        ids = choice["token_ids"]
        assert len(ids) == len(log_probs(choice)) == 40
        scored = ask(
            server, ROUTES["completion"], prompt=prompt + ids, max_tokens=0, prompt_logprobs=0, cache_read=False
        )
        entries = scored["choices"][0]["prompt_logprobs"][len(prompt) :]
        right = [entry[str(token)]["logprob"] for entry, token in zip(entries, ids, strict=True)]
        assert log_probs(choice) == pytest.approx(right, abs=LOG_PROB_NOISE)


@pytest.mark.parametrize("kind", ROUTES)
def test_ids_of_a_stream_are_those_of_the_whole(server: Server, kind: str) -> None:
    fields = body_of(kind, n=2, max_tokens=40, stop=["e", "q"])
    whole = ask(server, ROUTES[kind], **fields)
    ids, prompts = defaultdict(list), {}
    for chunk in chunks(server, ROUTES[kind], **fields):
        (choice,) = chunk["choices"]
        holder = chunk if kind == "chat" else choice
        assert ("prompt_token_ids" in holder) == (choice["index"] not in prompts)
        prompts.setdefault(choice["index"], holder.get("prompt_token_ids"))
        assert len(choice["token_ids"]) == len(log_probs(choice))
        ids[choice["index"]] += choice["token_ids"]
    for choice in whole["choices"]:
        assert ids[choice["index"]] == choice["token_ids"]
        assert prompts[choice["index"]] == (whole if kind == "chat" else choice)["prompt_token_ids"]
    assert sum(map(len, ids.values())) == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("kind", ROUTES)
def test_nothing_is_returned_unasked(server: Server, kind: str) -> None:
    fields = body_of(kind, return_token_ids=False, max_tokens=3)
    for answer in (ask(server, ROUTES[kind], **fields), *chunks(server, ROUTES[kind], **fields)):
        assert "token_ids" not in json.dumps(answer)


def test_log_probs_name_tokens_by_id(server: Server) -> None:
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 20}
    for kind, path in ROUTES.items():
        choice = ask(server, path, **body_of(kind, **fields))["choices"][0]
        shown = choice["logprobs"]
        names = shown["tokens"] if kind == "completion" else [entry["token"] for entry in shown["content"]]
        assert names == [f"token_id:{token}" for token in choice["token_ids"]]
        tops = (
            shown["top_logprobs"] if kind == "completion" else [e["token"] for e in shown["content"][0]["top_logprobs"]]
        )
        assert all(name.startswith("token_id:") for top in tops for name in ([top] if kind == "chat" else top))


# --- Where an answer ends --------------------------------------------------------------------------------------------


def test_ids_of_what_ended_the_answer(drafting: Server) -> None:
    """The ids have the end token, and all of a stop text, whose characters the text has not. Several end tokens."""
    fields = {"prompt": "x", "return_token_ids": True, "logprobs": 0, "max_tokens": 30}
    for token in (65, 66, TOKENIZER.eod):
        bias = {"logit_bias": {str(token): 100}, "stop_token_ids": [65, 66]}
        choice = ask(drafting, "/v1/completions", **fields, **bias)["choices"][0]
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [token], "stop")
        assert len(log_probs(choice)) == 1
    choice = ask(drafting, "/v1/completions", **fields, logit_bias={"65": 100}, stop=["AAA"])["choices"][0]
    assert (choice["text"], choice["token_ids"], len(log_probs(choice))) == ("", [65] * 3, 3)


@pytest.mark.parametrize("least", [1, 4, 9])
def test_no_end_before_min_tokens(drafting: Server, least: int) -> None:
    """All end tokens are far more likely than the rest, and come only after so many tokens. With ``n``, streamed or not."""
    ends = [65, 66, TOKENIZER.eod]
    for end in ends:
        fields = {"prompt": "x", "n": 3, "return_token_ids": True, "logprobs": 0, "max_tokens": 30, "min_tokens": least}
        fields |= {"stop_token_ids": [65, 66], "logit_bias": {str(token): 90 + 10 * (token == end) for token in ends}}
        whole = ask(drafting, "/v1/completions", **fields)
        streamed = defaultdict(list)
        for chunk in chunks(drafting, "/v1/completions", **fields):
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"]
        for ids in (*streamed.values(), *(choice["token_ids"] for choice in whole["choices"])):
            assert len(ids) == least + 1 and ids[-1] == end and not {*ends} & {*ids[:-1]}
        assert all(len(log_probs(choice)) == least + 1 for choice in whole["choices"])
        assert len(streamed) == len(whole["choices"]) == 3


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"top_k": 20}, {"top_k": 9, "top_p": 0.9, "seed": 1}])
def test_min_tokens_with_every_way_to_sample(drafting: Server, sampling: dict[str, Any]) -> None:
    """The most likely first tokens are end tokens. Whatever the filters are, they look at what is not barred."""
    fields = {"prompt": PROMPT, "return_token_ids": True, "max_tokens": 12, "logprobs": 20} | sampling
    first = ask(drafting, "/v1/completions", **fields, return_tokens_as_token_ids=True)["choices"][0]
    ends = [int(name.removeprefix("token_id:")) for name in first["logprobs"]["top_logprobs"][0]]
    assert len(ends) == 20 and first["token_ids"][0] in ends
    for least in range(4):
        choice = ask(drafting, "/v1/completions", **fields, stop_token_ids=ends, min_tokens=least)["choices"][0]
        ids = choice["token_ids"]
        assert len(ids) == len(log_probs(choice)) > least or choice["finish_reason"] == "length"
        assert not {*ends} & {*ids[:least]} and not {*ends} & {*ids[least:-1]}
        assert least or ids[0] in ends


def test_what_is_not_barred_is_sampled_as_without(drafting: Server) -> None:
    fields = {"prompt": PROMPT, "return_token_ids": True, "max_tokens": 12, "temperature": 0}
    plain = ask(drafting, "/v1/completions", **fields, ignore_eos=True)["choices"][0]["token_ids"]
    at = plain.index(plain[4])
    for least in range(6):
        ids = ask(drafting, "/v1/completions", **fields, stop_token_ids=[plain[4]], min_tokens=least)["choices"][0]
        ids = ids["token_ids"]
        assert ids == plain[: at + 1] if least <= at else ids[:at] == plain[:at] and ids[at] != plain[at]


def test_stop_texts_count_after_min_tokens(drafting: Server) -> None:
    fields = {"prompt": "x", "return_token_ids": True, "max_tokens": 9, "logit_bias": {"65": 100}}
    for least, count in ((0, 2), (1, 3), (5, 7), (7, 9), (8, 9)):
        choice = ask(drafting, "/v1/completions", **fields, stop=["AA"], min_tokens=least)["choices"][0]
        assert choice["token_ids"] == [65] * count
        assert choice["text"] == "A" * (count if least == 8 else least)
        assert choice["finish_reason"] == ("length" if least == 8 else "stop")


@pytest.mark.parametrize("length", [LIMIT_TOKENS - 1, LIMIT_TOKENS, LIMIT_TOKENS + 1])
def test_a_prompt_without_room_for_an_answer_is_refused(drafting: Server, server: Server, length: int) -> None:
    """Unless nothing but its log-probs is asked for."""
    body = {"model": "tiny", "prompt": [7] * length}
    for more in ({"max_tokens": 1}, {"max_tokens": 0, "echo": True}, {"max_tokens": 1, "logprobs": 1}):
        for each in (drafting, server):
            status, answer = each.send("/v1/completions", body | more)
            assert status == (200 if length < LIMIT_TOKENS else 400), (more, answer)
    status, answer = server.send("/v1/completions", body | {"max_tokens": 0, "echo": True, "logprobs": 1})
    assert status == 400 if length > LIMIT_TOKENS else len(answer["choices"][0]["logprobs"]["tokens"]) == length


def test_penalties_and_drafts_exclude_each_other(drafting: Server) -> None:
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        status, answer = drafting.send("/v1/completions", {"model": "tiny", "prompt": "x", name: 1.5})
        assert status == (400 if drafting.engine.num_speculative_tokens else 200)
        if status == 400:
            assert answer["error"]["param"] == name and "--num-speculative-tokens" in answer["error"]["message"]


def test_drafts_change_no_id_and_no_log_prob(tiny_mtp: Any) -> None:
    """With everything at once: prompts and answers with log-probs, several answers, end tokens, the least length."""
    fields = {"prompt": [PROMPT, "xyz" * 30], "n": 2, "echo": True, "logprobs": 2, "max_tokens": 30, "seed": 5}
    fields |= {"stop_token_ids": [*range(40)], "min_tokens": 6, "return_token_ids": True}
    found = []
    for drafts in (0, 2):
        options = {"num_speculative_tokens": drafts, "materialize_only_last_token_logits": False}
        with running(tiny_mtp, engine_fields=options | {"async_sched_mode": "async"}) as server:
            found.append(ask(server, "/v1/completions", **fields)["choices"])
    for plain, drafted in zip(*found, strict=True):
        assert plain["token_ids"] == drafted["token_ids"] and len(plain["token_ids"]) > 6
        values = [log_probs(choice) for choice in (plain, drafted)]
        assert len(values[0]) == len(plain["prompt_token_ids"]) + len(plain["token_ids"])
        assert values[0][0] is values[1][0] is None
        assert values[0][1:] == pytest.approx(values[1][1:], abs=LOG_PROB_NOISE)


# --- Ids in, ids out -------------------------------------------------------------------------------------------------


def test_generate_is_the_completion_of_the_same_ids(server: Server) -> None:
    """Whatever is in `sampling_params`, and whatever beside it; whole and as a stream."""
    ids = [5, 6, 7] * 30
    options = {"n": 2, "max_tokens": 20, "seed": 3, "ignore_eos": True, "top_k": 100, "logprobs": 2}
    text = ask(server, ROUTES["completion"], prompt=ids, return_token_ids=True, prompt_logprobs=1, **options)
    # What verifiers and SkyRL send along.
    own = {"skip_special_tokens": False, "include_stop_str_in_output": True, "routed_experts_prompt_start": 3}
    own |= {"output_kind": 2, "detokenize": True, "prompt_logprobs": 1, "extra_args": None, "flat_logprobs": False}
    own |= {"skip_reading_prefix_cache": True, "output_text_buffer_length": 3}
    answer = ask(server, GENERATE, token_ids=ids, sampling_params=options | own)
    assert ask(server, GENERATE, token_ids=ids, **options | own)["choices"] == answer["choices"]
    assert answer["prompt_logprobs"] == text["choices"][0]["prompt_logprobs"]
    assert "prompt_token_ids" not in answer and answer["usage"]["completion_tokens"] == 40
    streamed: dict[int, list[Any]] = {0: [], 1: []}
    found = chunks(server, GENERATE, token_ids=ids, sampling_params=options, return_token_ids=True)
    assert [chunk.get("prompt_token_ids") for chunk in found].count(ids) == 2
    for chunk in found:
        (choice,) = chunk["choices"]
        assert len(choice["token_ids"]) == len(log_probs(choice))
        streamed[choice["index"]] += zip(choice["token_ids"], log_probs(choice), strict=True)
    for choice, other in zip(answer["choices"], text["choices"], strict=True):
        assert choice["token_ids"] == other["token_ids"] and choice["finish_reason"] == other["finish_reason"]
        assert choice.keys() == {"index", "token_ids", "logprobs", "finish_reason"}
        names = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert names == [f"token_id:{token}" for token in choice["token_ids"]]
        assert [token for token, _ in streamed[choice["index"]]] == choice["token_ids"]
        for values in (log_probs(other), [value for _, value in streamed[choice["index"]]]):
            assert log_probs(choice) == pytest.approx(values, abs=LOG_PROB_NOISE)


def test_ids_do_not_wait_for_text(drafting: Server) -> None:
    sampling = {"max_tokens": 30, "logit_bias": {"300": 100}}  # a token without text
    found = [chunk["choices"][0]["token_ids"] for chunk in chunks(drafting, GENERATE, token_ids=[5], **sampling)]
    assert [token for ids in found for token in ids] == [300] * 30
    assert max(map(len, found)) <= 1 + drafting.engine.num_speculative_tokens


def test_default_sampling_is_not_for_what_sampling_params_say(server: Server) -> None:
    served = replace(server.app.state.api._served, default_sampling={"temperature": 0.6, "top_p": 0.9})
    for inner, temperature in (({"temperature": 0.3}, 0.3), ({"max_tokens": 3}, 0.6)):
        body = {"model": "tiny", "token_ids": [1], "sampling_params": inner, "temperature": None}  # null: not given
        asked = read_request(body, "generate", served, None)
        options = asked.sampling.get("sampling_options", asked.sampling)
        assert options["temperature"] == temperature


def question(turn: int) -> str:
    return f"Question {turn}: which block is evicted first?"


def reusable(prompt: list[int], answer: Any) -> int:
    """Tokens up to the last block's end in prompt and answer. The answer's last token was never computed."""
    return (len(prompt) + len(answer["choices"][0]["token_ids"]) - 1) // SHORT * SHORT


def cached(answer: Any) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def as_text(server: Server) -> Iterator[tuple[list[int], Any]]:
    """Prompts and answers of an agent that sends the messages of each turn again."""
    messages = [{"role": "system", "content": PROMPT}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": question(turn)})
        answer = ask(server, ROUTES["chat"], messages=messages, **SAMPLED | {"seed": turn}, max_tokens=ANSWER)
        messages.append(answer["choices"][0]["message"])
        yield answer["prompt_token_ids"], answer


def as_ids(server: Server) -> Iterator[tuple[list[int], Any]]:
    """The same of one that keeps all ids, and tokenises what the template has between an answer and the next one."""
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question(0)}]
    ids = ask(server, "/tokenize", messages=messages)["tokens"]
    for turn in range(TURNS):
        options = {"ignore_eos": True, "temperature": 1, "seed": turn, "max_tokens": ANSWER}
        answer = ask(server, GENERATE, token_ids=ids, sampling_params=options, cache_salt="ids")
        yield ids, answer
        between = f"\nuser: {question(turn + 1)}\nassistant:"
        ids = ids + answer["choices"][0]["token_ids"]
        ids += ask(server, "/tokenize", prompt=between, add_special_tokens=False)["tokens"]


def test_ten_turns_of_an_agent(server: Server) -> None:
    """With ids every turn goes on at the last answer's last block. As text, what is tokenised again is another prompt."""
    tokenizer = server.app.state.api._served.tokenizer
    turns = {"ids": list(as_ids(server)), "text": list(as_text(server))}
    assert turns["ids"][0][0] == turns["text"][0][0]
    first = turns["ids"][0][1]["choices"][0]["token_ids"]
    assert first == turns["text"][0][1]["choices"][0]["token_ids"]
    assert tokenizer.tokenize(tokenizer.detokenize(first)) != first
    lost = {}
    for way, found in turns.items():
        able, hits = [reusable(*turn) for turn in found[:-1]], [cached(answer) for _, answer in found[1:]]
        lost[way] = 1 - sum(hits) / sum(able)
        print(f"{way}: {sum(hits)} of {sum(able)} tokens resumed, {lost[way]:.1%} lost; by turn {hits}")
        assert len(hits) == TURNS - 1 and all(hit <= most for hit, most in zip(hits, able, strict=True))
    assert lost["ids"] == 0
    assert lost["text"] > 0


# --- Routes of experts -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def routed(platform: Any) -> Iterator[Server]:
    model = build_hybrid_model("tiny-moe", seed=0, platform=platform, moe_enable_routing_replay=True)
    with running(model, engine_fields={"block_size_tokens": SHORT}) as server:
        yield server


def routes_in(answer: Any) -> list[np.ndarray]:
    return [np.load(io.BytesIO(base64.b64decode(choice["routed_experts"]))) for choice in answer["choices"]]


@pytest.mark.parametrize("kind", ["generate", *ROUTES])
def test_routes_of_a_hit_are_those_of_a_cold_run(routed: Server, kind: str) -> None:
    """Of all tokens but the last, in whole answers and in the last chunk of a stream; or of those that are asked for."""
    told = {"max_tokens": 9, "ignore_eos": True, "temperature": 0, "cache_salt": kind}
    told |= {"chat": {"messages": [{"role": "user", "content": PROMPT}]}, "completion": {"prompt": PROMPT}}.get(
        kind, {"token_ids": [5, 6, 7] * 40}
    )
    send = partial(ask, routed, ROUTES.get(kind, GENERATE), **told)
    cold, hit = send(cache_read=False), send(n=2)
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    length, (right,) = cold["usage"]["total_tokens"], routes_in(cold)
    assert right.shape == (length - 1, 2, 2) and right.dtype == np.int32 and 0 < right.max() < 4
    *_, last = chunks(routed, ROUTES.get(kind, GENERATE), **told)
    for found in (*routes_in(hit), *routes_in(last)):
        assert np.array_equal(found, right)
    assert np.array_equal(*routes_in(send(routed_experts_prompt_start=length - 9)), right[length - 9 :])
    assert "routed_experts" not in send(return_routed_experts=False)["choices"][0]


def test_routes_that_cannot_be_returned(routed: Server, server: Server) -> None:
    body = {"model": "tiny", "token_ids": [5, 6], "max_tokens": 1}
    for to, name, value in (
        (server, "return_routed_experts", True),
        *((routed, "routed_experts_prompt_start", start) for start in (-1, 3, True)),
    ):
        status, answer = to.send(GENERATE, body | {name: value})
        assert status == 400 and answer["error"]["param"] == name
    assert routes_in(ask(routed, GENERATE, **body, routed_experts_prompt_start=2))[0].shape == (0, 2, 2)
