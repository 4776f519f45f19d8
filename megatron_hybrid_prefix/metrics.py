"""What the cache did, in numbers that only grow, and how full it is."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron_hybrid_prefix.policy.boundaries import CheckpointReason


class ReasonCounts(dict[str, int]):
    """Counts by name of a `CheckpointReason`; the former name ``replay`` still reads ``repeat``, with a warning."""

    def __missing__(self, name: str) -> int:
        if name != "replay":
            raise KeyError(name)
        warnings.warn("checkpoints_by_reason['replay'] is now called 'repeat'", FutureWarning, stacklevel=2)
        return self["repeat"]


# Fields that say something of one rank's memory; ranks that run the same requests have all others alike.
OWN_STATS = (
    "bytes_budget",
    "host_bytes_budget",
    "host_bytes_loaded",
    "host_bytes_stored",
    "host_seconds",
    "host_seconds_waited",
    "tiers",  # with the bytes and seconds of this rank
)


@dataclass(slots=True, kw_only=True)
class TierStats:
    """What went in and out of a tier below the device, in entries: KV blocks and states.

    Attributes:
        loads: Moved one tier up, because a prompt needed them.
        stores: Moved here from the tier above; for the tier behind the host, offered to it.
        evictions: Went from here for others.
        full: Found no room here; for the tier behind the host, refused by it.
        preempted: Preempted requests that were swapped out to here.
        failed: Came back wrong, or not at all, and were dropped.
        bytes_loaded: Bytes of the loads, on this rank.
        bytes_stored: Bytes of the stores, on this rank.
        seconds: Time that the moves took, on this rank.
        seconds_waited: Part of it in which the model, or the CPU, waited for them; the rest was hidden.
        kv_blocks: KV blocks here now; 0 where the tier does not say.
        states: States here now; 0 where the tier does not say.
        bytes_budget: Bytes that it may take on this rank; 0 where it does not say.
    """

    loads: int = 0
    stores: int = 0
    evictions: int = 0
    full: int = 0
    preempted: int = 0
    failed: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    seconds: float = 0.0
    seconds_waited: float = 0.0
    kv_blocks: int = 0
    states: int = 0
    bytes_budget: int = 0


# Figures of the host tier that have a name of their own, too: ``host_loads`` is ``tiers["host"].loads``.
_HOST_FIGURES = tuple(item.name for item in fields(TierStats) if item.name != "failed")


@dataclass(slots=True, kw_only=True)
class PrefixStats:
    """Counters since the start, and the present use of the slots.

    Attributes:
        prompt_tokens: Tokens of all admitted prompts; one that is preempted and admitted again counts again.
        computed_prompt_tokens: Prompt tokens that a finished forward computed.
        reused_tokens: Prompt tokens skipped: the sum of the next two.
        reused_tokens_device: Skipped by a state on the device.
        reused_tokens_host: Skipped by a state, or by KV, loaded from the host, those before it on the device included.
        lost_tokens_no_state: Tokens whose KV matched and that were computed again because no state was kept there.
        checkpoints_published: States that became matchable.
        checkpoints_skipped: States wanted and not kept because no slot could be had.
        checkpoints_by_reason: States published, by why they were wanted.
        evictions: States evicted, to make room or because their KV went.
        kv_evictions: KV blocks evicted.
        verified_hits: Hits that were computed instead, and compared with what the cache holds (``verify_hits``).
        verify_mismatches: Those where they differed; 0 unless the cache is wrong.
        tiers: By name, "host" and the tier behind it. The host's figures can be read as ``host_loads``, ``host_stores`` and
            so on, too.
        fallbacks: Times that tokens were computed, or their caching given up, where the cache had promised more:
            ``stale_match`` (evicted between match and admission), ``forward_failed``, ``epoch_changed``, ``released`` and
            ``reset`` (while a forward was planned), ``host_load_failed`` (what was loaded was not what had been stored, or the
            copy failed), ``host_load_given_up`` (a request gave up a load that it waited for).
        slots_total: Checkpoint slots.
        slots_used: Those in use now, being written included.
        bytes_budget: Bytes of all checkpoint slots.
    """

    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    reused_tokens: int = 0
    reused_tokens_device: int = 0
    reused_tokens_host: int = 0
    lost_tokens_no_state: int = 0
    checkpoints_published: int = 0
    checkpoints_skipped: int = 0
    checkpoints_by_reason: ReasonCounts = field(
        default_factory=lambda: ReasonCounts({reason.name.lower(): 0 for reason in CheckpointReason})
    )
    evictions: int = 0
    kv_evictions: int = 0
    verified_hits: int = 0
    verify_mismatches: int = 0
    tiers: dict[str, TierStats] = field(default_factory=lambda: {"host": TierStats()})
    fallbacks: dict[str, int] = field(default_factory=dict)
    slots_total: int = 0
    slots_used: int = 0
    bytes_budget: int = 0

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON; figures of the host also as ``host_...``."""
        host = {f"host_{name}": getattr(self.tiers["host"], name) for name in _HOST_FIGURES}
        return asdict(self) | host

    def __getattr__(self, name: str) -> Any:
        if name.startswith("host_") and name[5:] in _HOST_FIGURES:
            return getattr(self.tiers["host"], name[5:])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def copy(self) -> PrefixStats:
        """A snapshot that later counting does not change."""
        return deepcopy(self)

    def count_fallback(self, reason: str) -> None:
        """One more fallback for ``reason``."""
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
