"""`LiveSlots`: which slot holds the state of a running request.

Megatron numbers the running requests: the *live index* of a request, below ``max_requests``, stays the same while its row
moves. With memory of fixed sizes that is its slot. With shared memory the cache gives it a slot when it is admitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class LiveSlots:
    """See the module.

    Args:
        home_slots: For each live index, the slot that it has without a request, and with a request that got none.
    """

    def __init__(self, home_slots: Sequence[int]) -> None:
        self._home = torch.tensor([*home_slots, -1], dtype=torch.int64)  # the last one is that of index -1
        self._slots = self._home.clone()

    def of(self, live_indices: torch.Tensor) -> torch.Tensor:
        """(rows,) int64 on the CPU: the slots of these live indices; -1 (no request) stays -1."""
        return self._slots[live_indices.long()]

    def slot(self, live_index: int) -> int:
        """The slot of a live index."""
        return int(self._slots[live_index])

    def bind(self, live_index: int, slot: int | None) -> None:
        """A request was admitted. ``slot``: what the cache gave it, or None."""
        if slot is not None:
            self._slots[live_index] = slot

    def release(self, live_indices: torch.Tensor) -> None:
        """The requests with these live indices end."""
        ended = live_indices.long()
        self._slots[ended] = self._home[ended]

    def reset(self) -> None:
        """All requests end."""
        self._slots.copy_(self._home)
