"""Which block boundaries of a prompt get a checkpoint.

Five rules. Each one serves a way in which a prompt comes back:

- *junction*: the KV matched deeper than any state, so at least two prompts share the blocks up to here.
- *breakpoint*: the caller says that other prompts will share this one up to here.
- *tail*: the last full block of the prompt. The next turn of a chat resumes here.
- *repeat*: the deepest boundary from which the same prompt can be resumed, if that is not the tail. The last token is
  always computed, so a prompt of exactly n blocks resumes at n - 1.
- *interval*: every N tokens, or by default where `default_guesses` says, for a prefix that is shared for the first time.
  These are guesses (``tiers/blocks.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import starmap
from operator import attrgetter
from typing import NamedTuple

MOST_INTERVALS = 16  # evenly spaced interval checkpoints per prompt, if their distance is not set


class CheckpointReason(IntEnum):
    """Why a checkpoint is kept. When slots are scarce, the lowest value gets a slot first.

    The junction comes first, because it has matched already, while a tail may never match. If one chat goes on, the
    junction is near the tail, so little is lost. With the tail first, a shared prefix would never be kept.
    """

    JUNCTION = 0
    BREAKPOINT = 1  # set by the caller
    TAIL = 2
    REPEAT = 3
    INTERVAL = 4  # a guess: a later prompt may share it
    DECODE = 5  # reached by a decode step
    VERIFY = 6  # computed again, to compare with the cached state


class Boundary(NamedTuple):
    """A token position that gets a checkpoint."""

    position_tokens: int
    reason: CheckpointReason


type BoundaryRule = Callable[..., tuple[Boundary, ...]]
"""A function that chooses the boundaries of a prompt that get a checkpoint, with the arguments of `prompt_boundaries`."""


def default_interval_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Tokens between evenly spaced interval checkpoints: whole blocks, for at most `MOST_INTERVALS` checkpoints."""
    return max(1, -(-prompt_tokens // (MOST_INTERVALS * block_tokens))) * block_tokens


def default_guesses(prompt_tokens: int, block_tokens: int) -> Iterator[int]:
    """Positions of a prompt's interval checkpoints if their distance is not set, in any order, some twice.

    Evenly spaced ones; and 1, 2, 3, 4, 6, 8, 12, 16, ... blocks before the last full block. So if two prompts part n blocks
    before the end of the first, the second resumes less than n / 2 blocks before that.
    """
    interval_tokens = default_interval_tokens(prompt_tokens, block_tokens)
    yield from range(interval_tokens, prompt_tokens + 1, interval_tokens)
    full_blocks = prompt_tokens // block_tokens
    distance, next_distance = 1, 2
    while distance < full_blocks:
        yield (full_blocks - distance) * block_tokens
        distance, next_distance = next_distance, max(3, 2 * distance)


def prompt_boundaries(
    *,
    prompt_tokens: int,
    block_tokens: int,
    resume_tokens: int,
    kv_depth_blocks: int,
    min_computed_tokens: int = 1,
    breakpoints: Sequence[int] = (),
    interval_tokens: int | None = 0,
) -> tuple[Boundary, ...]:
    """Boundaries of a prompt that get a checkpoint, ascending. Each has one reason, the most important one.

    Args:
        prompt_tokens: Length of the prompt.
        block_tokens: Tokens per block.
        resume_tokens: Where computing starts. The request cannot write states here or before.
        kv_depth_blocks: Number of leading blocks whose KV was cached when the prompt was matched.
        min_computed_tokens: Last tokens of a prompt that are always computed.
        breakpoints: Token positions up to which other prompts share this one, in any order. Each is rounded down to a
            block boundary. Positions that the request does not compute are ignored.
        interval_tokens: Also keep each multiple of this, a multiple of ``block_tokens``. 0: none. None: `default_guesses`.
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
    guesses: Iterable[int] = ()
    if interval_tokens is None:
        guesses = default_guesses(prompt_tokens, block_tokens)
    elif interval_tokens:
        guesses = range(interval_tokens, tail + 1, interval_tokens)
    for position in guesses:
        if position > resume_tokens:
            found.setdefault(position, CheckpointReason.INTERVAL)
    return tuple(starmap(Boundary, sorted(found.items())))


def with_boundary(boundaries: Sequence[Boundary], added: Boundary) -> tuple[Boundary, ...]:
    """Adds a boundary, in place of any other at its position."""
    return tuple(sorted([*(each for each in boundaries if each.position_tokens != added.position_tokens), added]))


def boundaries_in_span(boundaries: Sequence[Boundary], start_tokens: int, end_tokens: int) -> Sequence[Boundary]:
    """The boundaries in (start, end], which computing positions [start, end) reaches. ``boundaries`` is sorted."""
    position = attrgetter("position_tokens")
    first, last = (
        bisect_right(boundaries, start_tokens, key=position),
        bisect_right(boundaries, end_tokens, key=position),
    )
    return boundaries[first:last]
