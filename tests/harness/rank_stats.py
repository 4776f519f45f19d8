"""Which statistics are equal on ranks that run the same requests."""

from __future__ import annotations

from typing import Any

# Of a tier: bytes and seconds, and what one rank's folder gave up.
OWN_TIER_STATS = ("bytes_budget", "bytes_loaded", "bytes_stored", "bytes_used", "faults", "seconds", "seconds_waited")


def alike_on_ranks(stats: dict[str, Any]) -> dict[str, Any]:
    """``prefix_stats().as_dict()`` without what depends on one rank's memory and time."""
    tiers = {
        name: {figure: value for figure, value in figures.items() if figure not in OWN_TIER_STATS}
        for name, figures in stats["tiers"].items()
    }
    return {name: value for name, value in stats.items() if name != "bytes_budget"} | {"tiers": tiers}
