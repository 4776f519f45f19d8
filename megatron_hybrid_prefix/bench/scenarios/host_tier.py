"""The scenario `host_tier`: prompts that come back after they were evicted from the device."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from megatron_hybrid_prefix.bench.engines import Contestant
from megatron_hybrid_prefix.bench.scenario import MS, Scenario, size, tokens
from megatron_hybrid_prefix.bench.stats import Metric, Sample, ratio
from megatron_hybrid_prefix.support.arithmetic import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class FromHost(Scenario):
    """Prompts that come back after eviction. The device has room for only a few of them.

    First, each prompt is sent once, cold. Then each one is sent twice more, with new tokens at its end: the first time
    it loads back from the host, the second time it is still on the device. This package's cache gets enough host memory
    for all prompts; the other engines have no host tier. The first round generates one token only, which needs no
    decode step, because megatron-core's engine stops if decoding needs a block and the device is full of cached blocks.
    """

    name: ClassVar[str] = "host_tier"
    drawn: ClassVar[Sequence[str]] = ("cold_ms", "back_ms", "again_ms")
    crash_is_a_result: ClassVar[bool] = True
    prompts: int = size(8, 8, "prompts")
    shared_tokens: int = size(512, 8192, "tokens of each prompt")
    own_tokens: int = size(60, 300, "new tokens each time a prompt comes back")
    generate: int = size(4, 4, "tokens to generate when a prompt comes back")
    on_device: int = size(2, 2, "prompts that fit on the device")
    states: int = size(16, 32, "states that fit on the device, per such prompt")

    @property
    def _request_blocks(self) -> int:
        return ceil_div(self.longest_tokens + self.generate, self.block_tokens)

    def problem(self, block_tokens: int, max_requests: int) -> str | None:
        if self.on_device >= self.prompts:
            return f"--on-device {self.on_device} must be less than --prompts {self.prompts}, or nothing is evicted"
        return None

    def budgets(self, block_bytes: int, state_bytes: int, max_requests: int) -> dict[str, float]:
        blocks = self.on_device * self._request_blocks + 1  # and megatron's dummy block
        live_bytes = max_requests * state_bytes
        prompt_bytes = self._request_blocks * block_bytes + 20 * state_bytes
        kept_bytes = (self.on_device * self.states + 0.5) * state_bytes
        return {
            "cache_gb": (live_bytes + (blocks + 0.5) * block_bytes + kept_bytes) / 2**30,
            "mamba_gb": kept_bytes / 2**30,
            "host_gb": 1.2 * self.prompts * prompt_bytes / 2**30,
        }

    def describe(self) -> str:
        return (
            f"{self.prompts} prompts of {self.shared_tokens} + {self.own_tokens} tokens in turn, room for {self.on_device} on "
            "the device"
        )

    def metrics(self) -> list[Metric]:
        plain = partial(Metric, ratios=False)
        return [
            Metric("cold_ms", "cold: first token, ms"),
            Metric("back_ms", "when it comes back: first token, ms"),
            Metric("again_ms", "at once again: first token, ms"),
            plain("back_over_cold", "comes back / cold", goal="<= 0.2"),
            plain("reused_share", "reused of what was sent before", goal=">= 0.95"),
            plain("loaded_mb", "MB loaded for each"),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> Any:
        """See Scenario: the prompts, and the new tokens of both times that each comes back."""
        shared = [tokens(rng, vocab_size, self.shared_tokens) for _ in range(self.prompts)]
        return shared, [[tokens(rng, vocab_size, self.own_tokens) for _ in range(2)] for _ in shared]

    def play(self, contestant: Contestant, workload: Any) -> Sample:
        shared, own = workload

        def send(prompt: list[int], generate: int = self.generate) -> Any:
            return contestant.send([prompt], generate)[0][0]

        cold = [send(prompt, 1) for prompt in shared]
        before = contestant.counters()
        back, again = [], []
        for number in range(self.prompts):
            back.append(send(shared[number] + own[number][0]))
            again.append(send(shared[number] + own[number][1]))
        after = contestant.counters()
        first_ms: dict[str, float] = {}
        for name, results in (("cold", cold), ("back", back), ("again", again)):
            first_ms[f"{name}_ms"] = MS * statistics.median(result.time_to_first_token_s for result in results)
        sample: Sample = {**first_ms, "back_over_cold": first_ms["back_ms"] / first_ms["cold_ms"]}
        sample["reused_share"] = ratio(
            sum(result.reused_tokens for result in (*back, *again)), 2 * self.prompts * self.shared_tokens
        )
        moves = getattr(contestant.engine.context, "host_moves", None)
        if moves is None:
            return sample
        at_first, at_last = (counters["tiers"]["host"]["bytes_loaded"] for counters in (before, after))
        loaded_bytes = (at_last - at_first) / self.prompts
        sample["loaded_mb"] = loaded_bytes / 1e6
        return sample
