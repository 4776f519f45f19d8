"""What tests of every shared tier look at: the folder, and Mooncake Store."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.engine_helpers import LOG_PROB_NOISE
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness
from tests.harness.limits import HANG_S


def written(served: EngineHarness) -> EngineHarness:
    """Waits until the tier has everything."""
    assert served.context.host_moves.drain(HANG_S)
    return served


def stats_of(served: EngineHarness) -> Any:
    """The tier's figures."""
    return served.context.prefix_stats().tiers["shared"]


def check_ranks(ranks: list[dict[str, Any]]) -> None:
    """What ranks find whose last one reads late, then misses states, then has everything."""
    expected = {
        "late": ([0, 0], {"tier_load_late": 2, "host_load_given_up": 2}),
        "missing": ([0, 0], {"tier_load_missing": 2, "host_load_given_up": 2}),
        "hit": ([3 * BLOCK] * 2, {}),
    }
    for found in ranks:
        assert found["decisions"] == ranks[0]["decisions"]
        for name, (cached, fallbacks) in expected.items():
            assert [answer["cached_tokens"] for answer in found[name]["answers"]] == cached, name
            assert found[name]["fallbacks"] == fallbacks, name
            for answer, right in zip(found[name]["answers"], ranks[0]["off"]["answers"], strict=True):
                assert answer["tokens"] == right["tokens"]
                assert answer["log_probs"] == pytest.approx(right["log_probs"], rel=0, abs=LOG_PROB_NOISE)
