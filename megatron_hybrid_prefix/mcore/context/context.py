"""`HybridPrefixContext`: megatron's dynamic inference context with this package's prefix cache.

What the cache decides on numbers (`cache.py`) is done here: a prompt's match is asked for when megatron asks what a request
needs, admission and plan happen in ``add_request``, publication when the step's bookkeeping shows that the forward
succeeded, release where megatron releases a request's blocks. Where a forward reads and writes states is in
`metadata.py` and `mixer.py`.

Longer than 400 lines because it is the one class that megatron's calls come into, in their order.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.contexts.dynamic_context import (
    BlockOverflowError,
    ContextOverflowError,
    DynamicInferenceContext,
    RequestOverflowError,
    TokenOverflowError,
)

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.requests import StepPlan
from megatron_hybrid_prefix.mcore.context.blocks import HybridPrefixBlockAllocator
from megatron_hybrid_prefix.mcore.context.decode import DecodeProgress
from megatron_hybrid_prefix.mcore.context.request import RequestKeyBook, RequestKeys
from megatron_hybrid_prefix.mcore.context.verify import verify_plan
from megatron_hybrid_prefix.mcore.ranks.agreement import DecisionLog, min_over_model_ranks
from megatron_hybrid_prefix.mcore.state.metadata import ChunkGrid, HybridPrefixMambaMetadata, PrefillSpan
from megatron_hybrid_prefix.mcore.state.moves import HostMoves
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.pool.device import StatePool
from megatron_hybrid_prefix.pool.layout import StateComponent, StateLayout
from megatron_hybrid_prefix.upstream.contract import check_contract

if TYPE_CHECKING:
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.inference_request import DynamicInferenceRequest
    from megatron.core.transformer import TransformerConfig

logger = logging.getLogger(__name__)

# Attention kernels take a wrong turn where the longest query of a prefill is one token; the value is an upper bound.
_MIN_PREFILL_SEQLEN_Q = 2
# So many prompts of less than a block, and nothing else, are worth a warning.
_SHORT_PROMPTS = 64


class HybridPrefixContext(DynamicInferenceContext):
    """Megatron's context, with prefix caching of hybrid models.

    Without prefix caching (``prefix`` and ``inference_config.enable_prefix_caching`` both unset) it says what megatron's
    context says, but for what that gets wrong: short chunks, waiting chunks, drafts at the end of a block. For a hybrid model it
    always needs slot mixers: `HybridPrefixEngine` puts them on, else call ``use_slot_mixers(model)``.

    Args:
        model_config: The model's.
        inference_config: Megatron's; not changed. Its ``prefix_caching_*`` fields other than the budget are not used.
        prefix: Settings of the cache; by default made of ``enable_prefix_caching`` and ``prefix_caching_mamba_gb``.

    Attributes:
        prefix_cache: The cache, or None.
        state_pool: Memory of the recurrent states, or None.
        host_moves: The host tier, or None.
        next_prompt_token: What follows the last chunk that was not its prompt's last.
    """

    # Also what holds while megatron's constructor runs.
    prefix_cache: HybridPrefixCache | None = None
    state_pool: StatePool | None = None
    host_moves: HostMoves | None = None
    _prefix_config: HybridPrefixConfig | None = None
    _decisions: DecisionLog | None = None
    _decode_progress: DecodeProgress | None = None
    next_prompt_token = 0

    def __init__(
        self,
        model_config: TransformerConfig,
        inference_config: InferenceConfig,
        prefix: HybridPrefixConfig | None = None,
    ) -> None:
        check_contract()
        hybrid = inference_config.mamba_inference_state_config is not None
        if prefix is None and hybrid and inference_config.enable_prefix_caching:
            prefix = HybridPrefixConfig(mamba_gb=inference_config.prefix_caching_mamba_gb or 0.0)
        if prefix is not None and not hybrid:
            raise ValueError("this prefix cache is for models with recurrent layers: use megatron's own for this one")
        self._prefix_config = prefix
        self._request_keys = RequestKeyBook(0.0 if prefix is None else prefix.verify_hits)
        self._step_plans: dict[int, StepPlan] = {}  # by request id, of the forward that comes or runs
        self._admitted: tuple[list[int], int] | None = None  # shared blocks and tokens to skip, inside add_request
        self._forward_running = self._forward_failed = False
        self._checkpoint_slots = 0
        self._retracting = False  # megatron preempts requests
        self._failed_loads: set[int] | None = None  # requests of the last forward, once asked for
        if prefix is not None:
            # Megatron's own cache must not be allocated beside this one, nor its warnings appear.
            inference_config = dataclasses.replace(inference_config, enable_prefix_caching=False)
        super().__init__(model_config=model_config, inference_config=inference_config)
        if prefix is None:
            return
        self.enable_prefix_caching = True
        self._decisions = DecisionLog(inference_config.pg_collection) if prefix.check_ranks else None
        if prefix.host_gb and self._checkpoint_slots:
            self.host_moves = HostMoves(self, prefix)
        if self._checkpoint_slots and (prefix.decode_checkpoints or self.host_moves is not None):
            self._decode_progress = DecodeProgress(
                rows=self.max_requests, block_tokens=self.block_size_tokens, drafts=self.num_speculative_tokens
            )
        blocks = self.kv_block_allocator
        self.prefix_cache = HybridPrefixCache(
            block_tokens=self.block_size_tokens,
            kv_blocks=blocks.total_count - 1,
            state_slots=self._checkpoint_slots,
            first_state_slot=self.max_requests,
            eviction_policy=prefix.eviction_policy,
            retention_interval_tokens=prefix.retention_interval_tokens,
            bytes_budget=self._checkpoint_slots * self.state_layout.slot_bytes,
            **({} if self.host_moves is None else self.host_moves.cache_fields),
        )
        self.kv_block_allocator = HybridPrefixBlockAllocator(
            self, blocks.total_count, blocks.paused_count, cache=self.prefix_cache
        )
        self.prefix_cache.loads.set_block_routing(self.kv_block_allocator.block_routing.get)
        self._short_prompts = 0
        if torch.distributed.get_rank() == 0:
            logger.info("%s\n%s", self.memory_report(), self.policy_report())
            if not self._checkpoint_slots:
                logger.warning("no state can be kept in mamba_gb=%g: every prompt is computed whole", prefix.mamba_gb)
            elif self.max_sequence_length <= self.block_size_tokens:
                logger.warning(
                    "block_size_tokens=%d is not less than max_sequence_length=%d: no prompt fills a block, none is reused",
                    self.block_size_tokens,
                    self.max_sequence_length,
                )

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def state_layout(self) -> StateLayout:
        """What one recurrent state is on this rank."""
        conv, ssm = self.mamba_conv_states_dtype, self.mamba_ssm_states_dtype
        return StateLayout(
            kind="mamba2",
            layers=self.num_mamba_layers,
            components=(
                StateComponent(name="conv", shape=tuple(self.mamba_conv_states_shape), dtype=_name(conv)),
                StateComponent(name="ssm", shape=tuple(self.mamba_ssm_states_shape), dtype=_name(ssm)),
            ),
        )

    @property
    def coalesces(self) -> bool:
        """Whether requests wait for prefixes that others are computing."""
        return self._prefix_config.coalesce_prefixes and self._checkpoint_slots > 0

    def memory_report(self) -> str:
        """Slots and bytes of the recurrent states on this rank: running requests, speculation, checkpoints."""
        slot_bytes, live = self.state_layout.slot_bytes, self.max_requests
        speculative = live * (self.num_speculative_tokens + 1) if self.num_speculative_tokens else 0
        rows = (
            ("running requests", live, "in buffer_size_gb"),
            ("speculative decoding", speculative, "in buffer_size_gb"),
            ("checkpoints", self._checkpoint_slots, f"of mamba_gb={self._prefix_config.mamba_gb:g}"),
        )
        lines = [f"recurrent states: {_size(slot_bytes)} each, SSM in {_name(self.mamba_ssm_states_dtype)}"]
        lines += [f"  {name}: {slots} slots, {_size(slots * slot_bytes)} {of}" for name, slots, of in rows]
        if self.host_moves is not None:
            lines.append(f"  {self.host_moves.report()}")
        return "\n".join(lines)

    def policy_report(self) -> str:
        """What is kept, and when it goes, in one line."""
        prefix = self._prefix_config
        interval = prefix.retention_interval_tokens
        every = "up to 16 a prompt" if interval is None else f"every {interval} tokens" if interval else "off"
        switches = (("decode", prefix.decode_checkpoints), ("coalescing", self.coalesces))
        return (
            f"prefix cache: blocks of {self.block_size_tokens} tokens, SSM chunks of {self.mamba_chunk_size}; intervals {every}, "
            + ", ".join(f"{name} {'on' if on else 'off'}" for name, on in switches)
            + f"; eviction {prefix.eviction_policy}"
        )

    def _watch_length(self, prompt_tokens: int) -> None:
        # Once: a workload of prompts shorter than a block gets nothing out of the cache, and nobody is told why.
        if self._short_prompts < _SHORT_PROMPTS:
            self._short_prompts = (
                self._short_prompts + 1 if prompt_tokens <= self.block_size_tokens else 2 * _SHORT_PROMPTS
            )
            if self._short_prompts == _SHORT_PROMPTS:
                logger.warning(
                    "the first %d prompts have at most %d tokens: none fills a block before its last token, none is reused; "
                    "a smaller block_size_tokens would help",
                    _SHORT_PROMPTS,
                    self.block_size_tokens,
                )

    @property
    def _max_mamba_chunks(self) -> int:
        return self.__dict__["_max_mamba_chunks"]

    @_max_mamba_chunks.setter
    def _max_mamba_chunks(self, count: int) -> None:
        # Megatron sizes the chunk metadata for chunks counted from each span's start; the absolute grid can need more.
        if self.is_hybrid_model:
            grid = ChunkGrid(chunk_tokens=self.mamba_chunk_size, block_tokens=self.block_size_tokens)
            count = max(count, grid.max_chunks(self.max_tokens, self.max_requests))
        self.__dict__["_max_mamba_chunks"] = count

    def _allocate_mamba_states(self) -> None:
        """Megatron's live states and this cache's checkpoints, in one tensor per component."""
        if not self.is_hybrid_model:
            super()._allocate_mamba_states()
            return
        layout, device = self.state_layout, torch.cuda.current_device()
        if self._prefix_config is not None:
            slots = layout.slots_within(int(self._prefix_config.mamba_gb * 2**30))
            self._checkpoint_slots = min_over_model_ranks(slots, self.config.pg_collection) or 0
        self.mamba_metadata = HybridPrefixMambaMetadata(
            block_tokens=self.block_size_tokens,
            max_requests=self.max_requests,
            max_tokens=self.max_tokens,
            mamba_chunk_size=self.mamba_chunk_size,
            d_conv=self.mamba_conv_states_shape[-1],
        )
        names = ("batch_indices_decode", "batch_indices_prefill", "seq_idx", "cu_seqlens", "cu_chunk_seqlens")
        names += ("last_chunk_indices", "seq_idx_for_varlen", "conv_seq_idx", "conv_seq_start")
        self.mamba_metadata.bind_cpu_buffers({name: getattr(self, f"_cpu_mamba_{name}") for name in names})
        self.mamba_metadata.bind_gpu_buffers(self.gpu_view)
        self.mamba_metadata.prefill_spans = self._prefill_spans
        self.state_pool = StatePool(
            layout, live_slots=self.max_requests, checkpoint_slots=self._checkpoint_slots, device=device
        )
        self.mamba_conv_states = self.state_pool.tensors["conv"]
        self.mamba_ssm_states = self.state_pool.tensors["ssm"]
        large = ["mamba_conv_states", "mamba_ssm_states"]
        if self.num_speculative_tokens > 0:
            steps = self.num_speculative_tokens + 1
            for component in layout.components:
                name = f"mamba_intermediate_{component.name}_states"
                shape = (layout.layers, self.max_requests, steps, *component.shape)
                setattr(self, name, torch.empty(shape, dtype=getattr(torch, component.dtype), device=device))
                large.append(name)
        if self.kv_cache_management_mode == KVCacheManagementMode.OFFLOAD and not self._uses_torch_memory_saver:
            assert self.unified_memory_level == 0
            for name in large:
                self._offloadable_tensor_names.add(name)
                self._offloadable_cpu_backups[name] = torch.empty_like(getattr(self, name), device="cpu").pin_memory()

    def deallocate_inference_state_buffers(self) -> None:
        """See upstream; the pool lets go of its tensors where megatron deletes them."""
        if self.host_moves is not None and self.is_tensor_state_allocated:
            self.host_moves.finish()
        super().deallocate_inference_state_buffers()
        if not hasattr(self, "mamba_ssm_states"):
            self.state_pool = None

    # -- what a request needs ------------------------------------------------------------------------------------------

    def keys_of(self, req: DynamicInferenceRequest) -> RequestKeys:
        """Keys of a request's prompt and what it allows, made once, and again when the weights changed."""
        return self._request_keys.of(req, self.prefix_cache)

    def lost_tokens(self, req: DynamicInferenceRequest) -> int:
        """Prompt tokens whose KV was cached when the request was admitted, and that were computed for want of a state."""
        return 0 if self.prefix_cache is None else self.keys_of(req).lost_tokens

    def _compute_prefix_match(
        self, req: DynamicInferenceRequest, prefill_chunk_length: int, record_mamba_match: bool = False
    ) -> tuple[list[int], int, int, int, int, int]:
        """See upstream: shared block ids, new blocks, blocks held, blocks in all, tokens to skip, tokens to compute."""
        if self.prefix_cache is None:
            return super()._compute_prefix_match(req, prefill_chunk_length, record_mamba_match)
        finished = req.finished_chunk_token_count
        held = -(-finished // self.block_size_tokens)
        required = -(-(finished + prefill_chunk_length) // self.block_size_tokens)
        if self._admitted is not None:
            shared, skip = self._admitted
        elif finished:
            shared, skip = [], 0
        else:
            match = self.keys_of(req).match(self.prefix_cache, prefill_chunk_length)
            shared, skip = list(match.block_ids), match.resume_tokens
        if record_mamba_match:
            req._mamba_num_matched_blocks = skip // self.block_size_tokens
        return shared, required - held - len(shared), held, required, skip, prefill_chunk_length - skip

    def check_availability(self, req: DynamicInferenceRequest) -> tuple[bool, bool, bool]:
        """See upstream: whether there is room for the request, for its tokens, for its KV. Changes nothing."""
        cache = self.prefix_cache
        if cache is None:
            return super().check_availability(req)
        rows = self.total_request_count < self.max_requests and self.paused_request_count == 0
        length = req.remaining_prompt_length
        if req.finished_chunk_token_count:
            _, new_blocks, *_ = self._compute_prefix_match(req, length)
            return rows, self.active_token_count + length <= self.max_tokens, new_blocks <= cache.blocks.available_count
        match = self.keys_of(req).match(cache, length)
        tokens = self.active_token_count + length - match.resume_tokens <= self.max_tokens
        return rows, tokens, cache.can_admit(match, length_tokens=length)

    # -- load from the host --------------------------------------------------------------------------------------------

    def load_back(self, req: DynamicInferenceRequest, others_run: bool) -> bool:
        """Begins to load what a waiting request could resume from on the host, if there is anything.

        Args:
            req: Not admitted yet.
            others_run: Whether the coming step runs other requests, in whose time the load takes place.

        Returns:
            Whether the request shall wait for another round. Without it its forward waits, on the device.
        """
        cache, keys = self.prefix_cache, self.keys_of(req)
        match = keys.match(cache, req.remaining_prompt_length)
        if match.load_id is None:
            if others_run and cache.loads.loads_elsewhere(match):
                return True
            prepare = cache.loads.begin_resume if keys.resumes else cache.loads.begin_load_back
            match = prepare(req.request_id, match, write=keys.write, reserved_blocks=self.total_request_count)
            if match is None:
                return False
            keys.last = match
            self.host_moves.start_load(req.request_id, match)
            if self._decisions is not None:
                self._decisions.note(
                    f"request {req.request_id} loads up to {match.resume_tokens} into KV blocks {match.block_ids}, slot "
                    f"{match.source_slot}"
                )
        return others_run and self.host_moves.waits(match.load_id)

    @property
    def loads_wait(self) -> bool:
        """Whether waiting requests hold what they loaded."""
        return self.host_moves is not None and self.prefix_cache.loads.has_waiting

    def give_up_loads(self) -> bool:
        """Takes blocks and slots from waiting requests that loaded into them; whether there were any."""
        return self.host_moves is not None and self.prefix_cache.loads.give_up()

    def forget_request(self, request_id: int) -> None:
        """A request that is not in the context ended: what waited for it on the device and on the host goes."""
        if self.host_moves is not None:
            if self.prefix_cache.loads.is_loading(request_id):
                self.prefix_cache.release(request_id)
            self.prefix_cache.loads.drop_swapped_out(request_id)

    def failed_loads(self) -> set[int]:
        """Requests of the last forward that started from something else than had been stored; the same on all ranks.

        To be asked by all ranks after each forward. They have to be computed again.
        """
        if self.host_moves is None:
            return set()
        if self._failed_loads is None:
            self._failed_loads = self.host_moves.failed(self._step_plans.values())
        return self._failed_loads

    # -- admit, plan ---------------------------------------------------------------------------------------------------

    def add_request(self, req: DynamicInferenceRequest, prefill_chunk_length: int | None = None) -> None:
        """See upstream. Takes all that the chunk needs, or raises and takes nothing.

        Raises:
            ContextOverflowError: There is no room; one of its subclasses says for what.
            ValueError: The chunk is empty, or longer than what remains of the prompt.
        """
        length = req.remaining_prompt_length if prefill_chunk_length is None else prefill_chunk_length
        if self.prefix_cache is None or not self.is_tensor_state_allocated:
            super().add_request(req, prefill_chunk_length)
        else:
            self._admit(req, length)
        if length < req.remaining_prompt_length:
            self.next_prompt_token = int(req.remaining_prompt_tokens[length])

    def _admit(self, req: DynamicInferenceRequest, length: int) -> None:
        cache, request_id, finished = self.prefix_cache, req.request_id, req.finished_chunk_token_count
        if not 0 < length <= req.remaining_prompt_length:
            raise ValueError(
                f"request {request_id}: a chunk of {length} of {req.remaining_prompt_length} prompt tokens"
            )
        source_slot = None
        if finished:
            self._check_room(req, length)
            shared, skip = [], 0
            own = cache.grow(request_id, finished + length)
        else:
            keys = self.keys_of(req)
            match = keys.match(cache, length)
            self._check_room(req, length - match.resume_tokens)
            admission = cache.admit(
                request_id,
                match,
                length_tokens=length,
                write=keys.write,
                verify_at_tokens=keys.verify_at_tokens,
                breakpoints=(*keys.breakpoints, *keys.wanted),
            )
            own = None
            if admission is not None:
                shared = list(admission.block_ids[: admission.shared_blocks])
                own = list(admission.block_ids[admission.shared_blocks :])
                skip, source_slot = admission.resume_tokens, admission.source_slot
                keys.lost_tokens = admission.lost_tokens_no_state
                self.kv_block_allocator.take_routing(admission.payloads)
                self._watch_length(keys.chain.tokens)
        if own is None:
            raise BlockOverflowError(request_id)
        row = self.total_request_count
        self._admitted = (shared, skip)
        self.kv_block_allocator.hand_over(own)
        try:
            super().add_request(req, length)
        except BaseException:
            # Only a caller's mistake gets here (room was checked): nothing may stay behind.
            if not finished:
                cache.release(request_id)
            raise
        finally:
            self._admitted = None
            self.kv_block_allocator.hand_over([])
        if not finished:
            req.num_cached_tokens = skip  # megatron counts whole blocks
        if source_slot is not None:
            self._pending_mamba_zeros.pop()  # megatron would zero the live slot; this forward reads the checkpoint
        start = int(self.request_kv_length_offsets[row])
        plan = cache.plan(request_id, start, start + int(self.request_query_lengths[row]))
        self._step_plans[request_id] = plan
        if self._decisions is not None:
            self._decisions.note(
                f"request {request_id} shares KV blocks {shared}, gets {own}, computes [{start}, {plan.end_tokens}) from "
                f"slot {plan.source_slot}, keeps {[(c.position_tokens, c.slot) for c in plan.checkpoints]}"
            )

    def add_beside_chunk(self, req: DynamicInferenceRequest) -> None:
        """Admit a whole prompt while another one is between two of its chunks, whose hidden row moves on by one.

        Raises:
            ContextOverflowError: As `add_request`; nothing has changed then.
        """
        hidden = self.total_request_count
        if hidden + 1 >= self.max_requests:
            raise RequestOverflowError(req.request_id)
        for tensor in self._row_tensors():
            tensor[hidden + 1] = tensor[hidden]
        self.request_to_kv_block_ids[hidden] = -1
        try:
            self.add_request(req)
        except BaseException:
            for tensor in self._row_tensors():
                tensor[hidden] = tensor[hidden + 1]
            self.request_to_kv_block_ids[hidden + 1] = -1
            self.mamba_metadata.request_to_mamba_state_idx[hidden + 1] = -1
            self.request_ids[hidden + 1] = -1
            raise

    def _check_room(self, req: DynamicInferenceRequest, computed_tokens: int) -> None:
        """Megatron raises these after it has taken blocks, and loses them."""
        if self.total_request_count >= self.max_requests:
            raise RequestOverflowError(req.request_id)
        if self.active_token_count + computed_tokens > self.max_tokens:
            raise TokenOverflowError(req.request_id)
        if not req.finished_chunk_token_count and self.mamba_metadata.mamba_state_free_slot_count == 0:
            raise ContextOverflowError(req.request_id, "no live state slot is free")

    # -- run -----------------------------------------------------------------------------------------------------------

    def initialize_attention_state(self, *args: Any, **kwargs: Any) -> Any:
        """See upstream.

        Raises:
            RuntimeError: The last forward failed half-way: live states are not to be trusted any more.
        """
        if self._forward_failed:
            raise RuntimeError("a forward failed and left half-written states: call engine.reset() before going on")
        if self._decisions is not None:
            self._compare_decisions()
        result = super().initialize_attention_state(*args, **kwargs)
        self._forward_running = True
        if self.num_prefill_requests:
            self._allow_one_token_prefills()
        return result

    def _compare_decisions(self) -> None:
        rows = slice(0, self.total_request_count)
        stats = self.prefix_cache.stats()
        self._decisions.note(
            f"forward of requests {self.request_ids[rows].tolist()} ({self.paused_request_count} paused) in live slots "
            f"{self.mamba_metadata.request_to_mamba_state_idx[rows].tolist()} with KV blocks "
            f"{[[block for block in row if block != -1] for row in self.request_to_kv_block_ids[rows].tolist()]}; "
            f"{self.prefix_cache.blocks.available_count} KV blocks available, {stats.slots_used} slots used"
        )
        self._decisions.compare()

    def _prefill_spans(self, sequences: int) -> list[PrefillSpan]:
        """The last ``sequences`` active rows: what each computes in this step, and the cache's plan for it."""
        rows = slice(self.total_request_count - sequences, self.total_request_count)
        columns = (
            self.request_ids[rows],
            self.request_kv_length_offsets[rows],
            self.request_query_lengths[rows],
            self.mamba_metadata.request_to_mamba_state_idx[rows],
        )
        return [
            PrefillSpan(start_tokens=start, tokens=tokens, live_slot=slot, plan=self._step_plans.get(request_id))
            for request_id, start, tokens, slot in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def _allow_one_token_prefills(self) -> None:
        metadata = self.active_attn_metadata["mha_metadata"]
        if not self.is_decode_only() and metadata.state_data["max_seqlen_q"] < _MIN_PREFILL_SEQLEN_Q:
            metadata._max_seqlen_q = metadata.state_data["max_seqlen_q"] = _MIN_PREFILL_SEQLEN_Q

    def transfer_bookkeeping_to_gpu(self, skip_token_input_ids: bool = False, record_done_event: bool = False) -> Any:
        """See upstream; sources and writes of the states go first, so that its event guards them too."""
        if self.host_moves is not None:
            self.host_moves.before_forward(self._step_plans.values())
        pending = getattr(self, "_pending_mamba_transfer", None)
        if self.state_pool is not None and pending is not None and pending["padded_prefill_count"]:
            self.mamba_metadata.copy_indices()
        return super().transfer_bookkeeping_to_gpu(skip_token_input_ids, record_done_event)

    def calculate_log_probs_tensors(
        self,
        logits: torch.Tensor,
        new_tokens: torch.Tensor,
        only_last_token_logits: bool | None = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """See upstream, which includes the rows that only pad a step; none of them belongs to a request."""
        if not only_last_token_logits and not self.is_decode_only():
            logits = logits[:, : self.active_token_count]
        return super().calculate_log_probs_tensors(logits, new_tokens, only_last_token_logits, *args, **kwargs)

    # -- publish -------------------------------------------------------------------------------------------------------

    def update_requests(
        self, active_requests_mask: torch.Tensor, new_tokens: torch.Tensor, new_speculative_tokens: Any = None
    ) -> Any:
        """See upstream; the forward before it succeeded, so what it wrote becomes matchable first.

        The blocks that megatron gave out are noted as the requests' last.
        """
        self._publish()
        self._follow_decodes()
        result = super().update_requests(active_requests_mask, new_tokens, new_speculative_tokens)
        if self.prefix_cache is not None:
            self._attach_blocks()
        if self.num_speculative_tokens:
            self._find_blocks_of_tokens()
        self._forward_running = False
        return result

    def _find_blocks_of_tokens(self) -> None:
        # Megatron remembers each row's last block, and takes another row's once rows moved: a request's tokens before a
        # block's end then go into somebody else's block.
        tokens = slice(0, self.active_token_count)
        table_columns = self.token_to_pos_ids[tokens] // self.block_size_tokens
        self.token_to_block_idx[tokens] = self.request_to_kv_block_ids[self.token_to_request_idx[tokens], table_columns]

    def resolve_requests(self, active_requests_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See upstream and `update_requests`."""
        self._publish()
        result = super().resolve_requests(active_requests_mask)
        self._forward_running = False
        return result

    def _publish(self) -> None:
        if not self._step_plans and self.host_moves is None:
            return
        failed = self.failed_loads()
        self._failed_loads = None
        plans, self._step_plans = self._step_plans, {}
        for plan in plans.values():
            if plan.request_id in failed:
                self.prefix_cache.fail_load(plan)
                continue
            if self._prefix_config.verify_hits:
                verify_plan(self, plan)
            self.prefix_cache.publish(plan)

    def fail_forward(self) -> None:
        """A step raised. Reserved slots go back; if a forward was running, the engine has to be reset."""
        if self.prefix_cache is None or not self._forward_running:
            return
        self._forward_running, self._forward_failed = False, True
        self._abandon_plans("forward_failed")

    def _abandon_plans(self, reason: str) -> None:
        plans, self._step_plans = self._step_plans, {}
        for plan in plans.values():
            self.prefix_cache.abandon(plan, reason)

    # -- decode --------------------------------------------------------------------------------------------------------

    def can_prepare_requests(self) -> bool:
        """See upstream, which leaves out a chunked prefill between two chunks: its hidden row, and the blocks it holds."""
        return self.chunked_prefill_request_id == -1 and super().can_prepare_requests()

    def prepare_requests(self) -> None:
        """See upstream; the blocks it gave out are noted as the requests'."""
        self._follow_decodes()
        super().prepare_requests()
        if self.prefix_cache is not None:
            self._attach_blocks()

    def _follow_decodes(self) -> None:
        """Where a decode filled a block, the block gets its key, and the state at its end is kept.

        Called when drafts are rewound and before the next forward is launched: live states are, in the order of the
        stream, those after the tokens counted here, and the speculative ones still those after each token of the last
        forward.
        """
        progress, cache = self._decode_progress, self.prefix_cache
        if progress is None:
            return
        blocks = progress.advance(self)
        if not blocks or not self._prefix_config.decode_checkpoints:
            return
        copies: dict[int, int] = {}  # by target: with few slots, one request's may go to the next at once
        for block in blocks:
            known = cache.inspect.sequence_tokens(block.request_id)
            tokens = progress.tokens(block.live_slot, known, block.end_tokens)
            cache.append(block.request_id, tokens, computed_tokens=block.end_tokens)
            slot = cache.checkpoint_decoded(block.request_id, block.end_tokens)
            if slot is not None:
                copies[slot] = block.live_slot * (self.num_speculative_tokens + 1) + block.forward_token
            if self._decisions is not None:
                self._decisions.note(f"request {block.request_id} filled a block at {block.end_tokens}, slot {slot}")
        if not copies:
            return
        if self.host_moves is not None:
            self.host_moves.launch()  # what was in these slots
        targets, sources = list(copies), list(copies.values())
        if self.num_speculative_tokens:
            # A live state is that after the last accepted token; those after each token are beside it.
            between = {name: getattr(self, f"mamba_intermediate_{name}_states") for name in self.state_pool.tensors}
            self.state_pool.copy_from({name: t.flatten(1, 2) for name, t in between.items()}, sources, targets)
        else:
            self.state_pool.copy(sources, targets)

    def _attach_blocks(self) -> None:
        unattached = self.prefix_cache.blocks.unattached
        if not unattached:
            return
        # A row's newest block is its last one; paused rows that were resumed are among the active ones by now.
        rows = slice(0, self.total_request_count)
        columns = (self.request_last_kv_block_id[rows].tolist(), self.request_ids[rows].tolist())
        request_of = dict(zip(*columns, strict=True))
        for block_id in unattached:
            self.prefix_cache.blocks.attach(request_of[block_id], [block_id])

    # -- release -------------------------------------------------------------------------------------------------------

    def evict_overflow_paused_requests(self, *args: Any, **kwargs: Any) -> Any:
        """See upstream; with a host tier, requests that are preempted leave there what they have computed."""
        if not self.paused_request_count:
            return None
        self._retracting = self.host_moves is not None
        try:
            return super().evict_overflow_paused_requests(*args, **kwargs)
        finally:
            self._retracting = False

    def _retract(self, request_indexes: torch.Tensor) -> None:
        slots = self.mamba_metadata.request_to_mamba_state_idx[request_indexes].tolist()
        for request_id, slot in zip(self.request_ids[request_indexes].tolist(), slots, strict=True):
            self.prefix_cache.loads.swap_out(request_id, self._decode_progress.processed(slot), slot)
        self.host_moves.launch()

    def release_memory_blocks_from_request_indexes(self, request_indexes: torch.Tensor) -> None:
        """See upstream: finished, evicted and aborted requests let go of all they hold; what has a key stays cached."""
        if self.prefix_cache is None:
            super().release_memory_blocks_from_request_indexes(request_indexes)
            return
        if self._retracting:
            self._retract(request_indexes)
        for request_id in self.request_ids[request_indexes].tolist():
            plan = self._step_plans.pop(request_id, None)
            if plan is not None:
                self.prefix_cache.abandon(plan, "released")
            self.prefix_cache.release(request_id)
        self.request_to_kv_block_ids[request_indexes] = -1
        self.mamba_metadata.free_slots(request_indexes)

    def remove_waiting_row(self, request_id: int) -> bool:
        """Take a paused request, or a chunked prefill between two chunks, out of the context.

        Only between two steps, and where nothing of the request is in flight.

        Returns:
            Whether there was such a row; active rows are left alone.
        """
        paused = self.request_ids[: self.paused_request_count].tolist()
        chunked = self.chunked_prefill_request_id == request_id
        hidden = chunked and self.get_index_of_chunked_prefill_request() == -1
        if not hidden and request_id not in paused:
            return False
        row = self.total_request_count if hidden else paused.index(request_id)
        self.release_memory_blocks_from_request_indexes(torch.tensor([row]))
        if hidden:
            self.chunked_prefill_request_id = -1
            return True
        # Every row after it moves up, the hidden one included; active rows keep their order.
        last = min(self.total_request_count + 1, self.max_requests)
        for tensor in self._row_tensors():
            tensor[row : last - 1] = tensor[row + 1 : last].clone()
        self.request_to_kv_block_ids[last - 1] = -1
        if self.is_hybrid_model:
            self.mamba_metadata.request_to_mamba_state_idx[last - 1] = -1
        self.request_ids[last - 1] = -1
        kept = [index for index in range(self.paused_request_count) if index != row]
        self.paused_tokens = self.paused_tokens[kept]
        if self.paused_speculative_tokens is not None:
            self.paused_speculative_tokens = self.paused_speculative_tokens[:, kept]
        self.token_to_request_idx[: self.active_token_count] -= 1
        self.paused_request_count -= 1
        self.total_request_count -= 1
        return True

    def _row_tensors(self) -> list[torch.Tensor]:
        """All tensors with one row a request."""
        return [
            self.request_ids,
            self.request_query_lengths,
            self.request_in_prefill_status_tensor,
            self.request_output_lengths,
            self.request_kv_length_offsets,
            self.request_kv_block_counts,
            self.request_last_kv_block_id,
            self.request_last_kv_block_offset,
            self.request_to_kv_block_ids,
            *self.request_metadata.values(),
            *([self.mamba_metadata.request_to_mamba_state_idx] if self.is_hybrid_model else []),
        ]

    # -- forget --------------------------------------------------------------------------------------------------------

    def reset_metadata(self, preserve_prefix_cache: bool = False, *args: Any, **kwargs: Any) -> None:
        """See upstream. KV and states are kept together, or forgotten together."""
        cache = self.prefix_cache
        if cache is not None:
            # Plans end here either way; without their requests nothing of them may be published.
            self._abandon_plans("reset")
            cache.release_all()
            self._pending_mamba_zeros.clear()
            self._forward_running = self._forward_failed = False
        super().reset_metadata(preserve_prefix_cache, *args, **kwargs)

    def invalidate(self) -> None:
        """The weights changed: no KV and no state computed before is matched again; running requests cache no more."""
        if self.prefix_cache is not None:
            self.prefix_cache.invalidate()

    # -- what is going on ----------------------------------------------------------------------------------------------

    def prefix_stats(self) -> PrefixStats:
        """What the cache did since the start, and how full it is; all zero without a cache."""
        if self.prefix_cache is None:
            return PrefixStats()
        stats = self.prefix_cache.stats()
        if self.host_moves is not None:
            self.host_moves.count(stats)
        return stats

    def check_integrity(self) -> None:
        """Raises CacheCorruptionError if the cache, or its agreement with megatron's tables, is broken; for tests."""
        if self.prefix_cache is None:
            return
        self.prefix_cache.check_integrity()
        rows = self.total_request_count + (
            self.get_index_of_chunked_prefill_request(safe=False) == self.total_request_count
        )
        slots = self.mamba_metadata.request_to_mamba_state_idx[:rows].tolist()
        free = self.mamba_metadata.mamba_state_free_slots[: self.mamba_metadata.mamba_state_free_slot_count].tolist()
        if sorted([*slots, *free]) != list(range(self.max_requests)):
            raise CacheCorruptionError(f"live slots {slots} and free ones {free} are not all of {self.max_requests}")
        for row, request_id in enumerate(self.request_ids[:rows].tolist()):
            table = [block_id for block_id in self.request_to_kv_block_ids[row].tolist() if block_id != -1]
            if not self.prefix_cache.inspect.is_live(request_id) or table != list(
                self.prefix_cache.inspect.block_ids(request_id)
            ):
                raise CacheCorruptionError(f"request {request_id}: its block table and the cache's differ")
        if len(self.prefix_cache.inspect.live_requests()) != rows:
            raise CacheCorruptionError(f"{len(self.prefix_cache.inspect.live_requests())} live requests in {rows} rows")


def _size(count_bytes: int) -> str:
    return f"{count_bytes / 2**30:.2f} GiB" if count_bytes >= 2**30 else f"{count_bytes / 2**20:.3f} MiB"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
