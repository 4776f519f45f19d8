"""Sampling options of single requests: against loops in float64, and in engines with every kind of step."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.inference.sampling.torch_sampling import TorchSampling
from megatron.core.inference.sampling_params import SamplingParams

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore.engine.sampling import RowRequest, adjusted, filtered, gumbel, sample
from megatron_hybrid_prefix.mcore.runner import RequestResult, run_batch
from megatron_hybrid_prefix.sampling import SamplingOptions
from megatron_hybrid_prefix.upstream.controller import QueuedSampling
from tests.harness.drafts import Drafting
from tests.harness.engine_helpers import kv_budget, random_tokens
from tests.harness.lifecycle_helpers import MODES, EngineHarness

BLOCK = 64
SIZE = 12


def row(options: SamplingOptions, prompt: list[int] = (), answer: list[int] = ()) -> RowRequest:
    return RowRequest(options=options, prompt=torch.tensor(prompt, dtype=torch.int64), answer=list(answer))


def naive_probabilities(logits: list[float], request: RowRequest) -> list[float]:
    """The distribution to sample from, by loops."""
    options, scores = request.options, list(logits)
    for token, value in options.logit_bias:
        scores[token] += value
    prompt, answer = request.prompt.tolist(), Counter(request.answer)
    for token in range(len(scores)):
        if token in prompt or token in answer:
            penalty = options.repetition_penalty
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        if token in answer:
            scores[token] -= options.frequency_penalty * answer[token] + options.presence_penalty
    scores = [score / options.temperature for score in scores]
    best = max(scores)
    kept = {token for token, score in enumerate(scores) if math.exp(score - best) >= options.min_p}
    if options.top_k:
        least = sorted((scores[token] for token in kept), reverse=True)[: options.top_k][-1]
        kept = {token for token in kept if scores[token] >= least}
    total = sum(math.exp(scores[token] - best) for token in kept)
    nucleus, mass = set(), 0.0
    for token in sorted(kept, key=lambda token: (-scores[token], token)):
        if nucleus and mass > options.top_p:
            break
        nucleus.add(token)
        mass += math.exp(scores[token] - best) / total
    if options.top_p < 1:
        kept = nucleus
    total = sum(math.exp(scores[token] - best) for token in kept)
    return [math.exp(scores[token] - best) / total if token in kept else 0.0 for token in range(len(scores))]


tokens_of_text = st.lists(st.integers(0, SIZE - 1), max_size=8)
# Multiples of a fraction that is no power of two: sums of probabilities do not meet top_p, nor logits the least one.
some_options = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, SIZE + 2),
    top_p=st.sampled_from([0.1234, 0.5678, 0.9876, 1.0]),
    min_p=st.sampled_from([0.0, 0.0321, 0.4321]),
    frequency_penalty=st.sampled_from([-0.7, 0.0, 1.3]),
    presence_penalty=st.sampled_from([-1.1, 0.0, 0.9]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, SIZE - 1), st.sampled_from([-3.7, 2.9]), max_size=3).map(
        lambda items: tuple(items.items())
    ),
)


@settings(max_examples=300, deadline=None)
@given(some_options, st.integers(0, 2**32), tokens_of_text, tokens_of_text)
def test_the_distribution_is_the_naive_one(options, seed, prompt, answer):
    logits = torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    request = row(options, prompt, answer)
    found = filtered(adjusted(logits, request), options).softmax(dim=-1)
    assert found.tolist() == pytest.approx(naive_probabilities(logits.tolist(), request), abs=1e-12)


def test_the_likeliest_token_always_stays():
    for options in (SamplingOptions(top_p=1e-9), SamplingOptions(min_p=1.0), SamplingOptions(top_k=1, top_p=1e-9)):
        scores = filtered(torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64), options)
        assert scores.isfinite().tolist() == [False, True, False]


def test_noise_depends_on_seed_and_position_alone():
    first = gumbel(1, 5, 100)
    torch.manual_seed(3)
    assert torch.equal(gumbel(1, 5, 100), first)
    assert not any(torch.equal(gumbel(*other, 100), first) for other in ((2, 5), (1, 6), (-1, 5), (15, 1)))


@pytest.mark.parametrize("seed", [None, 11])
def test_samples_follow_the_distribution(seed):
    """The share of each token is within Hoeffding's bound, at a risk of 1e-9 for all tokens together."""
    count, size = 4_000, 5
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    generator = torch.Generator().manual_seed(0)
    options = SamplingOptions(seed=seed, min_p=0.2, temperature=1.5)
    found = Counter(int(sample(logits, row(options, [0] * position), generator)) for position in range(1, count + 1))
    bound = math.sqrt(math.log(2 * size / 1e-9) / (2 * count))
    expected = naive_probabilities(logits.tolist(), row(options))
    assert all(abs(found[token] / count - expected[token]) <= bound for token in range(size))
    assert expected[2] == 0 and found[2] == 0


def test_wrong_options_are_refused():
    for wrong in ({"top_p": 0.0}, {"min_p": 2}, {"temperature": -1}, {"colour": 1}, {"logit_bias": 3}):
        with pytest.raises(ValueError):
            SamplingOptions.of(type("Params", (), {"sampling_options": wrong}))


# -- in engines --------------------------------------------------------------------------------------------------------

OPTIONS = (
    SamplingOptions(seed=1, temperature=1.3),
    SamplingOptions(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5),
    SamplingOptions(seed=2, temperature=1.5, top_k=40, top_p=0.9, presence_penalty=1.0, logit_bias=((7, 4.0),)),
    None,  # megatron's own, beside them
)
PROMPTS = [random_tokens(150 + 37 * number, 128 + number) for number in range(len(OPTIONS))]


def params(options: SamplingOptions | None, count: int) -> Any:
    own = {} if options is None else {"sampling_options": options.as_dict()}
    fields = {"num_tokens_to_generate": count, "top_k": 1, "termination_id": -1}
    return SamplingParams.deserialize(fields | own)


def answers(
    model: Any, mode: str, numbers: list[int], *, blocks: int = 64, cached: bool = True, **fields: Any
) -> list[RequestResult]:
    engine = build_engine(
        model,
        HybridPrefixConfig() if cached else None,
        max_sequence_length=512,
        block_size_tokens=BLOCK,
        async_sched_mode=mode,
        **{"max_requests": 4, "max_tokens": 512}
        | kv_budget(model, blocks, block_tokens=BLOCK, max_requests=4)
        | fields,
    )
    sampling = [params(OPTIONS[number], 30 + 5 * number) for number in numbers]
    return run_batch(engine, [PROMPTS[number] for number in numbers], sampling)


def check(reference: Any, number: int, result: RequestResult) -> None:
    """Each token is the one that the float64 model's logits give, or one within rounding of it."""
    options, tokens = OPTIONS[number], PROMPTS[number] + result.generated
    assert len(result.generated) == 30 + 5 * number
    if options is None:
        return
    logits = reference.logits(tokens[:-1])
    for at, token in enumerate(result.generated):
        request = row(options, PROMPTS[number], result.generated[:at])
        scores = adjusted(logits[len(PROMPTS[number]) - 1 + at], request)
        if not options.is_greedy:
            scores = filtered(scores, options)
            scores = scores + gumbel(options.seed, request.position, len(scores))
        assert scores[token] >= scores.max() - 1e-3, f"token {at} of request {number}"


@pytest.mark.parametrize("mode", MODES)
def test_every_token_is_sampled_with_its_requests_options(tiny, tiny_reference, mode):
    together = answers(tiny, mode, [0, 1, 2, 3])
    for number, result in enumerate(together):
        check(tiny_reference, number, result)
    alone = answers(tiny, mode, [2])[0]
    assert alone.generated == together[2].generated


def test_in_chunks_and_preempted(tiny, tiny_reference):
    """Chunks sample tokens that nobody uses; a preempted request computes its answer so far as a prompt."""
    results = answers(tiny, "async", [0, 1, 2, 3], blocks=15, cached=False, enable_chunked_prefill=True, max_tokens=128)
    assert any(result.recomputed_tokens for result in results)
    for number, result in enumerate(results):
        check(tiny_reference, number, result)


@pytest.mark.parametrize("mode", MODES)
def test_drafts_change_nothing_of_what_is_sampled(tiny_mtp, mode):
    """Noise depends on the position alone, so that drafts that repeat the answer without drafts are right."""
    chosen = [
        SamplingOptions(seed=1, temperature=1.3, top_k=60, top_p=0.9),
        SamplingOptions(seed=2, temperature=1.5, min_p=0.01, logit_bias=((7, 4.0),)),
        SamplingOptions(temperature=0.0, logit_bias=((9, 3.0),)),
        None,
    ]
    plain = EngineHarness(tiny_mtp, async_sched_mode=mode)
    drafting = Drafting(tiny_mtp, 2, lambda number, position: (number + position) % 3, async_sched_mode=mode)

    def ask(served: EngineHarness) -> dict[int, list[int]]:
        for prompt, options in zip(PROMPTS, chosen, strict=True):
            served.add(prompt, 40, **({} if options is None else {"sampling_options": options.as_dict()}))
        served.run()
        return {number: list(request.generated_tokens) for number, request in served.finished.items()}

    answers = ask(plain)
    drafting.truth |= {number: PROMPTS[number - 1] + answer for number, answer in answers.items()}
    assert ask(drafting) == answers
    assert drafting.engine._spec_tokens_accepted_per_pos.sum() > 40


def test_top_k_with_top_p_and_drafts(tiny_mtp):
    """Without a seed: each token is among those that both leave."""
    served = EngineHarness(tiny_mtp, num_speculative_tokens=2)
    options = SamplingOptions(top_k=5, top_p=0.7)
    served.send(PROMPTS[0], count=40, params={"top_k": 5, "top_p": 0.0}, sampling_options=options.as_dict())
    answer = list(served.finished[1].generated_tokens)
    logits = served.reference.logits(PROMPTS[0] + answer[:-1])[len(PROMPTS[0]) - 1 :]
    for token, scores in zip(answer, logits, strict=True):
        assert filtered(scores, options).isfinite()[token]
    assert len(set(answer)) > 1


# -- sampling that does not wait for the device draws what megatron's draws ----------------------------------------------

VOCABULARY = 16
FLAGS = {"no_top_k": False, "no_top_p": False}
# Temperature, top-k and top-p of a request.
some_parameters = st.sampled_from([(1.0, 1, 0.0), (1.0, 0, 0.0), (0.7, 0, 0.9), (1.0, 3, 0.0)])


def step_of(requests):
    """A context in which these requests are active."""
    columns = dict(zip(("temperature", "top_k", "top_p"), map(list, zip(*requests, strict=True)), strict=True))
    dtypes = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32}
    room = [0, 0]  # rows of no request
    tables = {name: torch.tensor(values + room, dtype=dtypes[name]) for name, values in columns.items()}
    return SimpleNamespace(
        total_request_count=len(requests) + 1, paused_request_count=1, active_request_metadata=tables
    )


def samplings():
    return [kind(torch.Generator().manual_seed(5), VOCABULARY) for kind in (TorchSampling, QueuedSampling)]


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(some_parameters, min_size=1, max_size=6),
    rows_each=st.sampled_from([None, 1, 3]),
    gathered=st.booleans(),
    with_output=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_draws_what_megatrons_draws(requests, rows_each, gathered, with_output, seed, platform):
    context, count = step_of(requests), len(requests) * (rows_each or 1)
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count + 4, VOCABULARY, generator=generator)
    fields = dict(FLAGS)
    if gathered:
        fields["gather_indices"] = torch.randperm(count + 4, generator=generator)
    if rows_each is not None:
        fields["token_to_request_index"] = torch.arange(len(requests)).repeat_interleave(rows_each)
    found = []
    for sampling in samplings():
        output = torch.full((count,), -1) if with_output else None
        tokens = [sampling.sample_kernel(logits, count, context, output=output, **fields).clone() for _ in range(3)]
        assert not with_output or torch.equal(output, tokens[-1])
        found.append(torch.stack(tokens))
    assert torch.equal(*found)


@settings(max_examples=50, deadline=None)
@given(requests=st.lists(some_parameters, min_size=1, max_size=4), rows_each=st.sampled_from([None, 2]))
def test_log_probs_are_megatrons(requests, rows_each, platform):
    context, count = step_of(requests), len(requests) * (rows_each or 1)
    logits = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(count))
    of_rows = None if rows_each is None else torch.arange(len(requests)).repeat_interleave(rows_each)
    expected, found = (
        sampling.log_probs_kernel(logits, context, token_to_request_index=of_rows) for sampling in samplings()
    )
    assert torch.equal(expected, found)


def test_engines_have_it(tiny):
    assert type(EngineHarness(tiny).engine.controller._sampling._backend) is QueuedSampling


def test_no_rows_are_no_error(platform):
    """A step of asynchronous scheduling in which a prompt's chunk had no room: megatron's sampling raises."""
    nothing = step_of([(1.0, 1, 0.0)])
    nothing.total_request_count = nothing.paused_request_count
    megatrons, ours = samplings()
    logits = torch.zeros(4, VOCABULARY)
    of_drafts = {"token_to_request_index": torch.arange(0)}
    for fields in (FLAGS, FLAGS | of_drafts):
        assert ours.sample_kernel(logits, 0, nothing, **fields).shape == (0,)
    with pytest.raises((ValueError, RuntimeError)):
        megatrons.sample_kernel(logits, 0, nothing, **FLAGS)
