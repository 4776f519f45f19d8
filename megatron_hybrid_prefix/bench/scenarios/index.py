"""The scenario `index`: speed and memory of the control plane, and CPU time of a decode step."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_hybrid_prefix.bench import control_plane
from megatron_hybrid_prefix.bench.engines import Contestant, timed_round
from megatron_hybrid_prefix.bench.scenario import MS, Scenario, size, tokens
from megatron_hybrid_prefix.bench.stats import Metric, Sample, median, rotated
from megatron_hybrid_prefix.console.running import greedy
from megatron_hybrid_prefix.console.terminal import Stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Index(Scenario):
    """The control plane: matching and evicting in a large index, and CPU time of a decode step.

    The first part needs no engine. In the second part the engines take turns step by step, with nothing to admit. The
    time is the CPU time of the calling thread. On a GPU that includes waiting for it.
    """

    name: ClassVar[str] = "index"
    drawn: ClassVar[Sequence[str]] = ("decode_cpu_ms",)
    at_once: ClassVar[str] = "requests"
    index_blocks: int = size(1_000_000, 1_000_000, "blocks in the index")
    long_prompt_tokens: int = size(100_000, 100_000, "tokens of the prompt to match and plan")
    requests: int = size(8, 8, "running requests in the decode steps")
    prompt_tokens: int = size(300, 300, "tokens of their prompts")
    steps: int = size(100, 200, "decode steps to measure, per repeat")

    WARM_STEPS: ClassVar[int] = 10

    @property
    def generated_tokens(self) -> int:
        """See Scenario: enough to keep all requests running until the last measured step."""
        return self.WARM_STEPS + self.steps + 8

    def problem(self, block_tokens: int, max_requests: int) -> str | None:
        if self.index_blocks < control_plane.LEAST_BLOCKS:
            return f"--index-blocks {self.index_blocks} must be at least {control_plane.LEAST_BLOCKS}"
        if self.long_prompt_tokens > self.index_blocks * control_plane.BLOCK_TOKENS:
            return f"--long-prompt-tokens {self.long_prompt_tokens} is more than --index-blocks can hold"
        return self.too_many_at_once(max_requests)

    def describe(self) -> str:
        return (
            f"a prompt of {self.long_prompt_tokens:,} tokens and an index of {self.index_blocks:,} blocks; "
            f"{self.steps} decode steps of {self.requests} requests"
        )

    def metrics(self) -> list[Metric]:
        return [
            Metric("decode_cpu_ms", "decode step, CPU time, ms"),
            Metric("decode_cpu_over_off_ms", "the same less off's, ms", ratios=False, goal="<= 0.2"),
            Metric("decode_cpu_mean_ms", "decode step, CPU time, mean, ms"),
            Metric("decode_wall_ms", "decode step, wall time, ms"),
        ]

    def without_engine(self, repeats: int) -> tuple[Sequence[Metric], list[Sample]]:
        samples = control_plane.measure(self.index_blocks, self.long_prompt_tokens, repeats)
        return control_plane.METRICS, samples

    def workload(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        return [tokens(rng, vocab_size, self.prompt_tokens) for _ in range(self.requests)]

    def repeat(self, order: Sequence[Contestant], workload: list[list[int]]) -> dict[str, Sample]:
        """See Scenario. The engines take turns at every step, and rotate who is first."""
        spent = {contestant.name: _StepTimes() for contestant in order}
        for contestant in order:
            with contestant.attempt():
                for prompt in workload:
                    contestant.engine.add_request(
                        int(next(contestant.engine.request_counter)), prompt, greedy(self.generated_tokens)
                    )
        with timed_round():
            for step in range(self.WARM_STEPS + self.steps):
                for contestant in rotated(order, step):
                    if contestant.crash is None:
                        with contestant.attempt():
                            spent[contestant.name].step(contestant.engine, counted=step >= self.WARM_STEPS)
                if order[0].should_stop():
                    raise Stopped
        for contestant in order:
            with contestant.attempt():
                while contestant.crash is None and contestant.engine.has_unfinished_requests():
                    contestant.engine.step_modern()
        off = spent.get("off")
        return {c.name: spent[c.name].sample(off) for c in order if c.crash is None}


class _StepTimes:
    """Times of an engine's measured steps, in milliseconds."""

    def __init__(self) -> None:
        self.cpu_ms: list[float] = []
        self.wall_ms: list[float] = []

    def step(self, engine: Any, *, counted: bool) -> None:
        """Runs one step of the engine."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        engine.step_modern()
        cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
        if counted:
            self.cpu_ms.append(MS * cpu_s)
            self.wall_ms.append(MS * wall_s)

    def sample(self, off: _StepTimes | None) -> Sample:
        """Figures of the repeat. The difference to ``off`` is taken step by step."""
        pairs = zip(self.cpu_ms, off.cpu_ms, strict=False) if off is not None and off is not self else ()
        return {
            "decode_cpu_ms": median(self.cpu_ms),
            "decode_cpu_over_off_ms": median([own - other for own, other in pairs]),
            "decode_cpu_mean_ms": sum(self.cpu_ms) / len(self.cpu_ms),
            "decode_wall_ms": median(self.wall_ms),
        }
