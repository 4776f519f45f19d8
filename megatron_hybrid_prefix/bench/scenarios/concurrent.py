"""Scenarios of concurrent requests: a `herd` with a shared prefix, and several `samples` of one prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from megatron_hybrid_prefix.bench.engines import Contestant
from megatron_hybrid_prefix.bench.scenario import Scenario, first_tokens_ms, size, sums, tokens
from megatron_hybrid_prefix.bench.stats import Metric, Sample


def _times(results: Sequence[Any], wall_s: float) -> Sample:
    first_ms = first_tokens_ms(results)
    ends = (first_ms[0], first_ms[-1]) if first_ms else (None, None)
    return {"earliest_first_token_ms": ends[0], "latest_first_token_ms": ends[1], "wall_s": wall_s}


def _common_metrics() -> list[Metric]:
    count = partial(Metric, ratios=False)
    return [
        Metric("earliest_first_token_ms", "first token, earliest, ms"),
        Metric("latest_first_token_ms", "first token, latest, ms"),
        Metric("wall_s", "wall time, s"),
        count("reused_tokens", "prompt tokens reused"),
        count("generated_tokens", "tokens generated"),
        count("failed_requests", "failed requests", goal="0"),
    ]


# --- Cold requests with a common prefix ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Herd(Scenario):
    """Cold requests with a shared prefix, all at once. Counts how often the prefix is computed."""

    name: ClassVar[str] = "herd"
    drawn: ClassVar[Sequence[str]] = ("latest_first_token_ms",)
    at_once: ClassVar[str] = "requests"
    requests: int = size(4, 8, "requests at once")
    prefix_blocks: int = size(4, 10, "KV blocks of the shared prefix")
    own_tokens: int = size(300, 300, "tokens of each prompt after the prefix")
    generate: int = size(4, 32, "tokens to generate per request")

    def problem(self, block_tokens: int, max_requests: int) -> str | None:
        return self.too_many_at_once(max_requests)

    @property
    def prefix_tokens(self) -> int:
        """Length of the prefix."""
        return self.prefix_blocks * self.block_tokens

    @property
    def longest_tokens(self) -> int:
        return self.prefix_tokens + self.own_tokens

    def describe(self) -> str:
        return (
            f"{self.requests} cold requests at once of {self.prefix_blocks} shared blocks ({self.prefix_tokens} tokens) "
            f"+ {self.own_tokens} own tokens, {self.generate} tokens generated each"
        )

    def metrics(self) -> list[Metric]:
        return [
            Metric("computed_tokens", "prompt tokens computed"),
            Metric("prefix_computed_times", "times that the prefix was computed", goal="1"),
            *_common_metrics(),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        shared = tokens(rng, vocab_size, self.prefix_tokens)
        return [shared + tokens(rng, vocab_size, self.own_tokens) for _ in range(self.requests)]

    def play(self, contestant: Contestant, workload: list[list[int]]) -> Sample:
        results, wall_s = contestant.send(workload, self.generate)
        own_tokens = sum(result.prompt_tokens - self.prefix_tokens for result in results)
        sample = sums(results) | _times(results, wall_s)
        computed_tokens = sum(result.computed_tokens for result in results)
        return sample | {"prefix_computed_times": (computed_tokens - own_tokens) / self.prefix_tokens}


# --- Several answers to one prompt -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples(Scenario):
    """The same cold prompt several times, all at once. Only the first request has to compute all of it.

    The others only need the tokens after the last block boundary. Sampling is greedy, since only the prompt is
    measured.
    """

    name: ClassVar[str] = "samples"
    drawn: ClassVar[Sequence[str]] = ("latest_first_token_ms",)
    at_once: ClassVar[str] = "samples"
    samples: int = size(4, 8, "requests with the same prompt")
    prompt_tokens: int = size(1000, 8000, "tokens of the prompt")
    generate: int = size(16, 128, "tokens to generate per request")

    @property
    def bound_tokens(self) -> int:
        """Least tokens to compute: the prompt once, and the tokens after its last boundary for each other request."""
        last_boundary_tokens = (self.prompt_tokens - 1) // self.block_tokens * self.block_tokens
        return self.prompt_tokens + (self.samples - 1) * (self.prompt_tokens - last_boundary_tokens)

    def problem(self, block_tokens: int, max_requests: int) -> str | None:
        if self.prompt_tokens <= block_tokens:
            return f"--prompt-tokens {self.prompt_tokens} must be longer than a block of {block_tokens} tokens"
        return self.too_many_at_once(max_requests)

    def describe(self) -> str:
        return (
            f"{self.samples} times the same prompt of {self.prompt_tokens} tokens at once, {self.generate} tokens "
            f"generated each; at least {self.bound_tokens} tokens to compute with block boundaries"
        )

    def metrics(self) -> list[Metric]:
        return [
            Metric("computed_tokens", "prompt tokens computed", goal=f"<= {self.bound_tokens:,}"),
            Metric("computed_over_bound", "computed over that bound", ratios=False, goal="<= 1"),
            *_common_metrics(),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        return [tokens(rng, vocab_size, self.prompt_tokens)] * self.samples

    def play(self, contestant: Contestant, workload: list[list[int]]) -> Sample:
        results, wall_s = contestant.send(workload, self.generate)
        computed_tokens = sum(result.computed_tokens for result in results)
        return sums(results) | _times(results, wall_s) | {"computed_over_bound": computed_tokens / self.bound_tokens}
