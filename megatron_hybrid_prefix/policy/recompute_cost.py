"""`recompute_cost`: evicts the checkpoint with the lowest value.

    value = cost of computing from the nearest kept state above up to this one  x  how likely this state is to be used

The value is divided by the bytes that evicting the state frees: its own, and those of the KV that only this state makes
useful. A guess frees only its own, and all states of a tier have the same size, so they are left out for guesses.

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

States that were asked for are ranked as if there were no guesses, which change no clock, rate or cost of theirs. A guess has room
that they leave. If it is worth more than one of them, that one may be lent (`LendsStates`), if an account covers its whole cost and
that of all loans: what requests resumed deeper thanks to guesses, less what they computed for want of lent states. So in total hardly
less is reused than without guesses.

Methods cost O(log n) amortised; adding a state between others also O(states next below it). Only the calls set the order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from megatron_hybrid_prefix.policy.base import KeptState
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.likelihood import Cell, Likelihood, oldest_in
from megatron_hybrid_prefix.policy.needs import Ancestry, is_guess

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
        entry: Number of its valid entry on each tier.
        due: Number of its valid entry in the calendar.
        is_guess, above: Whether nobody asked for it; if so, a node above it. No state is kept between the two.
    """

    serial: int
    origin: CheckpointReason
    uses: int
    is_guess: bool
    above: T | None
    first_blocks: int = 0
    state: T | None = None
    touched: int = 0
    age: int = 0
    kind: Kind = field(init=False)
    cell: Cell = field(init=False)
    entry: int = -1
    due: int = -1

    @property
    def own_kind(self) -> Kind:
        # A plain int, because hashing an enum is slow.
        return int(self.origin), min(self.uses.bit_length(), _MOST_USES_BITS), self.first_blocks.bit_length()


type _Entry[T] = tuple[float, int, int, int, _Record[T]]
"""Value, order of age, serial, number, record. Valid if the number is that of the record, and its state is kept. One entry of a
record has at most its current value; more of them only come later."""


def _least[T](*entries: _Entry[T] | None) -> T | None:
    """The state of the least entry."""
    first = min((entry for entry in entries if entry is not None), default=None)
    return None if first is None else first[-1].state


@dataclass(slots=True)
class _Ranking[T]:
    """Records of one tier, the least value first. They are ranked when somebody asks: most change several times in between.

    Attributes:
        heap: Entries, some of them not valid.
        changed: Records to rank before the heap is read, and the numbers of their entries.
    """

    heap: list[_Entry[T]] = field(default_factory=list)
    changed: dict[_Record[T], int] = field(default_factory=dict)

    def clear(self) -> None:
        """Removes all entries."""
        self.heap.clear()
        self.changed.clear()


def count_blocks(start_blocks: int, end_blocks: int) -> float:
    """Cost of computing from one depth to another if each block costs the same."""
    return end_blocks - start_blocks


class _Known[T: KeptState]:
    """The records of the states of all tiers: which are above others, how often and how likely they are used.

    Args:
        cost: See `RecomputeCostEviction`.

    Attributes:
        tiers: The policies of the tiers, the device first.
        ancestry: The states that would be kept without guesses: those that a tier keeps, and those that are lent.
        records: The record of each of them, and of each guess.
        lost: The same of evicted states that are remembered, by key; evicted longest ago first.
        lent: The states that are lent, and what each loan may cost.
    """

    def __init__(self, cost: Callable[[int, int], float]) -> None:
        self.cost = cost
        self.tiers: list[RecomputeCostEviction[T]] = []
        self.ancestry: Ancestry[T] = Ancestry()
        self.records: dict[T, _Record[T]] = {}
        self._likelihood: Likelihood[Kind] = Likelihood()
        self.lost: OrderedDict[bytes, _Record[T]] = OrderedDict()
        self.lent: dict[T, float] = {}
        self._guesses = self._most_kept = 0
        self._calendar: list[tuple[int, int, _Record[T]]] = []  # (time when the age number grows, number, record)
        self._now = self._numbers = self._serials = self._refreshes = 0
        self._next_refresh = _REFRESH_AT_LEAST

    def added(self, state: T) -> None:
        """The first tier keeps ``state``."""
        guess, record = is_guess(state), None
        if guess:
            self._guesses += 1
        else:
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
            record = _Record(self._serials, origin, int(origin <= CheckpointReason.BREAKPOINT), guess, state.parent)
            self._serials += 1
            record.first_blocks = state.depth_blocks - self._depth_above_blocks(state, record)
        record.state = state
        self.records[state] = record
        self._most_kept = max(self._most_kept, len(self.records) - self._guesses)
        self._touch(record)
        if not guess:
            for below in self.ancestry.next_below(state):  # they cost less to recompute now
                self.rank(self.records[below])

    def used(self, state: T) -> None:
        """A request resumes from ``state``, or would without guesses."""
        record = self.records[state]
        if not record.is_guess:
            self._tick()
        record.cell.leave(self._now, used=True)
        record.uses += 1
        self._touch(record)

    def removed(self, state: T) -> None:
        """No tier keeps ``state`` any more."""
        record = self.records.pop(state)
        record.state, record.entry = None, -1
        if record.is_guess:  # it leaves nothing behind
            self._guesses -= 1
            self.forget(record)
            return
        above = self.ancestry.nearest_above(state)
        longer = self.ancestry.remove(state)
        if longer is not None:
            self.tiers[-1].frees_more(longer)
        if above is not None:
            self._inherit(self.records[above], record)
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
        self.lent.clear()
        self._guesses = 0
        self._calendar.clear()

    def cost_to(self, state: T) -> float:
        """Cost of computing from the nearest state above to ``state``."""
        return self.cost(self._depth_above_blocks(state, self.records[state]), state.depth_blocks)

    def rank(self, record: _Record[T]) -> None:
        """The value of a kept record fell, or others go before it now. The tiers that keep it rank it again."""
        record.entry = self._number()
        for tier in self.tiers:
            tier.rank(record)

    def forget(self, record: _Record[T]) -> None:
        """Counts the time of a record that is neither kept nor remembered any more."""
        record.cell.leave(self._now, used=False)
        record.due = -1

    def _depth_above_blocks(self, state: T, record: _Record[T]) -> int:
        """Depth of the nearest state above. Only guesses know of guesses, but not of states that came between later."""
        if record.is_guess:
            while record.above is not None and (record.above not in self.records or record.above in self.lent):
                record.above = record.above.parent
        above = record.above if record.is_guess else self.ancestry.nearest_above(state)
        return 0 if above is None else above.depth_blocks

    def _touch(self, record: _Record[T]) -> None:
        record.touched = self._now
        self._settle(record, record.own_kind, 0)
        self.rank(record)

    def _settle(self, record: _Record[T], kind: Kind, age: int) -> None:
        """Puts a record that is in no cell into a cell."""
        record.kind, record.age = kind, age
        record.cell = self._likelihood.cell(kind, age, self._now)
        record.cell.enter(self._now)
        record.due = self._number()
        heappush(self._calendar, (record.touched + oldest_in(age), record.due, record))

    def _inherit(self, above: _Record[T], lost: _Record[T]) -> None:
        """Requests that would have resumed from ``lost`` will resume from ``above``, so it inherits kind and age."""
        if lost.cell.rate > above.cell.rate:
            above.cell.leave(self._now, used=False)
            above.touched = lost.touched
            self._settle(above, lost.kind, lost.age)
            self.rank(above)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

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
                    self.rank(record)
        if self._now >= self._next_refresh:
            self._refresh()

    def _refresh(self) -> None:
        self._refreshes += 1
        if self._refreshes % _FADE_REFRESHES == 0:
            self._likelihood.fade(self._now)
        self._likelihood.refresh(self._now)
        self._next_refresh = self._now + max(_REFRESH_AT_LEAST, len(self.records) - self._guesses)
        # All values changed. This also removes invalid entries.
        for tier in self.tiers:
            tier.rank_all()
        self._calendar = [entry for entry in self._calendar if entry[2].due == entry[1]]
        heapify(self._calendar)


class RecomputeCostEviction[T: KeptState]:
    """Evicts the checkpoint that is expected to cost the least to lose (see the top of this file).

    Args:
        cost: Cost of computing the blocks between two depths, in any unit: ``cost(start_blocks, end_blocks)``. It must
            not fall when the start moves up.
    """

    def __init__(self, *, cost: Callable[[int, int], float] = count_blocks) -> None:
        self._join(_Known(cost))

    def _join(self, known: _Known[T]) -> None:
        self._known = known
        known.tiers.append(self)
        self._states: dict[T, None] = {}
        # Decides which KV is needed here. Below the device: by the states of all tiers, as what the device has is no loss.
        self._ancestry = known.ancestry
        self.state_blocks = 1.0  # bytes of a state in KV blocks
        self._guesses: _Ranking[T] = _Ranking()
        self._others: _Ranking[T] = _Ranking()
        self._lent: _Ranking[T] = _Ranking()
        self._rankings = self._guesses, self._others, self._lent
        self.lent = known.lent
        self._last_used: T | None = None  # until another state comes: without guesses its request would pin it
        self._account = 0.0  # see the top of this file; less what all loans may cost

    def tier_below(self) -> RecomputeCostEviction[T]:
        self._ancestry = Ancestry()
        below = copy(self)  # with what a subclass keeps
        below._join(self._known)
        return below

    def share_memory(self, *, state_blocks: float) -> None:
        self.state_blocks = state_blocks

    def evicted_keys(self) -> Iterable[bytes]:
        """See RemembersEvicted. Guesses are not remembered."""
        return self._known.lost.keys()

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[T]:
        return iter(self._states)

    def added(self, state: T) -> None:
        known = self._known
        self._states[state], self._last_used = None, None
        if self._ancestry is not known.ancestry and not is_guess(state):
            self._ancestry.add(state)
        record = known.records.get(state)
        if record is None:
            known.added(state)
        elif state in self.lent:
            self._account += self.lent.pop(state)
            known.rank(record)
        else:
            self.rank(record)

    def used(self, state: T) -> None:
        self._last_used = state if self.lends else None
        # A state that both tiers keep is used on the device.
        if self is self._known.tiers[0] or state not in self._known.tiers[0]._states:
            self._known.used(state)

    def removed(self, state: T) -> None:
        known = self._known
        del self._states[state]
        self._account += self.lent.pop(state, 0.0)
        if self._ancestry is not known.ancestry and state in self._ancestry:
            longer = self._ancestry.remove(state)
            if longer is not None:
                self.frees_more(longer)
        for tier in known.tiers:
            if state in tier._states:
                return
        known.removed(state)

    def victim(self, evictable: Callable[[T], bool], *, guesses_only: bool = False) -> T | None:
        """See `EvictionPolicy` and `LendsStates`. Without ``guesses_only`` a guess is named only if there is nothing else."""
        if not guesses_only:
            state = self._next_asked(evictable, self._last_used) or self._next_asked(evictable, None)
            return state or _least(self._first(self._guesses, evictable))
        guess = _least(self._first(self._guesses, evictable))
        if self.lends and self._account > 0:
            state = _least(self._first(self._others, evictable))
            if state is not None and self._account > self._known.cost_to(state):
                guess = state if guess is None or self._worth(state) < self._worth(guess) else guess
        return guess

    def _next_asked(self, evictable: Callable[[T], bool], spared: T | None) -> T | None:
        """The state to go next of those that would be kept without guesses."""
        kept = self._first(self._others, lambda state: state is not spared and evictable(state))
        return _least(kept, self._first(self._lent, lambda state: state is not spared))

    @property
    def lends(self) -> bool:
        """See `LendsStates`."""
        return len(self._known.tiers) == 1

    def lend(self, state: T) -> None:
        """See `LendsStates`."""
        self.lent[state] = self._known.cost_to(state)
        self._account -= self.lent[state]
        self._known.rank(self._known.records[state])

    def resumed(self, blocks: int, asked_blocks: int) -> None:
        """See `LendsStates`."""
        cost = self._known.cost(*sorted((blocks, asked_blocks)))
        self._account += cost if blocks > asked_blocks else -cost

    def _worth(self, state: T) -> float:
        """Expected cost saved per call, whatever evicting it frees: of a lent state only its own bytes are."""
        return self._known.cost_to(state) * self._known.records[state].cell.rate

    def value(self, state: T) -> float:
        """The value of keeping ``state``: expected cost saved per call."""
        known = self._known
        cost, record = known.cost_to(state), known.records[state]
        if not record.is_guess:
            cost /= self.state_blocks + self._ancestry.exclusive_blocks(state)
        return cost * record.cell.rate

    def clear(self) -> None:
        """Keeps the rates that were learned. All tiers are cleared together."""
        self._account += sum(self.lent.values())
        self._states.clear()
        self._ancestry.clear()
        for ranking in self._rankings:
            ranking.clear()
        self._known.clear()

    def rank(self, record: _Record[T]) -> None:
        """Ranks a record again, if the state is kept here."""
        if record.state in self._states:
            lent = record.state in self.lent
            ranking = self._guesses if record.is_guess else self._lent if lent else self._others
            ranking.changed[record] = record.entry

    def frees_more(self, state: T) -> None:
        """More KV here depends on the state, so it is worth less per byte."""
        self.rank(self._known.records[state])

    def rank_all(self) -> None:
        """Ranks all records again."""
        for ranking in self._rankings:
            ranking.clear()
        for state in self._states:
            record = self._known.records.get(state)
            if record is not None:  # else it is being added
                self.rank(record)

    def _first(self, ranking: _Ranking[T], evictable: Callable[[T], bool]) -> _Entry[T] | None:
        """The entry with the least value of a state that is ``evictable``."""
        self._rank_changed(ranking)
        heap, kept, passed_over = ranking.heap, self._states, []
        found = None
        while heap:
            entry = heap[0]
            value, _, _, number, record = entry
            state = record.state
            if state is None or state not in kept or record.entry != number:
                heappop(heap)
            elif self.value(state) > value:  # a state above it was evicted, or it grew older and likelier
                heapreplace(heap, self._entry(state, record))
            elif evictable(state):
                found = entry
                break
            else:
                passed_over.append(heappop(heap))
        for entry in passed_over:
            heappush(heap, entry)
        return found

    def _rank_changed(self, ranking: _Ranking[T]) -> None:
        heap, kept = ranking.heap, self._states
        entries = [
            self._entry(state, record)
            for record, number in ranking.changed.items()
            if record.entry == number and (state := record.state) is not None and state in kept
        ]
        ranking.changed.clear()
        if len(entries) > len(heap):
            heap += entries
            heapify(heap)
        else:
            for entry in entries:
                heappush(heap, entry)

    def _entry(self, state: T, record: _Record[T]) -> _Entry[T]:
        # Ties: evict the older state. If the older one will be used sooner, evict the younger one, or no state would
        # live long enough to be used. Of guesses always evict the older one, so that each prompt gets a
        # chance.
        newest_first = record.cell.is_rising and not record.is_guess
        order = -record.touched if newest_first else record.touched
        return self.value(state), order, record.serial, record.entry, record
