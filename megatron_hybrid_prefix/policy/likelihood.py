"""How likely states of a kind are to be used again, by age: measured on the running traffic, not assumed.

States are sorted into cells: of one kind (what has happened to them so far), and of ages with the same number of binary
digits. A cell counts the uses of its members and the time that they spent in it; uses over time is the rate of use at
that age. What a state is kept for is not the rate now but the best that comes of keeping it for some time: the highest
average rate over any stretch of ages that begins with its own. So the turns of a chat that come back after a while are
kept until then, and a state past the age at which its kind comes back goes.

That ranking by age is Gittins' index of a job that may pay off at any time; a cache that ranks by measured hits over
measured time is in Beckmann, Chen, Cidon: LHD, NSDI 2018. Time is counted in calls, so that all ranks see the same.
"""

from __future__ import annotations

from collections.abc import Hashable

YOUNGEST_BITS = 5  # ages below 2 ** this are one cell: nothing is learned from differences that small
# Uses that a cell is taken to have seen before it has seen any, over a time that grows with age: a rate above what is
# usual. So what was never tried is tried, until it is known better.
_PRIOR_USES = 1.0


class Cell:
    """States of one kind and age.

    Attributes:
        rate: Expected uses of a member per unit of time, at best; fixed between two calls of `Likelihood.refresh`.
        is_rising: Whether the rate is higher at the next age: the older of two members is nearer to being used.
        members: How many there are now.
        uses: How many members were used, old ones counting less.
        exposure: Sum of the time that members spent here, old time counting less; up to ``since``.
        since: As above.
    """

    __slots__ = ("exposure", "is_rising", "members", "rate", "since", "uses")

    def __init__(self, rate: float, now: int) -> None:
        self.rate = rate
        self.is_rising = False
        self.members = 0
        self.uses = 0.0
        self.exposure = 0.0
        self.since = now

    def catch_up(self, now: int) -> None:
        """Counts the members' time up to ``now``."""
        self.exposure += self.members * (now - self.since)
        self.since = now

    def enter(self, now: int) -> None:
        """One member more."""
        self.catch_up(now)
        self.members += 1

    def leave(self, now: int, *, used: bool) -> None:
        """One member less, since it was ``used``, or because it grew too old or is not watched any longer."""
        self.catch_up(now)
        self.members -= 1
        self.uses += used


class Likelihood[K: Hashable]:
    """The cells of all kinds."""

    def __init__(self) -> None:
        self._cells: dict[K, list[Cell]] = {}  # by age, youngest first

    def cell(self, kind: K, age: int, now: int) -> Cell:
        """The cell of states of a ``kind`` with age number ``age``."""
        cells = self._cells.setdefault(kind, [])
        while len(cells) <= age:
            cells.append(Cell(_PRIOR_USES / _prior_exposure(len(cells)), now))
        return cells[age]

    def refresh(self, now: int) -> None:
        """Works out all rates anew: O(cells)."""
        for cells in self._cells.values():
            # From the oldest age to the youngest: a stretch begins with each, and goes on over the next stretch (the
            # top of the stack) as long as that one's rate is higher.
            stretches: list[tuple[float, float]] = []
            for age in range(len(cells) - 1, -1, -1):
                cell = cells[age]
                cell.catch_up(now)
                uses, exposure = cell.uses + _PRIOR_USES, cell.exposure + _prior_exposure(age)
                while stretches and stretches[-1][0] * exposure > uses * stretches[-1][1]:
                    more_uses, more_exposure = stretches.pop()
                    uses, exposure = uses + more_uses, exposure + more_exposure
                stretches.append((uses, exposure))
                cell.rate = uses / exposure
                cell.is_rising = age + 1 < len(cells) and cells[age + 1].rate > cell.rate

    def fade(self, now: int) -> None:
        """What was seen so far counts half from now on."""
        for cells in self._cells.values():
            for cell in cells:
                cell.catch_up(now)
                cell.uses /= 2
                cell.exposure /= 2


def oldest_in(age: int) -> int:
    """Time after which a state leaves the cells with this age number."""
    return 1 << (YOUNGEST_BITS + age)


def _prior_exposure(age: int) -> float:
    return float(oldest_in(age))
