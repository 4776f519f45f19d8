"""Rows of megatron's context: remove a row, insert one before the hidden row, attach blocks, compare with the cache.

Between two chunks of a prompt, megatron does not count its row: the row is hidden after the last active row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.mcore.ranks.agreement import min_over_model_ranks
from megatron_hybrid_prefix.upstream.context import ContextSeam


def find_waiting_row(context: ContextSeam, request_id: int) -> int | None:
    """Row of a paused request, or of a prompt between two chunks; None if the request has no such row."""
    if context.chunked_prefill_request_id == request_id and context.get_index_of_chunked_prefill_request() == -1:
        return int(context.total_request_count)
    paused: list[int] = context.request_ids[: context.paused_request_count].tolist()
    return paused.index(request_id) if request_id in paused else None


def wrong_from(context: ContextSeam, request_id: int) -> int:
    """Position from which on what the forward that was sampled last computed of an active request may not be finite.

    That of its first such token, on any rank: a collective, which waits for the device. Of a decode, up to one forward earlier.
    """
    prefilled = context.prefilled  # of a forward after which the next one was launched
    active = slice(context.paused_request_count, context.total_request_count)
    row = context.paused_request_count + context.request_ids[active].tolist().index(request_id)
    begun = int(context.request_kv_length_offsets[row])
    if request_id not in prefilled and context.request_in_prefill_status_tensor[row]:
        of_tokens = context.token_to_request_idx[: context.active_token_count] == row
        prefilled = {request_id: (begun, context.wrong_tokens[: context.active_token_count].cpu()[of_tokens])}
    if request_id in prefilled:
        begun, marks = prefilled[request_id]
        own, none = marks.nonzero(), len(marks)
        first = min_over_model_ranks(int(own[0, 0]) if len(own) else none, context.config.pg_collection)
        return begun + first % none  # what comes before is right
    return max(0, begun - context.num_speculative_tokens - 1)  # the next forward may be prepared


def routes_of_finished(context: ContextSeam, active_mask: torch.Tensor) -> dict[int, np.ndarray[Any, Any]]:
    """Routes of the blocks of each request that a step finished, by id: see `HybridPrefixBlockAllocator.routes_of`."""
    found = {}
    for row in ((active_mask == 0).nonzero().flatten() + context.paused_request_count).tolist():
        blocks = context.request_to_kv_block_ids[row]
        found[int(context.request_ids[row])] = context.kv_block_allocator.routes_of(blocks[blocks >= 0])
    return found


def take_out_waiting_row(context: ContextSeam, row: int) -> None:
    """Remove a row of `find_waiting_row`. Its request must have released everything."""
    if row == context.total_request_count:
        context.chunked_prefill_request_id = -1
        return
    # Every later row moves up, the hidden one included. Active rows keep their order.
    last = min(context.total_request_count + 1, context.max_requests)
    for tensor in context.row_tensors():
        tensor[row : last - 1] = tensor[row + 1 : last].clone()
    _clear_row(context, last - 1)
    kept = [index for index in range(context.paused_request_count) if index != row]
    context.paused_tokens = context.paused_tokens[kept]
    if context.paused_speculative_tokens is not None:
        context.paused_speculative_tokens = context.paused_speculative_tokens[:, kept]
    context.token_to_request_idx[: context.active_token_count] -= 1
    context.paused_request_count -= 1
    context.total_request_count -= 1


def move_hidden_row(context: ContextSeam, *, down: bool) -> None:
    """Make room for a row before the hidden row (``down``), or undo that."""
    hidden = context.total_request_count
    source, target = (hidden, hidden + 1) if down else (hidden + 1, hidden)
    for tensor in context.row_tensors():
        tensor[target] = tensor[source]
    if down:
        context.request_to_kv_block_ids[source] = -1
    else:
        _clear_row(context, source)


def find_blocks_of_tokens(context: ContextSeam) -> None:
    """Set the KV block of each active token, drafts included.

    Megatron remembers the last block of each row. After rows move it uses the block of another row, and would write a
    request's tokens at the end of a block into another request's block.
    """
    tokens = slice(0, context.active_token_count)
    table_columns = context.token_to_pos_ids[tokens] // context.block_size_tokens
    rows = context.token_to_request_idx[tokens]
    context.token_to_block_idx[tokens] = context.request_to_kv_block_ids[rows, table_columns]


@contextmanager
def drafts_past_the_end(context: ContextSeam) -> Iterator[None]:
    """Around megatron's ``update_requests``: drafts past the end of an answer need no KV block, and go to the dummy block.

    Megatron would give such a row one block more than its request may have, and nothing ever reads it. If there is none, the
    row could not go on.
    """
    past = context.rows_past_the_end()
    if not len(past):
        yield
        return
    offsets = context.request_last_kv_block_offset
    before = dict(zip(context.request_ids[past].tolist(), offsets[past].tolist(), strict=True))
    offsets[past] = 0  # so it does not look as if the last block was full
    yield
    advanced = 1 + context.num_speculative_tokens
    for row, request_id in enumerate(context.request_ids[: context.total_request_count].tolist()):
        if request_id in before:
            runs = row >= context.paused_request_count
            offsets[row] = (before[request_id] + advanced * runs) % context.block_size_tokens
            if runs:
                add_dummy_blocks(context, torch.tensor([row]))


def add_dummy_blocks(context: ContextSeam, rows: torch.Tensor) -> None:
    """Megatron's dummy block becomes the last block of these rows: (rows,) int64. A rewind takes it away."""
    dummy = context.kv_block_allocator.dummy_block_idx
    context.request_to_kv_block_ids[rows, context.request_kv_block_counts[rows].long()] = dummy
    context.request_kv_block_counts[rows] += 1
    context.request_last_kv_block_id[rows] = dummy


def attach_blocks(context: ContextSeam, cache: HybridPrefixCache) -> None:
    """Attach newly allocated blocks to the requests in whose rows they are the last block."""
    unattached = list(cache.blocks.unattached)
    if not unattached:
        return
    # Resumed rows are already among the active rows.
    rows = slice(0, context.total_request_count)
    columns = (context.request_last_kv_block_id[rows].tolist(), context.request_ids[rows].tolist())
    request_of = dict(zip(*columns, strict=True))
    for block_id in unattached:
        cache.blocks.attach(request_of[block_id], [block_id])


def check_rows(context: ContextSeam, cache: HybridPrefixCache) -> None:
    """Raises CacheCorruptionError if megatron's tables and the cache disagree."""
    rows = context.total_request_count + (
        context.get_index_of_chunked_prefill_request(safe=False) == context.total_request_count
    )
    metadata = context.mamba_metadata
    used = context.live_indices[:rows].tolist()
    free = metadata.mamba_state_free_slots[: metadata.mamba_state_free_slot_count].tolist()
    if sorted([*used, *free]) != list(range(context.max_requests)):
        raise CacheCorruptionError(f"live indices {used} and free ones {free} do not add up to {context.max_requests}")
    for row, request_id in enumerate(context.request_ids[:rows].tolist()):
        unused = -1, context.kv_block_allocator.dummy_block_idx
        table = [block_id for block_id in context.request_to_kv_block_ids[row].tolist() if block_id not in unused]
        live = cache.live.get(request_id)
        if live is None or table != live.block_ids:
            raise CacheCorruptionError(f"request {request_id}: its block table differs from the cache's")
        given, slot = live.live_slot, context.states.live.slot(int(context.live_indices[row]))
        if given is not None and given != slot:
            raise CacheCorruptionError(f"request {request_id}: its state is in slot {slot}, not in {given}")
    if len(cache.live) != rows:
        raise CacheCorruptionError(f"{len(cache.live)} live requests in {rows} rows")


def _clear_row(context: ContextSeam, row: int) -> None:
    context.request_to_kv_block_ids[row] = -1
    if context.is_hybrid_model:
        context.live_indices[row] = -1
    context.request_ids[row] = -1
