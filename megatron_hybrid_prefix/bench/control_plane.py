"""Speed and memory of the control plane: keys, prefix tree, slots and blocks, without tensors. Needs no torch.

The scenario `index` reports these figures. `tests/core/test_speed.py` counts the steps behind them.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array
from itertools import pairwise
from time import perf_counter

from megatron_hybrid_prefix.bench.stats import Metric, Sample
from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.keys import KeyChain, KeyMaker
from megatron_hybrid_prefix.index.settings import CacheSettings

BLOCK_TOKENS = 256
STATE_SLOTS = 4096
LEAST_BLOCKS = 2_000  # a smaller index has too little to evict
PROMPT_BLOCKS = 24  # blocks per request that fills the cache
STATE_BLOCKS = 13  # a state of Nemotron-H-8B is as large
# With more blocks the memory per block only shrinks, and tracing takes long.
MOST_TRACED_BLOCKS = 200_000
MOST_EVICTED_BLOCKS = 50_000

METRICS = (
    Metric("index_keys_ms", "long prompt: keys, ms"),
    Metric("index_match_ms", "long prompt: match, ms"),
    Metric("index_admit_ms", "long prompt: admit, ms"),
    Metric("index_plan_ms", "long prompt: plan, ms"),
    Metric("index_total_ms", "long prompt: all four, ms", goal="<= 3"),
    Metric("index_kv_eviction_us", "eviction of a KV block, us", goal="<= 50"),
    Metric("index_state_eviction_us", "request that evicts a state, us", goal="<= 50"),
    Metric("index_bytes_per_block", "memory of a block, bytes", goal="<= 600"),
    Metric("index_requests_per_second", "requests of 24 blocks, a second", goal=">= 5,000"),
)


def measure(blocks: int, prompt_tokens: int, repeats: int) -> list[Sample]:
    """All figures for an index of ``blocks`` blocks, one sample per repeat. Memory is measured only once."""
    memory_bytes = bytes_per_block(min(blocks, MOST_TRACED_BLOCKS))
    cache = filled_cache(blocks, min(STATE_SLOTS, blocks // PROMPT_BLOCKS))
    long_prompt = long_prompt_seconds(cache, prompt_tokens, repeats)
    evicted_blocks = min(MOST_EVICTED_BLOCKS, blocks // 2) // repeats
    # States first: evicting KV blocks frees slots.
    states = [state_eviction_seconds(cache, max(64, blocks // 200), seed=repeat) for repeat in range(repeats)]
    samples: list[Sample] = []
    for repeat in range(repeats):
        sample: Sample = {f"index_{name}_ms": seconds[repeat] * 1e3 for name, seconds in long_prompt.items()}
        sample["index_state_eviction_us"] = states[repeat] * 1e6
        sample["index_kv_eviction_us"] = eviction_seconds(cache, evicted_blocks) * 1e6
        sample["index_bytes_per_block"] = memory_bytes
        sample["index_requests_per_second"] = requests_per_second(min(5_000, max(200, blocks // 20)))
        samples.append(sample)
    return samples


def make_cache(kv_blocks: int, slots: int) -> HybridPrefixCache:
    """An empty cache for so many blocks and states. The states of running requests are elsewhere."""
    return HybridPrefixCache(
        CacheSettings(
            block_tokens=BLOCK_TOKENS,
            kv_blocks=kv_blocks + slots * STATE_BLOCKS,
            page_blocks=STATE_BLOCKS,
            state_slots=slots,
            live_states=False,
            eviction_policy="lru",
        )
    )


def run_request(cache: HybridPrefixCache, request_id: int, chain: KeyChain) -> int:
    """Runs a request from match to release, with its prompt in one step. Returns the reused tokens."""
    admission = cache.admit(request_id, cache.match(chain))
    assert admission is not None
    cache.publish(cache.plan(request_id, admission.resume_tokens, chain.tokens))
    cache.release(request_id)
    return admission.resume_tokens


def made_up_chain(rng: random.Random, blocks: int, shared: list[bytes] | None = None) -> KeyChain:
    """A prompt of ``blocks`` full blocks and one token. The keys after the ``shared`` ones are random."""
    keys = list(shared or ())
    keys += [rng.randbytes(16) for _ in range(blocks - len(keys))]
    return KeyChain(keys, blocks * BLOCK_TOKENS + 1)


def filled_cache(blocks: int, slots: int, *, free_blocks: int = 1024, seed: int = 0) -> HybridPrefixCache:
    """A cache filled with ``blocks`` blocks, in prompts of 24 blocks, and ``slots`` states."""
    rng = random.Random(seed)
    cache = make_cache(blocks + free_blocks, slots)
    for request_id in range(blocks // PROMPT_BLOCKS):
        run_request(cache, request_id, made_up_chain(rng, PROMPT_BLOCKS))
    return cache


def bytes_per_block(blocks: int) -> float:
    """Python memory of a full cache, with all its parts (also the free list), divided by its blocks."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        cache = filled_cache(blocks, blocks // PROMPT_BLOCKS, free_blocks=PROMPT_BLOCKS)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert cache.blocks.available_count == cache.memory_use().total_blocks
    return used / blocks


def long_prompt_seconds(cache: HybridPrefixCache, tokens: int = 100_000, repeats: int = 9) -> dict[str, list[float]]:
    """Seconds for keys, match, admit and plan of one long prompt that is fully cached, and their sum ("total")."""
    prompt = array("q", random.Random(1).choices(range(100_000), k=tokens))
    run_request(cache, -1, cache.chain(prompt))
    names = ("keys", "match", "admit", "plan", "total")
    found: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        longer = array("q", [*prompt[:-1], repeat])
        # A new maker hashes all blocks. The cache's compares them with those of the last round.
        chain, maker = cache.chain(longer), KeyMaker(BLOCK_TOKENS)
        times = [perf_counter()]
        maker.chain(longer)
        times.append(perf_counter())
        match = cache.match(chain)
        times.append(perf_counter())
        admission = cache.admit(-1, match)
        assert admission is not None and admission.resume_tokens == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        times.append(perf_counter())
        plan = cache.plan(-1, admission.resume_tokens, tokens)
        times.append(perf_counter())
        cache.abandon(plan)
        cache.release(-1)
        spent = [end - start for start, end in pairwise(times)]
        for name, seconds in zip(names, [*spent, times[-1] - times[0]], strict=True):
            found[name].append(seconds)
    return found


def eviction_seconds(cache: HybridPrefixCache, blocks: int) -> float:
    """Seconds to evict a block of a full cache, with its state, and to allocate and free it."""
    gone_before = cache.stats().kv_evictions
    block_ids = cache.blocks.allocate(cache.memory_use().free_blocks)
    assert block_ids is not None
    start = perf_counter()
    for _ in range(blocks // 8):
        taken = cache.blocks.allocate(8)
        assert taken is not None
        block_ids += taken
    spent = perf_counter() - start
    evicted = cache.stats().kv_evictions - gone_before
    cache.blocks.free(block_ids)
    return spent / evicted


def state_eviction_seconds(cache: HybridPrefixCache, requests: int, *, seed: int = 2) -> float:
    """Seconds for a request of two blocks that evicts one state, in a cache without free slots."""
    rng = random.Random(f"evict {seed}")
    chains = [made_up_chain(rng, 2) for _ in range(requests)]
    gone_before = cache.stats().evictions
    start = perf_counter()
    for request_id, chain in enumerate(chains):
        run_request(cache, request_id, chain)
    return (perf_counter() - start) / (cache.stats().evictions - gone_before)


def requests_per_second(requests: int, *, slots: int = 1024, kv_blocks: int | None = None) -> float:
    """Requests per second, from match to release. A request has 24 blocks, about half of them shared."""
    rng = random.Random(3)
    chains: list[KeyChain] = []
    for _ in range(requests):
        shared = rng.choice(chains[-200:]).keys[: rng.randrange(24)] if chains and rng.random() < 0.8 else None
        chains.append(made_up_chain(rng, PROMPT_BLOCKS, shared))
    cache = make_cache(kv_blocks or PROMPT_BLOCKS * requests, slots)
    start = perf_counter()
    for request_id, chain in enumerate(chains):
        run_request(cache, request_id, chain)
    return requests / (perf_counter() - start)
