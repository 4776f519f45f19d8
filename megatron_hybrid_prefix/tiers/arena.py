"""`HostArena`: runs transfers between the device and pinned host memory, and verifies what is loaded.

On the device an entry is spread over all layers; on the host it is in pages. Stores and loads go through staging buffers on the
device, whose halves are used in turn (``stores.py``, ``loads.py``; the ways over the host link: ``ops/page_copies.py``). They have
separate streams, because the host link has two directions.

A store gives every entry a tag and a checksum over all its bytes, computed by the kernel that gathers it, or by one of its own
where the copy engines copy it. Expected checksums stay on the device (``host_pages.py``).

The CPU copies entries to and from a tier behind the host, with their tags and checksums. It first waits until no transfer uses
their pages (``tier_moves.py``). A `SharedTier` has threads for that (``shared_tier_moves.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import torch

from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.tiers import loads, stores
from megatron_hybrid_prefix.tiers.base import SharedTier, Tier
from megatron_hybrid_prefix.tiers.entry_copies import EntryCopies, Staging, Tensors
from megatron_hybrid_prefix.tiers.host_pages import HostPages, PageContents
from megatron_hybrid_prefix.tiers.loads import Loads
from megatron_hybrid_prefix.tiers.queue import BUFFERS, DeviceQueue, HostQueue
from megatron_hybrid_prefix.tiers.shared_tier_moves import SharedTierMoves
from megatron_hybrid_prefix.tiers.stores import Stores
from megatron_hybrid_prefix.tiers.tier_moves import TierMoves
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, EntryKind


class HostArena:
    """Pinned memory in pages, and the transfers to and from it.

    Args:
        tensors: Called at each transfer. Returns the device tensors by kind, each (layers, KV blocks or slots, *shape) and
            contiguous inside a block or slot. (Their addresses change when the engine is suspended.)
        pages: Number of pages.
        page_bytes: Bytes per page.
        pages_of: Pages per entry, by kind.
        device: Device of the tensors.
        behind: The tier behind the host, or None.

    Attributes:
        pages: The memory.
        contents: What it holds.
        stores: Transfers from the device.
        loads: Transfers to the device.

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
        behind: Tier | None = None,
    ) -> None:
        device = torch.device(device)
        is_shared = isinstance(behind, SharedTier)
        self.pages = HostPages(pages, page_bytes, device)
        self.contents = PageContents(pages, device, for_threads=is_shared)
        self._copies = EntryCopies(tensors, self.pages, pages_of=pages_of, device=device)
        store_queue, load_queue = (
            DeviceQueue(device, ahead=ahead) if device.type == "cuda" else HostQueue() for ahead in (1, BUFFERS)
        )
        store_staging, load_staging = (
            Staging(min(size, pages * page_bytes), self._copies.row_bytes, device)
            for size in (stores.STAGING_BYTES, loads.STAGING_BYTES)
        )
        self.stores = Stores(self._copies, self.contents, store_queue, store_staging)
        self.loads = Loads(
            self._copies,
            self.contents,
            self.stores,
            load_queue,
            load_staging,
            device=device,
        )
        self._behind: TierMoves | None = None
        self._shared: SharedTierMoves | None = None
        if behind is not None:
            parts = self._copies, self.pages, self.contents, self.stores, self.loads
            if isinstance(behind, SharedTier):
                self._shared = SharedTierMoves(behind, *parts)
            else:
                self._behind = TierMoves(behind, *parts)

    def close(self) -> None:
        """Free the memory; garbage collection of the arena does so, too."""
        if self._shared is not None:
            self._shared.close()
        self.pages.close()

    @property
    def memory(self) -> torch.Tensor:
        """All pages, (bytes,) uint8."""
        return self.pages.memory

    @property
    def page_bytes(self) -> int:
        """Bytes per page."""
        return self.pages.page_bytes

    @property
    def bytes_stored(self) -> int:
        """Bytes that were copied from the device."""
        return self.stores.bytes

    @property
    def bytes_loaded(self) -> int:
        """Bytes that were copied to the device."""
        return self.loads.bytes

    def bytes_of(self, kind: EntryKind) -> int:
        """Bytes of one entry on this rank."""
        return self._copies.bytes[kind]

    def carry_out(self, units: Sequence[BlockTransfer], *, send: bool = True, beside: bool = False) -> None:
        """Launch transfers in order. The model may overwrite stored entries after `wait_for_stores`.

        A transfer that fails is logged. Its load counts as failed, on this rank.

        Args:
            units: The transfers.
            send: False: gather what is stored, and leave its copies to the host to `send`. What needs them launches them, too.
            beside: Leave half of the device to the model's later launches while entries are gathered.
        """
        behind = self._behind or self._shared
        for (source, target), group in groupby(units, key=attrgetter("source", "target")):
            run = list(group)
            if source == DEVICE:
                if self._shared is not None:
                    run = self._shared.overwrite(run)
                before = self.loads.mark_before_stores(run)
                self.stores.run(run, before, send=send, beside=beside)
            elif target == DEVICE:
                self.loads.run(run if self._shared is None else self._shared.without_put_off(run))
            else:
                assert behind is not None
                self.send()
                (behind.store if source == HOST else behind.load)(run)

    def send(self) -> None:
        """Launch the copies to the host that `carry_out` left. They do not wait for what the model launched since."""
        self.stores.send()

    def wait_for_stores(self) -> None:
        """The model's later launches run after all stores have read their entries."""
        self.stores.wait()

    def wait_for_load(self, load_id: int) -> None:
        """The model's later launches run after this load."""
        self.loads.wait_for(load_id)

    def forget(self, load_id: int) -> None:
        """Forget a load that the model has waited for, and whose result is not needed."""
        self.loads.forget(load_id)

    def has_failed(self, load_id: int) -> bool:
        """Whether an entry of the load differs from what was stored. Forgets the load.

        Call it after the model has used the loaded entries: the load is over by then, and the call does not wait.
        """
        return self.loads.has_failed(load_id)

    def finish(self) -> None:
        """The CPU waits for all transfers between the device and the host."""
        self.send()
        for queue in (self.stores.queue, self.loads.queue):
            with queue.running():
                mark = queue.mark()
            queue.finish(mark)

    # -- a shared tier behind the host ---------------------------------------------------------------------------------

    def is_put_off(self, load_id: int) -> bool:
        """Whether the load waits for entries from behind. The same on all ranks."""
        return self._shared is not None and self._shared.is_put_off(load_id)

    def fetched(self, load_id: int, wait_s: float = 0.0) -> bool | None:
        """Whether all entries that this load waits for have arrived on the host; None: not all are known yet.

        What has arrived goes to the device at once.

        Args:
            load_id: A load that is put off.
            wait_s: Wait at most this long for them.
        """
        assert self._shared is not None
        self.send()
        return self._shared.fetched(load_id, wait_s)

    def run_put_off(self, load_id: int) -> None:
        """All ranks have its entries: launch what is left of the load."""
        assert self._shared is not None
        self._shared.run_put_off(load_id)

    def drop_put_off(self, load_id: int, *, zero: bool = False) -> None:
        """The load is given up. Its entries may still arrive on the host.

        The model's later launches run after what was launched of it: its blocks and slots may be reused.

        Args:
            load_id: The load; nothing happens if it is not put off.
            zero: The next forward reads its blocks and its slot all the same: they hold zeros by then. What was there before may
                be anything, and a request cannot be sampled from NaN.
        """
        if self._shared is not None:
            self._shared.drop_put_off(load_id, zero=zero)

    def drain(self, seconds: float) -> bool:
        """Wait until the shared tier has been given all entries, at most this long. Returns whether it has."""
        return self._shared is None or self._shared.drain(seconds)

    @property
    def behind_stats(self) -> TierStats:
        """Transfers to and from the tier behind the host."""
        behind = self._behind or self._shared
        return TierStats() if behind is None else behind.stats
