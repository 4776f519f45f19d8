"""Rows of megatron's context: taking one out, putting one before the hidden row, their blocks, their agreement with the cache.

A prompt that is computed in chunks has no row between two of them in megatron's count; its row lies hidden behind the
last active one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_hybrid_prefix.errors import CacheCorruptionError

if TYPE_CHECKING:
    from megatron_hybrid_prefix.cache import HybridPrefixCache
    from megatron_hybrid_prefix.upstream.context import ContextSeam


def find_waiting_row(context: ContextSeam, request_id: int) -> int | None:
    """Row of a paused request, or of a prompt between two of its chunks; None where the request has neither."""
    if _is_hidden(context, request_id):
        return int(context.total_request_count)
    paused: list[int] = context.request_ids[: context.paused_request_count].tolist()
    return paused.index(request_id) if request_id in paused else None


def take_out_waiting_row(context: ContextSeam, row: int) -> None:
    """Takes out a row of `find_waiting_row` whose request has let go of all that it held."""
    if row == context.total_request_count:
        context.chunked_prefill_request_id = -1
        return
    # Every row after it moves up, the hidden one included; active rows keep their order.
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
    """Makes room for a row before the hidden one, or undoes that."""
    hidden = context.total_request_count
    source, target = (hidden, hidden + 1) if down else (hidden + 1, hidden)
    for tensor in context.row_tensors():
        tensor[target] = tensor[source]
    if down:
        context.request_to_kv_block_ids[source] = -1
    else:
        _clear_row(context, source)


def find_blocks_of_tokens(context: ContextSeam) -> None:
    """Says of each active token, drafts included, which KV block it goes into.

    Megatron remembers each row's last block, and takes another row's once rows moved: a request's tokens before a block's
    end then go into somebody else's block.
    """
    tokens = slice(0, context.active_token_count)
    table_columns = context.token_to_pos_ids[tokens] // context.block_size_tokens
    rows = context.token_to_request_idx[tokens]
    context.token_to_block_idx[tokens] = context.request_to_kv_block_ids[rows, table_columns]


def attach_blocks(context: ContextSeam, cache: HybridPrefixCache) -> None:
    """Blocks that megatron gave out since are those of the rows whose last ones they are."""
    unattached = cache.blocks.unattached
    if not unattached:
        return
    # Paused rows that were resumed are among the active ones by now.
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
    slots = metadata.request_to_mamba_state_idx[:rows].tolist()
    free = metadata.mamba_state_free_slots[: metadata.mamba_state_free_slot_count].tolist()
    if sorted([*slots, *free]) != list(range(context.max_requests)):
        raise CacheCorruptionError(f"live slots {slots} and free ones {free} are not all of {context.max_requests}")
    for row, request_id in enumerate(context.request_ids[:rows].tolist()):
        table = [block_id for block_id in context.request_to_kv_block_ids[row].tolist() if block_id != -1]
        if not cache.inspect.is_live(request_id) or table != list(cache.inspect.block_ids(request_id)):
            raise CacheCorruptionError(f"request {request_id}: its block table and the cache's differ")
    if len(cache.inspect.live_requests()) != rows:
        raise CacheCorruptionError(f"{len(cache.inspect.live_requests())} live requests in {rows} rows")


def _is_hidden(context: ContextSeam, request_id: int) -> bool:
    return bool(
        context.chunked_prefill_request_id == request_id and context.get_index_of_chunked_prefill_request() == -1
    )


def _clear_row(context: ContextSeam, row: int) -> None:
    context.request_to_kv_block_ids[row] = -1
    if context.is_hybrid_model:
        context.mamba_metadata.request_to_mamba_state_idx[row] = -1
    context.request_ids[row] = -1
