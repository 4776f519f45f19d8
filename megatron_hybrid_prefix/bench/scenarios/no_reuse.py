"""The scenario `no_reuse`: the overhead of caching when nothing can be reused."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from megatron_hybrid_prefix.bench.engines import Contestant
from megatron_hybrid_prefix.bench.scenario import Scenario, size, sums, tokens
from megatron_hybrid_prefix.bench.stats import Metric, Sample, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReuse(Scenario):
    """Requests that share nothing, all at once. Measures the overhead of caching."""

    name: ClassVar[str] = "no_reuse"
    requests: int = size(8, 32, "requests, all with different prompts")
    prompt_tokens: int = size(512, 512, "tokens of each prompt")
    generate: int = size(16, 128, "tokens to generate per request")

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
