"""The least time of a decode step: what it must read and write, at the bandwidth of a plain copy."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from megatron_hybrid_prefix.bench.engines import synchronize

if TYPE_CHECKING:
    import torch

_COPY_BYTES = {"cpu": 2**24, "cuda": 2**30}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a plain copy on an idle device: the best of 12 rounds of 5 copies."""
    import torch

    source = torch.empty(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(12):
        synchronize()
        start_s = time.perf_counter()
        for _ in range(5):
            target.copy_(source)
        synchronize()
        best_s = min(best_s, (time.perf_counter() - start_s) / 5)
    return 2 * source.numel() / best_s


def floor_bytes(engine: Any, rows: int, tokens: int, touched: float = 1.0) -> int:
    """Bytes that a decode step of an engine must read and write on this rank.

    These are its weights once, without the input embedding unless it is tied to the output; each row's state, read and
    written, as megatron's decode does (one with rings writes it once in many steps); each row's keys and values.

    Args:
        engine: Any engine.
        rows: Requests that decode.
        tokens: Of each, in the KV cache.
        touched: Share of the experts that the rows go through. All count by default: few rows may need less.
    """
    from megatron_hybrid_prefix.mcore.state.layout import states_of_config
    from megatron_hybrid_prefix.upstream.config import get_attr_wrapped_model

    model = engine.controller.inference_wrapped_model.model
    model = get_attr_wrapped_model(model, "decoder", return_model_obj=True)
    weights: int = sum(weight.nbytes for weight in model.parameters())
    of_experts = sum(weight.nbytes for name, weight in model.named_parameters() if ".experts." in name)
    weights -= round((1 - touched) * of_experts)
    if model.pre_process and not (model.post_process and model.share_embeddings_and_output_weights):
        weights -= model.embedding.word_embeddings.weight.nbytes
    states = engine.context.config.mamba_inference_state_config
    state_bytes = states_of_config(states).slots.slot_bytes
    return weights + rows * (2 * state_bytes + tokens * kv_token_bytes(model.config, states))


def kv_token_bytes(config: Any, states: Any) -> int:
    """Bytes of a token's keys and values on this rank.

    Args:
        config: The model's.
        states: Megatron's description of its recurrent states.
    """
    # With more tensor-parallel ranks than key/value heads, several ranks hold the same head.
    heads: int = max(1, config.num_query_groups // config.tensor_model_parallel_size)
    attention_layers: int = sum(symbol == "*" for symbol in states.layer_type_list)
    token_bytes: int = 2 * attention_layers * heads * config.kv_channels * config.params_dtype.itemsize
    return token_bytes
