"""What the newest main of Megatron-LM has renamed, moved, dropped or re-signed of the names that this package relies on.

Main is commit d98e8a64ddf34856e74b24714e3bedb2f5a39553 of 2026-08-22 (its package_info says 0.20.0); compared with
megatron-core 0.19.2. Every row of the contract and every name of megatron in ``platform/patches.py`` and
``mcore/entrypoints/patches.py`` was looked up in the source of both with `ast`; nothing was imported. Names that are not
here are in main as in 0.19.2: same place, same kind, same parameters and defaults. That says nothing of what they do.

A row: the name as in 0.19.2, by the class or module that has it, without `megatron.core.`; what happened; what it is in
main. Where a name has two rows, both hold; the signature is then that of the new name. ``...`` stands for a default that
is no literal.
"""

from __future__ import annotations

# fmt: off
_CHANGES: dict[str, list[tuple[str, str, str]]] = {
    "inference.contexts.attention_context.mamba_metadata:MambaMetadata": [
        ("__init__", "signature",
         "(self, max_requests, max_tokens, *, max_intermediate_count, mamba_chunk_size=128, d_conv=0, "
         "decode_indices_dtype=..., gdp_num_householder=0)"),
    ],
    "inference.contexts.kv_block_allocator:KVBlockAllocator": [
        ("__init__", "signature",
         "(self, context, pool_size, paused_limit, enable_prefix_caching=False, "
         "prefix_caching_eviction_policy=...)"),
        ("active_count", "dropped", ""),
        ("paused_count", "renamed", "paused_limit"),
        ("total_avail", "renamed", "pool_avail"),
        ("total_count", "renamed", "pool_size"),
    ],
    "inference.engines.dynamic_engine:DynamicInferenceEngine": [
        ("add_request", "signature",
         "(self, request_id, prompt, sampling_params=None, precomputed_block_hashes=None, *, imgs=None, "
         "num_tiles=None, num_img_embeddings_per_tile=0, imgs_sizes=None)"),
        ("post_process_requests", "signature",
         "(self, request_ids, finished_request_ids, evict_request_ids, step_time, sample, accepted_tokens, "
         "log_probs, consumed_chunked_prefill_request_id, top_n_logprobs=None, "
         "pre_fwd_active_token_count=None, pre_fwd_step_count=None, finished_routing_block_ids=None, "
         "finished_handoff_block_ids=None, finished_handoff_ssm_slots=None, "
         "finished_handoff_decode_tokens=None)"),
    ],
    "inference.inference_client:InferenceClient": [
        ("start", "signature", "(self, loop=None, connect_timeout_seconds=None)"),
    ],
    "ssm.mamba_mixer": [
        ("causal_conv1d_varlen_states", "dropped", ""),
        ("tensor_get_slice_after", "moved", "ssm.ssm_inference.tensor_get_slice_after"),
        ("tensor_merge", "moved", "ssm.ssm_inference.tensor_merge"),
    ],
    "ssm.mamba_mixer:MambaMixer": [
        ("_dynamic_inference_prefill", "renamed", "ssm_prefill"),
        ("_dynamic_inference_prefill", "signature", "(self, zxBCdt, conv_state, ssm_state, context)"),
    ],
    "ssm.ops.causal_conv1d_varlen": [
        ("causal_conv1d_varlen_fn", "moved", "ssm.ops.common.causal_conv1d_varlen.causal_conv1d_varlen_fn"),
    ],
    "ssm.ops.ssd_bmm": [
        ("_bmm_chunk_fwd", "moved", "ssm.ops.mamba2.ssd_bmm._bmm_chunk_fwd"),
        ("_bmm_chunk_fwd", "signature",
         "(a, b, chunk_size, cu_chunk_seqlens, causal=False, output_dtype=None, target_rows=None, "
         "chunk_starts=None)"),
    ],
    "ssm.ops.ssd_chunk_scan": [
        ("_chunk_scan_fwd", "moved", "ssm.ops.mamba2.ssd_chunk_scan._chunk_scan_fwd"),
        ("_chunk_scan_fwd", "signature",
         "(cb, x, dt, dA_cumsum, C, states, cu_chunk_seqlens, out, seq_idx, D=None, z=None, "
         "initial_states=None, target_rows=None, chunk_starts=None)"),
    ],
    "ssm.ops.ssd_chunk_state": [
        ("_chunk_cumsum_fwd", "moved", "ssm.ops.mamba2.ssd_chunk_state._chunk_cumsum_fwd"),
        ("_chunk_cumsum_fwd", "signature",
         "(dt, A, chunk_size, cu_chunk_seqlens, dt_bias=None, dt_softplus=False, dt_limit=..., "
         "chunk_starts=None, target_rows=None)"),
        ("_chunk_state_fwd", "moved", "ssm.ops.mamba2.ssd_chunk_state._chunk_state_fwd"),
        ("_chunk_state_fwd", "signature",
         "(B, x, dt, dA_cumsum, cu_chunk_seqlens, states=None, states_in_fp32=True, chunk_flags=None, "
         "chunk_starts=None)"),
    ],
    "tensor_parallel.random": [
        ("model_parallel_cuda_manual_seed", "signature",
         "(seed, te_rng_tracker=False, inference_rng_tracker=False, use_cudagraphable_rng=False, tp_rank=None, "
         "ep_rank=None, etp_rank=None, gtp_remat_rank=None, egtp_remat_rank=None, force_reset_rng=False, "
         "gtp_remat_world_size=None, egtp_remat_world_size=None)"),
    ],
}
# fmt: on
# Name as in 0.19.2 (``module:Class.name`` or ``module.name``), what happened, what it is now.
RENAMED = [(f"megatron.core.{owner}.{name}", what, now) for owner, rows in _CHANGES.items() for name, what, now in rows]
