"""Speed and memory of the index and the facade. `python -m tests.cache.microbench` prints the figures.

`test_speed.py` runs the same functions at these sizes, with bounds three times the goals.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array
from time import perf_counter

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.keys import KeyChain

BLOCK_TOKENS = 256


def run_request(cache: HybridPrefixCache, request_id: int, chain: KeyChain) -> int:
    """A request from match to release, its prompt computed in one step; returns the tokens reused."""
    admission = cache.admit(request_id, cache.match(chain))
    assert admission is not None
    cache.publish(cache.plan(request_id, admission.resume_tokens, chain.tokens))
    cache.release(request_id)
    return admission.resume_tokens


def made_up_chain(rng: random.Random, blocks: int, shared: list[bytes] | None = None) -> KeyChain:
    """A prompt of ``blocks`` full blocks and one token, with random keys after the ``shared`` ones."""
    keys = list(shared or ())
    keys += [rng.randbytes(16) for _ in range(blocks - len(keys))]
    return KeyChain(keys, blocks * BLOCK_TOKENS + 1)


def filled_cache(blocks: int, slots: int, *, spare_blocks: int = 1024, seed: int = 0) -> HybridPrefixCache:
    """A cache that holds ``blocks`` blocks, in prompts of 24, and ``slots`` states."""
    rng = random.Random(seed)
    cache = HybridPrefixCache(block_tokens=BLOCK_TOKENS, kv_blocks=blocks + spare_blocks, state_slots=slots)
    for request_id in range(blocks // 24):
        run_request(cache, request_id, made_up_chain(rng, 24))
    return cache


def bytes_per_block(blocks: int) -> float:
    """Python memory of a full cache, everything counted (the free list too), over its blocks."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        cache = filled_cache(blocks, blocks // 24, spare_blocks=24)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert cache.available_blocks == blocks + 24
    return used / blocks


def long_prompt_seconds(cache: HybridPrefixCache, tokens: int = 100_000, repeats: int = 9) -> dict[str, float]:
    """Best times of keys, match, admit and plan of one long prompt, cached to its last block, and their sum."""
    prompt = array("q", random.Random(1).choices(range(100_000), k=tokens))
    run_request(cache, -1, cache.chain(prompt))
    best: dict[str, float] = {}
    for repeat in range(repeats):
        longer = array("q", [*prompt[:-1], repeat])
        times = [perf_counter()]
        chain = cache.chain(longer)
        times.append(perf_counter())
        match = cache.match(chain)
        times.append(perf_counter())
        admission = cache.admit(-1, match)
        assert admission is not None and admission.resume_tokens == tokens // BLOCK_TOKENS * BLOCK_TOKENS
        times.append(perf_counter())
        plan = cache.plan(-1, admission.resume_tokens, tokens)
        times.append(perf_counter())
        cache.abandon(plan)
        cache.release(-1)
        names = ("keys", "match", "admit", "plan")
        spent = {name: end - start for name, start, end in zip(names, times, times[1:], strict=False)}
        spent["total"] = times[-1] - times[0]
        best = {name: min(seconds, best.get(name, seconds)) for name, seconds in spent.items()}
    return best


def eviction_seconds(cache: HybridPrefixCache, blocks: int) -> float:
    """Time to evict a block of a full cache, states included, taking it and giving it back included."""
    gone_before = cache.stats().kv_evictions
    block_ids = cache.allocate_blocks(cache.free_kv_blocks)
    assert block_ids is not None
    start = perf_counter()
    for _ in range(blocks // 8):
        taken = cache.allocate_blocks(8)
        assert taken is not None
        block_ids += taken
    spent = perf_counter() - start
    evicted = cache.stats().kv_evictions - gone_before
    cache.free_blocks(block_ids)
    return spent / evicted


def state_eviction_seconds(cache: HybridPrefixCache, requests: int) -> float:
    """Time of a request of two blocks that evicts one state, as a cache with all slots taken sees them."""
    rng = random.Random(2)
    chains = [made_up_chain(rng, 2) for _ in range(requests)]
    gone_before = cache.stats().evictions
    start = perf_counter()
    for request_id, chain in enumerate(chains):
        run_request(cache, request_id, chain)
    return (perf_counter() - start) / (cache.stats().evictions - gone_before)


def requests_per_second(requests: int, *, slots: int = 1024, kv_blocks: int | None = None) -> float:
    """Requests of 24 blocks, half of them shared with an earlier one, from match to release."""
    rng = random.Random(3)
    chains: list[KeyChain] = []
    for _ in range(requests):
        shared = rng.choice(chains[-200:]).keys[: rng.randrange(24)] if chains and rng.random() < 0.8 else None
        chains.append(made_up_chain(rng, 24, shared))
    cache = HybridPrefixCache(block_tokens=BLOCK_TOKENS, kv_blocks=kv_blocks or 24 * requests, state_slots=slots)
    start = perf_counter()
    for request_id, chain in enumerate(chains):
        run_request(cache, request_id, chain)
    return requests / (perf_counter() - start)


def main() -> None:
    """Prints all figures."""
    print(f"bytes a block, 200,000 blocks:     {bytes_per_block(200_000):8.0f}  (goal <= 600)")
    print(f"bytes a block, 1,000,000 blocks:   {bytes_per_block(1_000_000):8.0f}")
    cache = filled_cache(1_000_000, 4096)
    for name, seconds in long_prompt_seconds(cache).items():
        goal = "  (goal <= 3)" if name == "total" else ""
        print(f"100,000 tokens, 1M blocks, ms: {name:6} {seconds * 1e3:8.3f}{goal}")
    print(f"KV eviction, us:                   {eviction_seconds(cache, 100_000) * 1e6:8.2f}  (goal <= 50)")
    print(f"request that evicts a state, us:   {state_eviction_seconds(cache, 10_000) * 1e6:8.2f}  (goal <= 50)")
    print(f"24-block requests/s, KV unlimited: {requests_per_second(20_000):8.0f}  (goal >= 5000)")
    print(f"the same, 10 times as long:        {requests_per_second(200_000):8.0f}")
    print(f"the same, 4,096 KV blocks:         {requests_per_second(20_000, kv_blocks=4096):8.0f}")


if __name__ == "__main__":
    main()
