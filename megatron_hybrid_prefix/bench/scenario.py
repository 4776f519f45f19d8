"""The base class of a scenario: its sizes (which become options), its prompts, its rounds and its figures."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_hybrid_prefix.bench.engines import Contestant, timed_round
from megatron_hybrid_prefix.bench.stats import Metric, Sample
from megatron_hybrid_prefix.console.engine_options import ENGINES

MS = 1e3


def size(cpu: float, cuda: float, text: str) -> Any:
    """A size of a scenario: an option with a default for CPU and one for CUDA."""
    return dataclasses.field(metadata={"cpu": cpu, "cuda": cuda, "help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One workload. Fields of a subclass that are made with `size` become options.

    Attributes:
        name: Name of the command.
        drawn: Names of the metrics of its plot, all of one unit.
        engines: Engines that run by default.
        crash_is_a_result: True: an engine that cannot be built is reported as crashed. False: the command fails.
        repeats: Timed rounds, by kind of device.
        at_once: Name of the size that says how many requests are sent at once; empty: one.
        block_tokens: Tokens per KV block, from the engine options.
    """

    name: ClassVar[str]
    drawn: ClassVar[Sequence[str]]
    engines: ClassVar[Sequence[str]] = tuple(ENGINES)
    crash_is_a_result: ClassVar[bool] = False
    repeats: ClassVar[Mapping[str, int]] = {"cpu": 3, "cuda": 5}
    at_once: ClassVar[str] = ""
    block_tokens: int = 256

    @classmethod
    def sizes(cls) -> list[dataclasses.Field[Any]]:
        """The fields that are options."""
        return [field for field in dataclasses.fields(cls) if field.metadata]

    @property
    def longest_tokens(self) -> int:
        """Length of the longest prompt: ``prompt_tokens``, or ``shared_tokens`` and ``own_tokens``. Others override this."""
        sizes: dict[str, int] = {field.name: getattr(self, field.name) for field in self.sizes()}
        return sizes["prompt_tokens"] if "prompt_tokens" in sizes else sizes["shared_tokens"] + sizes["own_tokens"]

    @property
    def generated_tokens(self) -> int:
        """Tokens generated per request: the size ``generate``. A scenario without that size overrides this."""
        return self.generate  # type: ignore[attr-defined, no-any-return]

    @property
    def max_requests(self) -> int:
        """Default of ``--max-requests``."""
        return max(16, getattr(self, self.at_once)) if self.at_once else 16

    @property
    def max_tokens(self) -> int | None:
        """Default of ``--max-tokens``; None: the usual default."""
        return None

    def problem(self, block_tokens: int, max_requests: int) -> str | None:
        """Why these sizes cannot run, in one line; None if they can."""
        return None

    def too_many_at_once(self, max_requests: int) -> str | None:
        """A `problem`, for requests that must not wait for each other."""
        if getattr(self, self.at_once) > max_requests:
            return (
                f"--{self.at_once} {getattr(self, self.at_once)} cannot run at once with --max-requests {max_requests}"
            )
        return None

    def budgets(self, block_bytes: int, state_bytes: int, max_requests: int) -> dict[str, float]:
        """The scenario's ``cache_gb``, ``mamba_gb`` and ``host_gb`` on this rank (see `Budgets`). Options override them.

        Args:
            block_bytes: Bytes of a KV block on this rank.
            state_bytes: Bytes of a recurrent state on this rank.
            max_requests: Most running requests.
        """
        return {}

    def describe(self) -> str:
        """The workload in one line."""
        raise NotImplementedError

    def metrics(self) -> list[Metric]:
        """Metrics to report per engine, in the order of the table."""
        raise NotImplementedError

    def without_engine(self, repeats: int) -> tuple[Sequence[Metric], list[Sample]]:
        """Figures that need no engine. Called on rank 0 only, before the engines are built."""
        return (), []

    def workload(self, rng: random.Random, vocab_size: int) -> Any:
        """The prompts of one repeat, the same for every engine."""
        raise NotImplementedError

    def repeat(self, order: Sequence[Contestant], workload: Any) -> dict[str, Sample]:
        """Runs one round of each engine, in this order. An engine that raises has no sample."""
        samples: dict[str, Sample] = {}
        for contestant in order:
            with contestant.attempt(), timed_round():
                samples[contestant.name] = self.play(contestant, workload)
        return samples

    def play(self, contestant: Contestant, workload: Any) -> Sample:
        """Runs one round of one engine."""
        raise NotImplementedError


def tokens(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    """``count`` random token ids."""
    return rng.choices(range(vocab_size), k=count)


def first_tokens_ms(results: Sequence[Any]) -> list[float]:
    """Times to first token in ms, shortest first. Requests without a token are left out."""
    return sorted(MS * result.time_to_first_token_s for result in results if result.time_to_first_token_s is not None)


def sums(results: Sequence[Any]) -> Sample:
    """Sums of tokens and failures over a batch."""
    return {
        "generated_tokens": sum(len(result.generated) for result in results),
        "computed_tokens": sum(result.computed_tokens for result in results),
        "reused_tokens": sum(result.reused_tokens for result in results),
        "recomputed_tokens": sum(result.recomputed_tokens for result in results),
        "failed_requests": sum(result.status != "completed" for result in results),
    }
