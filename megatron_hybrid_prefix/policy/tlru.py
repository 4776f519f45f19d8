"""`tlru`: tail-optimized LRU. What the next turn can do without goes first, then the least recently used. A baseline.

Source: Zhang, Li, Moallemi, Peng, "Tail-Optimized Caching for LLM Inference" (arXiv 2510.15152). A turn that computes more than a
threshold is late. KV that can go without making the next turn late is *safe*: of a history of L tokens that part beyond
L + Q - threshold, if the next prompt adds Q. Here it is a state: without it the turn computes from the nearest kept state above.
Q is measured: the blocks that prompts added so far, on average. The threshold is a goal of the service in the paper; here 4 Q.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_hybrid_prefix.policy.base import KeptState
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.scored import ScoredEviction

THRESHOLD_TURNS = 4


class TailOptimizedLruEviction[T: KeptState](ScoredEviction[T]):
    """Safe states first; both kinds in the order of `lru`."""

    def __init__(self) -> None:
        super().__init__()
        self._prompts = self._added_blocks = 0  # prompts so far, and what they added

    def added(self, state: T) -> None:
        super().added(state)
        if state.reason == CheckpointReason.TAIL:
            self._prompts += 1
            self._added_blocks += self.replay_blocks(state)

    def order(self, states: Iterable[T]) -> Iterable[T]:
        safe_blocks = (THRESHOLD_TURNS - 1) * self._added_blocks // max(1, self._prompts)
        return sorted(states, key=lambda state: self.replay_blocks(state) > safe_blocks)
