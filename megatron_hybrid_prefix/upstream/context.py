"""`ContextSeam`: megatron's inference context, whose private hooks call methods of ours under public names.

Nothing is decided here. What megatron renames in its context, its block tables or its buffers changes this file, and no
other of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.upstream.metadata import StateMetadata

if TYPE_CHECKING:
    from megatron.core.inference.inference_request import DynamicInferenceRequest

# Attention kernels take a wrong turn where the longest query of a prefill is one token; the value is an upper bound.
_MIN_PREFILL_SEQLEN_Q = 2
_METADATA_BUFFERS = (
    *("batch_indices_decode", "batch_indices_prefill", "seq_idx", "cu_seqlens", "cu_chunk_seqlens"),
    *("last_chunk_indices", "seq_idx_for_varlen", "conv_seq_idx", "conv_seq_start"),
)


class ChunkBlocks(NamedTuple):
    """What a chunk of a prompt needs, and what of it is there.

    Attributes:
        shared: KV blocks that it shares with others, front first.
        skip_tokens: Its first tokens that need not be computed.
    """

    shared: list[int]
    skip_tokens: int


@dataclass(slots=True)
class AdmittedChunk:
    """What a cache has given to a chunk of a prompt, while megatron adds its row.

    Attributes:
        shared: KV blocks that it shares with others, front first.
        own: KV blocks of its own; taken by megatron's one allocation.
        skip_tokens: Its first tokens, which are not computed.
        resumes: Whether it starts from a state that is kept, rather than from zero or from its last chunk.
    """

    shared: list[int]
    own: list[int]
    skip_tokens: int
    resumes: bool


class ContextSeam(DynamicInferenceContext):
    """See the module.

    Attributes:
        admitted_chunk: While a row is added: what its chunk was given.
    """

    admitted_chunk: AdmittedChunk | None = None

    # -- what a subclass says ------------------------------------------------------------------------------------------

    def allocate_states(self) -> None:
        """Memory of the recurrent states, and the metadata of their steps; for a hybrid model."""
        raise NotImplementedError

    def prepare_prefill(self, sequences: int, *, padded_tokens: int, padded_sequences: int) -> None:
        """The coming step prefills the last ``sequences`` active rows; padding included, it has these sizes."""
        raise NotImplementedError

    def show_prefill(self) -> None:
        """The step that was prepared is the one that runs."""
        raise NotImplementedError

    def zero_live_states(self, slots: list[int]) -> None:
        """New requests start in these live slots."""
        raise NotImplementedError

    def layer_states(self, layer_number: int, *, intermediate: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolution windows and SSM states of a Mamba layer, by slot; or those after each drafted token."""
        raise NotImplementedError

    def blocks_of_chunk(self, req: DynamicInferenceRequest, chunk_tokens: int) -> ChunkBlocks | None:
        """What the next chunk of a prompt shares and skips; None: megatron's own cache says so."""
        raise NotImplementedError

    # -- megatron's hooks ----------------------------------------------------------------------------------------------

    def _allocate_mamba_states(self) -> None:
        if self.is_hybrid_model:
            self.allocate_states()
        else:
            super()._allocate_mamba_states()

    def _execute_pending_mamba_ops(self) -> None:
        if self._pending_mamba_zeros and self.is_hybrid_model:
            slots = list(self._pending_mamba_zeros)
            self._pending_mamba_zeros.clear()
            self.zero_live_states(slots)

    def mamba_states_cache(self, layer_number: int, intermediate: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """See upstream."""
        if not self.is_hybrid_model:
            conv, ssm = super().mamba_states_cache(layer_number, intermediate)
            return conv, ssm
        return self.layer_states(layer_number, intermediate=intermediate)

    def _compute_prefix_match(
        self, req: DynamicInferenceRequest, prefill_chunk_length: int, record_mamba_match: bool = False
    ) -> tuple[list[int], int, int, int, int, int]:
        """Shared block ids, new blocks, blocks held, blocks in all, tokens to skip, tokens to compute."""
        if self.admitted_chunk is not None:
            found: ChunkBlocks | None = ChunkBlocks(self.admitted_chunk.shared, self.admitted_chunk.skip_tokens)
        else:
            found = self.blocks_of_chunk(req, prefill_chunk_length)
        if found is None:
            shared, new, held, required, skip, computed = super()._compute_prefix_match(
                req, prefill_chunk_length, record_mamba_match
            )
            return shared, new, held, required, skip, computed
        finished = req.finished_chunk_token_count
        held = ceil_div(finished, self.block_size_tokens)
        required = ceil_div(finished + prefill_chunk_length, self.block_size_tokens)
        shared, skip = found
        if record_mamba_match:
            req._mamba_num_matched_blocks = skip // self.block_size_tokens
        return shared, required - held - len(shared), held, required, skip, prefill_chunk_length - skip

    # -- megatron's books ----------------------------------------------------------------------------------------------

    def new_blocks_of_chunk(self, req: DynamicInferenceRequest, chunk_tokens: int) -> int:
        """KV blocks that the next chunk of a prompt needs beyond those that it holds or shares."""
        return self._compute_prefix_match(req, chunk_tokens)[1]

    def make_state_metadata(self) -> None:
        """Sets the metadata of the recurrent layers' steps, in megatron's buffers. It tells this context of prefills."""
        metadata = self.mamba_metadata = StateMetadata(
            self,
            max_requests=self.max_requests,
            max_tokens=self.max_tokens,
            mamba_chunk_size=self.mamba_chunk_size,
        )
        metadata.bind_cpu_buffers({name: getattr(self, f"_cpu_mamba_{name}") for name in _METADATA_BUFFERS})
        metadata.bind_gpu_buffers(self.gpu_view)

    def offload_with_engine(self, names: Iterable[str]) -> None:
        """These tensors of the context go to the host, and come back, as megatron suspends and resumes."""
        if self.kv_cache_management_mode == KVCacheManagementMode.OFFLOAD and not self._uses_torch_memory_saver:
            assert self.unified_memory_level == 0
            for name in names:
                self._offloadable_tensor_names.add(name)
                self._offloadable_cpu_backups[name] = torch.empty_like(getattr(self, name), device="cpu").pin_memory()

    def add_admitted(self, req: DynamicInferenceRequest, chunk_tokens: int, chunk: AdmittedChunk) -> None:
        """Megatron's ``add_request``, with what a cache has given to the chunk."""
        self.admitted_chunk = chunk
        try:
            DynamicInferenceContext.add_request(self, req, chunk_tokens)
        finally:
            self.admitted_chunk = None
        if chunk.resumes:
            self._pending_mamba_zeros.pop()  # the forward reads the checkpoint; megatron would zero the live slot

    def forget_pending_zeros(self) -> None:
        """No row is left that would start from zero."""
        self._pending_mamba_zeros.clear()

    @property
    def prefill_is_pending(self) -> bool:
        """Whether the bookkeeping of a step that prefills is about to go to the device."""
        pending = getattr(self, "_pending_mamba_transfer", None)
        return pending is not None and bool(pending["padded_prefill_count"])

    def allow_one_token_prefills(self) -> None:
        """The step that was just prepared may prefill single tokens."""
        metadata = self.active_attn_metadata["mha_metadata"]
        if not self.is_decode_only() and metadata.state_data["max_seqlen_q"] < _MIN_PREFILL_SEQLEN_Q:
            metadata._max_seqlen_q = metadata.state_data["max_seqlen_q"] = _MIN_PREFILL_SEQLEN_Q

    def row_tensors(self) -> Sequence[torch.Tensor]:
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
