"""Random prefill steps for operations that read and write states by slot, and a pool in which all else is NaN."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

SLOTS = 24


@dataclass
class Step:
    """Random sequences cut into chunks, with sources and targets; one empty sequence for padding at the end."""

    lengths: list[int]  # of the chunks
    first_chunks: list[int]
    source_slots: list[int]
    live_slots: list[int]
    chunk_slots: list[int]

    @classmethod
    def draw(cls, seed: int, chunk_tokens: int = 8, *, full: bool = False) -> Step:
        """At most 20 chunks of at most ``chunk_tokens``; ``full``: of exactly so many between the first and last of a sequence."""
        dice = random.Random(seed)
        free = list(range(SLOTS))
        dice.shuffle(free)
        shared = free.pop()  # a checkpoint that several sequences start from
        step = cls([], [0], [], [], [])
        for _ in range(dice.randint(1, 5)):
            live = free.pop()
            step.source_slots.append(dice.choice((live, shared)))
            step.live_slots.append(live)
            count = dice.randint(1, 4)
            for number in range(count):
                length = dice.randint(1, chunk_tokens)
                step.lengths.append(chunk_tokens if full and 0 < number < count - 1 else length)
                step.chunk_slots.append(free.pop() if dice.random() < 0.4 and len(free) > 4 else -1)
            step.first_chunks.append(len(step.lengths))
        for padding, field in ((0, "lengths"), (-1, "chunk_slots"), (-1, "live_slots")):
            getattr(step, field).append(padding)
        step.source_slots.append(0)
        step.first_chunks.append(len(step.lengths))
        return step

    @property
    def bounds(self) -> list[int]:
        return [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]

    def of_tokens(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token, the source slot of its sequence, and the row at which that starts."""
        sources, starts = torch.zeros(2, self.bounds[-1], dtype=torch.int32)
        for number, chunks, _ in self.sequences():
            span = slice(self.bounds[chunks.start], self.bounds[chunks.stop])
            sources[span], starts[span] = self.source_slots[number], span.start
        return sources.to(device), starts.to(device)

    def tensors(self, device: str, *names: str) -> dict[str, torch.Tensor]:
        """Fields; by default those of slots."""
        names = names or ("first_chunks", "source_slots", "live_slots", "chunk_slots")
        return {name: torch.tensor(getattr(self, name), dtype=torch.int64, device=device) for name in names}

    def sequences(self):
        """Index, chunks, and all (target slot, chunk before which it is the state) of each real sequence."""
        for i, live in enumerate(self.live_slots[:-1]):
            chunks = range(self.first_chunks[i], self.first_chunks[i + 1])
            kept = [(self.chunk_slots[c], c + 1) for c in chunks if self.chunk_slots[c] >= 0]
            yield i, chunks, [*kept, (live, chunks.stop)]


def poisoned_pool(step: Step, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """A pool in which only the sources are numbers; strided over slots, as one layer of a larger tensor may be."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.full((SLOTS, 2, *shape), float("nan"), dtype=dtype, device=device)[:, 1]
    for slot in sorted(set(step.source_slots[:-1])):
        pool[slot] = torch.randn(shape, generator=generator).to(dtype).to(device)
    return pool


def check_kept(
    before: torch.Tensor, after: torch.Tensor, live: Iterable[int], kept: Iterable[int], write: Callable[..., object]
) -> None:
    """Raises AssertionError if ``write(states, kept=another pool)`` does not write to two what it wrote to one, bit by bit.

    That is ``after``, and was ``before``. Slots ``live`` are of the states, ``kept`` of the other pool; negative: none.
    """
    other = torch.full((len(before), 3, *before.shape[1:]), 9, dtype=before.dtype, device=before.device)[:, 1]
    found, right = [before.clone(), other], [before.clone(), other.clone()]
    for pool, slots in zip(right, (live, kept), strict=True):
        written = [slot for slot in slots if slot >= 0]
        pool[written] = after[written]
    write(found[0], kept=other)
    assert all(torch.equal(*(x.nan_to_num(9e9) for x in pair)) for pair in zip(found, right, strict=True))
