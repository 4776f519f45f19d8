"""`ScoreTable`: the log-probs of cached prompts, kept beside their blocks and boundaries.

A request that wants the log-probs of its prompt can skip tokens only if their log-probs are kept, too:

- *scores* of a block: the log-prob of each of its tokens, and the likeliest tokens at each of these positions;
- the *next logits* of a boundary: the logits after the last token before it. The log-prob of the first token after a boundary
  comes from the token before it, which a hit does not compute, and each prompt may have another token there.

Only requests that want the log-probs of their prompt make scores. Scores belong to a node of the prefix tree, so they are
never shared between salts, adapters or epochs. They are values on the host, opaque here, within a budget of bytes. If that is
full, the scores used longest ago go first, deeper blocks before the blocks above them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_hybrid_prefix.errors import CacheCorruptionError

if TYPE_CHECKING:
    from megatron_hybrid_prefix.index.tree import Node
    from megatron_hybrid_prefix.metrics import PrefixStats


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


class NodeScores:
    """What is kept beside one node.

    Attributes:
        block: Scores of its block, or None.
        next_logits: Next logits of the boundary at its end, or None.
    """

    __slots__ = ("block", "next_logits")

    def __init__(self) -> None:
        self.block: Kept | None = None
        self.next_logits: Kept | None = None


class ScoreTable:
    """Scores by node, least recently used first.

    Args:
        budget_bytes: Bytes of all values. 0: nothing is kept.

    Attributes:
        budget_bytes: See above.
        used_bytes: Bytes of the values kept now.
        version: Grows whenever scores are added or dropped.
        stats: Counts evictions.
    """

    def __init__(self, budget_bytes: int = 0, stats: PrefixStats | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.version = 0
        self.stats = stats
        self._kept: OrderedDict[Node, NodeScores] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    # -- read ----------------------------------------------------------------------------------------------------------

    def block(self, node: Node | None, top_n: int) -> Kept | None:
        """Scores of the node's block with at least ``top_n`` likeliest tokens per position, or None."""
        kept = None if node is None else self._kept.get(node)
        return None if kept is None or kept.block is None or kept.block.top_n < top_n else kept.block

    def next_logits(self, node: Node | None) -> Kept | None:
        """Next logits of the boundary at the node's end, or None."""
        kept = None if node is None else self._kept.get(node)
        return None if kept is None else kept.next_logits

    # -- write ---------------------------------------------------------------------------------------------------------

    def promise_block(self, node: Node, top_n: int) -> Kept | None:
        """Promises scores of the node's block. None: the node has such scores already, with as many likeliest tokens."""
        if not self.budget_bytes or self.block(node, top_n) is not None:
            return None
        kept = self._kept.setdefault(node, NodeScores())
        self._subtract(kept.block)
        kept.block = Kept(top_n)
        self.version += 1
        return kept.block

    def promise_next_logits(self, node: Node) -> Kept | None:
        """Promises the next logits of the boundary at the node's end. None: the node has them already."""
        if not self.budget_bytes or self.next_logits(node) is not None:
            return None
        kept = self._kept.setdefault(node, NodeScores())
        kept.next_logits = Kept()
        self.version += 1
        return kept.next_logits

    def fill(self, node: Node, promised: Kept, value: Any, size_bytes: int) -> None:
        """Fills a promise. The value is kept if the node still has the promise, and then counts towards the budget."""
        promised.fill(value, size_bytes)
        if self._has(node, promised):
            self.used_bytes += size_bytes

    def use(self, path: Sequence[Node]) -> None:
        """A request used or made the scores of these nodes, front first. Deeper nodes will be evicted first."""
        for node in reversed(path):
            if node in self._kept:
                self._kept.move_to_end(node)

    def trim(self) -> None:
        """Evicts what exceeds the budget."""
        while self.used_bytes > self.budget_bytes:
            self.drop(next(iter(self._kept)))
            if self.stats is not None:
                self.stats.scores_evictions += 1

    def withdraw(self, node: Node, promised: Kept) -> None:
        """Drops a promise that will not be filled."""
        if self._has(node, promised) and not promised.is_filled:
            self.drop(node)

    def drop(self, node: Node) -> None:
        """Drops what is kept beside the node."""
        kept = self._kept.pop(node, None)
        if kept is not None:
            self._subtract(kept.block)
            self._subtract(kept.next_logits)
            self.version += 1

    def drop_next_logits(self, node: Node) -> None:
        """Drops the node's next logits: no tier has a state there any more."""
        kept = self._kept.get(node)
        if kept is not None and kept.next_logits is not None:
            self._subtract(kept.next_logits)
            kept.next_logits = None
            self.version += 1
            if kept.block is None:
                del self._kept[node]

    def clear(self) -> None:
        """Drops everything."""
        self._kept.clear()
        self.used_bytes = 0
        self.version += 1

    def check(self, nodes: set[Node]) -> None:
        """Checks that scores belong to these nodes and that bytes add up, within the budget.

        Raises:
            CacheCorruptionError: One of these does not hold.
        """
        sizes = 0
        for node, kept in self._kept.items():
            if node not in nodes:
                raise CacheCorruptionError(f"{node} has scores and is not in the tree")
            if kept.block is None and kept.next_logits is None:
                raise CacheCorruptionError(f"{node} has empty scores")
            sizes += sum(item.size_bytes for item in (kept.block, kept.next_logits) if item is not None)
        if sizes != self.used_bytes or self.used_bytes > self.budget_bytes:
            raise CacheCorruptionError(
                f"scores of {sizes} bytes, counted as {self.used_bytes}, budget {self.budget_bytes}"
            )

    def _has(self, node: Node, promised: Kept) -> bool:
        kept = self._kept.get(node)
        return kept is not None and (kept.block is promised or kept.next_logits is promised)

    def _subtract(self, item: Kept | None) -> None:
        if item is not None:
            self.used_bytes -= item.size_bytes
