"""Rings of a decode: what was input since the position of the state in a slot.

A decode reads a state, its *origin*'s, and what came since; it writes the state where the position passes a multiple of R tokens
alone (it *flushes*). An entry of position q is at q modulo its ring's entries. A rejected draft is overwritten, and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RingRows(NamedTuple):
    """The rows of a decode step, each (rows,) and on the device.

    Rows share no slot and no ring. What a ring holds outside [origin, position) is stale, and may be NaN.
    """

    slots: torch.Tensor
    """int64: the row's state in a layer's tensors of states. Negative: the row is padding, and zero in results."""
    rings: torch.Tensor
    """int64: the row's ring in a layer's tensors of rings."""
    positions: torch.Tensor
    """int32: tokens before the row's first of this step."""
    origins: torch.Tensor
    """int32: the position of the state in the slot."""
    ends: torch.Tensor
    """int32: where the state is advanced to and written, before this step's tokens; the origin: nowhere."""
    kept: torch.Tensor
    """int64: another slot that gets the state and the window at ``ends``, whether or not they are the slot's. Negative: none."""


def ring_tokens(state_bytes: int, entry_bytes: int, block_tokens: int) -> int:
    """R: tokens between two writes of a state, a divisor of the block.

    A state is written once in R steps, and R / 2 entries are read in each: the bytes are fewest at sqrt(2 state / entry). The
    power of two next to that, from 8 to 64; fewer only where the block demands it.
    """
    best = (2 * state_bytes / entry_bytes) ** 0.5
    choices = [tokens for tokens in (8, 16, 32, 64) if block_tokens % tokens == 0]
    return min(choices, key=lambda tokens: abs(tokens - best)) if choices else block_tokens & -block_tokens


def ring_entries(tokens: int, step_tokens: int) -> int:
    """Entries of a ring that is flushed at multiples of ``tokens``: a step overwrites none that it, or the next, reads."""
    return tokens + 2 * step_tokens - 1
