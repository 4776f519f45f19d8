"""`HostTier`: which KV blocks and states are on the host, in which pages, and which go when pages are needed.

Nodes of the prefix tree say where their copies are (``host_block``, ``host_slot``); the pages of both kinds come from one
pool, in which the kind whose next victim was not used for longer makes room. Decisions only: the moves themselves are
queued as `BlockTransfer` and carried out elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node, PrefixTree
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.boundaries import Reason
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.base import Tier
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, Kind, Tag


def is_spare(node: Node) -> bool:
    """Whether the node's state was kept on a guess, and nobody resumed from it."""
    return node.reason == Reason.INTERVAL and not node.used


class HostTier:
    """Entries on the host.

    Args:
        tree: The prefix tree.
        pages: Pages of the arena, ids 0 .. pages - 1.
        kv_pages: Pages that a KV block takes.
        state_pages: Pages that a state takes.
        block_tokens: Tokens of a block.
        eviction: Ranks the states on the host.
        state_share: Part of the pages that states may take, 0 to 1, the rest is for KV; None: by use.
        stats: Where moves are counted.
        write_through: Whether KV and states are stored as soon as they are published.
        behind: Is offered what is evicted here.
        behind_name: Its name, in transfers and statistics.

    Attributes:
        transfers: Moves to be carried out, in this order.
        routing_of: Asked for what else belongs to a KV block on the device when it is stored.
    """

    def __init__(
        self,
        tree: PrefixTree,
        *,
        pages: int,
        kv_pages: int,
        state_pages: int,
        block_tokens: int,
        eviction: EvictionPolicy[Node],
        stats: PrefixStats,
        state_share: float | None = None,
        write_through: bool = False,
        behind: Tier | None = None,
        behind_name: str = "",
    ) -> None:
        self._tree = tree
        self.total_pages = pages
        self._pages_of = {Kind.KV: kv_pages, Kind.STATE: state_pages}
        self._block_tokens = block_tokens
        self._eviction = eviction
        self._stats = stats
        self._figures = stats.tiers[HOST]
        self.write_through = write_through
        self.behind, self.behind_name = behind, behind_name
        self._most_pages: dict[Kind, int] | None = None
        if state_share is not None:
            states = round(pages * state_share)
            self._most_pages = {Kind.KV: pages - states, Kind.STATE: states}
        self.transfers: list[BlockTransfer] = []
        self.routing_of: Callable[[int], Any] = lambda block_id: None
        self.reset()

    def reset(self) -> None:
        """Nothing is on the host; the tree is emptied by its owner."""
        self._free = list(range(self.total_pages - 1, -1, -1))  # a stack, lowest first: entries lie in a row at first
        self._pages: dict[int, tuple[int, ...]] = {}  # by entry
        self._next_entry = 0
        self._used_pages = {Kind.KV: 0, Kind.STATE: 0}
        self._tags: dict[int, Tag] = {}
        self._payloads: dict[int, Any] = {}
        self._pins: dict[int, int] = {}
        self._private: set[int] = set()  # entries of no node
        self._kv: OrderedDict[Node, int] = OrderedDict()  # longest unused first, and when
        self._state_used: dict[Node, int] = {}
        self._clock = 0
        self._eviction.clear()
        self.transfers.clear()

    # -- depth ---------------------------------------------------------------------------------------------------------

    def kv_depth(self, keys: Sequence[bytes], first: int) -> int:
        """See `DepthTier`."""
        get = self._tree.get
        for key in keys[first:] if first else keys:
            node = get(key)
            if node is None or node.host_block == NO_BLOCK:
                break
            first += 1
        return first

    def state_depth(self, keys: Sequence[bytes], after: int, limit: int) -> int:
        """See `DepthTier`."""
        get = self._tree.get
        while limit > after:
            node = get(keys[limit - 1])
            if node is not None and node.host_slot != NO_SLOT:
                break
            limit -= 1
        return max(after, limit)

    # -- to the host ---------------------------------------------------------------------------------------------------

    def store_kv(self, node: Node) -> bool:
        """The node's block, about to go from the device, is kept here; whether there is room."""
        if node.host_block == NO_BLOCK:
            entry = self._store(Kind.KV, node.block_id, self._tag(Kind.KV, node))
            if entry is None:
                return False
            node.host_block = entry
            self._tree.version += 1
        self._keep_payload(node.host_block, node.block_id)
        self._touch_kv(node)
        return True

    def store_state(self, node: Node) -> bool:
        """The node's state, about to go from the device, is kept here; whether there is room.

        A spare one only gets pages that are free, or those of other spare ones.
        """
        if node.host_slot == NO_SLOT:
            entry = self._store(Kind.STATE, node.slot, self._tag(Kind.STATE, node), spare=is_spare(node))
            if entry is None:
                return False
            node.host_slot = entry
            self._eviction.added(node)
            self._tree.version += 1
            if node.used:
                self._eviction.used(node)
        self._state_used[node] = self._tick()
        return True

    def store_private(self, kind: Kind, device_id: int, tag: Tag) -> int | None:
        """What belongs to no node: stays until `free_private`. Returns the entry; None when there is no room."""
        entry = self._store(kind, device_id, tag)
        if entry is not None:
            self._private.add(entry)
            if kind == Kind.KV:
                self._keep_payload(entry, device_id)
        return entry

    def free_private(self, entry: int) -> None:
        """The private entry is not needed any more."""
        self._private.remove(entry)
        self._free_entry(entry)

    # -- from the tier behind ------------------------------------------------------------------------------------------

    def fetch_kv(self, node: Node) -> bool:
        """The node's KV, which is in the tier behind alone, gets an entry here; the move is queued. Whether there is room."""
        entry = self._fetch(Kind.KV, node)
        if entry is None:
            return False
        node.host_block = entry
        self._touch_kv(node)
        self._tree.version += 1
        return True

    def fetch_state(self, node: Node) -> bool:
        """The same for the state at the node. Why it was kept is not known any more; now a request resumes from it."""
        entry = self._fetch(Kind.STATE, node)
        if entry is None:
            return False
        node.host_slot = entry
        if node.reason is None:
            node.reason = Reason.JUNCTION
        self._eviction.added(node)
        self._state_used[node] = self._tick()
        self._tree.version += 1
        return True

    # -- back to the device ---------------------------------------------------------------------------------------------

    def load(self, entry: int, device_id: int, load_id: int) -> Any:
        """Queues the move of a pinned entry into a block or slot; returns what else belongs to it."""
        self.transfers.append(
            BlockTransfer(
                source=HOST,
                target=DEVICE,
                device_id=device_id,
                pages=self._pages[entry],
                tag=self._tags[entry],
                load_id=load_id,
            )
        )
        self._figures.loads += 1
        return self._payloads.get(entry)

    def pages(self, kind: Kind) -> int:
        """Pages of an entry."""
        return self._pages_of[kind]

    def holds(self, entry: int) -> bool:
        """Whether the entry was not dropped."""
        return entry in self._pages

    def is_pinned(self, entry: int) -> bool:
        """Whether a load, or a preempted request, needs the entry."""
        return entry in self._pins

    def pin(self, entries: Iterable[int]) -> None:
        """These entries stay until they are unpinned as often."""
        for entry in entries:
            self._pins[entry] = self._pins.get(entry, 0) + 1

    def unpin(self, entries: Iterable[int]) -> None:
        """See `pin`. Entries that were dropped meanwhile are passed over."""
        for entry in entries:
            pins = self._pins.get(entry, 0) - 1
            if pins > 0:
                self._pins[entry] = pins
            elif pins == 0:
                del self._pins[entry]

    def use(self, path: Iterable[Node]) -> None:
        """A request resumed over this path, front first: its entries are the last to go, deepest first."""
        for node in reversed(list(path)):
            self._touch_kv(node)

    def use_state(self, node: Node) -> None:
        """A request resumed from the node's state, wherever it lay."""
        if node.host_slot != NO_SLOT:
            self._eviction.used(node)
            self._state_used[node] = self._tick()

    # -- going ---------------------------------------------------------------------------------------------------------

    def drop_kv(self, node: Node) -> None:
        """The node's KV is not on the host any more."""
        entry, node.host_block = node.host_block, NO_BLOCK
        del self._kv[node]
        self._free_entry(entry)
        self._tree.prune(node)

    def drop_state(self, node: Node) -> None:
        """The node's state is not on the host any more."""
        entry = node.host_slot
        self._eviction.removed(node)
        del self._state_used[node]
        self._tree.drop_host_state(node)
        self._free_entry(entry)
        self._tree.prune(node)

    def drop(self, entry: int) -> None:
        """The entry failed: it is not used again."""
        tag = self._tags.get(entry)
        if tag is None:
            return
        node = self._tree.get(tag.key)
        if node is None:
            return
        if tag.kind == Kind.KV and node.host_block == entry:
            self.drop_kv(node)
        elif tag.kind == Kind.STATE and node.host_slot == entry:
            self.drop_state(node)

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def kv_entries(self) -> int:
        """KV blocks here."""
        return len(self._kv)

    @property
    def state_entries(self) -> int:
        """States here."""
        return len(self._state_used)

    def pages_of_entry(self, entry: int) -> tuple[int, ...]:
        """Where the entry is."""
        return self._pages[entry]

    def tag_of_entry(self, entry: int) -> Tag:
        """What the entry holds."""
        return self._tags[entry]

    def pins(self) -> dict[int, int]:
        """How often each pinned entry is pinned."""
        return dict(self._pins)

    def private_entries(self) -> list[int]:
        """Entries of no node, ascending."""
        return sorted(self._private)

    def check(self) -> None:
        """Raises CacheCorruptionError unless pages are conserved, and tree, policy and entries agree."""
        pages = [page for entry in self._pages.values() for page in entry]
        if sorted([*pages, *self._free]) != list(range(self.total_pages)):
            raise CacheCorruptionError("pages on the host were lost, or have two owners")
        kv = {node.host_block: node for node in self._tree if node.host_block != NO_BLOCK}
        states = {node.host_slot: node for node in self._tree if node.host_slot != NO_SLOT}
        if set(kv) & set(states) or {*kv, *states, *self._private} != set(self._pages):
            raise CacheCorruptionError("entries on the host and those that the tree knows differ")
        if set(self._kv) != set(kv.values()) or set(self._state_used) != set(states.values()):
            raise CacheCorruptionError("the order of eviction on the host lost an entry")
        if set(self._eviction) != set(states.values()):
            raise CacheCorruptionError("the policy on the host lost a state")
        if not set(self._pins) <= set(self._pages) or any(pins < 1 for pins in self._pins.values()):
            raise CacheCorruptionError("a pinned entry on the host is gone")
        for entries, kind in ((kv, Kind.KV), (states, Kind.STATE)):
            for entry, node in entries.items():
                tag = self._tags[entry]
                if (tag.kind, tag.key, tag.depth_tokens) != (kind, node.key, node.depth_blocks * self._block_tokens):
                    raise CacheCorruptionError(f"{node}: its entry on the host is of {tag}")
                if len(self._pages[entry]) != self._pages_of[kind]:
                    raise CacheCorruptionError(f"{node}: {len(self._pages[entry])} pages on the host")
        used = {kind: sum(len(self._pages[e]) for e in self._pages if self._tags[e].kind == kind) for kind in Kind}
        if used != self._used_pages:
            raise CacheCorruptionError(f"pages by kind {used}, counted {self._used_pages}")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _tag(self, kind: Kind, node: Node) -> Tag:
        return Tag(kind=kind, key=node.key, depth_tokens=node.depth_blocks * self._block_tokens, epoch=self._tree.epoch)

    def _keep_payload(self, entry: int, block_id: int) -> None:
        payload = self.routing_of(block_id)
        if payload is not None:
            self._payloads[entry] = payload

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _touch_kv(self, node: Node) -> None:
        if node.host_block != NO_BLOCK:
            self._kv[node] = self._tick()
            self._kv.move_to_end(node)

    def _store(self, kind: Kind, device_id: int, tag: Tag, *, spare: bool = False) -> int | None:
        entry = self._new_entry(kind, tag, spare=spare)
        if entry is not None:
            self.transfers.append(
                BlockTransfer(source=DEVICE, target=HOST, device_id=device_id, pages=self._pages[entry], tag=tag)
            )
            self._figures.stores += 1
        return entry

    def _fetch(self, kind: Kind, node: Node) -> int | None:
        tag = self._tag(kind, node)
        entry = self._new_entry(kind, tag)
        if entry is not None:
            self.transfers.append(
                BlockTransfer(source=self.behind_name, target=HOST, pages=self._pages[entry], tag=tag)
            )
            self._stats.tiers[self.behind_name].loads += 1
        return entry

    def _new_entry(self, kind: Kind, tag: Tag, *, spare: bool = False) -> int | None:
        count = self._pages_of[kind]
        if not self._make_room(kind, count, spare=spare):
            self._figures.full += not spare
            return None
        pages = tuple(self._free[: -count - 1 : -1])
        del self._free[-count:]
        entry, self._next_entry = self._next_entry, self._next_entry + 1
        self._pages[entry], self._tags[entry] = pages, tag
        self._used_pages[kind] += count
        return entry

    def _offer(self, entry: int) -> None:
        """The entry is about to be evicted: the tier behind may take it. (What belongs to a block beside its KV cannot go
        with it, so such a block is computed again.)"""
        tag = self._tags[entry]
        if self.behind is None or entry in self._payloads or self.behind.has(tag.kind, tag.key):
            return
        self.transfers.append(BlockTransfer(source=HOST, target=self.behind_name, pages=self._pages[entry], tag=tag))
        self._stats.tiers[self.behind_name].stores += 1

    def _free_entry(self, entry: int) -> None:
        pages = self._pages.pop(entry)
        self._used_pages[self._tags.pop(entry).kind] -= len(pages)
        self._free += reversed(pages)
        self._payloads.pop(entry, None)
        self._pins.pop(entry, None)

    def _has_room(self, kind: Kind, count: int) -> bool:
        fits = self._most_pages is None or self._used_pages[kind] + count <= self._most_pages[kind]
        return fits and count <= len(self._free)

    def _make_room(self, kind: Kind, count: int, *, spare: bool) -> bool:
        while not self._has_room(kind, count):
            state = self._eviction.victim(lambda node: node.host_slot not in self._pins, spare_only=spare)
            kv = None if spare else next((node for node in self._kv if node.host_block not in self._pins), None)
            if self._most_pages is not None:
                kv, state = (kv, None) if kind == Kind.KV else (None, state)
            if state is not None and (kv is None or is_spare(state) or self._state_used[state] < self._kv[kv]):
                self._offer(state.host_slot)
                self.drop_state(state)
            elif kv is not None:
                self._offer(kv.host_block)
                self.drop_kv(kv)
            else:
                return False
            self._figures.evictions += 1
        return True
