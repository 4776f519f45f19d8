"""What a scenario is: sizes that become options, prompts of a repeat, a round of an engine, figures."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_hybrid_prefix.bench.engines import Contestant, timed_round
from megatron_hybrid_prefix.bench.stats import Metric, Sample

MS = 1e3


def size(cpu: float, cuda: float, text: str) -> Any:
    """A scenario's size: an option with a default for each kind of device, a whole number where the defaults are."""
    return dataclasses.field(metadata={"cpu": cpu, "cuda": cuda, "help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a scenario may know of the model and the engines' common options when it sets budgets.

    Attributes:
        block_tokens: Tokens of a KV block.
        block_bytes: Bytes of a KV block on this rank.
        state_bytes: Bytes of one recurrent state on this rank.
        max_requests: Requests that run at a time.
    """

    block_tokens: int
    block_bytes: int
    state_bytes: int
    max_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One workload. The fields of a subclass, made by `size`, are its options.

    Attributes:
        name: What the command calls it.
        crash_is_a_result: Also an engine that cannot be built is reported, not refused.
        repeats: Timed rounds on each kind of device.
        block_tokens: Tokens of a KV block, of the engines' common options.
    """

    name: ClassVar[str]
    crash_is_a_result: ClassVar[bool] = False
    repeats: ClassVar[Mapping[str, int]] = {"cpu": 3, "cuda": 5}
    block_tokens: int = 256

    @classmethod
    def sizes(cls) -> list[dataclasses.Field[Any]]:
        """The fields that are options."""
        return [field for field in dataclasses.fields(cls) if field.metadata]

    @property
    def longest_tokens(self) -> int:
        """Length of the longest prompt."""
        raise NotImplementedError

    @property
    def generated_tokens(self) -> int:
        """Tokens generated for it: the size ``generate``, unless a scenario has none."""
        return self.generate  # type: ignore[attr-defined, no-any-return]

    @property
    def max_requests(self) -> int:
        """Requests that run at a time, unless an option says otherwise."""
        return 16

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a step, unless an option says otherwise; None: as usual."""
        return None

    def problem(self, block_tokens: int, max_requests: int) -> str | None:
        """Why these sizes cannot be run, in one line."""
        return None

    def budgets(self, machine: Machine) -> dict[str, float]:
        """``buffer_gb``, ``mamba_gb`` and ``host_gb`` on this rank where the scenario sets them; an option has the last word."""
        return {}

    def describe(self) -> str:
        """The workload in one line."""
        raise NotImplementedError

    def metrics(self) -> list[Metric]:
        """What is reported of each engine, in the table's order."""
        raise NotImplementedError

    def without_engine(self, repeats: int) -> tuple[Sequence[Metric], list[Sample]]:
        """Figures that no engine is needed for; asked for on rank 0 only, before engines are built."""
        return (), []

    def workload(self, rng: random.Random, vocab_size: int) -> Any:
        """What one repeat sends: new prompts, the same for every engine."""
        raise NotImplementedError

    def repeat(self, order: Sequence[Contestant], workload: Any) -> dict[str, Sample]:
        """One round of each engine, in this order; none for an engine that raised."""
        samples: dict[str, Sample] = {}
        for contestant in order:
            with contestant.attempt(), timed_round():
                samples[contestant.name] = self.play(contestant, workload)
        return samples

    def play(self, contestant: Contestant, workload: Any) -> Sample:
        """One round of one engine."""
        raise NotImplementedError


def tokens(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    """``count`` token ids."""
    return rng.choices(range(vocab_size), k=count)


def first_tokens_ms(results: Sequence[Any]) -> list[float]:
    """Times to first token, shortest first, of those that got one."""
    return sorted(MS * result.time_to_first_token_s for result in results if result.time_to_first_token_s is not None)


def sums(results: Sequence[Any]) -> Sample:
    """Tokens and failures of a batch."""
    return {
        "generated_tokens": sum(len(result.generated) for result in results),
        "computed_tokens": sum(result.computed_tokens for result in results),
        "reused_tokens": sum(result.reused_tokens for result in results),
        "recomputed_tokens": sum(result.recomputed_tokens for result in results),
        "failed_requests": sum(result.status != "completed" for result in results),
    }
