"""Tree, matcher and KV blocks."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.blocks import KVBlocks
from megatron_hybrid_prefix.index.keys import KeyChain, KeyMaker
from megatron_hybrid_prefix.index.matcher import match_prefix
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node, PrefixTree
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.lru import LruEviction
from megatron_hybrid_prefix.pool.pages import Pages
from megatron_hybrid_prefix.pool.slots import NO_SLOT, SlotPool
from megatron_hybrid_prefix.tiers.base import Entry
from megatron_hybrid_prefix.tiers.units import EntryKind, LoadState, Tag
from tests.core.model import NAMESPACE, tier_behind

MAKER = KeyMaker(4, b"of the tests")


def chain_of(*blocks: int, rest: int = 0) -> KeyChain:
    """The chain of blocks of one repeated token each, and ``rest`` more tokens."""
    return MAKER.chain([token for token in blocks for _ in range(4)] + [99] * rest)


def grown(tree: PrefixTree, chain: KeyChain, first_block: int = 0) -> list[Node]:
    path = tree.path(chain.keys)
    for key in chain.keys[len(path) :]:
        path.append(tree.insert(key, path[-1] if path else None, first_block + len(path)))
    return path


def matched(tree: PrefixTree, chain: KeyChain, limit: int | None = None, read: bool = True):
    limit = chain.tokens - 1 if limit is None else limit
    return match_prefix(tree, chain, block_tokens=4, limit_tokens=limit, read=read)


def test_a_tree_knows_depths_children_and_branches():
    tree = PrefixTree()
    left = grown(tree, chain_of(1, 2, 3))
    right = grown(tree, chain_of(1, 2, 4), first_block=10)
    assert right[:2] == left[:2] and right[2] is not left[2] and len(tree) == 4
    assert [node.depth_blocks for node in left] == [1, 2, 3]
    assert [node.children for node in left] == [1, 2, 0]
    assert [node.parent for node in right] == [None, left[0], left[1]]
    assert tree.path(chain_of(1, 2, 5).keys) == left[:2]
    version = tree.version
    left[2].block_id = NO_BLOCK
    tree.prune(left[2])
    assert tree.path(chain_of(1, 2, 3).keys) == left[:2] and left[1].children == 1 and tree.version > version
    tree.clear()
    assert len(tree) == 0 and tree.path(chain_of(1).keys) == []


def test_a_match_needs_kv_from_the_front_and_a_state():
    tree = PrefixTree()
    path = grown(tree, chain_of(1, 2, 3, 4))
    prompt = chain_of(1, 2, 3, 9, rest=2)
    match = matched(tree, prompt)
    assert (match.kv_depth_blocks, match.resume_tokens, match.source_slot) == (3, 0, None)
    assert match.lost_tokens_no_state == 12 and match.block_ids == ()
    tree.set_state(path[1], 7, CheckpointReason.TAIL)
    tree.set_state(path[3], 8, CheckpointReason.TAIL)  # beyond what the prompt shares
    match = matched(tree, prompt)
    assert (match.kv_depth_blocks, match.resume_tokens, match.source_slot) == (3, 8, 7)
    assert match.lost_tokens_no_state == 4 and match.block_ids == (0, 1) and match.path == tuple(path[:2])
    assert tree.drop_state(path[1]) == 7 and path[1].slot == NO_SLOT and path[1].reason is None
    assert matched(tree, prompt).resume_tokens == 0
    assert matched(tree, chain_of(9, 1, 2)).kv_depth_blocks == 0


def test_at_least_one_token_is_computed():
    tree = PrefixTree()
    path = grown(tree, chain_of(1, 2, 3))
    tree.set_state(path[2], 5, CheckpointReason.TAIL)
    exact = matched(tree, chain_of(1, 2, 3))
    assert (exact.kv_depth_blocks, exact.resume_tokens, exact.lost_tokens_no_state) == (3, 0, 8)
    assert matched(tree, chain_of(1, 2, 3, rest=1)).resume_tokens == 12
    tree.set_state(path[1], 6, CheckpointReason.REPEAT)
    assert matched(tree, chain_of(1, 2, 3)).resume_tokens == 8


@pytest.mark.parametrize(
    ("limit", "resume", "lost"), [(-3, 0, 0), (0, 0, 0), (7, 0, 4), (8, 8, 0), (11, 8, 0), (12, 8, 4)]
)
def test_a_limit_caps_the_resume_and_what_counts_as_lost(limit, resume, lost):
    tree = PrefixTree()
    path = grown(tree, chain_of(1, 2, 3, 4))
    tree.set_state(path[1], 6, CheckpointReason.TAIL)
    tree.set_state(path[3], 7, CheckpointReason.TAIL)
    match = matched(tree, chain_of(1, 2, 3, 4, rest=3), limit)
    assert (match.resume_tokens, match.lost_tokens_no_state) == (resume, lost)


def test_no_read_matches_nothing():
    tree = PrefixTree()
    tree.set_state(grown(tree, chain_of(1))[0], 6, CheckpointReason.TAIL)
    match = matched(tree, chain_of(1, rest=1), read=False)
    assert (match.kv_depth_blocks, match.resume_tokens, match.lost_tokens_no_state, match.path) == (0, 0, 0, ())


# -- KV blocks ---------------------------------------------------------------------------------------------------------


def kv_blocks(count: int) -> KVBlocks:
    return KVBlocks(Pages(count, 0), SlotPool(0), LruEviction())


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


def test_blocks_go_round():
    blocks, tree = kv_blocks(6), PrefixTree()
    block_ids, path = keyed(blocks, tree, chain_of(1, 2))
    assert block_ids == [0, 1] and (blocks.free_blocks, blocks.cached_blocks) == (4, 0)
    assert blocks.share(path) == block_ids and blocks.ref_count(0) == 2
    blocks.release(block_ids, path)
    assert blocks.available_blocks == 4 and blocks.unreferenced_tail(path) == 0
    blocks.release(block_ids, path)
    assert (blocks.free_blocks, blocks.cached_blocks, blocks.unreferenced_tail(path)) == (4, 2, 2)
    assert list(blocks.unneeded) == [path[1], path[0]], "leaves first"
    blocks.check()
    assert blocks.next_kv() is path[1]
    blocks.unbind(path[1])
    assert blocks.free_blocks == 5 and blocks.node(1) is None
    blocks.check()


def test_the_block_let_go_longest_ago_goes_first_and_never_before_its_children():
    blocks, tree = kv_blocks(8), PrefixTree()
    one = keyed(blocks, tree, chain_of(1, 2, 3))
    other = keyed(blocks, tree, chain_of(4))
    blocks.release(*one)
    blocks.release(*other)
    blocks.share(one[1][:2])  # used again, except for its last block
    blocks.release(one[0][:2], one[1][:2])
    assert [node.block_id for node in blocks.unneeded] == [2, 3, 1, 0]
    blocks.check()


def test_a_block_computed_twice_is_private_and_takes_over_when_the_first_goes():
    blocks, tree = kv_blocks(8), PrefixTree()
    first, path = keyed(blocks, tree, chain_of(1, 2))
    second, same = keyed(blocks, tree, chain_of(1, 2, 3))
    assert same[:2] == path and [node.block_id for node in same] == [0, 1, 4]
    assert blocks.is_duplicate(path[0], second[0]) and not blocks.is_duplicate(path[0], first[0])
    blocks.check()
    blocks.release(first, path)  # else block 1 would be evictable in front of its child 4, which is held
    assert [node.block_id for node in same] == second and blocks.free_blocks == 5 and blocks.cached_blocks == 0
    blocks.check()
    blocks.release(second, same)
    assert blocks.free_blocks == 5 and [node.block_id for node in blocks.unneeded] == [4, 3, 2]
    blocks.check()


def test_a_duplicate_is_freed_with_its_request():
    blocks, tree = kv_blocks(8), PrefixTree()
    first, path = keyed(blocks, tree, chain_of(1, 2))
    second, same = keyed(blocks, tree, chain_of(1, 2))
    blocks.release(second, same)
    assert blocks.free_blocks == 6 and [node.block_id for node in path] == first and not blocks._duplicates
    blocks.check()


def test_a_block_computed_again_replaces_one_that_nobody_holds():
    blocks, tree = kv_blocks(4), PrefixTree()
    blocks.release(*keyed(blocks, tree, chain_of(1)))
    second, (node,) = keyed(blocks, tree, chain_of(1))
    assert node.block_id == second[0] == 1 and blocks.cached_blocks == 0 and blocks.free_blocks == 3
    blocks.check()


def test_unbinding_a_held_node_leaves_the_blocks_with_who_uses_them():
    blocks, tree = kv_blocks(4), PrefixTree()
    first, path = keyed(blocks, tree, chain_of(1))
    second, _ = keyed(blocks, tree, chain_of(1))
    blocks.unbind(path[0])
    blocks.check()
    blocks.release(first)
    blocks.release(second)
    assert blocks.free_blocks == 4
    blocks.check()


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
    store, host = cache._store, cache._store.host
    node = None
    for key in cache.chain(list(range(16))).keys:
        node = store.tree.insert(key, node, NO_BLOCK)
    host._put_kv(node, host._fetch(EntryKind.KV, node))
    keys = cache.chain(list(range(12))).keys
    assert host.gather(keys, 0) is None, "there is no room for the third block"
    nodes = list(cache.nodes())
    assert [n.depth_blocks for n in nodes if n.host_block != NO_BLOCK] == [1, 2] and len(nodes) == 2
    assert not host.entries.pins()
    cache.check_integrity()


def test_a_preempted_request_waits_for_entries_that_are_still_read_for_another():
    """The other's load was given up. What its entries were read for is pinned by the preempted request by then."""
    behind = tier_behind()
    cache = HybridPrefixCache(
        CacheSettings(block_tokens=4, kv_blocks=20, state_slots=4, host_pages=20, behind=behind, secret=b"test")
    )
    tokens = list(range(9))
    chain = cache.chain(tokens)
    tags = [Tag(kind=EntryKind.KV, key=key, depth_tokens=4 * n, epoch=0) for n, key in enumerate(chain.keys, 1)]
    for tag in [*tags, Tag(kind=EntryKind.STATE, key=chain.keys[-1], depth_tokens=8, epoch=0)]:
        behind.tier.put(NAMESPACE, Entry(tag, memoryview(b""), 0))
    loading = cache.loads.begin_load_back(1, cache.match(chain))
    assert loading.load.state is LoadState.FETCHING and len(loading.load.coming) == 3
    admitted = cache.admit(2, cache.match(chain, read=False))
    cache.publish(cache.plan(2, admitted.resume_tokens, 9))
    cache.release(1)
    assert loading.load.state is LoadState.GIVEN_UP
    assert cache.loads.swap_out(2, 9, 0)
    cache.release(2)
    cache.blocks.free(cache.blocks.allocate(cache.blocks.available_count))  # the device has nothing of it any more
    again = cache.loads.begin_load_back(2, cache.match(cache.chain([*tokens, 1])))
    assert not again.path and again.load.state is LoadState.FETCHING
    assert len(again.load.coming) == 2 and set(again.load.coming) < set(loading.load.coming)
    cache.check_integrity()
    cache.reset()
    assert again.load.state is LoadState.GIVEN_UP, "who runs its copies has to know"
