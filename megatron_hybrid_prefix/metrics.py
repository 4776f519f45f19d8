"""Statistics of the cache: counters that only grow, and the slots in use."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from megatron_hybrid_prefix.policy.boundaries import CheckpointReason


class NotReused(StrEnum):
    """Why a prompt reused nothing, or less than is known to have been there: the first of these that holds."""

    BELOW_ONE_BLOCK = "below_one_block"  # only whole blocks are cached, and the last token is always computed
    NOT_READ = (
        "not_read"  # ``cache_read`` is False, log-probs of the prompt are wanted and not kept, or the hit is verified
    )
    EPOCH = "epoch"  # it was cached under other weights
    MEMORY = "memory"  # no room for a state, or for all that a hit needs; or a load would take longer than computing, or was late
    STATES_GONE = "states_gone"  # KV is there, without a state: evicted, or never kept
    KV_GONE = "kv_gone"  # evicted, not long ago
    OTHER_SALT = "other_salt"  # cached for requests with another salt or adapter
    NO_SUCH_PREFIX = "no_such_prefix"  # nobody had it, or nobody knows of it any more


@dataclass(slots=True, kw_only=True)
class TierStats:
    """Traffic of one tier below the device, in entries. An entry is a KV block or a state.

    The first sentence about an attribute here, and in `PrefixStats`, is the help text of its metric.

    Attributes:
        loads: Entries moved one tier up, because a prompt needed them.
        stores: Entries moved here from the tier above. For the tier behind the host: entries offered to it.
        evictions: Entries evicted from here. Of a shared folder, by this process; of Mooncake, which evicts itself, 0.
        full: Entries that found no room here, or were worth less than all that is stored. For the tier behind the host:
            entries it refused.
        preempted: Preempted requests that were swapped out to here.
        failed: Entries that came back corrupt, or not at all, and were dropped.
        bytes_loaded: Bytes loaded, on this rank.
        bytes_stored: Bytes stored, on this rank.
        seconds: Duration of all moves, on this rank.
        seconds_waited: Part of ``seconds`` in which the model or the CPU waited for a move. The rest was overlapped.
        kv_blocks: KV blocks here now; 0 if the tier does not report it.
        states: States here now; 0 if the tier does not report it.
        bytes_budget: Capacity in bytes on this rank; 0 if the tier does not report it.
        bytes_used: Bytes in use, by other processes, too; 0 if the tier does not report it.
        faults: What a shared tier gave up, by reason: ``gone``, ``not_valid``, ``wrong``, ``stuck``, ``no_room``,
            ``old_weights``, ``read_...``, ``write_...``, ``delete_...`` and ``look_...`` with the name of the error. Of Mooncake,
            too: ``no_master``, ``late_answer``.
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
    bytes_used: int = 0
    faults: dict[str, int] = field(default_factory=dict)


_PINS = ("pinned", "no_room", "spared", "reused_tokens", "evicted")


@dataclass(slots=True, kw_only=True)
class PrefixStats:
    """Counters since the start, and the slots in use now.

    Attributes:
        prompt_tokens: Tokens of all prompts, each counted once, with its first forward.
        computed_prompt_tokens: Prompt tokens computed by forwards that were launched, or with loads that were right. What a
            preempted request computes again is in ``recomputed_tokens``.
        reused_tokens: Prompt tokens skipped, ``reused_tokens_device + reused_tokens_host``: the sum of all requests'
            ``num_cached_tokens``.
        reused_tokens_device: Prompt tokens skipped by resuming from a state on the device.
        reused_tokens_host: Prompt tokens skipped by a request that loaded KV or a state from the host. Counts the
            tokens before them on the device, too.
        recomputed_tokens: Tokens (of prompt and answer) that preempted requests, and those that start over, computed again.
        resumed_tokens: Tokens that these requests did not compute again after preemption: they were cached, or on the host.
        not_reused: Prompts that reused nothing, or less than is known to have been there, by `NotReused`.
        lost_tokens_no_state: Tokens whose KV matched, but that were recomputed because no state was kept that deep.
        lost_tokens_no_scores: Tokens that could be skipped, but were computed because the request wants the log-probs of its
            prompt, and they were not kept.
        checkpoints_published: States that became matchable.
        checkpoints_skipped: States that were not kept because there was no slot.
        checkpoints_by_reason: States published, by `CheckpointReason`.
        evictions: States evicted, to make room or together with their KV block.
        evictions_ended: Those of them that only ended sessions had used: they are evicted first (``cache_session``).
        uses_of_ended: Prompts that resumed from such a state before it was evicted.
        sessions_ended: Sessions that ended.
        pins: Of prefixes that callers want kept (``cache_uses``, ``cache_pin``): ``pinned``, or there was ``no_room``; ``spared``: states
            that others went for; ``reused_tokens``: tokens skipped from these; ``evicted``: states that went since no other could.
        kv_evictions: KV blocks evicted.
        scores_evictions: Blocks whose log-probs were evicted because the budget was full.
        invalidations: Times the cache was emptied because the weights changed, or may have: `invalidate`, a new generation epoch,
            ``resume()`` without ``keep_on_resume``, or samples of the weights that differ.
        verified_hits: Hits that were computed again and compared with the cache (``verify_hits``).
        verify_mismatches: Verified hits that differed; 0 unless the cache is wrong.
        tiers: Statistics by tier: "host", and the tier behind it.
        fallbacks: Times the cache reused or kept less than planned, by reason: ``stale_match`` (evicted between match
            and admission), ``forward_failed``, ``epoch_changed``, ``released`` and ``reset`` (with a plan in flight),
            ``host_load_failed`` (the copy failed, or its checksum was wrong), ``host_load_given_up`` (a request
            gave up its load), ``tier_load_missing`` and ``tier_load_late`` (what the tier behind the host promised was
            gone, or took longer than a request waits).
        slots_total: Most checkpoints that fit, or that the cap allows.
        slots_used: Checkpoint slots in use, including those that a forward is writing.
        bytes_budget: Bytes of the memory of KV and states.
        scores_bytes_used: Bytes of the log-probs of cached prompts, on the host.
        scores_bytes_budget: Most bytes of the log-probs of cached prompts.
    """

    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    reused_tokens: int = 0
    reused_tokens_device: int = 0
    reused_tokens_host: int = 0
    recomputed_tokens: int = 0
    resumed_tokens: int = 0
    not_reused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(map(str, NotReused), 0))
    lost_tokens_no_state: int = 0
    lost_tokens_no_scores: int = 0
    checkpoints_published: int = 0
    checkpoints_skipped: int = 0
    checkpoints_by_reason: dict[str, int] = field(
        default_factory=lambda: {reason.name.lower(): 0 for reason in CheckpointReason}
    )
    evictions: int = 0
    evictions_ended: int = 0
    uses_of_ended: int = 0
    sessions_ended: int = 0
    pins: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_PINS, 0))
    kv_evictions: int = 0
    scores_evictions: int = 0
    invalidations: int = 0
    verified_hits: int = 0
    verify_mismatches: int = 0
    tiers: dict[str, TierStats] = field(default_factory=lambda: {"host": TierStats()})
    fallbacks: dict[str, int] = field(default_factory=dict)
    slots_total: int = 0
    slots_used: int = 0
    bytes_budget: int = 0
    scores_bytes_used: int = 0
    scores_bytes_budget: int = 0

    def as_dict(self) -> dict[str, Any]:
        """All statistics as plain values, for JSON."""
        return asdict(self)

    def copy(self) -> PrefixStats:
        """A deep copy. Written out, because ``deepcopy`` takes five times as long."""
        return replace(
            self,
            not_reused=dict(self.not_reused),
            checkpoints_by_reason=dict(self.checkpoints_by_reason),
            tiers={name: replace(tier, faults=dict(tier.faults)) for name, tier in self.tiers.items()},
            pins=dict(self.pins),
            fallbacks=dict(self.fallbacks),
        )

    def count_fallback(self, reason: str, times: int = 1) -> None:
        """Counts fallbacks for ``reason``."""
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + times
