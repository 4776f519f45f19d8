"""Pages of several states: a page with the state of a running request stays, KV below its other states does not."""

from __future__ import annotations

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.settings import CacheSettings

BLOCK = 4


def test_kv_below_a_state_in_the_page_of_a_running_request_is_available():
    cache = HybridPrefixCache(CacheSettings(block_tokens=BLOCK, kv_blocks=5, page_blocks=1, page_states=8))

    def start(number: int, tokens: int) -> None:
        prompt = [100 * number + token for token in range(tokens)]
        assert cache.admit(number, cache.match(cache.chain(prompt))) is not None
        cache.publish(cache.plan(number, 0, tokens))

    for number in range(3):  # each leaves a block and a state
        start(number, BLOCK + 1)
        cache.release(number)
    start(3, 3)
    use = cache.memory_use()
    assert (use.state_pages, use.held_blocks, use.cached_blocks) == (1, 1, 3)
    assert cache.blocks.available_count == 3
    cache.append(3, list(range(3 * BLOCK)))
    assert cache.grow(3, 3 + 3 * BLOCK) is not None  # takes all of them
    cache.check_integrity()
    assert cache.memory_use().held_blocks == 4 and not list([node for node in cache.nodes() if node.slot >= 0])
