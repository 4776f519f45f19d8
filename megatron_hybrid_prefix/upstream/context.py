"""`ContextSeam`: megatron's inference context; its private hooks call our methods under public names.

This file makes no decisions. If megatron renames something in its context, block tables or buffers, only this file changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, override

import torch
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.contexts.attention_context.mamba_metadata import MambaMetadata
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

from megatron_hybrid_prefix.ops.elementwise import zero_wrong_rows
from megatron_hybrid_prefix.upstream.capabilities import form_of

if TYPE_CHECKING:
    from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions
    from megatron.core.inference.contexts.attention_context.mha_metadata import MHAMetadata
    from megatron.core.inference.inference_request import DynamicInferenceRequest


class StateMetadata(MambaMetadata):
    """Megatron's metadata, which tells a context of steps. Its live indices and its decode are used; decodes address states by row.

    Its chunks, and its extraction of states inside a prefill, are not used: `PrefillStep` replaces them.

    Args:
        context: Called for each step (``live_rows``, ``prepare_step``, ``show_step``).
        **fields: Megatron's arguments.
    """

    def __init__(self, context: ContextSeam, *args: Any, **fields: Any) -> None:
        super().__init__(*args, max_intermediate_count=0, **fields)
        self._context = context

    def compute_cpu_metadata(
        self,
        active_mamba_indices: torch.Tensor,
        *args: Any,
        batch_dimensions: InferenceBatchDimensions,
        padded_batch_dimensions: InferenceBatchDimensions,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Tells the context of a step, with its sizes."""
        result: dict[str, Any] = super().compute_cpu_metadata(
            self._context.live_rows(active_mamba_indices),
            *args,
            batch_dimensions=batch_dimensions,
            padded_batch_dimensions=padded_batch_dimensions,
            **kwargs,
        )
        self._context.prepare_step(batch_dimensions, padded_batch_dimensions)
        return result

    def load_from_cpu(self, d: dict[str, Any]) -> None:
        """Shows the prepared step to the layers."""
        super().load_from_cpu(d)
        self._context.show_step(self.batch_indices_decode, prefills=d["padded_prefill_count"] > 0)

    @property
    @override
    def intermediate_chunk_indices(self) -> None:
        """Only megatron's own prefill reads it. That prefill ignores slots, so this raises before it computes wrong tokens.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("the model's Mamba mixers do not read states by slot: call use_slot_mixers(model)")

    @intermediate_chunk_indices.setter
    def intermediate_chunk_indices(self, value: Any) -> None:
        """Megatron resets it every step."""

    @override
    def _update_intermediate_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: megatron's extraction of intermediate states is not used."""


# Attention kernels misread a prefill whose longest query is one token. The value is an upper bound, so 2 is safe.
_MIN_PREFILL_SEQLEN_Q = 2
_METADATA_BUFFERS = (
    *("batch_indices_decode", "batch_indices_prefill", "seq_idx", "cu_seqlens", "cu_chunk_seqlens"),
    *("last_chunk_indices", "seq_idx_for_varlen", "conv_seq_idx", "conv_seq_start"),
)


_HAS_EVENTS = form_of("events of cached KV") == "yes"


def _short(key: bytes) -> int:
    """Megatron's hashes of blocks have 63 bits."""
    return int.from_bytes(key[:8]) >> 1


class ChunkBlocks(NamedTuple):
    """What the cache has for a chunk of a prompt.

    Attributes:
        shared: KV blocks that it shares with other requests, in order.
        skip_tokens: Number of leading tokens that need not be computed.
    """

    shared: list[int]
    skip_tokens: int


@dataclass(slots=True)
class AdmittedChunk:
    """What the cache gave to a chunk of a prompt, while megatron adds its row.

    Attributes:
        shared: KV blocks that it shares with other requests, in order.
        own: New KV blocks.
        skip_tokens: Number of leading tokens that are not computed.
        stored_tokens: The KV of computed tokens before this position is in shared blocks: it is read there and not
            written again.
        resumes: True: it starts from a checkpoint. False: from zero, or from the state after the last chunk.
    """

    shared: list[int]
    own: list[int]
    skip_tokens: int
    stored_tokens: int
    resumes: bool

    @property
    def block_ids(self) -> list[int]:
        """All its KV blocks, in order; megatron's one allocation returns them.

        Megatron need not know which ones are shared: it would copy the counts of all blocks, to count up those of the shared ones.
        """
        return self.shared + self.own


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch uses one thread of the CPU. Megatron's bookkeeping of a step needs no more.

    It has arrays of a prompt's length. PyTorch splits the indexing of more than 3,000 elements, and anything with more than 32,768.
    On a host with 32 cores, admitting 8,492 tokens took 5 ms in place of 0.5, and preparing 33,068 took 33 in place of 3.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class ContextSeam(DynamicInferenceContext):
    """See the module.

    Attributes:
        admitted_chunk: What the cache gave to the chunk whose row is being added; else None.
        prefilled: Requests whose prefill may still run while their first decode is prepared: where that prefill began, and its part
            of ``wrong_tokens``.
        wrong_tokens: (max_tokens,) int32 on the device: 1 for tokens of the step whose keys or values were not finite.
    """

    wrong_tokens: torch.Tensor
    admitted_chunk: AdmittedChunk | None = None
    prefilled: Mapping[int, tuple[int, torch.Tensor]] = MappingProxyType({})
    # Megatron's.
    is_tensor_state_allocated: bool
    num_prefill_requests: int
    dynamo_helper: Any

    @staticmethod
    def should_enable_mtp_kv_cache(*config: Any, **named: Any) -> bool:
        """Megatron asks it where it can keep KV of layers that draft (main, from September 2026): pages here have no room for it.

        Drafts are then made as before it could, which changes how many are accepted, and no answer.
        """
        del config, named
        return False

    # -- methods of a subclass -----------------------------------------------------------------------------------------

    def allocate_kv(self) -> bool:
        """Allocate megatron's ``memory_buffer``. False: megatron does it."""
        return False

    def allocate_states(self) -> None:
        """Allocate the recurrent states and the metadata of their steps. Called for hybrid models only."""
        raise NotImplementedError

    def prepare_step(self, sizes: InferenceBatchDimensions, padded: InferenceBatchDimensions) -> None:
        """The next step runs the active rows, decodes first, so many of each. ``padded``: with padding."""
        raise NotImplementedError

    def show_step(self, live_rows: torch.Tensor | None, *, prefills: bool) -> None:
        """The prepared step runs now.

        Args:
            live_rows: Those of the rows that decode, as `live_rows`, but on the device; None: no row decodes.
            prefills: Whether it has prefills.
        """
        raise NotImplementedError

    def zero_live_states(self, live_indices: list[int]) -> None:
        """Zero the live states with these live indices: new requests start there."""
        raise NotImplementedError

    def live_rows(self, live_indices: torch.Tensor) -> torch.Tensor:
        """Where in the tensors of states those with these live indices are: (rows,) int64 on the CPU, -1 where the index is."""
        raise NotImplementedError

    def blocks_of_chunk(self, req: DynamicInferenceRequest, chunk_tokens: int) -> ChunkBlocks | None:
        """What the next chunk of a prompt shares and skips; None: ask megatron's own cache."""
        return None

    def log_probs_of(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Log-probs of each row of logits, (rows, vocabulary) float32; None: megatron's."""
        return None

    # -- megatron's hooks ----------------------------------------------------------------------------------------------

    def _allocate_memory_buffer(self) -> None:
        """KV is in the memory that it shares with states."""
        self.wrong_tokens = torch.zeros(self.max_tokens, dtype=torch.int32, device=torch.cuda.current_device())
        if not self.allocate_kv():
            super()._allocate_memory_buffer()
            self.memory_buffer.zero_()  # training may have left NaN there: see `PageClear` in tiers/units.py

    def append_key_value_cache(self, layer_number: int, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """A token whose keys or values are not finite has zeros: attention multiplies by zero what other tokens must not see."""
        zero_wrong_rows([tensor for tensor in (key, value) if tensor is not None], self.wrong_tokens)
        super().append_key_value_cache(layer_number, key, value)

    def reset_tensors(self) -> None:
        """A suspended context may have no tensors: see `has_tensors`."""
        if self.has_tensors:
            super().reset_tensors()

    def reset_metadata(self, *args: Any, **kwargs: Any) -> None:
        """It also writes to one tensor, which is not there if `has_tensors` is False."""
        self.prefilled = {}
        if self.has_tensors:
            super().reset_metadata(*args, **kwargs)
            return
        self.request_to_kv_block_ids = torch.empty(0)
        try:
            super().reset_metadata(*args, **kwargs)
        finally:
            del self.request_to_kv_block_ids

    @property
    def has_tensors(self) -> bool:
        """False while suspended with RECOMPUTE: megatron has deleted its tensors, and makes new ones when it resumes."""
        return hasattr(self, "request_to_kv_block_ids")

    def reinitialize_inference_state_buffers(self) -> None:
        """What torch_memory_saver brings back is other memory, and nothing is allocated.

        If it raises, as a rule because memory is missing, it can be called again.
        """
        is_here = self.is_tensor_state_allocated
        recomputes = self.kv_cache_management_mode == KVCacheManagementMode.RECOMPUTE
        try:
            super().reinitialize_inference_state_buffers()
        except BaseException:
            if recomputes:
                self.deallocate_inference_state_buffers()
            self.is_tensor_state_allocated = False
            raise
        if self._uses_torch_memory_saver and recomputes and not is_here:
            self.memory_buffer.zero_()

    def _allocate_mamba_states(self) -> None:
        """Live states and checkpoints are in one tensor per component."""
        if self.is_hybrid_model:
            self.allocate_states()
        else:
            super()._allocate_mamba_states()

    @override
    def _execute_pending_mamba_ops(self) -> None:
        """New requests start from zero states, in layers of all kinds."""
        if self._pending_mamba_zeros and self.is_hybrid_model:
            live_indices = [int(index) for index in self._pending_mamba_zeros]
            self._pending_mamba_zeros.clear()
            self.zero_live_states(live_indices)

    def resolve_requests(self, active_requests_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The forward that `decode_next` did not wait for is over."""
        self.prefilled = {}
        resolved: tuple[torch.Tensor, torch.Tensor] = super().resolve_requests(active_requests_mask)
        return resolved

    def _get_async_sched_rows_requiring_new_block(self) -> torch.Tensor:
        """Drafts past the end of an answer need no block."""
        needed: torch.Tensor = super()._get_async_sched_rows_requiring_new_block()
        needed[self.rows_past_the_end()] = False  # no row is paused here
        return needed

    def _compute_prefix_match(
        self, req: DynamicInferenceRequest, prefill_chunk_length: int, record_mamba_match: bool = False
    ) -> tuple[list[int], int, int, int, int, int]:
        """Our cache matches the prompt: shared block ids; blocks new, held, required; tokens to skip, to compute."""
        if self.admitted_chunk is not None:
            found: ChunkBlocks | None = ChunkBlocks([], self.admitted_chunk.skip_tokens)  # see `block_ids`
        else:
            found = self.blocks_of_chunk(req, prefill_chunk_length)
        if found is None:
            return super()._compute_prefix_match(req, prefill_chunk_length, record_mamba_match)
        finished = req.finished_chunk_token_count
        held = -(-finished // self.block_size_tokens)
        required = -(-(finished + prefill_chunk_length) // self.block_size_tokens)
        shared, skip = found
        if record_mamba_match:
            req._mamba_num_matched_blocks = skip // self.block_size_tokens
        return shared, required - held - len(shared), held, required, skip, prefill_chunk_length - skip

    def _processed_log_probs(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Log-probs of rows that do not depend on each other."""
        found = self.log_probs_of(logits) if self.config.logprobs_mode == "raw_logprobs" else None
        return super()._processed_log_probs(logits, *args, **kwargs) if found is None else found

    # -- megatron's private state --------------------------------------------------------------------------------------

    def chunk_needs(self, req: DynamicInferenceRequest, chunk_tokens: int) -> tuple[int, int]:
        """Of the next chunk of a prompt: KV blocks beyond those it holds or shares; leading tokens that need not be computed."""
        match = self._compute_prefix_match(req, chunk_tokens)
        return match[1], match[4]

    def make_state_metadata(self) -> None:
        """Make the metadata of the recurrent layers, in megatron's buffers. It notifies this context of prefills."""
        metadata = self.mamba_metadata = StateMetadata(
            self,
            max_requests=self.max_requests,
            max_tokens=self.max_tokens,
            mamba_chunk_size=self.mamba_chunk_size,
        )
        metadata.bind_cpu_buffers({name: getattr(self, f"_cpu_mamba_{name}") for name in _METADATA_BUFFERS})
        metadata.bind_gpu_buffers(self.gpu_view)

    @property
    def metrics_writer(self) -> Any:
        """Megatron's engine logs to wandb through this attribute of the context, and megatron's own context lacks it."""
        return self.config.metrics_writer

    @property
    def live_indices(self) -> torch.Tensor:
        """(max_requests,) int32 on the CPU: the live index of the request in each row; -1: none.

        Megatron numbers the running requests so; a request keeps its number while its row moves.
        """
        return self.mamba_metadata.request_to_mamba_state_idx

    @property
    def kv_shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Dimensions of ``memory_buffer`` before and after its KV blocks."""
        if self.cache_mla_latent:
            return (self.num_attention_layers,), (self.block_size_tokens, self.kv_reduced_dim)
        heads = self.num_attention_heads_per_partition
        return (2, self.num_attention_layers), (self.block_size_tokens, heads, self.hidden_size_per_attention_head)

    def offload_with_engine(self, names: Iterable[str]) -> None:
        """Offload these tensors of the context when megatron suspends, and restore them when it resumes."""
        if self.kv_cache_management_mode == KVCacheManagementMode.OFFLOAD and not self._uses_torch_memory_saver:
            if self.unified_memory_level:
                raise ValueError(
                    f"kv_cache_management_mode='offload' does not go with unified_memory_level={self.unified_memory_level}: the "
                    "driver moves that memory; use 'persist'"
                )
            for name in names:
                self._offloadable_tensor_names.add(name)
                self._offloadable_cpu_backups[name] = torch.empty_like(getattr(self, name), device="cpu").pin_memory()

    def add_admitted(self, req: DynamicInferenceRequest, chunk_tokens: int, chunk: AdmittedChunk) -> None:
        """Megatron's ``add_request``, with what the cache gave to the chunk."""
        first = self.active_token_count
        self.admitted_chunk = chunk
        # With hashes megatron would register these blocks, and tell its listeners: see `kv_stored`.
        hashes, req.precomputed_block_hashes = req.precomputed_block_hashes, []
        try:
            with one_thread():
                DynamicInferenceContext.add_request(self, req, chunk_tokens)
        finally:
            self.admitted_chunk, req.precomputed_block_hashes = None, hashes
        # Megatron counts shared blocks, and saw none. Here a hit skips tokens.
        self.prefix_cache_hits += chunk.skip_tokens > 0
        self.prefix_cache_blocks_matched += chunk.skip_tokens // self.block_size_tokens
        stored = chunk.stored_tokens - int(self.token_to_pos_ids[first])  # positions ascend
        if stored > 0:  # nobody reads the dummy block
            last = min(first + stored, self.active_token_count)
            self.token_to_block_idx[first:last] = self.kv_block_allocator.dummy_block_idx
        if chunk.resumes:
            self._pending_mamba_zeros.pop()  # the forward reads a checkpoint: the live slot need not be zeroed

    # Up to 0.19 nobody can listen.

    @property
    def has_kv_listeners(self) -> bool:
        """Whether somebody listens to megatron's events of cached KV."""
        return _HAS_EVENTS and bool(self.dynamo_helper.has_kv_event_listeners)

    def kv_stored(self, keys: Sequence[bytes], tokens: Sequence[int], parent: bytes | None) -> None:
        """KV blocks became matchable: their keys, their tokens, and the key before them. Megatron tells it at the end of a step."""
        self.dynamo_helper.queue_kv_stored_event(
            {
                "block_hashes": [_short(key) for key in keys],
                "token_ids": tokens,
                "num_block_tokens": [self.block_size_tokens] * len(keys),
                "parent_hash": None if parent is None else _short(parent),
            }
        )

    def kv_removed(self, key: bytes) -> None:
        """The KV block with this key is not cached any more."""
        if _HAS_EVENTS:
            self.dynamo_helper.publish_pending_kv_stored_events()  # it may be among them
            self.kv_block_allocator.tell_observers({_short(key)})

    def kv_cleared(self) -> None:
        """No KV block is cached any more."""
        if _HAS_EVENTS:
            self.dynamo_helper.notify_kv_cache_cleared()

    def forget_pending_zeros(self) -> None:
        """Drop pending zeroing: its rows are gone."""
        self._pending_mamba_zeros.clear()

    @property
    def prefill_is_pending(self) -> bool:
        """Whether the bookkeeping of a prefill step is about to be copied to the device."""
        pending = getattr(self, "_pending_mamba_transfer", None)
        return pending is not None and bool(pending["padded_prefill_count"])

    def rows_past_the_end(self) -> torch.Tensor:
        """Rows for which megatron wants a KV block that only drafts past the end of the answer would use: (rows,) int64."""
        if not self.num_speculative_tokens:
            return torch.empty(0, dtype=torch.int64)
        rows = slice(0, self.total_request_count)
        crosses = self.request_last_kv_block_offset[rows] + 1 + self.num_speculative_tokens >= self.block_size_tokens
        # The KV of the last token is never needed.
        enough = self.request_output_lengths[rows] - 1 <= self.request_kv_block_counts[rows] * self.block_size_tokens
        is_chunk = self.request_ids[rows] == self.chunked_prefill_request_id
        return torch.nonzero(crosses & enough & ~is_chunk).squeeze(1)

    def allow_one_token_prefills(self) -> None:
        """Let the prepared step prefill single tokens."""
        metadata: MHAMetadata = self.active_attn_metadata["mha_metadata"]
        if not self.is_decode_only() and metadata.state_data["max_seqlen_q"] < _MIN_PREFILL_SEQLEN_Q:
            metadata._max_seqlen_q = metadata.state_data["max_seqlen_q"] = _MIN_PREFILL_SEQLEN_Q

    @property
    def decoded_tokens(self) -> int:
        """Tokens of the step's decodes, drafts included; they come first."""
        return int(self.num_decode_requests * (self.num_speculative_tokens + 1))

    def decode_next(self) -> None:
        """The rows that prefilled are decodes from now on; megatron does this once their forward is resolved."""
        if self.num_prefill_requests:
            rows = slice(self.total_request_count - self.num_prefill_requests, self.total_request_count)
            columns = [self.request_ids, self.request_kv_length_offsets, self.request_query_lengths]
            ids, begun, lengths = (column[rows].tolist() for column in columns)
            marks = self.wrong_tokens[self.num_decode_requests :][: sum(lengths)].clone().split(lengths)
            self.prefilled = dict(zip(ids, zip(begun, marks, strict=True), strict=True))
        self.num_prefill_requests = 0
        self._using_cuda_graph_this_step = False  # one of a prefill; the next forward finds its own
        self.request_in_prefill_status_tensor[: self.total_request_count].clamp_(max=0)

    def row_tensors(self) -> Sequence[torch.Tensor]:
        """All tensors with one row per request."""
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
            *([self.live_indices] if self.is_hybrid_model else []),
        ]
