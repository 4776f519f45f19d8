"""`LiveSlots`: which slot holds the state of a running request.

Megatron numbers the running requests: the *live index* of a request, below ``max_requests``, stays the same while its row
moves. The cache gives a request a slot when it is admitted. Or the engine has slots of its own: then the index is the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class LiveSlots:
    """See the module.

    Args:
        home_slots: For each live index, the slot that it has without a request, and with a request that got none.
        row_of: Row of a slot in the tensors of states (`SharedMemory.row`).
    """

    def __init__(self, home_slots: Sequence[int], row_of: Callable[[int], int]) -> None:
        self._home_slots, self._row_of = list(home_slots), row_of
        self._slots = self._home_slots.copy()
        # The last one is that of index -1.
        self._home = torch.tensor([*map(row_of, home_slots), -1], dtype=torch.int64)
        self._rows = self._home.clone()

    def rows(self, live_indices: torch.Tensor) -> torch.Tensor:
        """(rows,) int64 on the CPU: where the states with these live indices are; -1 (no request) stays -1."""
        return self._rows[live_indices.long()]

    def slot(self, live_index: int) -> int:
        """The slot of a live index."""
        return self._slots[live_index]

    def bind(self, live_index: int, slot: int | None) -> None:
        """A request was admitted. ``slot``: what the cache gave it, or None."""
        if slot is not None:
            self._slots[live_index], self._rows[live_index] = slot, self._row_of(slot)

    def release(self, live_indices: torch.Tensor) -> None:
        """The requests with these live indices end."""
        ended = live_indices.long()
        self._rows[ended] = self._home[ended]
        for index in ended.tolist():
            if index >= 0:
                self._slots[index] = self._home_slots[index]

    def reset(self) -> None:
        """All requests end."""
        self._slots[:] = self._home_slots
        self._rows.copy_(self._home)
