"""A request that computes something that is not finite fails alone: others' answers, and what is cached, are as if it had not come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.layers.mamba2 import HybridPrefixMambaMixer
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.upstream.mixer import MambaMixer
from tests.harness.drafts import Drafting
from tests.harness.lifecycle_helpers import BLOCK, MODES, EngineHarness, known_answer, tokens
from tests.harness.limits import HANG_S
from tests.harness.named_models import named
from tests.harness.shared_tiers import Folder

NAN = float("nan")
each_mode = pytest.mark.parametrize("mode", MODES)
PRESETS = ("tiny", "tiny-gdn", "tiny-nemotron-3", "tiny-gdp")
BAD = 66  # a token whose embedding is not finite, where `embedding` says so
ANSWER = 6


@contextmanager
def embedding(model: Any, token: int, value: float) -> Iterator[None]:
    """Inside the block the token's embedding has this value."""
    weight = model.embedding.word_embeddings.weight.data
    before = weight[token].clone()
    weight[token] = value
    try:
        yield
    finally:
        weight[token] = before


def without_bad(count: int, seed: int) -> list[int]:
    return [token if token != BAD else BAD + 1 for token in tokens(0, count, seed=seed)]


@pytest.fixture(scope="module", params=PRESETS)
def any_model(request: pytest.FixtureRequest, platform: Any) -> Any:
    return build_hybrid_model(named(request.param), seed=0)


def failed(served: EngineHarness, number: int) -> str:
    """Why a finished request has failed."""
    request = served.finished[number]
    assert request.failed() and not request.generated_tokens
    return str([event.payload for event in request.events if isinstance(event.payload, Exception)])


@each_mode
@pytest.mark.parametrize("gap", [1, 5, BLOCK, 130])
@pytest.mark.parametrize("value", [NAN, float("inf"), 3e38])
def test_a_bad_token_does_not_spread_to_who_shares_the_prefix(any_model, mode, gap, value):
    """Gap: tokens between the last shared one and the bad one, and after it."""
    if value == 3e38 and mode == "async":
        pytest.skip("the value makes no difference to the scheduling")
    system = without_bad(2 * BLOCK + 3, seed=1)
    plain = EngineHarness(any_model, slots=None)
    served = EngineHarness(any_model, async_sched_mode=mode)
    with embedding(any_model, BAD, value):
        right = plain.send([*system, 65, 67], count=ANSWER).generated_tokens
        spoilt = [*system, *without_bad(gap, seed=2), BAD, *without_bad(gap, seed=3)]
        for _ in range(2):  # what it leaves is no prefix of its own either
            number = served.add(spoilt, ANSWER)
            served.run()
            if value == 3e38 and not served.finished[number].failed():
                break  # a norm makes it small
            assert "not finite" in failed(served, number)
            assert max(node.depth_blocks for node in served.cache.nodes()) * BLOCK <= spoilt.index(BAD)
        after = served.send([*system, 65, 67], count=ANSWER)
        again = served.send([*system, 65, 67], count=ANSWER)
        assert list(after.generated_tokens) == list(again.generated_tokens) == list(right)
        assert again.num_cached_tokens == 2 * BLOCK
    served.check_drained()


def logits_of(served: EngineHarness, prompt: list[int]) -> torch.Tensor:
    """Of all tokens of a prompt, as the forward left them."""
    controller, found = served.engine.controller, []
    launched = controller.forward_launched
    with pytest.MonkeyPatch.context() as patched:
        noted = lambda: (found.append(controller.step_logits.clone()), launched())  # noqa: E731
        patched.setattr(controller, "forward_launched", noted)
        served.send(prompt, count=1, cache_read=False)
    return found[0][0, : len(prompt)]


@pytest.mark.parametrize("value", [NAN, float("inf"), 1e38])
def test_earlier_tokens_keep_their_bits(any_model, value):
    served = EngineHarness(any_model, materialize_only_last_token_logits=False)
    for place in (0, BLOCK - 1, BLOCK, BLOCK + 10, 2 * BLOCK + 4):
        prompt = without_bad(2 * BLOCK + 5, seed=1)
        prompt[place] = BAD
        right = logits_of(served, prompt)
        assert right.isfinite().all()
        with embedding(any_model, BAD, value):
            found = logits_of(served, prompt)
        assert torch.equal(found[:place], right[:place])


@pytest.mark.parametrize("columns", [slice(-1, None), slice(200, 201)])
def test_inputs_of_one_recurrent_layer(model, columns, monkeypatch):
    """What no key or value shows in that layer: one step size, one channel."""
    served, prefill = EngineHarness(model), HybridPrefixMambaMixer.prefill
    last = [module for module in model.modules() if isinstance(module, MambaMixer)][-1]
    spoils = True

    def spoilt(self: Any, zxBCdt: torch.Tensor, *args: Any) -> torch.Tensor:
        if spoils and self is last:
            zxBCdt = zxBCdt.clone()
            zxBCdt[BLOCK + 3, :, columns] = NAN
        return prefill(self, zxBCdt, *args)

    monkeypatch.setattr(HybridPrefixMambaMixer, "prefill", spoilt)
    number = served.add(tokens(2, 9, seed=1), 1)
    served.run()
    failed(served, number)
    spoils = False
    served.send(tokens(2, 9, seed=1), count=ANSWER)
    served.check(served.next_id)


@each_mode
@pytest.mark.parametrize("coalesce", [False, True])
def test_requests_of_one_step(any_model, mode, coalesce, monkeypatch):
    """They share blocks that the bad one publishes: those that use them start over."""
    system = without_bad(2 * BLOCK, seed=1)
    plain = EngineHarness(any_model, slots=None)
    prompts = [[*system, 7, BAD, 9], [*system, 65, 67], [*system, 11], without_bad(40, seed=4)]
    right = [list(plain.send(prompt, count=ANSWER).generated_tokens) for prompt in prompts[1:]]
    least = BLOCK if coalesce else 4 * BLOCK
    monkeypatch.setattr("megatron_hybrid_prefix.mcore.engine.coalesce._MIN_SAVED_TOKENS", least)
    served = EngineHarness(any_model, async_sched_mode=mode)
    with embedding(any_model, BAD, NAN):
        numbers = [served.add(prompt, ANSWER) for prompt in prompts]
        served.run()
        failed(served, numbers[0])
        assert [list(served.finished[number].generated_tokens) for number in numbers[1:]] == right
        assert served.context.prefix_stats().fallbacks["not_finite"] == 1
        assert served.send(prompts[1], count=ANSWER).num_cached_tokens == 2 * BLOCK
    served.check_drained()


@each_mode
def test_a_chunk_of_a_prompt(any_model, mode):
    """In the middle chunk of three, and between two of its chunks others are admitted."""
    sizes = {"enable_chunked_prefill": True, "max_tokens": 2 * BLOCK, "async_sched_mode": mode}
    served, plain = EngineHarness(any_model, **sizes), EngineHarness(any_model, slots=None)
    system = without_bad(3 * BLOCK + 20, seed=1)
    right = list(plain.send([*system, 65], count=ANSWER).generated_tokens)
    with embedding(any_model, BAD, NAN):
        bad = served.add([*system[: 3 * BLOCK], BAD, *without_bad(2 * BLOCK, seed=5)], ANSWER)
        good = served.add([*system, 65], ANSWER)
        served.run()
        failed(served, bad)
        assert list(served.finished[good].generated_tokens) == right
        assert list(served.send([*system, 65], count=ANSWER).generated_tokens) == right
    served.check_drained()


@each_mode
@pytest.mark.parametrize("at", [0, 3])
def test_a_token_of_an_answer(any_model, mode, at):
    """The embedding of a token that the model chooses: the answer ends there, those of other requests go on."""
    plain = EngineHarness(any_model, slots=None)
    prompts = [tokens(1, 30, seed=seed) for seed in range(4)]
    answers = [list(plain.send(prompt, count=ANSWER).generated_tokens) for prompt in prompts]
    bad = answers[0][at]
    served = EngineHarness(any_model, async_sched_mode=mode)
    with embedding(any_model, bad, NAN):
        numbers = [served.add(prompt, ANSWER) for prompt in prompts]
        served.run()
        for number, prompt, answer in zip(numbers, prompts, answers, strict=True):
            request = served.finished[number]
            if bad in prompt or bad in answer[:-1]:
                assert request.failed()
                if bad not in prompt:
                    assert list(request.generated_tokens) == answer[: answer.index(bad) + 1]
            else:
                assert list(request.generated_tokens) == answer and request.status.name == "COMPLETED"
    assert list(served.send(prompts[0], count=ANSWER).generated_tokens) == answers[0]
    served.check_drained()


@each_mode
@pytest.mark.parametrize("params", [{"top_k": 0, "temperature": 1.0}, {"top_k": 0, "top_p": 0.9}, {}])
def test_sampled_rows(model, mode, params):
    """PyTorch raises where it is to sample from NaN; on a GPU that ends the process."""
    served = EngineHarness(model, async_sched_mode=mode)
    with embedding(model, BAD, NAN):
        numbers = [
            served.add([*without_bad(20, seed=seed), BAD][: 20 + (seed == 1)], ANSWER, params=params)
            for seed in range(4)
        ]
        seeded = served.add([*without_bad(20, seed=7), BAD], ANSWER, params=params | {"top_k": 0}, seed=3)
        served.run()
    failed(served, numbers[1])
    failed(served, seeded)
    assert all(len(served.finished[number].generated_tokens) == ANSWER for number in (numbers[0], *numbers[2:]))
    served.check_drained()


@each_mode
def test_log_probs_of_others_are_numbers(model, mode):
    served = EngineHarness(model, async_sched_mode=mode, materialize_only_last_token_logits=False)
    with embedding(model, BAD, NAN):
        params = {"skip_prompt_log_probs": False}
        numbers = [served.add([*without_bad(70, seed=9), last, 5], ANSWER, params=params) for last in (BAD, 64)]
        served.run()
    failed(served, numbers[0])
    right = served.finished[numbers[1]]
    assert torch.tensor([*right.prompt_log_probs, *right.generated_log_probs]).isfinite().all()
    assert len(right.prompt_log_probs) == 71 and len(right.generated_log_probs) == ANSWER
    served.check_drained()


def test_nothing_reaches_a_tier_behind_the_host(tmp_path, model, monkeypatch):
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "a secret for the tests")
    folder = Folder(tmp_path / "cache", monkeypatch)
    served = EngineHarness(model, shared=folder.url(), host_gb=0.02, max_requests=2)
    system = without_bad(4 * BLOCK, seed=1)
    with embedding(model, BAD, NAN):
        number = served.add([BAD, *system, *without_bad(2 * BLOCK, seed=2)], 1)
        served.run()
        failed(served, number)
        assert served.context.host_moves.drain(HANG_S) and not folder.entries()
        served.send([*system, 5], count=1)
    served.send(tokens(1, 5, seed=8), count=1)
    assert served.context.host_moves.drain(HANG_S) and folder.entries()


@each_mode
@pytest.mark.parametrize("at", [2, 5])
def test_drafts(tiny_mtp, mode, at):
    """A draft that is not accepted may be anything; one that is ends the answer."""
    count, prompt = 12, without_bad(BLOCK - 4, seed=3)
    answer = known_answer(EngineHarness(tiny_mtp, slots=None), prompt, count)
    rejected = next(token for token in (answer[at] + 1, answer[at + 1] + 1) if token not in {*answer, *prompt})
    for accepted, bad in ((0, rejected), (2, answer[at])):
        assert bad not in prompt
        served = Drafting(tiny_mtp, 2, lambda *_, accepted=accepted: accepted, async_sched_mode=mode)
        number = served.ask(prompt, count)
        with embedding(tiny_mtp, bad, NAN):
            served.run()
        request = served.finished[number]
        if bad == rejected:
            assert list(request.generated_tokens) == answer
        else:
            first = answer.index(bad)
            assert request.failed() and list(request.generated_tokens) == answer[: len(request.generated_tokens)]
            assert first - 2 <= len(request.generated_tokens) <= first + 1
