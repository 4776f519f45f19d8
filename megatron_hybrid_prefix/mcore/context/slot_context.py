"""`SlotContext`: megatron's dynamic inference context, whose recurrent layers read and write states by slot.

It has no prefix cache. `HybridPrefixContext` (``context.py``) adds one.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, override

import torch
from megatron.core.transformer import TransformerConfig

from megatron_hybrid_prefix.layers.step import PrefillSpan, PrefillStep
from megatron_hybrid_prefix.mcore.context import rows
from megatron_hybrid_prefix.mcore.context.no_cache import NoCache
from megatron_hybrid_prefix.mcore.ranks.agreement import max_on_device, model_groups
from megatron_hybrid_prefix.mcore.state.layout import ModelStates, routes_of_block, states_of_config, with_state_dtype
from megatron_hybrid_prefix.mcore.state.memory import StateMemory
from megatron_hybrid_prefix.ops.rings import RingRows
from megatron_hybrid_prefix.platform.sizes import check_sizes
from megatron_hybrid_prefix.pool.layout import RingLayout, SlotLayout
from megatron_hybrid_prefix.pool.shared_memory import SharedMemory
from megatron_hybrid_prefix.upstream.check import check_overrides
from megatron_hybrid_prefix.upstream.config import InferenceConfig
from megatron_hybrid_prefix.upstream.context import ContextSeam, one_thread
from megatron_hybrid_prefix.upstream.graphs import block_problem, finer_kinds
from megatron_hybrid_prefix.upstream.mixer import replays_chunks
from megatron_hybrid_prefix.upstream.names import DynamicInferenceRequest

if TYPE_CHECKING:
    from megatron_hybrid_prefix.upstream.graphs import InferenceBatchDimensions


class SlotContext(ContextSeam, NoCache):
    """Megatron's context for models with recurrent layers of any kind; with fixes for short chunks, waiting chunks, and drafts at
    the end of a block.

    A hybrid model always needs slot mixers: `HybridPrefixEngine` puts them on; without that engine call
    ``use_slot_mixers(model)``.

    Args:
        model_config: Config of the model.
        inference_config: Megatron's inference config; not changed.

    Attributes:
        model_states: What the states of the model's recurrent layers are, if it has any.
        states: The recurrent states, a `StateMemory`, or None.
        shared_memory: The memory of the states, or None.
        routes_shape: Fields of `BlockShape` for the routes of tokens; none unless megatron is told to record them.
        live_states: Whether a cache gives slots of it to running requests.
        next_prompt_token: The prompt token after the latest chunk that did not finish its prompt.

    Raises:
        ValueError: The config describes not all recurrent layers, or routes of experts cannot be recorded, or the model has layers
            that do not support the requested speculative decoding, block size or CUDA graphs.
        PlatformError: The model was made for other parallel sizes than those that run.
    """

    samples_weights = True
    model_states: ModelStates

    def __init__(self, model_config: TransformerConfig, inference_config: InferenceConfig) -> None:
        check_overrides()
        check_sizes(model_config, "the model's config", inference_config.pg_collection)
        state_config = inference_config.mamba_inference_state_config
        if state_config is not None:
            if replays_chunks(model_config):
                raise ValueError(
                    "batch_invariant_mode=True: megatron's decode then reads inputs of the running chunk that only its own prefill "
                    "keeps, and no cached state; use False, and HybridPrefixConfig(exact='bits') for equal bits in any batch"
                )
            captures = inference_config.num_cuda_graphs is not None
            problem = block_problem(model_config, inference_config.num_speculative_tokens)
            if captures and problem is not None:
                raise ValueError(f"inference_cuda_graph_scope='block': {problem}; build the model with 'layer'")
            state_config = with_state_dtype(state_config, None)
            inference_config = dataclasses.replace(inference_config, mamba_inference_state_config=state_config)
            self.model_states = states_of_config(state_config)
            self.routes_shape = routes_of_block(model_config, inference_config)
            self.model_states.check(
                block_tokens=inference_config.block_size_tokens,
                cuda_graph_impl=model_config.cuda_graph_impl if captures else "none",
                drafts=inference_config.num_speculative_tokens,
            )
        self.prompts_on_host = not inference_config.enable_prefix_caching  # megatron's
        # Megatron's constructor allocates the memory.
        self.shared_memory: SharedMemory | None = None
        self.live_states, self.next_prompt_token = False, 0
        super().__init__(model_config=model_config, inference_config=inference_config)
        self._model_groups = model_groups(inference_config.pg_collection)
        tp = model_config.tensor_model_parallel_size
        self.cuda_graph_batch_dimensions_list = finer_kinds(self, inference_config, tp)

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def prefill_step(self) -> PrefillStep | None:
        """The next step's prefills, for the recurrent layers; None if the model has none."""
        return None if self.states is None else self.states.step

    @property
    def state_layout(self) -> SlotLayout:
        """Content of one slot on this rank."""
        return self.model_states.slots

    def allocate_states(self) -> None:
        """All states are in one buffer, which a cache has allocated with its KV."""
        if self.shared_memory is None:
            self.shared_memory = SharedMemory(
                self.state_layout,
                own_slots=self.max_requests,
                rings=self.rings,
                requests=self.max_requests,
                device=torch.cuda.current_device(),
            )
        self.states = StateMemory(
            self.model_states,
            self.shared_memory,
            max_requests=self.max_requests,
            live_states=self.live_states,
            block_tokens=self.block_size_tokens,
            max_tokens=self.max_tokens,
            step_tokens=self.num_speculative_tokens + 1,
        )
        self.make_state_metadata()
        for name, tensor in self.shared_memory.states.items():  # megatron reads these attributes
            setattr(self, f"mamba_{name}_states", tensor)
        self.shared_memory_buffer = self.shared_memory.buffer  # the others are views of it
        self.offload_with_engine(["shared_memory_buffer"])

    def zero_live_states(self, live_indices: list[int]) -> None:
        self.states.memory.zero(sorted({self.states.live.slot(index) for index in live_indices}))

    def live_rows(self, live_indices: torch.Tensor) -> torch.Tensor:
        return self.states.live.rows(live_indices)

    def mamba_states_cache(self, layer_number: int, intermediate: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """States of a layer, by row; there are none after drafted tokens, and megatron hands on what it gets for these."""
        if not self.is_hybrid_model:
            return super().mamba_states_cache(layer_number, intermediate)
        states = self.states_of_layer(layer_number)
        return states["conv"], states["ssm"]

    def states_of_layer(self, layer_number: int) -> dict[str, torch.Tensor]:
        """States of a recurrent layer by component name: (rows, *shape), live slots and checkpoints.

        Args:
            layer_number: Number of the layer on this pipeline stage, from 1.
        """
        return self.states.layers[int(self.layer_map[layer_number - 1])]

    def checkpoints_of_layer(self, layer_number: int) -> dict[str, list[torch.Tensor]]:
        """What its checkpoints have, by component name; see `StateMemory.checkpoints`."""
        return self.states.checkpoints[int(self.layer_map[layer_number - 1])]

    def ring_of_layer(self, layer_number: int) -> dict[str, torch.Tensor]:
        """Its rings by component name: (max_requests, *shape)."""
        return self.states.rings[int(self.layer_map[layer_number - 1])]

    @property
    def decode_rows(self) -> RingRows:
        """The rows that the running step decodes, for the recurrent layers."""
        return self.states.decodes.rows

    @property
    def rings(self) -> RingLayout:
        """What a running request keeps beside its state."""
        of_steps = {"block_tokens": self.block_size_tokens, "drafts": self.num_speculative_tokens}
        return self.model_states.rings(self.params_dtype, **of_steps, is_open=self.is_exact)

    def deallocate_inference_state_buffers(self) -> None:
        """Drops the tensors of states if megatron deletes them."""
        super().deallocate_inference_state_buffers()
        if not self.has_tensors:
            self.states = self.shared_memory = None

    # -- admit ---------------------------------------------------------------------------------------------------------

    @override
    def add_request(self, req: DynamicInferenceRequest, prefill_chunk_length: int | None = None) -> None:
        """Admits a request and plans its step."""
        length = req.remaining_prompt_length if prefill_chunk_length is None else prefill_chunk_length
        self.add_chunk(req, length)
        if length < req.remaining_prompt_length:
            self.next_prompt_token = int(req.remaining_prompt_tokens[length])

    def add_chunk(self, req: DynamicInferenceRequest, length: int) -> None:
        """Add the next ``length`` tokens of a prompt."""
        super().add_request(req, length)

    # -- run -----------------------------------------------------------------------------------------------------------

    def initialize_attention_state(self, *args: Any, **kwargs: Any) -> Any:
        """A forward begins: prefills of one token are allowed."""
        with one_thread():
            result = super().initialize_attention_state(*args, **kwargs)
        if self.num_prefill_requests:
            self.allow_one_token_prefills()
        return result

    def prepare_step(self, sizes: InferenceBatchDimensions, padded: InferenceBatchDimensions) -> None:
        active = slice(self.paused_request_count, self.total_request_count)
        live, begins = self.live_indices[active], self.request_kv_length_offsets[active]
        lengths = self.request_query_lengths[active]
        spans, slots = [], self.live_rows(live)
        if prefills := sizes.prefill_req_count:  # they come last
            columns = [x[-prefills:].tolist() for x in (self.request_ids[active], begins, lengths, slots, live)]
            spans = [self.prefill_span(*values) for values in zip(*columns, strict=True)]
        of_rows = [column.numpy() for column in (live, begins, lengths, slots)]
        self.states.decodes.prepare(*of_rows, decodes=sizes.decode_req_count)
        if padded.prefill_req_count:
            self.states.step.prepare(spans, tokens=padded.token_count, sequences=padded.prefill_req_count)

    def show_step(self, live_rows: torch.Tensor | None, *, prefills: bool) -> None:
        if live_rows is not None:
            self.states.decodes.show(live_rows)
        if prefills:
            self.states.step.show()

    def prefill_span(self, request_id: int, start_tokens: int, tokens: int, live_row: int, ring: int) -> PrefillSpan:
        """What a request computes in this step."""
        return PrefillSpan(
            start_tokens=start_tokens, tokens=tokens, source_slot=live_row, live_slot=live_row, ring=ring
        )

    def transfer_bookkeeping_to_gpu(self, skip_token_input_ids: bool = False, record_done_event: bool = False) -> Any:
        """Rows of states are copied first, so upstream's event covers them, too."""
        if self.states is not None:
            if self.prefill_is_pending:
                self.states.step.copy()
            self.states.decodes.copy()
        self.wrong_tokens.zero_()
        return super().transfer_bookkeeping_to_gpu(skip_token_input_ids, record_done_event)

    def calculate_log_probs_tensors(
        self,
        logits: torch.Tensor,
        new_tokens: torch.Tensor,
        only_last_token_logits: bool | None = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Drops padding rows, which upstream includes."""
        if not only_last_token_logits and not self.is_decode_only():
            logits = logits[:, : self.active_token_count]
        return super().calculate_log_probs_tensors(logits, new_tokens, only_last_token_logits, *args, **kwargs)

    @torch.inference_mode()
    def forward_launched(self, logits: torch.Tensor) -> None:
        """Requests with a token that was not finite get NaN logits, on all ranks. Does not wait for the device.

        Args:
            logits: (1, rows, vocabulary), on the device, of the forward that was launched last: a row for each decoded token and each
                prefill, or for all tokens.
        """
        wrong, decoded = self.wrong_tokens[: self.active_token_count], self.active_token_count
        if self.num_prefill_requests:
            decoded = self.decoded_tokens
            last = self.active_logit_idxs[decoded : decoded + self.num_prefill_requests].long()
            if self.prefill_step is not None:
                wrong[decoded:] |= self.prefill_step.wrong[: len(wrong) - decoded]
            so_far = torch.cat([wrong.new_zeros(1), wrong[decoded:].cumsum(0)[last - decoded]])
            wrong = torch.cat([wrong[:decoded], (so_far.diff() > 0).int()])
        max_on_device(wrong, self._model_groups)
        if self.num_prefill_requests and not self.config.materialize_only_last_token_logits:
            rows_of = torch.cat([torch.arange(decoded, device=last.device), last])
            logits[0, rows_of, 0] += torch.where(wrong > 0, float("nan"), 0.0).to(logits.dtype)
        else:
            logits[0, : len(wrong), 0].masked_fill_(wrong > 0, float("nan"))

    def step_sampled(self, logits: torch.Tensor) -> None:
        """A forward was sampled, before megatron computes the log-probs.

        Args:
            logits: (1, tokens, vocabulary), on the device; all tokens of the forward if a request wants log-probs of its
                prompt.
        """

    # -- decode --------------------------------------------------------------------------------------------------------

    def update_requests(
        self, active_requests_mask: torch.Tensor, new_tokens: torch.Tensor, new_speculative_tokens: Any = None
    ) -> Any:
        with rows.drafts_past_the_end(self) if self.num_speculative_tokens else nullcontext():
            result = super().update_requests(active_requests_mask, new_tokens, new_speculative_tokens)
        if self.num_speculative_tokens:
            rows.find_blocks_of_tokens(self)
        return result

    @property
    def _prefills_may_decode(self) -> bool:
        """Whether the next forward may be prepared while the last one, which has prefills, still runs."""
        if self.num_speculative_tokens:
            return False
        active = slice(0, self.total_request_count)
        # A prompt of the longest sequence that wants no token has no room for one.
        full = self.request_kv_block_counts[active] >= self.request_to_kv_block_ids.shape[1]
        if (full & (self.request_last_kv_block_offset[active] + 1 >= self.block_size_tokens)).any():
            return False
        # Prompts' log-probs come from this forward.
        wanted = self.active_request_metadata["return_log_probs"][active]
        return bool(self.config.materialize_only_last_token_logits or not wanted.any())

    def can_prepare_requests(self) -> bool:
        """Also True after prefills, which megatron waits for. False between two chunks of a prompt: upstream ignores its hidden row and
        its blocks. False if all requests end: megatron would launch a forward for nothing, which delays the next request.
        """
        prefills: int = self.num_prefill_requests
        if self.chunked_prefill_request_id != -1 or (prefills and not self._prefills_may_decode):
            return False
        ends = self.get_active_sequence_lengths() + 1 >= self.get_max_sequence_lengths()
        if len(ends) and ends.all():
            return False
        self.num_prefill_requests = 0
        try:
            return bool(super().can_prepare_requests())
        finally:
            self.num_prefill_requests = prefills

    def prepare_requests(self) -> None:
        past_the_end = self.rows_past_the_end()
        super().prepare_requests()
        if len(past_the_end):
            rows.add_dummy_blocks(self, past_the_end)
            rows.find_blocks_of_tokens(self)

    # -- release -------------------------------------------------------------------------------------------------------

    def release_memory_blocks_from_request_indexes(self, request_indexes: torch.Tensor) -> None:
        table = self.request_to_kv_block_ids[request_indexes]
        table[table == self.kv_block_allocator.dummy_block_idx] = -1  # see `rows.add_dummy_blocks`
        self.request_to_kv_block_ids[request_indexes] = table
        super().release_memory_blocks_from_request_indexes(request_indexes)

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

    def check_integrity(self) -> None:
        """Raises CacheCorruptionError if the cache is corrupt, or disagrees with megatron's tables; for tests."""
