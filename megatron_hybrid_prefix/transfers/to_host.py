"""`ToHost`: runs transfers from the device to host memory.

A store gathers entries into a staging buffer on the device, and copies that to the pages: by the copy engines, or by a kernel if pages
are small. A forward or a load that overwrites a stored block waits until it is gathered, but not for the copies to the host.

These copies are launched later (`ToHost.send`), or when a half of the buffer, or a page, is needed again: a forward that needs the room,
and the GPU with it, would wait while the CPU launches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

import torch

from megatron_hybrid_prefix.tiers.units import BlockTransfer
from megatron_hybrid_prefix.transfers.entry_copies import Batch, EntryCopies, Staging, succeeds, without_shared_pages
from megatron_hybrid_prefix.transfers.queue import Mark, queue_for

STAGING_BYTES = 640 * 2**20  # this much can be evicted at once without waiting for the host link


class ToHost:
    """Copies entries to the host.

    Attributes:
        copies: How entries are copied.
        queue: Where the copies run.
        bytes: Bytes stored.
        stored: End of the copies to the host that are launched.
    """

    def __init__(self, copies: EntryCopies) -> None:
        self.copies, self._pages = copies, copies.pages
        self.queue = queue_for(copies.device)
        self._staging = Staging(copies, STAGING_BYTES)
        self._gathered: Mark = None  # end of the last gather; None once the model waits for it
        self._new_pages: set[int] = set()  # first pages of entries that may still be in flight to the host
        self._waiting: dict[int, list[Batch]] = {}  # by half of the buffer: gathered, and not on the way to the host
        self._waiting_pages: set[int] = set()  # where these go to
        self._summed: list[tuple[torch.Tensor, torch.Tensor]] = []  # first pages and checksums that are not noted yet
        self.stored: Mark = None
        self.bytes = 0

    def run(self, units: Sequence[BlockTransfer], after: Mark, *, beside: bool = False) -> None:
        """Gather entries, in order; `send` copies them to the host. The model may overwrite the entries after `wait`.

        A copy that fails is logged. Its entries are not on the host then.

        Args:
            units: The stores.
            after: They run after this mark of another queue.
            beside: Leave half of the device to the model's later launches.
        """
        if not units:
            return
        if any(not self._waiting_pages.isdisjoint(unit.pages) for unit in units):
            self.send()
        self._new_pages.update(_first_pages(units))
        with self.queue.running(after):
            for number, different in enumerate(without_shared_pages(units)):
                if number:
                    self._send()  # to the same pages
                self._gather(different, beside=beside)

    def send(self) -> None:
        """Launch the copies of what is gathered. They need not run after what the model launched since."""
        if self._summed:
            with self.queue.running(after_model=False):
                self._send()

    def _gather(self, units: Sequence[BlockTransfer], *, beside: bool) -> None:
        """Gathers entries, which go to different pages, in the staging buffer; arguments as of `run`."""
        units = sorted(units, key=lambda unit: unit.tag.kind)  # for fewer batches
        self._pages.drop(units)  # until they are copied
        self._waiting_pages.update(page for unit in units for page in unit.pages)
        batches = self.copies.batches(units, self._staging)
        with self.queue.beside():  # the queue may be busy for long
            sums, first_pages = self.copies.upload(batches, _first_pages(units))
        if sums.is_cuda:
            sums.record_stream(torch.cuda.current_stream())  # the memory of all that was uploaded
        for half, round_ in groupby(batches, key=attrgetter("half")):
            self._send_half(half)  # what is still there
            with self.queue.ahead(half):
                gather = partial(self.copies.gather, beside=beside)
                self._waiting[half] = [batch for batch in round_ if succeeds(gather, batch)]
                self._gathered = self.queue.mark()
        self._summed.append((first_pages, sums))

    def _send(self) -> None:
        """Copies what is gathered to the host, and notes its checksums."""
        for half in list(self._waiting):
            self._send_half(half)
        while self._summed:
            self._pages.put_sums(*self._summed.pop(0))
        self._pages.show_sums()
        self.stored = self.queue.mark()
        self._waiting_pages.clear()

    def _send_half(self, half: int) -> None:
        """Copies a half of the staging buffer to the host, and frees it."""
        if half not in self._waiting:
            return
        self.queue.use(half)
        try:
            for batch in self._waiting.pop(half):
                if succeeds(self.copies.to_pages, batch):  # on the host, once the queue gets here
                    self._pages.put_tags(batch.units)
                    self.bytes += self.copies.entry_bytes[batch.kind] * len(batch.units)
        finally:
            self.queue.free(half)
            self.stored = self.queue.mark()

    def wait(self) -> None:
        """The model's later launches run after all stores have read their entries."""
        if self._gathered is not None:
            self.queue.wait(self._gathered)
        self._gathered = None

    def marks_before_loads(self, units: Sequence[BlockTransfer]) -> tuple[Mark, ...]:
        """The marks after which these loads may write to the device and read their pages."""
        pages = set(_first_pages(units))
        if not pages.isdisjoint(self._waiting_pages):
            self.send()
        is_new = not pages.isdisjoint(self._new_pages)
        if is_new:
            # These loads wait for all copies that are launched, and other loads run after these.
            self._new_pages &= self._waiting_pages
        return self._gathered, self.stored if is_new else None


def _first_pages(units: Sequence[BlockTransfer]) -> list[int]:
    return [unit.pages[0] for unit in units]
