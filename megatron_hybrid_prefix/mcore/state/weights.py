"""`WeightSamples`: notices that a model's weights have changed, however that was done, and though nobody said so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_hybrid_prefix.mcore.ranks.agreement import max_over_model_ranks
from megatron_hybrid_prefix.ops.samples import SampledSums
from megatron_hybrid_prefix.upstream.quantised import is_quantised, parts_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)


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
        self._places = _places(self._model)
        self._sums = self._sampled(self._tensors())

    def changed(self, *, experts: bool) -> str | None:
        """What differs from the last `take` on any rank, in words; None: nothing. A collective.

        Args:
            experts: Expert-parallel ranks call it, too, not only tensor- and pipeline-parallel ones.
        """
        sums = self._sampled(self._tensors())
        if not max_over_model_ranks(int(sums != self._sums), self._groups, experts=experts):
            return None
        names = [name for name, owner, key in self._places for _ in _parts(owner.get(key))]
        if len(sums) == len(self._sums):
            names = [name for name, old, new in zip(names, self._sums, sums, strict=True) if old != new]
        return f"{len(names)} of {len(sums)} tensors differ, first {names[0]}" if names else "those of another rank"

    def _tensors(self) -> list[torch.Tensor]:
        return [part for _, owner, key in self._places for part in _parts(owner.get(key))]


def _places(model: torch.nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """Name, dictionary and key of each tensor, so that one that takes its place is found, too. Tied weights are there once."""
    places: dict[int, tuple[str, dict[str, Any], str]] = {}
    for prefix, module in model.named_modules():
        own = vars(module)
        quantised = [key for key, value in own.items() if is_quantised(value)]
        for owner, keys in ((own["_parameters"], None), (own["_buffers"], None), (own, quantised)):
            for key in owner if keys is None else keys:
                if owner[key] is not None:
                    places.setdefault(id(owner[key]), (f"{prefix}.{key}", owner, key))
    return list(places.values())


def _parts(value: Any) -> Sequence[torch.Tensor]:
    """The tensors of a weight, without gaps between their elements; none if the weight was removed."""
    if type(value) in _PLAIN:  # most are, and this runs before a first token
        return (value if value.is_contiguous() else _without_gaps(value),)
    return () if value is None else [_without_gaps(part) for part in parts_of(value)]


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, transposed or not; a copy if others lie between its elements."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach() if span == tensor.numel() else tensor.detach().contiguous()
