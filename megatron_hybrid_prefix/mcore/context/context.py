"""`HybridPrefixContext`: megatron's dynamic inference context with this package's prefix cache.

The cache (`cache.py`) decides; this class calls it where megatron does the same:

- match: when megatron asks what a request needs;
- admit and plan: in ``add_request``;
- publish: when the forward is launched; when it is over, if it has a load, or something of it is checked or kept;
- release: when megatron releases a request's blocks.

The class holds the overridden methods of megatron, in the order in which a prompt passes them. (An override without a
docstring does what that of the overridden method says.) The other files of this folder do the work; ``layers/`` and
``mcore/state/`` read and write states.

Longer than 400 lines because all calls from megatron arrive in this class; half of it is signatures and docstrings.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection
from typing import Any, override

import torch
from megatron.core.transformer import TransformerConfig

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.layers.step import PrefillSpan, grid_tokens
from megatron_hybrid_prefix.mcore.context import reports, rows
from megatron_hybrid_prefix.mcore.context.admission import Admissions
from megatron_hybrid_prefix.mcore.context.blocks import HybridPrefixBlockAllocator
from megatron_hybrid_prefix.mcore.context.decode import DecodedStates
from megatron_hybrid_prefix.mcore.context.events import KVEvents
from megatron_hybrid_prefix.mcore.context.exact import check_exact_config, end_on_grid
from megatron_hybrid_prefix.mcore.context.request import KnownRequests, PrefixRequest, RequestLoads, StepState
from megatron_hybrid_prefix.mcore.context.scores import ScoredPrompts
from megatron_hybrid_prefix.mcore.context.slot_context import SlotContext
from megatron_hybrid_prefix.mcore.context.verify import verify_plan
from megatron_hybrid_prefix.mcore.ranks.agreement import DecisionLog, min_over_model_ranks
from megatron_hybrid_prefix.mcore.state.budget import agree_on_budget, for_cache_gb, megatrons_bytes
from megatron_hybrid_prefix.mcore.state.layout import DESCRIBE_ALL, states_of_config, with_state_dtype
from megatron_hybrid_prefix.mcore.state.moves import name_entries, open_mover, page_tokens
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.ops.invariant.log_softmax import log_softmax
from megatron_hybrid_prefix.pool.layout import SlotLayout
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout
from megatron_hybrid_prefix.pool.shared_memory import BlockShape, SharedMemory, slot_bytes
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.requests.explain import Explanation
from megatron_hybrid_prefix.requests.scores import ScoreTable
from megatron_hybrid_prefix.tiers.units import HOST, EntryKind
from megatron_hybrid_prefix.transfers.mover import DeviceMover, Mover
from megatron_hybrid_prefix.upstream.blocks import block_counts
from megatron_hybrid_prefix.upstream.check import check_overrides
from megatron_hybrid_prefix.upstream.config import InferenceConfig
from megatron_hybrid_prefix.upstream.context import ChunkBlocks
from megatron_hybrid_prefix.upstream.names import DynamicInferenceRequest, RequestOverflowError

logger = logging.getLogger(__name__)


class HybridPrefixContext(SlotContext):
    """Megatron's context, with prefix caching of hybrid models. KV, checkpoints and live states share one memory.

    Args:
        model_config: Config of the model.
        inference_config: Megatron's inference config; not changed. Of its ``prefix_caching_*`` fields only the budget is used.
        prefix: Settings of the cache; by default those of `HybridPrefixConfig`, with ``prefix_caching_mamba_gb``.

    Attributes:
        prefix_config: Settings of the cache.
        prefix_cache: The cache.
        layout: How KV and states share memory on this rank.
        moves: Copies on the device and to the host.
        host_moves: The same with a host tier, or None.
        loads: Loads that the next forward uses, and those that requests wait for.
        scored: Prompts whose log-probs are wanted.
        checkpoint_slots: Most cached states; the same number on all ranks.

    Raises:
        ValueError: As `SlotContext`; or the config describes no recurrent layers; or the model's experts drop tokens; or the memory
            is too small.
        PlatformError: The model was made for other parallel sizes than those that run.
    """

    def __init__(
        self,
        model_config: TransformerConfig,
        inference_config: InferenceConfig,
        prefix: HybridPrefixConfig | None = None,
    ) -> None:
        check_overrides()  # before the config is read
        state_config = inference_config.mamba_inference_state_config
        if prefix is None:
            prefix = HybridPrefixConfig(mamba_gb=inference_config.prefix_caching_mamba_gb)
        if state_config is None:
            raise ValueError(
                f"the InferenceConfig describes no recurrent layers: {DESCRIBE_ALL}; "
                "for a model without recurrent layers use megatron's own prefix cache"
            )
        _check_exact(model_config)
        state_config = with_state_dtype(state_config, prefix.states_are)  # the config may be older than these settings
        inference_config = dataclasses.replace(inference_config, mamba_inference_state_config=state_config)
        if prefix.exact:
            check_exact_config(prefix, inference_config, grid_tokens(states_of_config(state_config).quanta))
        reports.report_ignored(inference_config, prefix.eviction_policy)
        # Keep megatron from allocating its own cache, and from warning about it.
        inference_config = dataclasses.replace(inference_config, enable_prefix_caching=False, mamba_memory_ratio=None)
        if prefix.cache_gb is not None:
            is_exact = prefix.exact is not None
            inference_config = for_cache_gb(inference_config, prefix.cache_gb, model_config, is_exact=is_exact)
        # Megatron's constructor allocates memory and resets the context: it needs the settings, and there is no cache yet.
        self.prefix_config, self._is_made = prefix, False
        self.is_exact, self.samples_weights = prefix.exact is not None, prefix.check_weights
        self.keeps_on_resume = prefix.keep_on_resume
        super().__init__(model_config, inference_config)
        self._make_cache(prefix)
        self._is_made = True
        reports.report_start(self)

    def _make_cache(self, prefix: HybridPrefixConfig) -> None:
        self.enable_prefix_caching = True
        self.decisions = DecisionLog(self.config.pg_collection, is_on=prefix.check_ranks)
        self._step = StepState()
        # Processed log-probs depend on a request's temperature and filters, so they are not shared.
        shared = self.config.logprobs_mode == "raw_logprobs"
        scores_bytes = int(prefix.prompt_log_probs_gb * 2**30) if shared else 0
        self._scores = ScoreTable(scores_bytes, self.block_size_tokens)
        self._events = KVEvents(self, self._scores)
        on_device = DeviceMover(lambda **options: self.prefix_cache.take_copies(**options), lambda: self.shared_memory)
        self.moves, secret = open_mover(self, prefix, on_device)
        self.host_moves = self.moves if isinstance(self.moves, Mover) else None
        sizes = self.moves.sizes
        assert self.shared_memory is not None
        cache = self.prefix_cache = HybridPrefixCache(
            CacheSettings(
                block_tokens=self.block_size_tokens,
                **self.layout.cache_sizes(),
                state_slots=None if prefix.mamba_gb is None else self.checkpoint_slots,
                first_state_slot=self.shared_memory.first_page_slot,
                live_states=self.live_states,
                eviction_policy=prefix.eviction_policy,
                retention_interval_tokens=prefix.retention_interval_tokens,
                beside=self._events,
                host_pages=sizes.pages,
                host_kv_pages=sizes.pages_of[EntryKind.KV],
                host_state_pages=(sizes.pages_of[EntryKind.LIVE], sizes.pages_of[EntryKind.STATE]),
                behind=self.moves.tier,
                secret=secret,
            )
        )
        total_blocks, paused = self.layout.total_blocks, block_counts(self.kv_block_allocator).paused
        self.kv_block_allocator: HybridPrefixBlockAllocator = HybridPrefixBlockAllocator(
            self, total_blocks + 1, min(paused, total_blocks - 1), cache=cache
        )
        self._follow_decodes: Callable[[], None] = lambda: None
        if prefix.decode_checkpoints and self.checkpoint_slots:
            self._follow_decodes = DecodedStates(self, cache, self._events).follow
        self.scored = ScoredPrompts(self, cache, self._scores)
        # Number of other waiting requests with this one's prompt; None: it waits alone.
        self.group_of: Callable[[PrefixRequest], int] | None = None
        self._requests = KnownRequests(cache, self._scores, prefix.verify_hits, one_rank=not self._model_groups)
        self._admissions = Admissions(self, cache, self._requests, self._step)
        self.loads = RequestLoads(self, cache, self._requests, self._step)

    # -- memory --------------------------------------------------------------------------------------------------------

    def allocate_kv(self) -> bool:
        """KV is a view of the memory that it shares with the states."""
        before, after = self.kv_shape
        block = BlockShape(before=before, after=after, dtype=self.params_dtype, **self.routes_shape)
        if not self._is_made:
            self.layout, self.live_states = self._agree_on_budget(block)
        try:
            self.shared_memory = SharedMemory(
                self.state_layout,
                own_slots=1 if self.live_states else self.max_requests,
                rings=self.rings,
                requests=self.max_requests,
                layout=self.layout,
                kept=self._kept_layout if self.layout.page_live else None,
                block=block,
                device=torch.cuda.current_device(),
            )
        except RuntimeError as error:
            # What PyTorch raises on a GPU, and on a CPU.
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            raise MemoryError(f"{self._memory_option}: {str(error).splitlines()[0]}") from None
        self.memory_buffer = self.shared_memory.kv
        return True

    @property
    def _kept_layout(self) -> SlotLayout:
        """Content of a checkpoint's slot: that of a live state, if it has no fewer bytes, aligned."""
        live, kept = self.state_layout, self.state_layout.kept_in(self.prefix_config.checkpoint_dtype)
        return kept if slot_bytes(kept) < slot_bytes(live) else live

    @property
    def _memory_option(self) -> str:
        """What sets the size of the memory, in words."""
        prefix = self.prefix_config
        if prefix.cache_gb is not None:
            return f"cache_gb={prefix.cache_gb}"
        more = f" with mamba_gb={prefix.mamba_gb}" if prefix.mamba_gb else ""
        return f"buffer_size_gb={self.config.buffer_size_gb}{more}"

    def _agree_on_budget(self, block: BlockShape) -> tuple[PageLayout, bool]:
        """The memory is ``cache_gb``. Without it, it is what megatron allocates, and the rings and ``mamba_gb`` more."""
        config, prefix = self.config, self.prefix_config
        if prefix.cache_gb is not None:
            memory_bytes = int(prefix.cache_gb * 2**30)
        else:
            buffer_gb = config.buffer_size_gb
            if self.unified_memory_level:
                buffer_gb += config.paused_buffer_size_gb or 0
            # Megatron rounds up to one KV block, and takes states of requests from `paused_buffer_size_gb`, too.
            states = self.max_requests * megatrons_bytes(self.state_layout.slot_bytes, self.num_speculative_tokens)
            allocated = block_counts(self.kv_block_allocator).total * self.block_size_bytes + states
            memory_bytes = max(int(buffer_gb * 2**30), allocated) + int((prefix.mamba_gb or 0) * 2**30)
            memory_bytes += self.rings.bytes(self.max_requests, ALIGNMENT_BYTES)  # which megatron knows nothing of
        layout, live_states = agree_on_budget(
            memory_bytes,
            block_bytes=block.bytes,
            state_bytes=slot_bytes(self._kept_layout),
            live_bytes=slot_bytes(self.state_layout),
            rings=self.rings,
            max_requests=self.max_requests,
            option=self._memory_option,
            groups=config.pg_collection,
        )
        self.checkpoint_slots: int = layout.slots
        if prefix.mamba_gb is not None:
            # A stage without recurrent layers has room for more than the others.
            slots = int(prefix.mamba_gb * 2**30) // max(1, self._kept_layout.slot_bytes)
            self.checkpoint_slots = min_over_model_ranks(slots, config.pg_collection)
        return layout, live_states

    def zero_live_states(self, live_indices: list[int]) -> None:
        self.moves.launch()  # what was in these slots goes elsewhere first
        super().zero_live_states(live_indices)

    def deallocate_inference_state_buffers(self) -> None:
        if self.is_tensor_state_allocated:
            self.moves.finish()
        super().deallocate_inference_state_buffers()

    # -- match, admit, plan --------------------------------------------------------------------------------------------

    def serve(self, model: Any) -> None:
        if self.host_moves is not None:
            name_entries(self, model)
            self.prefix_cache.loads.use_rate(page_tokens(self, model))

    @override
    def room_for(self, requests: int) -> int:
        return min(block_counts(self.kv_block_allocator).active, self.prefix_cache.blocks.room_for(requests))

    def prefix_request(self, req: DynamicInferenceRequest, *, arrives: bool = False) -> PrefixRequest:
        """Made once, and again after the weights change."""
        return self._requests.of(req, arrives=arrives)

    @override
    def continue_request(self, old: DynamicInferenceRequest, new: DynamicInferenceRequest) -> None:
        self._requests.carry_over(old, new)

    def explain(self, tokens: torch.Tensor, params: Any) -> Explanation:
        return self._requests.explain(tokens, params)

    def blocks_of_chunk(self, req: DynamicInferenceRequest, chunk_tokens: int) -> ChunkBlocks | None:
        return self._admissions.blocks_of_chunk(req, chunk_tokens)

    @override
    def check_availability(self, req: DynamicInferenceRequest) -> tuple[bool, bool, bool]:
        """Whether there is room for the request, its tokens, its KV. Read-only."""
        return self._admissions.room_for(req)

    def add_chunk(self, req: DynamicInferenceRequest, length: int) -> None:
        """Takes everything that the chunk needs, or raises and takes nothing.

        Raises:
            ContextOverflowError: There is no room; the subclass says what is missing.
            ValueError: The chunk is empty, or longer than the rest of the prompt.
        """
        if not self.is_tensor_state_allocated:
            super().add_chunk(req, length)
        else:
            self._admissions.admit(req, length)

    def chunk_on_grid(self, req: DynamicInferenceRequest) -> int | None:
        """Tokens of the step's budget that the next chunk of a prompt may use, so that it ends on the grid of the scans.

        Returns:
            None: the chunk is the rest of the prompt. 0: the step has too little room for a chunk.
        """
        length, start = req.remaining_prompt_length, req.finished_chunk_token_count
        end = start + length
        if not start:
            start = self.chunk_needs(req, length)[1]
        budget = self.max_tokens - self.active_token_count
        last = end_on_grid(start=start, budget=budget, end=end, quantum=grid_tokens(self.model_states.quanta))
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
        """Ranks compare their decisions before a forward."""
        self.decisions.note(lambda: reports.describe_forward(self))
        self.decisions.compare()
        return super().initialize_attention_state(*args, **kwargs)

    def prefill_span(self, request_id: int, start_tokens: int, tokens: int, live_row: int, ring: int) -> PrefillSpan:
        """By the cache's plan."""
        if request_id not in self._step.parts:  # rows that warm up CUDA graphs
            return super().prefill_span(request_id, start_tokens, tokens, live_row, ring)
        _, plan = self._step.parts[request_id]
        memory, source = self.states.memory, plan.source_slot
        if source is not None and memory.encodes and memory.is_encoded(source):
            self._step.restores[self.states.live.slot(ring)] = source
            source = None
        return PrefillSpan(
            start_tokens=start_tokens,
            tokens=tokens,
            source_slot=live_row if source is None else memory.row(source),
            live_slot=live_row,
            kept={kept.position_tokens: memory.row(kept.slot) for kept in plan.checkpoints},
            ring=ring,
        )

    def transfer_bookkeeping_to_gpu(self, skip_token_input_ids: bool = False, record_done_event: bool = False) -> Any:
        """The CPU waits for upstream's copies, and so for all launches before them. Loads are waited for afterwards."""
        self.moves.launch()
        done = super().transfer_bookkeeping_to_gpu(skip_token_input_ids, record_done_event)
        self.loads.wait()
        if restores := self._step.restores:
            self.states.memory.restore([*restores.values()], [*restores])
            restores.clear()
        return done

    def forward_launched(self, logits: torch.Tensor) -> None:
        """Also does what need not precede a forward, nor wait for it: publishes, and launches copies to the host."""
        super().forward_launched(logits)
        plans = len(self._step.parts)
        if self._can_be_published():
            self._publish(failed=set())
            self._step.published_plans += plans
        self.moves.send()

    def log_probs_of(self, logits: torch.Tensor) -> torch.Tensor | None:
        return log_softmax(logits) if self.is_exact else None

    def step_sampled(self, logits: torch.Tensor) -> None:
        """Keeps what later prompts need of a forward's logits."""
        wanted = [part for part in self._step.parts.values() if part[0].scored is not None]
        if wanted:
            self.scored.capture(wanted, logits)

    # -- publish -------------------------------------------------------------------------------------------------------

    def update_requests(
        self, active_requests_mask: torch.Tensor, new_tokens: torch.Tensor, new_speculative_tokens: Any = None
    ) -> Any:
        """Called after a forward succeeded, so first publishes what `forward_launched` left.

        Then attaches the blocks that megatron allocated to their requests.
        """
        self._publish_rest()
        self._follow_decodes()
        if self.moe_enable_routing_replay:  # before their blocks are released
            self.finished_routes = rows.routes_of_finished(self, active_requests_mask)
        result = super().update_requests(active_requests_mask, new_tokens, new_speculative_tokens)
        rows.attach_blocks(self, self.prefix_cache)
        self._step.published_plans = 0
        return result

    def resolve_requests(self, active_requests_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See upstream and `update_requests`. Called after a forward succeeded, with asynchronous scheduling."""
        self._publish_rest()
        finished, continuing = super().resolve_requests(active_requests_mask)
        self._step.published_plans = 0
        return finished, continuing

    def forget_request(self, request_id: int) -> None:
        self.prefix_cache.loads.drop_fetch(request_id)
        self.prefix_cache.loads.drop_swapped_out(request_id)

    @property
    def loads_wait(self) -> bool:
        return bool(self.prefix_cache.loads.fetches)

    def failed_requests(self, wrong_ids: Collection[int], active_ids: Collection[int]) -> set[int]:
        """Also those whose load failed (`RequestLoads.failed`), whose prompt's log-probs another request promised and did not deliver,
        or that hold what ``wrong_ids`` computed.
        """
        failed = self.loads.failed()
        for request_id, (known, _) in self._step.parts.items():
            if known.scored is not None and known.scored.waits_for_promises:
                known.scored.lose_step()
                failed.add(request_id)
        for request_id in sorted(wrong_ids):
            self._step.parts.pop(request_id, None)
            failed |= self.prefix_cache.withdraw(request_id, rows.wrong_from(self, request_id)) & {*active_ids}
        return failed | {*wrong_ids}

    def _can_be_published(self) -> bool:
        """Whether what a forward that was just launched computes may be matched.

        False if something about it is known, or kept, only once it is over: whether loads were right, hits that are verified, log-probs
        of prompts. Also False while CUDA graphs are captured: that forward is of no request.
        """
        if self.prefix_config.verify_hits or self.is_creating_cuda_graphs:
            return False
        return all(known.scored is None and plan.load is None for known, plan in self._step.parts.values())

    def _publish_rest(self) -> None:
        self._publish(failed=self.loads.failed())
        self.moves.step_ended()

    def _publish(self, *, failed: set[int]) -> None:
        for known, plan in self._step.take():
            if plan.request_id in failed:
                self.prefix_cache.fail_load(plan)
                continue
            if self.prefix_config.verify_hits:
                verify_plan(self, plan, self._step)
            cached = self.prefix_cache.publish(plan)
            if self.has_kv_listeners and (cached or plan.load is not None):
                size = self.block_size_tokens
                # What is loaded may come from another engine.
                first = 0 if plan.load is not None else plan.start_tokens // size
                end = (plan.end_tokens if cached else plan.start_tokens) // size
                self._events.stored(known.chain, first, known.prompt[first * size : end * size])
            known.counted_tokens = max(known.counted_tokens, plan.end_tokens)
            if known.scored is not None:
                self.scored.publish(known, plan, cached=cached)

    def fail_step(self) -> None:
        """A step raised: rows, states and tokens may not belong together. Frees reserved slots. `reset` empties the cache."""
        self._step.fail()
        self._abandon_plans("forward_failed")

    def _abandon_plans(self, reason: str) -> None:
        self.scored.forget_step()
        for _, plan in self._step.take():
            self.prefix_cache.abandon(plan, reason)

    # -- decode --------------------------------------------------------------------------------------------------------

    @property
    @override
    def _prefills_may_decode(self) -> bool:
        return not self._step.parts and super()._prefills_may_decode  # else it is published once it is over

    def prepare_requests(self) -> None:
        """Attaches the blocks that it allocated to their requests."""
        self._follow_decodes()
        super().prepare_requests()
        rows.attach_blocks(self, self.prefix_cache)

    # -- release -------------------------------------------------------------------------------------------------------

    def evict_overflow_paused_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Preempted requests swap out to the host."""
        self._step.preempts = True
        try:
            return super().evict_overflow_paused_requests(*args, **kwargs)
        finally:
            self._step.preempts = False

    @override
    def release_memory_blocks_from_request_indexes(self, request_indexes: torch.Tensor) -> None:
        """Finished, preempted and aborted requests release everything; blocks with a key stay cached."""
        request_ids = self.request_ids[request_indexes].tolist()
        # Exact ones resume at their last cached block: a state inside of a chunk is none that a prefill has.
        if self._step.preempts and self.host_moves is not None and not self.is_exact:
            computed = (self.request_kv_length_offsets + self.request_query_lengths)[request_indexes].tolist()
            live_indices = self.live_indices[request_indexes].tolist()
            self.states.flush(live_indices, computed, [NO_SLOT] * len(live_indices))
            for request_id, tokens, live_index in zip(request_ids, computed, live_indices, strict=True):
                self.prefix_cache.loads.swap_out(request_id, tokens, self.states.live.slot(live_index))
            self.moves.launch()
        for request_id in request_ids:
            if request_id in self._step.parts:
                self.prefix_cache.abandon(self._step.parts.pop(request_id)[1], "released")
            self.prefix_cache.release(request_id, comes_back=self._step.preempts)
        self.request_to_kv_block_ids[request_indexes] = -1
        self.states.live.release(self.live_indices[request_indexes])
        self.mamba_metadata.free_slots(request_indexes)

    # -- forget --------------------------------------------------------------------------------------------------------

    def reset_metadata(self, preserve_prefix_cache: bool = False, *args: Any, **kwargs: Any) -> None:
        """KV and states are kept together or dropped together; after a forward that failed, they are dropped."""
        if self._is_made:
            preserve_prefix_cache = preserve_prefix_cache and not self._step.failed
            # Plans end here in either case: their requests are gone, so nothing may be published.
            self._abandon_plans("reset")
            self.prefix_cache.release_all()
            self.forget_pending_zeros()
            self._step.published_plans, self._step.failed = 0, False
            if self.states is not None:
                self.states.live.reset()
        super().reset_metadata(preserve_prefix_cache, *args, **kwargs)

    def flush(self) -> None:
        self.moves.launch()
        self.moves.send()

    def invalidate(self, why: str = "") -> None:
        """The weights changed: older KV and states no longer match, and running requests stop caching.

        Args:
            why: Log what is dropped, if there is anything, and this. (Nothing is left if new weights were announced before.)
        """
        stats = self.prefix_cache.stats()
        blocks, on_host = self.prefix_cache.memory_use().keyed_blocks, stats.tiers[HOST].kv_blocks
        if why and (blocks or on_host):
            logger.warning(
                "%d cached KV blocks and %d on the host are dropped, with their states: %s", blocks, on_host, why
            )
        self.prefix_cache.invalidate()

    # -- statistics and checks -----------------------------------------------------------------------------------------

    def prefix_stats(self) -> PrefixStats:
        stats = self.prefix_cache.stats()
        if self._step.failed_plans:
            stats.count_fallback("forward_failed", self._step.failed_plans)
        stats.verified_hits, stats.verify_mismatches = self._step.verified_hits, self._step.verify_mismatches
        stats.bytes_budget = self.layout.total_blocks * self.layout.block_bytes
        if self.host_moves is not None:
            self.host_moves.count(stats)
        self.scored.count(stats)
        return stats

    def memory_report(self) -> str:
        """Slots and bytes of the recurrent states on this rank; see `reports.memory_report`."""
        return reports.memory_report(self)

    def policy_report(self) -> str:
        """Which states are kept and evicted, in one line."""
        return reports.policy_report(self)

    def check_integrity(self) -> None:
        self.prefix_cache.check_integrity()
        self.scored.check()
        if self.has_tensors:
            rows.check_rows(self, self.prefix_cache)


def _check_exact(model_config: TransformerConfig) -> None:
    """Raise ValueError, in one line, if a token's result depends on the batch, so that no hit can be exact."""
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        if model_config.num_moe_experts and (factor := getattr(model_config, name)) is not None:
            raise ValueError(
                f"{name}={factor} does not go with prefix caching: which tokens are dropped depends on the batch, so a hit "
                "is not exact; use None"
            )
