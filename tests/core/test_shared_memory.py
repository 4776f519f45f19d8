"""One memory for KV and states: layout, who gets the next bytes, moves, and mutants of all of it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.lab.memory import Memory
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.needs import TierIndex, is_guess
from megatron_hybrid_prefix.pool.pages import PageLayout, Pages
from megatron_hybrid_prefix.pool.slots import SlotPool
from megatron_hybrid_prefix.tiers import device
from megatron_hybrid_prefix.tiers.blocks import KVBlocks
from megatron_hybrid_prefix.tiers.device import DeviceTier
from megatron_hybrid_prefix.tiers.units import SHARED, BlockMove, BlockTransfer, EntryKind, PageClear, StateMove
from tests.core import test_stateful
from tests.core.model import tier_behind

BLOCK = 4  # tokens


# -- layout and pages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment_bytes", [1, 16])
def test_a_layout_loses_least_with_as_few_states_in_a_page_as_lose_little(alignment_bytes):
    """A tenth of a page and 4 % of a block at most. Against all layouts with up to 64 states in a page."""
    for block_bytes in range(16, 400, 48):
        for state_bytes in range(1, 2000, 37):
            found, most = [], []
            for states in range(1, 65):
                for blocks in range(1, -(-states * state_bytes // block_bytes) + 1):
                    aligned = -(-states * state_bytes // (blocks * alignment_bytes)) * alignment_bytes
                    step = max(block_bytes, aligned)
                    lost = 1 - states * state_bytes / (blocks * step), 1 - block_bytes / step
                    found.append((0.25 * lost[0] + 0.75 * lost[1], states, blocks, step))
                    most.append(max(lost[0] / 0.1, lost[1] / 0.04))
                if min(most) <= 1:
                    found = [each for each, largest in zip(found, most, strict=True) if largest <= 1]
                    break
            layout = PageLayout.of(block_bytes=block_bytes, state_bytes=state_bytes, alignment_bytes=alignment_bytes)
            assert (layout.page_states, layout.page_blocks, layout.block_bytes) == min(found)[1:]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Memory(11, 4, 8).layout, "a state and a KV block need 12 bytes"),
        (lambda: Memory(-5, 4, 8).layout, "a state and a KV block need 12 bytes"),
        (lambda: PageLayout.of(block_bytes=0, state_bytes=5), "must be 1 or more"),
        (lambda: Pages(4, 2, 0), "must be 0, 1 and 1 or more"),
        (lambda: shared(4, 0), "must be 0, 1 and 1 or more"),
        (lambda: shared(4, state_slots=-1), "state_slots=-1, first_state_slot=0: must be 0 or more"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def memory(*, pages: int, size: int = 3, rest: int = 0) -> Pages:
    return Pages(pages * size + rest, size)


def test_blocks_fill_pages_with_holes_first_and_empty_ones_last():
    pages = memory(pages=3, rest=2)
    assert pages.take_blocks(3) == [9, 10, 0], "the blocks that no state can use go first"
    assert pages.take_blocks(2) == [1, 2]
    pages.free(1)
    assert pages.take_blocks(1) == [1]
    assert (pages.free_blocks, pages.held_blocks, pages.unheld_pages) == (6, 5, 2)


def test_pages_that_change_their_owner_are_counted():
    pages = memory(pages=3)

    def changed() -> tuple[int, int]:
        return pages.pages_to_states, pages.pages_to_kv

    pages.give_to_state(2)
    taken = pages.take_blocks(3)
    assert changed() == (0, 0), "nobody had these pages before"
    pages.take_from_state(2)
    pages.give_to_state(2)
    assert changed() == (0, 0), "the next state has no other owner"
    for block_id in taken:
        pages.free(block_id)
    pages.give_to_state(0)
    assert changed() == (1, 0)
    pages.take_from_state(2)
    pages.take_from_state(0)
    pages.take_blocks(7)  # of all pages, of which two last held a state
    assert changed() == (1, 2)


def test_a_page_with_an_old_state_is_cleared_before_it_gets_kv():
    """Also after a reset, with the memory as it was, and if the copies before it were not made."""
    cache = shared(12, 3)

    def fill() -> list[Any]:
        assert len(cache.blocks.allocate(12)) == 12
        return cache.take_copies()

    assert fill() == [], "nothing was there"
    cache.reset()
    assert cache._device.slots.reserve(0) is not None
    cache.reset()
    cache.blocks.allocate(12)
    cache.reset()
    (clear,) = fill()
    assert isinstance(clear, PageClear) and 4 > clear.page >= 0
    cache.reset()
    assert fill() == [], "it has been cleared"


@pytest.mark.parametrize("size", [1, 2, 5])
def test_pages_against_the_obvious_count(size):
    rng = random.Random(size)
    pages = memory(pages=7, size=size, rest=size - 1)
    cached: set[int] = set()
    held: set[int] = set()
    states: set[int] = set()
    for _ in range(2000):
        what = rng.randrange(6)
        free = set(range(pages.total_blocks)) - cached - held
        free -= {block for page in states for block in range(page * size, (page + 1) * size)}
        assert pages.free_blocks == len(free) and sorted(free) == pages.free_ids()
        if what == 0 and free:
            held |= set(pages.take_blocks(rng.randint(1, len(free))))
        elif what == 1 and held:
            held.discard(block := rng.choice(sorted(held)))
            cached.add(block)
            pages.hold(block, -1)
        elif what == 2 and cached:
            cached.discard(block := rng.choice(sorted(cached)))
            held.add(block)
            pages.hold(block, 1)
        elif what == 3 and held:
            held.discard(block := rng.choice(sorted(held)))
            pages.free(block)
        elif what == 4 and states:
            states.discard(page := rng.choice(sorted(states)))
            pages.take_from_state(page)
        elif what == 5:
            unheld = [p for p in range(7) if p not in states and not {b // size for b in held} & {p}]
            assert pages.unheld_pages == len(unheld)
            assert pages.can_be_emptied() == (bool(unheld) and len(free) >= size)
            if not pages.can_be_emptied():
                assert pages.empty_page is None
                continue
            least = min(sum(block // size == p for block in cached) for p in unheld)
            page, moves = pages.empty()
            assert page in unheld and len(moves) == least
            assert {target for _, target in moves} <= free and all(target // size != page for _, target in moves)
            cached = cached - {source for source, _ in moves} | {target for _, target in moves}
            assert pages.empty_page is not None
            pages.give_to_state(page)
            states.add(page)


# -- who gets the next bytes -------------------------------------------------------------------------------------------


def shared(blocks: int, page_blocks: int = 2, **options: Any) -> HybridPrefixCache:
    options = {"block_tokens": BLOCK, "retention_interval_tokens": 0} | options
    return HybridPrefixCache(CacheSettings(kv_blocks=blocks, page_blocks=page_blocks, **options))


def run(cache: HybridPrefixCache, name: str, blocks: int, *, prefix: int = 0) -> int | None:
    """Runs a prompt of ``blocks`` blocks and one more token; its first ``prefix`` blocks are common. Reused tokens."""
    keys = [b"common %d" % n if n < prefix else b"%s %d" % (name.encode(), n) for n in range(blocks)]
    request_id = run.__dict__["next"] = run.__dict__.get("next", 0) + 1
    admission = cache.admit(request_id, cache.match(KeyChain(keys, blocks * BLOCK + 1)))
    if admission is None:
        return None
    cache.publish(cache.plan(request_id, admission.resume_tokens, blocks * BLOCK + 1))
    cache.release(request_id)
    cache.take_copies()
    cache.check_integrity()
    return admission.resume_tokens


def depths(cache: HybridPrefixCache) -> list[int]:
    return sorted(node.depth_blocks for node in cache.nodes() if node.slot >= 0)


def test_a_junction_is_found_though_the_kv_before_it_is_gone():
    cache = shared(13)
    run(cache, "a", 6, prefix=4)
    for state in list([node for node in cache.nodes() if node.slot >= 0]):
        cache._device.evict(state)
    run(cache, "x", 10)  # takes the bytes of the KV
    assert cache.match(KeyChain([b"common 0"], BLOCK + 1)).kv_depth_blocks == 0
    run(cache, "b", 6, prefix=4)
    assert cache.stats().checkpoints_by_reason["junction"] == 1
    assert 4 in depths(cache)


def test_what_is_remembered_is_bounded():
    cache = shared(12)
    for number in range(60):
        run(cache, str(number), 5)
    assert len(cache._device.ghosts) == 4 * 12
    cache.invalidate()
    assert len(cache._device.ghosts) == 0


def test_a_state_that_finds_no_page_to_empty_evicts_another_state():
    cache = shared(15, page_blocks=3)
    scattered = cache.blocks.allocate(9)
    cache.blocks.free([block_id for block_id in scattered if block_id % 3])  # a held block in each of three pages
    run(cache, "a", 1)
    run(cache, "b", 1)
    use = cache.memory_use()
    assert (use.blocked_slots, use.moved_blocks, use.state_pages) == (1, 0, 1) and cache.stats().evictions == 1
    cache.blocks.free([block_id for block_id in scattered if not block_id % 3])
    cache.check_integrity()


def test_ranks_decide_alike():
    """Ids and moves depend on the calls only: not on the secret of the keys, and so not on their hashes."""
    caches = [shared(60, 5, secret=secret, retention_interval_tokens=None) for secret in (b"one", b"two")]
    rng, moves = random.Random(3), 0
    known, live = [[0]], []
    for request_id in range(300):
        tokens = rng.choice(known[-9:])[: rng.randint(0, 40)] + rng.choices(range(9), k=rng.randint(1, 30))
        known.append(tokens)
        if len(live) > 2:
            assert len({cache.release(live[0]) for cache in caches}) == 1
            live.pop(0)
        decisions = []
        for cache in caches:
            admission = cache.admit(request_id, cache.match(cache.chain(tokens)))
            plan = admission and cache.plan(request_id, admission.resume_tokens, len(tokens))
            copies = cache.take_copies()
            decisions.append((admission, repr(plan), copies))
            if plan:
                cache.publish(plan)
        assert decisions[0] == decisions[1]
        moves += len(decisions[0][2])
        live += [request_id] if decisions[0][0] else []
    assert moves > 20 and caches[0].stats() == caches[1].stats()


def reused_with_documents(sizes: dict[str, Any]) -> float:
    """Share of conversations' blocks that are reused, while every 40th prompt is a document that takes a third of the memory."""
    cache, rng = shared(1040, eviction_policy="recompute_cost", live_states=False, **sizes), random.Random(0)
    turns: dict[int, int] = {}
    total = reused = 0
    for number in range(800):
        is_document = number % 40 == 39
        name = rng.choice(list(turns)) if turns and rng.random() < 0.8 else number
        turns[name] = turns.get(name, 0) + rng.randint(1, 3)
        blocks = 346 if is_document else turns[name]
        resumed = run(cache, f"{number if is_document else name}", blocks)
        total, reused = total + blocks * (not is_document), reused + resumed // BLOCK * (not is_document)
        if turns[name] > 12 or len(turns) > 50:
            del turns[name]
    return reused / total


def test_states_that_share_a_page_are_kept_as_well_as_states_of_their_own(monkeypatch):
    """Because they move: a page is free only when the last of its states has gone."""
    alone = reused_with_documents({"page_blocks": 13})
    assert reused_with_documents({"page_blocks": 52, "page_states": (1, 4)}) > 0.95 * alone
    monkeypatch.setattr(SlotPool, "empty", lambda self: [])
    assert reused_with_documents({"page_blocks": 52, "page_states": (1, 4)}) < 0.9 * alone


# -- mutants -----------------------------------------------------------------------------------------------------------


def stale_id_after_a_move(self: KVBlocks, moves: list[tuple[int, int]]) -> None:
    for source, target in moves:
        self._node[target], self._node[source] = self._node[source], None


def a_block_left(self: Pages) -> tuple[int, list[tuple[int, int]]]:
    page, moves = _empty(self)
    return page, moves[:-1]


def not_cleared(self: Pages, count: int) -> list[int]:
    block_ids = _take_blocks(self, count)
    self.with_old_state.clear()
    return block_ids


_next_guess, _init, _empty, _take_blocks = KVBlocks.next_guess, Pages.__init__, Pages.empty, Pages.take_blocks
_reserve = SlotPool.reserve
MUTANTS = {
    "a stale id after a move": [(KVBlocks, "move", stale_id_after_a_move)],
    "a move that is not copied": [
        (device, "BlockMove", lambda *, source_block, target_block: BlockMove(target_block, target_block))
    ],
    "a page one block too short": [
        (Pages, "__init__", lambda self, blocks, size, states: _init(self, blocks, max(1, size - 1), states))
    ],
    "a page with a block left": [(Pages, "empty", a_block_left)],
    "a page that is not cleared": [(Pages, "take_blocks", not_cleared)],
    "a held block moves": [
        (Pages, "_is_unheld", Pages._has_free),
        (Pages, "can_be_emptied", lambda self: self.free_blocks >= self.page_blocks),
    ],
    "a decoded state without protection": [(DeviceTier, "protect", lambda self, slot: None)],
    "a live slot that is evicted": [(SlotPool, "make_live", SlotPool.abandon)],
    "useful KV is evicted": [
        (TierIndex, "add_state", lambda self, node: (self.eviction.added(node), self.states.add(node))),
        (TierIndex, "drop_state", lambda self, node: (self.eviction.removed(node), self.states.remove(node))),
    ],
    "the cap is ignored": [(SlotPool, "is_full", False)],
    "the cap counts live slots": [(SlotPool, "is_full", property(lambda self: self.used_slots >= self.most_cached))],
    "a guess at the cap takes any slot": [
        (KVBlocks, "next_guess", lambda self, *args: _next_guess(self, *args) or self.next_state())
    ],
    "a page goes though a slot is in use": [(SlotPool, "is_loose", lambda self, slot: not self.pins(slot))],
    "a pinned state goes as any other": [
        (DeviceTier, "_next_unpinned", lambda self, *args: self.blocks.next_state(*args))
    ],
    "only whole pages go": [(DeviceTier, "_frees_bytes", lambda self, node, page: self.slots.is_loose(node.slot))],
}


OF_TWO_SIZES = {
    "a state that moves is not copied": [
        (device, "StateMove", lambda *, source_slot, target_slot: StateMove(target_slot, target_slot))
    ],
    "a node keeps the slot of a state that moved": [
        (DeviceTier, "_gather_states", lambda self: bool(self.slots.empty()))
    ],
    "a live state in a page of checkpoints": [(SlotPool, "reserve", lambda self, size: _reserve(self, 1))],
    "a page for a live state is any state's": [
        (DeviceTier, "_frees_bytes", lambda self, node, page=False: page or self.slots.is_loose(node.slot))
    ],
}


@pytest.mark.parametrize("mutant", [*MUTANTS, *OF_TWO_SIZES])
def test_mutants_are_found(mutant, monkeypatch):
    for change in (MUTANTS | OF_TWO_SIZES)[mutant]:
        monkeypatch.setattr(*change)
    test_stateful.fail_unless_a_seed_fails(
        test_stateful.TWO_SIZES if mutant in OF_TWO_SIZES else test_stateful.MEMORIES
    )


def test_blocks_move_on_after_an_invalidation():
    """Requests that run on share blocks whose move is still queued."""
    cache = shared(60, 5, host_pages=40, host_state_pages=2)
    running = cache.admit(1, cache.match(cache.chain(list(range(3 * BLOCK + 1)))))
    cache.publish(cache.plan(1, running.resume_tokens, 3 * BLOCK + 1))
    for node in [node for node in cache.nodes() if node.slot >= 0]:
        cache._device.host.store_state(node)
    stores = cache.take_copies()
    assert stores
    cache._device.copies += [*stores, BlockMove(source_block=1, target_block=2)]
    cache.invalidate()
    assert cache.take_copies() == [*stores, BlockMove(source_block=1, target_block=2)]
    cache._device.copies += stores
    cache.reset()  # nobody runs on
    assert cache.take_copies() == []


# -- a host tier -------------------------------------------------------------------------------------------------------


def with_host(**options: Any) -> HybridPrefixCache:
    """A memory with a host tier. Guesses are a block apart; a state is a block, and two pages on the host."""
    sizes = {"block_tokens": BLOCK, "min_computed_tokens": 1, "retention_interval_tokens": BLOCK}
    return HybridPrefixCache(CacheSettings(**sizes, host_kv_pages=1, host_state_pages=2, **options))


def test_the_tier_behind_is_offered_each_state_that_is_no_guess(monkeypatch):
    cache = with_host(kv_blocks=20, state_slots=4, host_pages=12, behind=tier_behind())
    copies: list[Any] = []
    take = cache.take_copies
    monkeypatch.setattr(cache, "take_copies", lambda: copies.extend(take()))
    guesses: set[bytes] = set()
    for number in range(8):
        run(cache, f"prompt {number}", 6)
        guesses |= {node.key for node in cache.nodes() if is_guess(node)}
    stored = [copy for copy in copies if isinstance(copy, BlockTransfer)]
    offered = {(copy.tag.kind, copy.tag.key) for copy in stored if copy.target == SHARED}
    for number in range(8):
        keys = [b"prompt %d %d" % (number, block) for block in range(6)]
        assert (EntryKind.STATE, keys[-1]) in offered and all((EntryKind.KV, key) in offered for key in keys)
    assert guesses and not [key for kind, key in offered if kind == EntryKind.STATE and key in guesses]


def test_the_host_gets_a_guess_once_it_is_confirmed():
    cache = with_host(kv_blocks=20, state_slots=8, host_pages=40, eviction_policy="lru")
    run(cache, "prompt", 6)
    host = cache._device.host
    node = next(node for node in cache.nodes() if node.slot >= 0 and is_guess(node))
    assert not host.store_state(node) and node not in host.of_states
    cache._device.confirm(node, CheckpointReason.JUNCTION)
    cache._device.evict(node)
    assert node in host.of_states
    assert host.next_state(lambda other: other is node) is node
