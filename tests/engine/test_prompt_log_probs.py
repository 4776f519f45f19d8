"""Log-probs of prompts and answers, and the likeliest tokens, at every position, against a float64 recompute.

Each scenario runs on this package's engine with caching off and on, in one scheduling each; random traffic runs in both. Scenarios
with a defect of megatron-core also run on its classes, and must fail there (``tests/harness/defects.py``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.mcore import build_upstream_engine
from megatron_hybrid_prefix.mcore.engine.controller import HybridPrefixController
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.text.tokenizer import ByteTokenizer
from megatron_hybrid_prefix.upstream.blocks import available_blocks, block_counts
from megatron_hybrid_prefix.upstream.capabilities import form_of
from tests.harness.defects import expected
from tests.harness.drafts import forced_drafts
from tests.harness.engine_helpers import LOG_PROB_NOISE, NOISES, greedy, random_tokens
from tests.harness.lifecycle_helpers import MANY, EngineHarness, IdTokenizer, known_answer
from tests.harness.naive_model import NaiveHybridModel

# Float32 alone is off by up to 1.4e-5 where a random token is unlikely: a plain float32 recompute is, too. Prompts of these
# seeds are well conditioned: on the processors tried, one forward over the whole prompt is off by less than half of this.
# Where another processor's order of sums is off by more, the position's noise decides, as in `assert_matches`.
TOLERANCE = 1e-5
SEEDS = (128, 136, 118, 139, 102, 115)


class WrongLogProb(Exception):
    """Not an AssertionError, so that another failure cannot count as the defect."""


class Traffic(EngineHarness):
    """An engine whose requests ask for log-probs of prompt and answer.

    ``side``: "off" or "on" (the cache), or "upstream": megatron's classes with caching off. ``states``: most in the cache.
    """

    def __init__(self, model: Any, side: str, *, states: int = MANY, **fields: Any) -> None:
        fields = {
            "max_sequence_length": 512,
            "max_tokens": 512,
            "buffer_size_gb": 0.02,
            "enable_chunked_prefill": True,
            "materialize_only_last_token_logits": False,
            "retention_interval_tokens": None,
            "tokenizer": IdTokenizer(),  # with a different text for each token
        } | fields
        if side == "upstream":
            fields["build"] = lambda model, prefix, **fields: build_upstream_engine(model, **fields)
        super().__init__(model, slots=states if side == "on" else None, **fields)
        self.asked: dict[int, Any] = {}

    def add(self, prompt: list[int], count: int = 4, cache: dict[str, Any] | None = None, **params: Any) -> int:
        """Adds a greedy request with these cache options and fields of its sampling parameters."""
        params = {"skip_prompt_log_probs": False} | params
        number = super().add(prompt, count, params=params, **(cache or {}))
        self.asked[number] = greedy(count, **params)
        return number

    def check(self, reference: Reference) -> None:
        """Checks that all requests are finished; WrongLogProb: one's results are not right."""
        assert set(self.finished) == set(self.asked)
        for number, request in self.finished.items():
            problems = wrong(reference, request, self.asked[number])
            if problems:
                raise WrongLogProb(f"request {number} of {len(request.prompt_tokens)} tokens: {problems[:4]}")


class Reference:
    """The model's results, computed once per sequence: log-probs in float64, and the effect of float32 rounding on each of them."""

    def __init__(self, model: Any) -> None:
        naive = NaiveHybridModel(model, model.hybrid_config)
        self.log_probs: Callable[[tuple[int, ...]], torch.Tensor] = cache(lambda tokens: naive.log_probs(list(tokens)))
        self.noise: Callable[[tuple[int, ...]], torch.Tensor] = cache(lambda tokens: naive.noise(list(tokens)))
        self._plain = EngineHarness(model, slots=None)

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """The engine's greedy answer, without chunks, drafts and cache."""
        return known_answer(self._plain, prompt, count)


def too_far(reference: Reference, tokens: list[int], row: int, off: float, token_ids: list[int]) -> bool:
    """Whether these tokens' log-probs after position ``row`` differ by more than rounding explains."""
    if off <= TOLERANCE:
        return False
    if not off <= LOG_PROB_NOISE:  # or not a number
        return True
    return off > NOISES * float(reference.noise(tuple(tokens))[row, token_ids].max())


def wrong(reference: Reference, request: Any, params: Any) -> list[str]:
    """Which of a finished request's log-probs differ from what its sampling parameters ask for."""
    prompt, answer = [int(t) for t in request.prompt_tokens], list(request.generated_tokens)
    tokens = prompt + answer
    rows = reference.log_probs(tuple(tokens))
    first = len(prompt) - 1  # the row that says the answer's first token
    parts = (
        ("prompt", not params.skip_prompt_log_probs, 0, first, request.prompt_log_probs, request.prompt_top_n_logprobs),
        ("answer", True, first, len(tokens) - 1, request.generated_log_probs, request.generated_top_n_logprobs),
    )
    problems = []
    for name, asked, start, end, log_probs, top_n in parts:
        count = (end - start) * (asked and params.return_log_probs)
        if len(log_probs or ()) != count or len(top_n or ()) != count * (params.top_n_logprobs > 0):
            problems.append(f"{len(log_probs or ())} and {len(top_n or ())} of {count} for the {name}")
            continue
        problems += [
            f"position {row}: {value:.3f}, not {float(rows[row][tokens[row + 1]]):.3f}"
            for row, value in enumerate(log_probs or (), start)
            if too_far(reference, tokens, row, abs(float(rows[row][tokens[row + 1]]) - value), [tokens[row + 1]])
        ]
        for row, entry in enumerate(top_n or (), start):
            problems += _wrong_top_n(reference, tokens, row, entry, params.top_n_logprobs)
    best = rows[first:-1].topk(2).values
    sure = (best[:, 0] - best[:, 1] > 1e-4).tolist()
    if any(int(row.argmax()) != token for row, token, known in zip(rows[first:], answer, sure) if known):  # noqa: B905
        problems.append("another answer")
    return problems


def _wrong_top_n(reference: Reference, tokens: list[int], row: int, entry: dict[str, float], count: int) -> list[str]:
    """Names are token ids. If two tokens are equally likely, either is right; each has its own value."""
    log_probs = reference.log_probs(tuple(tokens))[row]
    values = sorted(entry.values(), reverse=True)
    if len(values) != count:
        return [f"position {row}: {len(values)} of {count} likeliest"]
    best = log_probs.topk(count)
    off = [abs(a - b) for a, b in zip(values, best.values.tolist(), strict=True)]
    off += [abs(float(log_probs[int(name)]) - value) for name, value in entry.items()]
    most = max(off, key=lambda value: (math.isnan(value), value))
    likeliest = [*best.indices.tolist(), *map(int, entry)]
    return [f"position {row}: likeliest off by {most:.3f}"] if too_far(reference, tokens, row, most, likeliest) else []


@pytest.fixture(scope="module")
def reference(tiny):
    return Reference(tiny)


@pytest.fixture(scope="module")
def mtp_reference(tiny_mtp):
    return Reference(tiny_mtp)


def prompt(number: int, length: int) -> list[int]:
    """The first tokens of one of six prompts."""
    return random_tokens(240, seed=SEEDS[number % len(SEEDS)])[:length]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-3])
def test_no_number_and_a_wrong_one_are_too_far(reference, value):
    tokens = prompt(0, 4)
    assert too_far(reference, tokens, 0, value, [0])
    likeliest = reference.log_probs(tuple(tokens))[0].topk(2)
    entry = {str(int(token)): float(found) for found, token in zip(*likeliest, strict=True)}
    assert not _wrong_top_n(reference, tokens, 0, entry, 2)
    for name in entry:
        assert _wrong_top_n(reference, tokens, 0, entry | {name: entry[name] + value}, 2)


ENGINES = [("off", "legacy"), ("on", "async")]
each_engine = pytest.mark.parametrize(("side", "mode"), ENGINES)


def defect(number: int, mode: str = "legacy", raises: type[Exception] = WrongLogProb) -> Any:
    """`each_engine`, and megatron's classes, which must fail with ``raises`` where they have the defect."""
    upstream = pytest.param("upstream", mode, marks=expected(number, raises))
    return pytest.mark.parametrize(("side", "mode"), [upstream, *ENGINES])


# -- who is given what -------------------------------------------------------------------------------------------------

# Of megatron's defects: its scheduling, fields, and requests: of which prompt how many tokens, of the answer, what they ask for, and steps.
CASES: dict[int, tuple[str, dict[str, Any], list[tuple[tuple[int, int], int, dict[str, Any], int]]]] = {
    41: ("legacy", {"max_tokens": 64}, [((0, 200), 4, {"top_n_logprobs": 3}, 0)]),
    42: ("legacy", {"max_tokens": 64}, [((0, 200), 4, {"skip_prompt_log_probs": True, "top_n_logprobs": 2}, 0)]),
    43: ("legacy", {}, [((1, 100), 4, {"return_log_probs": False}, 2), ((2, 70), 4, {}, 0)]),
    # Async: a step is sampled after its rows moved up. The first asks for no log-probs, and ends; the last waits for a row: the
    # step after is one without overlap.
    44: (
        "async",
        {"max_requests": 3},
        [
            ((1, 30), 5, {"return_log_probs": False}, 0),
            ((2, 40), 9, {}, 0),
            ((3, 50), 9, {"skip_prompt_log_probs": True, "top_n_logprobs": 2}, 0),
            ((4, 60), 4, {}, 0),
        ],
    ),
    45: (
        "legacy",
        {},
        [
            ((1, 100), 0, {"top_n_logprobs": 2}, 0),
            ((1, 100), 0, {"skip_prompt_log_probs": True, "top_n_logprobs": 2}, 0),
        ],
    ),
}
SIDES = [
    *(
        pytest.param(number, "upstream", mode, marks=expected(number, WrongLogProb))
        for number, (mode, *_) in CASES.items()
    ),
    *((number, *engine) for number in CASES for engine in ENGINES),
]


@pytest.mark.parametrize(("number", "side", "mode"), SIDES)
def test_each_request_is_given_what_it_asked_for(tiny, reference, number, side, mode):
    _, fields, asked = CASES[number]
    traffic = Traffic(tiny, side, async_sched_mode=mode, **fields)
    for of, count, asks, steps in asked:
        traffic.add(prompt(*of), count, **asks)
        traffic.step(steps)
    traffic.run()
    traffic.check(reference)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("side", "mode"), [*ENGINES, ("off", "async"), ("on", "legacy")])
def test_random_traffic(tiny, reference, side, mode, seed):
    """Chunks end anywhere beside decodes. Requests with different parameters share steps."""
    dice = random.Random(seed)
    traffic = Traffic(tiny, side, async_sched_mode=mode, max_tokens=64)
    for _ in range(10):
        asks = dice.choice(
            (
                {"top_n_logprobs": dice.randrange(4)},
                {},
                {"skip_prompt_log_probs": True, "top_n_logprobs": 2},
                {"skip_prompt_log_probs": True},
                {"return_log_probs": False},
            )
        )
        length = dice.choice((1, 2, dice.randrange(3, 64), dice.randrange(64, 240)))
        traffic.add(prompt(dice.randrange(6), length), dice.randrange(1, 9), **asks)
        if dice.random() < 0.6:
            traffic.step(dice.randrange(1, 5))
    traffic.run()
    traffic.check(reference)


def test_a_model_of_attention_alone(platform):
    """It cannot be cached. `build_engine` uses the same classes, and it can be aborted between two chunks."""
    model = build_hybrid_model(get_preset("tiny", layer_pattern="*-*-"), seed=0, platform=platform)
    traffic = Traffic(model, "off", async_sched_mode="async", max_tokens=64)
    traffic.add(prompt(0, 200), 5, top_n_logprobs=2)
    traffic.add(prompt(1, 1), 9)
    traffic.step(6)
    aborted = traffic.add(prompt(2, 200), 5)
    traffic.step(2)
    assert traffic.engine.get_request(aborted).finished_chunk_token_count > 0
    assert traffic.engine.abort_request(aborted)
    traffic.run()
    assert traffic.finished.pop(aborted).generated_tokens == []
    del traffic.asked[aborted]
    traffic.check(Reference(model))
    allocator = traffic.context.kv_block_allocator
    assert available_blocks(allocator) == block_counts(allocator).total - 1


def test_only_a_chunks_end_depends_on_the_token_that_follows_it(tiny, reference, monkeypatch):
    """A mutant: without the prompt's next token, the checks of this file fail at these positions and at no other."""
    rows_only = HybridPrefixController._send_wrong
    monkeypatch.setattr(
        HybridPrefixController,
        "tokens_sampled",
        lambda self: rows_only(self, self.inference_wrapped_model.inference_context),
    )
    traffic = Traffic(tiny, "on", max_tokens=64)
    traffic.send(prompt(0, 200), top_n_logprobs=3)
    problems = wrong(reference, traffic.finished[1], traffic.asked[1])
    assert [problem.split(":")[0] for problem in problems] == ["position 63", "position 127", "position 191"]


@each_engine
def test_a_prompts_own_end_token_between_two_chunks_ends_nothing(tiny, reference, side, mode):
    traffic = Traffic(tiny, side, async_sched_mode=mode, max_tokens=64)
    tokens = prompt(0, 200)
    traffic.send(tokens, termination_id=tokens[64])
    traffic.check(reference)


@pytest.mark.parametrize("left", [0, 1, 3])
@defect(46)
def test_stop_words(tiny, reference, side, mode, left):
    """Of two tokens: one that would come now or never, and one that comes with tokens left."""
    tokens = prompt(2, 100)
    answer = reference.answer(tokens, 6)
    traffic = Traffic(tiny, side, async_sched_mode=mode, max_tokens=64)
    for count in (left + 2, 6):
        traffic.add(tokens, count, top_n_logprobs=2, stop_words=[f"{answer[left]} {answer[left + 1]}"])
    traffic.run()
    traffic.check(reference)
    assert all(request.generated_tokens == answer[:left] for request in traffic.finished.values())


@defect(47, raises=AssertionError)
def test_tokens_of_the_same_text(tiny, reference, side, mode):
    tokens = prompt(0, 100)
    traffic = Traffic(tiny, side, async_sched_mode=mode, max_tokens=64, tokenizer=ByteTokenizer(512))
    traffic.send(tokens, top_n_logprobs=5)
    (request,) = traffic.finished.values()
    rows = reference.log_probs((*tokens, *request.generated_tokens))
    entries = request.prompt_top_n_logprobs + request.generated_top_n_logprobs
    assert len(entries) == len(rows) - 1
    for row, entry in zip(rows, entries, strict=False):
        right = row.topk(5)
        assert list(entry.values()) == pytest.approx(right.values.tolist(), abs=LOG_PROB_NOISE)
        texts: list[str] = []
        for token in right.indices.tolist():
            text = ByteTokenizer(512).detokenize([token])
            texts.append(f"token_id:{token}" if text in texts else text)
        assert list(entry) == texts


# -- processed log-probs, preemption, drafts ---------------------------------------------------------------------------


@defect(48, raises=AssertionError)
def test_processed_log_probs(tiny, reference, side, mode):
    """Log-probs of the distribution that is sampled from: with each request's temperature, at every position."""
    traffic = Traffic(tiny, side, async_sched_mode=mode, max_tokens=128, logprobs_mode="processed_logprobs")
    sampling = traffic.engine.controller._sampling
    log_probs_of = sampling.log_probs_kernel

    def log_probs_kernel(logits: torch.Tensor, context: Any, *, token_to_request_index: Any = None) -> torch.Tensor:
        assert token_to_request_index is None or len(logits) == len(token_to_request_index)
        return log_probs_of(logits, context, token_to_request_index=token_to_request_index)

    sampling.log_probs_kernel = log_probs_kernel
    heat = {}
    for number, temperature in enumerate((1.0, 2.5, 1.5)):
        fields = {"top_k": 0, "temperature": temperature, "top_n_logprobs": 2}
        heat[traffic.add(prompt(number, 90 + 20 * number), 3, **fields)] = temperature
    traffic.run()
    for number, request in traffic.finished.items():
        tokens = (*(int(t) for t in request.prompt_tokens), *request.generated_tokens)
        rows = (reference.log_probs(tokens) / heat[number]).log_softmax(-1)[:-1]
        log_probs = request.prompt_log_probs + request.generated_log_probs
        right = rows.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
        assert log_probs == pytest.approx(right.tolist(), abs=LOG_PROB_NOISE)
        for row, entry in zip(rows, request.prompt_top_n_logprobs + request.generated_top_n_logprobs, strict=True):
            assert list(entry.values()) == pytest.approx(row.topk(2).values.tolist(), abs=LOG_PROB_NOISE)


@pytest.mark.parametrize(
    ("side", "mode", "host_gb"), [("off", "async", 0.0), ("on", "legacy", 0.0), ("on", "async", 0.01)]
)
def test_preempted_requests(tiny, reference, side, mode, host_gb):
    blocks = 9 if side == "on" else 6  # a request starts only if there would be room for one more page of states
    traffic = Traffic(tiny, side, async_sched_mode=mode, max_tokens=64, blocks=blocks, host_gb=host_gb)
    for number in range(3):
        traffic.add(prompt(number, 100 + number), 36, top_n_logprobs=number)
    traffic.run()
    assert traffic.engine.evicted_request_count > 0
    traffic.check(reference)


@each_engine
def test_a_chunk_beside_a_paused_request(tiny, reference, side, mode, monkeypatch):
    """Its row among the active requests is not its row among all requests."""
    paused = []
    original = HybridPrefixController.tokens_sampled

    def continue_prompt(controller: HybridPrefixController) -> None:
        original(controller)
        if context.get_index_of_chunked_prefill_request() != -1:
            paused.append(context.paused_request_count)

    monkeypatch.setattr(HybridPrefixController, "tokens_sampled", continue_prompt)
    sizes = {"blocks": 5, "paused_blocks": 2} if side == "on" else {"blocks": 3, "paused_blocks": 1}
    traffic = Traffic(tiny, side, async_sched_mode=mode, max_tokens=64, block_size_tokens=128, **sizes)
    context = traffic.context
    if side == "on" and form_of("KV blocks") == "one pool":
        pytest.skip(
            "from one pool: a cache admits a prompt only if a block is left, which is the running request's next one"
        )
    traffic.add(prompt(0, 126), 20)
    traffic.add(prompt(2, 3), 60)
    traffic.step(3)
    traffic.send(prompt(1, 128), count=1)
    assert 1 in paused
    traffic.check(reference)


@pytest.mark.parametrize(
    ("side", "mode", "blocks"),
    [("off", "legacy", None), ("on", "async", None), ("off", "async", 6), ("on", "legacy", 6)],
)
def test_drafts(tiny_mtp, mtp_reference, side, mode, blocks):
    """Accepted drafts have log-probs, rejected ones do not. Chunks end as without drafts."""
    asked = []
    for number, length in enumerate((200, 1, 66, 121)):
        fields = ({"top_n_logprobs": 2}, {}, {"skip_prompt_log_probs": True, "top_n_logprobs": 1}, {})[number]
        asked.append((prompt(number, length), 8 + 6 * number, fields))
    truth = {number: tokens + mtp_reference.answer(tokens, count) for number, (tokens, count, _) in enumerate(asked, 1)}
    traffic = Traffic(tiny_mtp, side, async_sched_mode=mode, max_tokens=64, num_speculative_tokens=2, blocks=blocks)
    with forced_drafts(traffic.engine, truth, lambda request_id, position: (request_id + position) % 3) as drafted:
        for tokens, count, fields in asked:
            traffic.add(tokens, count, **fields)
            traffic.step(2)
        traffic.run()
    assert set(drafted) == {0, 1, 2}
    traffic.check(mtp_reference)
