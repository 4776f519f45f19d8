"""`seglen`: evicts by the length to compute again, and by recency. A baseline.

Source: "seglen" (sgl-project/sglang, pull request 22172), after the utility of Marconi (Pan et al., arXiv 2411.19379): the weighted
sum of the blocks from the nearest kept state above (85 % there) and of recency. Here each runs from 0 to 1 over the kept states:
the blocks as a share of the most, recency as the place in the order of `lru`.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_hybrid_prefix.policy.base import KeptState
from megatron_hybrid_prefix.policy.scored import ScoredEviction

LENGTH_PERCENT = 85


class SegLenEviction[T: KeptState](ScoredEviction[T]):
    """The least weighted sum first."""

    def order(self, states: Iterable[T]) -> Iterable[T]:
        lengths = {state: self.replay_blocks(state) for state in states}
        # Whole numbers: both shares, multiplied by the most blocks and by the last place.
        a_block = LENGTH_PERCENT * max(1, len(lengths) - 1)
        a_place = (100 - LENGTH_PERCENT) * max(lengths.values(), default=1)
        scores = {state: a_block * blocks + a_place * place for place, (state, blocks) in enumerate(lengths.items())}
        return sorted(scores, key=scores.__getitem__)
