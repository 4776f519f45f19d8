"""`recompute_cost`: evicts the checkpoint with the lowest value.

    value = cost of computing from the nearest kept state above up to this one  x  how likely this state is to be used

The value is divided by the bytes that evicting the state frees: its own, and those of the KV that only this state makes
useful, unless running requests hold that.

*Cost* is counted in blocks, or by a function of the model (attention makes deep blocks dearer). Only states that are
still kept count as "above": evicting a state makes the states below it dearer. Each kept state can be reached, because
a state is dropped together with its KV.

*Likely* is a rate of use, learned for each kind of state by age (``likelihood.py``). The kind of a state has three
parts: why it was first kept, how often it was used, and how many blocks it saved when it was first kept (the last two
in powers of two).

With a host tier both tiers rank the same records. So "kept" means kept on any tier, what was learned of a state goes on when
the state moves to the host or back, and a state is evicted when no tier keeps it. Only the bytes that evicting frees differ: on
the device KV is useful for states on the device.

Evicted states are remembered for a while. If one is computed again, it would have been used: that counts as a use, and
its history continues. If the evicted state was likelier to be used than the nearest state above, the state above
inherits its kind and age: a request that would have resumed from the evicted state resumes from the one above.

Methods cost O(log n) amortised; adding a state between others also O(states next below it). Only the calls set the order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from megatron_hybrid_prefix.policy.base import KeptState
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.likelihood import Cell, Likelihood, oldest_in
from megatron_hybrid_prefix.policy.needs import Ancestry

type Kind = tuple[int, int, int]
"""Why a state was first kept; binary digits of its number of uses; binary digits of the blocks that it first saved."""

_MOST_USES_BITS = 4  # 8 or more uses are one kind
_REMEMBERED = 4  # remembered states, as a multiple of the most states ever kept
_REMEMBERED_AT_LEAST = 64
_REFRESH_AT_LEAST = 64  # least calls between two refreshes of the rates; the number of states if that is more
_FADE_REFRESHES = 64  # refreshes after which old counts are halved


@dataclass(slots=True, eq=False)
class _Record[T]:
    """The policy's record of a state that is kept or remembered.

    Attributes:
        serial: Serial number of the record, which breaks ties.
        origin, uses, first_blocks: Why it was first kept, how often it was used, and how many blocks it first saved.
        state: The state; None if it is evicted and remembered.
        touched: Time of its last use (or publication), or that of the state it inherited from.
        kind, age: Kind and age number of its cell.
        cell: The cell it is a member of.
        entry: Number of its valid entry on each tier that keeps it.
        due: Number of its valid entry in the calendar.
    """

    serial: int
    origin: CheckpointReason
    uses: int
    first_blocks: int
    state: T | None = None
    touched: int = 0
    age: int = 0
    kind: Kind = field(init=False)
    cell: Cell = field(init=False)
    entry: int = -1
    due: int = -1


type _Entry[T] = tuple[float, int, int, int, T]
"""Value, order of age, serial, number, state. Valid if the number is that of the state's record, and the state is kept. One entry
of a state has at most its current value; more of them only come later."""


class _Known[T: KeptState]:
    """The records of the states of all tiers: which are above others, how often and how likely they are used.

    Args:
        cost: See `RecomputeCostEviction`.

    Attributes:
        tiers: The policies of the tiers, the device first.
        ancestry: The states that a tier keeps.
        records: The record of each of them.
        lost: The same of evicted states that are remembered, by key; evicted longest ago first.
    """

    def __init__(self, cost: Callable[[int, int], float]) -> None:
        self.cost = cost
        self.tiers: list[RecomputeCostEviction[T]] = []
        self.ancestry: Ancestry[T] = Ancestry()
        self.records: dict[T, _Record[T]] = {}
        self._likelihood: Likelihood[Kind] = Likelihood()
        self.lost: OrderedDict[bytes, _Record[T]] = OrderedDict()
        self._most_kept = 0
        self._calendar: list[tuple[int, int, _Record[T]]] = []  # (time when the age number grows, number, record)
        self._now = self._refreshes = 0
        self._numbers, self._serials = count(), count()
        self._next_refresh = _REFRESH_AT_LEAST

    def added(self, state: T) -> None:
        """The first tier keeps ``state``."""
        self._tick()
        self.ancestry.add(state)
        record = self.lost.pop(state.key, None)
        if record is not None:
            # A request computed it again, so it would have been used.
            record.cell.leave(self._now, used=True)
            record.uses += 1
        else:
            origin = state.reason
            assert origin is not None
            # A junction or a breakpoint is shared by two prompts, which counts as one use.
            saved_blocks = state.depth_blocks - self.depth_above_blocks(state)
            record = _Record(next(self._serials), origin, int(origin <= CheckpointReason.BREAKPOINT), saved_blocks)
        record.state = state
        self.records[state] = record
        self._most_kept = max(self._most_kept, len(self.records))
        self._touch(state, record)
        for below in self.ancestry.next_below(state):  # they cost less to recompute now
            self.rank(below)

    def used(self, state: T) -> None:
        """A request resumes from ``state``."""
        self._tick()
        record = self.records[state]
        record.cell.leave(self._now, used=True)
        record.uses += 1
        self._touch(state, record)

    def removed(self, state: T) -> None:
        """No tier keeps ``state`` any more."""
        record = self.records.pop(state)
        record.state = None
        above = self.ancestry.nearest_above(state)
        longer = self.ancestry.remove(state)
        if longer is not None:
            self.tiers[-1].rank(longer)
        if above is not None:
            self._inherit(above, record)
        self.lost[state.key] = record
        while len(self.lost) > _REMEMBERED * self._most_kept + _REMEMBERED_AT_LEAST:
            self.forget(self.lost.popitem(last=False)[1])

    def clear(self) -> None:
        """The states of all tiers were dropped. Keeps the rates that were learned."""
        for record in (*self.records.values(), *self.lost.values()):
            self.forget(record)
        self.records.clear()
        self.lost.clear()
        self.ancestry.clear()
        self._calendar.clear()

    def rank(self, state: T) -> None:
        """The value of a kept state fell, or others go before it now. The tiers that keep it rank it again."""
        self.records[state].entry = next(self._numbers)
        for tier in self.tiers:
            tier.rank(state)

    def forget(self, record: _Record[T]) -> None:
        """Counts the time of a record that is neither kept nor remembered any more."""
        record.cell.leave(self._now, used=False)
        record.due = -1

    def depth_above_blocks(self, state: T) -> int:
        """Depth of the nearest state above."""
        above = self.ancestry.nearest_above(state)
        return 0 if above is None else above.depth_blocks

    def _touch(self, state: T, record: _Record[T]) -> None:
        record.touched = self._now
        # A plain int, because hashing an enum is slow.
        uses_bits, first_bits = min(record.uses.bit_length(), _MOST_USES_BITS), record.first_blocks.bit_length()
        self._settle(record, (int(record.origin), uses_bits, first_bits), 0)
        self.rank(state)

    def _settle(self, record: _Record[T], kind: Kind, age: int) -> None:
        """Puts a record that is in no cell into a cell."""
        record.kind, record.age = kind, age
        record.cell = self._likelihood.cell(kind, age, self._now)
        record.cell.enter(self._now)
        record.due = next(self._numbers)
        heappush(self._calendar, (record.touched + oldest_in(age), record.due, record))

    def _inherit(self, above: T, lost: _Record[T]) -> None:
        """Requests that would have resumed from ``lost`` will resume from ``above``, so it inherits kind and age."""
        heir = self.records[above]
        if lost.cell.rate > heir.cell.rate:
            heir.cell.leave(self._now, used=False)
            heir.touched = lost.touched
            self._settle(heir, lost.kind, lost.age)
            self.rank(above)

    def _tick(self) -> None:
        """Advances the time by one call. Records grow older, and from time to time the rates are refreshed."""
        self._now += 1
        calendar = self._calendar
        while calendar and calendar[0][0] <= self._now:
            _, due, record = heappop(calendar)
            if record.due == due:
                rate = record.cell.rate
                record.cell.leave(self._now, used=False)
                self._settle(record, record.kind, record.age + 1)
                # If it became likelier, its old heap entry is good enough until it reaches the top.
                if record.state is not None and record.cell.rate <= rate:
                    self.rank(record.state)
        if self._now >= self._next_refresh:
            self._refresh()

    def _refresh(self) -> None:
        self._refreshes += 1
        if self._refreshes % _FADE_REFRESHES == 0:
            self._likelihood.fade(self._now)
        self._likelihood.refresh(self._now)
        self._next_refresh = self._now + max(_REFRESH_AT_LEAST, len(self.records))
        # All values changed. This also removes invalid entries.
        for tier in self.tiers:
            tier.rank_all()
        self._calendar = [entry for entry in self._calendar if entry[2].due == entry[1]]
        heapify(self._calendar)


class RecomputeCostEviction[T: KeptState]:
    """Evicts the checkpoint that is expected to cost the least to lose (see the top of this file).

    Args:
        cost: Cost of computing the blocks between two depths, in any unit: ``cost(start_blocks, end_blocks)``. It must
            not fall when the start moves up. By default each block costs the same.
    """

    def __init__(self, *, cost: Callable[[int, int], float] = lambda start, end: end - start) -> None:
        self._join(_Known(cost))

    def _join(self, known: _Known[T]) -> None:
        self._known = known
        known.tiers.append(self)
        self._states: dict[T, None] = {}
        # Decides which KV is needed here. Below the device: by the states of all tiers, as what the device has is no loss.
        self._ancestry = known.ancestry
        self.state_blocks = 1.0  # bytes of a state in KV blocks
        self.know_holders(lambda state: False)
        # Records are ranked when somebody asks: most change several times in between.
        self._heap: list[_Entry[T]] = []  # the least value first; some are not valid
        self._changed: dict[T, None] = {}  # to be ranked first

    def tier_below(self) -> RecomputeCostEviction[T]:
        self._ancestry = Ancestry()
        below = copy(self)  # with what a subclass keeps
        below._join(self._known)
        return below

    def share_memory(self, *, state_blocks: float) -> None:
        self.state_blocks = state_blocks

    def know_holders(self, is_held: Callable[[T], bool]) -> None:
        self._is_held = is_held

    def evicted_keys(self) -> Iterable[bytes]:
        """See RemembersEvicted."""
        return self._known.lost.keys()

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[T]:
        return iter(self._states)

    def added(self, state: T) -> None:
        known = self._known
        self._states[state] = None
        if self._ancestry is not known.ancestry:
            self._ancestry.add(state)
        if state in known.records:
            self.rank(state)
        else:
            known.added(state)

    def used(self, state: T) -> None:
        # A state that both tiers keep is used on the device.
        if self is self._known.tiers[0] or state not in self._known.tiers[0]._states:
            self._known.used(state)

    def removed(self, state: T) -> None:
        known = self._known
        del self._states[state]
        if self._ancestry is not known.ancestry:
            longer = self._ancestry.remove(state)
            if longer is not None:
                self.rank(longer)
        for tier in known.tiers:
            if state in tier._states:
                return
        known.removed(state)

    def value(self, state: T) -> float:
        """The value of keeping ``state``: expected cost saved per call."""
        known = self._known
        cost = known.cost(known.depth_above_blocks(state), state.depth_blocks)
        freed_blocks = self.state_blocks + (0 if self._is_held(state) else self._ancestry.exclusive_blocks(state))
        return cost / freed_blocks * known.records[state].cell.rate

    def clear(self) -> None:
        """Keeps the rates that were learned. All tiers are cleared together."""
        self._states.clear()
        self._ancestry.clear()
        self._heap.clear()
        self._changed.clear()
        self._known.clear()

    def rank(self, state: T) -> None:
        """Ranks a state again, if it is kept here: it is worth less, maybe because more KV here depends on it."""
        if state in self._states:
            self._changed[state] = None

    def rank_all(self) -> None:
        """Ranks all states again."""
        self._heap.clear()
        self._changed = self._states.copy()

    def victim(self, evictable: Callable[[T], bool]) -> T | None:
        self._rank_changed()
        heap, records, passed_over = self._heap, self._known.records, []
        found = None
        while heap:
            entry = heap[0]
            value, _, _, number, state = entry
            if state not in self._states or records[state].entry != number:
                heappop(heap)
            elif self.value(state) > value:  # a state above it was evicted, or it grew older and likelier
                heapreplace(heap, self._entry(state))
            elif evictable(state):
                found = state
                break
            else:
                passed_over.append(heappop(heap))
        for entry in passed_over:
            heappush(heap, entry)
        return found

    def _rank_changed(self) -> None:
        heap, entries = self._heap, [self._entry(state) for state in self._changed if state in self._states]
        self._changed.clear()
        if len(entries) > len(heap):
            heap += entries
            heapify(heap)
        else:
            for entry in entries:
                heappush(heap, entry)

    def _entry(self, state: T) -> _Entry[T]:
        # Ties: evict the older state. If the older one will be used sooner, evict the younger one, or no state would
        # live long enough to be used.
        record = self._known.records[state]
        order = -record.touched if record.cell.is_rising else record.touched
        return self.value(state), order, record.serial, record.entry, state
