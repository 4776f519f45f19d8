"""The scenario `no_reuse`: the overhead of caching when nothing can be reused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron_hybrid_prefix.bench.engines import Contestant
from megatron_hybrid_prefix.bench.scenario import Scenario, size, sums, tokens
from megatron_hybrid_prefix.bench.stats import Metric, Sample, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReuse(Scenario):
    """Requests that share nothing, all at once. Measures the overhead of caching."""

    name: ClassVar[str] = "no_reuse"
    drawn: ClassVar[Sequence[str]] = ("tokens_per_second",)
    at_once: ClassVar[str] = "requests"
    requests: int = size(8, 32, "requests, all with different prompts")
    prompt_tokens: int = size(512, 512, "tokens of each prompt")
    generate: int = size(16, 128, "tokens to generate per request")

    def describe(self) -> str:
        return f"{self.requests} different requests of {self.prompt_tokens} + {self.generate} tokens at once"

    def metrics(self) -> list[Metric]:
        return [
            Metric("tokens_per_second", "generated tokens/s", goal=">= 0.99x off"),
            Metric("wall_s", "wall time, s"),
            Metric("generated_tokens", "tokens generated", ratios=False),
            Metric("computed_tokens", "prompt tokens computed"),
            Metric("reused_tokens", "prompt tokens reused", ratios=False),
            Metric("failed_requests", "failed requests", ratios=False),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        return [tokens(rng, vocab_size, self.prompt_tokens) for _ in range(self.requests)]

    def play(self, contestant: Contestant, workload: list[list[int]]) -> Sample:
        results, wall_s = contestant.send(workload, self.generate)
        sample = sums(results)
        return sample | {"wall_s": wall_s, "tokens_per_second": ratio(sample["generated_tokens"], wall_s)}
