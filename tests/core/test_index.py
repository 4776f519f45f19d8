"""Tree, matcher and KV blocks."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.keys import KeyChain, KeyMaker
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node, PrefixTree
from megatron_hybrid_prefix.policy.lru import LruEviction
from megatron_hybrid_prefix.pool.pages import Pages
from megatron_hybrid_prefix.pool.slots import SlotPool
from megatron_hybrid_prefix.tiers.blocks import KVBlocks
from megatron_hybrid_prefix.tiers.units import EntryKind, LoadOver, LoadState
from tests.core.model import put_behind, tier_behind

MAKER = KeyMaker(4, b"of the tests")


def chain_of(*blocks: int, rest: int = 0) -> KeyChain:
    """The chain of blocks of one repeated token each, and ``rest`` more tokens."""
    return MAKER.chain([token for token in blocks for _ in range(4)] + [99] * rest)


# -- KV blocks ---------------------------------------------------------------------------------------------------------


def kv_blocks(count: int) -> KVBlocks:
    pages = Pages(count, 8)
    return KVBlocks(pages, SlotPool(pages), LruEviction())


def keyed(blocks: KVBlocks, tree: PrefixTree, chain: KeyChain) -> tuple[list[int], list[Node]]:
    """A request that computed and registered all of ``chain``."""
    path = tree.path(chain.keys)
    block_ids = blocks.take(len(chain.keys))
    for node, block_id in zip(path, block_ids, strict=False):
        blocks.merge(node, block_id)
    for index in range(len(path), len(chain.keys)):
        path.append(tree.insert(chain.keys[index], path[-1] if path else None, block_ids[index]))
        blocks.bind(path[-1])
    return block_ids, path


def test_blocks_released_or_keyed_once_too_often():
    blocks = kv_blocks(2)
    with pytest.raises(CacheCorruptionError, match="more often"):
        blocks.release((0,))
    blocks.take(1)
    blocks.bind(Node(b"a", None, 0))
    with pytest.raises(CacheCorruptionError, match="gets a key"):
        blocks.bind(Node(b"b", None, 0))
    with pytest.raises(CacheCorruptionError, match="gets a key"):
        blocks.bind(Node(b"b", None, 1))
    with pytest.raises(ValueError):
        kv_blocks(-1)


def test_check_finds_what_is_wrong():
    def broken(break_it) -> None:
        blocks, tree = kv_blocks(8), PrefixTree()
        _block_ids, path = keyed(blocks, tree, chain_of(1, 2))
        keyed(blocks, tree, chain_of(1))
        blocks.release(*keyed(blocks, tree, chain_of(5, 6)))
        blocks.check()
        break_it(blocks, path)
        with pytest.raises(CacheCorruptionError):
            blocks.check()

    broken(lambda blocks, path: blocks._pages._free_ids[0].append(0))
    broken(lambda blocks, path: blocks._pages._free_ids[0].pop())
    broken(lambda blocks, path: blocks._ref_counts.__setitem__(0, 0))
    broken(lambda blocks, path: blocks._ref_counts.__setitem__(7, 1))
    broken(lambda blocks, path: blocks._node.__setitem__(0, None) or blocks._node.__setitem__(2, path[0]))
    broken(lambda blocks, path: blocks._let_go(path[0]))
    broken(lambda blocks, path: blocks._hold(blocks.next_kv()))
    broken(lambda blocks, path: blocks._ref_counts.__setitem__(2, 2))

    def parent_first(blocks, path) -> None:
        leaf = blocks.next_kv()
        blocks._hold(leaf)
        blocks._let_go(leaf)

    broken(parent_first)


def test_a_path_that_is_fetched_stays_in_the_tree_while_room_is_made_for_it():
    """The host has room for two entries. All that is below the path is one block there, which goes first."""
    settings = CacheSettings(block_tokens=4, kv_blocks=9, state_slots=1, host_pages=2, behind=tier_behind())
    cache = HybridPrefixCache(settings)
    store, host = cache._device, cache._device.host
    node = None
    for key in cache.chain(list(range(16))).keys:
        node = store.tree.insert(key, node, NO_BLOCK)
    host._fetch(EntryKind.KV, node)
    keys = cache.chain(list(range(12))).keys
    assert host.gather(keys, 0) is None, "there is no room for the third block"
    nodes = list(cache.nodes())
    assert [n.depth_blocks for n in host.kv] == [1, 2] and len(nodes) == 2
    assert not any(entry.pins for entry in host.entries())
    cache.check_integrity()


def test_a_preempted_request_waits_for_entries_that_are_still_read_for_another():
    """The other has ended. What its entries were read for is pinned by the preempted request by then."""
    behind = tier_behind()
    cache = HybridPrefixCache(
        CacheSettings(block_tokens=4, kv_blocks=20, state_slots=4, host_pages=20, behind=behind, secret=b"test")
    )
    tokens = list(range(9))
    chain = cache.chain(tokens)
    put_behind(behind, chain)
    loading = cache.loads.fetch(1, cache.match(chain))
    assert loading.state is LoadState.FETCHING and len(loading.coming) == 3
    admitted = cache.admit(2, cache.match(chain, read=False))
    cache.publish(cache.plan(2, admitted.resume_tokens, 9))
    cache.loads.drop_fetch(1)
    assert cache.loads.swap_out(2, 9, 0)
    cache.release(2)
    cache.blocks.free(cache.blocks.allocate(cache.blocks.available_count))  # the device has nothing of it any more
    again = cache.admit(2, cache.match(cache.chain([*tokens, 1])), load=True).load
    assert not cache.live[2].path and again.state is LoadState.FETCHING
    assert len(again.coming) == 2 and set(again.coming) < set(loading.coming)
    cache.check_integrity()
    cache.reset()
    assert again.state is LoadState.GIVEN_UP
    assert LoadOver(again.load_id) in cache.take_copies(), "who runs its copies has to know"


def test_what_a_request_would_share_beyond_its_load_may_go_for_the_loads_slot():
    """The state at 8 is on the host; the KV up to 16 is on the device, and goes first of all that nobody holds."""
    sizes = {"kv_blocks": 12, "page_blocks": 2, "live_states": False, "host_pages": 40, "host_state_pages": 2}
    cache = CacheSettings(block_tokens=4, retention_interval_tokens=0, eviction_policy="lru", **sizes)
    cache = HybridPrefixCache(cache)
    first, second, third = (list(range(start, start + 17)) for start in (0, 100, 200))
    for number, tokens in enumerate((first, second)):
        cache.admit(
            number, cache.match(cache.chain(tokens)), length_tokens=16, breakpoints=[8] if tokens is first else ()
        )
        cache.publish(cache.plan(number, 0, 16))
        for node in [node for node in cache.nodes() if node.slot >= 0]:
            cache._device.evict(node) if node.depth_blocks == 2 else cache._device.unbind(node)
        cache.release(number)
    assert cache.admit(2, cache.match(cache.chain(third)), length_tokens=16) is not None
    match = cache.match(cache.chain([*first, 1]))
    assert (match.resume_tokens, match.loadable_blocks, match.kv_depth_blocks) == (0, 2, 4)
    admission = cache.admit(3, match, load=True)
    assert (admission.resume_tokens, admission.shared_blocks, admission.stored_tokens) == (8, 2, 8)
    cache.check_integrity()


def test_who_runs_copies_is_told_of_each_load_and_fetch_that_is_over():
    behind = tier_behind()
    settings = CacheSettings(block_tokens=4, kv_blocks=20, state_slots=4, host_pages=20, behind=behind, secret=b"test")
    cache = HybridPrefixCache(settings)
    chain = cache.chain(list(range(9)))
    put_behind(behind, chain)
    fetch = cache.loads.fetch(1, cache.match(chain))
    load = cache.admit(1, cache.match(chain), load=True).load
    assert LoadOver(fetch.load_id) in (copies := cache.take_copies()) and LoadOver(load.load_id) not in copies
    cache.release(1)
    assert cache.take_copies() == [LoadOver(load.load_id)] and load.state is LoadState.GIVEN_UP
    assert cache.stats().fallbacks == {"host_load_given_up": 1}
