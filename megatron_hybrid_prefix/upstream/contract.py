"""Everything that this package relies on in megatron-core: every private name, every override, every attribute it reads.

`CONTRACT` is the table. Each row says how we use the name (see `check.Entry`), in which of our modules, and what for.
`check_contract` compares the table with the installed version before the first engine is built. Without it, an override of a
renamed method would silently never be called. The table omits replaced names (``platform/patches.py``,
``mcore/entrypoints/patches.py``), which are checked when they are replaced, and megatron's documented API to build models.

``tests/upstream/test_contract.py`` fails and names the row if one is missing. Longer than 400 lines because it is one table.
"""

from __future__ import annotations

import functools

from megatron_hybrid_prefix.errors import UpstreamDriftError
from megatron_hybrid_prefix.upstream.check import (
    Entry,
    attributes,
    calls,
    classes,
    constants,
    keys,
    marks,
    overrides,
    problem_of,
    properties,
    rows_of,
    wraps,
)
from megatron_hybrid_prefix.upstream.version import REMEDY, check_version

_INFERENCE = "megatron.core.inference"
_CONTEXTS = f"{_INFERENCE}.contexts"
_CONTROLLERS = f"{_INFERENCE}.text_generation_controllers.text_generation_controller"
_COORDINATORS = f"{_INFERENCE}.data_parallel_inference_coordinator"
_GRAPHS = "megatron.core.transformer.cuda_graphs"
_MAPPING = "megatron.core.dist_checkpointing.mapping"
_MOE = "megatron.core.transformer.moe"
_SAVING = "megatron.core.dist_checkpointing.strategies.torch"
_SSM = "megatron.core.ssm"

# -- the context: rows of requests, KV blocks, recurrent states ---------------------------------------------------------

CONTEXT = rows_of(
    f"{_CONTEXTS}.dynamic_context:DynamicInferenceContext",
    overrides(
        "__init__",
        "(self, model_config, inference_config)",
        "mcore/context/context mcore/entrypoints/build",
        "the cache is made after it",
    ),
    overrides("_allocate_memory_buffer", "(self)", "upstream/context", "KV in the memory that it shares with states"),
    overrides(
        "reinitialize_inference_state_buffers",
        "(self)",
        "upstream/context",
        "KV memory begins with zeros; can be repeated",
    ),
    overrides(
        "_allocate_mamba_states",
        "(self)",
        "upstream/context",
        "live states and checkpoints in one tensor a component",
    ),
    overrides(
        "_compute_prefix_match",
        "(self, req, prefill_chunk_length, record_mamba_match=False)",
        "upstream/context",
        "our cache matches the prompt",
    ),
    overrides(
        "_execute_pending_mamba_ops",
        "(self)",
        "upstream/context",
        "new requests start from zero states, in layers of all kinds",
    ),
    overrides(
        "mamba_states_cache",
        "(self, layer_number, intermediate=False)",
        "upstream/context",
        "states of a layer of any kind, by slot",
    ),
    overrides(
        "check_availability",
        "(self, req)",
        "mcore/context/context mcore/engine/scheduling upstream/engine",
        "whether there is room, cached blocks included",
    ),
    overrides(
        "add_request",
        "(self, req, prefill_chunk_length=None)",
        "mcore/context/context mcore/runner",
        "admits a request and plans its step",
    ),
    wraps(
        "initialize_attention_state",
        "(self, *, construct_graph_dimensions=None, is_expert_parallel_dummy_cuda_graph_step=False, "
        "transfer_bookkeeping_to_gpu=True, record_bookkeeping_done_event=False)",
        "mcore/context/context mcore/context/slot_context",
        "a forward begins: ranks compare decisions; prefills of one token are allowed",
    ),
    overrides(
        "transfer_bookkeeping_to_gpu",
        "(self, skip_token_input_ids=False, record_done_event=False)",
        "mcore/context/context",
        "first copies source and target slots, and waits for loads from the host",
    ),
    overrides(
        "update_requests",
        "(self, active_requests_mask, new_tokens, new_speculative_tokens=None)",
        "mcore/context/context mcore/context/slot_context",
        "the forward succeeded (legacy scheduling): publishes what was not published at its launch",
    ),
    wraps(
        "_processed_log_probs",
        "(self, logits, n_active, active_query_lengths, sampling, row_to_request=None)",
        "upstream/context",
        "log-probs of rows that do not depend on each other",
    ),
    wraps(
        "calculate_log_probs_tensors",
        "(self, logits, new_tokens, only_last_token_logits=False, sampling=None, row_to_request=None)",
        "mcore/context/slot_context",
        "without padding rows",
    ),
    overrides(
        "resolve_requests",
        "(self, active_requests_mask)",
        "mcore/context/context",
        "the forward succeeded (asynchronous scheduling): publishes what was not published at its launch",
    ),
    overrides(
        "prepare_requests",
        "(self)",
        "mcore/context/context mcore/context/slot_context",
        "the next decode begins: filled blocks get their keys",
    ),
    overrides(
        "_get_async_sched_rows_requiring_new_block",
        "(self)",
        "upstream/context",
        "drafts past the end of an answer need no block",
    ),
    overrides("can_prepare_requests", "(self)", "mcore/context/slot_context", "not between two chunks of a prompt"),
    wraps(
        "evict_overflow_paused_requests",
        "(self, active_request_count, next_tokens, new_speculative_tokens=None)",
        "mcore/context/context",
        "preempted requests swap out to the host",
    ),
    overrides(
        "release_memory_blocks_from_request_indexes",
        "(self, request_indexes)",
        "mcore/context/context mcore/context/slot_context",
        "requests end: blocks with a key stay cached",
    ),
    wraps(
        "reset_metadata",
        "(self, preserve_prefix_cache=False, *, preserve_counters=False)",
        "mcore/context/context upstream/context",
        "drops KV and states together, also while suspended",
    ),
    overrides("reset_tensors", "(self)", "upstream/context", "a suspended context may have no tensors"),
    overrides(
        "deallocate_inference_state_buffers",
        "(self)",
        "mcore/context/context mcore/context/slot_context",
        "the tensors of states are dropped with megatron's",
    ),
    calls(
        "get_index_of_chunked_prefill_request",
        "(self, safe=True)",
        "mcore/context/rows mcore/engine/controller mcore/engine/removals",
        "whether its row is hidden",
    ),
    calls("is_decode_only", "(self)", "mcore/context/slot_context upstream/context", "whether a step prefills"),
    calls(
        "round_up_tokens", "(value, tp_size=None)", "mcore/entrypoints/build", "a step's tokens as megatron pads them"
    ),
    attributes("_pending_mamba_zeros", "upstream/context", "a request that resumes needs no zeroed state"),
    attributes("_pending_mamba_transfer", "upstream/context", "whether a step has prefill metadata to copy"),
    attributes(
        "_cpu_mamba_batch_indices_decode _cpu_mamba_batch_indices_prefill _cpu_mamba_seq_idx _cpu_mamba_cu_seqlens "
        "_cpu_mamba_cu_chunk_seqlens _cpu_mamba_last_chunk_indices _cpu_mamba_seq_idx_for_varlen _cpu_mamba_conv_seq_idx "
        "_cpu_mamba_conv_seq_start gpu_view",
        "upstream/context",
        "buffers that Mamba metadata is bound to",
    ),
    attributes(
        "mamba_conv_states mamba_ssm_states mamba_intermediate_conv_states mamba_intermediate_ssm_states",
        "mcore/context/slot_context",
        "set by our allocation, read by megatron's layers",
    ),
    attributes(
        "_offloadable_tensor_names _offloadable_cpu_backups _uses_torch_memory_saver unified_memory_level "
        "kv_cache_management_mode is_tensor_state_allocated",
        "upstream/context mcore/context/context mcore/engine/engine",
        "suspended engines free their memory, that of the states included",
    ),
    attributes(
        "mamba_metadata mamba_chunk_size is_hybrid_model layer_map",
        "upstream/context mcore/context/admission mcore/context/context mcore/context/decode mcore/context/reports mcore/context/rows mcore/context/slot_context",
        "the layout of states, and the slot of each request",
    ),
    attributes(
        "memory_buffer cache_mla_latent", "mcore/state/moves mcore/context/verify", "KV blocks are moved, and compared"
    ),
    attributes("enable_prefix_caching kv_block_allocator config", "mcore/context/context", "set, replaced, read"),
    attributes(
        "num_attention_layers num_attention_heads_per_partition hidden_size_per_attention_head kv_reduced_dim params_dtype",
        "upstream/context mcore/context/context",
        "shape of the KV of a block",
    ),
    attributes(
        "block_size_tokens max_requests max_tokens max_sequence_length num_speculative_tokens",
        "upstream/context mcore/context/admission mcore/context/context mcore/context/reports mcore/context/rows",
        "sizes",
    ),
    attributes(
        "request_ids request_query_lengths request_in_prefill_status_tensor request_output_lengths "
        "request_kv_length_offsets request_kv_block_counts request_last_kv_block_id request_last_kv_block_offset "
        "request_to_kv_block_ids request_metadata",
        "upstream/context mcore/context/admission mcore/context/context mcore/context/decode mcore/context/rows",
        "all tensors with one row per request; we move rows, too",
    ),
    attributes(
        "total_request_count paused_request_count num_prefill_requests active_token_count chunked_prefill_request_id "
        "paused_tokens paused_speculative_tokens",
        "mcore/context/admission mcore/context/context mcore/context/decode mcore/context/rows",
        "number and kind of rows",
    ),
    attributes("padded_batch_dimensions", "upstream/mixer", "what a step decodes and prefills, padding included"),
    properties("num_decode_requests", "upstream/controller", "they have rows for their drafts"),
    attributes("active_request_metadata", "mcore/engine/controller", "options of active requests, by row"),
    attributes("token_to_input_ids", "mcore/context/decode", "tokens of a forward; gives the generated tokens"),
    attributes(
        "token_to_block_idx token_to_pos_ids token_to_request_idx",
        "mcore/context/rows upstream/context",
        "KV blocks of the tokens",
    ),
    attributes("active_attn_metadata", "upstream/context", "attention metadata of a step"),
    attributes("lifetime_prefill_token_count", "mcore/runner", "tokens that a prefill computed"),
    attributes("block_size_bytes", "mcore/context/context", "what megatron would allocate"),
    attributes("is_creating_cuda_graphs", "mcore/context/context", "a forward of a capture is of no request"),
    attributes(
        "moe_enable_routing_replay",
        "mcore/context/context",
        "whether megatron keeps the routing of a step after its launch",
    ),
    attributes(
        "prefix_cache_hits prefix_cache_blocks_matched prefix_cache_prefill_computed_tokens "
        "prefix_cache_prefill_skipped_tokens",
        "mcore/engine/engine upstream/context",
        "statistics of a step, reset with it",
    ),
    attributes("mamba_slot_allocator", "bench/engines", "reports the size of megatron's own cache"),
    marks("_mamba_num_matched_blocks", "upstream/context", "set on a request with its match, as in megatron"),
)

CONTEXT_PARTS = rows_of(
    f"{_CONTEXTS}.dynamic_context",
    keys("mha_metadata", "upstream/context", "key of `active_attn_metadata`"),
    classes(
        "ContextOverflowError BlockOverflowError TokenOverflowError", "upstream/names", "reasons to refuse admission"
    ),
    calls(
        "RequestOverflowError",
        "(request_id, message=None, *, is_transient=True)",
        "upstream/names",
        "raised if no row is free",
    ),
)

BLOCKS = rows_of(
    f"{_CONTEXTS}.kv_block_allocator:KVBlockAllocator",
    overrides(
        "__init__",
        "(self, context, total_count, paused_count, enable_prefix_caching=False, prefix_caching_eviction_policy=...)",
        "upstream/blocks",
        "not called: ours sets the same attributes",
    ),
    overrides("allocate_memory_blocks", "(self, num_blocks)", "mcore/context/blocks", "the cache allocates blocks"),
    overrides("release_memory_blocks", "(self, blocks)", "mcore/context/blocks", "the cache frees blocks"),
    overrides(
        "is_memory_available",
        "(self, num_blocks, potential_matched_count=0)",
        "upstream/blocks",
        "counts evictable blocks, too",
    ),
    overrides("get_active_avail", "(self)", "upstream/blocks", "states may use memory that upstream counts for KV"),
    calls("get_paused_used", "(self)", "upstream/blocks", "blocks of paused requests"),
    overrides("get_evictable_block_count", "(self)", "upstream/blocks", "cached blocks that no request holds"),
    overrides("evict_lru_blocks", "(self, num_blocks_needed)", "upstream/blocks", "the cache evicts"),
    overrides("update_timestamps", "(self, block_ids)", "upstream/blocks", "the cache has its own clocks"),
    wraps(
        "register_kv_block_hashes",
        "(self, block_ids, block_hashes, parent_hashes=None)",
        "upstream/blocks",
        "blocks become matchable once their forward is launched",
    ),
    overrides("reset", "(self)", "mcore/context/blocks", "drops blocks and states"),
    attributes(
        "total_avail kv_hash_to_block_id block_ref_counts",
        "upstream/blocks",
        "replaced by properties of the cache",
    ),
    attributes(
        "context enable_prefix_caching prefix_caching_eviction_policy on_blocks_deregistered total_count paused_count "
        "active_count dummy_block_idx block_routing",
        "upstream/blocks",
        "set by our constructor, for their readers",
    ),
)

GPU_VIEW = rows_of(
    f"{_CONTEXTS}.gpu_view:ContextGPUView",
    attributes("request_in_prefill_status", "upstream/controller", "whose states go back to the last accepted token"),
)

METADATA = rows_of(
    f"{_CONTEXTS}.attention_context.mamba_metadata:MambaMetadata",
    overrides(
        "__init__",
        "(self, max_requests, max_tokens, *, max_intermediate_count, mamba_chunk_size=128, d_conv=0)",
        "upstream/context",
        "our constructor passes on its arguments",
    ),
    wraps(
        "compute_cpu_metadata",
        "(self, active_mamba_indices, token_to_request_idx, cpu_cu_query, batch_dimensions, padded_batch_dimensions, "
        "enable_chunked_prefill, intermediate_offsets_gpu=None, intermediate_counts_gpu=None)",
        "upstream/context",
        "notifies the context of prefills, with their sizes",
    ),
    overrides("load_from_cpu", "(self, d)", "upstream/context", "shows the prepared prefill"),
    wraps(
        "_update_intermediate_metadata",
        "(self, intermediate_offsets_gpu, intermediate_counts_gpu, real_prefill_count, padded_prefill_count, "
        "cu_seqlens_gpu=None)",
        "upstream/context",
        "switches off megatron's extraction of states",
    ),
    attributes("batch_indices_decode device_decode_prefill", "upstream/mixer", "decoded and prefilled rows of a step"),
    attributes("intermediate_chunk_indices", "upstream/context", "replaced by a property that raises when read"),
    calls("bind_cpu_buffers", "(self, bufs)", "upstream/context", "as megatron's allocation does"),
    calls("bind_gpu_buffers", "(self, gpu_view)", "upstream/context", "as megatron's allocation does"),
    calls("free_slots", "(self, request_indices)", "mcore/context/context", "live states of requests that ended"),
    attributes(
        "request_to_mamba_state_idx",
        "upstream/context",
        "the live state of each row",
    ),
    attributes(
        "mamba_state_free_slots mamba_state_free_slot_count",
        "mcore/context/rows mcore/context/admission",
        "live states that are free",
    ),
    keys(
        "padded_prefill_count",
        "upstream/context upstream/context",
        "in what `compute_cpu_metadata` returns",
    ),
)

ATTENTION_METADATA = rows_of(
    f"{_CONTEXTS}.attention_context.mha_metadata:MHAMetadata",
    attributes("_max_seqlen_q state_data", "upstream/context", "raised to 2 for a prefill of one token"),
    keys("max_seqlen_q", "upstream/context", "in `state_data`"),
)

BATCH = rows_of(
    f"{_INFERENCE}.batch_dimensions_utils:InferenceBatchDimensions",
    attributes("prefill_req_count token_count", "upstream/context", "sizes of a step, with and without padding"),
)

# -- the engine, its requests, its controller ----------------------------------------------------------------------------

ENGINE = rows_of(
    f"{_INFERENCE}.engines.dynamic_engine:DynamicInferenceEngine",
    overrides(
        "__init__", "(self, controller, context)", "mcore/engine/engine", "puts slot mixers on, sets up scheduling"
    ),
    overrides("reset", "(self)", "mcore/engine/engine mcore/runner serve/engine_loop", "drops pending work, too"),
    overrides("suspend", "(self)", "mcore/engine/engine", "finished requests stay finished"),
    overrides("resume", "(self)", "mcore/engine/engine", "weights may have changed"),
    wraps("create_cuda_graphs", "(self, reset_context=True)", "mcore/engine/engine", "a capture resets the context"),
    wraps(
        "start_listening_to_data_parallel_coordinator",
        "async (self, inference_coordinator_port=None, launch_inference_coordinator=True, *, hostname=None, "
        "coordinator_schedule_output_path=None, loop=None)",
        "mcore/engine/engine upstream/engine serve/ranks",
        "ranks meet before they serve; the coordinator answers every request",
    ),
    overrides("run_engine", "async (self, *, loop=None)", "upstream/engine", "futures get the error of a step"),
    overrides(
        "run_engine_with_coordinator",
        "async (self, *, loop=None)",
        "upstream/engine",
        "a step that fails does not end the asyncio loop",
    ),
    overrides("shutdown", "async (self)", "upstream/engine", "futures get an error that says so"),
    overrides("generate", "(self, prompts, sampling_params=...)", "mcore/engine/engine", "ids that nobody has"),
    overrides(
        "add_request",
        "(self, request_id, prompt, sampling_params=None)",
        "upstream/engine mcore/runner serve/engine_loop",
        "keeps the prompt's tokens on the host",
    ),
    overrides("_add_request", "(self, request)", "upstream/engine", "hashes the prompt on arrival"),
    overrides(
        "_handle_failed_request", "(self, request_id)", "upstream/engine", "refused requests get our record, too"
    ),
    overrides(
        "has_unfinished_requests",
        "(self)",
        "mcore/engine/engine mcore/runner",
        "also true while requests are to be returned",
    ),
    overrides(
        "schedule_waiting_requests",
        "(self)",
        "mcore/engine/engine",
        "aborts, coalescing, loads, admissions beside a chunk",
    ),
    overrides(
        "_should_run_async_sched_overlap",
        "(self)",
        "upstream/engine",
        "false if something must happen between two forwards",
    ),
    overrides(
        "_check_stop_words_for_request_post_append",
        "(self, request)",
        "upstream/engine",
        "stop words across a preemption",
    ),
    overrides(
        "_get_and_clear_stop_word_finished_ids",
        "(self, active_request_ids)",
        "upstream/engine",
        "drops log-probs of a stop word; ends requests whose load failed",
    ),
    wraps(
        "post_process_requests",
        "(self, request_ids, finished_request_ids, evict_request_ids, step_time, sample, accepted_tokens, log_probs, "
        "consumed_chunked_prefill_request_id, top_n_logprobs=None, pre_fwd_active_token_count=None, "
        "pre_fwd_step_count=None, finished_routing_block_ids=None)",
        "mcore/engine/engine",
        "requests that start over are not finished",
    ),
    overrides("async_step", "async (self)", "mcore/engine/engine", "a replica sends new tokens after a step"),
    overrides(
        "schedule_requests", "(self)", "upstream/engine", "messages of this package; requests that ended without a step"
    ),
    attributes("_generation_epoch", "upstream/engine", "replaced by a property: new weights invalidate the cache"),
    overrides(
        "_can_schedule_chunked_prefill",
        "(self, req)",
        "upstream/engine",
        "whether this round admits a request; sets how long a chunk may be",
    ),
    overrides("schedule_chunked_prefill", "(self)", "upstream/engine", "the budget of a chunk holds for one round"),
    overrides(
        "_find_cg_chunk_size", "(self, max_chunk_tokens)", "upstream/engine", "chunks that end on the scans' grid"
    ),
    calls("_notify_cond_for_new_request", "async (self)", "upstream/engine", "called after our admissions"),
    calls(
        "get_request",
        "(self, request_id)",
        "mcore/engine/engine mcore/engine/removals mcore/engine/scheduling",
        "the latest part of a request",
    ),
    calls("step_modern", "(self)", "mcore/runner serve/engine_loop", "one step"),
    calls("wait_until", "async (self, state)", "serve/ranks", "waits for the engine to stop"),
    attributes("_loop", "upstream/engine", "its asyncio loop, to notify in"),
    attributes("_prefix_coordination_waits", "upstream/engine", "its count of requests held back"),
    attributes("num_speculative_tokens", "mcore/engine/requests", "sampling options do not work with drafts"),
    attributes(
        "requests waiting_request_ids resume_request_ids failed_request_ids",
        "mcore/engine/engine mcore/engine/removals mcore/engine/scheduling",
        "its tables of requests",
    ),
    attributes("request_counter", "mcore/runner serve/engine_loop", "ids of requests"),
    attributes(
        "stop_word_finished_request_ids stop_word_being_finished_ids",
        "mcore/engine/engine mcore/engine/removals",
        "ends active requests",
    ),
    attributes(
        "state context controller cuda_graph_impl enable_chunked_prefill materialize_only_last_token_logits",
        "mcore/engine/engine mcore/engine/requests upstream/engine",
        "its parts and settings",
    ),
    attributes(
        "use_coordinator _state_events _pending_signals _cond", "upstream/engine", "a reset keeps the engine's state"
    ),
    attributes("ep_world_size ep_consensus_interval", "mcore/engine/engine", "set to 1 if there are no peers"),
    attributes("engine_loop_task", "serve/ranks", "awaited by a replica"),
    attributes("socket_for_receiving_requests", "upstream/engine", "its socket to the coordinator"),
    attributes(
        "is_mp_coordinator model_parallel_publisher_socket model_parallel_subscriber_socket pg_collection "
        "expert_parallel_zmq_communicator world_zmq_communicator",
        "mcore/ranks/coordinator",
        "sockets by which ranks meet",
    ),
)

ENGINE_PARTS = (
    *rows_of(
        f"{_INFERENCE}.engines.dynamic_engine",
        classes("EngineSuspendedError", "mcore/engine/engine", "what a step of a suspended engine raises"),
        keys("active_request_ids finished_request_records", "mcore/runner serve/engine_loop", "what a step returns"),
    ),
    *rows_of(
        f"{_INFERENCE}.engines.dynamic_engine:RequestEntry",
        attributes("record future", "mcore/engine/engine mcore/engine/removals", "a request in the engine's tables"),
    ),
    *rows_of(
        f"{_INFERENCE}.engines.dynamic_engine:EngineState",
        constants("SUSPENDED SUSPENDING", "mcore/engine/engine upstream/engine", "whether requests wait to be resumed"),
        constants("STOPPING STOPPED", "upstream/engine", "a reset starts the engine again"),
        constants("PAUSED", "serve/ranks", "before replicas end"),
    ),
    *rows_of(
        f"{_INFERENCE}.engines.async_zmq_communicator:AsyncZMQCommunicator",
        attributes("bcast_sock is_leader", "mcore/ranks/coordinator", "sockets by which ranks meet"),
    ),
)

REQUESTS = (
    *rows_of(
        f"{_INFERENCE}.inference_request:DynamicInferenceRequest",
        attributes(
            "request_id prompt prompt_tokens sampling_params block_size_tokens enable_prefix_caching "
            "precomputed_block_hashes finished_chunk_token_count num_cached_tokens remaining_prompt_tokens status events "
            "stop_word_ids generated_tokens generated_length generated_log_probs generated_top_n_logprobs "
            "prompt_log_probs prompt_top_n_logprobs",
            "mcore/engine/engine mcore/engine/record mcore/engine/removals mcore/context/context mcore/context/request "
            "mcore/runner",
            "set by `add_request`, reset if a request starts over",
        ),
        keys(
            "return_log_probs skip_prompt_log_probs top_n_logprobs",
            "mcore/engine/controller",
            "keys of `active_request_metadata`: options of a step's log-probs",
        ),
        attributes("generated_text", "mcore/runner", "the answer"),
        properties(
            "remaining_prompt_length",
            "mcore/context/context mcore/engine/scheduling mcore/engine/coalesce mcore/runner",
            "tokens left",
        ),
        calls("add_event_add_context", "(self)", "mcore/engine/scheduling", "recorded as in megatron"),
        calls(
            "add_event_error_nontransient",
            "(self, error)",
            "mcore/engine/engine upstream/coordinator",
            "noted where megatron notes it",
        ),
        calls("add_event_fail", "(self)", "upstream/coordinator", "the end of a refused request"),
        calls("serialize", "(self)", "upstream/coordinator", "a refused request as a message"),
        calls("add_event_finish", "(self)", "mcore/engine/removals", "noted where megatron notes it"),
        calls("failed", "(self)", "mcore/runner serve/engine_loop", "whether it was refused"),
    ),
    *rows_of(
        f"{_INFERENCE}.inference_request:DynamicInferenceRequestRecord",
        overrides(
            "checkpoint",
            "(self, tokenizer=None)",
            "mcore/engine/engine mcore/engine/record",
            "keeps everything on preemption",
        ),
        overrides(
            "merge", "(self, tokenizer=None)", "mcore/engine/record mcore/runner", "drops the prompt from replies"
        ),
        attributes("requests latency", "mcore/engine/engine mcore/engine/record", "parts of a preempted request"),
        properties("request_id", "mcore/runner", "id of its parts"),
    ),
    *rows_of(
        f"{_INFERENCE}.inference_request:Status",
        constants(
            "FAILED COMPLETED", "mcore/engine/engine mcore/engine/removals", "status of refused and of aborted requests"
        ),
    ),
    *rows_of(
        f"{_INFERENCE}.sampling_params:SamplingParams",
        calls("add_attributes", "(self, attribute_value_pair)", "bench/engines", "cache options of a request"),
        calls("deserialize", "(data)", "serve/engine_loop serve/replicas", "fields and attributes from a route"),
    ),
)

CONTROLLER = (
    *rows_of(
        f"{_INFERENCE}.sampling.base:Sampling",
        overrides(
            "sample_kernel",
            "(self, logits, n, context, *, no_top_k, no_top_p, gather_indices=None, token_to_request_index=None, "
            "output=None, eager=False, cache_key=None)",
            "upstream/controller",
            "sampling options that megatron does not have",
        ),
        overrides(
            "log_probs_kernel",
            "(self, logits, context, *, token_to_request_index=None)",
            "upstream/controller",
            "passed on to megatron's backend",
        ),
    ),
    *rows_of(
        f"{_CONTROLLERS}:TextGenerationController",
        overrides(
            "_build_async_sched_request_state",
            "(self, sampled_tokens_cpu, resolved_sequence_lengths)",
            "upstream/controller",
            "a prompt between two chunks may have no row in a step; several end tokens",
        ),
        overrides(
            "_transfer_samples_to_cpu", "(self, active_request_count)", "upstream/controller", "several end tokens"
        ),
        overrides(
            "_verify_speculative_tokens",
            "(self, output_tokens, input_tokens_required, num_decode_requests, num_prefill_requests, active_request_count)",
            "upstream/controller",
            "a draft that is an end token is not accepted: it is sampled, and ends the answer",
        ),
        overrides(
            "_dynamic_step_forward_logits",
            "(self, input_ids, position_ids)",
            "upstream/controller",
            "a forward is published once it is launched, and copies to the host are launched after it",
        ),
        overrides(
            "_dynamic_step_sample_logits",
            "(self)",
            "upstream/controller",
            "the prompt's next token follows a chunk; benchmarks wrap it to force answers",
        ),
        overrides(
            "_dynamic_step_sample_logits_and_verify_tokens",
            "(self, input_ids, token_row_indices=None)",
            "upstream/controller",
            "the same, with drafts",
        ),
        overrides(
            "_compact_async_sched_logits",
            "(self, survivor_idxs)",
            "upstream/controller",
            "also moves the log-prob options",
        ),
        overrides(
            "_init_dynamic_sampling_tensors", "(self)", "upstream/controller", "puts our sampling around megatron's"
        ),
        attributes("_sampling", "upstream/controller", "the sampling backend"),
        attributes("sampling_rng", "mcore/engine/controller", "noise of requests without a seed"),
        overrides("_run_async_sched_sample_mtp", "(self)", "upstream/controller", "prefills accepted no drafts"),
        overrides(
            "_rewind_kv_cache",
            "(self, accepted_counts_cpu=None)",
            "upstream/controller",
            "states of all layer kinds go back to the last accepted token",
        ),
        attributes(
            "_accepted_tokens_per_request _accepted_token_counts_per_request",
            "upstream/controller",
            "cleared before sampling with drafts; they say which states to go back to",
        ),
        attributes("_async_sched_logits", "upstream/engine", "pending logits, dropped with their rows"),
        calls(
            "tokenize_prompt",
            "(tokenizer, prompt, add_BOS=False)",
            "mcore/engine/requests",
            "tokenizes a prompt given as text",
        ),
        attributes(
            "inference_wrapped_model tokenizer", "mcore/engine/engine mcore/ranks/coordinator", "what it is made of"
        ),
        attributes("num_speculative_tokens", "bench/forced", "drafts are not forced"),
        attributes("vocab_size", "mcore/engine/requests", "which tokens a request may have"),
        attributes(
            "_sampled_tokens_cuda",
            "upstream/controller",
            "overwritten with a prompt's next token; with forced answers in benchmarks",
        ),
        attributes("_all_logits_cuda", "upstream/controller", "those at boundaries are kept for later prompts"),
    ),
    *rows_of(
        f"{_CONTROLLERS}:AsyncScheduleLogitsState",
        calls("clear", "(self)", "upstream/engine", "drops pending logits"),
    ),
)

COORDINATOR = (
    *rows_of(
        f"{_COORDINATORS}:DataParallelInferenceCoordinator",
        overrides(
            "_update_rank_hashes",
            "(self, rank_identity, request_hashes)",
            "upstream/coordinator",
            "limits the number of remembered blocks",
        ),
        overrides("start", "(self)", "upstream/coordinator", "takes messages of this package off the socket first"),
        overrides(
            "_remove_engine", "(self, identity)", "upstream/coordinator", "clients learn which requests are lost"
        ),
        overrides("detokenize", "(self, finished_request)", "mcore/ranks/coordinator", "clients turn tokens into text"),
        overrides(
            "compute_request_hashes",
            "(self, prompt)",
            "mcore/ranks/coordinator upstream/coordinator",
            "prompts with different salts share nothing; a wrong prompt has none",
        ),
        calls("_send_to_engine", "(self, identity, payload)", "upstream/coordinator", "aborts, and other messages"),
        attributes("router_socket", "upstream/coordinator", "its socket"),
        attributes("_handlers", "upstream/coordinator", "requests are looked at before megatron's own handler"),
        attributes("known_clients", "mcore/ranks/coordinator upstream/coordinator", "whom a message is sent"),
        attributes("max_requests", "mcore/ranks/coordinator", "requests that a replica runs at a time"),
        attributes(
            "request_id_to_client_id request_id_to_client_request_id request_id_to_rank identity_to_rank_index",
            "upstream/coordinator",
            "its tables of requests and replicas",
        ),
        attributes("_hash_table", "upstream/coordinator", "replicas that hold a block"),
        attributes("_pending_counts _identities_list", "upstream/coordinator", "unfinished requests by replica"),
        overrides(
            "get_least_loaded_data_parallel_rank",
            "(self)",
            "mcore/ranks/coordinator",
            "megatron gives all idle traffic to the first replica",
        ),
        overrides(
            "get_best_data_parallel_rank",
            "(self, request_hashes)",
            "mcore/ranks/coordinator",
            "the same for prompts that no replica knows",
        ),
        calls(
            "entrypoint",
            "(pipe_connection, ready_event, data_parallel_size, tokenizer, max_requests, "
            "inference_coordinator_port=None, deterministic_mode=False, block_size_tokens=None, "
            "enable_prefix_caching=False, prefix_caching_coordinator_policy=..., prefix_caching_routing_alpha=0.5, "
            "schedule_output_path=None, hostname=None)",
            "mcore/ranks/coordinator",
            "the coordinator's process",
        ),
    ),
    *rows_of(
        f"{_INFERENCE}.config:PrefixCachingCoordinatorPolicy",
        constants("LONGEST_PREFIX", "mcore/ranks/coordinator", "where a request goes"),
    ),
    *rows_of(
        f"{_INFERENCE}.headers",
        constants("Headers", "upstream/client upstream/coordinator upstream/engine", "first items of messages"),
    ),
    *rows_of(
        f"{_INFERENCE}.headers:Request",
        constants(
            "SUBMIT_REQUEST ENGINE_REPLY", "upstream/client upstream/coordinator upstream/engine", "kinds of messages"
        ),
    ),
    *rows_of(
        f"{_INFERENCE}.inference_client:InferenceClient",
        overrides(
            "__init__",
            "(self, inference_coordinator_address, deserialize=False)",
            "mcore/ranks/client",
            "a client of the coordinator",
        ),
        calls("start", "(self, loop=None)", "mcore/ranks/client", "a client of the coordinator"),
        calls("stop", "(self)", "serve/replicas", "a client of the coordinator"),
        overrides("_recv_task", "async (self)", "upstream/client", "messages of this package, without polling"),
        calls("pause_engines", "(self)", "serve/replicas", "before replicas end"),
        calls("stop_engines", "(self)", "serve/replicas", "the end of all replicas"),
        calls("shutdown_coordinator", "(self)", "serve/replicas", "the end of all replicas"),
        calls("set_generation_epoch", "(self, generation_epoch)", "serve/replicas", "empties all caches"),
        attributes("socket", "mcore/ranks/client", "gets a timeout, then is one of asyncio"),
        attributes("next_request_id", "mcore/ranks/client", "ids of a client's requests"),
    ),
)

WRAPPER = rows_of(
    f"{_INFERENCE}.model_inference_wrappers.gpt.gpt_inference_wrapper:GPTInferenceWrapper",
    calls("__init__", "(self, model, inference_context=None)", "mcore/entrypoints/build", "the model with its context"),
    calls("prep_model_for_inference", "(self)", "mcore/entrypoints/build", "once"),
    attributes("model inference_context", "mcore/engine/engine mcore/engine/controller", "what it is made of"),
)

CONFIG = (
    *rows_of(
        f"{_INFERENCE}.config:InferenceConfig",
        attributes(
            "mamba_inference_state_config enable_prefix_caching prefix_caching_mamba_gb pg_collection block_size_tokens "
            "logprobs_mode",
            "mcore/context/context",
            "settings of megatron's own cache, which ours takes over; whether its blocks suit the layers, whether log-probs are shared",
        ),
        attributes(
            "max_sequence_length max_tokens max_requests buffer_size_gb paused_buffer_size_gb mamba_memory_ratio "
            "num_speculative_tokens prefix_caching_eviction_policy",
            "mcore/entrypoints/build mcore/state/budget",
            "checked before megatron asserts on them, or set for one budget",
        ),
    ),
    *rows_of(
        f"{_INFERENCE}.config:AsyncScheduleMode",
        constants("ASYNC", "console/engine_options", "asynchronous scheduling"),
    ),
    *rows_of(
        f"{_INFERENCE}.config:MambaInferenceStateConfig",
        overrides(
            "__init__",
            "(self, layer_type_list, conv_states_shape, ssm_states_shape, conv_states_dtype, ssm_states_dtype, "
            "mamba_chunk_size=128)",
            "upstream/state_config",
            "adds a field, for layers of other kinds",
        ),
        attributes(
            "layer_type_list conv_states_shape ssm_states_shape conv_states_dtype ssm_states_dtype mamba_chunk_size",
            "mcore/state/layout",
            "set on pipeline stages without recurrent layers, too",
        ),
    ),
    *rows_of(
        "megatron.core.models.hybrid.hybrid_model:HybridModel",
        attributes(
            "hybrid_layer_pattern", "upstream/state_config", "whether another pipeline stage has recurrent layers"
        ),
    ),
    *rows_of(
        "megatron.core.models.common.language_module.language_module:LanguageModule",
        attributes("pg_collection", "upstream/state_config", "the pipeline stages of a model"),
    ),
    *rows_of(
        f"{_INFERENCE}.config:KVCacheManagementMode",
        constants(
            "OFFLOAD RECOMPUTE",
            "upstream/context mcore/engine/engine",
            "what happens to memory on suspension",
        ),
    ),
    *rows_of(
        f"{_INFERENCE}.config:PrefixCachingEvictionPolicy",
        constants("LRU", "upstream/blocks mcore/entrypoints/build", "cached blocks stay after their request"),
    ),
    *rows_of(
        "megatron.core.utils",
        calls(
            "get_attr_wrapped_model",
            "(model, attr, allow_none=True, return_model_obj=False)",
            "mcore/entrypoints/build cli/megatron_checkpoint",
            "reads attributes of a wrapped model",
        ),
        calls("get_pg_size", "(group=None)", "mcore/ranks/coordinator", "number of replicas"),
    ),
)

# -- the model's layers --------------------------------------------------------------------------------------------------

MIXER = (
    *rows_of(
        f"{_SSM}.mamba_mixer:MambaMixer",
        overrides(
            "_dynamic_inference_prefill",
            "(self, zxBCdt, context, conv_state, ssm_state, mamba_layer_idx=None)",
            "upstream/mixer",
            "prefill from and to any slot",
        ),
        attributes("A_log _A_neg_exp_cache", "upstream/mixer", "decode's A, made again in place"),
        attributes(
            "D_has_hdim chunk_size cp d_inner_local_tp d_state headdim ngroups_local_tp nheads_local_tp norm rmsnorm",
            "layers/mamba2",
            "dimensions of a prefill",
        ),
        marks("partition_sizes", "models/weights", "parts of a packed parameter, by which it is sharded"),
    ),
    *rows_of(
        f"{_SSM}.mamba_mixer",
        classes("MambaMixerSubmodules", "models/build", "for layers without Transformer Engine"),
        constants("HAVE_MAMBA_SSM", "upstream/packages", "whether its kernels are there"),
        calls(
            "_check_mamba_sequence_packing_support",
            "(for_inference_not_training=True)",
            "upstream/packages",
            "whether they are new enough",
        ),
    ),
    *rows_of(
        f"{_SSM}.mamba_context_parallel:MambaContextParallel",
        calls("get_conv1d_weight", "(self)", "layers/mamba2", "parameters of this rank"),
        calls("get_conv1d_bias", "(self)", "layers/mamba2", "parameters of this rank"),
        calls("get_A_log", "(self)", "layers/mamba2", "parameters of this rank"),
        calls("get_D", "(self)", "layers/mamba2", "parameters of this rank"),
        calls("get_dt_bias", "(self)", "layers/mamba2", "parameters of this rank"),
    ),
    *rows_of(
        f"{_SSM}.ops.ssd_bmm",
        calls(
            "_bmm_chunk_fwd",
            "(a, b, chunk_size, cu_chunk_seqlens, causal=False, output_dtype=None)",
            "upstream/ssd_kernels",
            "the scan around our state passing",
        ),
        constants(
            "_bmm_chunk_fwd_kernel",
            "upstream/ssd_kernels",
            "its configuration is pinned where bits must not depend on what was fastest",
        ),
    ),
    *rows_of(
        f"{_SSM}.ops.ssd_chunk_scan",
        calls(
            "_chunk_scan_fwd",
            "(cb, x, dt, dA_cumsum, C, states, cu_chunk_seqlens, out, seq_idx, D=None, z=None, initial_states=None)",
            "upstream/ssd_kernels",
            "the scan around our state passing",
        ),
        constants(
            "_chunk_scan_fwd_kernel",
            "upstream/ssd_kernels",
            "its configuration is pinned where bits must not depend on what was fastest",
        ),
    ),
    *rows_of(
        f"{_SSM}.ops.ssd_chunk_state",
        calls(
            "_chunk_cumsum_fwd",
            "(dt, A, chunk_size, cu_chunk_seqlens, dt_bias=None, dt_softplus=False, dt_limit=...)",
            "upstream/ssd_kernels",
            "the scan around our state passing",
        ),
        calls(
            "_chunk_state_fwd",
            "(B, x, dt, dA_cumsum, cu_chunk_seqlens, states=None, states_in_fp32=True)",
            "upstream/ssd_kernels",
            "the scan around our state passing",
        ),
        constants(
            "_chunk_cumsum_fwd_kernel _chunk_state_fwd_kernel",
            "upstream/ssd_kernels",
            "its configuration is pinned where bits must not depend on what was fastest",
        ),
    ),
)

# Layers that compute rows independently of each other (``exact="bits"``).
INVARIANT = (
    *rows_of(
        "megatron.core.tensor_parallel.layers",
        classes("ColumnParallelLinear RowParallelLinear", "upstream/invariant", "their products"),
    ),
    *rows_of(
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear",
        wraps("_forward_impl", "(self, input, weight, *args, **kwargs)", "upstream/invariant", "its product"),
    ),
    *rows_of(
        "megatron.core.tensor_parallel.layers:RowParallelLinear",
        overrides("forward", "(self, input_)", "layers/invariant", "its product, and the sum over ranks"),
        attributes("weight bias skip_bias_add tp_group input_is_parallel", "layers/invariant", "what its forward uses"),
    ),
    *rows_of(
        "megatron.core.transformer.attention:SelfAttention",
        overrides(
            "flash_decode_and_prefill",
            "(self, q, k, v, max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, seqlens_k, block_table, "
            "is_decode_only, softmax_offset=None)",
            "upstream/invariant",
            "attention over pages",
        ),
        overrides(
            "_apply_output_gate", "(self, x, gate)", "upstream/invariant", "a sigmoid that rounds alike everywhere"
        ),
    ),
    *rows_of(
        "megatron.core.transformer.mlp:MLP",
        wraps("forward", "(self, hidden_states, per_token_scale=None, **kwargs)", "layers/invariant", "its activation"),
        attributes("config linear_fc1 linear_fc2", "layers/invariant", "what its forward uses"),
    ),
    *rows_of(
        "megatron.core.models.hybrid.hybrid_model:HybridModel",
        wraps(
            "forward",
            "(self, input_ids, position_ids, attention_mask, decoder_input=None, labels=None, inference_context=None, "
            "runtime_gather_output=None, *, inference_params=None, loss_mask=None, packed_seq_params=None, "
            "padding_mask=None)",
            "layers/invariant",
            "says which context a step is of",
        ),
    ),
    *rows_of(
        f"{_MOE}.moe_layer",
        classes("BaseMoELayer", "upstream/invariant", "experts are refused"),
    ),
)

DELTA_NET = (
    *rows_of(
        f"{_SSM}.gated_delta_net.gdn:GatedDeltaNet",
        attributes(
            "in_proj_split_sections", "upstream/delta_net", "parts of the packed projection, by which it is sharded"
        ),
    ),
    *rows_of(
        f"{_SSM}.gated_delta_net.common:_GDNBase",
        attributes(
            "A_log act_fn conv1d conv_kernel_dim dt_bias in_proj key_head_dim num_v_heads_local_tp out_norm "
            "out_proj qk_dim_local_tp use_qk_l2norm v_dim_local_tp value_head_dim",
            "layers/gated_delta_net upstream/delta_net",
            "all of its inference",
        ),
    ),
    *rows_of(
        f"{_SSM}.gated_delta_net",
        classes("GatedDeltaNet GatedDeltaNetSubmodules", "models/build", "the layer, without Transformer Engine too"),
        constants("HAVE_FLA", "upstream/delta_net", "whether the kernels of its training are there"),
    ),
)

PLATFORM = (
    *rows_of(
        "megatron.core.extensions.transformer_engine",
        constants("HAVE_TE", "upstream/packages", "whether models use Transformer Engine"),
        classes("TENorm", "models/build", "norms of queries and keys"),
    ),
    *rows_of(
        "megatron.core.tensor_parallel.random",
        calls(
            "model_parallel_cuda_manual_seed",
            "(seed, te_rng_tracker=False, inference_rng_tracker=False, use_cudagraphable_rng=False, tp_rank=None, "
            "ep_rank=None, etp_rank=None, force_reset_rng=False)",
            "upstream/packages",
            "seeds the generators for sampling",
        ),
    ),
)

GRAPHS = (
    *rows_of(_GRAPHS, calls("delete_cuda_graphs", "()", "upstream/graphs", "frees the graphs on a model")),
    *rows_of(
        f"{_GRAPHS}:CudaGraphManager",
        attributes("cudagraph_runners custom_cudagraphs_lookup_table", "upstream/graphs", "emptied with it"),
        constants("global_mempool", "upstream/graphs", "each engine of a benchmark has its own"),
    ),
    *rows_of(
        f"{_GRAPHS}:_CudagraphGlobalRecord",
        constants("cudagraph_inference_record", "upstream/graphs", "each engine of a benchmark has its own"),
    ),
    *rows_of(
        "megatron.core.transformer.module:GraphableMegatronModule",
        attributes("cudagraph_manager", "upstream/graphs", "of a layer with graphs"),
    ),
)

CHECKPOINTS = (
    *rows_of(
        "megatron.core.transformer.utils",
        calls(
            "make_sharded_tensors_for_checkpoint",
            "(state_dict, prefix, tensor_parallel_layers_axis_map=None, sharded_offsets=(), "
            "extra_state_suffix='_extra_state', tp_group=None, dp_cp_group=None)",
            "upstream/packages",
            "shards the norm's weight in a checkpoint",
        ),
    ),
    *rows_of(
        _SAVING,
        calls(
            "_replace_state_dict_keys_with_sharded_keys",
            "(sharded_state_dict, keep_only_main_replica=False)",
            "upstream/checkpoints",
            "saving without an extra process",
        ),
        calls(
            "mcore_to_pyt_state_dict",
            "(state_dict, is_loading=False, init_device=..., load_legacy_1d_flatten_tensors=False)",
            "upstream/checkpoints",
            "saving without an extra process",
        ),
        classes("MCoreSavePlanner", "upstream/checkpoints", "saving without an extra process"),
    ),
    *rows_of(
        f"{_SAVING}:TorchDistSaveShardedStrategy",
        overrides("save", "(self, sharded_state_dict, checkpoint_dir)", "upstream/checkpoints", "PyTorch's own writer"),
    ),
)

# -- mixture of experts -------------------------------------------------------------------------------------------------

EXPERTS = (
    *rows_of(
        f"{_MOE}.token_dispatcher",
        classes("MoETokenDispatcher", "upstream/moe", "its six stages are ours"),
    ),
    *rows_of(
        f"{_MOE}.token_dispatcher:MoETokenDispatcher",
        overrides(
            "dispatch_preprocess", "(self, tokens, routing_map, probs)", "models/experts", "tokens are sorted by expert"
        ),
        overrides("token_dispatch", "(self, hidden_states, probs)", "models/experts", "to other ranks' experts"),
        overrides("dispatch_postprocess", "(self, hidden_states, probs)", "models/experts", "sorted by local expert"),
        overrides("combine_preprocess", "(self, hidden_states)", "models/experts", "the order of arrival again"),
        overrides("token_combine", "(self, hidden_states)", "models/experts", "back from other ranks' experts"),
        overrides("combine_postprocess", "(self, hidden_states)", "models/experts", "the sum of a token's experts"),
        attributes("config ep_group ep_size tp_group", "models/experts", "sizes and groups of an exchange"),
    ),
    *rows_of(
        f"{_MOE}.moe_layer",
        classes("MoELayer", "upstream/moe", "router, shared expert and the order of the stages"),
    ),
    *rows_of(
        f"{_MOE}.moe_layer:MoELayer",
        overrides(
            "__init__",
            "(self, config, submodules=None, layer_number=None, pg_collection=None, is_mtp_layer=False, name=None)",
            "models/experts",
            "with a dispatcher of ours",
        ),
        attributes("token_dispatcher", "models/experts", "the dispatcher, replaced by ours"),
    ),
    *rows_of(
        f"{_MOE}.moe_utils",
        calls(
            "get_default_pg_collection", "()", "models/experts upstream/moe", "the groups where a layer is given none"
        ),
    ),
    *rows_of(
        f"{_MOE}.experts",
        calls(
            "SequentialMLP",
            "(num_local_experts, config, submodules, pg_collection=None, name=None)",
            "models/experts upstream/moe",
            "experts that the grouped products cannot compute",
        ),
    ),
    *rows_of(
        "megatron.core.transformer.utils",
        calls(
            "make_sharded_object_for_checkpoint",
            "(obj, key, sharded_offsets=(), replica_id=None, **kwargs)",
            "models/experts upstream/moe",
            "what a checkpoint has beside the weights of experts",
        ),
    ),
    *rows_of(
        f"{_MAPPING}:ShardedTensor",
        calls(
            "from_rank_offsets",
            "(key, data, *rank_offsets, replica_id=0, prepend_axis_num=0, flattened_range=None, **init_kwargs)",
            "models/experts",
            "stacked experts in a checkpoint",
        ),
    ),
    *rows_of(
        _MAPPING,
        classes("ShardedTensor", "upstream/moe", "stacked experts in a checkpoint"),
        calls(
            "ShardedTensorFactory",
            "(key, data, build_fn, merge_fn, replica_id=0, flattened_range=None)",
            "models/experts upstream/moe",
            "the two halves of a gated layer's weights, each sharded",
        ),
    ),
)

CONTRACT: tuple[Entry, ...] = (
    *CONTEXT,
    *CONTEXT_PARTS,
    *BLOCKS,
    *GPU_VIEW,
    *METADATA,
    *ATTENTION_METADATA,
    *BATCH,
    *ENGINE,
    *ENGINE_PARTS,
    *REQUESTS,
    *CONTROLLER,
    *COORDINATOR,
    *WRAPPER,
    *CONFIG,
    *MIXER,
    *INVARIANT,
    *DELTA_NET,
    *PLATFORM,
    *GRAPHS,
    *CHECKPOINTS,
    *EXPERTS,
)

# Folders that an engine does not need.
WINGS = ("serve/", "bench/", "lab/", "cli/")


@functools.cache
def check_contract() -> None:
    """Compare the table with the installed megatron-core, once per process, before the first engine is built.

    Rows that only `WINGS` use are skipped.

    Raises:
        PlatformError: megatron-core is missing or unsupported.
        UpstreamDriftError: Names are missing or changed. One line lists them, the version, and what to do.
    """
    version = check_version()
    needed = [entry for entry in CONTRACT if not all(where.startswith(WINGS) for where in entry.where.split())]
    problems = [f"{entry.symbol} ({_use(entry)}): {problem}" for entry in needed if (problem := problem_of(entry))]
    if problems:
        raise UpstreamDriftError(
            f"{version} differs from what this package expects in {len(problems)} of {len(needed)} names: "
            f"{'; '.join(problems)}. To fix this, {REMEDY}"
        )


def _use(entry: Entry) -> str:
    return f"{entry.kind}, for {entry.where.replace(' ', ', ')}"
