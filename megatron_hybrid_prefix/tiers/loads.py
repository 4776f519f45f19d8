"""`Loads`: runs transfers from host memory to the device, and compares checksums of what arrived with those of what was stored.

The copy engines copy entries to a staging buffer on the device, and a kernel copies them from there to their places. Pages that are
too small for the engines are read by the kernel, straight into their places.

The CPU learns that a load failed after the forward that used it. What is wrong or missing is zeros by
then: other bytes may be NaN, and to sample from NaN is an error, on a GPU one that ends the process.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter

import torch

from megatron_hybrid_prefix.tiers.entry_copies import Batch, EntryCopies, Staging, places, succeeds
from megatron_hybrid_prefix.tiers.host_pages import PageContents
from megatron_hybrid_prefix.tiers.queue import BUFFERS, DeviceQueue, HostQueue, Mark
from megatron_hybrid_prefix.tiers.stores import Stores
from megatron_hybrid_prefix.tiers.units import BlockTransfer

logger = logging.getLogger(__name__)

STAGING_BYTES = 128 * 2**20
_LOADS = 4096  # at most this many loads are known at a time


@dataclass(frozen=True, slots=True)
class PreparedLoads:
    """Loads that are ready to be launched. Ids are int64, on the device."""

    rounds: list[list[Batch]]  # batches of one half of the buffer after the other
    sums: torch.Tensor  # (units,) checksums of what is copied, of all batches
    first_pages: torch.Tensor  # (units,)
    load_of: torch.Tensor  # (units,) place in `_bad_rows`
    new_loads: torch.Tensor  # (loads,) those of loads that have not begun


class Loads:
    """See the top of this file.

    Args:
        copies: How entries are copied.
        contents: What the pages hold.
        stores: The stores, whose entries are loaded, and which read from where loads write to.
        queue: Where the copies run.
        staging: The buffer on the device.
        device: The device.

    Attributes:
        queue: Where the copies run.
        bytes: Bytes loaded.
        last: End of the last loads.
        by_engine: Whether the copy engines fill the buffer.
    """

    def __init__(
        self,
        copies: EntryCopies,
        contents: PageContents,
        stores: Stores,
        queue: DeviceQueue | HostQueue,
        staging: Staging,
        *,
        device: torch.device,
    ) -> None:
        self._copies, self._contents, self._stores, self.queue = copies, contents, stores, queue
        self._staging, self.by_engine = staging, copies.by_engine
        self._bad_rows = torch.zeros(_LOADS, dtype=torch.int64, device=device)  # by load
        self._bad_rows_seen = torch.zeros(_LOADS, dtype=torch.int64)
        if device.type == "cuda":
            self._bad_rows_seen = self._bad_rows_seen.pin_memory()
        self._failed: set[int] = set()  # loads
        self._ends: dict[int, Mark] = {}  # by load
        self._in_flight: dict[int | None, set[int]] = {}  # pages and places on the device, by load
        self.last: Mark = None
        self.bytes = 0

    def run(self, units: Sequence[BlockTransfer], prepared: PreparedLoads | None = None) -> None:
        """Launch loads, in order. The model uses the entries after `wait_for`.

        A copy that fails is logged. Its load counts as failed, on this rank. So does one whose launch raises.

        Args:
            units: The loads.
            prepared: What `prepare` returned for them, if it was called before their entries arrived.
        """
        if not units:
            return
        try:
            self._run(units, prepared)
        except BaseException:
            self._failed.update(_load_ids(units))
            raise

    def _run(self, units: Sequence[BlockTransfer], prepared: PreparedLoads | None) -> None:
        with self.queue.running(*self._stores.marks_before_loads(units)):
            if prepared is None:
                prepared = self._prepare(units, bring=True)
            else:
                self._bring(*prepared.rounds[:BUFFERS])
            rounds = prepared.rounds
            self._bad_rows.index_fill_(0, prepared.new_loads, 0)  # the other loads have begun with other entries
            expected = self._contents.sums.index_select(0, prepared.first_pages)
            try:
                for number, round_ in enumerate(rounds):
                    self.queue.use(round_[0].half)
                    for batch in round_:
                        if not (batch.is_here and succeeds(self._load, batch)):
                            self._fail(batch)
                    self.queue.free(round_[0].half)
                    self._bring(*rounds[number + BUFFERS :][:1])
                self._bad_rows.index_add_(0, prepared.load_of, prepared.sums.ne_(expected))
                self._bad_rows_seen.copy_(self._bad_rows, non_blocking=True)
            finally:
                self.last = self.queue.mark()
                for unit in units:
                    self._in_flight.setdefault(unit.load_id, set()).update(places(unit))
                self._ends |= dict.fromkeys(_load_ids(units), self.last)

    def prepare(self, units: Sequence[BlockTransfer], *, begun: bool) -> PreparedLoads:
        """Do all that can be done before the entries of these loads (at least one) are on the host.

        Args:
            units: See `run`.
            begun: Other transfers of the same loads were prepared before, and will be launched before.
        """
        with self.queue.running():
            return self._prepare(units, bring=False, begun=begun)

    def wait_for(self, load_id: int) -> None:
        """The model's later launches run after this load."""
        if load_id in self._ends:
            self.queue.wait(self._ends[load_id])

    def forget(self, load_id: int) -> None:
        """Forget a load that the model has waited for, and whose result is not needed."""
        self._ends.pop(load_id, None)
        self._in_flight.pop(load_id, None)
        self._failed.discard(load_id)

    def has_failed(self, load_id: int) -> bool:
        """Whether an entry of the load differs from what was stored, or its launch raised, or it was never launched. Forgets it.

        Call it after the model has used the loaded entries: the load is over by then, and the call does not wait.
        """
        if load_id in self._failed or load_id not in self._ends:
            self.forget(load_id)
            return True
        mark = self._ends[load_id]
        self.forget(load_id)
        self.queue.finish(mark)
        return bool(self._bad_rows_seen[load_id % _LOADS])

    def mark_before_stores(self, units: Sequence[BlockTransfer]) -> Mark:
        """The mark after which these stores may run; None if no unfinished load uses their places."""
        if not self._in_flight:
            return None
        touched = set().union(*self._in_flight.values())  # places that unfinished loads read or write
        return self.last if any(not touched.isdisjoint(places(unit)) for unit in units) else None

    def _prepare(self, units: Sequence[BlockTransfer], *, bring: bool, begun: bool = False) -> PreparedLoads:
        """Makes batches and uploads ids; call it inside `running`.

        Args:
            units: The loads, at least one.
            bring: Whether to begin with the copies to the staging buffer, so that the host link is busy.
            begun: See `prepare`.
        """
        later = groupby(self._copies.batches(units, self._staging), key=attrgetter("half"))
        rounds = [list(next(later)[1])]
        if bring:
            self._bring(rounds[0])
        rounds += [list(round_) for _, round_ in later]
        if bring:
            self._bring(*rounds[1:BUFFERS])
        load_ids = _load_ids(units)
        uploaded = self._copies.upload(
            list(chain(*rounds)),
            [unit.pages[0] for unit in units],
            [load_id % _LOADS for load_id in load_ids],
            sorted({load_id % _LOADS for load_id in load_ids if load_id not in self._ends and not begun}),
        )
        return PreparedLoads(rounds, *uploaded)

    def _bring(self, *rounds: list[Batch]) -> None:
        """Copies entries to the staging buffer, if the copy engines do that."""
        for round_ in rounds if self.by_engine else ():
            with self.queue.ahead(round_[0].half):
                for batch in round_:
                    batch.is_here = succeeds(self._copy_from_pages, batch)

    def _copy_from_pages(self, batch: Batch) -> None:
        self._copies.to_staging(batch, self._staging)

    def _load(self, batch: Batch) -> None:
        """Copies entries to their places."""
        self._copies.to_places(batch, self._staging if self.by_engine else None)
        self._copies.zero_wrong(batch, self._contents.sums)
        missing = [unit for unit in batch.units if not self._contents.holds(unit)]
        for unit in missing:
            page = unit.pages[0]
            logger.error("host entry in page %d is %s, expected %s", page, self._contents.tags.get(page), unit.tag)
        self._failed.update(_load_ids(missing))
        if missing:
            self._copies.zero(missing)
        self.bytes += self._copies.entry_bytes(batch.kind) * len(batch.units)

    def _fail(self, batch: Batch) -> None:
        """The batch could not be copied."""
        self._contents.drop(batch.units)
        self._failed.update(_load_ids(batch.units))
        succeeds(self._zero, batch)

    def _zero(self, batch: Batch) -> None:
        self._copies.zero(batch.units)


def _load_ids(units: Sequence[BlockTransfer]) -> list[int]:
    """Each transfer's load; all end on the device."""
    ids = [unit.load_id for unit in units if unit.load_id is not None]
    assert len(ids) == len(units)
    return ids
