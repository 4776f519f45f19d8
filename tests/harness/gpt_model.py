"""A ``HybridModel`` rebuilt as megatron's ``GPTModel``: the same weights, an attention and its MLP or experts in one layer."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from megatron_hybrid_prefix.models.build import local_layer_specs
from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from megatron_hybrid_prefix.upstream.moe import get_moe_module_spec


def as_gpt_model(hybrid: Any) -> Any:
    """The model with ``experimental_attention_variant="gated_delta_net"``, from megatron's own layers.

    Where Transformer Engine's layers are in the other, it is built as in Megatron-Bridge: by megatron's function, with
    zero-centred norms.

    The symbols of ``hybrid`` come in pairs: G or *, then - or E. With pipeline stages, these have the same number of layers.
    """
    dimensions, is_local = hybrid.hybrid_config, any(isinstance(part, torch.nn.RMSNorm) for part in hybrid.modules())
    pattern = dimensions.layers
    config = copy.copy(hybrid.config)
    config.num_layers, config.is_hybrid_model = len(pattern) // 2, False
    config.experimental_attention_variant = "gated_delta_net"
    config.linear_attention_freq = [int(symbol == "G") for symbol in pattern[::2]]
    config.moe_layer_freq = [int(symbol == "E") for symbol in pattern[1::2]]
    config.layernorm_zero_centered_gamma = not is_local
    drafting = dimensions.mtp_layer_pattern
    model = GPTModel(
        config,
        _local_block(pattern, config)
        if is_local
        else get_transformer_block_with_experimental_attention_variant_spec(config),
        vocab_size=dimensions.vocab_size,
        max_sequence_length=dimensions.max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=dimensions.tie_embeddings,
        position_embedding_type="none" if dimensions.rotary_base is None else "rope",
        rotary_base=dimensions.rotary_base or 10000,
        rotary_percent=dimensions.rotary_fraction,
        mtp_block_spec=_drafting_block(drafting, config) if drafting else None,
    )
    model.hybrid_config = dimensions
    model.to(next(hybrid.parameters()).device)
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):  # made in float32
            module.to(config.params_dtype)
    copy_weights(hybrid, model)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def copy_weights(hybrid: Any, model: Any) -> None:
    """All weights of this rank, by their names."""
    given = {_gpt_name(name): value for name, value in parameters_by_global_name(hybrid)}
    for name, value in parameters_by_global_name(model):
        value.copy_(given.pop(name))
        if model.config.layernorm_zero_centered_gamma and name.endswith(("norm.weight", "norm_weight")):
            value.sub_(1.0)
    assert not given, f"the GPTModel lacks {sorted(given)}"


def _local_block(pattern: str, config: Any) -> Any:
    """The layers of this pipeline stage."""
    layers = [_layer_spec(mixer, rest, config) for mixer, rest in zip(pattern[::2], pattern[1::2], strict=True)]
    first, pp = get_transformer_layer_offset(config), parallel_state.get_pipeline_model_parallel_world_size()
    own = layers[first : first + len(layers) // pp]
    return TransformerBlockSubmodules(layer_specs=own, layer_norm=WrappedTorchNorm)


def _layer_spec(mixer: str, rest: str, config: Any) -> Any:
    specs = local_layer_specs(config.num_moe_experts or 0, qk_norm=config.qk_layernorm).submodules
    attention = (specs.gdn_layer if mixer == "G" else specs.attention_layer).submodules
    after = specs.mlp_layer.submodules
    mlp = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts) if rest == "E" else after.mlp
    own = {"pre_mlp_layernorm": after.pre_mlp_layernorm, "mlp": mlp, "mlp_bda": after.mlp_bda}
    return ModuleSpec(module=TransformerLayer, submodules=dataclasses.replace(attention, **own))


def _drafting_block(pattern: str, config: Any) -> Any:
    """The layers that draft."""
    norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
    submodules = MultiTokenPredictionLayerSubmodules(
        **norms, eh_proj=ColumnParallelLinear, mtp_model_layer=_layer_spec(*pattern, config)
    )
    layer = ModuleSpec(module=MultiTokenPredictionLayer, submodules=submodules)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)


def _gpt_name(name: str) -> str:
    """The name in a ``GPTModel`` of a weight of a ``HybridModel``."""
    name = name.replace("decoder.final_norm.", "decoder.final_layernorm.")
    name = re.sub(r"^(decoder\.layers\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) // 2}", name)
    return re.sub(r"(\.mtp_model_layer)\.layers\.\d+", r"\1", name)
