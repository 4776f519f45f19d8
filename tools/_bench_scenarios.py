"""The scenarios of `tools/bench.py`, each a class: its sizes, the prompts of a repeat, what an engine's round gives.

Some are in files of their own: `_bench_sessions.py`, `_bench_concurrent.py`, `_bench_host.py`, `_bench_control_plane.py`.

A new one is a subclass of `Scenario` in `SCENARIOS`: its fields become options, its `metrics` rows of the table.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from _bench_base import MS, Machine, Scenario, size, sums, tokens
from _bench_concurrent import Herd, Samples
from _bench_control_plane import Index
from _bench_engine import Contestant
from _bench_host import HostTier
from _bench_sessions import FirstSighting, MultiTurn
from _bench_stats import Metric, Sample, median, ratio

from megatron_hybrid_prefix.console.engine_options import step_tokens

# --- A shared prefix -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix(Scenario):
    """Requests that share a prefix, one after another: time to first token of each sighting.

    Then prompts of as many tokens as the engine's last hit computed (where there was none: as the own part), that share
    nothing: what a hit would cost if nothing had to be found, restored and kept.
    """

    name: ClassVar[str] = "shared_prefix"
    requests: int = size(4, 4, "requests that share the prefix")
    shared_tokens: int = size(1024, 8192, "tokens that they share")
    own_tokens: int = size(300, 300, "tokens that each has for itself")
    generate: int = size(4, 4, "tokens generated for each")
    cold_prompts: int = size(3, 3, "short prompts without a shared part, after them")

    @property
    def longest_tokens(self) -> int:
        """See Scenario."""
        return self.shared_tokens + self.own_tokens

    def describe(self) -> str:
        """See Scenario."""
        return (
            f"{self.requests} requests of {self.shared_tokens} shared + {self.own_tokens} own tokens one after another, "
            f"then {self.cold_prompts} short cold ones, {self.generate} tokens generated each"
        )

    def metrics(self) -> list[Metric]:
        """See Scenario."""
        sightings = range(1, self.requests + 1)
        return [
            *(Metric(name=f"first_token_{n}_ms", label=f"sighting {n}: first token, ms", digits=2) for n in sightings),
            Metric(name="cold_first_token_ms", label="short cold prompt: first token, ms", digits=2),
            Metric(name="cold_tokens", label="short cold prompt: tokens", digits=0, ratios=False),
            Metric(name="hit_over_cold", label="last hit over short cold", digits=3, ratios=False, goal="<= 1.05"),
            *(Metric(name=f"computed_tokens_{n}", label=f"sighting {n}: tokens computed", digits=0) for n in sightings),
            *(
                Metric(name=f"reused_tokens_{n}", label=f"sighting {n}: tokens reused", digits=0, ratios=False)
                for n in sightings
            ),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> Any:
        """See Scenario: the prompts that share, and cold ones of full length, to be cut."""
        shared = tokens(rng, vocab_size, self.shared_tokens)
        sharing = [shared + tokens(rng, vocab_size, self.own_tokens) for _ in range(self.requests)]
        return sharing, [tokens(rng, vocab_size, self.longest_tokens) for _ in range(self.cold_prompts)]

    def play(self, contestant: Contestant, workload: Any) -> Sample:
        """See Scenario."""
        sharing, cold = workload
        results = [contestant.send([prompt], self.generate)[0][0] for prompt in sharing]
        hits = [result for result in results if result.reused_tokens]
        cold_tokens = hits[-1].computed_tokens if hits else self.own_tokens
        cold_s = [contestant.send([prompt[:cold_tokens]], self.generate)[0][0].time_to_first_token_s for prompt in cold]
        cold_ms = MS * (median(cold_s) or 0.0)
        sample: Sample = {"cold_first_token_ms": cold_ms, "cold_tokens": cold_tokens}
        for number, result in enumerate(results, 1):
            sample[f"first_token_{number}_ms"] = MS * result.time_to_first_token_s
            sample[f"computed_tokens_{number}"] = result.computed_tokens
            sample[f"reused_tokens_{number}"] = result.reused_tokens
        sample["hit_over_cold"] = ratio(MS * hits[-1].time_to_first_token_s, cold_ms) if hits else None
        return sample


# --- Nothing to reuse ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReuse(Scenario):
    """Requests that share nothing, all at once: what caching costs where it is of no use."""

    name: ClassVar[str] = "no_reuse"
    requests: int = size(8, 32, "requests, all different, at once")
    prompt_tokens: int = size(512, 512, "tokens of each")
    generate: int = size(16, 128, "tokens generated for each")

    @property
    def longest_tokens(self) -> int:
        """See Scenario."""
        return self.prompt_tokens

    @property
    def max_requests(self) -> int:
        """See Scenario."""
        return max(16, self.requests)

    def describe(self) -> str:
        """See Scenario."""
        return f"{self.requests} different requests of {self.prompt_tokens} + {self.generate} tokens at once"

    def metrics(self) -> list[Metric]:
        """See Scenario."""
        return [
            Metric(name="tokens_per_second", label="generated tokens/s", goal=">= 0.99x off"),
            Metric(name="wall_s", label="wall time, s", digits=3),
            Metric(name="generated_tokens", label="tokens generated", digits=0, ratios=False),
            Metric(name="computed_tokens", label="prompt tokens computed", digits=0),
            Metric(name="reused_tokens", label="prompt tokens reused", digits=0, ratios=False),
            Metric(name="failed_requests", label="failed requests", digits=0, ratios=False),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        """See Scenario."""
        return [tokens(rng, vocab_size, self.prompt_tokens) for _ in range(self.requests)]

    def play(self, contestant: Contestant, workload: list[list[int]]) -> Sample:
        """See Scenario."""
        results, wall_s = contestant.send(workload, self.generate)
        sample = sums(results)
        return sample | {"wall_s": wall_s, "tokens_per_second": ratio(sample["generated_tokens"], wall_s)}


# --- Less memory than the working set --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure(Scenario):
    """Shared prefixes in a skewed random order, with memory for only a part of them.

    The working set is all prefixes' KV blocks and one state each. Every engine gets the same bytes; megatron-core takes
    scratch for min(step tokens / block tokens, 3 x running requests) states out of them. A step holds one prompt.
    """

    name: ClassVar[str] = "pressure"
    crash_is_a_result: ClassVar[bool] = True
    prefixes: int = size(12, 32, "shared prefixes")
    shared_tokens: int = size(512, 2048, "tokens of each prefix")
    own_tokens: int = size(100, 100, "tokens that each request has for itself")
    requests: int = size(32, 128, "requests, sent at once and run some at a time")
    generate: int = size(4, 32, "tokens generated for each")
    running: int = size(4, 8, "requests that run at a time (--max-requests has the last word)")
    skew: float = size(1.0, 1.0, "prefix number n is asked for in proportion to 1 / n ** SKEW")
    budget_fraction: float = size(0.5, 0.5, "share of the working set that there is memory for")

    @property
    def longest_tokens(self) -> int:
        """See Scenario."""
        return self.shared_tokens + self.own_tokens

    @property
    def max_requests(self) -> int:
        """See Scenario."""
        return self.running

    @property
    def max_tokens(self) -> int:
        """See Scenario."""
        return step_tokens(self.longest_tokens)

    def kv_blocks(self, block_tokens: int, max_requests: int) -> int:
        """KV blocks that there are: the fraction of the prefixes' own, but as many as the running requests need."""
        request_blocks = -(-(self.longest_tokens + self.generate) // block_tokens)
        wanted = round(self.budget_fraction * self.prefixes * (self.shared_tokens // block_tokens))
        return max(wanted, max_requests * request_blocks)

    @property
    def state_slots(self) -> int:
        """States that the budget holds."""
        return max(1, round(self.budget_fraction * self.prefixes))

    def problem(self, block_tokens: int, max_requests: int) -> str | None:
        """See Scenario."""
        if self.budget_fraction >= 1:
            return f"--budget-fraction {self.budget_fraction} leaves no pressure: it must be below 1"
        if self.shared_tokens < block_tokens:
            return f"--shared-tokens {self.shared_tokens} is less than a block of {block_tokens} tokens"
        working_set = self.prefixes * (self.shared_tokens // block_tokens)
        if self.kv_blocks(block_tokens, max_requests) >= working_set:
            return (
                f"{max_requests} running requests need as many KV blocks as all prefixes together ({working_set}): "
                "raise --prefixes, or lower --running"
            )
        return None

    def budgets(self, machine: Machine) -> dict[str, float]:
        """See Scenario. Half a block and half a state more, so that rounding takes none away."""
        blocks = self.kv_blocks(machine.block_tokens, machine.max_requests) + 1  # and megatron's dummy block
        live_bytes = machine.max_requests * machine.state_bytes
        return {
            "buffer_gb": (live_bytes + (blocks + 0.5) * machine.block_bytes) / 2**30,
            "mamba_gb": (self.state_slots + 0.5) * machine.state_bytes / 2**30,
        }

    def describe(self) -> str:
        """See Scenario."""
        return (
            f"{self.requests} requests of {self.shared_tokens} + {self.own_tokens} + {self.generate} tokens over "
            f"{self.prefixes} prefixes (skew {self.skew:g}), memory for {self.budget_fraction:g} of them"
        )

    def metrics(self) -> list[Metric]:
        """See Scenario."""
        count = partial(Metric, digits=0, ratios=False)
        return [
            Metric(name="wall_s", label="wall time, s", digits=3),
            Metric(name="tokens_per_second", label="generated tokens/s"),
            Metric(name="computed_tokens", label="prompt tokens computed", digits=0),
            count(name="reused_tokens", label="prompt tokens reused"),
            Metric(name="reused_share", label="reused, of prefix tokens sent before", digits=3, ratios=False),
            count(name="recomputed_tokens", label="tokens computed again after preemption"),
            count(name="evictions", label="states evicted"),
            count(name="kv_evictions", label="KV blocks evicted"),
            count(name="checkpoints_published", label="checkpoints kept"),
            count(name="checkpoints_skipped", label="checkpoints skipped for want of a slot"),
            count(name="generated_tokens", label="tokens generated"),
            count(name="failed_requests", label="failed requests", goal="0"),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> tuple[list[list[int]], int]:
        """See Scenario: prompts, and how many of their prefix tokens were sent before in the same repeat."""
        prefixes = [tokens(rng, vocab_size, self.shared_tokens) for _ in range(self.prefixes)]
        weights = [1 / number**self.skew for number in range(1, self.prefixes + 1)]
        chosen = rng.choices(range(self.prefixes), weights, k=self.requests)
        prompts = [prefixes[number] + tokens(rng, vocab_size, self.own_tokens) for number in chosen]
        return prompts, (self.requests - len(set(chosen))) * self.shared_tokens

    def play(self, contestant: Contestant, workload: tuple[list[list[int]], int]) -> Sample:
        """See Scenario."""
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


_KINDS = (SharedPrefix, FirstSighting, MultiTurn, Herd, Samples, NoReuse, Pressure, HostTier, Index)
SCENARIOS: dict[str, type[Scenario]] = {kind.name: kind for kind in _KINDS}
