"""`ScoreTable`: the log-probs of cached prompts, kept beside their blocks and boundaries.

A request that wants the log-probs of its prompt can skip tokens only if their log-probs are kept, too:

- *scores* of a block: the log-prob of each of its tokens, and the likeliest tokens at each of these positions;
- the *next logits* of a boundary: the logits after the last token before it. The log-prob of the first token after a boundary
  comes from the token before it, which a hit does not compute, and each prompt may have another token there.

Only requests that want the log-probs of their prompt make scores. They are kept by the key of their block, so they are never
shared between salts, adapters or epochs, and leave when the block leaves the prefix tree (`KeyedValues`). They are values on
the host, opaque here, within a budget of bytes. If that is full, the scores used longest ago go first, deeper blocks before
the blocks above them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from megatron_hybrid_prefix.errors import CacheCorruptionError


class Kept:
    """Scores of a block, or the next logits of a boundary.

    A step's blocks become matchable before its log-probs are on the host. So a value is first promised, and filled at the end
    of the same step. Who matches it meanwhile reads it at the end of a later step.

    Attributes:
        top_n: Likeliest tokens per position; 0 for a next logits.
        size_bytes: Size of the value; 0 until it is filled.
    """

    __slots__ = ("_value", "size_bytes", "top_n")

    def __init__(self, top_n: int = 0) -> None:
        self.top_n = top_n
        self.size_bytes = 0
        self._value: Any = None

    @property
    def is_filled(self) -> bool:
        """Whether the value is there."""
        return self._value is not None

    @property
    def value(self) -> Any:
        """The value.

        Raises:
            CacheCorruptionError: It was promised and never filled.
        """
        if self._value is None:
            raise CacheCorruptionError("log-probs of a prompt were promised by a step and never filled")
        return self._value

    def fill(self, value: Any, size_bytes: int) -> None:
        """Sets the value."""
        self._value, self.size_bytes = value, size_bytes


class BlockScores:
    """What is kept beside one block.

    Attributes:
        block: Scores of the block, or None.
        next_logits: Next logits of the boundary at its end, or None.
    """

    __slots__ = ("block", "next_logits")

    def __init__(self) -> None:
        self.block: Kept | None = None
        self.next_logits: Kept | None = None


class ScoreTable:
    """Scores by key of their block, least recently used first.

    Args:
        budget_bytes: Bytes of all values. 0: nothing is kept.

    Attributes:
        budget_bytes: See above.
        used_bytes: Bytes of the values kept now.
        version: Grows whenever scores are added or dropped.
        evictions: Blocks whose scores were evicted because the budget was full.
    """

    def __init__(self, budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.version = 0
        self.evictions = 0
        self._kept: OrderedDict[bytes, BlockScores] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    # -- read ----------------------------------------------------------------------------------------------------------

    def block(self, key: bytes, top_n: int) -> Kept | None:
        """Scores of the block with at least ``top_n`` likeliest tokens per position, or None."""
        kept = self._kept.get(key)
        return None if kept is None or kept.block is None or kept.block.top_n < top_n else kept.block

    def next_logits(self, key: bytes) -> Kept | None:
        """Next logits of the boundary at the block's end, or None."""
        kept = self._kept.get(key)
        return None if kept is None else kept.next_logits

    def depths(self, keys: Sequence[bytes], top_n: int) -> list[int]:
        """Depths, in blocks, where a request that wants the log-probs of its prompt may resume. Ascending.

        Args:
            keys: Keys of the prompt's blocks, front first.
            top_n: Likeliest tokens that it wants per position.
        """
        found = []
        for depth, key in enumerate(keys, 1):
            if self.block(key, top_n) is None:
                break
            if self.next_logits(key) is not None:
                found.append(depth)
        return found

    def take(self, keys: Sequence[bytes], top_n: int) -> tuple[Kept, ...]:
        """A request resumes at one of `depths`: scores of the blocks up to there, then the next logits. Empty without keys."""
        found = [self.block(key, top_n) for key in keys]
        if keys:
            found.append(self.next_logits(keys[-1]))
        assert None not in found, found
        self.use(keys)
        return tuple(item for item in found if item is not None)

    # -- write ---------------------------------------------------------------------------------------------------------

    def promise_block(self, key: bytes, top_n: int) -> Kept | None:
        """Promises scores of the block. None: it has such scores already, with as many likeliest tokens."""
        if not self.budget_bytes or self.block(key, top_n) is not None:
            return None
        kept = self._kept.setdefault(key, BlockScores())
        self._subtract(kept.block)
        kept.block = Kept(top_n)
        self.version += 1
        return kept.block

    def promise_next_logits(self, key: bytes) -> Kept | None:
        """Promises the next logits of the boundary at the block's end. None: it has them already."""
        if not self.budget_bytes or self.next_logits(key) is not None:
            return None
        kept = self._kept.setdefault(key, BlockScores())
        kept.next_logits = Kept()
        self.version += 1
        return kept.next_logits

    def fill(self, key: bytes, promised: Kept, value: Any, size_bytes: int) -> None:
        """Fills a promise. The value is kept if the block still has the promise, and then counts towards the budget."""
        promised.fill(value, size_bytes)
        if self._has(key, promised):
            self.used_bytes += size_bytes

    def use(self, keys: Sequence[bytes]) -> None:
        """A request used or made the scores of these blocks, front first. Deeper blocks will be evicted first."""
        for key in reversed(keys):
            if key in self._kept:
                self._kept.move_to_end(key)

    def trim(self) -> None:
        """Evicts what exceeds the budget."""
        while self.used_bytes > self.budget_bytes:
            self.drop(next(iter(self._kept)))
            self.evictions += 1

    def withdraw(self, key: bytes, promised: Kept) -> None:
        """Drops a promise that will not be filled."""
        if self._has(key, promised) and not promised.is_filled:
            self.drop(key)

    def drop(self, key: bytes) -> None:
        """Drops what is kept beside the block."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._subtract(kept.block)
            self._subtract(kept.next_logits)
            self.version += 1

    def drop_state(self, key: bytes) -> None:
        """Drops the block's next logits: no tier has a state there any more."""
        kept = self._kept.get(key)
        if kept is not None and kept.next_logits is not None:
            self._subtract(kept.next_logits)
            kept.next_logits = None
            self.version += 1
            if kept.block is None:
                del self._kept[key]

    def clear(self) -> None:
        """Drops everything."""
        self._kept.clear()
        self.used_bytes = 0
        self.version += 1

    def check(self, keys: Collection[bytes]) -> None:
        """Checks that scores belong to blocks with these keys and that bytes add up, within the budget.

        Raises:
            CacheCorruptionError: One of these does not hold.
        """
        sizes = 0
        for key, kept in self._kept.items():
            if key not in keys:
                raise CacheCorruptionError(f"block {key.hex()[:8]} has scores and is not in the tree")
            if kept.block is None and kept.next_logits is None:
                raise CacheCorruptionError(f"block {key.hex()[:8]} has empty scores")
            sizes += sum(item.size_bytes for item in (kept.block, kept.next_logits) if item is not None)
        if sizes != self.used_bytes or self.used_bytes > self.budget_bytes:
            raise CacheCorruptionError(
                f"scores of {sizes} bytes, counted as {self.used_bytes}, budget {self.budget_bytes}"
            )

    def _has(self, key: bytes, promised: Kept) -> bool:
        kept = self._kept.get(key)
        return kept is not None and (kept.block is promised or kept.next_logits is promised)

    def _subtract(self, item: Kept | None) -> None:
        if item is not None:
            self.used_bytes -= item.size_bytes
