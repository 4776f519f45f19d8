"""`Moves` and `HostMoves`: when KV and states move, on the device and between tiers, and what happens if a transfer fails.

The cache queues copies (`cache.take_copies`). They are launched, in their order, before anything can overwrite what they read:

- KV blocks that move in shared memory are copied on the model's stream.
- Transfers to the host and back run on separate streams (``tiers/arena.py``). A forward waits for the loads that it uses.
  Afterwards all ranks agree on which loads were right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.mcore.ranks.agreement import max_over_model_ranks, min_over_model_ranks
from megatron_hybrid_prefix.tiers.arena import HostArena
from megatron_hybrid_prefix.tiers.base import TierBehind
from megatron_hybrid_prefix.tiers.pinned import choose_page_bytes
from megatron_hybrid_prefix.tiers.registry import make_tier, tier_name
from megatron_hybrid_prefix.tiers.units import HOST, BlockMove, BlockTransfer, EntryKind

if TYPE_CHECKING:
    from megatron_hybrid_prefix.cache import HybridPrefixCache
    from megatron_hybrid_prefix.config import HybridPrefixConfig
    from megatron_hybrid_prefix.index.requests import StepPlan
    from megatron_hybrid_prefix.metrics import PrefixStats
    from megatron_hybrid_prefix.pool.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

# While other requests run, a request waits one round per this many bytes of its load: about the transfer of one step.
BYTES_A_ROUND = 256 * 2**20


class Moves:
    """Copies of a cache without a host tier.

    Args:
        shared: Returns the memory that KV and states share; None if they do not.
    """

    _cache: HybridPrefixCache

    def __init__(self, shared: Callable[[], SharedMemory | None]) -> None:
        self._shared = shared

    def serve(self, cache: HybridPrefixCache) -> None:
        """Use this cache."""
        self._cache = cache

    def launch(self) -> None:
        """Launch the queued copies. Call it before anything writes to a slot or block."""
        for are_moves, group in groupby(self._cache.take_copies(), key=lambda copy: isinstance(copy, BlockMove)):
            if are_moves:
                shared = self._shared()
                assert shared is not None
                shared.move_blocks([(c.source_block, c.target_block) for c in group if isinstance(c, BlockMove)])
            else:
                self._transfer([copy for copy in group if isinstance(copy, BlockTransfer)])

    def before_forward(self, plans: Iterable[StepPlan]) -> None:
        """Make the next forward run after the copies that it depends on."""
        self.launch()

    def finish(self) -> None:
        """Finish all copies: the device buffers are about to be freed."""
        self.launch()

    def _transfer(self, units: list[BlockTransfer]) -> None:
        raise AssertionError("a transfer is queued, but there is no host tier")


class HostMoves(Moves):
    """The host tier of one context.

    Args:
        tensors: Returns the device tensors by kind, each (layers, KV blocks or slots, *shape).
        shared: See Moves.
        prefix: Settings of the cache, with ``host_gb`` above 0.
        groups: Megatron's process groups.

    Attributes:
        arena: The host memory and its transfers; None if the memory could not be allocated.
        cache_fields: Arguments for the cache. ``host_pages`` is 0 if the memory could not be allocated.
    """

    def __init__(
        self,
        tensors: Callable[[], Mapping[EntryKind, Sequence[torch.Tensor]]],
        shared: Callable[[], SharedMemory | None],
        prefix: HybridPrefixConfig,
        groups: Any,
    ) -> None:
        super().__init__(shared)
        self._groups = groups
        own_bytes = {
            kind: sum(tensor[:, 0].numel() * tensor.element_size() for tensor in of_kind)
            for kind, of_kind in tensors().items()
        }
        # Pipeline stages differ in their layers. All use the largest entry size, so that they decide alike.
        entry_bytes = {kind: max_over_model_ranks(size, self._groups) for kind, size in own_bytes.items()}
        page_bytes = choose_page_bytes(entry_bytes.values())
        pages_of = {kind: max(1, ceil_div(size, page_bytes)) for kind, size in entry_bytes.items()}
        pages = min_over_model_ranks(int(prefix.host_gb * 2**30) // page_bytes, self._groups) or 0
        self.arena: HostArena | None = None
        setting = prefix.tier_behind_host
        self._behind: TierBehind | None = None
        if setting is not None:
            self._behind = TierBehind(tier_name(setting), make_tier(setting), self._agree)
        try:
            self.arena = HostArena(
                tensors,
                pages=pages,
                page_bytes=page_bytes,
                pages_of=pages_of,
                device=tensors()[EntryKind.KV][0].device,
                verify=prefix.verify_host_loads,
                behind=None if self._behind is None else self._behind.tier,
            )
        except (RuntimeError, MemoryError) as error:
            logger.warning("no host tier: cannot allocate %g GiB of pinned memory: %s", prefix.host_gb, error)
        if pages < sum(pages_of.values()):
            logger.warning("host_gb=%g has no room for a state and a KV block: there is no host tier", prefix.host_gb)
            pages = 0
        if not min_over_model_ranks(int(self.arena is not None), self._groups):
            self.close()
            pages = 0
        self._page_bytes = page_bytes
        self.cache_fields: dict[str, Any] = {
            "host_pages": pages,
            "host_kv_pages": pages_of[EntryKind.KV],
            "host_state_pages": pages_of[EntryKind.STATE],
            "host_state_share": prefix.host_state_share,
            "host_write_through": prefix.host_write_through,
        }
        if self._behind is not None and pages:
            self.cache_fields["behind"] = self._behind
        # For each load that the model has not waited for: the rounds that its request still waits.
        self._launched: dict[int, int] = {}

    def _agree(self, depth_blocks: int) -> int:
        return min_over_model_ranks(depth_blocks, self._groups) or 0

    def close(self) -> None:
        """Free the memory."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    # -- moves ---------------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """See Moves. The model's later launches run after stores have read their entries.

        They also run after cancelled loads, whose blocks and slots may be reused.
        """
        if self.arena is None:
            super().launch()
            return
        self._wait_for_cancelled()  # a block may move to where such a load writes
        super().launch()
        self._wait_for_cancelled()

    def _transfer(self, units: list[BlockTransfer]) -> None:
        assert self.arena is not None
        self.arena.carry_out(units)
        self.arena.wait_for_stores()

    def _wait_for_cancelled(self) -> None:
        assert self.arena is not None
        for load_id in [load_id for load_id in self._launched if not self._cache.loads.has_load(load_id)]:
            self._wait_for(load_id)
            self.arena.forget(load_id)

    def before_forward(self, plans: Iterable[StepPlan]) -> None:
        """Make the next forward wait for the loads that it uses."""
        self.launch()
        if self._launched:
            for plan in plans:
                if plan.load_id in self._launched:
                    self._wait_for(plan.load_id)

    def start_load(self, request_id: int, match: Any) -> None:
        """Launch the load that was prepared for the request."""
        self.launch()
        load_bytes = self._cache.loads.pages(request_id) * self._page_bytes
        self._launched[match.load_id] = ceil_div(load_bytes, BYTES_A_ROUND)

    def waits(self, load_id: int) -> bool:
        """Whether the request of a load waits one more round; counts the round."""
        left = self._launched.get(load_id, 0)
        if left > 0:
            self._launched[load_id] = left - 1
        return left > 0

    def _wait_for(self, load_id: int) -> None:
        assert self.arena is not None
        self.arena.wait_for_load(load_id)
        del self._launched[load_id]

    def failed(self, plans: Iterable[StepPlan]) -> set[int]:
        """Requests of the last forward whose loads failed verification, on any rank.

        A collective: all ranks call it and get the same set.
        """
        loads = [(plan.request_id, plan.load_id) for plan in plans if plan.load_id is not None]
        if not loads:
            return set()
        assert self.arena is not None
        flags = [int(self.arena.has_failed(load_id)) for _, load_id in loads]
        flags = max_over_model_ranks(flags, self._groups)
        found = {request_id for (request_id, _), flag in zip(loads, flags, strict=True) if flag}
        for request_id in sorted(found):
            logger.error("the load of request %d failed verification: the request is recomputed", request_id)
        return found

    def finish(self) -> None:
        """See Moves."""
        self.launch()
        if self.arena is not None:
            self.arena.finish()

    def count(self, stats: PrefixStats) -> None:
        """Add this rank's transfers to the statistics."""
        if self.arena is not None:
            host = stats.tiers[HOST]
            host.bytes_budget = self.arena.memory.numel()
            host.bytes_stored, host.bytes_loaded = self.arena.bytes_stored, self.arena.bytes_loaded
            times = [queue.seconds() for queue in (self.arena.stores, self.arena.loads)]
            host.seconds, host.seconds_waited = (sum(part) for part in zip(*times, strict=True))
            if self._behind is not None and self._behind.name in stats.tiers:
                moved, behind = self.arena.behind_stats, stats.tiers[self._behind.name]
                behind.full, behind.bytes_stored, behind.bytes_loaded = (
                    moved.full,
                    moved.bytes_stored,
                    moved.bytes_loaded,
                )
                behind.seconds, behind.seconds_waited = moved.seconds, moved.seconds_waited

    def report(self) -> str:
        """Size of the host tier, and the tier behind it, in one line."""
        fields = self.cache_fields
        behind = f"; behind it: {self._behind.name}" if self._behind is not None and "behind" in fields else ""
        return (
            f"host tier: {fields['host_pages']} pages of {self._page_bytes / 2**20:.3f} MiB, {fields['host_kv_pages']} for a "
            f"KV block, {fields['host_state_pages']} for a state{behind}"
        )
