"""`engine.explain`: what a request's parameters change, that it then gets what was said, and that no call changes anything."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.engine_helpers import greedy
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, tokens
from tests.harness.whole_state import whole_state


def explain(
    served: EngineHarness, prompt: Any, count: int = 4, params: dict[str, Any] | None = None, **cache: Any
) -> Any:
    """Explains a request, and checks that the engine knows no more than before."""
    sampling = greedy(count, **(params or {}))
    sampling.add_attributes(cache)
    context, engine = served.context, served.engine
    roots = (served.cache, context._requests, context.scored, context._scores, context.moves, engine.requests)
    before = whole_state(*roots), context.prefix_stats(), vars(sampling).copy()
    found = engine.explain(prompt, sampling)
    assert (whole_state(*roots), context.prefix_stats(), vars(sampling)) == before
    return found


def test_what_a_request_asks_for(tiny):
    served = EngineHarness(tiny, materialize_only_last_token_logits=False, prompt_log_probs_gb=0.01)
    prompt = tokens(2, 20, seed=1)
    served.send(prompt)
    reused = explain(served, prompt)
    assert (reused.resume_tokens, reused.tier, reused.epoch) == (2 * BLOCK, "device", 0)
    assert reused.refused_by is None and explain(served, prompt, cache_read=False).refused_by == "cache_read"
    assert reused.writes and not explain(served, prompt, cache_write=False).writes
    for name in ("cache_salt", "cache_adapter"):
        assert explain(served, prompt, **{name: "a"}).reason == "other_salt"
    wants_prompt = {"skip_prompt_log_probs": False, "top_n_logprobs": 2}
    without = explain(served, prompt, params=wants_prompt)
    assert without.reason == "not_read" and without.scored_tokens == () and without.state_tokens["device"]
    served.send(prompt, params=wants_prompt)
    assert explain(served, prompt, params=wants_prompt).resume_tokens == 2 * BLOCK
    served.engine.invalidate()
    gone = explain(served, prompt)
    assert not gone.resume_tokens and (gone.epoch, gone.reason) == (1, "epoch")


def test_breakpoints_and_a_running_request(tiny):
    """The prompt runs: its blocks are published once its forward is launched."""
    served = EngineHarness(tiny)
    prompt = tokens(3, 5, seed=1)
    assert explain(served, prompt, cache_breakpoints=(0, -5, BLOCK + 3, 10**12)).kept_tokens == (BLOCK, 3 * BLOCK)
    served.add(prompt)
    assert explain(served, prompt).kv_tokens == {"device": 0}, "it waits"
    served.step()
    assert explain(served, prompt).resume_tokens == 3 * BLOCK
    served.run()


def test_settings_that_reuse_nothing(tiny):
    prompt = tokens(2, 20, seed=1)
    no_scores = EngineHarness(tiny, materialize_only_last_token_logits=False, prompt_log_probs_gb=0)
    asked = explain(no_scores, prompt, params={"skip_prompt_log_probs": False})
    assert asked.refused_by == "prompt_log_probs_gb"
    assert explain(EngineHarness(tiny, verify_hits=1.0), prompt).refused_by == "verify_hits"
    assert explain(EngineHarness(tiny, slots=0), prompt).most_states == 0
    with pytest.raises(ValueError, match=r"no prefix cache to explain: build it with"):
        EngineHarness(tiny, slots=None).engine.explain(prompt)


@pytest.mark.parametrize(
    ("prompt", "fields", "problem"), [([], {}, "empty"), ([1], {"cache_breakpoints": 5}, "cache_breakpoints=5")]
)
def test_a_wrong_request_is_named(tiny, prompt, fields, problem):
    with pytest.raises(ValueError, match=problem):
        explain(EngineHarness(tiny), prompt, **fields)
