"""Rings of a decode: what was input since the position of the state in a slot.

A decode reads a state, its *origin*'s, and what came since; it writes the state where the position passes a multiple of R tokens
alone (it *flushes*). An entry of position q is at q modulo its ring's entries. A rejected draft is overwritten, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from megatron_hybrid_prefix.ops.slot_copies import copy_slots
from megatron_hybrid_prefix.ops.triton_or_torch import jit, tl, triton


class RingRows(NamedTuple):
    """The rows of a decode step, each (rows,) and on the device; integers of 64 bits where they say which, of 32 where a position.

    Rows share no slot and no ring. What a ring holds outside [origin, position) is stale, and may be NaN.

    Args:
        slots: The row's state in a layer's tensors of states; negative: the row is padding, and zero in results.
        rings: The row's ring in a layer's tensors of rings.
        positions: Tokens before the row's first of this step.
        origins: The position of the state in the slot.
        ends: Where the state is advanced to and written, before this step's tokens; the origin: nowhere.
        kept: Another slot that gets the state and the window at ``ends``, whether or not they moved; negative: none.
    """

    slots: torch.Tensor
    rings: torch.Tensor
    positions: torch.Tensor
    origins: torch.Tensor
    ends: torch.Tensor
    kept: torch.Tensor

    def where(self, which: torch.Tensor) -> RingRows:
        """Those of ``which``, (rows,) bool, with int64 everywhere: for the PyTorch versions."""
        if which.all():
            return RingRows(*(field.long() for field in self))
        at = which.nonzero().squeeze(1)
        return RingRows(*(field[at].long() for field in self))

    def flushed(self) -> RingRows:
        """Those whose state moves: for the PyTorch versions."""
        return self.where((self.slots >= 0) & (self.ends > self.origins))

    def keep(self, pool: torch.Tensor) -> None:
        """Copies what is in slots to those that get it, too: for the PyTorch versions."""
        own = (self.slots >= 0) & (self.kept >= 0)
        if own.any():
            pool[self.kept[own]] = pool[self.slots[own]]


class OpenChunks(NamedTuple):
    """The open chunks of the rows of a decode, packed one after another as a prefill has them; integers on the device.

    A row's tokens are those of its chunk so far, with the one that it decodes as the last. Rows of padding have none. With drafts each token
    of a request is a row here, one after another, and none where it cannot be accepted. They share a ring: no program may read there what
    another one of its kernel adds.

    Args:
        first: (rows + 1,) int64: each row is a sequence of one chunk.
        bounds: (rows + 1,) int32: a row's tokens, see `scan_by_slots`.
        added: (rows,) int64: which entry the new token becomes, in rings that lie one after another; negative: none.
        sources: (rows,) int64: the slot of the state before the chunk.
        filled: (rows,) int64: the slot for the state after the chunk, if the token fills it; else negative.
        none: (rows,) int64, negative.
        step_tokens: How many rows share a ring.
    """

    first: torch.Tensor
    bounds: torch.Tensor
    added: torch.Tensor
    sources: torch.Tensor
    filled: torch.Tensor
    none: torch.Tensor
    step_tokens: int

    def add(self, ring: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Adds each row's token to a ring. Returns the rings' entries, one ring after another. Shapes: see `with_new`."""
        entries = ring.flatten(0, 1)
        copy_slots(new[None], entries[None], self.first[:-1], self.added)
        return entries

    @property
    def last(self) -> torch.Tensor:
        """(rows,) int64: where its new token is among the packed ones: for the PyTorch versions, as the next two."""
        return self.bounds[1:].long() - 1

    @property
    def rows(self) -> torch.Tensor:
        """(tokens + 1,) int64: the row of a packed token. The last one is none, so that there is one."""
        counts = self.bounds.diff().long()
        owners = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        return torch.nn.functional.pad(owners, (0, 1))

    def with_new(self, ring: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Adds each row's token to a ring, and packs the chunks.

        Args:
            ring: (rings, chunk, *shape).
            new: (rows, *shape), contiguous inside a row.

        Returns:
            (tokens + 1, *shape); undefined after the last token.
        """
        rows, entries = self.rows, self.add(ring, new)
        behind = self.last[rows] - torch.arange(len(rows), device=rows.device)
        return entries[(self.added[rows] - behind).clamp(0, len(entries) - 1)]

    @property
    def slots(self) -> dict[str, torch.Tensor]:
        """Source and target slots: arguments of the scans."""
        targets = {"live_slots": self.filled, "chunk_slots": self.none}
        return {"first_chunks": self.first, "source_slots": self.sources, **targets}


class OpenRows(RingRows):
    """The rows of a decode with a prefill's bits. Windows are those at a row's position, states those at its chunk's first token.

    Attributes:
        chunks: By quantum.
    """

    chunks: Mapping[int, OpenChunks]


def take_last(pool: torch.Tensor, after: torch.Tensor, rows: RingRows) -> None:
    """Of a ring of whole states: a slot gets the state after the last token before a row's position, unless it has that.

    Args:
        pool: (slots, *shape), a component of one layer's states.
        after: (rings, entries, *shape), contiguous: those after each token of the step before.
        rows: Which rows these are.
    """
    entries = after.shape[1]
    last = rows.rings * entries + (rows.positions - 1) % entries
    copy_slots(after.flatten(0, 1)[None], pool[None], torch.where(rows.positions > rows.origins, last, -1), rows.slots)


def keep_last(pool: torch.Tensor, after: torch.Tensor, rows: RingRows, token: int) -> None:
    """The reverse: the state in a slot is that after ``token`` of this step, from 0."""
    entries = after.shape[1]
    last = rows.rings * entries + (rows.positions + token) % entries
    copy_slots(pool[None], after.flatten(0, 1)[None], rows.slots, last)


def sums_after(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Along dimension 1: the sum of all, and of what comes after each.

    Sums of decays' logarithms. As a difference of sums from the first on, a small one would lose what a large one has rounded off.
    """
    sums = values.flip(1).cumsum(1).flip(1)
    return sums[:, 0], torch.cat([sums[:, 1:], torch.zeros_like(sums[:, :1])], 1)


def at_once(most: int, parts: int, groups: int, programs: int) -> int:
    """How many of a group's parts a program takes: ``most``, or as many fewer as give so many programs."""
    count = min(most, parts)
    while count > 1 and groups * triton.cdiv(parts, count) < programs:
        count = triton.cdiv(count, 2)
    return count


@jit
def entry_at(position: tl.tensor, number: tl.tensor, entries: tl.tensor) -> tl.tensor:
    """Where in a ring of so many entries that of ``position + number`` is; ``number`` from 0 to ``entries``."""
    at = position % entries + number
    return tl.where(at < entries, at, at - entries)


@jit
def times(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Their product with the accuracy of float32. What has 16 bits is multiplied as it is, float32 by it in three parts."""
    if a.dtype == b.dtype and a.dtype != tl.float32:
        product = tl.dot(a, b)
    elif a.dtype == tl.bfloat16 or b.dtype == tl.bfloat16:
        wide = a if a.dtype == tl.float32 else b
        high = wide.to(tl.bfloat16)
        rest = wide - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        if a.dtype == tl.float32:
            product = tl.dot(high, b) + tl.dot(middle, b) + tl.dot(low, b)
        else:
            product = tl.dot(a, high) + tl.dot(a, middle) + tl.dot(a, low)
    else:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return product
