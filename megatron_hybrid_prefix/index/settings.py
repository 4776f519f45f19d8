"""`CacheSettings`: what a `HybridPrefixCache` is made with."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hybrid_prefix.index.tree import KeyedValues
from megatron_hybrid_prefix.policy.boundaries import BoundaryRule, prompt_boundaries
from megatron_hybrid_prefix.policy.registry import DEFAULT_EVICTION_POLICY
from megatron_hybrid_prefix.tiers.behind import TierBehind


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Sizes and rules of a cache. All ranks need the same ones.

    Attributes:
        block_tokens: Tokens per KV block.
        kv_blocks: KV blocks that fit into the memory, ids 0 .. kv_blocks - 1, if there are no states. Does not count megatron's
            dummy block.
        page_blocks: KV blocks whose memory a page of states takes.
        page_states: States in a page; or live states, and checkpoints, where these have fewer bytes and a page has one or the other.
        state_slots: Most cached states. Is no reservation: KV may evict states below it. 0 disables reuse. None: as many as fit.
        first_state_slot: Id of the first slot of the pages. Lower ids are the engine's own slots.
        live_states: Whether the states of running requests are in the pages, too. False: the engine has slots of its own for
            them, and `Admission.live_slot` is None.
        epoch: Weights epoch at the start.
        secret: Secret of the block hashes, at most 64 bytes. None: random. Ranks need the same secret only if their
            keys are compared.
        eviction_policy: Name of the policy that picks the checkpoint to evict (``policy/registry.py``).
        min_computed_tokens: Last tokens of a prompt that are always computed, even on a full hit.
        retention_interval_tokens: Also checkpoint every N prompt tokens while slots are free. A multiple of
            ``block_tokens``; 0 disables; None: 16 evenly spaced ones, and some near the end (``policy/boundaries.py``).
        host_pages: Pages of the host tier. 0: no host tier.
        host_kv_pages: Pages per KV block on the host.
        host_state_pages: Pages per state on the host; or per live state, and per checkpoint.
        behind: The tier below the host. Needs a host tier.
        boundary_rule: Chooses which boundaries of a prompt get a checkpoint.
        beside: Values that the caller keeps with the blocks, by their keys. The cache says which have to go.

    Raises:
        ValueError: A number is out of range.
    """

    block_tokens: int
    kv_blocks: int
    page_blocks: int = 1
    page_states: int | tuple[int, int] = 1
    state_slots: int | None = None
    first_state_slot: int = 0
    live_states: bool = True
    epoch: int = 0
    secret: bytes | None = None
    eviction_policy: str = DEFAULT_EVICTION_POLICY
    min_computed_tokens: int = 1
    retention_interval_tokens: int | None = None
    host_pages: int = 0
    host_kv_pages: int = 1
    host_state_pages: int | tuple[int, int] = 1
    behind: TierBehind | None = None
    boundary_rule: BoundaryRule = prompt_boundaries
    beside: KeyedValues | None = None

    def __post_init__(self) -> None:
        if self.min_computed_tokens < 1:
            raise ValueError(f"min_computed_tokens={self.min_computed_tokens}: must be 1 or more")
        interval = self.retention_interval_tokens
        if interval is not None and (interval < 0 or interval % self.block_tokens):
            raise ValueError(
                f"retention_interval_tokens={interval}: must be 0 or a multiple of block_tokens={self.block_tokens}"
            )
        if self.behind is not None and not self.host_pages:
            raise ValueError("a tier behind the host needs a host tier: host_pages is 0")
