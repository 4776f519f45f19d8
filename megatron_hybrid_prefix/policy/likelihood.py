"""How often states of a kind are used again, by age. Measured on the running traffic.

States are grouped into cells by kind (their history so far) and by age (its number of binary digits). A cell counts the
uses of its members and the time they spend in it. Uses over time is the rate of use at that age.

A state is not valued by its rate now, but by the best rate that keeping it for some time gives: the highest average
rate over any span of ages that starts at its own. So the turns of a chat that come back after a while are kept until
then. A state older than the age at which its kind comes back is evicted.

This value is the Gittins index of a job that may pay off at any time. LHD (Beckmann, Chen, Cidon; NSDI 2018) is another
cache that ranks by measured hits over measured time. Time is counted in calls, so that all ranks see the same time.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

YOUNGEST_BITS = 5  # ages below 2 ** YOUNGEST_BITS share one cell: smaller differences mean nothing
# Uses that a new cell starts with, over a time that grows with age. This rate is higher than usual, so that states of
# an unknown kind are kept until their rate is measured.
_PRIOR_USES = 1.0


@dataclass(slots=True, eq=False)
class Cell:
    """States of one kind and age.

    Attributes:
        rate: Best expected uses per member and unit of time. Fixed between two calls of `Likelihood.refresh`.
        is_rising: Whether the rate is higher at the next age. If so, the older of two members will be used sooner.
        members: Members now.
        uses: Uses of members. Old uses count less.
        exposure: Time that members spent here, up to ``since``. Old time counts less.
        since: See ``exposure``.
    """

    rate: float
    since: int
    is_rising: bool = False
    members: int = 0
    uses: float = 0.0
    exposure: float = 0.0

    def catch_up(self, now: int) -> None:
        """Adds the members' time up to ``now`` to ``exposure``."""
        self.exposure += self.members * (now - self.since)
        self.since = now

    def enter(self, now: int) -> None:
        """Adds a member."""
        self.catch_up(now)
        self.members += 1

    def leave(self, now: int, *, used: bool) -> None:
        """Removes a member because it was ``used``, or because it grew older or is not tracked any more."""
        self.catch_up(now)
        self.members -= 1
        self.uses += used


class Likelihood[K: Hashable]:
    """The cells of all kinds."""

    def __init__(self) -> None:
        self._cells: dict[K, list[Cell]] = {}  # by age, youngest first

    def cell(self, kind: K, age: int, now: int) -> Cell:
        """The cell of states of this kind with age number ``age``."""
        cells = self._cells.setdefault(kind, [])
        while len(cells) <= age:
            cells.append(Cell(_PRIOR_USES / oldest_in(len(cells)), now))
        return cells[age]

    def refresh(self, now: int) -> None:
        """Computes all rates again. O(cells)."""
        for cells in self._cells.values():
            # From the oldest age to the youngest. A span starts at each age. It absorbs the next span (the top of the
            # stack) as long as that one's rate is higher.
            spans: list[tuple[float, float]] = []
            for age in range(len(cells) - 1, -1, -1):
                cell = cells[age]
                cell.catch_up(now)
                uses, exposure = cell.uses + _PRIOR_USES, cell.exposure + oldest_in(age)
                while spans and spans[-1][0] * exposure > uses * spans[-1][1]:
                    more_uses, more_exposure = spans.pop()
                    uses, exposure = uses + more_uses, exposure + more_exposure
                spans.append((uses, exposure))
                cell.rate = uses / exposure
                cell.is_rising = age + 1 < len(cells) and cells[age + 1].rate > cell.rate

    def fade(self, now: int) -> None:
        """Halves the weight of everything seen so far."""
        for cells in self._cells.values():
            for cell in cells:
                cell.catch_up(now)
                cell.uses /= 2
                cell.exposure /= 2


def oldest_in(age: int) -> int:
    """Age at which a state leaves the cells with this age number."""
    return 1 << (YOUNGEST_BITS + age)
