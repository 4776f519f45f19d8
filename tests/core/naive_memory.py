"""The oracle of one memory: each answer of the eviction policies, and each eviction, against the slow and obvious way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.needs import is_guess
from megatron_hybrid_prefix.policy.recompute_cost import RecomputeCostEviction
from megatron_hybrid_prefix.pool.slots import SlotState
from megatron_hybrid_prefix.tiers.host import host_pages_of
from megatron_hybrid_prefix.tiers.units import EntryKind
from tests.core.naive_recompute_cost import NaiveTiers, exclusive


def needed(states: Iterable[Node]) -> set[Node]:
    """Nodes at and above the states."""
    found: set[Node] = set()
    for state in states:
        above: Node | None = state
        while above is not None:
            found.add(above)
            above = above.parent
    return found


class NaiveLru:
    """`lru` on the device and on the host: lists of states, used longest ago first."""

    def __init__(self, state_blocks: tuple[float, ...], held: Callable[[Node], int]) -> None:
        self.kept: list[list[Node]] = [[] for _ in state_blocks]

    def added(self, tier: int, node: Node) -> None:
        self.kept[tier].append(node)

    def used(self, tier: int, node: Node) -> None:
        self.kept[tier].remove(node)
        self.kept[tier].append(node)

    def removed(self, tier: int, node: Node) -> None:
        self.kept[tier].remove(node)

    def victim(self, tier: int, evictable: Callable[[Node], bool]) -> Node | None:
        return next(filter(evictable, self.kept[tier]), None)

    def clear(self, tier: int) -> None:
        self.kept[tier].clear()


def follow(policy: EvictionPolicy[Node], naive: Any, tier: int, used: list[Node], seen: Counter[str]) -> None:
    """The naive policy gets the same calls. All values and each victim must be the same.

    ``used`` gets the states that are used on the device.
    """

    def followed(name: str) -> Callable[..., None]:
        method = getattr(policy, name)

        def call(*args: Any) -> None:
            method(*args)
            getattr(naive, name)(tier, *args)
            if name == "used" and tier == 0:
                used.append(args[0])

        return call

    victim = policy.victim

    def compared(evictable: Callable[[Node], bool]) -> Node | None:
        found = victim(evictable)
        assert found is naive.victim(tier, evictable), "the policy names another state"
        assert list(policy) == naive.kept[tier] and len(policy) == len(naive.kept[tier])
        if isinstance(policy, RecomputeCostEviction):
            assert [policy.value(node) for node in policy] == [naive.value(tier, node) for node in policy]
        seen[f"victims of tier {tier}"] += found is not None
        return found

    changed = {name: followed(name) for name in ("added", "used", "removed", "clear")}
    for name, method in (changed | {"victim": compared}).items():
        setattr(policy, name, method)


class NaiveMemory:
    """Checks what `DeviceTier.evict_next` evicts. Looks at all nodes, blocks and slots each time.

    Args:
        cache: A new cache.
        seen: Counts what happened.

    Attributes:
        used: The states that the policy of the device was told of as used.
    """

    def __init__(self, cache: HybridPrefixCache, seen: Counter[str]) -> None:
        self.store, self.seen, settings = cache._device, seen, cache.settings
        self.sizes = self.store.pages.page_sizes
        state_blocks = [settings.page_blocks / self.sizes[-1]]
        policies = [self.store.blocks.eviction]
        if settings.host_pages:
            state_blocks.append(host_pages_of(settings)[EntryKind.STATE] / settings.host_kv_pages)
            policies.append(self.store.host.eviction)
        naive = {"lru": NaiveLru, "recompute_cost": NaiveTiers}[settings.eviction_policy](
            tuple(state_blocks), self.held
        )
        self.used: list[Node] = []
        for tier, policy in enumerate(policies):
            follow(policy, naive, tier, self.used, seen)
        self.evict_next = self.store.evict_next
        self.store.evict_next = self.checked  # type: ignore[method-assign]

    def states(self) -> dict[Node, int]:
        """The states on the device, and their slots."""
        return {node: node.slot for node in self.store.tree if node.slot >= 0}

    def page_of(self, slot: int) -> int:
        return (slot - self.store.slots.first_slot) // sum(self.sizes)

    def slots_of(self, page: int) -> range:
        """The page's slots, of all sizes."""
        first = self.store.slots.first_slot + page * sum(self.sizes)
        return range(first, first + sum(self.sizes))

    def size_of(self, slot: int) -> int:
        """0: a live state fits; 1: a smaller checkpoint."""
        return int(len(self.sizes) > 1 and (slot - self.store.slots.first_slot) % sum(self.sizes) >= self.sizes[0])

    def owners(self) -> list[int | None]:
        """Of each page: the size of its states; None: it has none."""
        found: list[int | None] = [None] * len(self.store.pages)
        for state in SlotState:
            for slot in self.store.slots.slots_in(state) if state else ():
                assert found[self.page_of(slot)] in (None, self.size_of(slot)), "a page has states of both sizes"
                found[self.page_of(slot)] = self.size_of(slot)
        return found

    def held(self, node: Node) -> int:
        return self.store.blocks.ref_count(node.block_id)

    def unneeded(self) -> set[Node]:
        """Cached KV that no state needs. A guess needs none."""
        cached = {node for node in self.store.tree if node.block_id != NO_BLOCK and not self.held(node)}
        return cached - needed(self.store.blocks.states)

    def stuck_pages(self) -> set[int]:
        """Pages with a slot that cannot be evicted."""
        slots, fixed = self.store.slots, (SlotState.RESERVED, SlotState.LIVE, SlotState.RETIRED)
        ids = range(slots.first_slot, slots.first_slot + slots.total_slots)
        return {self.page_of(slot) for slot in ids if slots.pins(slot) or slots.state(slot) in fixed}

    def frees_bytes(self, node: Node) -> bool:
        """Whether KV can have bytes when the state goes: of its page, or KV that only it needs."""
        if self.page_of(node.slot) not in self.stuck_pages():
            return True
        return not is_guess(node) and not self.held(node) and exclusive(node, self.store.blocks.states) > 0

    def checked(self, *, for_slot: bool = False, states_only: bool = False) -> bool:
        store, before, unneeded = self.store, self.states(), self.unneeded()
        stuck = self.stuck_pages()
        may_go = {node for node in before if not store.slots.pins(node.slot)}
        if states_only and not for_slot:
            may_go = {node for node in may_go if self.page_of(node.slot) not in stuck}
        elif not for_slot:
            may_go = set(filter(self.frees_bytes, may_go))
        all_guesses = set(filter(is_guess, before))
        guesses, protected = all_guesses & may_go, list(store.protected)
        free = {node for node in may_go if node.key not in store.pins.kept} or may_go
        ended = store.blocks.ended.keys() & free
        evicted = self.evict_next(for_slot=for_slot, states_only=states_only)
        lost = {node for node, slot in before.items() if node.slot != slot}
        if guesses:
            assert len(lost) == 1 and lost <= guesses, "a guess goes first"
        elif unneeded and not states_only:
            assert len({node for node in unneeded if node.block_id == NO_BLOCK}) == 1, "unneeded KV goes first"
            assert lost <= all_guesses, "a state goes, though there is unneeded KV"
        elif may_go:
            assert len(lost) == 1 and lost <= (ended or free), (
                "a state goes, none that is pinned, first one of ended sessions"
            )
            self.seen["state of an ended session"] += bool(ended)
            left = {self.page_of(slot) for slot in self.states().values()}
            self.seen["one of a page's states"] += any(self.page_of(before[node]) in left for node in lost)
        else:
            assert not evicted or (protected and lost), "nothing could go"
        return evicted
