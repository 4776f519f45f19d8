"""`Stores`: runs transfers from the device to host memory.

A store gathers entries into a staging buffer on the device, and a kernel copies that to the pages. If no store is on its way, the
kernel copies the first entries straight to their pages, so the host link is busy while the others are gathered. What overwrites a
stored block (a forward, a load) waits until it is gathered, or was copied straight, but not for the other copies to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import torch

from megatron_hybrid_prefix.tiers.entry_copies import Batch, EntryCopies, Staging, places, succeeds
from megatron_hybrid_prefix.tiers.host_pages import PageContents
from megatron_hybrid_prefix.tiers.queue import BUFFERS, DeviceQueue, HostQueue, Mark
from megatron_hybrid_prefix.tiers.units import BlockTransfer

STAGING_BYTES = 512 * 2**20  # this much can be evicted at once without waiting for the host link
FIRST_BYTES = 24 * 2**20  # of a store: go straight to the host; the model waits 0.5 ms for them


class Stores:
    """See the top of this file.

    Args:
        copies: How entries are copied.
        contents: What the pages hold.
        queue: Where the copies run.
        staging: The buffer on the device.

    Attributes:
        queue: Where the copies run.
        bytes: Bytes stored.
        stored: End of the last stores.
    """

    def __init__(
        self, copies: EntryCopies, contents: PageContents, queue: DeviceQueue | HostQueue, staging: Staging
    ) -> None:
        self._copies, self._contents, self.queue, self._staging = copies, contents, queue, staging
        self._sent: Mark = None  # end of the last direct copy to the host; None once the model waits for it
        self._gathered: Mark = None  # end of the last gather; likewise
        self._new_pages: set[int] = set()  # first pages of entries that may still be in flight to the host
        self.stored: Mark = None
        self.bytes = 0

    def run(self, units: Sequence[BlockTransfer], after: Mark) -> None:
        """Launch stores, in order. The model may overwrite the entries after `wait`.

        A copy that fails is logged. Its entries are not on the host then.

        Args:
            units: The stores.
            after: They run after this mark of another queue.
        """
        kinds = [unit.tag.kind for unit in units]
        if kinds != sorted(kinds):
            used = [place for unit in units for place in places(unit)]
            if len(set(used)) == len(used):  # their order does not matter: sort for fewer batches
                units = sorted(units, key=lambda unit: unit.tag.kind)
        self._contents.drop(units)  # until `_store`
        is_idle = self.stored is None or self.stored.query()  # changes the way, but nothing that arrives
        with self.queue.running(after):
            count = self._direct_count(units) if is_idle else 0
            direct = list(self._copies.batches(units[:count], None))
            batches = list(self._copies.batches(units[count:], self._staging))
            first = batches[0].half if batches else self._staging.used_last
            with self.queue.ahead(first):
                sums, *_ = self._copies.upload([*direct, *batches])
            self.queue.use(first)
            if sums.is_cuda:
                sums.record_stream(torch.cuda.current_stream())  # the memory of all that was uploaded
            for batch in direct:
                if not succeeds(self._store, batch):
                    self._contents.drop(batch.units)
                self._sent = self.queue.mark()
            for half, round_ in groupby(batches, key=attrgetter("half")):
                try:
                    for batch in round_:
                        with self.queue.ahead(half):
                            copied = succeeds(self._gather, batch)
                            self._gathered = self.queue.mark()
                        self.queue.use(half)
                        if not (copied and succeeds(self._store, batch)):
                            self._contents.drop(batch.units)
                finally:
                    self.queue.free(half)
            self._contents.show_sums()
            self.stored = self.queue.mark()
        self._new_pages.update(unit.pages[0] for unit in units)

    def wait(self) -> None:
        """The model's later launches run after all stores have read their entries."""
        for mark in (self._sent, self._gathered):
            if mark is not None:
                self.queue.wait(mark)
        self._sent = self._gathered = None

    def marks_before_loads(self, units: Sequence[BlockTransfer]) -> tuple[Mark, ...]:
        """The marks after which these loads may write to the device and read their pages."""
        is_new = any(unit.pages[0] in self._new_pages for unit in units)
        if is_new:
            self._new_pages.clear()  # these loads wait for all of them, and others run after these
        return self._sent, self._gathered, self.stored if is_new else None

    def _gather(self, batch: Batch) -> None:
        """Gathers entries in the staging buffer."""
        self._copies.gather(batch, self._staging)

    def _store(self, batch: Batch) -> None:
        """Copies entries to the host: from the staging buffer, or from their places."""
        self._copies.to_pages(batch, self._staging)
        self._contents.put(batch.units, batch.pages[:, 0], batch.sums)
        self.bytes += self._copies.entry_bytes(batch.kind) * len(batch.units)

    def _direct_count(self, units: Sequence[BlockTransfer]) -> int:
        """How many of these stores, the first ones, go straight to the host: as many as the staging buffer has no room for.

        The model waits for the host link for those, and would wait longer for half of the buffer. At least those that fit in
        `FIRST_BYTES`, so that the link is busy while the others are gathered.
        """
        sizes = [self._copies.row_bytes[unit.tag.kind] for unit in units]
        count = len(sizes)
        for _ in range(BUFFERS):
            used = 0
            while count and used + sizes[count - 1] <= self._staging.half_bytes:
                count -= 1
                used += sizes[count]
        first_bytes = sum(sizes[:count])
        while count < len(sizes) and first_bytes + sizes[count] <= FIRST_BYTES:
            first_bytes += sizes[count]
            count += 1
        return count
