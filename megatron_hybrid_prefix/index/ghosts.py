"""`Ghosts`: keys of KV blocks that were evicted not long ago.

A prompt shows that a prefix is shared when it starts like an earlier prompt. The KV of the earlier prompt tells it, but KV
behind which no state is kept is evicted first. Its key takes 0.00001 of its bytes. So the second prompt keeps a state at the
end of what both share, even if the KV of the first is gone.
"""

from __future__ import annotations

from collections import OrderedDict

_GHOSTS_PER_BLOCK = 4  # remembered keys, as a multiple of the blocks that the memory holds


class Ghosts:
    """Keys of evicted blocks, bounded: the key that was added longest ago is forgotten first.

    Args:
        blocks: Blocks that the memory holds.
    """

    def __init__(self, blocks: int) -> None:
        self._most = _GHOSTS_PER_BLOCK * blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """The block with this key was evicted."""
        if key in self._keys:
            self._keys.move_to_end(key)
            return
        self._keys[key] = None
        if len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def discard(self, key: bytes) -> None:
        """The block with this key was computed again."""
        self._keys.pop(key, None)

    def clear(self) -> None:
        """Forgets all keys."""
        self._keys.clear()
