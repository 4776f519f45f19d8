"""`sparse-N`: N checkpoints of each prompt, where they save most. A baseline: an admission of replays, for any eviction policy.

Source: Shirokikh, Nikolenko, "Sparse Prefix Caching for Hybrid and Recurrent LLM Serving" (arXiv 2605.05219). A later prompt shares
X blocks, and resumes from the deepest checkpoint within them. If the distribution of X is known, checkpoints at depths d1 < d2 < ...
save d1 P(X >= d1) + (d2 - d1) P(X >= d2) + ... blocks on average. Dynamic programming finds the best depths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from megatron_hybrid_prefix.policy.boundaries import Boundary, CheckpointReason


def best_depths(reach: Sequence[float], count: int) -> list[int]:
    """The best depths for at most ``count`` checkpoints, ascending. O(count n log n) for n depths.

    Args:
        reach: How many prompts share at least 0, 1, 2, ... blocks. Does not rise.
        count: Most checkpoints.
    """
    saved = [0.0] * len(reach)  # by depth of the last checkpoint: the most blocks that it and those above save
    above: list[list[int]] = []  # for each number of checkpoints, by depth of the last one: depth of the one above it
    for _ in range(count):
        above.append([0, *_best_above(saved, reach, range(1, len(reach)), range(len(reach)))])
        saved = [saved[top] + (depth - top) * reach[depth] for depth, top in enumerate(above[-1])]
    found = [max(range(len(reach)), key=saved.__getitem__)]
    while above:
        found.append(above.pop()[found[-1]])
    return sorted(set(found[:-1]) - {0})


def _best_above(saved: Sequence[float], reach: Sequence[float], depths: range, tops: range) -> Iterator[int]:
    """The best one of ``tops`` for the checkpoint above each of ``depths``. It moves down with the depth, as ``reach`` falls."""
    if depths:
        half = len(depths) // 2
        depth = depths[half]
        best = max(range(tops.start, min(tops.stop, depth)), key=lambda top: saved[top] + (depth - top) * reach[depth])
        yield from _best_above(saved, reach, depths[:half], range(tops.start, best + 1))
        yield best
        yield from _best_above(saved, reach, depths[half + 1 :], range(best, tops.stop))


class SparsePlacement:
    """A `BoundaryRule` for so many checkpoints. Its distribution: all prompts so far, and one that shares everything."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._prompts = [0]  # by the blocks that they share with earlier ones

    def learn(self, shared_blocks: int) -> None:
        """A prompt shares so many blocks with earlier ones."""
        self._prompts.extend([0] * (shared_blocks + 1 - len(self._prompts)))
        self._prompts[shared_blocks] += 1

    def __call__(self, *, prompt_tokens: int, block_tokens: int, resume_tokens: int, **_: Any) -> tuple[Boundary, ...]:
        start, end = resume_tokens // block_tokens, prompt_tokens // block_tokens
        reach = [*accumulate(reversed(self._prompts), initial=1)][:0:-1]
        reach += [1] * (end + 1 - len(reach))
        depths = best_depths(reach[start : end + 1], self._count) if end > start else ()
        return tuple(Boundary((start + depth) * block_tokens, CheckpointReason.BREAKPOINT) for depth in depths)
