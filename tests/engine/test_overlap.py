"""Asynchronous scheduling after a prefill: its first decode is launched before its first token is on the host."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

from megatron_hybrid_prefix.mcore.engine.engine import HybridPrefixEngine
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, raising, tokens


def order_of(served: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens from now on: launches of forwards, and tokens that arrive on the host."""
    order: list[str] = []
    for name, label in (("forward_launched", "forward"), ("tokens_on_host", "tokens")):
        run = getattr(served.engine.controller, name)
        monkeypatch.setattr(
            served.engine.controller, name, lambda *args, run=run, label=label: (order.append(label), run(*args))[1]
        )
    return order


@pytest.mark.parametrize("slots", [None, 32])
def test_the_first_decode_does_not_wait_for_the_first_token(model, slots, monkeypatch):
    served = EngineHarness(model, async_sched_mode="async", slots=slots)
    order, prompts = order_of(served, monkeypatch), [tokens(2, 9, seed=seed) for seed in (1, 2)]
    for _ in range(2):  # the second time hits
        order.clear()
        served.send(*prompts, count=3)
        assert order == ["forward", "forward", "tokens", "forward", "tokens", "tokens"]
    served.check()
    served.finish()


@pytest.mark.parametrize(
    ("what", "fields", "sent"),
    [
        ("no request goes on", {}, {"count": 1}),
        (
            "log-probs of the prompt",
            {"materialize_only_last_token_logits": False},
            {"params": {"return_log_probs": True}},
        ),
        ("a hit is compared with a miss", {"verify_hits": 1.0}, {}),
    ],
)
def test_what_is_known_once_a_prefill_is_over_comes_before_the_next_forward(model, what, fields, sent, monkeypatch):
    served = EngineHarness(model, async_sched_mode="async", **fields)
    served.send(tokens(2, 9, seed=1))
    order = order_of(served, monkeypatch)
    served.add(tokens(2, 9, seed=1), **({"count": 3} | sent))
    served.run()
    assert order[:2] == ["forward", "tokens"]
    served.check()


def test_a_long_answer_is_keyed_and_kept_as_with_legacy_scheduling(model):
    """The first decode begins where the prompt ends, which may be the end of a block."""
    found: list[Any] = []
    for mode in ("legacy", "async"):
        served = EngineHarness(model, async_sched_mode=mode)
        for tail in (0, 1, BLOCK - 1):
            answer = served.send(tokens(2, tail, seed=tail), count=2 * BLOCK + 5)
            turn = [*tokens(2, tail, seed=tail), *answer.generated_tokens, *tokens(0, 20, seed=3)]
            found.append((tail, list(answer.generated_tokens), served.send(turn).num_cached_tokens))
        served.check()
        served.finish()
    assert found[:3] == found[3:]


def test_a_plan_is_counted_whose_step_fails_once_the_next_forward_is_launched(model, monkeypatch):
    served = EngineHarness(model, async_sched_mode="async")
    served.add(tokens(2, 9, seed=2))
    served.step()
    with monkeypatch.context() as patched:
        patched.setattr(served.engine.controller, "_synchronize_async_sched_event", raising(RuntimeError("a test")))
        with pytest.raises(RuntimeError, match="a test"):
            served.step()
    served.engine.reset()
    assert served.context.prefix_stats().fallbacks == {"forward_failed": 1}
    number = served.send(tokens(1, 5, seed=7)).request_id
    served.check(number)
    served.check_drained()


@pytest.mark.parametrize("slots", [None, 32])
def test_a_request_for_no_token_that_fills_the_longest_sequence(model, slots):
    """Its row has no room for a decode."""
    served = EngineHarness(model, async_sched_mode="async", slots=slots, max_tokens=2048)
    served.add(tokens(16, 0, seed=2), count=0)
    number = served.add(tokens(1, 9, seed=1), count=12)
    served.run()
    served.check(number)


@pytest.mark.parametrize("slots", [None, 32])
def test_megatrons_own_controller_overlaps_as_megatron_does(model, slots):
    served = EngineHarness(model, async_sched_mode="async", slots=slots)
    own = served.engine.controller
    controller = TextGenerationController(own.inference_wrapped_model, own.tokenizer)
    served.engine = HybridPrefixEngine(controller, served.context)
    first = served.add(tokens(1, 5, seed=7), count=40)
    served.step(3)
    second = served.add(tokens(1, 5, seed=8), count=2)
    served.step(5)
    assert second in served.finished
    served.run()
    served.check(first, second)


def test_no_decode_comes_between_prompts_that_fill_a_step(model, monkeypatch):
    served = EngineHarness(model, async_sched_mode="async", max_requests=8)
    launched: list[int] = []
    run = served.engine.controller.forward_launched
    monkeypatch.setattr(
        served.engine.controller,
        "forward_launched",
        lambda: (launched.append(served.context.num_prefill_requests), run())[1],
    )
    for seed in range(4):
        served.add(tokens(14, 0, seed=seed), count=6)
    served.run()
    assert launched[:4] == [1] * 4
    served.check()
