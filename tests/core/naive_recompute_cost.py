"""`recompute_cost` in a slow and obvious way: every number is computed from all states at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.policy import likelihood, recompute_cost
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason


@dataclass(eq=False)
class Known:
    """A state that is kept, or remembered (``node`` is None)."""

    node: Node | None
    key: bytes
    serial: int
    origin: CheckpointReason
    uses: int
    first_blocks: int
    touched: int = 0
    kind: tuple[int, ...] = ()
    age: int = 0


class NaiveRecomputeCost:
    """What `RecomputeCostEviction` knows of states and of their kinds, in O(n) or slower."""

    def __init__(self) -> None:
        self.known: list[Known] = []  # kept ones in the order of publication, then remembered ones as they were lost
        self.uses: dict[tuple[tuple[int, ...], int], float] = {}
        self.exposure: dict[tuple[tuple[int, ...], int], float] = {}
        self.rates: dict[tuple[tuple[int, ...], int], float] = {}
        self.rising: set[tuple[tuple[int, ...], int]] = set()
        self.now = self.serials = self.refreshes = self.most_kept = 0
        self.next_refresh = recompute_cost._REFRESH_AT_LEAST

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def added(self, node: Node) -> None:
        self.tick()
        lost = next((known for known in self.known if known.node is None and known.key == node.key), None)
        if lost is not None:
            self.known.remove(lost)
            self.count_use(lost)
            lost.uses += 1
            lost.node = node
        else:
            lost = Known(node, node.key, self.serials, node.reason, int(node.reason <= CheckpointReason.BREAKPOINT), 0)
            lost.first_blocks = node.depth_blocks - self.depth_above(node)
            self.serials += 1
        self.known.append(lost)
        self.most_kept = max(self.most_kept, len(self.kept()))
        self.start(lost)

    def used(self, node: Node) -> None:
        self.tick()
        known = self.of(node)
        self.count_use(known)
        known.uses += 1
        self.start(known)

    def removed(self, node: Node) -> None:
        known = self.of(node)
        above = self.above(node)
        if above is not None:
            heir = self.of(above)
            if self.rate(known) > self.rate(heir):
                heir.touched, heir.age, heir.kind = known.touched, known.age, known.kind
                self.cell(heir)
        self.known.remove(known)
        known.node = None
        self.known.append(known)
        remembered = [other for other in self.known if other.node is None]
        room = recompute_cost._REMEMBERED * self.most_kept + recompute_cost._REMEMBERED_AT_LEAST
        for other in remembered[: max(0, len(remembered) - room)]:
            self.known.remove(other)

    def order(self, known: Known) -> int:
        return -known.touched if (known.kind, known.age) in self.rising else known.touched

    # -- behind them ---------------------------------------------------------------------------------------------------

    def kept(self) -> list[Known]:
        return [known for known in self.known if known.node is not None]

    def of(self, node: Node) -> Known:
        return next(known for known in self.known if known.node is node)

    def above(self, node: Node) -> Node | None:
        kept, above = {known.node for known in self.kept()}, node.parent
        while above is not None and above not in kept:
            above = above.parent
        return above

    def depth_above(self, node: Node) -> int:
        above = self.above(node)
        return 0 if above is None else above.depth_blocks

    def start(self, known: Known) -> None:
        known.touched, known.age = self.now, 0
        bits = min(known.uses.bit_length(), recompute_cost._MOST_USES_BITS)
        known.kind = (known.origin, bits, known.first_blocks.bit_length())
        self.cell(known)

    def prior(self, age: int) -> float:
        return float(1 << (likelihood.YOUNGEST_BITS + age))

    def cell(self, known: Known) -> None:
        for age in range(known.age + 1):
            if (known.kind, age) not in self.uses:
                self.uses[known.kind, age] = self.exposure[known.kind, age] = 0.0
                self.rates[known.kind, age] = 1 / self.prior(age)

    def rate(self, known: Known) -> float:
        return self.rates[known.kind, known.age]

    def count_use(self, known: Known) -> None:
        self.uses[known.kind, known.age] += 1

    def tick(self) -> None:
        self.now += 1
        for known in self.known:
            self.exposure[known.kind, known.age] += 1
        for known in self.known:
            while self.now - known.touched >= 1 << (likelihood.YOUNGEST_BITS + known.age):
                known.age += 1
                self.cell(known)
        if self.now < self.next_refresh:
            return
        self.refreshes += 1
        if self.refreshes % recompute_cost._FADE_REFRESHES == 0:
            for counts in (self.uses, self.exposure):
                for cell in counts:
                    counts[cell] /= 2
        for kind, age in self.rates:
            stretches, uses, exposure = [], 0.0, 0.0
            older = age
            while (kind, older) in self.uses:
                uses += self.uses[kind, older] + 1
                exposure += self.exposure[kind, older] + self.prior(older)
                stretches.append(uses / exposure)
                older += 1
            self.rates[kind, age] = max(stretches)
        self.rising = {
            (kind, age) for kind, age in self.rates if self.rates.get((kind, age + 1), 0) > self.rates[kind, age]
        }
        self.next_refresh = self.now + max(recompute_cost._REFRESH_AT_LEAST, len(self.kept()))


class NaiveTiers:
    """One or two tiers with one `NaiveRecomputeCost`, the device first. Decides as `RecomputeCostEviction` does.

    Args:
        state_blocks: Bytes of a state in KV blocks, for each tier.
        held: Whether running requests hold a node's KV on the device.
    """

    def __init__(self, state_blocks: tuple[float, ...], held: Callable[[Node], int]) -> None:
        self.rule = NaiveRecomputeCost()
        self.state_blocks, self.held = state_blocks, held
        self.kept: list[list[Node]] = [[] for _ in state_blocks]

    def added(self, tier: int, node: Node) -> None:
        known = next((known for known in self.rule.kept() if known.node is node), None)
        self.kept[tier].append(node)
        if known is None:
            self.rule.added(node)

    def used(self, tier: int, node: Node) -> None:
        if tier == 0 or node not in self.kept[0]:  # else it is used on the device
            self.rule.used(node)

    def removed(self, tier: int, node: Node) -> None:
        self.kept[tier].remove(node)
        if not any(node in kept for kept in self.kept):
            self.rule.removed(node)

    def value(self, tier: int, node: Node) -> float:
        cost: float = node.depth_blocks - self.rule.depth_above(node)
        others = [other for kept in self.kept[: tier + 1] for other in kept]
        cost /= self.state_blocks[tier] + (0 if tier == 0 and self.held(node) else exclusive(node, others))
        return cost * self.rule.rate(self.rule.of(node))

    def victim(self, tier: int, evictable: Callable[[Node], bool]) -> Node | None:
        def place(node: Node) -> tuple[float, int, int]:
            known = self.rule.of(node)
            return self.value(tier, node), self.rule.order(known), known.serial

        return min(filter(evictable, self.kept[tier]), key=place, default=None)

    def clear(self, tier: int) -> None:
        """All states are forgotten, and what was learned is kept."""
        self.kept[tier].clear()
        self.rule.known.clear()


def exclusive(node: Node | None, others: Iterable[Node]) -> int:
    """Blocks at or above the node that are at or above none of the others; 0 if one of them is below the node."""
    needed = set()
    for other in others:
        above: Node | None = None if other is node else other
        while above is not None:
            needed.add(above)
            above = above.parent
    count = 0
    while node is not None and node not in needed:
        node, count = node.parent, count + 1
    return count
