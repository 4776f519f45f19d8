"""`fits`: what a GPU holds beside a model's weights, and which budget to give. No torch, no megatron."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hybrid_prefix.lab.budget import Plan, plan_budget
from megatron_hybrid_prefix.lab.capacity import VALUE_BYTES, sizes_of_config
from megatron_hybrid_prefix.lab.memory import GIB
from megatron_hybrid_prefix.models.config import HybridModelConfig

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
KEPT_FREE = 0.1  # of a GPU's memory: activations, CUDA graphs, the allocator


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What one of ``tp`` GPUs holds; bytes are of one GPU.

    Attributes:
        tp: Tensor-parallel size.
        weight_bytes: Weights.
        left_bytes: What is left for states and KV; negative: the weights do not fit.
        cache_bytes: The budget (``cache_gb``): what is left, in hundredths of a GiB.
        plan: What it holds; None: not one conversation.
    """

    tp: int
    weight_bytes: int
    left_bytes: int
    cache_bytes: int
    plan: Plan | None


def fits(
    config: HybridModelConfig,
    *,
    gpu_bytes: int,
    conversation_tokens: int,
    block_tokens: int,
    max_requests: int,
    drafts: int = 0,
    host_bytes: int = 0,
    state_dtype: str | None = None,
) -> list[Fit]:
    """What GPUs of ``gpu_bytes`` hold at each tensor-parallel size that divides the model's dimensions.

    Args:
        config: The model's dimensions.
        gpu_bytes: Memory of one GPU.
        conversation_tokens, block_tokens, max_requests, drafts, host_bytes: See `plan_budget`.
        state_dtype: Dtype of the matrix states; None: the model's.
    """
    found = []
    weight_bytes = parameter_count(config) * VALUE_BYTES[config.dtype]
    for tp in TENSOR_PARALLEL_SIZES:
        try:
            config.check_parallel(tp=tp, pp=1)
            sizes = sizes_of_config("", config, tp=tp, state_dtype=state_dtype)
        except ValueError:
            continue
        weights = weight_bytes // tp
        left = int(gpu_bytes * (1 - KEPT_FREE)) - weights
        cache = int(max(0, left) * 100 // GIB / 100 * GIB)
        try:
            plan: Plan | None = plan_budget(
                sizes,
                cache_bytes=cache,
                block_tokens=block_tokens,
                conversation_tokens=conversation_tokens,
                max_requests=max_requests,
                drafts=drafts,
                host_bytes=host_bytes,
            )
        except ValueError:
            plan = None
        kept = plan if plan is not None and plan.conversations else None
        found.append(Fit(tp=tp, weight_bytes=weights, left_bytes=left, cache_bytes=cache, plan=kept))
    return found


def parameter_count(config: HybridModelConfig) -> int:
    """Parameters of a model, without layers of multi-token prediction."""
    hidden, gated = config.hidden_size, 3 if config.activation == "swiglu" else 2
    inner = config.mamba_num_heads * config.mamba_head_dim
    conv = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    keys = config.gdn_num_key_heads * config.gdn_key_head_dim
    values = config.gdn_num_value_heads * config.gdn_value_head_dim
    heads, kv = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
    experts, shared = config.num_moe_experts, config.moe_shared_expert_intermediate_size
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
        "E": hidden * (experts + gated * (experts * config.expert_ffn_hidden_size + shared))
        + hidden * config.moe_shared_expert_gate
        + biases,
    }
    embeddings = (1 if config.tie_embeddings else 2) * config.vocab_size * hidden
    return embeddings + hidden + sum(config.count(symbol) * (hidden + count) for symbol, count in layers.items())
