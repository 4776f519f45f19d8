"""When what a forward computes becomes matchable: once it is launched; or once it is over, if only then it is known to be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.test_prefix_host import push_out, small
from tests.harness.engine_helpers import random_tokens
from tests.harness.lifecycle_helpers import BLOCK, MODES, EngineHarness, raising, tokens

each_mode = pytest.mark.parametrize("mode", MODES)


def noted(served: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens from now on: the launch of a forward, publications, and the bookkeeping after a forward."""
    order: list[str] = []
    model = served.engine.controller.inference_wrapped_model
    for owner, name, label in (
        (model, "run_one_forward_step", "forward"),
        (served.cache, "publish", "publish"),
        (served.context, "update_requests", "bookkeeping"),
    ):
        run = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, run=run, label=label, **more: (order.append(label), run(*args, **more))[1]
        )
    return order


@each_mode
@pytest.mark.parametrize("chunked", [False, True])
def test_a_prompt_and_each_chunk_of_one_is_published_once_its_forward_is_launched(model, mode, chunked, monkeypatch):
    served = EngineHarness(
        model, async_sched_mode=mode, enable_chunked_prefill=chunked, max_tokens=128 if chunked else 1024
    )
    order = noted(served, monkeypatch)
    prompt = tokens(4, 9, seed=1)
    for computed in (4 * BLOCK + 9, 9):
        order.clear()
        before = served.context.prefix_stats().computed_prompt_tokens
        served.send(prompt, count=1)
        chunks = order.count("publish")
        assert order[: 3 * chunks] == chunks * ["forward", "publish", "bookkeeping"]
        assert chunks > 2 if chunked and computed > 9 else chunks == 1
        assert served.context.prefix_stats().computed_prompt_tokens - before == computed
    served.finish()


def test_a_forward_of_a_capture_publishes_nothing(model):
    """A plan may be left of a step that raised before its forward."""
    served = EngineHarness(model)
    prompt = tokens(4, 9, seed=1)
    served.add(prompt)
    served.engine.schedule_waiting_requests()
    assert served.context._step.plans()
    served.context.is_creating_cuda_graphs = True
    served.context.forward_launched(torch.zeros(1, 64, 8))
    assert served.context._step.plans() and not list(served.cache.nodes())
    served.context.is_creating_cuda_graphs = False
    served.run()
    served.check()


@each_mode
@pytest.mark.parametrize("what", ["a load", "a hit that is verified", "log-probs of the prompt"])
def test_what_is_known_after_the_forward_only_is_published_then(model, mode, what, monkeypatch):
    fields: dict[str, dict[str, Any]] = {
        "a load": {},
        "a hit that is verified": {"verify_hits": 1.0, "host_gb": 0.0, "blocks": 24},
        "log-probs of the prompt": {
            "prompt_log_probs_gb": 0.01,
            "host_gb": 0.0,
            "materialize_only_last_token_logits": False,
        },
    }
    served = small(model, async_sched_mode=mode, **fields[what])
    prompt = tokens(4, 9, seed=1)
    cold = served.send(prompt, count=1)
    params = {}
    if what == "a load":
        push_out(served)
    elif what == "log-probs of the prompt":
        params = {"return_log_probs": True, "skip_prompt_log_probs": False}
    order = noted(served, monkeypatch)
    again = served.send(prompt, count=1, params=params)
    assert order[:3] == ["forward", "bookkeeping", "publish"]
    assert again.generated_tokens == cold.generated_tokens
    stats = served.context.prefix_stats()
    assert {
        "a load": stats.tiers["host"].loads,
        "a hit that is verified": stats.verified_hits,
        "log-probs of the prompt": stats.scores_bytes_used,
    }[what]
    served.finish()


@each_mode
def test_nothing_is_left_of_a_step_that_fails_after_its_publication(model, mode, monkeypatch):
    served = EngineHarness(model, async_sched_mode=mode)
    prompt = tokens(4, 0, seed=1) + random_tokens(9, seed=2)
    controller = served.engine.controller
    name = "_dynamic_step_sample_logits" if mode == "legacy" else "_run_async_sched_sample"
    with monkeypatch.context() as patch:
        patch.setattr(controller, name, raising(RuntimeError("injected")))
        served.add(prompt)
        with pytest.raises(RuntimeError, match="injected"):
            served.step(2)
    assert served.cache.match(served.cache.chain(prompt)).resume_tokens == 4 * BLOCK, "it was published"
    stats = served.context.prefix_stats()
    assert stats.fallbacks == {"forward_failed": 1}
    with pytest.raises(RuntimeError, match=r"call engine\.reset"):
        served.step()
    served.context.reset(preserve_prefix_cache=True)
    assert served.cache.match(served.cache.chain(prompt)).resume_tokens == 0
    served.engine.reset()
    served.cache.check_integrity()
    assert served.send(prompt).num_cached_tokens == 0
    assert served.send(prompt).num_cached_tokens == 4 * BLOCK
    served.finish()
