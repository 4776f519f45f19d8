"""Scenarios of chats: `multi_turn` conversations, and the `first_sighting` of a shared system message."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from megatron_hybrid_prefix.bench.engines import Contestant
from megatron_hybrid_prefix.bench.scenario import MS, Scenario, first_tokens_ms, size, sums, tokens
from megatron_hybrid_prefix.bench.stats import Metric, Sample, median, percentile, ratio

# --- Conversations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurn(Scenario):
    """Conversations side by side. Each turn sends the whole history and some new tokens.

    The answers are forced: every engine does all the work of decoding, then its sampled tokens are replaced, so that
    the histories are the same for all engines. A turn of all conversations is sent at once; the next turn follows when
    all have their answer.
    """

    name: ClassVar[str] = "multi_turn"
    drawn: ClassVar[Sequence[str]] = ("first_token_median_ms", "first_token_p99_ms")
    at_once: ClassVar[str] = "sessions"
    repeats: ClassVar[Mapping[str, int]] = {"cpu": 2, "cuda": 3}
    sessions: int = size(2, 4, "conversations side by side")
    turns: int = size(4, 8, "turns per conversation")
    new_tokens: int = size(200, 50, "new prompt tokens per turn")
    generate: int = size(60, 600, "tokens of each answer")

    @property
    def longest_tokens(self) -> int:
        return self.turns * (self.new_tokens + self.generate) - self.generate

    @property
    def bound_tokens(self) -> int:
        """Most tokens that a turn after the first should compute: its new tokens and one block."""
        return self.new_tokens + self.block_tokens

    def problem(self, block_tokens: int, max_requests: int) -> str | None:
        return "--turns must be at least 2: the first turn has no history" if self.turns < 2 else None

    def describe(self) -> str:
        return (
            f"{self.sessions} conversations side by side of {self.turns} turns, each of {self.new_tokens} new and "
            f"{self.generate} generated tokens (forced); prompts up to {self.longest_tokens} tokens"
        )

    def metrics(self) -> list[Metric]:
        count = partial(Metric, ratios=False)
        return [
            Metric("max_turn_computed_tokens", "later turns: tokens computed, most", goal=f"<= {self.bound_tokens:,}"),
            Metric("mean_turn_computed_tokens", "later turns: tokens computed, mean"),
            Metric("last_quarter_reused_share", "last quarter: share reused", ratios=False),
            Metric("first_token_median_ms", "later turns: first token, median, ms"),
            Metric("first_token_p99_ms", "later turns: first token, p99, ms"),
            Metric("tokens_per_second", "generated tokens/s"),
            Metric("wall_s", "wall time, s"),
            Metric("computed_tokens", "prompt tokens computed"),
            count("reused_tokens", "prompt tokens reused"),
            count("recomputed_tokens", "tokens computed again after preemption"),
            count("generated_tokens", "tokens generated"),
            count("failed_requests", "failed requests", goal="0"),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        """See Scenario: whole conversations with their last answer. Each prompt is a prefix of one."""
        length = self.longest_tokens + self.generate
        return [tokens(rng, vocab_size, length) for _ in range(self.sessions)]

    def play(self, contestant: Contestant, workload: list[list[int]]) -> Sample:
        turns: list[list[Any]] = []
        wall_s = 0.0
        for turn in range(self.turns):
            end = turn * (self.new_tokens + self.generate) + self.new_tokens
            prompts = [session[:end] for session in workload]
            answers = [session[end : end + self.generate] for session in workload]
            results, seconds = contestant.send(prompts, self.generate, answers=answers)
            turns.append(results)
            wall_s += seconds
        later = [result for results in turns[1:] for result in results]
        last = [result for results in turns[-max(1, self.turns // 4) :] for result in results]
        first_ms = first_tokens_ms(later)
        sample = sums([result for results in turns for result in results])
        return sample | {
            "max_turn_computed_tokens": max(result.computed_tokens for result in later),
            "mean_turn_computed_tokens": sum(result.computed_tokens for result in later) / len(later),
            "last_quarter_reused_share": ratio(sums(last)["reused_tokens"], sum(r.prompt_tokens for r in last)),
            "first_token_median_ms": median(first_ms),
            "first_token_p99_ms": percentile(first_ms, 0.99),
            "tokens_per_second": ratio(sample["generated_tokens"], wall_s),
            "wall_s": wall_s,
        }


# --- A shared system message -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSighting(Scenario):
    """Three requests behind one system message. Is the second one already as fast as the third?

    Two variants run in turn, with a different system message each. In one, every request names the end of the message
    (the attribute `cache_breakpoints`, which other engines ignore). In the other there is no hint.
    """

    name: ClassVar[str] = "first_sighting"
    drawn: ClassVar[Sequence[str]] = ("first_token_2_plain_ms", "first_token_2_named_ms")
    shared_tokens: int = size(1024, 8192, "tokens of the system message")
    own_tokens: int = size(300, 300, "tokens of each prompt after the system message")
    generate: int = size(4, 4, "tokens to generate per request")

    REQUESTS: ClassVar[int] = 3
    VARIANTS: ClassVar[dict[str, str]] = {"named": "breakpoint named", "plain": "no hint"}

    def problem(self, block_tokens: int, max_requests: int) -> str | None:
        if self.shared_tokens < block_tokens:
            return f"--shared-tokens {self.shared_tokens} is less than a block of {block_tokens} tokens"
        return None

    def describe(self) -> str:
        return (
            f"{self.REQUESTS} requests of {self.shared_tokens} shared + {self.own_tokens} own tokens one after another, "
            f"{self.generate} tokens generated each; with and without a breakpoint at the end of the shared part"
        )

    def metrics(self) -> list[Metric]:
        found: list[Metric] = []
        for variant, label in self.VARIANTS.items():
            goal = "<= 1.1" if variant == "named" else ""
            every = range(1, self.REQUESTS + 1)
            found += [Metric(f"first_token_{n}_{variant}_ms", f"{label}, request {n}: first token, ms") for n in every]
            over = f"{label}: first token, request 2 over 3"
            found.append(Metric(f"second_over_third_{variant}", over, ratios=False, goal=goal))
            found += [Metric(f"computed_tokens_{n}_{variant}", f"{label}, request {n}: tokens computed") for n in every]
        return found

    def workload(self, rng: random.Random, vocab_size: int) -> dict[str, list[list[int]]]:
        """See Scenario: the prompts of each variant."""
        found: dict[str, list[list[int]]] = {}
        for variant in self.VARIANTS:
            shared = tokens(rng, vocab_size, self.shared_tokens)
            found[variant] = [shared + tokens(rng, vocab_size, self.own_tokens) for _ in range(self.REQUESTS)]
        return found

    def play(self, contestant: Contestant, workload: dict[str, list[list[int]]]) -> Sample:
        sample: Sample = {}
        for number in range(self.REQUESTS):
            for variant, prompts in workload.items():
                hint = {"cache_breakpoints": [self.shared_tokens]} if variant == "named" else {}
                results, _ = contestant.send([prompts[number]], self.generate, attributes=[hint])
                sample[f"first_token_{number + 1}_{variant}_ms"] = MS * results[0].time_to_first_token_s
                sample[f"computed_tokens_{number + 1}_{variant}"] = results[0].computed_tokens
        for variant in workload:
            second, third = (sample[f"first_token_{n}_{variant}_ms"] for n in (2, 3))
            sample[f"second_over_third_{variant}"] = ratio(second, third)
        return sample
