"""What a GPU has left beside a model's weights. No torch."""

from __future__ import annotations

from megatron_hybrid_prefix.lab.memory import GIB
from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.pool.layout import DTYPE_BYTES

KEPT_FREE = 0.1  # of a GPU's memory: activations, CUDA graphs, the allocator


def weight_bytes(config: HybridModelConfig, tp: int) -> int:
    """Bytes of the weights on each of ``tp`` GPUs."""
    return parameter_count(config) * DTYPE_BYTES[config.dtype] // tp


def left_bytes(config: HybridModelConfig, tp: int, gpu_bytes: int) -> int:
    """Bytes for the cache on each of ``tp`` GPUs of ``gpu_bytes``, in hundredths of a GiB; 0: the weights do not fit."""
    left = int(gpu_bytes * (1 - KEPT_FREE)) - weight_bytes(config, tp)
    return int(max(0, left) * 100 // GIB / 100 * GIB)


def parameter_count(config: HybridModelConfig) -> int:
    """Parameters of a model."""
    hidden, gated = config.hidden_size, 3 if config.activation == "swiglu" else 2
    inner = config.mamba_num_heads * config.mamba_head_dim
    conv = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    keys = config.gdn_num_key_heads * config.gdn_key_head_dim
    values = config.gdn_num_value_heads * config.gdn_value_head_dim
    heads, kv = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
    experts, shared = config.num_moe_experts, config.moe_shared_expert_intermediate_size
    latent = config.moe_latent_size
    biases = experts if config.moe_router_score == "sigmoid" else 0
    layers = {
        "M": hidden * (inner + conv + config.mamba_num_heads + inner)
        + conv * (config.d_conv + 1)
        + 3 * config.mamba_num_heads
        + inner,
        "G": hidden * (2 * keys + 2 * values + 2 * config.gdn_num_value_heads + values)
        + (2 * keys + values) * config.d_conv
        + 2 * config.gdn_num_value_heads
        + config.gdn_value_head_dim,
        "*": hidden * ((2 + config.attention_output_gate) * heads + 2 * kv) + 2 * config.kv_channels * config.qk_norm,
        "-": gated * hidden * config.ffn_hidden_size,
        "E": gated * experts * config.expert_ffn_hidden_size * (latent or hidden)
        + hidden * (experts + 2 * latent + gated * shared + config.moe_shared_expert_gate)
        + biases,
    }
    embeddings = (1 if config.tie_embeddings else 2) * config.vocab_size * hidden
    # A depth of multi-token prediction has three norms, a projection of two inputs, and its layers.
    drafting = config.mtp_heads * hidden * (3 + 2 * hidden)
    pattern = config.layers + config.mtp_heads * config.mtp_layer_pattern
    return embeddings + hidden + drafting + sum(hidden + layers[symbol] for symbol in pattern)
