"""`plan_copies`: which weights under Hugging Face's names this rank's shard of a hybrid model is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.models.hf.dimensions import family_of
from megatron_hybrid_prefix.models.hf.mapping import Rule
from megatron_hybrid_prefix.models.weights import parameters_by_global_name, ranges_of_this_rank, tensor_parallel_place

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    """One parameter of this rank, and what it is made of.

    Attributes:
        parameter: The parameter, or this rank's part of it.
        rule: How the unsharded parameter is made.
        rows: Ranges (start, stop) of its rows that this rank has, one after the other; None: all.
        columns: Range of its second dimension that this rank has; None: all.
    """

    parameter: torch.Tensor
    rule: Rule
    rows: list[tuple[int, int]] | None = None
    columns: tuple[int, int] | None = None


def plan_copies(
    model: Any, state_dict: Mapping[str, Any], config: HybridModelConfig, model_type: str | None, *, source: str
) -> tuple[dict[str, Any], list[Copy]]:
    """Check a Hugging Face state dict against ``model``, whatever its tensor-, pipeline- and expert-parallel layout.

    Nothing of the values is read.

    Args:
        model: This rank's shard, as `build_hybrid_model` returned it.
        state_dict: Unsharded weights by name: what has their ``shape``. Weights of multi-token prediction (``mtp.``) are left
            out where ``config`` has none.
        config: The whole model's dimensions.
        model_type: Hugging Face's name of the family; None: the one that has such dimensions.
        source: What errors call the state dict.

    Returns:
        The state dict under the names of the rules; and for each parameter of this rank what it is made of.

    Raises:
        ValueError: No such family, or no model of it has these dimensions; or a weight is missing, unknown or has another
            shape, or the model has one that the family lacks; or no parameter takes a weight; or the embedding is the output
            layer of ``config``, and the state dict has one.
    """
    family = family_of(config, model_type)
    weights = {}
    for name, value in state_dict.items():
        canonical = family.canonical(name)
        if canonical is not None and (config.mtp_num_layers or not canonical.startswith("mtp.")):
            weights[canonical] = value
    if config.tie_embeddings and "lm_head.weight" in weights:
        raise ValueError(f"tie_embeddings=True, but {source} has an lm_head.weight: use tie_embeddings=False")
    rules = {rule.target: rule for rule in family.rules(config, weights)}
    optional = {"lm_head.weight"} if config.tie_embeddings else set[str]()
    _check_shapes(weights, shapes_of(rules.values()), optional, source)
    copies, found = [], set[str]()
    for name, parameter in parameters_by_global_name(model):
        if name not in rules:
            raise ValueError(f"the model has a weight that {family.name} lacks: {name}")
        part = _part_of_this_rank(name, parameter, config, rules[name].shape)
        copies.append(Copy(parameter=parameter, rule=rules[name], **part))
        found.add(name)
    _check_every_source_is_taken(rules.values(), found, model, config)
    return weights, copies


def shapes_of(rules: Iterable[Rule]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that these rules take."""
    return {source.name: source.shape for rule in rules for source in rule.sources}


def _check_shapes(
    weights: Mapping[str, Any], expected: dict[str, tuple[int, ...]], optional: set[str], source: str
) -> None:
    missing, unknown = expected.keys() - weights.keys() - optional, weights.keys() - expected.keys()
    for what, names in (("lacks", missing), ("has an unknown", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"{source} {what} weight {_stored(min(names), weights.get(min(names)))}{more}")
    for name, wanted in expected.items():
        if name not in weights:
            continue
        value = weights[name]
        if tuple(value.shape) != wanted:
            stored = _stored(name, value)
            raise ValueError(f"{stored} has shape {tuple(value.shape)}, the model's dimensions require {wanted}")


def _stored(name: str, weight: Any) -> str:
    """A weight by the name of the rules; where it is in a file, by its name there, and the file."""
    file = getattr(weight, "file", None)
    return name if file is None else f"{weight.name} in {file}"


def _check_every_source_is_taken(
    rules: Iterable[Rule], found: Collection[str], model: Any, config: HybridModelConfig
) -> None:
    """Raise ValueError if no parameter takes a tensor that this rank should hold; a tensor may have several targets."""
    targets: dict[tuple[str, int | None], list[str]] = {}
    for rule in rules:
        for source in rule.sources:
            targets.setdefault((source.name, source.at), []).append(rule.target)
    belongs_here = _belongs_here(model, config)
    for (name, _), candidates in targets.items():
        if belongs_here(candidates[0]) and not any(target in found for target in candidates):
            raise ValueError(f"no parameter of the model takes {name}: it has no {' or '.join(candidates)}")


def _belongs_here(model: Any, config: HybridModelConfig) -> Callable[[str], bool]:
    """Whether this rank should hold a parameter of the unsharded model, by its pipeline stage and its experts."""
    from megatron.core import parallel_state

    first: int = model.decoder.layers[0].layer_number - 1
    # The last stage has all layers that are left: a model with fewer layers is noticed there.
    end: int = config.num_layers if model.post_process else first + len(model.decoder.layers)
    experts = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    first_expert = parallel_state.get_expert_model_parallel_rank() * experts

    def belongs_here(target: str) -> bool:
        if target == EMBEDDING:
            return bool(model.pre_process)
        if target == OUTPUT and config.tie_embeddings:
            return False
        layer = re.match(r"decoder\.layers\.(\d+)\.", target)
        here = bool(model.post_process) if layer is None else first <= int(layer[1]) < end
        expert = re.search(r"\.local_experts\.(\d+)\.", target)
        return here and (expert is None or first_expert <= int(expert[1]) < first_expert + experts)

    return belongs_here


def _part_of_this_rank(
    name: str, parameter: torch.Tensor, config: HybridModelConfig, shape: tuple[int, ...]
) -> dict[str, Any]:
    """``rows`` and ``columns`` of a `Copy`; ``shape`` is that of the unsharded parameter."""
    partitioned = ranges_of_this_rank(name, parameter, config)
    local, part = list(shape), dict[str, Any]()
    if partitioned is not None:
        dim, ranges = partitioned
        local[dim] //= tensor_parallel_place(name)[0]
        part = {"rows": ranges} if dim == 0 else {"columns": ranges[0]}
    if tuple(parameter.shape) != tuple(local):
        raise ValueError(
            f"{name} of the model has shape {tuple(parameter.shape)}, its dimensions require {tuple(local)}"
        )
    return part
