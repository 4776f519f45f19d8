"""What a budget for KV and states holds, and what weights leave of a GPU. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_hybrid_prefix.lab.capacity import Sizes
from megatron_hybrid_prefix.lab.memory import GIB
from megatron_hybrid_prefix.models.config import HybridModelConfig
from megatron_hybrid_prefix.pool.layout import DTYPE_BYTES
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout, own_bytes
from megatron_hybrid_prefix.support.arithmetic import ceil_div

KEPT_FREE = 0.1  # of a GPU's memory: activations, CUDA graphs, the allocator


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a memory is for.

    Attributes:
        block_tokens: Tokens per KV block.
        conversation_tokens: Tokens of a conversation that is kept.
        max_requests: Most running requests, each of a conversation that is kept. Their rings are set aside.
        drafts: Draft tokens of speculative decoding.
        host_bytes: Bytes of the host tier.
    """

    block_tokens: int
    conversation_tokens: int
    max_requests: int
    drafts: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a budget holds. A conversation that is kept has its KV and a checkpoint, and a state more while it runs.

    Attributes:
        layout: Pages and blocks, as the engine has them.
        block_padding_bytes: Bytes of padding behind each KV block, so that a state fills its page better.
        ring_bytes: Bytes set aside for the rings of a running request.
        cached_states: Most states that are cached.
        conversations: Conversations that are kept while as many of them run as may.
        host_states: States that the host tier holds, if it holds no KV.
        host_conversations: Conversations that the host tier keeps.
    """

    layout: PageLayout
    block_padding_bytes: int
    ring_bytes: int
    cached_states: int
    conversations: int
    host_states: int
    host_conversations: int


def plan_budget(sizes: Sizes, usage: Usage, *, cache_bytes: int, mamba_bytes: int | None = None) -> Plan:
    """Computes what ``cache_bytes`` hold.

    Args:
        sizes: The model.
        usage: What the memory is for.
        cache_bytes: Bytes for KV, checkpoints and states of running requests.
        mamba_bytes: Most bytes of cached states; None: no limit.

    Raises:
        ValueError: There is no room for a state and a KV block.
    """
    block_bytes = sizes.kv_block_bytes(usage.block_tokens)
    layout = PageLayout.of(
        block_bytes=block_bytes,
        state_bytes=sizes.checkpoint_bytes,
        live_bytes=sizes.live_bytes,
        alignment_bytes=ALIGNMENT_BYTES,
    )
    rings, requests = sizes.rings(usage.block_tokens, usage.drafts), usage.max_requests
    set_aside_bytes = own_bytes(sizes.state_bytes, rings, own_slots=1, requests=requests)
    least_bytes = set_aside_bytes + layout.least_bytes + layout.block_bytes  # one block is megatron's dummy
    if cache_bytes < least_bytes:
        needed = f"a state, a KV block, and the rings of {requests} requests need {least_bytes / GIB:.4f} GiB"
        raise ValueError(f"{needed}: {rings.bytes(requests) / GIB:.4f} of them are rings (--max-requests)")
    layout = replace(layout, total_blocks=(cache_bytes - set_aside_bytes) // layout.block_bytes - 1)
    cached_states = layout.slots
    if mamba_bytes is not None:
        cached_states = min(cached_states, mamba_bytes // sizes.checkpoint_bytes)
    conversation_blocks = ceil_div(usage.conversation_tokens, usage.block_tokens)
    running, page_live = usage.max_requests, layout.page_live or layout.page_states
    # In parts of a block, ``page_states * page_live`` of them: whole numbers.
    room, runs = layout.total_blocks * layout.page_states * page_live, layout.page_blocks * layout.page_states
    kept = (conversation_blocks * layout.page_states + layout.page_blocks) * page_live
    all_run = min(running, room // (kept + runs))
    conversations = max(all_run, (room - running * runs) // kept)
    return Plan(
        layout=layout,
        block_padding_bytes=layout.block_bytes - block_bytes,
        ring_bytes=rings.bytes(1),
        cached_states=cached_states,
        conversations=min(conversations, cached_states),
        # Padding stays on the device.
        host_states=usage.host_bytes // sizes.checkpoint_bytes,
        host_conversations=usage.host_bytes // (conversation_blocks * block_bytes + sizes.checkpoint_bytes),
    )


# --- A GPU ---


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
        "*": hidden * ((2 + config.attention_output_gate) * heads + 2 * kv)
        + (heads + kv if config.attention_post_norm else 2 * config.kv_channels) * config.qk_norm,
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
