"""A pretend engine around the cache. It remembers what was last written to every block and slot.

Contents are exact: the salt, and for every token so far its id and its weights epoch. So if anything goes wrong (a
block given to two requests, a state of another depth, stale data, data of other weights), a request reads something
else than its own history, and an assertion fails.

A page of the memory holds states or KV: a write to one spoils the other. So a block or slot that is given out while its
bytes have another owner, or a copy that comes too late, is found when somebody reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.hints import NO_HINTS
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node
from megatron_hybrid_prefix.metrics import NotReused
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.needs import is_guess
from megatron_hybrid_prefix.pool.slots import NO_SLOT, SlotState
from megatron_hybrid_prefix.requests.book import Admission, LiveRequest, Load, StepPlan
from megatron_hybrid_prefix.requests.matcher import Match, Reuse
from megatron_hybrid_prefix.tiers.base import Entry
from megatron_hybrid_prefix.tiers.behind import TierBehind
from megatron_hybrid_prefix.tiers.settings import TierSettings
from megatron_hybrid_prefix.tiers.units import (
    DEVICE,
    SHARED,
    BlockMove,
    BlockTransfer,
    EntryKind,
    LoadOver,
    LoadState,
    PageClear,
    StateMove,
    Tag,
)
from tests.core.naive_memory import NaiveMemory
from tests.harness.cached import on_device
from tests.harness.plugins.dictionary_tier import DictionaryTier

Salt = tuple[str | None, str | None]  # cache_salt, adapter
History = tuple[tuple[int, int], ...]  # (token, weights epoch it was computed under), from position 0
Content = tuple[Salt, History]
GARBAGE: Content = ((None, None), ((-1, -1),))
WRONG: Content = ((None, None), ((-2, -2),))
NAMESPACE = bytes(16)
LIVE_SLOTS = 10_000  # ids of the pretend live slots of preempted requests begin here


COUNTED = (
    *("prompt_tokens", "computed_prompt_tokens", "recomputed_tokens", "resumed_tokens"),
    *("reused_tokens", "reused_tokens_device", "reused_tokens_host"),
)


def tier_behind(most: str = "") -> TierBehind:
    """A dictionary behind the host that keeps so many entries at most; "": without a limit."""
    behind = TierBehind(DictionaryTier(TierSettings(path=most, min_tokens=0)))
    behind.name_entries(lambda: NAMESPACE)
    return behind


def put_behind(behind: TierBehind, chain: KeyChain, block_tokens: int = 4) -> list[Tag]:
    """The tier gets the KV of a prompt and the state at its end. Returns the entries' tags."""
    depths = [(EntryKind.KV, n) for n in range(1, len(chain.keys) + 1)]
    tags = [
        Tag(kind=kind, key=chain.keys[n - 1], depth_tokens=n * block_tokens, epoch=0)
        for kind, n in [*depths, (EntryKind.STATE, len(chain.keys))]
    ]
    for tag in tags:
        behind.tier.put(NAMESPACE, Entry(tag, memoryview(b""), 0))
    return tags


@dataclass(eq=False)
class Request:
    """What the pretend engine knows of a request."""

    request_id: int
    salt: Salt
    tokens: list[int]
    prompt_tokens: int
    admission: Admission
    write: bool
    read: bool = True
    history: History = ()
    stored: History = ()  # what its blocks hold up to there was cached when it got them; it does not write to them
    live_state: Content | None = None  # its live slot; None before the first forward
    broken: bool = False  # a failed forward left its live state or a later plan unusable
    released: bool = False
    plans: list[StepPlan] = field(default_factory=list)
    counted_tokens: int = 0  # it was preempted: all its tokens were counted before
    is_counted: bool = False  # its first forward was published

    @property
    def kv(self) -> History:
        """What its blocks should hold: what it shares, then what it wrote."""
        return self.stored + self.history[len(self.stored) :]

    @property
    def planned_tokens(self) -> int:
        return self.plans[-1].end_tokens if self.plans else len(self.history)


def expected_boundaries(
    prompt_tokens: int,
    *,
    block_tokens: int,
    resume_tokens: int,
    kv_depth_blocks: int,
    min_computed_tokens: int,
    interval_tokens: int | None,
    breakpoints: Sequence[int],
) -> list[tuple[int, CheckpointReason]]:
    """For each position of a prompt, the first reason to keep a state there. ``interval_tokens``: None is the default, 0 none."""
    guesses = set(range(0, prompt_tokens + 1, interval_tokens)) if interval_tokens else set()
    if interval_tokens is None:
        even = next(tokens for tokens in count(block_tokens, block_tokens) if 16 * tokens >= prompt_tokens)
        near = [n * 2**doubled for n in (2, 3) for doubled in range(20)]
        near_end = {(prompt_tokens // block_tokens - n) * block_tokens for n in (1, *near)}
        guesses = {*range(0, prompt_tokens + 1, even), *near_end}
    last = range(0, prompt_tokens + 1, block_tokens)
    replay = [position for position in last if position <= prompt_tokens - min_computed_tokens]
    found = []
    for position in last:
        reasons = {
            CheckpointReason.JUNCTION: position == kv_depth_blocks * block_tokens,
            CheckpointReason.BREAKPOINT: any(position <= named < position + block_tokens for named in breakpoints),
            CheckpointReason.TAIL: position == last[-1],
            CheckpointReason.REPEAT: [position] == replay[-1:],
            CheckpointReason.INTERVAL: position in guesses,
        }
        if position > resume_tokens and any(reasons.values()):
            found.append((position, min(reason for reason, holds in reasons.items() if holds)))
    return found


class ModelEngine:
    """Runs requests on the facade, writes pretend contents, and checks everything that is read."""

    def __init__(self, cache: HybridPrefixCache) -> None:
        self.cache = cache
        sizes = cache.settings
        self.kv_blocks, self.first_slot, self.block_tokens = sizes.kv_blocks, sizes.first_state_slot, sizes.block_tokens
        self.page_blocks, self.page_sizes = sizes.page_blocks, cache._device.pages.page_sizes
        self.pages = sizes.kv_blocks // sizes.page_blocks
        self.computed: set[Content] = set()  # all that was ever matchable
        self.begun: dict[Any, Any] = {}  # last salt by the first block; last epoch by salt and first block
        self.decoded: dict[int, Content] = {}  # states that wait for their copy, by slot
        self.with_old_state: set[int] = set()  # blocks that hold bytes of a state
        self.is_copying = False
        self.move, cache._device.blocks.move = cache._device.blocks.move, self.on_moves
        self.blocks: dict[int, Content] = {}
        self.slots: dict[int, Content] = {}
        self.host: dict[tuple[int, ...], Content] = {}  # by pages
        self.behind: Any = getattr(cache._device.host.behind, "tier", None)
        self.written: list[Content] = []  # what went to the tier behind the host; its bytes are the number
        self.bad_loads: set[Load] = set()  # loads that brought garbage
        self.requests: list[Request] = []  # live ones, and released ones with a plan in flight
        self.stale_plans: list[StepPlan] = []
        self.seen: Counter[str] = Counter()
        self.memory = NaiveMemory(cache, self.seen)
        self.expected: dict[bytes, Content] = {}  # what the keys of entries on the host name
        self.next_id = 0
        self.hints = NO_HINTS  # of the next requests
        self.publishes_early = False  # whether forwards are published once they are launched
        self.counted = dict.fromkeys(COUNTED, 0)
        self.owner: dict[int, Any] = {}  # who wrote to each page last: KV (None), or states of a size

    # -- what should be there ------------------------------------------------------------------------------------------

    def now(self, salt: Salt, tokens: list[int]) -> Content:
        return salt, tuple((token, self.cache.epoch) for token in tokens)

    def held_blocks(self) -> set[int]:
        return {block_id for request in self.requests for block_id in self.table(request)}

    def carry_out(self) -> None:
        """Carries out the queued copies, as late as allowed: just before anything else is written."""
        self.is_copying = True
        self.carry_out_units(self.cache.take_copies())
        self.is_copying = False

    def carry_out_units(self, units: list[Any]) -> None:
        for unit in units:
            if isinstance(unit, BlockMove):
                self.seen["moved"] += 1
                self.put_block(unit.target_block, self.blocks[unit.source_block])
                continue
            if isinstance(unit, StateMove):
                self.seen["states moved"] += 1
                self.put_state(unit.target_slot, self.slots[unit.source_slot])
                continue
            if isinstance(unit, PageClear):
                self.seen["cleared"] += 1
                for block_id in self.blocks_of(unit.page):
                    self.put_block(block_id, GARBAGE)
                continue
            if isinstance(unit, LoadOver):
                continue
            device = self.blocks if unit.tag.kind == EntryKind.KV else self.slots
            if unit.source == DEVICE:
                self.seen["stored"] += 1
                self.host[unit.pages] = self.expected[unit.tag.key] = device[unit.device_id]
            elif unit.target == SHARED:
                self.seen["taken behind"] += 1
                self.written.append(self.host[unit.pages])
                number = len(self.written) - 1
                self.behind.put(NAMESPACE, Entry(unit.tag, memoryview(number.to_bytes(8)), number))
            elif unit.source == SHARED:
                buffer = bytearray(8)
                checksum = self.behind.get(NAMESPACE, unit.tag, [memoryview(buffer)])
                number = int.from_bytes(buffer)
                self.host[unit.pages] = self.written[number] if number == checksum else GARBAGE
                self.seen["given back" if number == checksum else "not given back"] += 1
            else:
                self.seen["loaded"] += 1
                load = next((load for load in self.cache._requests.loads() if load.load_id == unit.load_id), None)
                if load is not None and load.state is LoadState.FETCHING:
                    self.cache.loads.end_fetch(load, LoadState.COPYING)
                put = self.put_block if unit.tag.kind == EntryKind.KV else self.put_state
                put(unit.device_id, self.host[unit.pages])
                if self.host[unit.pages] == GARBAGE and load is not None:
                    self.bad_loads.add(load)

    def on_moves(self, moves: list[tuple[int, int]]) -> None:
        assert self.held_blocks().isdisjoint(chain(*moves)), "a held block moves"
        self.seen["told of a move"] += len(moves)
        self.move(moves)

    def blocks_of(self, page: int) -> range:
        return range(page * self.page_blocks, (page + 1) * self.page_blocks)

    def put_block(self, block_id: int, content: Content) -> None:
        # A copy is of a whole block. A forward leaves what is behind its last token.
        assert self.is_copying or block_id not in self.with_old_state, "KV is written beside what a state left"
        self.with_old_state.discard(block_id)
        self.blocks[block_id] = content
        if content != GARBAGE:
            self.note_owner(block_id // self.page_blocks, None)
        self.slots.update(dict.fromkeys(self.memory.slots_of(block_id // self.page_blocks), GARBAGE))

    def put_state(self, slot: int, content: Content) -> None:
        self.slots[slot] = content
        if slot < LIVE_SLOTS:
            page = self.memory.page_of(slot)
            blocks, size = self.blocks_of(page), self.memory.size_of(slot)
            self.note_owner(page, size)
            self.slots |= {each: GARBAGE for each in self.memory.slots_of(page) if self.memory.size_of(each) != size}
            self.blocks.update(dict.fromkeys(blocks, GARBAGE))
            self.with_old_state.update(blocks)

    def note_owner(self, page: int, owner: int | None) -> None:
        self.seen["pages that changed their owner"] += self.owner.setdefault(page, owner) != owner
        self.owner[page] = owner

    def put_live(self, request: Request, content: Content) -> None:
        request.live_state = content
        if request.admission.live_slot is not None:
            self.carry_out()
            self.put_state(request.admission.live_slot, content)

    def check_live(self, request: Request, content: Content) -> None:
        assert request.live_state == content
        live_slot = request.admission.live_slot
        assert live_slot is None or self.slots[live_slot] == content, "the live state was overwritten"

    # -- room ----------------------------------------------------------------------------------------------------------

    def has_room(
        self, own: int, shared: Sequence[int] = (), source_slot: int | None = None, *, slots: int | None = None
    ) -> bool:
        """Counts pages one by one: one with a stuck slot is lost, and one without held blocks is needed for a slot."""
        held = self.held_blocks() | set(shared)
        stuck = self.memory.stuck_pages()
        if source_slot is not None:
            stuck.add(self.memory.page_of(source_slot))
        left = self.kv_blocks - len(held) - len(stuck) * self.page_blocks
        slots = int(self.cache.settings.live_states) if slots is None else slots
        empty = [page for page in range(self.pages) if page not in stuck and held.isdisjoint(self.blocks_of(page))]
        return len(empty) >= slots and own <= left - self.page_blocks * slots

    def table(self, request: Request) -> tuple[int, ...]:
        return tuple(self.live(request).block_ids)

    def oracle_match(self, salt: Salt, tokens: list[int], limit_tokens: int) -> tuple[int, int]:
        """(KV depth on any tier, resume depth on the device), in blocks. Compares contents instead of keys."""
        cached, states = self.kept()
        _, depth = self.deepest(salt, tokens, limit_tokens, cached, states)
        kv_depth, _ = self.deepest(salt, tokens, limit_tokens, self.kept(below=True)[0], states)
        return kv_depth, depth

    def seen_before(self, salt: Salt, tokens: list[int], match: Match) -> int:
        """Depth in blocks that the cache remembers without KV."""
        if match.seen_blocks:
            assert self.now(salt, tokens[: match.seen_blocks * self.block_tokens]) in self.computed
            assert match.seen_blocks >= match.kv_depth_blocks
            self.seen["ghosts"] += match.seen_blocks > match.kv_depth_blocks
        return match.seen_blocks

    def device_depth(self, salt: Salt, tokens: list[int]) -> int:
        """Number of leading blocks whose KV is on the device."""
        return self.deepest(salt, tokens, len(tokens), *self.kept())[0]

    def oracle_loadable(self, salt: Salt, tokens: list[int], limit_tokens: int) -> int:
        """Depth in blocks at which the request could resume with the host's help."""
        return self.deepest(salt, tokens, limit_tokens, *self.kept(below=True))[1]

    def kept(self, *, below: bool = False) -> tuple[set[Content], set[Content]]:
        """KV and states on the device; and with ``below`` what entries below it should hold, by their tags."""
        self.carry_out()  # blocks may have moved
        nodes = list(self.cache.nodes())
        cached = {self.blocks[node.block_id] for node in nodes if node.block_id != NO_BLOCK}
        states = {self.slots[node.slot] for node in nodes if node.slot != NO_SLOT}
        if below:
            cached |= {self.expected[node.key] for node in self.cache._device.host.kv}
            states |= {self.expected[node.key] for node in self.cache._device.host.of_states}
            for _, kind, key in () if self.behind is None else self.behind.entries:
                (cached if kind == EntryKind.KV else states).add(self.expected[key])
        return cached, states

    def deepest(
        self, salt: Salt, tokens: list[int], limit_tokens: int, cached: set[Content], states: set[Content]
    ) -> tuple[int, int]:
        kv_depth = 0
        while (kv_depth + 1) * self.block_tokens <= len(tokens):
            if self.now(salt, tokens[: (kv_depth + 1) * self.block_tokens]) not in cached:
                break
            kv_depth += 1
        for depth in range(min(kv_depth, max(0, limit_tokens) // self.block_tokens), 0, -1):
            if self.now(salt, tokens[: depth * self.block_tokens]) in states:
                return kv_depth, depth
        return kv_depth, 0

    def expected_reuse(self, salt: Salt, tokens: list[int], match: Match, *, read: bool) -> Reuse:
        """By the starts of what was published, and by what `oracle_match` has checked."""
        sizes, size = self.cache.settings, self.block_tokens
        most, resume = max(0, len(tokens) - sizes.min_computed_tokens) // size, match.resume_tokens // size
        kv, seen = (
            min(depth, most) for depth in (match.kv_depth_blocks, max(match.kv_depth_blocks, match.seen_blocks))
        )
        start = tuple(tokens[:size])

        def first_key(salt: str | None, adapter: str | None) -> bytes:
            return self.cache.chain(start, salt=salt, adapter=adapter, remember=False).keys[0]

        last_salt, last = self.begun.get(start), self.begun.get((salt, start))
        reasons = {
            None: 0 < resume == seen,
            NotReused.BELOW_ONE_BLOCK: not most,
            NotReused.NOT_READ: not read,
            NotReused.MEMORY: kv > resume and (match.loadable_blocks > resume or sizes.state_slots == 0),
            NotReused.STATES_GONE: kv > resume,
            NotReused.KV_GONE: seen or last == self.cache.epoch,
            NotReused.EPOCH: last is not None,
            NotReused.OTHER_SALT: last_salt and self.cache.node(first_key(*last_salt)),
            NotReused.NO_SUCH_PREFIX: True,
        }
        reason = next(reason for reason, holds in reasons.items() if holds)
        self.seen[f"reason {reason}"] += 1
        depths = (seen, kv, max(resume, match.loadable_blocks), resume)
        return Reuse(reason, *(depth * size for depth in depths))

    # -- what is kept, and what goes -----------------------------------------------------------------------------------

    def live(self, request: Request) -> LiveRequest:
        if not request.released:
            return self.cache._requests.live[request.request_id]
        return next(live for live in self.cache._requests.ending if request.plans[0] in live.plans)

    # -- the way of a prompt -------------------------------------------------------------------------------------------

    def admit(
        self,
        tokens: list[int],
        salt: Salt = (None, None),
        *,
        read: bool = True,
        write: bool = True,
        max_resume_tokens: int | None = None,
        first_chunk: int | None = None,
        breakpoints: Sequence[int] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> Request | None:
        """Matches and admits. Calls ``meanwhile`` between the two."""
        if self.behind is not None:
            self.carry_out()  # what it holds changes with the moves, which the cache does not see
        chain = self.cache.chain(tokens, salt=salt[0], adapter=salt[1])
        version = self.cache._device.tree.version
        match = self.cache.match(chain, read=read, max_resume_tokens=max_resume_tokens)
        assert self.cache._device.tree.version == version, "matching changed something"
        limit = len(tokens) - self.cache.settings.min_computed_tokens
        limit = limit if max_resume_tokens is None else min(limit, max_resume_tokens)
        kv_depth, depth = self.oracle_match(salt, tokens, limit) if read else (0, 0)
        assert (match.kv_depth_blocks, match.resume_tokens) == (kv_depth, depth * self.block_tokens)
        assert match.reuse == self.expected_reuse(salt, tokens, match, read=read)
        for index, block_id in enumerate(match.block_ids):
            assert self.blocks[block_id] == self.now(salt, tokens[: (index + 1) * self.block_tokens])
        if depth:
            assert match.source_slot is not None
            assert self.slots[match.source_slot] == self.now(salt, tokens[: depth * self.block_tokens])

        old_match = match
        if meanwhile is not None:
            meanwhile()
            kv_depth, depth = self.oracle_match(salt, tokens, limit) if read else (0, 0)
            match = self.cache.match(chain, read=read, max_resume_tokens=max_resume_tokens)
        length = len(tokens) if first_chunk is None else min(len(tokens), first_chunk)
        own = max(0, -(-length // self.block_tokens) - depth)
        cached = self.device_depth(salt, tokens) if read else 0
        shared = [on_device(self.cache, key) for key in chain.keys[: min(cached, depth + own)]]
        shared = shared if len(shared) > depth else list(match.block_ids)
        if not self.has_room(depth + own - len(shared), shared, match.source_slot):
            shared = list(match.block_ids)
        own = max(0, depth + own - len(shared))
        held = self.held_blocks()
        room = self.has_room(own, shared, match.source_slot)
        assert self.cache.can_admit(old_match, length_tokens=first_chunk and length) == room
        request_id, self.next_id = self.next_id, self.next_id + 1
        before = (self.cache.blocks.available_count, self.cache.stats())
        self.memory.used.clear()
        was_guess = match.source_slot is not None and is_guess(self.on_slots()[match.source_slot])
        admission = self.cache.admit(
            request_id,
            old_match,
            length_tokens=first_chunk and length,
            write=write,
            breakpoints=breakpoints,
            hints=self.hints,
        )
        assert (admission is not None) == room
        if admission is None:
            assert (self.cache.blocks.available_count, self.cache.stats()) == before, (
                "a refused admission left something"
            )
            return None
        assert list(admission.block_ids[: admission.shared_blocks]) == shared
        assert admission.stored_tokens == len(shared) * self.block_tokens
        self.seen["shared beyond"] += len(shared) > depth
        assert (admission.resume_tokens, admission.source_slot) == (depth * self.block_tokens, match.source_slot)
        used = [node.depth_blocks for node in self.memory.used]
        assert used == [depth] * (depth > 0 and not was_guess), "who is used is not counted"
        self.seen["guess used"] += was_guess
        if write and before[1].slots_total:
            seen = max(kv_depth, self.seen_before(salt, tokens, match))
            expected = expected_boundaries(
                len(tokens),
                block_tokens=self.block_tokens,
                resume_tokens=admission.resume_tokens,
                kv_depth_blocks=seen,
                min_computed_tokens=self.cache.settings.min_computed_tokens,
                interval_tokens=self.cache.settings.retention_interval_tokens,
                breakpoints=breakpoints,
            )
            assert list(admission.boundaries) == expected
        own_ids = admission.block_ids[admission.shared_blocks :]
        assert len(own_ids) == own and not set(own_ids) & (held | set(shared)), "own blocks belong to others"
        return self.started(Request(request_id, salt, list(tokens), len(tokens), admission, write, read))

    def started(self, request: Request) -> Request:
        admission = request.admission
        request.stored = self.now(request.salt, request.tokens[: admission.stored_tokens])[1]
        request.history = self.now(request.salt, request.tokens[: admission.resume_tokens])[1]
        self.requests.append(request)
        return request

    def admit_from_host(
        self,
        tokens: list[int],
        salt: Salt = (None, None),
        *,
        write: bool = True,
        first_chunk: int | None = None,
        preempted: Request | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Request | None:
        """Admits with a load, of a prefix or of a swapped-out request. None if there is nothing to load."""
        cache, block = self.cache, self.block_tokens
        request_id, self.next_id = self.next_id, self.next_id + 1
        if preempted is not None:
            request_id = preempted.request_id
        if self.behind is not None:
            self.carry_out()
        match = cache.match(cache.chain(tokens, salt=salt[0], adapter=salt[1]))
        depth = self.oracle_loadable(salt, tokens, match.limit_tokens) * block
        assert match.loadable_blocks * block == (depth if depth > match.resume_tokens else 0)
        if swapped := request_id in cache._requests.swapped_out:
            assert preempted is not None
            depth = len(preempted.history)
        source = cache.loads.source(request_id, match)
        if source is not None and meanwhile is not None:
            meanwhile()
            source = cache.loads.source(request_id, cache.match(match.chain))
        if source is None:
            cache.loads.drop_swapped_out(request_id)
            return None
        assert source.depth_tokens == depth or meanwhile is not None
        depth, first_chunk = (
            source.depth_tokens,
            None if first_chunk is None else max(first_chunk, source.depth_tokens + 1),
        )
        length = len(tokens) if first_chunk is None else min(len(tokens), first_chunk)
        needed, loaded, cached = -(-length // block), -(-depth // block), self.device_depth(salt, tokens)
        path = shared = [on_device(cache, key) for key in match.chain.keys[: min(cached, len(source.keys))]]
        if len(shared) == loaded:
            more = [on_device(cache, key) for key in match.chain.keys[: min(cached, needed)]]
            fits = self.has_room(needed - len(more), more, slots=1 + cache.settings.live_states)
            shared = more if fits else shared
        room = self.has_room(needed - len(shared), shared, slots=1 + cache.settings.live_states)
        assert cache.can_admit(match, length_tokens=length, load_of=request_id) == room
        counted_tokens, before = len(tokens) if preempted else 0, self.cache.stats()
        admission = cache.admit(
            request_id,
            match,
            load=True,
            length_tokens=length,
            write=write,
            counted_tokens=counted_tokens,
            hints=self.hints,
        )
        if admission is None:
            self.seen["load refused"] += 1
            assert (request_id in cache._requests.swapped_out) == swapped
            cache.loads.drop_swapped_out(request_id)
            return None
        assert room and request_id not in cache._requests.swapped_out
        if admission.load is None:
            assert self.behind is not None or before.slots_used >= before.slots_total, "a load that fits is not begun"
            self.seen["without its load"] += 1
        else:
            assert (admission.resume_tokens, admission.source_slot) == (depth, admission.load.slot)
            assert admission.block_ids[: len(path)] == tuple(path)
            # Blocks beyond may have gone for the slot.
            assert loaded <= admission.shared_blocks <= max(loaded, len(shared))
            stored_blocks = admission.shared_blocks if len(path) == loaded else len(path)
            assert admission.stored_tokens == max(depth, stored_blocks * block)
            self.seen["shared beyond a load"] += admission.stored_tokens > depth
            self.seen["resumed" if preempted else "admitted from the host"] += 1
        request = Request(request_id, salt, list(tokens), len(tokens), admission, write)
        request.counted_tokens = counted_tokens
        return self.started(request)

    def swap_out(self, request: Request) -> bool:
        """Preempts the request. Returns whether it can continue later."""
        live_slot = request.admission.live_slot
        kept = False
        if not request.plans and not request.broken and request.live_state not in (None, GARBAGE):
            if live_slot is None:
                live_slot = LIVE_SLOTS + request.request_id
                self.slots[live_slot] = request.live_state
            kept = self.cache.loads.swap_out(request.request_id, len(request.history), live_slot)
        self.carry_out()
        self.release(request)
        return kept

    def plan(self, request: Request, tokens: int) -> StepPlan | None:
        """Plans up to ``tokens`` more tokens of the prompt. None if there are too few KV blocks."""
        start = request.planned_tokens
        end = min(start + tokens, request.prompt_tokens)
        if not self.grow(request, end):
            return None
        blocks = self.cache._device.blocks
        guesses = {node for node in self.on_slots().values() if is_guess(node)}
        reached = {position: reason for position, reason in self.live(request).boundaries if start <= position <= end}
        asked = {position: reason for position, reason in reached.items() if position > start}
        keys = {position: self.live(request).chain.keys[position // self.block_tokens - 1] for position in reached}
        before, stats = self.on_slots(), self.cache.stats()
        room = self.free_places()
        there = self.cache._planner.writing | {node.key for node in (*blocks.states, *blocks.guesses)}
        plan = self.cache.plan(request.request_id, start, end)
        planned = [(checkpoint.position_tokens, checkpoint.reason) for checkpoint in plan.checkpoints]
        skipped = self.cache.stats().checkpoints_skipped - stats.checkpoints_skipped
        assert planned == sorted(planned) and dict(planned).items() <= asked.items()
        assert self.live(request).write or not planned
        for_others = skipped + sum(reason != CheckpointReason.INTERVAL for _, reason in planned)
        for_others += sum(node.slot >= 0 and not is_guess(node) for node in guesses)  # asked for now
        lost, own = {node for slot, node in before.items() if node.slot != slot}, set(self.live(request).path)
        assert for_others or not lost & guesses & own, "a guess displaces one of the same request"
        lost -= guesses
        assert for_others or not lost, "a guess displaces what was asked for"
        after = self.on_slots()
        needed = {keys[position] for position, reason in reached.items() if reason != CheckpointReason.INTERVAL}
        gone = {node for slot, node in before.items() if node.slot != slot and node.key in needed}
        may_go = [
            node for slot, node in after.items() if not is_guess(node) and not self.cache._device.slots.pins(slot)
        ]
        assert guesses.isdisjoint(gone) or not may_go, "a guess that is asked for now is an ordinary state"
        left_out = {position for position in asked.keys() - dict(planned) if keys[position] not in there}
        reasons = {reason for _, reason in planned if reason != CheckpointReason.INTERVAL}
        if skipped and reasons:
            assert max(reasons) <= min(asked[position] for position in left_out), "the most important ones go first"
        elif left_out and not skipped and self.live(request).write:
            others = [slot for slot, node in after.items() if is_guess(node) and node not in own]
            assert not self.free_places(), "a guess is left out, though there is room"
            assert all(map(self.cache._device.slots.pins, others)), "a guess is left out, though another could go"
        assert len(asked) > room or before.keys() <= after.keys(), "evicted, though there was room"
        if skipped:
            assert all(map(self.cache._device.slots.pins, after)), "skipped, though a state could go"
            assert not self.free_places() and (self.cache._device.slots.is_full or not self.has_room(0, slots=1))
        assert all(checkpoint.slot >= self.first_slot for checkpoint in plan.checkpoints)
        others = [p for other in self.requests for p in other.plans]
        written = [checkpoint.slot for p in [*others, plan] for checkpoint in p.checkpoints]
        written += [live_slot for r in self.requests if (live_slot := r.admission.live_slot) is not None]
        assert len(set(written)) == len(written), "two forwards write one slot"
        if not request.plans:
            self.check_reads(request, plan)
        request.plans.append(plan)
        return plan

    def on_slots(self) -> dict[int, Node]:
        """The states on the device, by slot."""
        return {node.slot: node for node in self.cache.nodes() if node.slot >= 0}

    def free_places(self) -> int:
        """States that fit without any eviction; 0 or more than 0 is exact."""
        slots, cap = self.cache._device.slots, self.cache.settings.state_slots
        pages, size = self.cache._device.pages, self.page_blocks
        free_ids = set(pages.free_ids())
        last, owners = len(self.page_sizes) - 1, self.memory.owners()
        taken = [
            owners[page] == last or (owners[page] is None and free_ids.issuperset(self.blocks_of(page)))
            for page in range(self.pages)
        ]
        slots_left = [slot for slot in slots.slots_in(SlotState.FREE) if self.memory.size_of(slot) == last]
        free = sum(taken[self.memory.page_of(slot)] for slot in slots_left)
        if not free:
            free = self.page_sizes[last] * (pages.unheld_pages > 0 and pages.free_blocks >= size)
        return free if cap is None else min(free, max(0, cap - slots.cached_slots))

    def grow(self, request: Request, end: int) -> bool:
        """Gets blocks up to position ``end`` of the prompt. False: there are too few."""
        block, held = self.block_tokens, len(self.table(request))
        last = min(-(-end // block), request.prompt_tokens // block, self.device_depth(request.salt, request.tokens))
        # All that it holds is cached, too.
        follows = request.read and self.live(request).write and held * block <= len(request.kv)
        grown = self.cache.grow(request.request_id, end)
        if grown is None:
            return False
        if follows:
            assert len(grown.shared) == max(0, last - held)
        if grown.shared:
            assert request.read
            request.stored = self.now(request.salt, request.tokens[: grown.stored_tokens])[1]
            assert len(request.stored) == (held + len(grown.shared)) * block
            self.seen["shared beyond by a chunk"] += 1
        return True

    def is_bad(self, request: Request) -> bool:
        """Whether garbage was loaded for the request."""
        return self.live(request).load in self.bad_loads

    def settle(self, plan: StepPlan, request: Request, *, succeeds: bool) -> None:
        """Runs the plan's forward, checks its reads again, and publishes or abandons it."""
        succeeds = succeeds and not request.broken
        if not request.broken:
            self.check_reads(request, plan)
        self.carry_out()
        load = self.live(request).load
        writes = self.writes(request, plan, succeeds)
        # What a forward with a load wrote is published once it is over.
        early = self.publishes_early and succeeds and load is None and not request.released
        if early:
            self.publish(plan, request)
        published = self.cache.take_copies(published=True) if self.publishes_early else []
        self.write(request, plan, succeeds, writes)
        self.carry_out_units(published)
        self.seen["stored when written"] += sum(
            isinstance(unit, BlockTransfer) and unit.source == DEVICE for unit in published
        )
        if succeeds and load in self.bad_loads:
            self.cache.fail_load(plan)
            self.seen["load failed"] += 1
            request.broken = True
        elif succeeds and not early:
            self.publish(plan, request)
        elif not succeeds:
            # What a failed forward leaves behind cannot be gone on from, unless it started from a kept state or zero.
            retry = len(request.plans) == 1 and (plan.source_slot is not None or plan.start_tokens == 0)
            request.broken = request.broken or not retry
            self.cache.abandon(plan)
        request.plans.remove(plan)
        if request.released and not request.plans:
            self.requests.remove(request)
        self.note_computed(request)

    def withdraw(self, plan: StepPlan, request: Request, *, published: bool) -> None:
        """The plan's forward writes what is not finite, perhaps after it was published: all of that goes, others keep what is theirs."""
        self.check_reads(request, plan)
        self.carry_out()
        writes, expected = self.writes(request, plan, succeeds=True), dict(self.expected)
        if published:
            self.publish(plan, request)
        self.blocks |= dict.fromkeys([block_id for block_id, _ in writes], WRONG)
        self.slots |= dict.fromkeys([checkpoint.slot for checkpoint in plan.checkpoints], WRONG)
        users = self.cache.withdraw(request.request_id, plan.start_tokens)
        assert users <= {request.request_id}, "nobody was admitted since"
        request.plans.clear()
        self.carry_out()
        self.expected = {
            key: expected[key] if what == WRONG else what
            for key, what in self.expected.items()
            if what != WRONG or key in expected
        }
        self.release(request)
        assert WRONG not in self.written
        for node in self.cache.nodes():
            assert WRONG not in (self.blocks.get(node.block_id), self.slots.get(node.slot)), node
        for entry in self.cache._device.host.entries():
            assert self.host[entry.pages] != WRONG, entry

    def note_computed(self, request: Request) -> None:
        ends = range(self.block_tokens, len(request.history) + 1, self.block_tokens)
        self.computed |= {(request.salt, request.history[:end]) for end in ends}

    def publish(self, plan: StepPlan, request: Request) -> None:
        """Publishes the plan, before or after its forward is over."""
        load = self.live(request).load
        if not request.released or plan.start_tokens < request.prompt_tokens:
            counted = "recomputed_tokens" if request.counted_tokens else "computed_prompt_tokens"
            self.counted[counted] += plan.end_tokens - plan.start_tokens
        if not request.is_counted:
            request.is_counted = True
            reused = ("reused_tokens", "reused_tokens_device" if load is None else "reused_tokens_host")
            for name in ("resumed_tokens",) if request.counted_tokens else reused:
                self.counted[name] += request.admission.resume_tokens
            self.counted["prompt_tokens"] += 0 if request.counted_tokens else request.prompt_tokens
            if self.live(request).write and not request.counted_tokens and request.prompt_tokens >= self.block_tokens:
                start = tuple(request.tokens[: self.block_tokens])
                self.begun |= {start: request.salt, (request.salt, start): self.cache.epoch}
        self.cache.publish(plan)
        states = self.on_slots()
        for checkpoint in plan.checkpoints:
            if checkpoint.slot in states:  # the host may have had it, and not as a guess
                assert is_guess(states[checkpoint.slot]) <= (checkpoint.reason == CheckpointReason.INTERVAL)

    def decode(self, request: Request, tokens: list[int], *, by_id: bool = False, at_once: bool = False) -> bool:
        """Generates ``tokens`` one by one. Returns False if the request was preempted (too few KV blocks)."""
        appended = len(request.tokens)
        if len(request.history) == len(request.tokens):  # the prompt's own forward samples the first
            request.tokens.append(tokens[0])
        for token in tokens[1:]:
            position = len(request.tokens) - 1
            if position >= len(self.table(request)) * self.block_tokens and not self.one_block(request, by_id):
                self.cache.append(request.request_id, request.tokens[appended:])
                self.note_computed(request)
                self.release(request)
                return False
            self.write_block(request, position)
            request.history += ((request.tokens[position], self.cache.epoch),)
            self.put_live(request, (request.salt, request.history))
            request.tokens.append(token)
            if not at_once:
                self.cache.append(request.request_id, request.tokens[appended:])
                appended = len(request.tokens)
        self.cache.append(request.request_id, request.tokens[appended:])
        self.note_computed(request)
        return True

    def checkpoint_decoded(self, request: Request) -> None:
        """Keeps the state that the request reached, if it is at a block boundary. Others may come before the copies."""
        position = len(request.history)
        if position % self.block_tokens or position > len(request.tokens) or not position:
            return
        slot = self.cache.checkpoint_decoded(request.request_id, position)
        if slot is not None:
            self.decoded[slot] = request.salt, request.history
            self.seen["decoded states"] += 1

    def copy_decoded(self) -> None:
        """Copies these states to their slots, after the cache's own copies."""
        self.carry_out()
        for slot, content in self.decoded.items():
            self.put_state(slot, content)
        self.decoded.clear()

    def one_block(self, request: Request, by_id: bool) -> bool:
        if not by_id:
            grown = self.cache.grow(request.request_id, len(request.tokens))
            return grown is not None and not grown.shared
        block_ids = self.cache.blocks.allocate(1)
        if block_ids is None:
            assert not self.has_room(1, slots=0)
            return False
        assert not set(block_ids) & self.held_blocks()
        self.cache.blocks.attach(request.request_id, block_ids)
        return True

    def release(self, request: Request) -> None:
        if not request.plans:
            self.requests.remove(request)
        assert self.cache.release(request.request_id)
        request.released = True
        assert request.request_id not in self.cache.live

    def reset(self) -> None:
        self.stale_plans += [plan for request in self.requests for plan in request.plans]
        self.requests.clear()
        self.decoded.clear()
        self.cache.reset()

    def drain(self) -> None:
        """Ends all requests, and checks that nothing leaked."""
        for request in list(self.requests):
            for plan in list(request.plans):
                self.settle(plan, request, succeeds=True)
            if not request.released:
                self.release(request)
        self.carry_out()
        assert not self.requests and self.cache.blocks.available_count == self.kv_blocks
        self.check()
        self.cache.invalidate()
        assert self.cache.memory_use().free_blocks == self.kv_blocks and self.cache.stats().slots_used == 0
        assert len(self.cache._device.host.free) == self.cache._device.host.total_pages

    # -- contents ------------------------------------------------------------------------------------------------------

    def check_reads(self, request: Request, plan: StepPlan) -> None:
        """Checks that the forward reads the request's own history: the KV before the span, and the source state."""
        self.carry_out()
        if self.is_bad(request):
            return
        start, table, block = plan.start_tokens, self.table(request), self.block_tokens
        read_tokens = max(start, min(plan.end_tokens, len(request.stored)))
        for index in range(-(-read_tokens // block)):
            end = min((index + 1) * block, max(start, len(request.stored)))
            assert self.blocks[table[index]] == (request.salt, request.kv[:end]), f"block {index} of {request}"
        if plan.source_slot is not None:
            assert self.slots[plan.source_slot] == (request.salt, request.history[:start])
        elif start:
            self.check_live(request, (request.salt, request.history[:start]))

    def history_after(self, request: Request, plan: StepPlan) -> History:
        """The request's history once the plan's forward has run."""
        span = request.tokens[plan.start_tokens : plan.end_tokens]
        return request.history + tuple((token, self.cache.epoch) for token in span)

    def writes(self, request: Request, plan: StepPlan, succeeds: bool) -> list[tuple[int, Content]]:
        """What a forward writes: the blocks and their contents."""
        history = self.history_after(request, plan)
        kv = request.stored + history[len(request.stored) :]
        first = max(plan.start_tokens, len(request.stored))  # the KV of tokens before it goes to the dummy block
        found = []
        for index in range(first // self.block_tokens, -(-plan.end_tokens // self.block_tokens)):
            content = (request.salt, kv[: (index + 1) * self.block_tokens])
            # A forward that failed leaves what was in the block before.
            before = (request.salt, kv[: plan.start_tokens])
            spoilt = before if index * self.block_tokens < plan.start_tokens else GARBAGE
            found.append((self.block_to_write(request, index * self.block_tokens), content if succeeds else spoilt))
        return found

    def write(self, request: Request, plan: StepPlan, succeeds: bool, writes: Sequence[tuple[int, Content]]) -> None:
        """The device runs the plan's forward, which writes these blocks, and the planned states."""
        history = self.history_after(request, plan)
        for block_id, content in writes:
            self.put_block(block_id, content)
        for checkpoint in plan.checkpoints:
            state = (request.salt, history[: checkpoint.position_tokens]) if succeeds else GARBAGE
            self.put_state(checkpoint.slot, state)
        self.put_live(request, (request.salt, history) if succeeds else GARBAGE)
        if succeeds:
            request.history = history

    def write_block(self, request: Request, position: int) -> None:
        """A decode writes a token at this position."""
        self.carry_out()
        block_id = self.block_to_write(request, position)
        self.put_block(block_id, (request.salt, (*request.kv, (request.tokens[position], self.cache.epoch))))

    def block_to_write(self, request: Request, position: int) -> int:
        """The block at this position; nobody else may read it, and it may not be matchable yet."""
        block_id = self.table(request)[position // self.block_tokens]
        others = [other for other in self.requests if other is not request and block_id in self.table(other)]
        assert not others, f"block {block_id} is written by request {request.request_id}, read by {others}"
        keyed = [node for node in self.cache.nodes() if node.block_id == block_id]
        assert not keyed, f"{keyed} is written again"
        return block_id

    def check(self) -> None:
        """Runs `check_integrity`, and checks that every matchable entry holds what its place in the tree says."""
        self.cache.check_integrity()
        self.carry_out()
        self.check_host()
        for node in self.cache.nodes():
            if node.block_id == NO_BLOCK:
                continue
            salt, history = content = self.blocks[node.block_id]
            assert len(history) == node.depth_blocks * self.block_tokens, node
            assert {epoch for _, epoch in history} == {self.cache.epoch}, f"{node} is of other weights"
            if node.parent is not None:
                assert self.blocks[node.parent.block_id] == (salt, history[: -self.block_tokens]), node
            if node.slot != NO_SLOT:
                assert self.slots[node.slot] == content, node
        assert self.seen["moved"] <= self.seen["told of a move"]
        stats = self.cache.stats()
        cap = self.cache.settings.state_slots
        assert 0 <= stats.slots_used <= stats.slots_total and (cap is None or stats.slots_used <= cap)
        use = self.cache.memory_use()
        in_states = use.state_pages * self.page_blocks
        assert use.free_blocks + use.held_blocks + use.cached_blocks + in_states == use.total_blocks
        assert {name: getattr(stats, name) for name in COUNTED} == self.counted

    def check_host(self) -> None:
        """Checks depth and content of each entry on the host. Skips entries spoiled on purpose."""
        host = self.cache._device.host
        for entries in (host.kv, host.of_states):
            for node, entry in entries.items():
                content = self.expected.get(node.key)
                assert self.host[entry.pages] in (content, GARBAGE), node
                assert content is not None and len(content[1]) == node.depth_blocks * self.block_tokens, node
                parent = None if node.parent is None else self.expected.get(node.parent.key)
                assert parent is None or parent == (content[0], content[1][: -self.block_tokens]), node

    def spoil(self, index: int) -> None:
        """Corrupts an entry on the host."""
        if self.host:
            pages = sorted(self.host)[index % len(self.host)]
            self.host[pages] = GARBAGE
            self.seen["spoilt"] += 1
        if self.behind is not None and self.behind.entries:
            entries = self.behind.entries
            _, data, _ = entries[sorted(entries)[index % len(entries)]]
            data[0] ^= 1
            self.seen["spoilt behind"] += 1
