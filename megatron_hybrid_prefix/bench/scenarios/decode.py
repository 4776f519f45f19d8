"""The scenario `decode`: steps in which all rows decode, against the least time that memory allows."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from megatron_hybrid_prefix.bench.engines import Contestant
from megatron_hybrid_prefix.bench.floor import copy_bandwidth, floor_bytes
from megatron_hybrid_prefix.bench.scenario import MS, Scenario, size, sums, tokens
from megatron_hybrid_prefix.bench.stats import Metric, Sample, ratio
from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.support.arithmetic import ceil_div

WARM_STEPS = 4  # of those in which all rows decode: the device still has prefills to do
_GOALS = {8: 1.15, 32: 1.4, 64: 1.6, 256: 1.8}  # tokens/s over the best of off, by rows
_KEPT_STATES = 16  # room for checkpoints: the prompts share nothing
_bandwidth = cache(copy_bandwidth)  # measured once in a process, before a device's first round


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(Scenario):
    """Rows that decode at once. Measures only the steps in which all of them do.

    The floor of a step is what it must read and write (weights, states twice, KV) over the bandwidth of a plain copy,
    measured in the warm-up round.
    """

    name: ClassVar[str] = "decode"
    drawn: ClassVar[Sequence[str]] = ("tokens_per_second",)
    engines: ClassVar[Sequence[str]] = ("off", "ours")
    at_once: ClassVar[str] = "requests"
    requests: int = size(4, 64, "rows that decode at once")
    prompt_tokens: int = size(40, 600, "tokens of each prompt")
    generate: int = size(24, 128, "tokens to generate per row")

    def problem(self, block_tokens: int, max_requests: int) -> str | None:
        return self.too_many_at_once(max_requests)

    def budgets(self, block_bytes: int, state_bytes: int, max_requests: int) -> dict[str, float]:
        """See Scenario: little more than the rows need, so that several engines fit. States may be float32."""
        blocks = max_requests * (ceil_div(self.prompt_tokens + self.generate, self.block_tokens) + 1) + 2
        kept_bytes = _KEPT_STATES * 2 * state_bytes
        needed_bytes = blocks * block_bytes + max_requests * 2 * state_bytes
        return {"cache_gb": (needed_bytes + kept_bytes) / 2**30, "mamba_gb": kept_bytes / 2**30}

    def describe(self) -> str:
        return f"{self.requests} rows decode {self.generate} tokens after {self.prompt_tokens}"

    def metrics(self) -> list[Metric]:
        goal = f">= {_GOALS[self.requests]:g}" if self.requests in _GOALS else ""
        return [
            Metric("step_ms", "decode step, ms"),
            Metric("tokens_per_second", "tokens/s of these steps"),
            Metric("over_best_off", "the same over the best of off", ratios=False, goal=goal),
            Metric("floor_ms", "floor of a step, ms", ratios=False),
            Metric("step_over_floor", "step over its floor", ratios=False, goal="<= 2" if self.requests == 64 else ""),
            Metric("copy_tb_per_second", "plain copy, TB/s", ratios=False),
            Metric("steps", "steps measured", ratios=False),
            Metric("failed_requests", "failed requests", ratios=False),
        ]

    def workload(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        return [tokens(rng, vocab_size, self.prompt_tokens) for _ in range(self.requests)]

    def repeat(self, order: Sequence[Contestant], workload: Any) -> dict[str, Sample]:
        """See Scenario. Adds each engine's rate over that of the fastest "off" of the round, in any settings."""
        # `super()` without arguments fails in a class with slots.
        samples = Scenario.repeat(self, order, workload)
        off = [samples[c.name]["tokens_per_second"] or 0.0 for c in order if c.kind == "off" and c.name in samples]
        for sample in samples.values():
            sample["over_best_off"] = ratio(sample["tokens_per_second"], max(off, default=None))
        return samples

    def play(self, contestant: Contestant, workload: list[list[int]]) -> Sample:
        engine, ends_s = contestant.engine, list[float]()
        bandwidth = _bandwidth(next(engine.controller.inference_wrapped_model.model.parameters()).device)

        def stepped() -> None:
            context = engine.context
            rows = context.total_request_count - context.paused_request_count
            if rows == self.requests and not context.num_prefill_requests and not engine.waiting_request_ids:
                ends_s.append(time.perf_counter())

        results, _ = contestant.send(workload, self.generate, on_step=stepped)
        del ends_s[:WARM_STEPS]
        if len(ends_s) < 2:
            raise InputError(
                f"--generate {self.generate}: no {WARM_STEPS + 2} steps in which all {self.requests} rows decode: raise it"
            )
        step_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
        floor_s = floor_bytes(engine, self.requests, self.prompt_tokens + self.generate // 2) / bandwidth
        return {
            "step_ms": MS * step_s,
            "tokens_per_second": self.requests / step_s,
            "floor_ms": MS * floor_s,
            "step_over_floor": step_s / floor_s,
            "copy_tb_per_second": bandwidth / 1e12,
            "steps": len(ends_s) - 1,
            "failed_requests": sums(results)["failed_requests"],
        }
