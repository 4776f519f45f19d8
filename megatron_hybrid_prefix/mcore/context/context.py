"""`HybridPrefixContext`: megatron's dynamic inference context with this package's prefix cache.

The cache (`cache.py`) decides; this class calls it where megatron does the same:

- match: when megatron asks what a request needs;
- admit and plan: in ``add_request``;
- publish: when the forward is launched; when it is over, if it has a load, or something of it is checked or kept;
- release: when megatron releases a request's blocks.

The class holds the overridden methods of megatron, in the order in which a prompt passes them. The other files of this folder
do the work; ``layers/`` and ``mcore/state/`` read and write states.

Longer than 400 lines because all calls from megatron arrive in this class; half of it is signatures and docstrings.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.index.requests import StepPlan
from megatron_hybrid_prefix.index.scores import ScoreTable
from megatron_hybrid_prefix.layers.step import PrefillSpan, PrefillStep
from megatron_hybrid_prefix.mcore.context import reports, rows
from megatron_hybrid_prefix.mcore.context.admission import Admissions
from megatron_hybrid_prefix.mcore.context.blocks import HybridPrefixBlockAllocator
from megatron_hybrid_prefix.mcore.context.decode import DecodedStates
from megatron_hybrid_prefix.mcore.context.exact import check_exact_config, end_on_grid
from megatron_hybrid_prefix.mcore.context.loads import RequestLoads
from megatron_hybrid_prefix.mcore.context.request import PrefixRequest, RequestBook
from megatron_hybrid_prefix.mcore.context.scores import ScoredPrompts
from megatron_hybrid_prefix.mcore.context.verify import verify_plan
from megatron_hybrid_prefix.mcore.ranks.agreement import DecisionLog, min_over_model_ranks
from megatron_hybrid_prefix.mcore.state.layout import (
    DESCRIBE_ALL,
    needs_this_package,
    states_of_config,
    with_state_dtype,
)
from megatron_hybrid_prefix.mcore.state.memory import StateMemory, own_slots
from megatron_hybrid_prefix.mcore.state.moves import HostMoves, Moves
from megatron_hybrid_prefix.mcore.state.one_budget import agree_on_layout, one_budget
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.ops.invariant.log_softmax import log_softmax
from megatron_hybrid_prefix.platform.sizes import check_sizes
from megatron_hybrid_prefix.pool.device import StateSlots
from megatron_hybrid_prefix.pool.layout import SlotLayout
from megatron_hybrid_prefix.pool.pages import PageLayout
from megatron_hybrid_prefix.pool.shared_memory import BlockShape, SharedMemory, slot_bytes
from megatron_hybrid_prefix.tiers.units import HOST, EntryKind
from megatron_hybrid_prefix.upstream.blocks import block_counts
from megatron_hybrid_prefix.upstream.context import ChunkBlocks, ContextSeam, one_thread
from megatron_hybrid_prefix.upstream.contract import check_contract
from megatron_hybrid_prefix.upstream.names import RequestOverflowError

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_hybrid_prefix.upstream.config import InferenceConfig
    from megatron_hybrid_prefix.upstream.names import DynamicInferenceRequest

logger = logging.getLogger(__name__)


class HybridPrefixContext(ContextSeam):
    """Megatron's context, with prefix caching of hybrid models.

    Without prefix caching (``prefix`` and ``inference_config.enable_prefix_caching`` both unset) it behaves like megatron's
    context, with fixes for short chunks, waiting chunks, and drafts at the end of a block. A hybrid model always needs slot
    mixers: `HybridPrefixEngine` puts them on; without that engine call ``use_slot_mixers(model)``.

    Args:
        model_config: Config of the model.
        inference_config: Megatron's inference config; not changed. Of its ``prefix_caching_*`` fields only the budget is used.
        prefix: Settings of the cache; by default derived from ``enable_prefix_caching`` and ``prefix_caching_mamba_gb``.

    Attributes:
        prefix_config: Settings of the cache, or None.
        prefix_cache: The cache, or None.
        states: The recurrent states, or None.
        prefill_step: What the next step prefills, for the recurrent layers; None if the model has none.
        layout: How KV and states share memory on this rank; None without ``cache_gb``.
        shared_memory: That memory, or None.
        moves: Copies on the device and to the host, or None without a cache.
        loads: Loads from the host tier, or None.
        scored: Prompts whose log-probs are wanted, or None without a cache.
        checkpoint_slots: Slots of the cache; the same number on all ranks.
        may_start: Whether the engine lets a request start now; gets the request.
        next_prompt_token: The prompt token after the latest chunk that did not finish its prompt.

    Raises:
        ValueError: The config describes no recurrent layers, or the model has layers that do not support the requested
            speculative decoding, block size or CUDA graphs; or a cache is asked for, and its experts drop tokens.
        PlatformError: The model was made for other parallel sizes than those that run.
    """

    # These values hold while megatron's constructor runs, too.
    prefix_cache: HybridPrefixCache | None = None
    states: StateMemory | None = None
    prefill_step: PrefillStep | None = None
    shared_memory: SharedMemory | None = None
    moves: Moves | None = None
    loads: RequestLoads | None = None
    scored: ScoredPrompts | None = None
    checkpoint_slots = 0
    next_prompt_token = 0
    prefix_config: HybridPrefixConfig | None = None
    layout: PageLayout | None = None
    may_start: Callable[[Any], bool] = staticmethod(lambda request: True)
    _admissions: Admissions | None = None
    _decisions: DecisionLog | None = None
    _decodes: DecodedStates | None = None
    _forward_running = _step_failed = False
    _published_plans = 0  # of the running forward
    _swapping_out = False  # True while megatron preempts requests

    def __init__(
        self,
        model_config: TransformerConfig,
        inference_config: InferenceConfig,
        prefix: HybridPrefixConfig | None = None,
    ) -> None:
        check_contract()
        check_sizes(model_config, "the model's config", inference_config.pg_collection)
        state_config = inference_config.mamba_inference_state_config
        if prefix is None and state_config is not None and inference_config.enable_prefix_caching:
            prefix = HybridPrefixConfig(mamba_gb=inference_config.prefix_caching_mamba_gb or 0.0)
        if prefix is not None and state_config is None:
            raise ValueError(
                f"the InferenceConfig describes no recurrent layers: {DESCRIBE_ALL}; "
                "for a model without recurrent layers use megatron's own prefix cache"
            )
        if prefix is not None:
            _check_exact(model_config)
        if prefix is not None and prefix.states_are is not None:  # the config may be older than these settings
            state_config = with_state_dtype(state_config, prefix.states_are)
            inference_config = dataclasses.replace(inference_config, mamba_inference_state_config=state_config)
        self.prefix_config = prefix
        self._model_states = None if state_config is None else states_of_config(state_config)
        if self._model_states is not None:
            self._model_states.check(
                block_tokens=inference_config.block_size_tokens, cuda_graph_impl=model_config.cuda_graph_impl
            )
        if prefix is not None and prefix.exact and self._model_states is not None:
            check_exact_config(prefix, inference_config, self._model_states.quanta)
        # Processed log-probs depend on a request's temperature and filters, so they are not shared.
        shared = prefix is not None and inference_config.logprobs_mode == "raw_logprobs"
        scores_bytes = int(prefix.prompt_log_probs_gb * 2**30) if prefix is not None and shared else 0
        self._scores = ScoreTable(scores_bytes, inference_config.block_size_tokens)
        self._requests = RequestBook(self._scores, 0.0 if prefix is None else prefix.verify_hits)
        if prefix is not None:
            # Keep megatron from allocating its own cache, and from warning about it.
            inference_config = dataclasses.replace(inference_config, enable_prefix_caching=False)
            if prefix.cache_gb is not None:
                inference_config = one_budget(inference_config, prefix.cache_gb, model_config)
        super().__init__(model_config=model_config, inference_config=inference_config)
        if prefix is not None:
            self._make_cache(prefix)

    def _make_cache(self, prefix: HybridPrefixConfig) -> None:
        self.enable_prefix_caching = True
        self._decisions = DecisionLog(self.config.pg_collection) if prefix.check_ranks else None
        groups = self.config.pg_collection
        host_fields: dict[str, Any] = {}
        if prefix.host_gb and self.checkpoint_slots:
            self.moves = HostMoves(
                self._tier_tensors,
                lambda: self.shared_memory,
                prefix,
                groups,
                block_tokens=self.block_size_tokens,
                components=self._model_states.slots if self._model_states is not None else None,
            )
            host_fields = self.moves.cache_fields
        elif self.layout is not None:
            self.moves = Moves(lambda: self.shared_memory)
        counts = block_counts(self.kv_block_allocator)
        sizes: dict[str, Any]
        if self.layout is not None:
            # Ranks differ in the bytes of a block and of a state, not in the layout.
            total_blocks, page_blocks = self.layout.total_blocks, self.layout.page_blocks
            sizes = {
                "cache_bytes": total_blocks,
                "block_bytes": 1,
                "state_bytes": page_blocks,
                "share_live_states": not self.num_speculative_tokens,
                "first_state_slot": own_slots(max_requests=self.max_requests, drafts=self.num_speculative_tokens),
                "bytes_budget": total_blocks * self.layout.block_bytes,
            }
        else:
            total_blocks = counts.total - 1
            sizes = {
                "kv_blocks": total_blocks,
                "state_slots": self.checkpoint_slots,
                "first_state_slot": self.max_requests,
                "bytes_budget": self.checkpoint_slots * self.state_layout.slot_bytes,
            }
        cache = self.prefix_cache = HybridPrefixCache(
            block_tokens=self.block_size_tokens,
            eviction_policy=prefix.eviction_policy,
            retention_interval_tokens=prefix.retention_interval_tokens,
            beside=self._scores,
            **sizes,
            **host_fields,
        )
        self.kv_block_allocator: HybridPrefixBlockAllocator = HybridPrefixBlockAllocator(
            self, total_blocks + 1, min(counts.paused, total_blocks - 1), cache=cache
        )
        cache.loads.set_block_routing(self.kv_block_allocator.block_routing.get)
        cache.blocks.set_on_move(self.kv_block_allocator.move_routing)
        if self.checkpoint_slots and (prefix.caches_answers or self.host_moves is not None):
            self._decodes = DecodedStates(self, cache, self._note, keep=prefix.caches_answers)
        self.scored = ScoredPrompts(self, cache, self._scores, keeps_log_probs=self.is_exact)
        self._admissions = Admissions(self, cache, self._requests, self.scored, self._note)
        if self.moves is not None:
            self.moves.serve(cache)
        if self.host_moves is not None:
            self.loads = RequestLoads(self, cache, self.host_moves, self._requests, self._note)
        reports.report_start(self, prefix)

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def state_layout(self) -> SlotLayout:
        """Content of one slot on this rank."""
        assert self._model_states is not None
        return self._model_states.slots

    @property
    def coalesces(self) -> bool:
        """Whether requests wait for prefixes that other requests are computing."""
        return self.prefix_config is not None and self.prefix_config.coalesce_prefixes and self.checkpoint_slots > 0

    @property
    def is_exact(self) -> bool:
        """Whether steps are exact bit for bit (``HybridPrefixConfig.exact``)."""
        return self.prefix_config is not None and self.prefix_config.exact is not None

    @property
    def host_moves(self) -> HostMoves | None:
        """The host tier, or None."""
        return self.moves if isinstance(self.moves, HostMoves) else None

    def allocate_kv(self) -> bool:
        """See ContextSeam: with ``cache_gb``, KV is a view of the memory that it shares with the states."""
        if self.prefix_config is None or self.prefix_config.cache_gb is None:
            return False
        before, after = self.kv_shape
        block = BlockShape(before=before, after=after, dtype=self.params_dtype)
        own = own_slots(max_requests=self.max_requests, drafts=self.num_speculative_tokens)
        if self.layout is None:
            self.layout = agree_on_layout(
                self.prefix_config.cache_gb,
                block_bytes=block.bytes,
                state_bytes=slot_bytes(self.state_layout),
                own_slots=own,
                groups=self.config.pg_collection,
            )
            self.checkpoint_slots = self.layout.pages
        self.shared_memory = SharedMemory(
            self.layout, block=block, slots=self.state_layout, own_slots=own, device=torch.cuda.current_device()
        )
        self.memory_buffer = self.shared_memory.kv
        return True

    def allocate_states(self) -> None:
        """See ContextSeam: megatron's live states and this cache's checkpoints, in one tensor per component."""
        assert self._model_states is not None
        if self.prefix_config is not None and self.prefix_config.mamba_gb is not None:
            slots = self.state_layout.slots_within(int(self.prefix_config.mamba_gb * 2**30))
            self.checkpoint_slots = min_over_model_ranks(slots, self.config.pg_collection) or 0
        states = self.states = StateMemory(
            self._model_states,
            max_requests=self.max_requests,
            checkpoint_slots=self.checkpoint_slots,
            drafts=self.num_speculative_tokens,
            block_tokens=self.block_size_tokens,
            max_tokens=self.max_tokens,
            device=torch.cuda.current_device(),
            shared=self.shared_memory,
        )
        self.make_state_metadata()
        self.prefill_step = states.step
        large = {f"mamba_{name}_states": tensor for name, tensor in states.pool.tensors.items()}
        large |= {f"mamba_intermediate_{name}_states": tensor for name, tensor in states.drafted.items()}
        for name, tensor in large.items():  # megatron reads these attributes
            setattr(self, name, tensor)
        if self.shared_memory is not None:  # the others are views of it
            self.shared_memory_buffer = self.shared_memory.buffer
            large = {"shared_memory_buffer": self.shared_memory.buffer}
        self.offload_with_engine(large)

    @property
    def state_pool(self) -> StateSlots | None:
        """Memory of the recurrent states by slot, or None."""
        return None if self.states is None else self.states.pool

    def _tier_tensors(self) -> dict[EntryKind, list[torch.Tensor]]:
        if self.shared_memory is not None:
            return {EntryKind.KV: [self.shared_memory.kv_rows], EntryKind.STATE: [self.shared_memory.state_rows]}
        kv = self.memory_buffer if self.cache_mla_latent else self.memory_buffer.flatten(0, 1)
        assert self.states is not None
        return {EntryKind.KV: [kv], EntryKind.STATE: list(self.states.pool.tensors.values())}

    def zero_live_states(self, live_indices: list[int]) -> None:
        """See ContextSeam."""
        assert self.states is not None
        if self.moves is not None:
            self.moves.launch(send=False)  # what was in these slots goes elsewhere first
        self.states.pool.zero(sorted({self.states.live.slot(index) for index in live_indices}))

    def live_slots(self, live_indices: torch.Tensor) -> torch.Tensor:
        """See ContextSeam."""
        assert self.states is not None
        return self.states.live.of(live_indices)

    def layer_states(self, layer_number: int, *, intermediate: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See ContextSeam."""
        states = self.states_of_layer(layer_number, drafted=intermediate)
        return states["conv"], states["ssm"]

    def states_of_layer(self, layer_number: int, *, drafted: bool = False) -> dict[str, torch.Tensor]:
        """States of a recurrent layer by component name: (slots, *shape), live slots and checkpoints.

        Args:
            layer_number: Number of the layer on this pipeline stage, from 1.
            drafted: Return the states after each drafted token instead, (slots, drafts + 1, *shape).
        """
        assert self.states is not None
        return self.states.of_layer(self.layer_map[layer_number - 1], drafted=drafted)

    def deallocate_inference_state_buffers(self) -> None:
        """See upstream; drops the pool's tensors if megatron deletes them."""
        if self.moves is not None and self.is_tensor_state_allocated:
            self.moves.finish()
        super().deallocate_inference_state_buffers()
        if not self.has_tensors:
            self.states = self.prefill_step = self.shared_memory = None

    # -- match, admit, plan --------------------------------------------------------------------------------------------

    def prefix_request(self, req: DynamicInferenceRequest) -> PrefixRequest:
        """Keys and cache options of a request; made once, and again after the weights change."""
        assert self.prefix_cache is not None
        return self._requests.of(req, self.prefix_cache)

    def continue_request(self, old: DynamicInferenceRequest, new: DynamicInferenceRequest) -> None:
        """A preempted request, or one that starts over, goes on as ``new``: its prompt is counted once."""
        if self.prefix_cache is not None:
            self._requests.carry_over(old, new, self.prefix_cache)

    def is_counted(self, req: DynamicInferenceRequest) -> bool:
        """Whether a forward of the request's prompt was published, so that the prompt and what it reused are counted."""
        return self.prefix_cache is not None and self.prefix_request(req).counted_tokens > 0

    @property
    def has_own_layers(self) -> bool:
        """Whether the model has layers that only this package's engine runs."""
        return needs_this_package(self.config.mamba_inference_state_config)

    def lost_tokens(self, req: DynamicInferenceRequest) -> int:
        """Prompt tokens with cached KV at admission that were computed because there was no state."""
        return 0 if self.prefix_cache is None else self.prefix_request(req).lost_tokens

    def blocks_of_chunk(self, req: DynamicInferenceRequest, chunk_tokens: int) -> ChunkBlocks | None:
        """See ContextSeam."""
        return None if self._admissions is None else self._admissions.blocks_of_chunk(req, chunk_tokens)

    def check_availability(self, req: DynamicInferenceRequest) -> tuple[bool, bool, bool]:
        """See upstream: whether there is room for the request, its tokens, its KV. Read-only."""
        return super().check_availability(req) if self._admissions is None else self._admissions.room_for(req)

    def add_request(self, req: DynamicInferenceRequest, prefill_chunk_length: int | None = None) -> None:
        """See upstream. Takes everything that the chunk needs, or raises and takes nothing.

        Raises:
            ContextOverflowError: There is no room; the subclass says what is missing.
            ValueError: The chunk is empty, or longer than the rest of the prompt.
        """
        length = req.remaining_prompt_length if prefill_chunk_length is None else prefill_chunk_length
        if self._admissions is None or not self.is_tensor_state_allocated:
            super().add_request(req, prefill_chunk_length)
        else:
            self._admissions.admit(req, length)
        if length < req.remaining_prompt_length:
            self.next_prompt_token = int(req.remaining_prompt_tokens[length])

    def chunk_on_grid(self, req: DynamicInferenceRequest) -> int | None:
        """Tokens of the step's budget that the next chunk of a prompt may use, so that it ends on the grid of the scans.

        Returns:
            None: the chunk is the rest of the prompt. 0: the step has too little room for a chunk.
        """
        assert self._model_states is not None
        length, start = req.remaining_prompt_length, req.finished_chunk_token_count
        end = start + length
        if not start:
            start = self.skipped_tokens_of_chunk(req, length)
        budget = self.max_tokens - self.active_token_count
        last = end_on_grid(start=start, budget=budget, end=end, quantum=math.lcm(*self._model_states.quanta))
        return None if last == end else last - start

    def add_beside_chunk(self, req: DynamicInferenceRequest) -> None:
        """Admit a whole prompt while another prompt waits between two chunks; its hidden row moves on by one.

        Raises:
            ContextOverflowError: As `add_request`; nothing changes.
        """
        if self.total_request_count + 1 >= self.max_requests:
            raise RequestOverflowError(req.request_id)
        rows.move_hidden_row(self, down=True)
        try:
            self.add_request(req)
        except BaseException:
            rows.move_hidden_row(self, down=False)
            raise

    # -- run -----------------------------------------------------------------------------------------------------------

    def initialize_attention_state(self, *args: Any, **kwargs: Any) -> Any:
        """See upstream."""
        if self._decisions is not None:
            self._note(lambda: reports.describe_forward(self))
            self._decisions.compare()
        self._forward_running = True  # already: what zeros live states and copies entries is launched here
        with one_thread():
            result = super().initialize_attention_state(*args, **kwargs)
        if self.num_prefill_requests:
            self.allow_one_token_prefills()
        return result

    def step_plans(self) -> list[StepPlan]:
        """Plans of the cache for the next or running forward."""
        return list(self._requests.plans())

    def prepare_prefill(self, sequences: int, *, padded_tokens: int, padded_sequences: int) -> None:
        """See ContextSeam."""
        assert self.prefill_step is not None
        self.prefill_step.prepare(self._prefill_spans(sequences), tokens=padded_tokens, sequences=padded_sequences)

    def show_prefill(self) -> None:
        """See ContextSeam."""
        assert self.prefill_step is not None
        self.prefill_step.show()

    def _prefill_spans(self, sequences: int) -> list[PrefillSpan]:
        """Spans of the last ``sequences`` active rows: what each computes in this step, by the cache's plan."""
        of_rows = slice(self.total_request_count - sequences, self.total_request_count)
        columns = (
            self.request_ids[of_rows],
            self.request_kv_length_offsets[of_rows],
            self.request_query_lengths[of_rows],
            self.live_slots(self.live_indices[of_rows]),
        )
        spans = []
        for request_id, start, tokens, live_slot in zip(*(column.tolist() for column in columns), strict=True):
            plan = self._requests.plan_of(request_id)  # None for rows that warm up CUDA graphs
            source = live_slot if plan is None or plan.source_slot is None else plan.source_slot
            kept = () if plan is None else plan.checkpoints
            spans.append(
                PrefillSpan(start_tokens=start, tokens=tokens, source_slot=source, live_slot=live_slot, kept=kept)
            )
        return spans

    def transfer_bookkeeping_to_gpu(self, skip_token_input_ids: bool = False, record_done_event: bool = False) -> Any:
        """See upstream; source and target slots are copied first, so upstream's event covers them, too.

        The CPU waits for upstream's copies, and so for all launches before them. Loads are waited for afterwards.
        """
        if self.moves is not None:
            self.moves.launch(send=False)
        if self.prefill_step is not None and self.prefill_is_pending:
            self.prefill_step.copy()
        done = super().transfer_bookkeeping_to_gpu(skip_token_input_ids, record_done_event)
        if self.moves is not None:
            self.moves.wait_for_loads(self._requests.plans())
        return done

    def forward_launched(self) -> None:
        """Do what need not precede a forward, nor wait for it: the device is busy now. Publish, and launch copies to the host."""
        plans = self.step_plans()
        if self._can_be_published(plans):
            self._publish(failed=set())
            self._published_plans = len(plans)
        if self.moves is not None:
            self.moves.forward_launched()

    def calculate_log_probs_tensors(
        self,
        logits: torch.Tensor,
        new_tokens: torch.Tensor,
        only_last_token_logits: bool | None = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """See upstream. Drops padding rows, which upstream includes."""
        if not only_last_token_logits and not self.is_decode_only():
            logits = logits[:, : self.active_token_count]
        return super().calculate_log_probs_tensors(logits, new_tokens, only_last_token_logits, *args, **kwargs)

    def log_probs_of(self, logits: torch.Tensor) -> torch.Tensor | None:
        """See ContextSeam."""
        return log_softmax(logits) if self.is_exact else None

    def step_sampled(self, logits: torch.Tensor) -> None:
        """Keep what later prompts need of a forward's logits, before megatron computes the log-probs.

        Args:
            logits: (1, tokens, vocabulary), on the device; all tokens of the forward if a request wants log-probs of its
                prompt.
        """
        if self.scored is not None and (requests := self._requests.in_step()):
            self.scored.capture(requests, logits)

    # -- publish -------------------------------------------------------------------------------------------------------

    def update_requests(
        self, active_requests_mask: torch.Tensor, new_tokens: torch.Tensor, new_speculative_tokens: Any = None
    ) -> Any:
        """See upstream. Called after a forward succeeded, so first publishes what `forward_launched` left.

        Then attaches the blocks that megatron allocated to their requests.
        """
        self._publish_rest()
        if self._decodes is not None:
            self._decodes.follow()
        with rows.drafts_past_the_end(self):
            result = super().update_requests(active_requests_mask, new_tokens, new_speculative_tokens)
        if self.prefix_cache is not None:
            rows.attach_blocks(self, self.prefix_cache)
        if self.num_speculative_tokens:
            rows.find_blocks_of_tokens(self)
        self._forward_is_over()
        return result

    def resolve_requests(self, active_requests_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See upstream and `update_requests`."""
        self._publish_rest()
        finished, continuing = super().resolve_requests(active_requests_mask)
        self._forward_is_over()
        return finished, continuing

    def _forward_is_over(self) -> None:
        self._forward_running, self._published_plans = False, 0

    def forget_request(self, request_id: int) -> None:
        """Drop what a request without a row holds on the device and on the host: it ended."""
        if self.loads is not None:
            self.loads.forget(request_id)

    @property
    def loads_wait(self) -> bool:
        """Whether waiting requests hold loaded entries."""
        return self.loads is not None and self.prefix_cache is not None and self.prefix_cache.loads.has_waiting

    def failed_loads(self) -> set[int]:
        """Requests of the last forward that must be recomputed; see `RequestLoads.failed`.

        Also those whose prompt's log-probs another request promised and did not deliver.
        """
        failed = set() if self.loads is None else self.loads.failed()
        return failed if self.scored is None else failed | self.scored.without_promised(self._requests.in_step())

    def _can_be_published(self, plans: list[StepPlan]) -> bool:
        """Whether what a forward that was just launched computes may be matched.

        False if something about it is known, or kept, only once it is over: whether loads were right, hits that are verified, log-probs
        of prompts, routing of experts. Also False while CUDA graphs are captured: that forward is of no request.
        """
        if self.prefix_config is None or self.prefix_config.verify_hits or self.moe_enable_routing_replay:
            return False
        if self.is_creating_cuda_graphs:
            return False
        scored = any(known.scored is not None for known in self._requests.in_step())
        return not scored and all(plan.load_id is None for plan in plans)

    def _publish_rest(self) -> None:
        self._publish(failed=set() if self.loads is None else self.loads.take_failed())

    def _publish(self, *, failed: set[int]) -> None:
        for known, plan in self._requests.take_plans():
            assert self.prefix_cache is not None and self.prefix_config is not None and self.scored is not None
            if plan.request_id in failed:
                self.prefix_cache.fail_load(plan)
                continue
            if self.prefix_config.verify_hits:
                verify_plan(self, plan)
            cached = self.prefix_cache.publish(plan)
            known.counted_tokens = max(known.counted_tokens, plan.end_tokens)
            self.scored.publish(known, plan, cached=cached)

    def fail_step(self) -> None:
        """A step raised: rows, states and tokens may not belong together. Frees reserved slots. `reset` empties the cache."""
        self._step_failed = True
        if self._forward_running and self.prefix_cache is not None:
            self.prefix_cache.count_failed_forward(self._published_plans)
        self._forward_is_over()
        self._abandon_plans("forward_failed")

    def _abandon_plans(self, reason: str) -> None:
        if self.loads is not None:
            self.loads.forget_step()
        if self.scored is not None:
            self.scored.forget_step()
        for _, plan in self._requests.take_plans():
            assert self.prefix_cache is not None
            self.prefix_cache.abandon(plan, reason)

    # -- decode --------------------------------------------------------------------------------------------------------

    def can_prepare_requests(self) -> bool:
        """See upstream. False between two chunks of a prompt: upstream ignores its hidden row and its blocks."""
        return self.chunked_prefill_request_id == -1 and bool(super().can_prepare_requests())

    def prepare_requests(self) -> None:
        """See upstream; attaches the blocks that it allocated to their requests."""
        if self._decodes is not None:
            self._decodes.follow()
        past_the_end = self.rows_past_the_end()
        super().prepare_requests()
        if self.prefix_cache is not None:
            rows.attach_blocks(self, self.prefix_cache)
        if len(past_the_end):
            rows.add_dummy_blocks(self, past_the_end)
            rows.find_blocks_of_tokens(self)

    # -- release -------------------------------------------------------------------------------------------------------

    def evict_overflow_paused_requests(self, *args: Any, **kwargs: Any) -> Any:
        """See upstream; with a host tier, preempted requests swap out to the host."""
        if not self.paused_request_count:
            return None
        if self.is_exact:  # these start over: a prefill of their answer would differ from what their decode computed
            return super().evict_overflow_paused_requests(*args, **kwargs)
        with self._swap_outs():
            return super().evict_overflow_paused_requests(*args, **kwargs)

    @contextmanager
    def _swap_outs(self) -> Iterator[None]:
        self._swapping_out = self.loads is not None
        try:
            yield
        finally:
            self._swapping_out = False

    def release_memory_blocks_from_request_indexes(self, request_indexes: torch.Tensor) -> None:
        """See upstream: finished, preempted and aborted requests release everything; blocks with a key stay cached."""
        if self.prefix_cache is None:
            table = self.request_to_kv_block_ids[request_indexes]
            table[table == self.kv_block_allocator.dummy_block_idx] = -1  # see `rows.add_dummy_blocks`
            self.request_to_kv_block_ids[request_indexes] = table
            super().release_memory_blocks_from_request_indexes(request_indexes)
            return
        request_ids = self.request_ids[request_indexes].tolist()
        if self._swapping_out:
            assert self.loads is not None and self.host_moves is not None and self._decodes is not None
            live_indices = self.live_indices[request_indexes]
            slots = self.live_slots(live_indices).tolist()
            for request_id, live_index, slot in zip(request_ids, live_indices.tolist(), slots, strict=True):
                self.loads.swap_out(request_id, self._decodes.computed_tokens(live_index), slot)
            self.host_moves.launch(send=False)
        for request_id in request_ids:
            plan = self._requests.take_plan(request_id)
            if plan is not None:
                self.prefix_cache.abandon(plan, "released")
            self.prefix_cache.release(request_id)
        self.request_to_kv_block_ids[request_indexes] = -1
        assert self.states is not None
        self.states.live.release(self.live_indices[request_indexes])
        self.mamba_metadata.free_slots(request_indexes)

    def remove_waiting_row(self, request_id: int) -> bool:
        """Remove a paused request, or a prompt between two chunks, from the context.

        Call it between two steps only, and only if nothing of the request is in flight.

        Returns:
            Whether the row existed; active rows are not removed.
        """
        row = rows.find_waiting_row(self, request_id)
        if row is None:
            return False
        self.release_memory_blocks_from_request_indexes(torch.tensor([row]))
        rows.take_out_waiting_row(self, row)
        return True

    # -- forget --------------------------------------------------------------------------------------------------------

    def reset_metadata(self, preserve_prefix_cache: bool = False, *args: Any, **kwargs: Any) -> None:
        """See upstream. KV and states are kept together or dropped together; after a forward that failed, they are dropped."""
        preserve_prefix_cache = preserve_prefix_cache and not self._step_failed
        if self.prefix_cache is not None:
            # Plans end here in either case: their requests are gone, so nothing may be published.
            self._abandon_plans("reset")
            self.prefix_cache.release_all()
            self.forget_pending_zeros()
            self._forward_is_over()
            self._step_failed = False
            if self.states is not None:
                self.states.live.reset()
        super().reset_metadata(preserve_prefix_cache, *args, **kwargs)

    @property
    def keeps_on_resume(self) -> bool:
        """Whether what is cached stays valid when the engine resumes (``HybridPrefixConfig.keep_on_resume``)."""
        return self.prefix_config is not None and self.prefix_config.keep_on_resume

    def log_dropped(self) -> None:
        """Log what a resumed engine drops, if there is anything. (Nothing is left if new weights were announced before.)"""
        assert self.prefix_cache is not None
        blocks, on_host = self.prefix_cache.blocks.cached_count, self.prefix_stats().tiers[HOST].kv_blocks
        if blocks or on_host:
            logger.warning(
                "resume() drops %d cached KV blocks and %d on the host, with their states: the weights may have changed while "
                "the engine was suspended; where they never do, set keep_on_resume=True",
                blocks,
                on_host,
            )

    def invalidate(self) -> None:
        """The weights changed: older KV and states no longer match, and running requests stop caching."""
        if self.prefix_cache is not None:
            self.prefix_cache.invalidate()

    # -- statistics and checks -----------------------------------------------------------------------------------------

    def prefix_stats(self) -> PrefixStats:
        """Statistics of the cache since the start, and its fill; all zero without a cache."""
        if self.prefix_cache is None:
            return PrefixStats()
        stats = self.prefix_cache.stats()
        if self.host_moves is not None:
            self.host_moves.count(stats)
        if self.scored is not None:
            self.scored.count(stats)
        return stats

    def memory_report(self) -> str:
        """Slots and bytes of the recurrent states on this rank; see `reports.memory_report`."""
        assert self.prefix_config is not None
        return reports.memory_report(self, self.prefix_config)

    def policy_report(self) -> str:
        """What is kept and what is evicted, in one line."""
        assert self.prefix_config is not None
        return reports.policy_report(self, self.prefix_config)

    def check_integrity(self) -> None:
        """Raises CacheCorruptionError if the cache is corrupt, or disagrees with megatron's tables; for tests."""
        if self.prefix_cache is not None and self.scored is not None:
            self.prefix_cache.check_integrity()
            self.scored.check()
            if self.has_tensors:
                rows.check_rows(self, self.prefix_cache)

    def _note(self, decision: Callable[[], str]) -> None:
        """Log a decision that must be the same on all ranks; put into words only if ranks are compared."""
        if self._decisions is not None:
            self._decisions.note(decision())


def _check_exact(model_config: TransformerConfig) -> None:
    """Raise ValueError, in one line, if a token's result depends on the batch, so that no hit can be exact."""
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        if model_config.num_moe_experts and (factor := getattr(model_config, name)) is not None:
            raise ValueError(
                f"{name}={factor} does not go with prefix caching: which tokens are dropped depends on the batch, so a hit "
                "is not exact; use None"
            )
