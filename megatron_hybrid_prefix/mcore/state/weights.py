"""`WeightSamples`: notices that a model's weights have changed, however that was done, and though nobody said so."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from megatron_hybrid_prefix.mcore.ranks.agreement import max_over_model_ranks
from megatron_hybrid_prefix.ops.samples import SampledSums
from megatron_hybrid_prefix.upstream.moe import TRAINING_COUNTERS, VIEWS_OF_WEIGHTS, keep_router_buffers
from megatron_hybrid_prefix.upstream.quantised import is_quantised, parts_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NOT_SAMPLED = TRAINING_COUNTERS | VIEWS_OF_WEIGHTS


class WeightSamples:
    """Samples of every tensor that a forward reads: parameters, buffers, and the data and scales of quantised ones.

    Contents are compared: a write through ``.data`` leaves version counters and addresses as they are. Samples miss a change of
    very few values, such as a few rows of an embedding; an optimizer's step changes more.

    Args:
        model: This rank's part of the model.
        pg_collection: Megatron's process groups; None: those of its parallel state.
    """

    def __init__(self, model: torch.nn.Module, pg_collection: Any = None) -> None:
        self._model, self._groups = model, pg_collection
        self._sampled = SampledSums()
        self.take()

    def take(self) -> None:
        """From now on these weights are the right ones."""
        keep_router_buffers(self._model)
        self._names, modules = zip(*((name, vars(module)) for name, module in self._model.named_modules()), strict=True)
        self._children, self._parameters, self._buffers = (
            [own[kind] for own in modules] for kind in ("_modules", "_parameters", "_buffers")
        )
        self._quantised = [(own, key) for own in modules for key, value in own.items() if is_quantised(value)]
        self._modules, self._sums = _values(self._children), self._sampled(self._tensors())

    def changed(self, *, experts: bool) -> str | None:
        """What differs from the last `take` on any rank, in words; None: nothing. A collective.

        Args:
            experts: Expert-parallel ranks call it, too, not only tensor- and pipeline-parallel ones.
        """
        replaced = _values(self._children) != self._modules
        sums = self._sampled(self._tensors())
        if not max_over_model_ranks(int(replaced or sums != self._sums), self._groups, experts=experts):
            return None
        if replaced or len(sums) != len(self._sums):
            return "a module or a weight was added, removed or replaced"
        names = [name for name, old, new in zip(self._names_of_tensors(), self._sums, sums, strict=True) if old != new]
        if not names:
            return "those of another rank"
        return f"{len(names)} of {len(sums)} tensors differ, first {names[0]}"

    def _tensors(self) -> list[torch.Tensor]:
        """Those that are sampled. This runs before a first token."""
        weights = [weight for weight in _values(self._parameters) if weight is not None]
        weights += [
            value for own in filter(None, self._buffers) for key, value in own.items() if key not in _NOT_SAMPLED
        ]
        if self._quantised or not all(map(_is_plain, weights)):
            weights += [own.get(key) for own, key in self._quantised]
            return [part for weight in weights for part in _parts(weight)]
        return weights

    def _names_of_tensors(self) -> list[str]:
        named = [
            (f"{prefix}.{key}", value)
            for owners in (self._parameters, self._buffers)
            for prefix, own in zip(self._names, owners, strict=True)
            for key, value in own.items()
            if key not in _NOT_SAMPLED
        ]
        named += [("a quantised one", own.get(key)) for own, key in self._quantised]
        return [name for name, value in named for _ in _parts(value)]


def _values(owners: Sequence[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, owners)))


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN and value.is_contiguous()


def _parts(value: Any) -> Sequence[torch.Tensor]:
    """The tensors of a weight, without gaps between their elements; none if the weight was removed."""
    if _is_plain(value):
        return (value,)
    return () if value is None else [_without_gaps(part) for part in parts_of(value)]


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, transposed or not; a copy if others lie between its elements."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach() if span == tensor.numel() else tensor.detach().contiguous()
