"""megatron-core 0.19's own rules for KV blocks and recurrent states, for requests that run one after another.

It decides what megatron's classes decide (`DynamicInferenceContext`, `KVBlockAllocator`, `MambaSlotAllocator`, with the
LRU policy), without tensors and in O(log n) per step. `tests/lab/test_replay_upstream.py` compares both, request by
request.

- A prompt resumes from the deepest state within its KV match. If fewer than two tokens would be left to compute, it
  moves back one block, whether there is a state or not. (Without one, upstream computes from a zero state. It counts
  the skipped tokens even so.)
- States are kept at up to three places that a prompt computes: the end of its KV match, its last full block, and the
  block before its last one.
- KV blocks and states are evicted by the time at which a request last matched or made the block. At the same time, the
  lower block id goes first. KV blocks are evicted from the leaves of the prefix tree inward.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Any

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.lab.traces import TraceRequest


class _Block:
    """A KV block with a key."""

    __slots__ = ("block_id", "children", "has_state", "key", "parent", "touched")

    def __init__(self, key: bytes, parent: _Block | None, block_id: int) -> None:
        self.key = key
        self.parent = parent
        self.block_id = block_id
        self.touched = 0
        self.children = 0
        self.has_state = False


class UpstreamRule:
    """Upstream's cache, without tensors.

    Args:
        block_tokens: Tokens per block.
        kv_blocks: KV blocks, without the dummy block.
        state_slots: States that can be kept. (Upstream's scratch takes more slots from the same budget.)
    """

    def __init__(self, *, block_tokens: int, kv_blocks: int, state_slots: int) -> None:
        self.block_tokens = block_tokens
        self.state_slots = state_slots
        # Ids in upstream's order, because they break ties in the order of eviction.
        self._free_ids = list(range(kv_blocks))
        self._blocks: dict[bytes, _Block] = {}
        self._states = 0
        # Entries (touched, id, block). Valid while the block is a leaf (has a state) and was not touched again.
        self._leaves: list[tuple[int, int, _Block]] = []
        self._with_state: list[tuple[int, int, _Block]] = []
        self._clock = 0
        self._counters = {"evictions": 0, "kv_evictions": 0, "checkpoints_published": 0, "would_raise": 0}

    def serve(self, request: TraceRequest) -> int | None:
        """See Server. None: upstream would wait for KV blocks forever."""
        prompt_tokens, keys = request.prompt_tokens, request.keys
        path = self._match(keys)
        all_blocks = ceil_div(prompt_tokens, self.block_tokens)
        needed = all_blocks - len(path)
        if needed > len(self._free_ids) + len(self._blocks) - len(path):
            return None
        self._clock += 1
        skip_tokens = self._skip_tokens(path, prompt_tokens)
        kv_match_blocks = len(path)
        for block in path:
            self._touch(block)
        taken = self._take(needed)
        for key, block_id in zip(keys[len(path) :], taken, strict=False):
            block = self._blocks[key] = _Block(key, path[-1] if path else None, block_id)
            if block.parent is not None:
                block.parent.children += 1
            self._touch(block)
            path.append(block)
        self._keep_states(path, prompt_tokens, skip_tokens, kv_match_blocks, all_blocks)
        self._free_ids += taken[len(taken) - (all_blocks - len(path)) :]  # the last block, if it is not full
        if path and not path[-1].children:
            heappush(self._leaves, (self._clock, path[-1].block_id, path[-1]))
        return skip_tokens

    def counters(self) -> Mapping[str, Any]:
        """See Server. ``would_raise``: times that no state could be evicted, where upstream raises an error."""
        return self._counters | {"slots_total": self.state_slots, "slots_used": self._states}

    def _match(self, keys: list[bytes]) -> list[_Block]:
        path: list[_Block] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            path.append(block)
        return path

    def _skip_tokens(self, path: list[_Block], prompt_tokens: int) -> int:
        depths = [depth for depth, block in enumerate(path, 1) if block.has_state]
        if depths and depths[-1] * self.block_tokens >= prompt_tokens:
            depths.pop()
        skip_tokens = depths[-1] * self.block_tokens if depths else 0
        if prompt_tokens >= 2 and prompt_tokens - skip_tokens < 2:
            skip_tokens = (prompt_tokens - 2) // self.block_tokens * self.block_tokens
        return skip_tokens

    def _touch(self, block: _Block) -> None:
        block.touched = self._clock
        if block.has_state:
            heappush(self._with_state, (self._clock, block.block_id, block))

    def _take(self, count: int) -> list[int]:
        """Takes free blocks, if need be by evicting leaves. Only the running request's blocks have the current time."""
        evicted: list[int] = []
        while len(self._free_ids) + len(evicted) < count:
            touched, _, block = heappop(self._leaves)
            if block.touched != touched or block.children or self._blocks.get(block.key) is not block:
                continue
            del self._blocks[block.key]
            evicted.append(block.block_id)
            self._counters["kv_evictions"] += 1
            if block.has_state:
                block.has_state = False
                self._states -= 1
                self._counters["evictions"] += 1
            parent = block.parent
            if parent is not None:
                parent.children -= 1
                if not parent.children and parent.touched != self._clock:
                    heappush(self._leaves, (parent.touched, parent.block_id, parent))
        self._free_ids += evicted
        taken = self._free_ids[len(self._free_ids) - count :]
        del self._free_ids[len(self._free_ids) - count :]
        return taken

    def _keep_states(
        self, path: list[_Block], prompt_tokens: int, skip_tokens: int, kv_match_blocks: int, all_blocks: int
    ) -> None:
        full_blocks = prompt_tokens // self.block_tokens
        depths = {
            depth
            for depth in (kv_match_blocks, full_blocks, all_blocks - 1)
            if skip_tokens < depth * self.block_tokens < prompt_tokens
        }
        if full_blocks and full_blocks * self.block_tokens == prompt_tokens:
            depths.add(full_blocks)
        new = [path[depth - 1] for depth in sorted(depths) if not path[depth - 1].has_state]
        if not self._make_room(len(new)):
            self._counters["would_raise"] += 1
            return
        for block in new:
            block.has_state = True
            heappush(self._with_state, (self._clock, block.block_id, block))
        self._states += len(new)
        self._counters["checkpoints_published"] += len(new)

    def _make_room(self, count: int) -> bool:
        """Evicts states of other requests until ``count`` slots are free."""
        while self._states + count > self.state_slots:
            while self._with_state:
                touched, _, block = self._with_state[0]
                if block.has_state and block.touched == touched:
                    break
                heappop(self._with_state)
            if not self._with_state or self._with_state[0][0] == self._clock:
                return False
            heappop(self._with_state)[2].has_state = False
            self._states -= 1
            self._counters["evictions"] += 1
        return True
