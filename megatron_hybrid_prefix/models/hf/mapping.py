"""`Rule`: one parameter, and the tensors of Hugging Face that it is made of. `Family`: the rules of one model type.

Every parameter is a choice of rows of its sources: q, k and v become one matrix by taking their rows in another order, and
so do the halves of a gated MLP and the projections of a recurrent layer. A rule therefore is a list of row numbers, and no
function: a rank finds out which rows of which files its shard is, and reads only those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron_hybrid_prefix.models.config import HybridModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor of Hugging Face, or one matrix of a stack of matrices.

    Attributes:
        name: Its name in a state dict.
        shape: Its shape, of the whole stack where it is one.
        at: Which matrix of a stack; None: the tensor is no stack.
    """

    name: str
    shape: tuple[int, ...]
    at: int | None = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of what the rule takes: (rows, ...)."""
        return self.shape if self.at is None else self.shape[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Rows of a source that are neighbours in a parameter, too: from ``start`` to the one before ``stop``."""

    source: Source
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rule:
    """How one parameter is made.

    Attributes:
        target: The parameter's name in the unsharded model (`parameters_by_global_name`).
        sources: Its parts, one below the other.
        order: (rows,) int64, for each row of the parameter the row of the sources; None: all, in their order.
        finish: Applied to each value; None: values stay as they are.
    """

    target: str
    sources: tuple[Source, ...]
    order: torch.Tensor | None = None
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the unsharded parameter."""
        rows = sum(source.part_shape[0] for source in self.sources) if self.order is None else len(self.order)
        return (rows, *self.sources[0].part_shape[1:])

    def runs(self, rows: Sequence[tuple[int, int]] | None = None) -> Iterator[Run]:
        """Neighbouring rows of one source, in the order of the parameter's rows.

        Args:
            rows: Ranges (start, stop) of the parameter's rows, one after the other; None: all.
        """
        counts = [source.part_shape[0] for source in self.sources]
        wanted = [(0, self.shape[0])] if rows is None else rows
        if self.order is None:
            for begin, end in wanted:
                above = 0
                for source, count in zip(self.sources, counts, strict=True):
                    start, stop = max(begin - above, 0), min(end - above, count)
                    if start < stop:
                        yield Run(source=source, start=start, stop=stop)
                    above += count
            return
        numbers = torch.cat([self.order[begin:end] for begin, end in wanted])
        ends = torch.tensor(counts).cumsum(0)
        owner = torch.bucketize(numbers, ends, right=True)
        first = torch.ones(len(numbers), dtype=torch.bool)
        first[1:] = (numbers.diff() != 1) | (owner.diff() != 0)
        begins = first.nonzero().flatten().tolist()
        for begin, end in zip(begins, [*begins[1:], len(numbers)], strict=True):
            at = int(owner[begin])
            start = int(numbers[begin] - ends[at]) + counts[at]
            yield Run(source=self.sources[at], start=start, stop=start + end - begin)


class Family(ABC):
    """A model type of Hugging Face.

    Attributes:
        model_type: Its name in ``config.json``.
    """

    model_type: ClassVar[str]

    @abstractmethod
    def mismatch(self, config: HybridModelConfig) -> str | None:
        """What of these dimensions no model of this family has, in a few words; None: nothing."""

    def canonical(self, name: str) -> str | None:
        """The name that the rules have for a tensor of a state dict; None: it is not read."""
        return name

    @abstractmethod
    def rules(self, config: HybridModelConfig, names: Collection[str] = ()) -> Iterator[Rule]:
        """How every parameter is made, those of other ranks included.

        A norm that Transformer Engine fuses into the next layer has two rules, one for each of its names.

        Args:
            config: The whole model's dimensions.
            names: Canonical names of the state dict; they decide where a family writes one thing in two ways.
        """


def made_of(target: str, sources: Mapping[str, tuple[int, ...]], order: torch.Tensor | None = None) -> Rule:
    """The rule of a parameter that is made of these tensors: names with their shapes."""
    parts = tuple(Source(name=name, shape=shape) for name, shape in sources.items())
    return Rule(target=target, sources=parts, order=order)


def row_numbers(*counts: int) -> tuple[torch.Tensor, ...]:
    """Row numbers of tensors with so many rows, one below the other: pack them as their rows are to be packed."""
    parts: tuple[torch.Tensor, ...] = torch.arange(sum(counts)).split(counts)
    return parts


def plus_one(weight: torch.Tensor) -> torch.Tensor:
    """Weight of a norm that multiplies by 1 + weight, for a norm that multiplies by it; in float32."""
    return weight.float() + 1.0
