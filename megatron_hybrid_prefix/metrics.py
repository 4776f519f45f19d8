"""What the cache did, in numbers that only grow, and how full it is."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_hybrid_prefix.policy.boundaries import Reason


@dataclass(slots=True, kw_only=True)
class PrefixStats:
    """Counters since the start, and the present use of the slots.

    Attributes:
        prompt_tokens: Tokens of all admitted prompts; one that is preempted and admitted again counts again.
        computed_prompt_tokens: Prompt tokens that a finished forward computed.
        reused_tokens: Prompt tokens skipped: the sum of the next two.
        reused_tokens_device: Skipped by a state on the device.
        reused_tokens_host: Skipped by a state loaded from the host (0: there is no host tier).
        lost_tokens_no_state: Tokens whose KV matched and that were computed again because no state was kept there.
        checkpoints_published: States that became matchable.
        checkpoints_skipped: States wanted and not kept because no slot could be had.
        checkpoints_by_reason: States published, by why they were wanted.
        evictions: States evicted, to make room or because their KV went.
        kv_evictions: KV blocks evicted.
        verified_hits: Hits that were computed instead, and compared with what the cache holds (``verify_hits``).
        verify_mismatches: Those where they differed; 0 unless the cache is wrong.
        host_loads: States and KV blocks loaded from the host (0).
        host_stores: States and KV blocks stored on the host (0).
        fallbacks: Times that tokens were computed, or their caching given up, where the cache had promised more:
            ``stale_match`` (evicted between match and admission), ``forward_failed``, ``epoch_changed``, ``released`` and
            ``reset`` (while a forward was planned).
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
