"""`ScoreTable`: the log-probs of cached prompts, kept with their blocks and boundaries.

A request that wants the log-probs of its prompt can skip tokens only if their log-probs are kept, too:

- *scores* of a block: the log-prob of each of its tokens, and the most likely tokens at each of these positions;
- the *next logits* of a boundary: the logits after the last token before it. The log-prob of the first token after a boundary
  comes from the token before it, which a hit does not compute, and each prompt may have another token there.

Only requests that want the log-probs of their prompt make scores. They are kept by the key of their block, so they are never
shared between salts, adapters or epochs, and leave when the block leaves the prefix tree (`KeyedValues`). They are values on
the host, opaque here, within a budget of bytes. If that is full, the scores used longest ago go first, deeper blocks before
the blocks above them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.tree import Node
from megatron_hybrid_prefix.requests.book import StepPlan


@dataclass(slots=True, eq=False)
class Kept:
    """Scores of a block, or the next logits of a boundary.

    A step's blocks become matchable before its log-probs are on the host. So a value is first promised, and filled at the end
    of the same step. Who matches it meanwhile reads it at the end of a later step.

    Attributes:
        key: Key of the block.
        position_tokens: End of the block.
        is_logits: Whether it is the next logits at that position; False: the scores of the block.
        top_n: Most likely tokens per position; 0 for a next logits.
        size_bytes: Size of the value; 0 until it is filled.
    """

    key: bytes
    position_tokens: int
    is_logits: bool = False
    top_n: int = 0
    size_bytes: int = 0
    _value: Any = None

    @property
    def is_filled(self) -> bool:
        """Whether the value is there."""
        return self._value is not None

    @property
    def value(self) -> Any:
        """The value. Raises CacheCorruptionError if it was promised and never filled."""
        if self._value is None:
            raise CacheCorruptionError("log-probs of a prompt were promised by a step and never filled")
        return self._value

    def fill(self, value: Any, size_bytes: int) -> None:
        """Sets the value."""
        self._value, self.size_bytes = value, size_bytes


class ScoreTable:
    """Scores by key of their block, least recently used first.

    Args:
        budget_bytes: Bytes of all values. 0: nothing is kept.
        block_tokens: Tokens per KV block.

    Attributes:
        budget_bytes: See above.
        used_bytes: Bytes of the values kept now.
        version: Grows whenever scores are added or dropped.
        evictions: Blocks whose scores were evicted because the budget was full.
    """

    def __init__(self, budget_bytes: int, block_tokens: int) -> None:
        self.budget_bytes = budget_bytes
        self._block_tokens = block_tokens
        self.used_bytes = 0
        self.version = 0
        self.evictions = 0
        self._blocks: OrderedDict[bytes, Kept] = OrderedDict()
        self._next_logits: dict[bytes, Kept] = {}  # of some of these blocks

    # -- read ----------------------------------------------------------------------------------------------------------

    def block(self, key: bytes, top_n: int) -> Kept | None:
        """Scores of the block with at least ``top_n`` most likely tokens per position, or None."""
        block = self._blocks.get(key)
        return None if block is None or block.top_n < top_n else block

    def next_logits(self, key: bytes) -> Kept | None:
        """Next logits of the boundary at the block's end, or None."""
        return self._next_logits.get(key)

    def positions(self, chain: KeyChain, top_n: int) -> tuple[int, ...]:
        """Positions where a request that wants the log-probs of its prompt may resume. Ascending.

        Args:
            chain: Keys of the prompt.
            top_n: Most likely tokens that it wants per position.
        """
        found = []
        for depth, key in enumerate(chain.keys, 1):
            if self.block(key, top_n) is None:
                break
            if self.next_logits(key) is not None:
                found.append(depth * self._block_tokens)
        return tuple(found)

    def take(self, chain: KeyChain, resume_tokens: int, top_n: int) -> tuple[Kept, ...]:
        """A request resumes at one of `positions`: scores of the blocks before it, then the next logits there. Empty at 0."""
        keys = chain.keys[: resume_tokens // self._block_tokens]
        found = [self.block(key, top_n) for key in keys]
        if keys:
            found.append(self.next_logits(keys[-1]))
        assert None not in found, found
        self.use(keys)
        return tuple(item for item in found if item is not None)

    def wanted_logits(
        self, chain: KeyChain, plan: StepPlan, node_of: Callable[[bytes], Node | None], writing: Collection[bytes]
    ) -> list[int]:
        """Boundaries whose next logits a forward should keep, ascending.

        These are the boundaries that have a state, or get one in this step, and no next logits yet.

        Args:
            chain: Keys of the prompt.
            plan: Of the forward.
            node_of: The node with a key, if there is one.
            writing: Keys of the blocks at whose end this step writes a state.
        """
        found = []
        for depth in self._depths(chain, plan):
            key = chain.keys[depth - 1]
            node = node_of(key)
            has_state = node is not None and node.reason is not None
            if (has_state or key in writing) and self.next_logits(key) is None:
                found.append(depth * self._block_tokens)
        return found

    # -- write ---------------------------------------------------------------------------------------------------------

    def promise(
        self,
        chain: KeyChain,
        plan: StepPlan,
        node_of: Callable[[bytes], Node | None],
        *,
        top_n: int,
        captured: Collection[int],
    ) -> list[Kept]:
        """A forward succeeded and was published: promises its scores, and the next logits at ``captured``.

        Not what is kept already, with as many most likely tokens. Pass each of them to `fill` or to `withdraw` before the next
        forward is published.

        Args:
            chain: Keys of the prompt.
            plan: Of the forward.
            node_of: The node with a key, if there is one.
            top_n: Most likely tokens per position.
            captured: Positions of `wanted_logits` whose logits the caller has.
        """
        promises: list[Kept] = []
        for depth in self._depths(chain, plan) if self.budget_bytes else ():
            key, position = chain.keys[depth - 1], depth * self._block_tokens
            if node_of(key) is None:
                break  # not published, or evicted: nothing after it can be reached
            if self.block(key, top_n) is None:
                self._subtract(self._blocks.get(key))
                self._blocks[key] = Kept(key, position, top_n=top_n)
                promises.append(self._blocks[key])
            if position in captured and key not in self._next_logits:
                self._next_logits[key] = Kept(key, position, is_logits=True)
                promises.append(self._next_logits[key])
        self.version += bool(promises)
        return promises

    def fill(self, chain: KeyChain, values: Sequence[tuple[Kept, Any, int]]) -> None:
        """Fills promises of one request. Values whose promise is still kept count towards the budget.

        Args:
            chain: Keys of its prompt.
            values: Each with its value and the size of that in bytes.
        """
        for promise, value, size_bytes in values:
            promise.fill(value, size_bytes)
            if self._has(promise):
                self.used_bytes += size_bytes
        deepest = max((promise.position_tokens for promise, _, _ in values), default=0)
        self.use(chain.keys[: deepest // self._block_tokens])
        while self.used_bytes > self.budget_bytes:
            self.drop(next(iter(self._blocks)))
            self.evictions += 1

    def use(self, keys: Sequence[bytes]) -> None:
        """A request used or made the scores of these blocks, front first. Deeper blocks will be evicted first."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def withdraw(self, promises: Iterable[Kept]) -> None:
        """Drops promises that will not be filled."""
        for promise in promises:
            if self._has(promise) and not promise.is_filled:
                self.drop(promise.key)

    def drop(self, key: bytes) -> None:
        """Drops the log-probs of the block."""
        if key in self._blocks:
            self._subtract(self._blocks.pop(key))
            self._subtract(self._next_logits.pop(key, None))
            self.version += 1

    def drop_state(self, key: bytes) -> None:
        """Drops the block's next logits: no tier has a state there any more."""
        if key in self._next_logits:
            self._subtract(self._next_logits.pop(key))
            self.version += 1

    def clear(self) -> None:
        """Drops everything."""
        self._blocks.clear()
        self._next_logits.clear()
        self.used_bytes = 0
        self.version += 1

    def check(self, keys: Collection[bytes]) -> None:
        """Checks that scores belong to blocks with these keys and that bytes add up, within the budget.

        Raises:
            CacheCorruptionError: One of these does not hold.
        """
        for key in self._blocks:
            if key not in keys:
                raise CacheCorruptionError(f"block {key.hex()[:8]} has scores and is not in the tree")
        if not self._next_logits.keys() <= self._blocks.keys():
            raise CacheCorruptionError("next logits are kept without the scores of their block")
        sizes = sum(item.size_bytes for item in (*self._blocks.values(), *self._next_logits.values()))
        if sizes != self.used_bytes or self.used_bytes > self.budget_bytes:
            raise CacheCorruptionError(
                f"scores of {sizes} bytes, counted as {self.used_bytes}, budget {self.budget_bytes}"
            )

    def _depths(self, chain: KeyChain, plan: StepPlan) -> range:
        """Blocks, by their depth, whose end the forward reaches."""
        last = min(plan.end_tokens // self._block_tokens, len(chain.keys))
        return range(plan.start_tokens // self._block_tokens + 1, last + 1)

    def _has(self, promise: Kept) -> bool:
        return promise in (self._blocks.get(promise.key), self._next_logits.get(promise.key))

    def _subtract(self, item: Kept | None) -> None:
        if item is not None:
            self.used_bytes -= item.size_bytes
