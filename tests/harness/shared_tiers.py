"""The tiers that processes share, in engines: which faults there are, and what ranks find."""

from __future__ import annotations

from typing import Any

from tests.core.tier_kinds import Folder, Mooncake
from tests.harness.engine_helpers import assert_same
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness
from tests.harness.limits import HANG_S

STORES = {"folder": Folder, "mooncake": Mooncake}
# By store and fault: the tier's reason, and the cache's.
FAULTS = {
    ("folder", "kv bit"): ("wrong", "host_load_failed"),
    ("folder", "state bit"): ("wrong", "host_load_failed"),
    ("folder", "kv truncated"): ("not_valid", "tier_load_missing"),
    ("folder", "state truncated"): ("not_valid", "tier_load_missing"),
    ("folder", "kv gone"): ("gone", "tier_load_missing"),
    ("folder", "state gone"): ("gone", "tier_load_missing"),
    ("folder", "all gone"): ("gone", "tier_load_missing"),
    ("folder", "unreadable"): ("read_EIO", "tier_load_missing"),
    ("mooncake", "kv bit"): ("wrong", "host_load_failed"),
    ("mooncake", "state bit"): ("wrong", "host_load_failed"),
    ("mooncake", "kv truncated"): ("not_valid", "tier_load_missing"),
    ("mooncake", "state gone"): ("gone", "tier_load_missing"),
    ("mooncake", "transfer"): ("read_transfer_failed", "tier_load_missing"),
}


def written(served: EngineHarness) -> EngineHarness:
    """Waits until the tier has everything."""
    assert served.context.host_moves.drain(HANG_S)
    return served


def stats_of(served: EngineHarness) -> Any:
    """The tier's figures."""
    return served.context.prefix_stats().tiers["shared"]


def tier_of(served: EngineHarness) -> Any:
    """The tier."""
    return served.cache._store.host.behind.tier


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
            assert_same(found[name]["answers"], ranks[0]["off"]["answers"])


def check_mooncake_ranks(ranks: list[dict[str, Any]]) -> None:
    """What ``workers/mooncake_tier.py`` should find."""
    check_ranks(ranks)
    assert set(ranks[-1]["missing"]["faults"]) == {"gone"} and ranks[0]["missing"]["faults"] == {}
