"""Random traffic on engines with random budgets: nothing raises, nothing leaks, every answer equals caching off."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
from megatron.core.inference.config import KVCacheManagementMode

from megatron_hybrid_prefix.mcore.engine.sampling import end_tokens_of
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.transfers import entry_copies
from tests.harness.drafts import forced_drafts
from tests.harness.engine_helpers import assert_matches, cache_gb_for, random_tokens, state_bytes
from tests.harness.lifecycle_helpers import EngineHarness
from tests.harness.naive_model import NaiveHybridModel
from tests.harness.selection import mostly_slow

FOUND = (104, 115)  # each found a defect, in traffic that this module does not change any more
REQUESTS = 22
NEW_TOKENS = (1, 2, 5, 12, 30)
CAPS = (0, 1, 3, None)  # most cached states
KV_BLOCKS = (7, 12, 60)  # 7 of the larger blocks hold any one request
STATES = (1, 1, 2, 3, 6, 40)  # for which there is room beside these blocks; one is that of a running request
HOST_GB = (0.0, 0.0004, 0.05)  # none, some entries, all of them


class Traffic(EngineHarness):
    """An engine and random requests, which share prefixes of a few trunks. Of the drafts a random number is right each time."""

    def __init__(self, model: Any, seed: int, drafts: int = 0, kept: str | None = None) -> None:
        self.dice = dice = random.Random(seed)
        needs_64 = "G" in model.hybrid_config.layer_pattern or model.hybrid_config.gdp_num_householder > 0
        block, blocks = dice.choice((64, 128, 64) if needs_64 else (64, 96, 128)), dice.choice(KV_BLOCKS)
        self.shared = random.Random(f"one memory {seed}")
        if seed not in FOUND and not needs_64 and self.shared.random() < 0.4:
            block = self.shared.choice((16, 32))  # smaller than a state
        self.longest = max(128, 6 * block)
        if self.shared.random() < 0.5:
            blocks = 0  # just enough for the longest request
        self.retention = random.Random(
            f"retention {seed}"
        )  # a separate generator: what is drawn here does not change the traffic
        interval = self.retention.choice((None, None, 0, block, 2 * block))
        self.tier = random.Random(f"host {seed}")
        self.ends = random.Random(f"ends {seed}")
        host = {"host_gb": self.tier.choice(HOST_GB)}
        chunked = dice.random() < 0.6
        cap = dice.choice(CAPS)
        memory = {
            "cache_gb": cache_gb_for(
                model,
                max(blocks, self.longest // block + 1),
                states=self.shared.choice(STATES),
                block_tokens=block,
                max_requests=4,
                speculative_tokens=drafts,
            ),
            "mamba_gb": None if cap is None else cap * state_bytes(model) / 2**30,
            "verify_hits": 0.0 if seed in FOUND else self.shared.choice((0.0, 0.5)),
        }
        # Odd seeds copy to and from the host by what stands for the copy engines, as with large pages.
        with patch.object(entry_copies, "ENGINE_BYTES", 1 if seed % 2 else entry_copies.ENGINE_BYTES):
            super().__init__(
                model,
                retention_interval_tokens=interval,
                keep_on_resume=self.retention.random() < 0.7,
                checkpoint_dtype=kept,
                **memory,
                **host,
                async_sched_mode=dice.choice(("legacy", "async")),
                enable_chunked_prefill=chunked,
                max_tokens=64 * dice.randint(1, 6) if chunked else 1024,
                kv_cache_management_mode=dice.choice(tuple(KVCacheManagementMode)),
                block_size_tokens=block,
                num_speculative_tokens=drafts,
            )
        if chunked and self.context.kv_cache_management_mode != KVCacheManagementMode.RECOMPUTE:
            # The scheduler's budget, of any residue. (Where buffers are made again it has to be a multiple of 64.)
            self.context.max_tokens -= dice.randint(0, 50)
        self.trunks = [random_tokens(self.longest, seed=1000 * seed + number) for number in range(3)]
        self.seed = seed
        self.aborted: set[int] = set()
        self.read_back_ids: list[int] = []
        self.waiting: dict[int, int] = {}
        self.truth: dict[int, list[int]] = {}  # what each request should end as, where drafts are forced
        self.plain = EngineHarness(model, slots=None, max_requests=None) if drafts else None

    def ask(self) -> None:
        dice, block = self.dice, self.context.block_size_tokens
        # Of small blocks an answer fills so many that it drops its first states.
        new_tokens = dice.choice((*NEW_TOKENS, 3 * block + 5) if block == 16 else NEW_TOKENS)
        shared = dice.choice((0, 1, 2, 3)) * block + dice.choice((-1, 0, 0, 1, 2))
        before = dice.choice(self.trunks)[: max(0, shared)]
        if self.finished and dice.random() < 0.4:  # the next turn of a conversation, mostly of a recent one
            previous = self.finished[dice.choice(sorted(self.finished)[-dice.choice((2, 4, REQUESTS)) :])]
            before = previous.prompt_tokens.tolist() + list(previous.generated_tokens)
        own_tokens = dice.randint(1, 70)
        if dice.random() < 0.5:  # so many that the answer reaches a block's end, or nearly
            own_tokens = block - (len(before) + dice.randint(0, new_tokens)) % block
        own = random_tokens(own_tokens, seed=777 * self.seed + self.next_id)
        prompt = (before + own)[: self.longest - new_tokens]
        options: dict[str, Any] = {"cache_salt": dice.choice((None, None, None, "a"))}
        if dice.random() < 0.1:
            options |= dice.choice(({"cache_read": False}, {"cache_write": False}))
        if self.retention.random() < 0.2:
            options |= {"cache_breakpoints": [self.retention.randint(-9, self.longest) for _ in range(2)]}
        if self.seed not in FOUND and self.ends.random() < 0.3:
            options |= {"stop_token_ids": self.ends.sample(range(512), 60)}
        number = self.add(prompt, new_tokens, **options)
        if self.plain is not None:
            self.waiting[number] = self.plain.add(prompt, new_tokens)

    def find_truth(self) -> None:
        """Computes what the requests sent since the last call should end as, where drafts are forced."""
        if self.plain is not None:
            self.plain.run()
            for number, other in self.waiting.items():
                request = self.plain.finished[other]
                self.truth[number] = request.prompt_tokens.tolist() + list(request.generated_tokens)
            self.waiting.clear()

    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_unfinished_requests() or self.engine.failed_request_ids:
                self.step()

    def spoil(self) -> None:
        """Flips a bit of an entry on the host."""
        moves, tier = self.context.host_moves, self.cache._device.host
        entries = sorted(tier.entries(), key=lambda entry: (entry.tag.depth_tokens, entry.pages))
        if moves is not None and entries:
            page = self.tier.choice(entries).pages[0]
            moves.pages.memory[page * moves.pages.page_bytes + self.tier.randrange(400)] ^= 16

    def run(self) -> None:
        if self.plain is None:
            self._run()
            return
        drafts = random.Random(self.seed)
        with forced_drafts(self.engine, self.truth, lambda request_id, position: drafts.randrange(4)):
            self._run()

    def _run(self) -> None:
        dice = self.dice
        while self.next_id < REQUESTS:
            for _ in range(dice.choice((1, 1, 2, 4))):
                self.ask()
            self.find_truth()
            self.steps(dice.randint(0, 6))
            if dice.random() < 0.12:
                self.suspend_and_resume()
            if self.tier.random() < 0.1:
                self.spoil()
            running = sorted(self.engine.requests.keys() - self.aborted)
            if running and dice.random() < 0.15:
                victim = dice.choice(running)
                self.aborted.add(victim)
                assert self.engine.abort_request(victim)
        self.steps(5000)
        self.read_back()

    def read_back(self) -> None:
        """Resumes once from each state that is left: sends the tokens before it, and one more.

        By chance few states are used again, and one that is wrong shows only then. Those on the device come first: loads from
        the host evict some of them.
        """
        cache = self.cache
        on_device: dict[bytes, tuple[list[int], str | None]] = {}
        on_host: dict[bytes, tuple[list[int], str | None]] = {}
        for request in self.finished.values():
            salt = request.sampling_params.cache_salt
            tokens = request.prompt_tokens.tolist() + list(request.generated_tokens)
            for depth_blocks, key in enumerate(cache.chain(tokens[:-1], salt=salt).keys, start=1):
                node = cache.node(key)
                if node is not None and node.reason is not None:
                    prompt = tokens[: depth_blocks * cache.block_tokens + 1]
                    (on_host if node.slot == NO_SLOT else on_device)[key] = prompt, salt
        for found in (on_device, on_host):
            for prompt, salt in found.values():
                number = self.add(prompt, 1, cache_salt=salt, cache_write=False)
                self.truth[number] = prompt
                self.read_back_ids.append(number)
                self.steps(5000)  # one after the other: few others are evicted


# Pages of several states, of one, and of more blocks than one; layers of both kinds, alone and together, with experts.
SEEDS = {"tiny": range(16), "tiny_large_states": range(8), "tiny_gdn": (0, 2, 4), "tiny_mixed": (1, 3, 5)}
SEEDS |= {"tiny_gdp": (0, 2, 4), "tiny_gdp_mixed": (1, 3, 5)}
DRAFT_SEEDS = {
    **{"tiny_mtp": (*range(6), *FOUND), "tiny_large_states": (0, 2, 5, 10), "tiny_gdn_mtp": (0, 2, 4)},
    **{"tiny_nemotron_3": (0, 1, 2), "tiny_gdp_mtp": (0, 2, 5)},
}
TRAFFIC = [
    *((name, seed, 0) for name, seeds in SEEDS.items() for seed in seeds),
    *((name, seed, 1 + seed % 3) for name, seeds in DRAFT_SEEDS.items() for seed in seeds),
    *(("tiny", seed, 0, "int8") for seed in (1, 3, 6, 9)),
    *(("tiny_large_states", seed, 0, "int8") for seed in (1, 2, 5)),
    *(
        ("tiny_mixed", 1, 0, "int8"),
        ("tiny_mixed", 3, 0, "bfloat16"),
        ("tiny_gdp", 4, 0, "int8"),
        ("tiny_mtp", 1, 2, "int8"),
    ),
]
FAST = [("tiny", 0, 0), ("tiny", 6, 0), ("tiny_large_states", 1, 0), ("tiny_mixed", 1, 0), ("tiny_mtp", 1, 2)]
FAST += [("tiny_gdp_mixed", 1, 0), ("tiny_gdp_mtp", 2, 3), ("tiny", 6, 0, "int8"), ("tiny_mixed", 3, 0, "bfloat16")]
OFF = 0.1  # nats, by which log-probs after a hit may be off where checkpoints are kept in fewer bytes


@pytest.mark.parametrize("which", mostly_slow(TRAFFIC, *FAST), ids=lambda which: "-".join(map(str, which)))
def test_random_traffic(request, which):
    run_and_check(request, *which)


EVENTS: dict[tuple[Any, ...], Counter[str]] = {}  # of the traffic that has run


def run_and_check(
    request: pytest.FixtureRequest, name: str, seed: int, drafts: int = 0, kept: str | None = None
) -> None:
    model = request.getfixturevalue(name)
    traffic = Traffic(model, seed, drafts, kept)
    traffic.run()
    _check(traffic, NaiveHybridModel(model, model.hybrid_config), 1e-5 if kept is None else OFF)
    if kept is None:
        EVENTS[name, seed, drafts] = _events(traffic)


def _check(traffic: Traffic, reference: NaiveHybridModel, tolerance: float) -> None:
    """Checks that all requests ended with the model's answers, and that nothing leaked."""
    assert sorted(traffic.finished) == list(range(1, traffic.next_id + 1))
    # The longest first: the reference of what begins them is known then.
    finished = traffic.finished.values()
    for request in sorted(finished, key=lambda each: -len(each.prompt_tokens) - len(each.generated_tokens)):
        assert not request.failed()
        if request.request_id not in traffic.aborted:
            most, ends = request.sampling_params.num_tokens_to_generate, end_tokens_of(request.sampling_params)
            places = [place for place, token in enumerate(request.generated_tokens, start=1) if token in ends]
            assert [len(request.generated_tokens)] == (places or [most])
            assert_matches(reference, request, tolerance)
    assert not traffic.cache.live
    traffic.check_drained()
    stats = traffic.cache.stats()
    assert stats.slots_used <= stats.slots_total and stats.verify_mismatches == 0
    if not stats.slots_total:
        assert stats.reused_tokens == 0
    check_counted(stats, traffic.finished.values(), traffic.aborted)


def check_counted(stats: Any, requests: Iterable[Any], aborted: set[int]) -> None:
    """Checks the counters that documents use against what the answers say. An aborted request may not have begun."""
    ended = [request for request in requests if request.request_id not in aborted]
    unsure = sum(len(request.prompt_tokens) for request in requests if request.request_id in aborted)
    prompts = sum(len(request.prompt_tokens) for request in ended)
    assert prompts <= stats.prompt_tokens <= prompts + unsure
    assert stats.reused_tokens == sum(request.num_cached_tokens for request in requests)
    assert stats.reused_tokens == stats.reused_tokens_device + stats.reused_tokens_host
    left = stats.prompt_tokens - stats.reused_tokens - stats.computed_prompt_tokens
    # A prompt that started over between two chunks may have found the rest of itself in the cache.
    assert 0 <= left <= unsure + stats.resumed_tokens
    if not (stats.resumed_tokens or stats.recomputed_tokens or aborted):
        assert left == 0


FIGURES = ("reused_tokens", "evictions", "kv_evictions", "checkpoints_skipped")
REASONS = ("junction", "breakpoint", "tail", "interval")


def _events(traffic: Traffic) -> Counter[str]:
    """How often each event happened."""
    stats, host = traffic.context.prefix_stats(), traffic.context.prefix_stats().tiers["host"]
    found = {name: getattr(stats, name) for name in FIGURES} | {
        reason: stats.checkpoints_by_reason[reason] for reason in REASONS
    }
    return Counter(
        found,
        host_loads=host.loads,
        host_preempted=host.preempted,
        preempted=traffic.engine.evicted_request_count,
        read_back=sum(traffic.finished[number].num_cached_tokens > 0 for number in traffic.read_back_ids),
        moved=traffic.cache.memory_use().moved_blocks,
        verified=stats.verified_hits,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "tiny_large_states"])
def test_the_traffic_covers_all_events(request, name):
    """Over a few seeds: hits, evictions of states and KV, blocks that move, preemptions, skipped checkpoints, and most reasons."""
    total: Counter[str] = Counter()
    for seed in range(13):
        if (name, seed, 0) not in EVENTS:
            run_and_check(request, name, seed)
        total.update(EVENTS[name, seed, 0])
    if name == "tiny_large_states":
        total.pop("host_preempted")  # where there is room for a request's entries on the host, none is preempted
    assert min(total.values()) > 0, str(total)
