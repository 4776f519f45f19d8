"""`fits`: what a GPU holds beside a model's weights, and which budgets to give. No torch, no megatron."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.lab.capacity import VALUE_BYTES, sizes_of_config
from megatron_hybrid_prefix.models.config import HybridModelConfig

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
KEPT_FREE = 0.1  # of a GPU's memory: activations, CUDA graphs, the allocator
# Checkpoints of a conversation. The next turn resumes from one. The best fixed splits had room for about one, too: on
# conversations of 12,800 tokens 15 to 25 % for states, on short chats 65 % (docs/benchmarks.md).
CHECKPOINTS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What one of ``tp`` GPUs holds; bytes are of one GPU.

    Attributes:
        tp: Tensor-parallel size.
        weight_bytes: Weights.
        left_bytes: What is left for states and KV; negative: the weights do not fit.
        conversations: Conversations that can be kept, each with its KV and a checkpoint.
        state_bytes: Budget for their checkpoints (``mamba_gb``).
        kv_bytes: Budget for their KV and the states of running requests (``buffer_size_gb``).
    """

    tp: int
    weight_bytes: int
    left_bytes: int
    conversations: int
    state_bytes: int
    kv_bytes: int


def fits(
    config: HybridModelConfig,
    *,
    gpu_bytes: int,
    conversation_tokens: int,
    block_tokens: int,
    max_requests: int,
    state_dtype: str | None = None,
) -> list[Fit]:
    """What GPUs of ``gpu_bytes`` hold at each tensor-parallel size that divides the model's dimensions.

    Args:
        config: The model's dimensions.
        gpu_bytes: Memory of one GPU.
        conversation_tokens: Tokens of a conversation that is kept.
        block_tokens: Tokens of a KV block.
        max_requests: Most running requests.
        state_dtype: Dtype of the matrix states; None: the model's.
    """
    found = []
    weight_bytes = parameter_count(config) * VALUE_BYTES[config.dtype]
    blocks = ceil_div(conversation_tokens, block_tokens)
    for tp in TENSOR_PARALLEL_SIZES:
        try:
            config.check_parallel(tp=tp, pp=1)
            sizes = sizes_of_config("", config, tp=tp, state_dtype=state_dtype)
        except ValueError:
            continue
        weights = weight_bytes // tp
        left = int(gpu_bytes * (1 - KEPT_FREE)) - weights
        # One block is megatron's dummy.
        live = max_requests * sizes.live_bytes(0) + sizes.kv_block_bytes(block_tokens)
        kv = blocks * sizes.kv_block_bytes(block_tokens)
        states = CHECKPOINTS * sizes.state_bytes
        conversations = max(0, (left - live) // (kv + states))
        found.append(
            Fit(
                tp=tp,
                weight_bytes=weights,
                left_bytes=left,
                conversations=conversations,
                state_bytes=conversations * states,
                kv_bytes=live + conversations * kv,
            )
        )
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
