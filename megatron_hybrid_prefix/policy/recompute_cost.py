"""`recompute_cost`: the checkpoint goes first whose loss is expected to cost the least.

    value = cost of computing from the nearest kept state above up to this one  x  how likely that is to be wanted

Over the bytes of a state, which are the same for all states of a tier and so left out.

*Cost* is counted in blocks, or by a function of the model (attention makes deep blocks dearer). Nearest is by the states
that are kept now: losing one makes those below it dearer. All of them can be reached, since a state goes with its KV.

*Likely* is a rate of use, learned for each kind of state by age (``likelihood.py``). A state's kind is why it was first
kept, how often it was used, and how much it saved when it was first kept, the last two in powers of two. What was
evicted is remembered for a while: when it is made again it would have been used, and it goes on where it was.
Where a state goes whose kind is the likelier one, the nearest above takes its place in the ranking: whoever would have
resumed from the one resumes from the other.

Guesses (interval checkpoints) are a kind like any other: they go first where they were of little use. So the pool
has many of them while there is room and none when slots are scarce, without a threshold.

Every verb costs O(log n) amortised, and adding a state between others O(states next below it) besides. The order follows
calls alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from megatron_hybrid_prefix.policy.ancestry import Ancestry
from megatron_hybrid_prefix.policy.base import KeptState
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.likelihood import Cell, Likelihood, oldest_in

type Kind = tuple[int, int, int]
"""Why a state was first kept, binary digits of how often it was used, binary digits of the blocks that it saved first."""

_MOST_USES_BITS = 4  # 8 uses and more are alike
_REMEMBERED = 4  # evicted states that are remembered, as a multiple of the most that were ever kept
_REMEMBERED_AT_LEAST = 64
_REFRESH_AT_LEAST = 64  # calls between two refreshes of the rates; as many as there are states, where there are more
_FADE_REFRESHES = 64  # refreshes after which what was seen counts half


class _Record[T]:
    """A state that is kept, or remembered; what the policy knows of it.

    Attributes:
        state: None where it is only remembered.
        serial: Which record; ties go by it.
        origin, uses, first_blocks: What it is by itself.
        touched: When it was published or used, or that of the state that it took the place of.
        kind, age: Of its cell.
        cell: Where it is a member.
        entry: Number of its valid entry in the heap.
        due: Number of its valid entry in the calendar.
    """

    __slots__ = (
        "age",
        "blocks",
        "cell",
        "due",
        "entry",
        "first_blocks",
        "kind",
        "origin",
        "serial",
        "state",
        "touched",
        "uses",
    )

    def __init__(self, serial: int, origin: CheckpointReason) -> None:
        self.state: T | None = None
        self.serial = serial
        self.origin = origin
        self.uses = 0
        self.first_blocks = 0
        self.touched = 0
        self.age = 0
        self.kind: Kind
        self.cell: Cell
        self.entry = -1
        self.due = -1

    @property
    def own_kind(self) -> Kind:
        """See `Kind`."""
        # A plain int: an enum's hash is a function in Python.
        return int(self.origin), min(self.uses.bit_length(), _MOST_USES_BITS), self.first_blocks.bit_length()

    @property
    def is_probationary(self) -> bool:
        """Whether it was kept on a guess and never used."""
        return self.origin == CheckpointReason.INTERVAL and not self.uses


def count_blocks(start_blocks: int, end_blocks: int) -> float:
    """Cost of computing from one depth to another where every token costs the same."""
    return end_blocks - start_blocks


class RecomputeCostEviction[T: KeptState]:
    """See the module.

    Args:
        cost: Of computing the blocks between two depths, in any unit: ``cost(start_blocks, end_blocks)``; it must not
            fall when the start comes earlier.
    """

    def __init__(self, *, cost: Callable[[int, int], float] = count_blocks) -> None:
        self._cost = cost
        self._ancestry: Ancestry[T] = Ancestry()
        self._likelihood: Likelihood[Kind] = Likelihood()
        self._records: dict[T, _Record[T]] = {}
        self._lost: OrderedDict[bytes, _Record[T]] = OrderedDict()  # remembered ones by key, lost longest ago first
        self._most_kept = 0
        # Entries (value, order of age, serial, number, record): never above the record's true value, and valid if it is the last.
        self._heap: list[tuple[float, int, int, int, _Record[T]]] = []
        self._probationary_heap: list[
            tuple[float, int, int, int, _Record[T]]
        ] = []  # the same, of the probationary ones
        self._calendar: list[tuple[int, int, _Record[T]]] = []  # (when its age number grows, number, record)
        self._now = self._numbers = self._serials = 0
        self._next_refresh = _REFRESH_AT_LEAST
        self._refreshes = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[T]:
        return iter(self._records)

    def added(self, state: T) -> None:
        """See EvictionPolicy."""
        self._tick()
        self._ancestry.add(state)
        record = self._lost.pop(state.key, None)
        if record is not None:
            # It was made again because somebody wanted it, and would have been used had it been kept.
            record.cell.leave(self._now, used=True)
            record.uses += 1
        else:
            origin = state.reason
            assert origin is not None
            record = _Record(self._serials, origin)
            self._serials += 1
            # What two prompts share, or the caller says they will, is as good as used once.
            record.uses = int(origin <= CheckpointReason.BREAKPOINT)
            record.first_blocks = state.depth_blocks - self._ancestry.depth_above_blocks(state)
        record.state = state
        self._records[state] = record
        self._most_kept = max(self._most_kept, len(self._records))
        self._touch(record)
        for below in self._ancestry.next_below(state):  # they are cheaper now
            self._rank(self._records[below])

    def used(self, state: T) -> None:
        """See EvictionPolicy."""
        self._tick()
        record = self._records[state]
        record.cell.leave(self._now, used=True)
        record.uses += 1
        if record.origin == CheckpointReason.INTERVAL and state.reason is not None:
            record.origin = state.reason  # a guess that is wanted for something else now
        self._touch(record)

    def removed(self, state: T) -> None:
        """See EvictionPolicy."""
        above = self._ancestry.nearest_above(state)
        record = self._records.pop(state)
        self._ancestry.remove(state)
        record.state = None
        record.entry = -1
        if above is not None:
            self._inherit(self._records[above], record)
        if record.is_probationary:
            self._forget(record)  # whether it would have been used is not seen: others resume wherever the KV parts
            return
        self._lost[state.key] = record
        while len(self._lost) > _REMEMBERED * self._most_kept + _REMEMBERED_AT_LEAST:
            self._forget(self._lost.popitem(last=False)[1])

    def victim(self, evictable: Callable[[T], bool], *, probationary_only: bool = False) -> T | None:
        """See EvictionPolicy."""
        heap = self._probationary_heap if probationary_only else self._heap
        passed_over = []
        found: T | None = None
        while heap:
            value, _, _, number, record = heap[0]
            state = record.state
            if state is None or record.entry != number or (probationary_only and not record.is_probationary):
                heappop(heap)
            elif self.value(state) > value:  # a state above it went, or it grew older and likelier
                heappop(heap)
                self._rank(record)
            elif evictable(state):
                found = state
                break
            else:
                passed_over.append(heappop(heap))
        for entry in passed_over:
            heappush(heap, entry)
        return found

    def value(self, state: T) -> float:
        """What keeping ``state`` is worth: expected cost saved per call."""
        return self._cost_of(state) * self._records[state].cell.rate

    def clear(self) -> None:
        """See EvictionPolicy. What was learned about kinds of states stays."""
        for record in (*self._records.values(), *self._lost.values()):
            self._forget(record)
        self._records.clear()
        self._lost.clear()
        self._ancestry.clear()
        self._heap.clear()
        self._probationary_heap.clear()
        self._calendar.clear()

    def _cost_of(self, state: T) -> float:
        return self._cost(self._ancestry.depth_above_blocks(state), state.depth_blocks)

    def _touch(self, record: _Record[T]) -> None:
        record.touched = self._now
        self._settle(record, record.own_kind, 0)
        self._rank(record)

    def _settle(self, record: _Record[T], kind: Kind, age: int) -> None:
        """Puts a record, which is in no cell, into one."""
        record.kind, record.age = kind, age
        record.cell = self._likelihood.cell(kind, age, self._now)
        record.cell.enter(self._now)
        record.due = self._number()
        heappush(self._calendar, (record.touched + oldest_in(age), record.due, record))

    def _rank(self, record: _Record[T]) -> None:
        """Puts a kept record into the heap with the value that it has now."""
        assert record.state is not None
        record.entry = self._number()
        value = self._cost_of(record.state) * record.cell.rate
        # Of two alike the older goes; or the younger, where the older is nearer to being used (else no state would live
        # long enough to be of use). Of guesses the older all the same: each prompt shall have its chance.
        newest_first = record.cell.is_rising and not record.is_probationary
        order = -record.touched if newest_first else record.touched
        entry = (value, order, record.serial, record.entry, record)
        heappush(self._heap, entry)
        if record.is_probationary:
            heappush(self._probationary_heap, entry)

    def _inherit(self, above: _Record[T], lost: _Record[T]) -> None:
        """Who would have resumed from ``lost`` will resume from ``above``."""
        if lost.cell.rate > above.cell.rate:
            above.cell.leave(self._now, used=False)
            above.touched = lost.touched
            self._settle(above, lost.kind, lost.age)
            self._rank(above)

    def _forget(self, record: _Record[T]) -> None:
        record.cell.leave(self._now, used=False)
        record.due = -1

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _tick(self) -> None:
        """Time goes on by one call: records grow older, and now and then the rates are worked out anew."""
        self._now += 1
        calendar = self._calendar
        while calendar and calendar[0][0] <= self._now:
            _, due, record = heappop(calendar)
            if record.due == due:
                rate = record.cell.rate
                record.cell.leave(self._now, used=False)
                self._settle(record, record.kind, record.age + 1)
                # Where it became likelier, its entry in the heap will do until it comes to the top.
                if record.state is not None and record.cell.rate <= rate:
                    self._rank(record)
        if self._now >= self._next_refresh:
            self._refresh()

    def _refresh(self) -> None:
        self._refreshes += 1
        if self._refreshes % _FADE_REFRESHES == 0:
            self._likelihood.fade(self._now)
        self._likelihood.refresh(self._now)
        self._next_refresh = self._now + max(_REFRESH_AT_LEAST, len(self._records))
        # All values are different now; and entries that are not valid any longer are got rid of.
        self._heap.clear()
        self._probationary_heap.clear()
        for record in self._records.values():
            self._rank(record)
        self._calendar = [entry for entry in self._calendar if entry[2].due == entry[1]]
        heapify(self._calendar)
