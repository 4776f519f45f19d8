"""`ToDevice`: runs transfers from host memory to the device, and compares checksums of what arrived with those of what was stored.

The copy engines copy entries to a staging buffer on the device, and a kernel copies them from there to their places. Pages that are
too small for the engines are read by the kernel, directly into their places.

The CPU learns that a load failed after the forward that used it. Wrong or missing entries are zeros by
then: other bytes may be NaN, and to sample from NaN is an error, on a GPU one that ends the process.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import torch

from megatron_hybrid_prefix.tiers.units import BlockTransfer
from megatron_hybrid_prefix.transfers.entry_copies import Batch, Staging, places, succeeds
from megatron_hybrid_prefix.transfers.queue import BUFFERS, Mark, queue_for
from megatron_hybrid_prefix.transfers.to_host import ToHost

logger = logging.getLogger(__name__)

STAGING_BYTES = 128 * 2**20
_LOADS = 4096  # at most this many loads are known at a time


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """All that this rank knows of the copies of a load.

    Attributes:
        load_id: The load.
        units: Its copies to the device.
        left: Those of them, or of a fetch its reads, that wait for entries from the tier behind the host.
        places: Pages, blocks and slots that launched copies use, until the model's later launches run after them.
        is_launched: Whether a copy was launched.
        end: Mark after the last of them.
        is_wrong: An entry was missing, or a copy could not be launched.
    """

    load_id: int
    units: list[BlockTransfer] = field(default_factory=list)
    left: list[BlockTransfer] = field(default_factory=list)
    places: set[int] = field(default_factory=set)
    is_launched: bool = False
    end: Mark = None
    is_wrong: bool = False


class ToDevice:
    """See the top of this file. Entries of the stores are loaded, and these read from where loads write to.

    Attributes:
        queue: Where the copies run.
        bytes: Bytes loaded.
        last: End of the last loads.
        transfers: Copies of the loads that are not over, by load id.
    """

    def __init__(self, stores: ToHost) -> None:
        self._stores, self._copies, self._pages = stores, stores.copies, stores.copies.pages
        device = self._copies.device
        self.queue = queue_for(device, ahead=BUFFERS)
        self._staging = Staging(self._copies, STAGING_BYTES)
        self._bad_rows = torch.zeros(_LOADS, dtype=torch.int64, device=device)  # by load
        self._bad_rows_seen = torch.zeros(_LOADS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.transfers: dict[int, Transfer] = {}
        self.last: Mark = None
        self.bytes = 0

    def run(self, units: Sequence[BlockTransfer]) -> None:
        """Launch loads, in order. The model uses the entries after `wait_for`.

        A copy that fails is logged. Its load counts as failed, on this rank. So does one whose launch raises.
        """
        if not units:
            return
        try:
            self._run(units, [self.transfers[unit.load_id] for unit in units])
        except BaseException:
            self._note_wrong(units)
            raise

    def transfer(self, load_id: int) -> Transfer:
        """The copies of a load."""
        return self.transfers.get(load_id) or self.transfers.setdefault(load_id, Transfer(load_id=load_id))

    def _note_wrong(self, units: Sequence[BlockTransfer]) -> None:
        """The loads of these cannot be right, on this rank."""
        for unit in units:
            self.transfers[unit.load_id].is_wrong = True

    def _run(self, units: Sequence[BlockTransfer], loads: Sequence[Transfer]) -> None:
        with self.queue.running(*self._stores.marks_before_loads(units)):
            batches = self._copies.batches(units, self._staging)
            # Batches of one half of the buffer after the other.
            rounds = [list(round_) for _, round_ in groupby(batches, key=attrgetter("half"))]
            self._bring(*rounds[:BUFFERS])  # so that the host link is busy while the rest is prepared
            sums, first_pages, load_of, new_loads = self._copies.upload(
                batches,
                [unit.pages[0] for unit in units],
                [load.load_id % _LOADS for load in loads],
                sorted({load.load_id % _LOADS for load in loads if not load.is_launched}),
            )
            self._bad_rows.index_fill_(0, new_loads, 0)  # the other loads have begun with other entries
            expected = self._pages.sums.index_select(0, first_pages)
            try:
                for number, round_ in enumerate(rounds):
                    self.queue.use(round_[0].half)
                    for batch in round_:
                        if not (batch.is_here and succeeds(self._load, batch)):
                            self._fail(batch)
                    self.queue.free(round_[0].half)
                    self._bring(*rounds[number + BUFFERS :][:1])
                self._bad_rows.index_add_(0, load_of, sums.ne_(expected))
                self._bad_rows_seen.copy_(self._bad_rows, non_blocking=True)
            finally:
                self.last = self.queue.mark()
                for unit, load in zip(units, loads, strict=True):
                    load.is_launched, load.end = True, self.last
                    load.places.update(places(unit))

    def wait_for(self, load: Transfer) -> None:
        """The model's later launches run after this transfer."""
        if load.places:
            self.queue.wait(load.end)
            load.places.clear()

    def is_wrong(self, load: Transfer) -> bool:
        """Whether an entry of the load differs from what was stored, or its launch raised, or it was never launched.

        Call it after the model has used the loaded entries: the load is over by then, and the call does not wait.
        """
        if load.is_wrong or not load.is_launched:
            return True
        self.queue.finish(load.end)
        return bool(self._bad_rows_seen[load.load_id % _LOADS])

    def mark_before_stores(self, units: Sequence[BlockTransfer]) -> Mark:
        """The mark after which these stores may run; None if no unfinished load uses their places."""
        touched = set().union(*(load.places for load in self.transfers.values()))
        return self.last if touched and any(not touched.isdisjoint(places(unit)) for unit in units) else None

    def _bring(self, *rounds: list[Batch]) -> None:
        """Copies entries to the staging buffer, if the copy engines do that."""
        for round_ in rounds if self._copies.by_engine else ():
            with self.queue.ahead(round_[0].half):
                for batch in round_:
                    batch.is_here = succeeds(self._copies.to_staging, batch)

    def _load(self, batch: Batch) -> None:
        """Copies entries to their places."""
        self._copies.to_places(batch)
        self._copies.zero_wrong(batch, self._pages.sums)
        missing = [unit for unit in batch.units if not self._pages.holds(unit)]
        for unit in missing:
            page = unit.pages[0]
            logger.error("host entry in page %d is %s, expected %s", page, self._pages.tags.get(page), unit.tag)
        self._note_wrong(missing)
        if missing:
            self._copies.zero(missing)
        self.bytes += self._copies.entry_bytes[batch.kind] * len(batch.units)

    def _fail(self, batch: Batch) -> None:
        """The batch could not be copied."""
        self._pages.drop(batch.units)
        self._note_wrong(batch.units)
        succeeds(lambda failed: self._copies.zero(failed.units), batch)
