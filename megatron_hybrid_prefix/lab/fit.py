"""What a GPU holds beside a model's weights, and from how many tokens on loading a prefix beats computing it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hybrid_prefix.lab.budget import Plan, Usage, plan_budget
from megatron_hybrid_prefix.lab.capacity import sizes_of_config
from megatron_hybrid_prefix.lab.memory import GIB
from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.pool.layout import DTYPE_BYTES

GB = 10**9
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
    usage: Usage,
    *,
    gpu_bytes: int,
    state_dtype: str | None = None,
) -> list[Fit]:
    """What GPUs of ``gpu_bytes`` hold at each tensor-parallel size that divides the model's dimensions.

    Args:
        config: The model's dimensions.
        usage: What the memory is for.
        gpu_bytes: Memory of one GPU.
        state_dtype: Dtype of the matrix states; None: the model's.
    """
    found = []
    weight_bytes = parameter_count(config) * DTYPE_BYTES[config.dtype]
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
            plan: Plan | None = plan_budget(sizes, usage, cache_bytes=cache)
        except ValueError:
            plan = None
        kept = plan if plan is not None and plan.conversations else None
        found.append(Fit(tp=tp, weight_bytes=weights, left_bytes=left, cache_bytes=cache, plan=kept))
    return found


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


# --- A shared folder -------------------------------------------------------------------------------------------------

LOAD_RATES = (1, 2, 4, 8, 16, 32)  # GB/s for one rank: a network, disks, the page cache


def break_even_tokens(kv_token_bytes: int, state_bytes: int, gb_per_s: float, tokens_per_s: float) -> int | None:
    """Fewest tokens of a prefix whose KV and state load in less time than they are computed; None: never.

    Args:
        kv_token_bytes: Bytes of the KV of a token on one rank.
        state_bytes: Bytes of a state on one rank.
        gb_per_s: What the rank reads, in 10^9 bytes per second.
        tokens_per_s: Prompt tokens that the ranks of a model compute per second.
    """
    gain_bytes = gb_per_s * GB / tokens_per_s - kv_token_bytes  # of a token
    return None if gain_bytes <= 0 else int(state_bytes / gain_bytes) + 1


def break_even(kv_token_bytes: int, state_bytes: int, tokens_per_s: float | None) -> dict[int, int | None]:
    """`break_even_tokens` by GB/s; empty if the speed of prefill is not known."""
    if tokens_per_s is None:
        return {}
    return {rate: break_even_tokens(kv_token_bytes, state_bytes, rate, tokens_per_s) for rate in LOAD_RATES}


def break_even_rows(found: dict[int, int | None]) -> list[tuple[str, str]]:
    """Rows of the report."""
    return [
        (f"loading from a shared tier at {rate} GB/s pays from", "never" if tokens is None else f"{tokens:,} tokens")
        for rate, tokens in found.items()
    ]
