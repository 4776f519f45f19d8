"""The second request with a prefix already resumes from it, with a breakpoint of the caller and without.

(Which states are kept: tests/core/test_retention.py.)
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.engine_helpers import assert_matches
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, tokens
from tests.harness.mutants import MUTANTS, mutated_resume


def computed(served: EngineHarness, prompt: list[int], **attributes: Any) -> int:
    """Sends a prompt. Returns how many of its tokens were computed."""
    before = served.cache.stats().computed_prompt_tokens
    request = served.send(prompt, **attributes)
    count = served.cache.stats().computed_prompt_tokens - before
    assert count == len(prompt) - request.num_cached_tokens
    return count


# -- the second and the third request ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_states_would_be_noticed(model, mutant):
    served = EngineHarness(model, retention_interval_tokens=None, max_sequence_length=2048, max_tokens=2048)
    shared = tokens(8, 20, seed=1)
    served.send(tokens(13, 1, seed=99))  # a state of another depth, for the mutant
    served.send(shared + tokens(0, 60, seed=2), cache_breakpoints=[6 * BLOCK])
    with mutated_resume(served.engine, mutant):
        hits = [served.send(shared + tokens(0, 50, seed=3)), served.send(shared[: 6 * BLOCK] + tokens(0, 50, seed=4))]
    assert [request.num_cached_tokens for request in hits] == [8 * BLOCK, 6 * BLOCK]
    for request in hits:
        with pytest.raises(AssertionError):
            assert_matches(served.reference, request)


# -- what is said about requests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("harmless", [[], (), [0, -5, 10**12], [BLOCK, BLOCK, 1, BLOCK], range(0, 400, 10)], ids=str)
def test_breakpoints_that_mean_little_are_harmless(model, harmless):
    served = EngineHarness(model)
    assert computed(served, tokens(3, 20, seed=1), cache_breakpoints=harmless) == 3 * BLOCK + 20
    assert computed(served, tokens(3, 20, seed=1), cache_breakpoints=harmless) == 20
    served.finish()
