"""The pretend engine of `model.py` with one memory for KV and states.

Block k and slot p overlap as they do in the real memory: a write to one spoils the other. So a block or slot that is given
out while its bytes have another owner, or a copy that comes too late, is found when somebody reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.host_tier import is_probationary
from megatron_hybrid_prefix.index.matcher import Match
from megatron_hybrid_prefix.index.requests import StepPlan
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.slots import SlotState
from tests.core.model import GARBAGE, Content, ModelEngine, Request, Salt

Planned = list[tuple[int, CheckpointReason]]


class SharedModelEngine(ModelEngine):
    """See above. Does not predict which entry is evicted: only what must hold of any choice."""

    def __init__(self, cache: HybridPrefixCache) -> None:
        assert cache.layout is not None
        super().__init__(cache, cache.layout.total_blocks)
        self.page_blocks, self.pages = cache.layout.page_blocks, cache.layout.pages
        self.first_slot = cache._store.slots.first_slot  # that of page 0
        self.computed: set[Content] = set()  # all that was ever matchable
        self.decoded: list[tuple[int, Content]] = []  # slots and states that wait for their copy
        self.with_old_state: set[int] = set()  # blocks that hold bytes of a state
        self.is_copying = False
        cache.blocks.set_on_move(self.on_move)

    def on_move(self, source: int, target: int) -> None:
        assert source not in self.held_blocks() and target not in self.held_blocks(), "a held block moves"
        self.seen["told of a move"] += 1

    # -- one memory ----------------------------------------------------------------------------------------------------

    def carry_out(self) -> None:
        self.is_copying = True
        super().carry_out()
        self.is_copying = False

    def clear_page(self, page: int) -> None:
        blocks = range(page * self.page_blocks, (page + 1) * self.page_blocks)
        for block_id in blocks:
            self.put_block(block_id, GARBAGE)

    def put_block(self, block_id: int, content: Content) -> None:
        super().put_block(block_id, content)
        # A copy is of a whole block. A forward leaves what is behind its last token.
        assert self.is_copying or block_id not in self.with_old_state, "KV is written beside what a state left"
        self.with_old_state.discard(block_id)
        layout = self.cache.layout
        start = block_id * layout.block_bytes
        for page in range(self.pages):
            at = page * layout.page_bytes
            if at < start + layout.block_bytes and start < at + layout.state_bytes:
                self.slots[self.first_slot + page] = GARBAGE

    def put_state(self, slot: int, content: Content) -> None:
        super().put_state(slot, content)
        layout = self.cache.layout
        start = (slot - self.first_slot) * layout.page_bytes
        for block_id in range(start // layout.block_bytes, -(-(start + layout.state_bytes) // layout.block_bytes)):
            self.blocks[block_id] = GARBAGE
            self.with_old_state.add(block_id)

    def put_live(self, request: Request, content: Content) -> None:
        super().put_live(request, content)
        self.carry_out()
        self.put_state(request.admission.live_slot, content)

    def check_live(self, request: Request, content: Content) -> None:
        super().check_live(request, content)
        assert self.slots[request.admission.live_slot] == content, "the live state was overwritten"

    def on_device(self) -> tuple[set[Content], set[Content]]:
        self.carry_out()
        return super().on_device()

    # -- room ----------------------------------------------------------------------------------------------------------

    def stuck(self) -> set[int]:
        """Slots that cannot be evicted."""
        slots = self.cache._store.slots
        fixed = (SlotState.RESERVED, SlotState.LIVE, SlotState.RETIRED)
        ids = range(self.first_slot, self.first_slot + self.pages)
        return {slot for slot in ids if slots.state(slot) in fixed or slots.pins(slot)}

    def has_room(self, own: int, shared: Sequence[int], source_slot: int | None) -> bool:
        """Counts pages one by one: a page of a stuck state is lost, and one page without held blocks is needed."""
        held = self.held_blocks() | set(shared)
        stuck = self.stuck() | ({source_slot} - {None})
        whole = [page for page in range(self.pages) if self.first_slot + page not in stuck]
        empty = [
            page for page in whole if not held & set(range(page * self.page_blocks, (page + 1) * self.page_blocks))
        ]
        left = self.kv_blocks - len(held) - (len(stuck) + 1) * self.page_blocks
        return bool(empty) and own <= left

    def has_blocks(self) -> bool:
        return len(self.held_blocks()) + len(self.stuck()) * self.page_blocks < self.kv_blocks

    # -- what is kept --------------------------------------------------------------------------------------------------

    def seen_before(self, salt: Salt, tokens: list[int], match: Match) -> int:
        if match.seen_blocks:
            assert self.now(salt, tokens[: match.seen_blocks * self.block_tokens]) in self.computed
            assert match.seen_blocks >= match.kv_depth_blocks
            self.seen["ghosts"] += match.seen_blocks > match.kv_depth_blocks
        return match.seen_blocks

    def forget_lost(self) -> None:
        self.order = []

    def use(self, slot: int, what: str = "used") -> None:
        pass

    def oracle_plan(self, request: Request, start: int, end: int) -> tuple[Planned, int]:
        return [], 0

    def plan(self, request: Request, tokens: int) -> StepPlan | None:
        """Checks which boundaries get a slot: all of them, in the order of their reasons, until there is no slot."""
        start = request.planned_tokens
        end = min(start + tokens, request.prompt_tokens)
        if not self.grow(request, end):
            return None
        live = self.live(request)
        before = {node.slot: is_probationary(node) for node in self.cache.inspect.nodes_with_state()}
        pinned = {slot for slot in before if self.cache.inspect.slot_readers(slot)}
        asked = {position: reason for position, reason in live.boundaries if start < position <= end and live.write}
        plan = self.cache.plan(request.request_id, start, end)
        planned = {checkpoint.position_tokens: checkpoint.reason for checkpoint in plan.checkpoints}
        assert list(planned) == sorted(planned) and planned.items() <= asked.items()
        assert pinned <= self.kept_slots(), "a pinned state was evicted"
        if set(planned.values()) <= {CheckpointReason.INTERVAL}:
            # Nobody asked for a slot, so only guesses may go.
            assert all(before[slot] for slot in set(before) - self.kept_slots())
        others = [p for other in self.requests for p in other.plans]
        written = [checkpoint.slot for p in [*others, plan] for checkpoint in p.checkpoints]
        written += [live_slot for r in self.requests if (live_slot := r.admission.live_slot) is not None]
        assert len(set(written)) == len(written), "two forwards write one slot"
        if not request.plans:
            self.check_reads(request, plan)
        request.plans.append(plan)
        return plan

    def checkpoint_decoded(self, request: Request) -> bool:
        """Keeps the state that the request reached, if it is at a block boundary. Others may come before the copies."""
        position = len(request.history)
        if position % self.block_tokens or position >= len(request.tokens) + 1 or not request.history:
            return False
        slot = self.cache.checkpoint_decoded(request.request_id, position)
        if slot is None:
            return False
        self.decoded.append((slot, (request.salt, request.history)))
        self.seen["decoded states"] += 1
        return True

    def copy_decoded(self) -> None:
        """Copies these states to their slots, after the cache's own copies."""
        self.carry_out()
        for slot, content in self.decoded:
            self.put_state(slot, content)
        self.decoded.clear()

    def reset(self) -> None:
        super().reset()
        self.decoded.clear()

    def settle(self, plan: StepPlan, request: Request, *, succeeds: bool) -> None:
        super().settle(plan, request, succeeds=succeeds)
        self.note_computed(request)

    def decode(self, request: Request, tokens: list[int], *, by_id: bool = False, at_once: bool = False) -> bool:
        ran = super().decode(request, tokens, by_id=by_id, at_once=at_once)
        self.note_computed(request)
        return ran

    def note_computed(self, request: Request) -> None:
        ends = range(self.block_tokens, len(request.history) + 1, self.block_tokens)
        self.computed |= {(request.salt, request.history[:end]) for end in ends}

    def check(self) -> None:
        super().check()
        use = self.cache.inspect.memory_use()
        assert use is not None
        in_states = use.state_pages * self.page_blocks
        assert use.free_blocks + use.held_blocks + use.cached_blocks + in_states == use.total_blocks
