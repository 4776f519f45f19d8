"""What the cache did, in numbers that only grow, and how full it is."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_hybrid_prefix.policy.boundaries import Reason

# Fields that say something of one rank's memory; ranks that run the same requests have all others alike.
OWN_STATS = (
    "bytes_budget",
    "host_bytes_budget",
    "host_bytes_loaded",
    "host_bytes_stored",
    "host_seconds",
    "host_seconds_waited",
)


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
        host_loads: States and KV blocks loaded from the host.
        host_stores: States and KV blocks stored on the host.
        host_evictions: States and KV blocks that went from the host for others.
        host_full: States and KV blocks that found no room on the host.
        host_preempted: Preempted requests whose state went to the host, to go on from.
        host_bytes_loaded: Bytes of the loads, on this rank.
        host_bytes_stored: Bytes of the stores, on this rank.
        host_seconds: Time that the moves took, on this rank.
        host_seconds_waited: Part of it in which the model waited for them; the rest was hidden.
        host_kv_blocks: KV blocks on the host now.
        host_states: States on the host now.
        host_bytes_budget: Bytes of the arena on this rank.
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
    checkpoints_by_reason: dict[str, int] = field(default_factory=lambda: {reason.name.lower(): 0 for reason in Reason})
    evictions: int = 0
    kv_evictions: int = 0
    verified_hits: int = 0
    verify_mismatches: int = 0
    host_loads: int = 0
    host_stores: int = 0
    host_evictions: int = 0
    host_full: int = 0
    host_preempted: int = 0
    host_bytes_loaded: int = 0
    host_bytes_stored: int = 0
    host_seconds: float = 0.0
    host_seconds_waited: float = 0.0
    host_kv_blocks: int = 0
    host_states: int = 0
    host_bytes_budget: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    slots_total: int = 0
    slots_used: int = 0
    bytes_budget: int = 0

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return asdict(self)

    def copy(self) -> PrefixStats:
        """A snapshot that later counting does not change."""
        return deepcopy(self)

    def count_fallback(self, reason: str) -> None:
        """One more fallback for ``reason``."""
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
