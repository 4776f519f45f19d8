"""`Rule`: one parameter, and the tensors of Hugging Face that it is made of. Reading this module imports neither torch nor numpy.

Every parameter is a choice of rows of its sources: q, k and v become one matrix by taking their rows in another order, and
so do the halves of a gated MLP and the projections of a recurrent layer. A rule therefore is a list of row numbers, and no
function: a rank finds out which rows of which files its shard is, and reads only those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

type RowNumbers = NDArray[np.int64]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """What is done to the values of a parameter, one by one.

    Attributes:
        apply: The parameter's values from those of its sources.
        undo: The other way round, to save them.
    """

    apply: Callable[[Tensor], Tensor]
    undo: Callable[[Tensor], Tensor]


PLUS_ONE = Finish(apply=lambda weight: weight.float() + 1.0, undo=lambda weight: weight.float() - 1.0)
"""Weight of a norm that multiplies by 1 + weight, for a norm that multiplies by it; in float32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rule:
    """How one parameter is made.

    Attributes:
        target: The parameter's name in the unsharded model (`parameters_by_global_name`).
        sources: Its parts, one below the other.
        order: (rows,), for each row of the parameter the row of the sources; None: all, in their order.
        finish: What is done to the values; None: nothing.
    """

    target: str
    sources: tuple[Source, ...]
    order: RowNumbers | None = None
    finish: Finish | None = None

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
        import numpy as np

        numbers = np.concatenate([self.order[begin:end] for begin, end in wanted])
        ends = np.cumsum(counts)
        owner = np.searchsorted(ends, numbers, side="right")
        first = np.ones(len(numbers), dtype=bool)
        first[1:] = (np.diff(numbers) != 1) | (np.diff(owner) != 0)
        begins = first.nonzero()[0].tolist()
        for begin, end in zip(begins, [*begins[1:], len(numbers)], strict=True):
            at = int(owner[begin])
            start = int(numbers[begin] - ends[at]) + counts[at]
            yield Run(source=self.sources[at], start=start, stop=start + end - begin)


def made_of(
    target: str, sources: Mapping[str, tuple[int, ...]], order: RowNumbers | None = None, finish: Finish | None = None
) -> Rule:
    """The rule of a parameter that is made of these tensors: names with their shapes."""
    parts = tuple(Source(name=name, shape=shape) for name, shape in sources.items())
    return Rule(target=target, sources=parts, order=order, finish=finish)


def row_numbers(*counts: int) -> list[RowNumbers]:
    """Row numbers of tensors with so many rows, one below the other: pack them as their rows are to be packed."""
    import numpy as np

    return np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
