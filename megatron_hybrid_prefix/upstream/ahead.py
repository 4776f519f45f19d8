"""Forwards that are launched before the one before them is resolved. Megatron does so where both have decodes only.

After a prefill: its rows decode next, and all that their decode needs is known (`decode_next`). And new prompts are admitted to
the forward that is launched: their rows, the last ones, are hidden from megatron while it samples and resolves the earlier forward
(`hide_prefills`), and follow the rows that go on. The functions change a `ContextSeam`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Rows of a context, its last ones, that prefill in the forward that is being launched.

    Attributes:
        count: How many; 0: none are hidden.
        decodes: Rows, and so tokens, before them in that forward.
        in_graph: Whether it is a CUDA graph.
    """

    count: int = 0
    decodes: int = 0
    in_graph: bool = False


def decode_next(context: Any) -> None:
    """The rows that prefilled are decodes from now on; megatron does this once their forward is resolved."""
    if not context.prefilled:
        rows = slice(context.total_request_count - context.num_prefill_requests, context.total_request_count)
        _note_prefills(context, rows, context.num_decode_requests)
    context.num_prefill_requests = 0
    context._using_cuda_graph_this_step = False  # one of a prefill; the next forward finds its own
    context.request_in_prefill_status_tensor[: context.total_request_count].clamp_(max=0)


def hide_prefills(context: Any) -> None:
    """The rows that prefill in the forward that is being launched are none of the earlier forward."""
    count, context.num_prefill_requests = context.num_prefill_requests, 0
    context.total_request_count -= count
    context.hidden = HiddenRows(count, context.total_request_count, context._using_cuda_graph_this_step)
    context._using_cuda_graph_this_step = False


def show_prefills(context: Any) -> HiddenRows:
    """They are rows again. Returns what was hidden."""
    hidden, context.hidden = context.hidden, HiddenRows()
    context.total_request_count += hidden.count
    context.num_prefill_requests = hidden.count
    context._using_cuda_graph_this_step = hidden.in_graph
    return hidden


def send_prefill_tokens(context: Any) -> None:
    """Sends the prompts' tokens to the device; those of the decodes are there, sampled."""
    tokens = slice(context.num_decode_requests, context.active_token_count)
    context.gpu_view.token_to_input_ids[tokens].copy_(context.token_to_input_ids[tokens], non_blocking=True)


def resolve(
    context: Any,
    mask: torch.Tensor,
    of_megatron: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The earlier forward is over. Hidden rows follow those that go on.

    Args:
        context: Its ``surviving_rows`` are set: where all its rows were, hidden ones included: (rows,) int64.
        mask: (rows,), 0 where a request ends; without hidden rows.
        of_megatron: Resolves.

    Returns:
        As megatron: ids of the requests that end, and where the rows that go on were; without hidden rows.
    """
    count, first = context.hidden.count, context.total_request_count
    if not count:
        return of_megatron(mask)
    _note_prefills(context, slice(first, first + count), context.hidden.decodes)  # before rows change their order
    new = torch.arange(first, first + count)
    if mask.any():
        finished, going_on = of_megatron(mask)
        context.surviving_rows = torch.cat([going_on, new])
        if len(going_on) < first:
            _move_rows(context, first, count, to=len(going_on))
        return finished, going_on
    # Megatron would take it that no row is left, and reset the states. New rows may change their order.
    context.total_request_count += count
    finished, context.surviving_rows = of_megatron(torch.cat([mask, mask.new_ones(count)]))
    context.total_request_count -= count
    return finished, new[:0]


def end_step(context: Any) -> None:
    """The tokens of the earlier forward are known: hidden rows are shown."""
    if context.hidden.count:
        hidden = show_prefills(context)
        context.request_in_prefill_status_tensor[context.total_request_count - hidden.count :][: hidden.count] = 1


def _note_prefills(context: Any, rows: slice, first_token: int) -> None:
    """Sets ``prefilled`` for these rows, whose tokens in the forward begin here."""
    if rows.start < rows.stop:
        columns = [context.request_ids, context.request_kv_length_offsets, context.request_query_lengths]
        ids, begun, lengths = (column[rows].tolist() for column in columns)
        marks = context.wrong_tokens[first_token : first_token + sum(lengths)].clone().split(lengths)
        context.prefilled = dict(zip(ids, zip(begun, marks, strict=True), strict=True))


def _move_rows(context: Any, first: int, count: int, *, to: int) -> None:
    """Moves rows up, over rows that are no longer used."""
    for tensor in context.row_tensors():
        tensor[to : to + count] = tensor[first : first + count].clone()
    unused = slice(to + count, first + count)
    context.request_to_kv_block_ids[unused] = -1
    if context.is_hybrid_model:
        context.live_indices[unused] = -1
