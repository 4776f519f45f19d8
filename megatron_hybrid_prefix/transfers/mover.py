"""`Mover`: when KV and states move, on the device and between tiers, and the verdict on each load that all ranks agree on.

The cache queues copies (`HybridPrefixCache.take_copies`). They are launched, in their order, before anything can overwrite what they
read. KV blocks that move in shared memory are copied on the model's stream, and pages are cleared there.

Transfers to the host and back go through staging buffers on the device, whose halves are used in turn (``to_host.py``,
``to_device.py``; the ways over the host link: ``ops/page_copies.py``). They have separate streams, because the host link has two
directions. A forward waits for the loads that it uses. A store gives every entry a tag and a checksum over all its bytes, computed by the
kernel that gathers it. Expected checksums stay on the device (``host_pages.py``). Threads copy entries to and from the tier behind the
host (``behind.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.tiers.behind import TierBehind
from megatron_hybrid_prefix.tiers.units import (
    DEVICE,
    HOST,
    SHARED,
    BlockMove,
    BlockTransfer,
    Copy,
    EntryKind,
    LoadOver,
    LoadState,
    PageClear,
    StateMove,
)
from megatron_hybrid_prefix.transfers.behind import BehindCopies
from megatron_hybrid_prefix.transfers.entry_copies import EntryCopies, Tensors
from megatron_hybrid_prefix.transfers.host_pages import HostPages, HostSizes
from megatron_hybrid_prefix.transfers.to_device import ToDevice
from megatron_hybrid_prefix.transfers.to_host import ToHost

if TYPE_CHECKING:
    import torch

    from megatron_hybrid_prefix.pool.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

# What ranks may see of a load that fetches, from best to worst: they agree on the worst.
_FETCHED = (LoadState.COPYING, LoadState.FETCHING, LoadState.MISSING, LoadState.LATE)


class DeviceMover:
    """Copies of a cache without a host tier.

    Args:
        take_copies: `HybridPrefixCache.take_copies`. Called at each launch.
        memory: Called at each launch; None while megatron has freed the memory.

    Attributes:
        memory: See Args.
        sizes, tier: There is no host tier, and none behind it.
    """

    sizes = HostSizes()
    tier: TierBehind | None = None

    def __init__(self, take_copies: Callable[..., list[Copy]], memory: Callable[[], SharedMemory | None]) -> None:
        self._take_copies, self.memory = take_copies, memory

    def tensors(self) -> Tensors:
        """Those on the device, by kind, each (1, KV blocks or rows of states, bytes). Their addresses change when the engine is suspended."""
        memory = self.memory()
        assert memory is not None
        return {
            EntryKind.KV: [memory.kv_rows],
            EntryKind.STATE: [memory.state_rows],
            EntryKind.LIVE: [memory.live_rows],
        }

    def launch(self) -> None:
        """See `Mover.launch`."""
        self.run({})

    def run(self, more: Mapping[type, Callable[[list[Any]], None]], *, published: bool = False) -> None:
        """Carry out the queued copies in order. ``more``: those that are not within the memory, by type."""
        copies, memory = self._take_copies(published=published), self.memory()
        run = dict(more)
        if copies and memory is not None and memory.layout is not None:
            layout = memory.layout
            copies = stores_first(copies, layout.page_blocks, layout.page_slots, memory.first_page_slot)
            run[BlockMove], run[StateMove] = memory.move_blocks, memory.move_states
            run[PageClear] = lambda clears: memory.clear_pages([clear.page for clear in clears])
        for kind, group in groupby(copies, key=type):
            run[kind](list(group))

    def send(self) -> None:
        """See `Mover.send`."""

    step_ended = send
    finish = launch


class Mover:
    """Copies of a cache with a host tier, and perhaps a tier behind it.

    Args:
        on_device: Copies within the memory on the device; asked for its tensors at each transfer.
        sizes: What the ranks agreed on.
        device: Device of the tensors.
        tier: The tier behind the host, or None.
        max_of_ranks: Maximum of each number over all ranks; a collective.

    Raises:
        RuntimeError, MemoryError: The host lacks the memory, or the driver refuses to pin it.

    Attributes:
        sizes, tier: See Args.
        pages: The host memory, and the entries there.
        copies: How entries are copied.
        to_host: Transfers from the device.
        to_device: Transfers to the device.
        behind: Transfers to and from the tier behind the host; None if there is none.
    """

    def __init__(
        self,
        on_device: DeviceMover,
        *,
        sizes: HostSizes,
        device: torch.device,
        tier: TierBehind | None,
        max_of_ranks: Callable[[list[int]], list[int]],
    ) -> None:
        self._on_device, self._max_of_ranks = on_device, max_of_ranks
        self.sizes, self.tier = sizes, tier
        self.pages = HostPages(sizes, device, for_threads=tier is not None)
        self.copies = EntryCopies(on_device.tensors, self.pages, device)
        self.to_host = ToHost(self.copies)
        self.to_device = ToDevice(self.to_host)
        self.behind = None if tier is None else BehindCopies(tier, self.to_host, self.to_device)

    # -- launches ------------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Launch the queued copies, but to the host (`send`). Call it before anything writes to a slot or block.

        The model's later launches run after stores have read their entries, and after loads that are over.
        """
        self.to_host.wait()  # for what publication queued
        self._run()

    def send(self) -> None:
        """Launch what need not precede a forward: copies to the host of what is gathered."""
        self.to_host.send()

    def step_ended(self) -> None:
        """What a forward published is known to be right: launch what its publication queued for a tier behind the host.

        And what is left of copies to the host.
        """
        self._run(published=True)
        self.to_host.send()

    def finish(self) -> None:
        """Finish all copies: the device buffers are about to be freed."""
        self.launch()
        self.drain_queues()

    def _run(self, *, published: bool = False) -> None:
        def transfer(units: list[BlockTransfer]) -> None:
            memory = self._on_device.memory()
            assert memory is not None
            # States on the device are named by their rows, not by their slots.
            rows = [
                unit._replace(device_id=memory.row(unit.device_id))
                if unit.device_id >= 0 and unit.tag.kind != EntryKind.KV
                else unit
                for unit in units
            ]
            self.carry_out(rows, beside=published)
            if not published:  # else the next launch waits
                self.to_host.wait()

        self._on_device.run({BlockTransfer: transfer, LoadOver: self._end}, published=published)

    def carry_out(self, units: Sequence[BlockTransfer], *, beside: bool = False) -> None:
        """Launch transfers in order. The model may overwrite stored entries after `ToHost.wait`.

        What is stored is gathered; its copies to the host are left to `ToHost.send`, or to what needs them. A transfer that fails is
        logged. Its load counts as failed, on this rank. A load that fetches waits for `fetch`.

        Args:
            units: The transfers.
            beside: Leave half of the device to the model's later launches while entries are gathered.
        """
        for (source, target), group in groupby(units, key=attrgetter("source", "target")):
            run = list(group)
            if source == DEVICE:
                if self.behind is not None:
                    run = self.behind.overwrite(run)
                self.to_host.run(run, self.to_device.mark_before_stores(run), beside=beside)
            elif target == DEVICE:
                self._begin_loads(run)
            else:
                assert self.behind is not None
                self.to_host.send()
                (self.behind.store if source == HOST else self.behind.read)(run)

    def _begin_loads(self, units: Sequence[BlockTransfer]) -> None:
        """Launches transfers of loads, but for those whose entries are being read from the tier behind."""
        launched: list[BlockTransfer] = []
        for unit in units:
            load = self.to_device.transfer(unit.load_id)
            load.units.append(unit)
            (load.left if unit.is_coming else launched).append(unit)
        self.to_device.run(launched)

    def drain_queues(self) -> None:
        """The CPU waits for all transfers between the device and the host."""
        self.to_host.send()
        for queue in (self.to_host.queue, self.to_device.queue):
            with queue.running():
                mark = queue.mark()
            queue.finish(mark)

    # -- loads ---------------------------------------------------------------------------------------------------------

    def begin_fetch(self, load_id: int, reads: Iterable[BlockTransfer]) -> None:
        """Launch the reads that a fetch waits for, and note them."""
        self.launch()
        self.to_device.transfer(load_id).left += reads

    def fetch(self, load_id: int, deadline_s: float, *, wait: bool) -> LoadState:
        """Check whether the entries of a load or a fetch have arrived from the tier behind, and launch a load if they have.

        A collective: time passes differently on each rank, so they agree on what it means.

        Args:
            load_id: The load.
            deadline_s: Until when its request waits (`time.monotonic` of this rank).
            wait: Wait for the entries, until they have arrived or are late.

        Returns:
            The load's state: it still fetches, is launched, or has failed.
        """
        assert self.behind is not None
        self.to_host.send()
        load = self.to_device.transfer(load_id)
        own = self.behind.fetched(load, max(0.0, deadline_s - time.monotonic()) if wait else 0.0)
        if own is LoadState.FETCHING and time.monotonic() >= deadline_s:
            own = LoadState.LATE
        agreed = _FETCHED[self._max_of_ranks([_FETCHED.index(own)])[0]]
        if agreed in (LoadState.MISSING, LoadState.LATE):
            self.to_device.wait_for(load)  # its blocks and slots may be reused
            if (
                load.units
            ):  # the next forward reads them. What was there may be anything, and a request cannot be sampled from NaN
                self.copies.zero(load.units)
        return agreed

    def wait_for(self, load_id: int) -> None:
        """Make the next forward run after a load whose copies are launched. Other work can be launched before."""
        self.to_device.wait_for(self.to_device.transfer(load_id))

    def verdicts(self, load_ids: Iterable[int]) -> dict[int, LoadState]:
        """Whether loads that the last forward used were right, on all ranks: ARRIVED or FAILED, by load id.

        A collective, if there are any.
        """
        own = {load_id: int(self.to_device.is_wrong(self.to_device.transfer(load_id))) for load_id in load_ids}
        agreed = self._max_of_ranks([*own.values()]) if own else ()
        states = (LoadState.ARRIVED, LoadState.FAILED)
        return {load_id: states[is_wrong] for load_id, is_wrong in zip(own, agreed, strict=True)}

    def _end(self, over: Sequence[LoadOver]) -> None:
        for (load_id,) in over:
            load = self.to_device.transfers.pop(load_id, None)
            if load is not None:
                self.to_device.wait_for(load)

    # -- the whole -----------------------------------------------------------------------------------------------------

    def drain(self, seconds: float) -> bool:
        """Wait until everything launched so far is in the tier behind the host, at most this long. Returns whether it is."""
        return self.behind is None or self.behind.threads.drain(seconds)

    def close(self) -> None:
        """Close the tier behind the host, and free the memory; garbage collection does the latter, too."""
        if self.behind is not None:
            self.behind.close()
        self.pages.close()

    def count(self, stats: PrefixStats) -> None:
        """Add this rank's transfers to the statistics."""
        host = stats.tiers[HOST]
        host.bytes_budget = self.pages.memory.numel()
        host.bytes_stored, host.bytes_loaded = self.to_host.bytes, self.to_device.bytes
        times = [each.queue.seconds() for each in (self.to_host, self.to_device)]
        host.seconds, host.seconds_waited = (sum(part) for part in zip(*times, strict=True))
        if self.behind is not None and SHARED in stats.tiers:
            self.behind.count(stats.tiers[SHARED])

    def report(self) -> str:
        """Size of the host tier, and the tier behind it, in one line."""
        sizes, behind = self.sizes, "" if self.tier is None else f"; behind it: {type(self.tier.tier).__name__}"
        return (
            f"host tier: {sizes.pages} pages of {sizes.page_bytes / 2**20:.3f} MiB, "
            f"{sizes.pages_of[EntryKind.KV]} for a KV block, {sizes.pages_of[EntryKind.STATE]} for a state{behind}"
        )


def stores_first(copies: Sequence[Copy], page_blocks: int, page_slots: int, first_page_slot: int) -> list[Copy]:
    """Puts stores before moves and clears, unless they read what those write: then more stores are launched together.

    Args:
        copies: Queued copies, in order.
        page_blocks: KV blocks in a page.
        page_slots: Slots of a page: those of page p follow ``first_page_slot + p * page_slots``.
        first_page_slot: First slot of the first page.

    Returns:
        The copies in an order with the same result.
    """
    stores: list[Copy] = []
    others: list[Copy] = []
    moved: set[int] = set()  # blocks that the moves and clears read or write
    pages: set[int] = set()  # of these blocks
    no_transfer_yet = True
    for copy in copies:
        if isinstance(copy, BlockMove | StateMove | PageClear):
            if isinstance(copy, BlockMove):
                blocks = {copy.source_block, copy.target_block}
            else:  # a move of a state writes to one page, which is all that matters
                page = copy.page if isinstance(copy, PageClear) else (copy.target_slot - first_page_slot) // page_slots
                blocks = set(range(page * page_blocks, (page + 1) * page_blocks))
            moved |= blocks
            pages.update(block // page_blocks for block in blocks)
        elif isinstance(copy, BlockTransfer):
            # Transfers keep their order: they may use the same pages on the host.
            is_kv, page = copy.tag.kind == EntryKind.KV, (copy.device_id - first_page_slot) // page_slots
            reads_moved = copy.device_id in moved if is_kv else page in pages
            no_transfer_yet = no_transfer_yet and copy.source == DEVICE and not reads_moved
            if no_transfer_yet:
                stores.append(copy)
                continue
        others.append(copy)
    return stores + others
