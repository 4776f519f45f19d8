"""The tiers that processes share, in engines: which faults there are, and what ranks find."""

from __future__ import annotations

from typing import Any

from tests.core.tier_kinds import Folder, Mooncake
from tests.harness.lifecycle_helpers import EngineHarness
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
    return served.cache._device.host.behind.tier
