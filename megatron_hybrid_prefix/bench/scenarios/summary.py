"""The scenario `summary`: the first tokens and the rates that a user compares engines by, in one table."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_hybrid_prefix.bench.engines import Contestant
from megatron_hybrid_prefix.bench.scenario import MS, Scenario, size, sums, tokens
from megatron_hybrid_prefix.bench.stats import Metric, Sample, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Scenario):
    """Sightings of a long prefix one after another, then requests that share nothing: some with long prompts, many with short ones.

    Every engine in its default setting. The same prompts, sizes and clock as scripts/beside_vllm.py.
    """

    name: ClassVar[str] = "summary"
    drawn: ClassVar[Sequence[str]] = ("cold_ms", "second_ms", "third_ms")
    engines: ClassVar[Sequence[str]] = ("off", "ours")
    at_once: ClassVar[str] = "short_requests"
    shared_tokens: int = size(512, 8192, "tokens of the shared prefix")
    own_tokens: int = size(44, 300, "tokens of each of these prompts after the prefix")
    long_requests: int = size(4, 32, "requests with long prompts")
    long_tokens: int = size(64, 512, "tokens of each long prompt")
    long_answers: int = size(8, 128, "tokens of each of their answers")
    short_requests: int = size(8, 64, "requests with short prompts")
    short_tokens: int = size(16, 64, "tokens of each short prompt")
    short_answers: int = size(12, 256, "tokens of each of their answers")

    @property
    def _batches(self) -> dict[str, tuple[int, int, int]]:
        """Those that are sent at once: how many, tokens of a prompt, and of an answer."""
        return {
            "long": (self.long_requests, self.long_tokens, self.long_answers),
            "short": (self.short_requests, self.short_tokens, self.short_answers),
        }

    @property
    def longest_tokens(self) -> int:
        return max(self.shared_tokens + self.own_tokens, self.long_tokens, self.short_tokens)

    @property
    def generated_tokens(self) -> int:
        return max(self.long_answers, self.short_answers)

    def describe(self) -> str:
        batches = (f"{count} x ({prompt} + {answer})" for count, prompt, answer in self._batches.values())
        return (
            f"{self.shared_tokens} shared + {self.own_tokens} own tokens, three times, and {self.own_tokens} alone; "
            f"{' tokens; '.join(batches)}"
        )

    def metrics(self) -> list[Metric]:
        return [
            Metric("cold_ms", "cold prompt: first token, ms"),
            Metric("second_ms", "2nd sighting: first token, ms"),
            Metric("third_ms", "3rd sighting: first token, ms"),
            Metric("third_over_short", "... over a cold prompt of its own tokens", ratios=False, goal="<= 1.05"),
            *(
                Metric(f"{name}_per_second", f"{count} x ({prompt} + {answer}): tokens/s")
                for name, (count, prompt, answer) in self._batches.items()
            ),
            Metric("failed_requests", "failed requests", ratios=False),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> Any:
        """See Scenario: the sightings and a short prompt; the prompts of each batch."""
        shared = tokens(rng, vocab_size, self.shared_tokens)
        sightings = [shared + tokens(rng, vocab_size, self.own_tokens) for _ in range(3)]
        one_by_one = [*sightings, tokens(rng, vocab_size, self.own_tokens)]
        sizes = self._batches.items()
        return one_by_one, {
            name: [tokens(rng, vocab_size, long) for _ in range(count)] for name, (count, long, _) in sizes
        }

    def play(self, contestant: Contestant, workload: Any) -> Sample:
        one_by_one, batches = workload
        results = [contestant.send([prompt], 2)[0][0] for prompt in one_by_one]
        cold_ms, second_ms, third_ms, short_ms = (MS * result.time_to_first_token_s for result in results)
        sample: Sample = {"cold_ms": cold_ms, "second_ms": second_ms, "third_ms": third_ms}
        sample["third_over_short"] = ratio(third_ms, short_ms)
        for name, (_, _, answer_tokens) in self._batches.items():
            batch, wall_s = contestant.send(batches[name], answer_tokens)
            sample[f"{name}_per_second"] = ratio(sums(batch)["generated_tokens"], wall_s)
            results += batch
        return sample | {"failed_requests": sums(results)["failed_requests"]}
