"""`load_hf_weights`: a Hugging Face folder's weights into this rank's shard, read by slices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from megatron_hybrid_prefix.models.checkpoint import together
from megatron_hybrid_prefix.models.hf.folder import HfFolder, StoredWeight
from megatron_hybrid_prefix.models.hf_weights import copy_hf_weights
from megatron_hybrid_prefix.models.weights import parameters_by_global_name


def load_hf_weights(model: Any, folder: HfFolder, *, on_read: Callable[[int, int], object] | None = None) -> None:
    """Load the weights of ``folder`` into ``model``, whatever its tensor-, pipeline- and expert-parallel layout.

    Every rank reads the slices that it holds, one parameter after the other, from files that are mapped into memory: at no
    time does it hold more than its shard and one parameter. A collective: an error on one rank is raised on all.

    Args:
        model: This rank's shard, as `build_hybrid_model` returned it; its dimensions are ``model.hybrid_config``.
        folder: What `open_folder` returned.
        on_read: Called after each slice with the values that this rank has read, and those that it will read.

    Raises:
        ValueError: As of `HfFolder.weights` and `copy_hf_weights`, or a file cannot be read. In the last case some weights are
            written: the model must not be used.
    """
    total = sum(parameter.numel() for _, parameter in parameters_by_global_name(model))
    read_values = 0

    def count(values: int) -> None:
        nonlocal read_values
        read_values += values
        if on_read is not None:
            on_read(read_values, total)

    def load() -> None:
        with ExitStack() as stack:
            files = {weight.file for weight in folder.weights.values()}
            opened = {file: stack.enter_context(_open(file)) for file in sorted(files)}
            weights = {name: _Slices(weight, opened[weight.file], count) for name, weight in folder.weights.items()}
            copy_hf_weights(model, weights, model.hybrid_config, folder.model_type, source=str(folder.path))

    together(load)


def _open(file: Any) -> Any:
    from safetensors import SafetensorError, safe_open

    opener: Any = safe_open  # has no types
    try:
        return opener(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error


class _Slices:
    """A weight of an opened file: slices of it are read when they are asked for."""

    def __init__(self, weight: StoredWeight, opened: Any, on_read: Callable[[int], None]) -> None:
        self.shape, self.file = weight.shape, weight.file
        self._name, self._opened, self._on_read = weight.name, opened, on_read

    def __getitem__(self, where: tuple[int | slice, ...]) -> torch.Tensor:
        from safetensors import SafetensorError

        try:
            found: torch.Tensor = self._opened.get_slice(self._name)[where]
        except (OSError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"cannot read {self._name} of {self.file}: {error}") from error
        self._on_read(found.numel())
        return found
