"""Which block boundaries of a prompt shall get a checkpoint.

Five rules, each answering a way in which prompts come back:

- *junction*: KV matched deeper than a state did, so at least two prompts share the blocks up to there;
- *breakpoint*: the caller says that others will share the prompt up to there;
- *tail*: the last full block of the prompt, from which the next turn goes on;
- *repeat*: the deepest boundary from which exactly this prompt can be resumed, where that is not the tail (the last
  token is always computed, so a prompt of n blocks resumes at n - 1);
- *interval*: every so many tokens, for a prefix that is shared for the first time. Nobody asked for these, so they only
  get what is left over (``base.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from megatron_hybrid_prefix.arithmetic import ceil_div

MOST_INTERVALS = 16  # interval checkpoints of a prompt, where their distance is not set


class CheckpointReason(IntEnum):
    """Why a checkpoint is kept; the lower, the earlier it is given a slot when there are few.

    The junction comes first: it was matched already, a tail may never be. And where one conversation goes on, the
    junction is near the tail, so little is lost; the other way round a shared prefix would never be kept.
    """

    JUNCTION = 0
    BREAKPOINT = 1  # named by the caller
    TAIL = 2
    REPEAT = 3
    INTERVAL = 4  # a guess: may be shared by a prompt that nobody has seen yet
    DECODE = 5  # reached while the answer was generated
    VERIFY = 6  # computed again, to be compared with the state that is kept already


class Boundary(NamedTuple):
    """A token position that shall get a checkpoint."""

    position_tokens: int
    reason: CheckpointReason


def default_interval_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Tokens between the interval checkpoints of a prompt: as many blocks as make it at most `MOST_INTERVALS` of them."""
    return max(1, ceil_div(prompt_tokens, MOST_INTERVALS * block_tokens)) * block_tokens


def prompt_boundaries(
    *,
    prompt_tokens: int,
    block_tokens: int,
    resume_tokens: int,
    kv_depth_blocks: int,
    min_computed_tokens: int = 1,
    breakpoints: Sequence[int] = (),
    interval_tokens: int = 0,
) -> tuple[Boundary, ...]:
    """Boundaries of a prompt that shall be kept, ascending, one reason each: the most important one.

    Args:
        prompt_tokens: Length of the prompt.
        block_tokens: Tokens of a block.
        resume_tokens: Where computing starts; a boundary there or before cannot be had from this request.
        kv_depth_blocks: Blocks from the front whose KV was resident when the prompt was matched.
        min_computed_tokens: Tokens of a prompt that are always computed.
        breakpoints: Token positions up to which others share the prompt, each rounded down to the end of a block. In
            any order; those that the request does not compute are passed over.
        interval_tokens: A multiple of ``block_tokens``: each multiple of it is kept, too; 0: none.
    """
    tail = prompt_tokens // block_tokens * block_tokens
    repeat = max(0, prompt_tokens - min_computed_tokens) // block_tokens * block_tokens
    junction = kv_depth_blocks * block_tokens
    found: dict[int, CheckpointReason] = {}
    if junction > resume_tokens:
        found[junction] = CheckpointReason.JUNCTION
    for breakpoint_tokens in breakpoints:
        position = breakpoint_tokens // block_tokens * block_tokens
        if resume_tokens < position <= tail:
            found.setdefault(position, CheckpointReason.BREAKPOINT)
    for position, reason in ((tail, CheckpointReason.TAIL), (repeat, CheckpointReason.REPEAT)):
        if position > resume_tokens:
            found.setdefault(position, reason)
    if interval_tokens:
        first = (resume_tokens // interval_tokens + 1) * interval_tokens
        for position in range(first, tail + 1, interval_tokens):
            found.setdefault(position, CheckpointReason.INTERVAL)
    return tuple(Boundary(position, found[position]) for position in sorted(found))


def with_verification(boundaries: tuple[Boundary, ...], position_tokens: int) -> tuple[Boundary, ...]:
    """The boundaries with the one at ``position_tokens`` for verification."""
    others = [boundary for boundary in boundaries if boundary.position_tokens != position_tokens]
    return tuple(sorted([*others, Boundary(position_tokens, CheckpointReason.VERIFY)]))


def boundaries_in_span(boundaries: Sequence[Boundary], start_tokens: int, end_tokens: int) -> Sequence[Boundary]:
    """Those of the sorted ``boundaries`` that computing [start, end) passes or reaches: in (start, end]."""
    first = bisect_right(boundaries, start_tokens, key=_position)
    last = bisect_right(boundaries, end_tokens, key=_position)
    return boundaries[first:last]


def _position(boundary: Boundary) -> int:
    return boundary.position_tokens
