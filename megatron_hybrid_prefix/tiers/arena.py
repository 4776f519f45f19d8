"""`HostArena`: runs transfers between the device and pinned host memory, and verifies what is loaded.

On the device an entry is spread over all layers; on the host it is in pages. Stores and loads go through staging buffers on the
device, whose halves are used in turn (``stores.py``, ``loads.py``; the ways over the host link: ``ops/page_copies.py``). They have
separate streams, because the host link has two directions.

A store gives every entry a tag and a checksum over all its bytes, computed by the kernel that gathers it, or by one of its own
where the copy engines copy it. Expected checksums stay on the device (``host_pages.py``).

Threads copy entries to and from a tier below the host, with their tags and checksums. They first wait until no transfer uses
their pages (``tier_moves.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import torch

from megatron_hybrid_prefix.tiers.behind import TierBehind
from megatron_hybrid_prefix.tiers.entry_copies import EntryCopies, Tensors
from megatron_hybrid_prefix.tiers.host_pages import HostPages
from megatron_hybrid_prefix.tiers.loads import LoadCopies
from megatron_hybrid_prefix.tiers.stores import StoreCopies
from megatron_hybrid_prefix.tiers.tier_moves import TierMoves
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, EntryKind, Load, LoadState


class HostArena:
    """Pinned memory in pages, and the transfers to and from it.

    Args:
        tensors: Called at each transfer. Returns the device tensors by kind, each (layers, KV blocks or slots, *shape) and
            contiguous inside a block or slot. (Their addresses change when the engine is suspended.)
        pages: Number of pages.
        page_bytes: Bytes per page.
        pages_of: Pages per entry, by kind.
        device: Device of the tensors.
        behind: The tier below the host, or None.

    Attributes:
        pages: The memory, and the entries there.
        copies: How entries are copied.
        stores: Transfers from the device.
        loads: Transfers to the device.
        behind: Transfers to and from the tier below the host; None if there is none.

    Raises:
        RuntimeError, MemoryError: The host lacks the memory, or the driver refuses to pin it.
    """

    def __init__(
        self,
        tensors: Callable[[], Tensors],
        *,
        pages: int,
        page_bytes: int,
        pages_of: Mapping[EntryKind, int],
        device: torch.device | str,
        behind: TierBehind | None = None,
    ) -> None:
        device = torch.device(device)
        self.pages = HostPages(pages, page_bytes, device, for_threads=behind is not None)
        self.copies = EntryCopies(tensors, self.pages, pages_of=pages_of, device=device)
        self.stores = StoreCopies(self.copies)
        self.loads = LoadCopies(self.stores)
        self.behind: TierMoves | None = None
        if behind is not None:
            self.behind = TierMoves(behind, self.stores, self.loads)

    def close(self) -> None:
        """Free the memory; garbage collection of the arena does so, too."""
        if self.behind is not None:
            self.behind.threads.close()
        self.pages.close()

    def carry_out(self, units: Sequence[BlockTransfer], *, send: bool = True, beside: bool = False) -> None:
        """Launch transfers in order. The model may overwrite stored entries after `StoreCopies.wait`.

        A transfer that fails is logged. Its load counts as failed, on this rank. A load that fetches waits for `fetched`.

        Args:
            units: The transfers.
            send: False: gather what is stored, and leave its copies to the host to `StoreCopies.send`. What needs them launches them, too.
            beside: Leave half of the device to the model's later launches while entries are gathered.
        """
        for (source, target), group in groupby(units, key=attrgetter("source", "target")):
            run = list(group)
            if source == DEVICE:
                if self.behind is not None:
                    run = self.behind.overwrite(run)
                before = self.loads.mark_before_stores(run)
                self.stores.run(run, before, send=send, beside=beside)
            elif target == DEVICE:
                self._begin_loads(run)
            else:
                assert self.behind is not None
                self.stores.send()
                (self.behind.store if source == HOST else self.behind.read)(run)

    def _begin_loads(self, units: Sequence[BlockTransfer]) -> None:
        """Launches the transfers of loads, but for those that fetch."""
        launched: list[BlockTransfer] = []
        for load, group in groupby(units, key=attrgetter("load")):
            own = list(group)
            load.transfers += own
            if load.state is LoadState.FETCHING:
                assert self.behind is not None
                load.left += own
                self.behind.begin(load)
            elif load.is_running:
                launched += own
        self.loads.run(launched)

    def finish(self) -> None:
        """The CPU waits for all transfers between the device and the host."""
        self.stores.send()
        for queue in (self.stores.queue, self.loads.queue):
            with queue.running():
                mark = queue.mark()
            queue.finish(mark)

    def drop(self, load: Load, *, zero: bool = False) -> None:
        """The load is over before all of it was launched. Its entries may still arrive on the host.

        The model's later launches run after what was launched of it: its blocks and slots may be reused.

        Args:
            load: The load.
            zero: The next forward reads its blocks and its slot all the same: they hold zeros by then. What was there before may
                be anything, and a request cannot be sampled from NaN.
        """
        if not load.awaited:
            self.loads.wait_for(load)
        self.loads.forget(load)
        if zero:
            self.copies.zero(load.transfers)
