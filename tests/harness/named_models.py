"""Dimensions of models by name: the presets, and models that only tests build."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from megatron_hybrid_prefix.models.config import HybridModelConfig, get_preset

MULTIPLIERS = {
    "attention_multiplier": 0.6,
    "embedding_multiplier": 0.4,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.8,
}
# Channels of each kind in small heads: left as they are, and slower in part and in whole.
YARN = {"yarn_factor": 4.0, "yarn_original_length": 64, "yarn_beta_fast": 8.0, "yarn_attention_factor": 1.3}
MORE = {
    # Mamba2 and Gated DeltaNet layers side by side, and experts.
    "tiny-mixed": get_preset("tiny-gdn", layer_pattern="MG*EG*-", num_moe_experts=4),
    # Gated Delta Product; beside Gated DeltaNet; and with depths of multi-token prediction.
    "tiny-gdp": get_preset("tiny", gdp_num_householder=3),
    "tiny-gdp-gdn": get_preset("tiny-gdn", layer_pattern="M*-MG*-", gdp_num_householder=3),
    "tiny-gdp-mtp": get_preset(
        "tiny-gdn", layer_pattern="M*-MG*-", gdp_num_householder=2, mtp_num_layers=3, mtp_layer_pattern="*-"
    ),
    # The same kinds, and depths of multi-token prediction.
    "tiny-gdn-mtp": get_preset("tiny-gdn", layer_pattern="G*-MG*-", mtp_num_layers=3, mtp_layer_pattern="*-"),
    # Likewise, and states of several KV blocks.
    "tiny-large-states": get_preset(
        "tiny-gdn", layer_pattern="MG*-", num_query_groups=1, mtp_num_layers=3, mtp_layer_pattern="*-"
    ),
    # Depths of multi-token prediction: attention that drafts, and Mamba2 that drafts.
    "small-mtp": get_preset("small", mtp_num_layers=2, mtp_layer_pattern="*-"),
    "tiny-mamba-mtp": get_preset("tiny", mtp_num_layers=2, mtp_layer_pattern="M-"),
    "small-mamba-mtp": get_preset("small", mtp_num_layers=2, mtp_layer_pattern="M-"),
    "small-mixed": get_preset("small-gdn", layer_pattern="M-G-M*-G-M-G*-M-G-"),
    # Pairs of layers, which are one layer each in a GPTModel.
    "tiny-gdn-pairs": get_preset("tiny-gdn", layer_pattern="G-*-G-*-"),
    "small-gdn-pairs": get_preset("small-gdn", layer_pattern="G-G-G-*-" * 2),
    # Granite 4's layers and multipliers, with experts and without.
    "tiny-granite": get_preset(
        "tiny", layer_pattern="ME*EME*E", activation="swiglu", num_moe_experts=8, moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=48, **MULTIPLIERS,
    ),
    "small-granite": get_preset(
        "granite-4.0-h-small", layer_pattern="MEME*EMEME*E", hidden_size=1024, vocab_size=32768, mamba_num_heads=32,
        num_attention_heads=8, tie_embeddings=False, num_moe_experts=24, moe_router_topk=4,
        **MULTIPLIERS | {"attention_multiplier": 0.05},
    ),
    "small-granite-dense": get_preset(
        "small", ffn_hidden_size=2816, activation="swiglu", **MULTIPLIERS | {"attention_multiplier": 0.08}
    ),
    "tiny-granite-dense": get_preset("tiny", layer_pattern="M-*-M-", activation="swiglu", **MULTIPLIERS),
    # Qwen3-Next's layers with its heads (attention's of 256 channels) and fewer, smaller experts.
    "small-qwen3-next": get_preset(
        "qwen3-next-80b-a3b", layer_pattern="GEGEGE*E" * 2, hidden_size=1024, vocab_size=32768,
        max_sequence_length=65536, num_attention_heads=8, num_moe_experts=64, moe_router_topk=4,
    ),
    # Nemotron 3 Super's layers with its heads, latent experts and head that drafts; fewer and smaller.
    "small-nemotron-3": get_preset(
        "nemotron-3-super-120b-a12b", layer_pattern="MEMEM*EMEM*E", hidden_size=1024, vocab_size=32768,
        max_sequence_length=65536, mamba_num_heads=32, num_attention_heads=8, num_moe_experts=64, moe_router_topk=6,
        moe_ffn_hidden_size=672, moe_latent_size=256, moe_shared_expert_intermediate_size=1344,
    ),
    # Nemotron 3 Nano at its real dimensions, 21 of its 52 layers: 13 billion parameters.
    "nemotron-3-nano-short": get_preset("nemotron-3-nano-30b-a3b", layer_pattern="MEMEM*EMEMEM*EMEMEM*E"),
    # Qwen3.5's layers without experts: three value heads share a key head.
    "tiny-qwen3-5": get_preset(
        "qwen3.5-27b", layer_pattern="G-G-G-*-", hidden_size=64, vocab_size=512, max_sequence_length=16896,
        gdn_num_key_heads=4, gdn_num_value_heads=12, gdn_key_head_dim=16, gdn_value_head_dim=16, num_attention_heads=4,
        num_query_groups=2, kv_channels=16, ffn_hidden_size=128, dtype="float32", long_memory=True,
    ),
    # OLMo Hybrid's layers; heads of Gated DeltaNet of no power of two.
    "tiny-olmo-hybrid": get_preset(
        "olmo-hybrid-7b", layer_pattern="G-G-G-*-", hidden_size=64, vocab_size=512, max_sequence_length=16896,
        gdn_num_key_heads=4, gdn_num_value_heads=4, gdn_key_head_dim=12, gdn_value_head_dim=24, num_attention_heads=4,
        num_query_groups=4, kv_channels=16, ffn_hidden_size=128, dtype="float32", long_memory=True,
    ),
    # OLMo Hybrid's layers with its heads, fewer of them, and YaRN, which its class may have.
    "small-olmo-hybrid": get_preset(
        "olmo-hybrid-7b", layer_pattern="G-G-*-G-*-", hidden_size=1024, vocab_size=32768, gdn_num_key_heads=8,
        gdn_num_value_heads=8, num_attention_heads=8, num_query_groups=8, ffn_hidden_size=2816, rotary_base=500_000, **YARN,
    ),
    # That of megatron-core's `TestChunkedPrefillCudaGraphs`.
    "upstream-test": HybridModelConfig(
        layer_pattern="M*-", hidden_size=256, vocab_size=10000, max_sequence_length=2048, mamba_num_heads=16,
        mamba_head_dim=64, mamba_state_dim=128, mamba_num_groups=8, num_attention_heads=16, num_query_groups=16,
        kv_channels=16, ffn_hidden_size=1024,
    ),
}  # fmt: skip


def named(name: str, **changes: Any) -> HybridModelConfig:
    """A model's dimensions, with some of them changed.

    Raises:
        ValueError: No model has this name.
    """
    if name.startswith("tiny-gdp"):
        import_module("tests.harness.delta_product").put_stand_in()  # imports megatron
    return replace(MORE[name], **changes) if name in MORE else get_preset(name, **changes)


def runs_on_megatron(config: HybridModelConfig) -> bool:
    """Whether megatron's own engine runs the model's layers."""
    return "G" not in config.symbols and not config.gdp_num_householder
