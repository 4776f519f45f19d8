"""The recurrent states of a model on this rank: found on the built model, by the layer kinds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_hybrid_prefix.layers.base import KINDS, LayerKind, dtype_name
from megatron_hybrid_prefix.layers.components import RINGS, mamba2_components, open_rings_of, rings_of
from megatron_hybrid_prefix.layers.kinds import layer_kinds, recurrent_modules
from megatron_hybrid_prefix.layers.mamba2 import KIND as MAMBA2
from megatron_hybrid_prefix.layers.step import Quantum
from megatron_hybrid_prefix.mcore.ranks.agreement import of_all_stages, stage_count
from megatron_hybrid_prefix.pool.layout import RingLayout, SlotLayout, StateComponent, StateLayout
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from megatron_hybrid_prefix.upstream.moe import routers_of
from megatron_hybrid_prefix.upstream.state_config import (
    RECURRENT,
    WITH_EXPERTS,
    RecurrentStateConfig,
    decoder,
    decoder_layers,
    has_latent_attention,
    mixer_name,
    needs_a_kind,
    pattern_of_all_stages,
    process_groups,
)

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_hybrid_prefix.upstream.config import InferenceConfig, MambaInferenceStateConfig


DESCRIBE_ALL = "use build_engine, or call install() before the InferenceConfig is made"
"""What to do about an ``InferenceConfig`` that lacks recurrent layers."""


@dataclass(frozen=True, slots=True)
class ModelStates:
    """The recurrent layers of a model on this pipeline stage, and what a slot holds of them.

    Attributes:
        slots: The contents of a slot; kinds that only other stages have are there with 0 layers.
        quanta: Chunk quantum of each kind, in tokens.
        kind_of_layer: Kind of each recurrent layer of this stage, in their order.
        routers: Number of layers with experts.
    """

    slots: SlotLayout
    quanta: tuple[Quantum, ...]
    kind_of_layer: tuple[str, ...]
    routers: int = 0

    def rings(self, dtype: torch.dtype, *, block_tokens: int, drafts: int, is_open: bool = False) -> RingLayout:
        """What a running request keeps beside its state. ``dtype``: of the parameters. ``is_open``: for decodes with a prefill's bits."""
        kinds = [KINDS[layout.kind] for layout in self.slots.kinds]
        of_inputs: dict[str, Any] = {"step_tokens": drafts + 1, "dtype": dtype_name(dtype)}
        if is_open:
            rings = {kind.name: kind.open_ring for kind in kinds}
            return open_rings_of(self.slots, rings, [quantum.numerator for quantum in self.quanta], **of_inputs)
        return rings_of(self.slots, {kind.name: kind.ring for kind in kinds}, block_tokens=block_tokens, **of_inputs)

    @property
    def uncaptured(self) -> list[str]:
        """Names of the kinds that CUDA graphs cannot capture."""
        return [layout.kind for layout in self.slots.kinds if not KINDS[layout.kind].cuda_graphs]

    def check(self, *, block_tokens: int, cuda_graph_impl: str, drafts: int) -> None:
        """Raise ValueError, in one line, if a kind cannot be run with such KV blocks, in CUDA graphs, or with drafts."""
        kinds = [KINDS[layout.kind] for layout in self.slots.kinds]
        undrafted = [kind.name for kind in kinds if not kind.drafts]
        if drafts and undrafted:
            raise ValueError(
                f"num_speculative_tokens={drafts}: layers of kind {_names(undrafted)} do not support speculative decoding"
            )
        if cuda_graph_impl == "local" and self.uncaptured:
            raise ValueError(
                f"cuda_graph_impl={cuda_graph_impl!r}: CUDA graphs cannot capture layers of kind {_names(self.uncaptured)}"
            )
        for kind, quantum in zip(kinds, self.quanta, strict=True):
            if kind.whole_chunks and block_tokens % quantum:
                raise ValueError(
                    f"block_size_tokens={block_tokens}: layers of kind {kind.name} need a multiple of {quantum.numerator}"
                )


def states_of_config(config: MambaInferenceStateConfig) -> ModelStates:
    """What a context was told: this package's description, or megatron's of Mamba2 layers.

    Raises:
        ValueError: Megatron described a model that has other recurrent layers.
    """
    states: ModelStates | None = getattr(config, "states", None)
    if states is not None:
        return states
    others = sorted({symbol for symbol in config.layer_type_list if needs_a_kind(symbol) and symbol != RECURRENT})
    if others:
        raise ValueError(f"the InferenceConfig lacks this package's description of the layers {others}: {DESCRIBE_ALL}")
    layers = sum(symbol == RECURRENT for symbol in config.layer_type_list)
    components = mamba2_components(
        config.conv_states_shape,
        dtype_name(config.conv_states_dtype),
        config.ssm_states_shape,
        dtype_name(config.ssm_states_dtype),
    )
    return ModelStates(
        slots=SlotLayout((StateLayout(kind=MAMBA2.name, layers=layers, components=components),)),
        quanta=(config.mamba_chunk_size,),
        kind_of_layer=(MAMBA2.name,) * layers,
        routers=list(config.layer_type_list).count(WITH_EXPERTS),
    )


def routes_of_block(model_config: TransformerConfig, inference_config: InferenceConfig) -> dict[str, Any]:
    """Fields of `BlockShape` for the routes of its tokens; none unless megatron is told to record them.

    Raises:
        ValueError: The model has no experts, or its pipeline stages would record each their own.
    """
    if not model_config.moe_enable_routing_replay:
        return {}
    stages = model_config.pipeline_model_parallel_size
    routers = states_of_config(inference_config.mamba_inference_state_config).routers
    problem = (
        "the model has no experts"
        if not routers
        else f"each of {stages} pipeline stages would record only its own layers"
    )
    if stages > 1 or not routers:
        raise ValueError(f"moe_enable_routing_replay=True: no routes of experts can be returned: {problem}; use False")
    return {
        "routes": (inference_config.block_size_tokens, routers, model_config.moe_router_topk),
        "routes_dtype": torch.uint8 if model_config.num_moe_experts <= 2**8 else torch.int16,
    }


def mamba_state_config(
    model: Any, conv_dtype: torch.dtype | None = None, ssm_dtype: torch.dtype | None = None
) -> RecurrentStateConfig | None:
    """What megatron's context has to know of a model's recurrent states; every rank has to ask.

    Megatron derives it from the stage's own layers, of Mamba2 only, and treats a stage without them as a plain transformer,
    which then skips other tokens than its neighbours.

    A collective over pipeline stages, unless the layer pattern of the whole model says that no stage has a recurrent layer.

    Args:
        model: This rank's shard.
        conv_dtype: Megatron's setting for Mamba2 layers: type of their last inputs; None: the layer kind's choice.
        ssm_dtype: Likewise, of what accumulates over tokens; None: the model's, for layers of every kind
            (`HybridModelConfig.state_dtype`), or the layer kind's choice. `with_state_dtype` sets it for every kind.

    Returns:
        None where no stage has a recurrent layer.

    Raises:
        ValueError: A recurrent layer is of no known kind, or not in the pattern that the stages know; layers of one kind differ
            in their states; or a ``GPTModel`` has recurrent layers beside multi-latent attention.
    """
    models_own = None if ssm_dtype is not None else getattr(getattr(model, "hybrid_config", None), "state_dtype", None)
    state_dtype = None if models_own is None else getattr(torch, models_own)
    symbols, kind_of_layer = [], []
    found: dict[str, tuple[tuple[StateComponent, ...], Quantum]] = {}  # a layer's components and chunk quantum, by kind
    for number, (symbol, layer) in enumerate(decoder_layers(model), 1):
        recurrent = _recurrent_part(number, symbol, layer)
        symbols.append(symbol if recurrent is None else RECURRENT)
        if recurrent is None:
            continue
        kind, module = recurrent
        of_mamba = (ssm_dtype, conv_dtype) if kind is MAMBA2 else (None, None)
        components = kind.components(module, state_dtype=state_dtype or of_mamba[0], window_dtype=of_mamba[1])
        own = components, kind.chunk_tokens(module)
        if found.setdefault(kind.name, own) != own:
            raise ValueError(f"layer {number}: its states differ from those of other layers of kind {kind.name!r}")
        kind_of_layer.append(kind.name)
    groups, may_recur = process_groups(model), _may_recur(model)
    if found and not may_recur and stage_count(groups) > 1:
        raise ValueError(
            f"layers of kind {_names(found)} are in no pattern, so other pipeline stages do not know of them: set the model's "
            "experimental_attention_variant and linear_attention_freq, or its hybrid_layer_pattern"
        )
    for of_stage in of_all_stages(found, groups) if may_recur else []:
        found = of_stage | found
    if not found:
        return None
    if has_latent_attention(model):
        raise ValueError(f"multi_latent_attention=True is not supported beside layers of kind {_names(found)}")
    names = [kind.name for kind in layer_kinds() if kind.name in found]  # the same order on all stages
    layouts = (StateLayout(kind=name, layers=kind_of_layer.count(name), components=found[name][0]) for name in names)
    states = ModelStates(
        slots=SlotLayout(tuple(layouts)),
        quanta=tuple(found[name][1] for name in names),
        kind_of_layer=tuple(kind_of_layer),
        routers=len(routers_of(model)),
    )
    return RecurrentStateConfig(layer_type_list=symbols, states=states, **_fields_for_megatron(states))


def with_state_dtype(config: MambaInferenceStateConfig, state_dtype: str | None) -> MambaInferenceStateConfig:
    """The same recurrent states in the dtypes that hold.

    A script may assign ``ssm_states_dtype`` and ``conv_states_dtype`` after ``from_model``. That is meant for layers of every kind.

    Args:
        config: Is not changed.
        state_dtype: ``HybridPrefixConfig.state_dtype``: of what accumulates over tokens, whatever the script assigned.

    Raises:
        ValueError: An assigned dtype cannot be kept.
    """
    states: ModelStates | None = getattr(config, "states", None)
    if states is None:
        return config if state_dtype is None else replace(config, ssm_states_dtype=getattr(torch, state_dtype))
    made = _fields_for_megatron(states)
    ssm, conv = (
        None if (now := getattr(config, name)) == made[name] else dtype_name(now)
        for name in ("ssm_states_dtype", "conv_states_dtype")
    )
    states = replace(states, slots=states.slots.with_dtypes(state=state_dtype or ssm, window=conv))
    return replace(config, states=states, **_fields_for_megatron(states))


def config_beyond_megatrons(
    model: Any, conv_dtype: torch.dtype | None = None, ssm_dtype: torch.dtype | None = None
) -> RecurrentStateConfig | None:
    """`mamba_state_config` where megatron's own description of this stage is not enough; None where it is.

    It is not enough for layers of other kinds than Mamba2, on any stage, nor for a stage without recurrent layers next to
    stages that have some. A collective only with several stages, and only if one of them may have recurrent layers.
    """
    symbols = [symbol for symbol, _ in decoder_layers(model)]
    own = set(kinds_in(model)) - {MAMBA2.name} or any(needs_a_kind(symbol) for symbol in symbols if symbol != RECURRENT)
    if not own and (stage_count(process_groups(model)) == 1 or not _may_recur(model)):
        return None
    config = mamba_state_config(model, conv_dtype, ssm_dtype)
    return config if config is not None and (needs_this_package(config) or RECURRENT not in symbols) else None


def check_described(model: Any, config: MambaInferenceStateConfig | None) -> None:
    """Raise ValueError, in one line, unless a config describes the recurrent layers of this stage of a model."""
    found = kinds_in(model)
    described = () if config is None else states_of_config(config).kind_of_layer
    if found != described:
        for number, (symbol, layer) in enumerate(decoder_layers(model), 1):
            _recurrent_part(number, symbol, layer)  # names a layer of no kind
        raise ValueError(
            f"the model has recurrent layers of kind {_names(found)}, the InferenceConfig describes {_names(described)}: "
            f"{DESCRIBE_ALL}"
        )


def kinds_in(model: Any) -> tuple[str, ...]:
    """Kind of each recurrent layer of a model on this stage, in their order; without the layers that draft."""
    return tuple(kind.name for kind, _ in recurrent_modules(decoder(model)))


def _names(kinds: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(kinds)) or "none"


def _may_recur(model: Any) -> bool:
    """Whether any stage may have a recurrent layer; the same answer on all stages."""
    pattern = pattern_of_all_stages(model)
    if pattern is None or any(needs_a_kind(symbol) for symbol in pattern):
        return True
    return any(kind.name not in RINGS for kind in layer_kinds())  # a plugin's, in layers of any symbol


def needs_this_package(config: MambaInferenceStateConfig | None) -> bool:
    """Whether a model with these states has layers that megatron's own context and engine cannot run."""
    states: ModelStates | None = getattr(config, "states", None)
    return states is not None and any(layout.kind != MAMBA2.name for layout in states.slots.kinds)


def _recurrent_part(number: int, symbol: str, layer: torch.nn.Module) -> tuple[LayerKind, torch.nn.Module] | None:
    """Kind and module of what is recurrent in a layer; None: nothing."""
    parts = list(recurrent_modules(layer))
    if len(parts) > 1:
        raise ValueError(
            f"layer {number} has {len(parts)} recurrent parts, of kinds {[kind.name for kind, _ in parts]}"
        )
    if not parts and needs_a_kind(symbol):
        raise ValueError(
            f"layer {number} ({symbol!r}, {mixer_name(layer)}) is recurrent, and of none of the layer kinds "
            f"{[kind.name for kind in layer_kinds()]}"
        )
    return parts[0] if parts else None


def _fields_for_megatron(states: ModelStates) -> dict[str, Any]:
    """Megatron counts the bytes of a request's state as layers x (convolution + SSM), of two shapes."""
    kinds = states.slots.kinds
    if [layout.kind for layout in kinds] == [MAMBA2.name]:
        conv, ssm = kinds[0].components
        return {
            "conv_states_shape": conv.shape,
            "ssm_states_shape": ssm.shape,
            "conv_states_dtype": getattr(torch, conv.dtype),
            "ssm_states_dtype": getattr(torch, ssm.dtype),
            "mamba_chunk_size": states.quanta[0].numerator,
        }
    # Other kinds have other components: as many bytes.
    layer_bytes = ceil_div(states.slots.slot_bytes, max(1, len(states.kind_of_layer)))
    return {
        "conv_states_shape": (layer_bytes,),
        "ssm_states_shape": (0,),
        "conv_states_dtype": torch.uint8,
        "ssm_states_dtype": torch.uint8,
        "mamba_chunk_size": min(quantum.numerator for quantum in states.quanta),
    }
