"""`build_hybrid_model`: a megatron ``HybridModel`` for a preset or a config, sharded for the running platform."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_hybrid_prefix.models import inference_layers
from megatron_hybrid_prefix.models.config import HybridModelConfig, get_preset
from megatron_hybrid_prefix.models.hf.folder import HfFolder, open_folder
from megatron_hybrid_prefix.models.multipliers import multiplier_fields, scale_attention, scale_residuals, with_parts
from megatron_hybrid_prefix.models.norms import Float32RMSNorm, NormOfHeads, fuse_sums_and_norms, norm_outputs
from megatron_hybrid_prefix.models.weights import initialise_weights
from megatron_hybrid_prefix.ops.elementwise import SwiGLU, squared_relu
from megatron_hybrid_prefix.platform import Platform, ensure_platform, running_platform
from megatron_hybrid_prefix.platform.sizes import check_sizes
from megatron_hybrid_prefix.support.environment import say

if TYPE_CHECKING:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

logger = logging.getLogger(__name__)

_OTHER_ACTIVATIONS = frozenset(
    (
        "activation_func",
        "gated_linear_unit",
        "activation_func_clamp_value",
        "glu_linear_offset",
        "bias_activation_fusion",
    )
)
"""Fields of a ``TransformerConfig`` by which MLPs compute something else than plain SwiGLU, or by other means."""


def build_hybrid_model(
    preset_or_config: str | HybridModelConfig | None = None,
    seed: int = 0,
    *,
    hf: str | os.PathLike[str] | HfFolder | None = None,
    platform: Platform | None = None,
    on_read: Callable[[int, int], object] | None = None,
    **overrides: Any,
) -> HybridModel:
    """Build this rank's shard of a hybrid model, with random weights or those of a Hugging Face folder.

    Random weights depend on ``seed`` and the layer's global name only, so every tensor- and pipeline-parallel layout holds
    the same model.

    Args:
        preset_or_config: A name from `PRESETS`, or dimensions. None: those of ``hf``.
        seed: Seed of random weights.
        hf: A folder with ``config.json`` and ``*.safetensors``, or what `open_folder` returned. Every rank reads its own part
            of the weights. Nothing is downloaded.
        platform: The result of `ensure_platform`; by default the running platform (tp=1, pp=1 where none runs).
        on_read: As of `load_hf_weights`.
        **overrides: Fields of megatron's ``TransformerConfig``. By default, a model on a GPU is built for CUDA graphs of the whole
            forward (``cuda_graph_impl="local"``, ``inference_cuda_graph_scope="block"``); of layers where these would be wrong; for
            none where its experts cannot be captured. A line says so. ``transformer_impl`` is
            "transformer_engine", "local" (megatron-core's own linear layers and PyTorch's norms) or "inference_optimized"
            (megatron's, with experts of its own); by default Transformer Engine on a GPU where it is installed.

    Returns:
        The model in ``eval`` mode on the platform's device; its dimensions are ``model.hybrid_config``.

    Raises:
        ValueError: Unknown preset, dimensions that this tp/pp/ep cannot shard, CUDA graphs that cannot be captured, layers
            that this machine does not have, or fields that do not go with this package's experts. With ``hf``, also as of
            `open_folder` and `load_hf_weights`.
        PlatformError: ``overrides``, or ``platform``, have other parallel sizes than those that run.
    """
    if preset_or_config is None and hf is None:
        raise ValueError("build_hybrid_model needs a preset, dimensions, or hf=FOLDER")
    if platform is None:
        platform = running_platform() or ensure_platform()
    folder = None if hf is None else _open_on_all_ranks(hf)
    if preset_or_config is None and folder is not None:
        preset_or_config = folder.config
    config = preset_or_config if isinstance(preset_or_config, HybridModelConfig) else get_preset(str(preset_or_config))
    platform.check_cuda_graphs(overrides.get("cuda_graph_impl", "none"))
    transformer_impl = _transformer_impl(overrides.get("transformer_impl"), platform, config)
    overrides = _graph_fields(config, transformer_impl, platform, overrides) | overrides
    if transformer_impl == inference_layers.NAME:
        inference_layers.check_inference_layers(config, platform, overrides)
        overrides = inference_layers.inference_fields(config, platform) | overrides
    elif config.has_experts:
        from megatron_hybrid_prefix.models.experts import check_capture, check_layer

        check_layer(overrides)
        if overrides.get("cuda_graph_impl", "none") != "none":
            check_capture(getattr(torch, config.dtype), platform.ep, platform.device)
    elif transformer_impl == "local" and config.activation == "swiglu" and not overrides.keys() & _OTHER_ACTIVATIONS:
        overrides = {"use_te_activation_func": True} | overrides  # in fact that of `local_layer_specs`
    staged_pattern = config.check_parallel(tp=platform.tp, pp=platform.pp, ep=platform.ep, etp=platform.etp)

    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_hybrid_prefix.upstream.delta_net import mark_packed_parameters, scale_beta

    transformer_config = _transformer_config(config, platform, overrides)
    check_sizes(transformer_config, "the model's config")
    model = HybridModel(
        config=transformer_config,
        hybrid_stack_spec=_layer_specs(config, transformer_impl),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_sequence_length,
        hybrid_layer_pattern="/".join([staged_pattern, *[config.mtp_layer_pattern] * config.mtp_num_layers]),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=config.tie_embeddings,
        position_embedding_type="none" if config.rotary_base is None or config.yarn_factor else "rope",
        rotary_base=config.rotary_base or 10000,
        rotary_percent=config.rotary_fraction,
    )
    if config.yarn_factor is not None:  # HybridModel's own would turn whole heads
        model.position_embedding_type, model.rotary_pos_emb = "yarn", _yarn_embedding(config)
    model.hybrid_config = config
    model.hf_model_type = None if folder is None else folder.model_type
    scale_attention(model)
    norm_outputs(model, config)
    if (config.gdn_beta_scale, config.gated_norm_epsilon) != (1.0, None):
        scale_beta(model, config.gdn_beta_scale, config.gated_norm_epsilon)
    if platform.has_transformer_engine and transformer_impl == "local":
        _use_local_final_norm(model)
    model.requires_grad_(False)
    model.to(platform.device)
    for module in model.modules():
        # The local norms are made in float32 whatever the parameters are.
        if type(module) is torch.nn.RMSNorm and config.float32_norms:
            module.__class__ = Float32RMSNorm
        elif isinstance(module, torch.nn.RMSNorm):
            module.to(getattr(torch, config.dtype))
    if config.float32_norms:
        # Said at the first forward: PyTorch's one-kernel norm wants one dtype, and several kernels compute this one.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    if platform.device.type == "cuda":
        fuse_sums_and_norms(model, config.residual_multiplier)
    mark_packed_parameters(model)
    if folder is None:
        initialise_weights(model, config, seed)
    else:
        from megatron_hybrid_prefix.models.hf_load import load_hf_weights

        load_hf_weights(model, folder, on_read=on_read)
    return model.eval()


def _open_on_all_ranks(hf: str | os.PathLike[str] | HfFolder) -> HfFolder:
    """The folder, its files checked before a model is built. An error on one rank is raised on all."""
    from megatron_hybrid_prefix.models.checkpoint import together

    found: list[HfFolder] = []

    def check() -> None:
        folder = hf if isinstance(hf, HfFolder) else open_folder(hf)
        folder.check_weights()
        found.append(folder)

    together(check)
    return found[0]


def _transformer_config(config: HybridModelConfig, platform: Platform, overrides: dict[str, Any]) -> Any:
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_hybrid_prefix.upstream.graphs import BLOCK, use_layers_where_blocks_are_wrong

    dtype = getattr(torch, config.dtype)
    fields: dict[str, Any] = dict(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        **_recurrent_fields(config),
        is_hybrid_model=True,
        normalization="RMSNorm",
        layernorm_epsilon=config.layernorm_epsilon,
        activation_func={"relu2": squared_relu, "gelu": F.gelu, "swiglu": F.silu}[config.activation],
        gated_linear_unit=config.activation == "swiglu",
        attention_output_gate=config.attention_output_gate,
        qk_layernorm=config.qk_norm,
        **multiplier_fields(config),
        add_bias_linear=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=platform.tp,
        pipeline_model_parallel_size=platform.pp,
        expert_model_parallel_size=platform.ep,
        mtp_num_layers=config.mtp_num_layers or None,
        mtp_use_repeated_layer=config.mtp_use_repeated_layer,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Weights are filled in afterwards, the same for every layout.
        perform_initialization=False,
        use_cpu_initialization=False,
        inference_rng_tracker=True,
        # Megatron's default are three forwards before each capture; kernels are compiled and chosen by the first.
        cuda_graph_warmup_steps=1,
        # Fusions that need Transformer Engine, APEX or a compiler; the dynamic path does not use them.
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    if config.has_experts:
        fields |= dict(
            expert_tensor_parallel_size=platform.etp,
            num_moe_experts=config.num_moe_experts,
            moe_router_topk=config.moe_router_topk,
            moe_router_score_function=config.moe_router_score,
            moe_router_enable_expert_bias=config.moe_router_score == "sigmoid",
            moe_router_dtype="fp32" if config.moe_router_score == "sigmoid" else None,
            moe_router_num_groups=config.moe_router_groups or None,
            moe_router_group_topk=config.moe_router_topk_groups or None,
            moe_router_topk_scaling_factor=None if config.moe_router_scaling == 1.0 else config.moe_router_scaling,
            moe_ffn_hidden_size=config.expert_ffn_hidden_size,
            moe_latent_size=config.moe_latent_size or None,
            moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size or None,
            moe_shared_expert_gate=config.moe_shared_expert_gate,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            # Megatron's default needs NVLink multicast.
            inference_moe_token_dispatcher_type="nccl",
        )
    scope = overrides.get("inference_cuda_graph_scope")
    if getattr(scope, "name", scope) not in (None, "none", "layer", BLOCK):
        raise ValueError(f"inference_cuda_graph_scope={scope!r}: use {BLOCK!r} or 'layer'")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")  # about its own default
        made = TransformerConfig(**(fields | overrides))
    if config.yarn_factor is not None:
        for name in ("apply_rope_fusion", "fused_single_qkv_rope"):
            if getattr(made, name):
                raise ValueError(f"{name}=True: megatron's fused kernels leave out yarn_attention_factor")
        # No fields, but attention layers look for them.
        factors = {"yarn_rotary_scaling_factor": config.yarn_factor, "yarn_mscale": _mscale(config)}
        vars(made).update(factors, yarn_mscale_all_dim=0.0)
    problem = use_layers_where_blocks_are_wrong(made)
    if problem is not None and os.environ.get("RANK", "0") == "0":
        logger.warning("inference_cuda_graph_scope='block': %s; 'layer' is used", problem)
    return made


def _mscale(config: HybridModelConfig) -> float:
    """megatron's ``mscale`` that gives ``yarn_attention_factor`` where ``mscale_all_dim`` is 0."""
    return (config.yarn_attention_factor - 1.0) / (0.1 * math.log(config.yarn_factor or 0.0))


def _yarn_embedding(config: HybridModelConfig) -> Any:
    """megatron's class, built for the channels that are turned: it ignores ``rotary_percent``."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    embedding = YarnRotaryEmbedding(
        int(config.rotary_fraction * config.kv_channels),
        rotary_base=config.rotary_base,
        scaling_factor=config.yarn_factor,
        original_max_position_embeddings=config.yarn_original_length,
        beta_fast=config.yarn_beta_fast,
        beta_slow=config.yarn_beta_slow,
        mscale=_mscale(config),
        mscale_all_dim=0.0,
        correction_range_round_to_int=config.yarn_truncate,
    )
    del embedding.cos_cached, embedding.sin_cached  # of all positions, which this model does not read
    return embedding


def _graph_fields(
    config: HybridModelConfig, transformer_impl: str, platform: Platform, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The CUDA graphs that a model is built for where the caller says nothing of them; see `build_hybrid_model`."""
    if platform.device.type != "cuda" or given.get("cuda_graph_impl", "local") != "local":
        return {}
    from megatron_hybrid_prefix.upstream.graphs import BLOCK

    fields: dict[str, Any] = {"cuda_graph_impl": "local"}
    if config.has_experts and transformer_impl != inference_layers.NAME and "cuda_graph_impl" not in given:
        from megatron_hybrid_prefix.models.experts import check_capture, what_is_missing

        missing = what_is_missing(_transformer_config(config, platform, dict(given)), platform.etp)
        try:
            check_capture(getattr(torch, config.dtype), platform.ep, platform.device)
        except ValueError as error:
            missing = str(error)
        if missing is not None:
            say(logger, f"no CUDA graphs: {missing}")
            return {}
    return fields | {"inference_cuda_graph_scope": BLOCK}


def _recurrent_fields(config: HybridModelConfig) -> dict[str, int]:
    """Dimensions of the recurrent layers that there are; megatron's defaults stay for others."""
    from megatron_hybrid_prefix.upstream import delta_product

    fields: dict[str, int] = {}
    if "M" in config.symbols:
        names = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")
        fields |= {name: getattr(config, name) for name in names}
        if config.gdp_num_householder and delta_product.IS_THERE:
            fields["gdp_num_householder"] = config.gdp_num_householder
    if "G" in config.symbols:
        fields |= dict(
            linear_num_key_heads=config.gdn_num_key_heads,
            linear_num_value_heads=config.gdn_num_value_heads,
            linear_key_head_dim=config.gdn_key_head_dim,
            linear_value_head_dim=config.gdn_value_head_dim,
            linear_conv_kernel_dim=config.d_conv,
        )
    return fields


def _transformer_impl(asked: str | None, platform: Platform, config: HybridModelConfig) -> str:
    if asked is None:
        return "transformer_engine" if platform.has_transformer_engine and not config.attention_post_norm else "local"
    if asked not in ("transformer_engine", "local", inference_layers.NAME):
        raise ValueError(f"transformer_impl={asked!r}: use 'transformer_engine', 'local' or {inference_layers.NAME!r}")
    if asked == "transformer_engine" and not platform.has_transformer_engine:
        raise ValueError("transformer_impl='transformer_engine' needs a GPU and an installed Transformer Engine")
    if asked != "local" and config.attention_post_norm:
        raise ValueError(f"transformer_impl={asked!r} has no norms behind layers (attention_post_norm); use 'local'")
    return asked


def _use_local_final_norm(model: Any) -> None:
    """Where Transformer Engine is installed, megatron's ``HybridStack`` takes its norm as the final one, whatever the spec."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    stack = model.decoder
    if hasattr(stack, "final_norm"):
        stack.final_norm = WrappedTorchNorm(
            config=stack.config, hidden_size=stack.config.hidden_size, eps=stack.config.layernorm_epsilon
        )


def _layer_specs(config: HybridModelConfig, transformer_impl: str) -> Any:
    from megatron_hybrid_prefix.upstream import delta_product

    if transformer_impl == "local":
        spec = local_layer_specs(config.num_moe_experts, qk_norm=config.qk_norm)
    else:
        spec = _te_layer_specs(config, optimized=transformer_impl == inference_layers.NAME)
    spec = scale_residuals(spec, config.residual_multiplier)
    if config.qk_norm and config.attention_post_norm:
        q, k = (partial(NormOfHeads, heads) for heads in ("num_attention_heads", "num_query_groups"))
        attention = spec.submodules.attention_layer
        normed = with_parts(attention.submodules.self_attention, q_layernorm=q, k_layernorm=k)
        spec = with_parts(spec, attention_layer=with_parts(attention, self_attention=normed))
    mamba = spec.submodules.mamba_layer
    mixer = mamba.submodules.mixer
    if config.gdp_num_householder:
        parts = mixer.submodules
        mixer = delta_product.mixer_spec(parts.in_proj, parts.out_proj, config.gdp_num_householder)
    mixer = dataclasses.replace(mixer, params=mixer.params | {"chunk_size": config.chunk_size, "d_conv": config.d_conv})
    return with_parts(spec, mamba_layer=with_parts(mamba, mixer=mixer))


def _te_layer_specs(config: HybridModelConfig, *, optimized: bool) -> Any:
    """Megatron's spec of hybrid models: for inference, or with this package's experts."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_inference_stack_spec, hybrid_stack_spec

    from megatron_hybrid_prefix.upstream.packages import TENorm

    spec = hybrid_inference_stack_spec if optimized else hybrid_stack_spec
    attention = spec.submodules.attention_layer
    if config.qk_norm:  # megatron's spec has no such norms: attention would be built without them
        normed = with_parts(attention.submodules.self_attention, q_layernorm=TENorm, k_layernorm=TENorm)
        attention = with_parts(attention, self_attention=normed)
    moe = spec.submodules.moe_layer
    if not optimized:
        moe = with_parts(moe, mlp=_experts_spec(config.num_moe_experts, use_te=True))
    return with_parts(spec, attention_layer=attention, moe_layer=moe)


def _experts_spec(num_moe_experts: int, *, use_te: bool) -> Any:
    """Router and shared expert are megatron's, with Transformer Engine's linear layers or without."""
    from megatron_hybrid_prefix.models.experts import ExpertsLayer, build_experts
    from megatron_hybrid_prefix.upstream.moe import get_moe_module_spec

    spec = get_moe_module_spec(use_te=use_te, num_experts=num_moe_experts)
    return partial(ExpertsLayer, submodules=dataclasses.replace(spec.keywords["submodules"], experts=build_experts))


def local_layer_specs(num_moe_experts: int = 0, *, qk_norm: bool = False) -> Any:
    """Layers from megatron-core's own linear layers and PyTorch norms, for machines without Transformer Engine.

    Args:
        num_moe_experts: Experts of a mixture-of-experts layer.
        qk_norm: Whether attention layers normalise queries and keys.

    With ``use_te_activation_func``, which is for SwiGLU alone, MLPs compute it in one kernel.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    from megatron_hybrid_prefix.upstream.delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron_hybrid_prefix.upstream.mixer import MambaMixer, MambaMixerSubmodules

    mixer = ModuleSpec(
        module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    )
    delta_net = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=WrappedTorchNorm if qk_norm else None,
            k_layernorm=WrappedTorchNorm if qk_norm else None,
        ),
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=SwiGLU)
    prediction = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=WrappedTorchNorm, hnorm=WrappedTorchNorm, eh_proj=ColumnParallelLinear, layer_norm=WrappedTorchNorm
        ),
    )

    def with_attention(attention: Any) -> Any:
        parts = {"input_layernorm": WrappedTorchNorm, "self_attention": attention}
        submodules = TransformerLayerSubmodules(**parts, self_attn_bda=get_bias_dropout_add)
        return ModuleSpec(module=TransformerLayer, submodules=submodules)

    def with_mlp(layer: type, mlp: Any) -> Any:
        parts = {"pre_mlp_layernorm": WrappedTorchNorm, "mlp": mlp, "mlp_bda": get_bias_dropout_add}
        return ModuleSpec(module=layer, submodules=TransformerLayerSubmodules(**parts))

    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add),
            ),
            gdn_layer=with_attention(delta_net),
            attention_layer=with_attention(attention),
            mlp_layer=with_mlp(MLPLayer, partial(MLP.as_mlp_submodule, submodules=mlp)),
            moe_layer=with_mlp(MoETransformerLayer, _experts_spec(num_moe_experts, use_te=False)),
            mtp_block_spec=ModuleSpec(
                module=MultiTokenPredictionBlock,
                submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[prediction]),
            ),
        ),
    )
