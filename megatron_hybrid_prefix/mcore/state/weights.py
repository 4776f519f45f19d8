"""`WeightSamples`: notices that a model's weights have changed, however that was done, and though nobody said so."""

from __future__ import annotations

from collections.abc import Sequence
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
        modules = [vars(module) for module in self._model.modules()]
        self._children = [own["_modules"] for own in modules]
        self._parameters, self._buffers = ([own[kind] for own in modules] for kind in ("_parameters", "_buffers"))
        self._quantised = [(own, key) for own in modules for key, value in own.items() if is_quantised(value)]
        self._modules, self._sums = self._present_modules(), self._sampled(self._tensors())

    def changed(self, *, experts: bool) -> str | None:
        """What differs from the last `take` on any rank, in words; None: nothing. A collective.

        Args:
            experts: Expert-parallel ranks call it, too, not only tensor- and pipeline-parallel ones.
        """
        replaced = self._present_modules() != self._modules
        sums = self._sampled(self._tensors())
        if not max_over_model_ranks(int(replaced or sums != self._sums), self._groups, experts=experts):
            return None
        if replaced or len(sums) != len(self._sums):
            return "a module or a weight was added, removed or replaced"
        numbers = [number for number, old in enumerate(self._sums) if old != sums[number]]
        if not numbers:
            return "those of another rank"
        return f"{len(numbers)} of {len(sums)} tensors differ, first {self._name_of(numbers[0])}"

    def _present_modules(self) -> list[Any]:
        return [module for children in self._children for module in children.values()]

    def _tensors(self) -> list[torch.Tensor]:
        weights = [weight for owner in self._parameters for weight in owner.values()]
        weights += [value for owner in self._buffers for key, value in owner.items() if key not in _NOT_SAMPLED]
        weights += [own.get(key) for own, key in self._quantised]
        return [part for weight in weights for part in _parts(weight)]

    def _name_of(self, number: int) -> str:
        names = [
            f"{prefix}.{key}"
            for kind in ("_parameters", "_buffers")
            for prefix, module in self._model.named_modules()
            for key, value in vars(module)[kind].items()
            if key not in _NOT_SAMPLED
            for _ in _parts(value)
        ]
        return names[number] if number < len(names) else "a quantised one"


def _parts(value: Any) -> Sequence[torch.Tensor]:
    """The tensors of a weight, without gaps between their elements; none if the weight was removed."""
    if type(value) in _PLAIN:  # most are, and this runs before a first token
        return (value if value.is_contiguous() else _without_gaps(value),)
    return () if value is None else [_without_gaps(part) for part in parts_of(value)]


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, transposed or not; a copy if others lie between its elements."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach() if span == tensor.numel() else tensor.detach().contiguous()
