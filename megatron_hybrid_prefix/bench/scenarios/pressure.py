"""The scenario `pressure`: the cache is smaller than the working set."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron_hybrid_prefix.bench.engines import Contestant
from megatron_hybrid_prefix.bench.scenario import Scenario, size, sums, tokens
from megatron_hybrid_prefix.bench.stats import Metric, Sample, ratio
from megatron_hybrid_prefix.console.engine_options import step_tokens
from megatron_hybrid_prefix.support.arithmetic import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure(Scenario):
    """Shared prefixes in a skewed random order, with memory for only a part of them.

    The working set is the KV blocks of all prefixes, and one state per prefix. Every engine gets the same bytes.
    megatron-core uses some of them as scratch, for min(step tokens / block tokens, 3 x running requests) states. A step
    has room for one prompt.
    """

    name: ClassVar[str] = "pressure"
    drawn: ClassVar[Sequence[str]] = ("tokens_per_second",)
    crash_is_a_result: ClassVar[bool] = True
    prefixes: int = size(12, 32, "shared prefixes")
    shared_tokens: int = size(512, 2048, "tokens of each prefix")
    own_tokens: int = size(100, 100, "tokens of each prompt after the prefix")
    requests: int = size(32, 128, "requests, all sent at once")
    generate: int = size(4, 32, "tokens to generate per request")
    running: int = size(4, 8, "requests that run at a time (--max-requests overrides it)")
    skew: float = size(1.0, 1.0, "how unequal the prefixes are: the n-th is used in proportion to 1 / n ** SKEW")
    budget_fraction: float = size(0.5, 0.5, "memory as a share of the working set, below 1")

    @property
    def max_requests(self) -> int:
        return self.running

    @property
    def max_tokens(self) -> int:
        return step_tokens(self.longest_tokens)

    def kv_blocks(self, block_tokens: int, max_requests: int) -> int:
        """KV blocks: the budget's share of the prefixes' blocks, but at least what the running requests need."""
        request_blocks = ceil_div(self.longest_tokens + self.generate, block_tokens)
        wanted = round(self.budget_fraction * self.prefixes * (self.shared_tokens // block_tokens))
        return max(wanted, max_requests * request_blocks)

    @property
    def state_slots(self) -> int:
        """States that the budget holds."""
        return max(1, round(self.budget_fraction * self.prefixes))

    def problem(self, block_tokens: int, max_requests: int) -> str | None:
        if self.budget_fraction >= 1:
            return f"--budget-fraction {self.budget_fraction} must be below 1, or nothing is evicted"
        if self.shared_tokens < block_tokens:
            return f"--shared-tokens {self.shared_tokens} is less than a block of {block_tokens} tokens"
        working_set = self.prefixes * (self.shared_tokens // block_tokens)
        if self.kv_blocks(block_tokens, max_requests) >= working_set:
            return (
                f"{max_requests} running requests need as many KV blocks as all prefixes together ({working_set}): "
                "raise --prefixes, or lower --running"
            )
        return None

    def budgets(self, block_bytes: int, state_bytes: int, max_requests: int) -> dict[str, float]:
        """See Scenario. Adds half a block and half a state, so that rounding loses none."""
        blocks = self.kv_blocks(self.block_tokens, max_requests) + 1  # and megatron's dummy block
        live_bytes = max_requests * state_bytes
        kept_bytes = (self.state_slots + 0.5) * state_bytes
        return {
            "cache_gb": (live_bytes + (blocks + 0.5) * block_bytes + kept_bytes) / 2**30,
            "mamba_gb": kept_bytes / 2**30,
        }

    def describe(self) -> str:
        return (
            f"{self.requests} requests of {self.shared_tokens} + {self.own_tokens} + {self.generate} tokens over "
            f"{self.prefixes} prefixes (skew {self.skew:g}), memory for {self.budget_fraction:g} of them"
        )

    def metrics(self) -> list[Metric]:
        count = partial(Metric, ratios=False)
        return [
            Metric("wall_s", "wall time, s"),
            Metric("tokens_per_second", "generated tokens/s"),
            Metric("computed_tokens", "prompt tokens computed"),
            count("reused_tokens", "prompt tokens reused"),
            Metric("reused_share", "reused, of prefix tokens sent before", ratios=False),
            count("recomputed_tokens", "tokens computed again after preemption"),
            count("evictions", "states evicted"),
            count("kv_evictions", "KV blocks evicted"),
            count("checkpoints_published", "checkpoints kept"),
            count("checkpoints_skipped", "checkpoints skipped (no slot)"),
            count("generated_tokens", "tokens generated"),
            count("failed_requests", "failed requests", goal="0"),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> tuple[list[list[int]], int]:
        """See Scenario: the prompts, and how many of their prefix tokens were sent before in the same repeat."""
        prefixes = [tokens(rng, vocab_size, self.shared_tokens) for _ in range(self.prefixes)]
        weights = [1 / number**self.skew for number in range(1, self.prefixes + 1)]
        chosen = rng.choices(range(self.prefixes), weights, k=self.requests)
        prompts = [prefixes[number] + tokens(rng, vocab_size, self.own_tokens) for number in chosen]
        return prompts, (self.requests - len(set(chosen))) * self.shared_tokens

    def play(self, contestant: Contestant, workload: tuple[list[list[int]], int]) -> Sample:
        prompts, sent_before_tokens = workload
        before = contestant.counters()
        results, wall_s = contestant.send(prompts, self.generate)
        after = contestant.counters()
        sample = sums(results)
        sample |= {"wall_s": wall_s, "tokens_per_second": ratio(sample["generated_tokens"], wall_s)}
        sample["reused_share"] = ratio(sample["reused_tokens"], sent_before_tokens)
        for name in ("evictions", "kv_evictions", "checkpoints_published", "checkpoints_skipped"):
            sample[name] = after[name] - before[name] if name in after else None
        return sample
