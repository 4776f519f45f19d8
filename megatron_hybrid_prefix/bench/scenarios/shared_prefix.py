"""The scenario `shared_prefix`: requests with a shared prefix, one after another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_hybrid_prefix.bench.engines import Contestant
from megatron_hybrid_prefix.bench.scenario import MS, Scenario, size, tokens
from megatron_hybrid_prefix.bench.stats import Metric, Sample, median, ratio, rotated


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix(Scenario):
    """Requests with a shared prefix, one after another: time to first token of each sighting.

    Then short cold prompts that share nothing. They have as many tokens as the engine's last hit computed (without a
    hit: ``own_tokens``). They show the time of a hit without any cost of matching, restoring and publishing. More hits take
    turns with them: for some steps after a long prompt a GPU is slower, so that what comes first takes longer.
    """

    name: ClassVar[str] = "shared_prefix"
    drawn: ClassVar[Sequence[str]] = ("first_token_1_ms", "first_token_2_ms", "first_token_3_ms")
    requests: int = size(4, 4, "requests with the shared prefix")
    shared_tokens: int = size(1024, 8192, "tokens of the shared prefix")
    own_tokens: int = size(300, 300, "tokens of each prompt after the prefix")
    generate: int = size(4, 4, "tokens to generate per request")
    cold_prompts: int = size(3, 3, "short cold prompts, sent afterwards")

    def describe(self) -> str:
        return (
            f"{self.requests} requests of {self.shared_tokens} shared + {self.own_tokens} own tokens one after another, "
            f"then {self.cold_prompts} short cold ones, in turns with as many hits, {self.generate} tokens generated each"
        )

    def metrics(self) -> list[Metric]:
        sightings = range(1, self.requests + 1)
        return [
            *(Metric(f"first_token_{n}_ms", f"sighting {n}: first token, ms") for n in sightings),
            Metric("cold_first_token_ms", "short cold prompt: first token, ms", ratios=False),
            Metric("cold_tokens", "short cold prompt: tokens", ratios=False),
            Metric("hit_first_token_ms", "hits in turns with these: first token, ms", ratios=False),
            Metric("hit_over_cold", "... over the short cold prompts", ratios=False, goal="<= 1.05"),
            *(Metric(f"computed_tokens_{n}", f"sighting {n}: tokens computed") for n in sightings),
            *(Metric(f"reused_tokens_{n}", f"sighting {n}: tokens reused", ratios=False) for n in sightings),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> Any:
        """See Scenario: the prompts with the prefix, more of them, and cold prompts of full length, which are cut later."""
        shared = tokens(rng, vocab_size, self.shared_tokens)
        sharing = [shared + tokens(rng, vocab_size, self.own_tokens) for _ in range(self.requests + self.cold_prompts)]
        cold = [tokens(rng, vocab_size, self.longest_tokens) for _ in range(self.cold_prompts)]
        return sharing[: self.requests], sharing[self.requests :], cold

    def play(self, contestant: Contestant, workload: Any) -> Sample:
        sharing, more, cold = workload

        def send(prompt: list[int]) -> Any:
            return contestant.send([prompt], self.generate)[0][0]

        results = [send(prompt) for prompt in sharing]
        hits = [result for result in results if result.reused_tokens]
        cold_tokens = hits[-1].computed_tokens if hits else self.own_tokens
        times_ms: dict[str, list[float]] = {"cold": [], "hit": []}
        for number, (short, long) in enumerate(zip(cold, more, strict=True)):
            prompts = {"cold": short[:cold_tokens]} | ({"hit": long} if hits else {})
            for kind in rotated(list(prompts), number):
                result = send(prompts[kind])
                if kind == "cold" or result.reused_tokens:
                    times_ms[kind].append(MS * result.time_to_first_token_s)
        cold_ms, hit_ms = (median(times_ms[kind]) for kind in ("cold", "hit"))
        sample: Sample = {"cold_first_token_ms": cold_ms, "cold_tokens": cold_tokens}
        for number, result in enumerate(results, 1):
            sample[f"first_token_{number}_ms"] = MS * result.time_to_first_token_s
            sample[f"computed_tokens_{number}"] = result.computed_tokens
            sample[f"reused_tokens_{number}"] = result.reused_tokens
        sample["hit_first_token_ms"] = hit_ms
        sample["hit_over_cold"] = ratio(hit_ms, cold_ms)
        return sample
