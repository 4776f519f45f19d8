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
        self._owners = [(name, vars(module)) for name, module in self._model.named_modules()]
        self._quantised = [(own, key) for _, own in self._owners for key, value in own.items() if is_quantised(value)]
        self._modules, self._sums = self._present_modules(), self._sampled([part for _, part in self._weights()])

    def changed(self, *, experts: bool) -> str | None:
        """What differs from the last `take` on any rank, in words; None: nothing. A collective.

        Args:
            experts: Expert-parallel ranks call it, too, not only tensor- and pipeline-parallel ones.
        """
        replaced, weights = self._present_modules() != self._modules, self._weights()
        sums = self._sampled([part for _, part in weights])
        if not max_over_model_ranks(int(replaced or sums != self._sums), self._groups, experts=experts):
            return None
        if replaced or len(sums) != len(self._sums):
            return "a module or a weight was added, removed or replaced"
        names = [name for (name, _), old, new in zip(weights, self._sums, sums, strict=True) if old != new]
        if not names:
            return "those of another rank"
        return f"{len(names)} of {len(sums)} tensors differ, first {names[0]}"

    def _present_modules(self) -> list[Any]:
        return [module for _, own in self._owners for module in own["_modules"].values()]

    def _weights(self) -> list[tuple[str, torch.Tensor]]:
        """Each tensor that is sampled, and its name."""
        weights = [
            (f"{name}.{key}", weight) for name, own in self._owners for key, weight in own["_parameters"].items()
        ]
        for name, own in self._owners:
            weights += [(f"{name}.{key}", value) for key, value in own["_buffers"].items() if key not in _NOT_SAMPLED]
        weights += [("a quantised one", own.get(key)) for own, key in self._quantised]
        return [(name, part) for name, weight in weights for part in _parts(weight)]


def _parts(value: Any) -> Sequence[torch.Tensor]:
    """The tensors of a weight, without gaps between their elements; none if the weight was removed."""
    if type(value) in _PLAIN:  # most are, and this runs before a first token
        return (value if value.is_contiguous() else _without_gaps(value),)
    return () if value is None else [_without_gaps(part) for part in parts_of(value)]


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, transposed or not; a copy if others lie between its elements."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach() if span == tensor.numel() else tensor.detach().contiguous()
