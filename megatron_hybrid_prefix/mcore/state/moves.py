"""`Moves` and `HostMoves`: when KV and states move, on the device and between tiers, and what happens if a transfer fails.

The cache queues copies (`cache.take_copies`). They are launched, in their order, before anything can overwrite what they read:

- KV blocks that move in shared memory are copied on the model's stream, and pages are cleared there.
- Transfers to the host and back run on separate streams (``tiers/arena.py``). A forward waits for the loads that it uses.
  Afterwards all ranks agree on which loads were right.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from megatron_hybrid_prefix.mcore.ranks.agreement import max_over_model_ranks, min_over_model_ranks, place_in_model
from megatron_hybrid_prefix.mcore.state.fingerprint import Fingerprint
from megatron_hybrid_prefix.policy.base import SharesMemory
from megatron_hybrid_prefix.policy.registry import make_eviction_policy
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from megatron_hybrid_prefix.tiers.arena import HostArena
from megatron_hybrid_prefix.tiers.base import Tier
from megatron_hybrid_prefix.tiers.behind import TierBehind
from megatron_hybrid_prefix.tiers.pinned import choose_page_bytes
from megatron_hybrid_prefix.tiers.registry import parse_url
from megatron_hybrid_prefix.tiers.units import (
    HOST,
    SHARED,
    BlockMove,
    BlockTransfer,
    EntryKind,
    Load,
    LoadState,
    PageClear,
    stores_first,
)

if TYPE_CHECKING:
    from megatron_hybrid_prefix.cache import HybridPrefixCache
    from megatron_hybrid_prefix.config import HybridPrefixConfig
    from megatron_hybrid_prefix.metrics import PrefixStats
    from megatron_hybrid_prefix.pool.shared_memory import SharedMemory
    from megatron_hybrid_prefix.requests.book import StepPlan

logger = logging.getLogger(__name__)

# What ranks may see of a load that fetches, from best to worst: they agree on the worst.
_FETCHED = (LoadState.COPYING, LoadState.FETCHING, LoadState.MISSING, LoadState.LATE)


class Moves:
    """Copies of a cache without a host tier.

    Args:
        context: Its ``shared_memory`` is None while megatron has freed it. Its ``prefix_cache`` is made after this object.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

    @property
    def _cache(self) -> HybridPrefixCache:
        cache: HybridPrefixCache = self._context.prefix_cache
        return cache

    def cache_settings(self) -> dict[str, Any]:
        """Arguments for `CacheSettings`: those of a host tier."""
        return {}

    def launch(self, *, send: bool = True) -> None:
        """Launch the queued copies. Call it before anything writes to a slot or block.

        Args:
            send: False: leave the copies to the host to `forward_launched`.
        """
        copies = self._cache.take_copies()
        memory: SharedMemory | None = self._context.shared_memory
        if copies and memory is not None and memory.layout is not None:
            layout = memory.layout
            copies = stores_first(copies, layout.page_blocks, layout.page_states, memory.first_page_slot)
        for kind, group in groupby(copies, key=type):
            if kind is BlockTransfer:
                self._transfer([copy for copy in group if isinstance(copy, BlockTransfer)], send=send)
                continue
            assert memory is not None
            if kind is BlockMove:
                memory.move_blocks([copy for copy in group if isinstance(copy, BlockMove)])
            else:
                memory.clear_pages([copy.page for copy in group if isinstance(copy, PageClear)])

    def forward_launched(self) -> None:
        """Launch what need not precede a forward: copies to the host that `launch` left."""

    def step_ended(self) -> None:
        """What a forward published is known to be right: launch what its publication queued for a tier behind the host."""

    def wait_for_loads(self, plans: Iterable[StepPlan]) -> None:
        """Make the next forward run after the loads that it uses. Other work can be launched before."""

    def finish(self) -> None:
        """Finish all copies: the device buffers are about to be freed."""
        self.launch()

    def _transfer(self, units: list[BlockTransfer], *, send: bool) -> None:
        raise AssertionError("a transfer is queued, but there is no host tier")


class HostMoves(Moves):
    """The host tier of one context. `open` makes it.

    Args:
        context: The context.
        prefix: Settings of the cache, with ``host_gb`` above 0.

    Raises:
        ValueError: The shared tier cannot be used.

    Attributes:
        arena: The host memory and its transfers.
        sends_later: Whether `forward_launched` is called. The engine sets it if its controller does that.
    """

    arena: HostArena

    def __init__(self, context: Any, prefix: HybridPrefixConfig) -> None:
        super().__init__(context)
        self.sends_later = False
        self._groups = context.config.pg_collection
        own_bytes = {kind: sum(tensor[:, 0].nbytes for tensor in of_kind) for kind, of_kind in self._tensors().items()}
        # Pipeline stages differ in their layers. All use the largest entry size, so that they decide alike.
        entry_bytes = {kind: max_over_model_ranks(size, self._groups) for kind, size in own_bytes.items()}
        self._page_bytes = choose_page_bytes(entry_bytes.values())
        self._pages_of = {kind: max(1, ceil_div(size, self._page_bytes)) for kind, size in entry_bytes.items()}
        self._behind: TierBehind | None = None
        if prefix.shared is not None:
            self._behind = TierBehind(self._open_tier(prefix, prefix.shared, own_bytes), self._agree)

    @classmethod
    def open(cls, context: Any, prefix: HybridPrefixConfig) -> HostMoves | None:
        """The host tier with its memory. None, and a warning, if some rank lacks the memory. A collective.

        Raises:
            ValueError: The shared tier cannot be used.
        """
        moves = cls(context, prefix)
        pages = min_over_model_ranks(int(prefix.host_gb * 2**30) // moves._page_bytes, moves._groups)
        is_here = False
        try:
            if pages < sum(moves._pages_of.values()):
                raise MemoryError("it has no room for a state and a KV block")
            moves.arena = HostArena(
                moves._tensors,
                pages=pages,
                page_bytes=moves._page_bytes,
                pages_of=moves._pages_of,
                device=moves._tensors()[EntryKind.KV][0].device,
                behind=moves._behind,
            )
            is_here = True
        except (RuntimeError, MemoryError) as error:
            logger.warning("no host tier: cannot allocate host_gb=%g of pinned memory: %s", prefix.host_gb, error)
        if min_over_model_ranks(int(is_here), moves._groups):
            return moves
        moves.close()
        return None

    def cache_settings(self) -> dict[str, Any]:
        sizes = {
            "host_pages": len(self.arena.pages.rows),
            "host_kv_pages": self._pages_of[EntryKind.KV],
            "host_state_pages": self._pages_of[EntryKind.STATE],
        }
        if self._behind is None:
            return sizes
        return {**sizes, "behind": self._behind, "secret": self._secret, "adapter_secret": os.urandom(16)}

    def _tensors(self) -> dict[EntryKind, list[torch.Tensor]]:
        """The device tensors by kind, each (1, KV blocks or rows of states, bytes)."""
        memory: SharedMemory = self._context.shared_memory
        return {EntryKind.KV: [memory.kv_rows], EntryKind.STATE: [memory.state_rows]}

    def _agree(self, depth_blocks: int) -> int:
        return min_over_model_ranks(depth_blocks, self._groups)

    # -- the tier below the host --------------------------------------------------------------------------------------

    def _open_tier(self, prefix: HybridPrefixConfig, url: str, entry_bytes: Mapping[EntryKind, int]) -> Tier:
        def make_ranking() -> Any:
            policy = make_eviction_policy(prefix.eviction_policy)
            if isinstance(policy, SharesMemory):  # entries of both kinds share the budget
                policy.share_memory(
                    state_blocks=max(1, entry_bytes[EntryKind.STATE] // max(1, entry_bytes[EntryKind.KV]))
                )
            return policy

        kind, settings = parse_url(url)
        problem = ""
        try:
            self._secret, self._weights_name = settings.secret(), settings.weights
            tier = kind(settings, block_tokens=self._context.block_size_tokens, make_ranking=make_ranking)
        except (ValueError, OSError) as error:
            problem = str(error) if isinstance(error, ValueError) else f"shared: cannot use {url}: {error}"
        if max_over_model_ranks(int(bool(problem)), self._groups):
            raise ValueError(problem or "shared: another rank cannot use it")
        return tier

    def name_entries(self, model: Any) -> None:
        """Use the entries of this model's weights in the tier below the host, if there is one.

        Args:
            model: This rank's part of the model. Its weights are read now, and again after they were invalidated.
        """
        if self._behind is None:
            return
        shapes = {
            kind.name: [
                (tensor.shape[0], *tensor.shape[2:], str(tensor.dtype), tensor.device.type) for tensor in of_kind
            ]
            for kind, of_kind in self._tensors().items()
        }
        # All that entries depend on, but for the model.
        layout = (
            self._context.block_size_tokens,
            self._context.state_layout,
            sorted(shapes.items()),
            place_in_model(self._groups),
        )
        self._behind.name_entries(Fingerprint(model, repr(layout), weights=self._weights_name))

    def drain(self, seconds: float) -> bool:
        """Wait until everything launched so far is in the tier below the host, at most this long. Returns whether it is."""
        return self.arena.behind is None or self.arena.behind.threads.drain(seconds)

    def close(self) -> None:
        """Free the memory."""
        if self._behind is not None:
            self._behind.tier.close()
        if hasattr(self, "arena"):
            self.arena.close()

    # -- moves ---------------------------------------------------------------------------------------------------------

    def launch(self, *, send: bool = True) -> None:
        """The model's later launches run after stores have read their entries.

        They also run after cancelled loads, whose blocks and slots may be reused.
        """
        self.arena.stores.wait()  # of what publication queued
        self._wait_for_cancelled()  # a block may move to where such a load writes
        send = send or not self.sends_later
        super().launch(send=send)
        if send:
            self.arena.stores.send()
        self._wait_for_cancelled()

    def forward_launched(self) -> None:
        self.arena.stores.send()

    def step_ended(self) -> None:
        if self.sends_later:
            units = [copy for copy in self._cache.take_copies(published=True) if isinstance(copy, BlockTransfer)]
            self.arena.carry_out(self._with_rows(units), send=False, beside=True)
            self.arena.stores.send()

    def _transfer(self, units: list[BlockTransfer], *, send: bool) -> None:
        self.arena.carry_out(self._with_rows(units), send=send)
        self.arena.stores.wait()

    def _with_rows(self, units: list[BlockTransfer]) -> list[BlockTransfer]:
        """The transfers; states on the device are named by their rows (`SharedMemory.row`), not by their slots."""
        memory: SharedMemory | None = self._context.shared_memory
        assert memory is not None
        return [
            unit._replace(device_id=memory.row(unit.device_id))
            if unit.device_id is not None and unit.tag.kind == EntryKind.STATE
            else unit
            for unit in units
        ]

    def _wait_for_cancelled(self) -> None:
        """Makes the model's later launches run after loads that were given up: their blocks and slots may be reused."""
        for load in [load for load in self.arena.loads.running if not load.is_running]:
            self.arena.drop(load)

    # -- loads ---------------------------------------------------------------------------------------------------------

    def begin_fetch(self, fetch: Load) -> None:
        """Launch the reads of a fetch that the cache has begun."""
        self.launch(send=False)
        assert self.arena.behind is not None
        fetch.left = [BlockTransfer(SHARED, HOST, entry.pages, entry.tag) for entry in fetch.coming]
        self.arena.behind.begin(fetch)

    def fetch(self, load: Load, *, wait: bool) -> LoadState:
        """Check whether the entries of a load or a fetch have arrived from the tier below, and launch a load if they have.

        A collective: time passes differently on each rank, so they agree on what it means.

        Args:
            load: The load, which is one of `failed` if they did not arrive; or the fetch.
            wait: Wait for the entries, until they have arrived or are late.

        Returns:
            The load's state: it still fetches, is launched, or has failed.
        """
        arena = self.arena
        assert arena.behind is not None
        arena.stores.send()
        if not load.deadline_s:
            assert self._behind is not None
            load.deadline_s = time.monotonic() + self._behind.tier.wait_s
        arrived = arena.behind.fetched(load, max(0.0, load.deadline_s - time.monotonic()) if wait else 0.0)
        if arrived is None:
            own = LoadState.LATE if time.monotonic() >= load.deadline_s else LoadState.FETCHING
        else:
            own = LoadState.COPYING if arrived else LoadState.MISSING
        agreed = _FETCHED[max_over_model_ranks(_FETCHED.index(own), self._groups)]
        if agreed in (LoadState.MISSING, LoadState.LATE):
            arena.drop(load, zero=load.slot >= 0)
        if agreed is not LoadState.FETCHING:
            self._cache.loads.end_fetch(load, agreed)
        return agreed

    def wait_for_loads(self, plans: Iterable[StepPlan]) -> None:
        """The CPU waits for entries that still come from the tier below. A collective, if there are any."""
        for load in [plan.load for plan in plans if plan.load is not None]:
            state = self.fetch(load, wait=True) if load.state is LoadState.FETCHING else load.state
            if state is LoadState.COPYING and not load.awaited:
                self.arena.loads.wait_for(load)

    def failed(self, plans: Iterable[StepPlan]) -> set[int]:
        """Requests of the last forward whose loads failed verification on any rank, or did not arrive.

        A collective: all ranks call it and get the same set.
        """
        loads = [plan.load for plan in plans if plan.load is not None]
        unknown = [load for load in loads if load.state is LoadState.COPYING]
        if unknown:
            flags = [int(self.arena.loads.is_wrong(load)) for load in unknown]
            flags = max_over_model_ranks(flags, self._groups)
            for load, is_wrong in zip(unknown, flags, strict=True):
                load.state = LoadState.FAILED if is_wrong else LoadState.ARRIVED
                if is_wrong:
                    logger.error(
                        "the load of request %d failed verification: the request is recomputed", load.request_id
                    )
        return {load.request_id for load in loads if load.state is not LoadState.ARRIVED}

    def finish(self) -> None:
        self.launch()
        self.arena.finish()

    def count(self, stats: PrefixStats) -> None:
        """Add this rank's transfers to the statistics."""
        arena, host = self.arena, stats.tiers[HOST]
        host.bytes_budget = arena.pages.memory.numel()
        host.bytes_stored, host.bytes_loaded = arena.stores.bytes, arena.loads.bytes
        times = [each.queue.seconds() for each in (arena.stores, arena.loads)]
        host.seconds, host.seconds_waited = (sum(part) for part in zip(*times, strict=True))
        if arena.behind is not None and SHARED in stats.tiers:
            counted, moved = stats.tiers[SHARED], arena.behind.stats
            moved.loads, moved.stores, moved.failed = counted.loads, counted.stores, counted.failed
            stats.tiers[SHARED] = moved

    def report(self) -> str:
        """Size of the host tier, and the tier below it, in one line."""
        behind = "" if self._behind is None else f"; behind it: {type(self._behind.tier).__name__}"
        return (
            f"host tier: {len(self.arena.pages.rows)} pages of {self._page_bytes / 2**20:.3f} MiB, "
            f"{self._pages_of[EntryKind.KV]} for a KV block, {self._pages_of[EntryKind.STATE]} for a state{behind}"
        )
