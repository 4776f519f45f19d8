"""Random weights that do not depend on the tensor- or pipeline-parallel layout."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from megatron_hybrid_prefix.models.config import HybridModelConfig


@torch.no_grad()
def initialise_weights(model: Any, config: HybridModelConfig, seed: int) -> None:
    """Fill every parameter of this rank's shard, on its device.

    Each parameter is drawn whole from a generator seeded by ``seed`` and its global name, then cut for this rank.

    Args:
        model: This rank's ``HybridModel``.
        config: The whole model's dimensions.
        seed: Seed of the weights.
    """
    from megatron_hybrid_prefix.layers.kinds import invalidate_layers  # imports megatron

    for name, parameter in parameters_by_global_name(model):
        tp, _ = tensor_parallel_place(name)
        components = _components(name, parameter, config, tp)
        shape = list(parameter.shape)
        if components:
            shape[_partition_dim(parameter)] = sum(components) * tp
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed(int.from_bytes(digest, "big"))
        full = torch.empty(shape, dtype=torch.float32, device=parameter.device)
        _draw(name, full, config, generator, components, tp)
        parameter.copy_(shard_for_this_rank(full, name, parameter, config))
    invalidate_layers(model)


def warn_not_finite(model: Any, source: object) -> None:
    """Warn in one line of weights of this rank, read from ``source``, that have NaN or infinity: one reduction of each."""
    values = [(name, value.detach()) for name, value in parameters_by_global_name(model) if value.is_floating_point()]
    names = [name for name, value in values if value.numel() and not torch.stack(value.aminmax()).isfinite().all()]
    if names:
        said = "%s: NaN or infinity in %d weights, the first is %s"
        logging.getLogger(__name__).warning(said, source, len(names), names[0])


def parameters_by_global_name(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's parameters, and its routers' biases of experts, which are buffers.

    Layers are counted from 0 over all pipeline stages, experts over all their ranks.
    Experts whose weights are stacked (`GroupedExperts`) or numbered (Transformer Engine's) come one by one, under the names that
    megatron gives experts that are computed one by one.
    """
    from megatron.core import parallel_state

    # HybridModel numbers layers from 1 over all stages; module names count from 0 on each stage.
    layer_offset = model.decoder.layers[0].layer_number - 1
    experts = (model.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    expert_offset = parallel_state.get_expert_model_parallel_rank() * experts
    for name, parameter in _parameters(model):
        for of, offset in ((r"^decoder\.layers", layer_offset), (r"\.local_experts", expert_offset)):
            name = re.sub(rf"({of}\.)(\d+)", lambda m, offset=offset: f"{m[1]}{int(m[2]) + offset}", name, count=1)  # type: ignore[misc]
        yield name, parameter


def _parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    from megatron_hybrid_prefix.models.experts import GroupedExperts

    stacked = {name: module for name, module in model.named_modules() if isinstance(module, GroupedExperts)}
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        if owner not in stacked:
            yield re.sub(r"(\.experts)(\.linear_fc[12]\.weight)(\d+)$", r"\1.local_experts.\3\2", name), parameter
        elif last == "linear_fc1_weight":  # once for both stacks
            for own, weight in stacked[owner].local_weights():
                yield f"{owner}.local_experts.{own}", weight
    for name, buffer in model.named_buffers():
        if name.endswith(".router.expert_bias"):
            yield name, buffer


def shard_for_this_rank(
    full: torch.Tensor, name: str, parameter: torch.Tensor, config: HybridModelConfig
) -> torch.Tensor:
    """This tensor-parallel rank's part of ``full``, the parameter ``name`` of the unsharded model.

    Args:
        full: The unsharded parameter.
        name: Its name.
        parameter: This rank's parameter, which says how it is partitioned.
        config: The whole model's dimensions.

    Returns:
        A tensor of ``parameter``'s shape; ``full`` itself where nothing is partitioned.
    """
    partitioned = ranges_of_this_rank(name, parameter, config)
    if partitioned is None:
        return full
    dim, ranges = partitioned
    return torch.cat([full.narrow(dim, start, stop - start) for start, stop in ranges], dim=dim)


def ranges_of_this_rank(
    name: str, parameter: torch.Tensor, config: HybridModelConfig
) -> tuple[int, list[tuple[int, int]]] | None:
    """Which part of the unsharded parameter ``name`` this tensor-parallel rank holds; arguments as of `shard_for_this_rank`.

    Returns:
        The dimension, and ranges (start, stop) of it, one after the other; None where nothing is partitioned.
    """
    tp, tp_rank = tensor_parallel_place(name)
    ranges, begin = [], 0
    for rows in _components(name, parameter, config, tp):
        ranges.append((begin + tp_rank * rows, begin + (tp_rank + 1) * rows))
        begin += rows * tp
    return (_partition_dim(parameter), ranges) if ranges else None


def tensor_parallel_place(name: str) -> tuple[int, int]:
    """How many tensor-parallel ranks divide the parameter ``name``, and which of them this is; experts have ranks of their own."""
    from megatron.core import parallel_state

    if ".local_experts." in name:
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def _partition_dim(parameter: Any) -> int:
    """The dimension along which megatron partitions a parameter; it sets it as an attribute."""
    return int(parameter.partition_dim)


def _components(name: str, parameter: Any, config: HybridModelConfig, tp: int) -> list[int]:
    """Rows a rank holds of each packed part along the partition dimension; empty where it is not partitioned."""
    if tp == 1 and not hasattr(parameter, "partition_dim"):
        return []
    dim = getattr(parameter, "partition_dim", -1)
    if dim < 0 or not getattr(parameter, "tensor_model_parallel", False):
        return []
    if hasattr(parameter, "partition_sizes"):
        return list(parameter.partition_sizes)
    rows = parameter.shape[dim]
    if name.endswith("linear_fc1.weight") and config.activation == "swiglu":
        return [rows // 2, rows // 2]  # [gate, up], each sharded
    return [rows]


def _draw(
    name: str, full: torch.Tensor, config: HybridModelConfig, generator: torch.Generator, components: list[int], tp: int
) -> None:
    """Fill ``full``, the parameter of the unsharded model."""

    def uniform(low: float, high: float) -> torch.Tensor:
        return full.uniform_(low, high, generator=generator)

    last = name.rsplit(".", 1)[-1]
    if last == "A_log":
        # exp(-A dt) is what a token leaves of the state: 0.02 x 0.03 keeps half of it for a thousand tokens.
        low, high = (0.01, 0.2) if config.long_memory else (1.0, 16.0)
        uniform(low, high).log_()
    elif last == "dt_bias":
        low, high = (0.02, 0.2) if config.long_memory else (0.001, 0.1)
        dt = uniform(math.log(low), math.log(high)).exp_()
        full.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus
    elif last == "D":
        full.fill_(0.2 if config.long_memory else 1.0)
    elif last == "conv1d_weight" or name.endswith("conv1d.weight"):
        bound = (1.0 if config.long_memory else 0.5) * (4 / config.d_conv) ** 0.5
        uniform(-bound, bound)
    elif last == "conv1d_bias":
        uniform(-0.5, 0.5)
    elif last == "layer_norm_weight" or (last == "weight" and full.dim() == 1):
        full.fill_(1.0)
    elif last in ("bias", "layer_norm_bias", "expert_bias"):
        full.zero_()
    else:
        std = full.shape[-1] ** -0.5
        if "embedding" in name:
            std = 1.0
        elif "output_layer" in name:
            std *= 2.0  # logits with a spread: greedy choices that rounding does not flip
        elif last == "weight" and any(part in name for part in ("out_proj", "linear_proj", "linear_fc2")):
            std *= (2 * config.num_layers) ** -0.5 * (4.0 if config.long_memory else 1.0)
        full.normal_(0.0, std, generator=generator)
        if name.endswith("in_proj.weight"):
            # The dt rows only modulate the step size around dt_bias.
            full[sum(components[:-1]) * tp :].mul_(0.5)
