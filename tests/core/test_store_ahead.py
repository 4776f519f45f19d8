"""What is stored on the host before it is evicted, while a forward runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import pytest

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index import store_ahead
from megatron_hybrid_prefix.index.host_tier import HostTier
from megatron_hybrid_prefix.index.requests import StepPlan
from megatron_hybrid_prefix.index.store_ahead import StoreAhead
from megatron_hybrid_prefix.index.tree import NO_BLOCK, Node
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.tiers.base import Entry, SharedTier, TierBehind
from megatron_hybrid_prefix.tiers.units import DEVICE, BlockTransfer, EntryKind, Tag
from megatron_hybrid_prefix.tiers.units import HOST as HOST_TIER
from tests.core import test_stateful
from tests.harness.plugins.dictionary_tier import DictionaryTier

BLOCK = 4
HOST = {"host_pages": 640, "host_kv_pages": 1, "host_state_pages": 2}
SPLIT = {"kv_blocks": 40, "state_slots": 9}
ONE = {"cache_bytes": 58, "block_bytes": 1, "state_bytes": 2}
each_memory = pytest.mark.parametrize("memory", [SPLIT, ONE], ids=["split", "one memory"])


def make(memory: dict[str, int], **options: Any) -> HybridPrefixCache:
    return HybridPrefixCache(**({"block_tokens": BLOCK, "eviction_policy": "lru"} | memory | HOST | options))


class Forward:
    """A new prompt of 8 blocks (or the given tokens), up to the launch of its forward.

    Attributes:
        before: Stores that are launched before it.
        cached, written: What `store_ahead` returns.
    """

    def __init__(
        self,
        cache: HybridPrefixCache,
        number: int,
        tokens: Sequence[int] = (),
        *,
        ahead: bool = True,
        load: bool = False,
    ) -> None:
        self.cache, self.number = cache, number
        self.tokens = list(tokens) or [number, *range(8 * BLOCK)]
        match = cache.match(cache.chain(self.tokens))
        if load and match.loadable_blocks:
            match = cache.loads.begin_load_back(number, match) or match
        admission = cache.admit(number, match)
        assert admission is not None
        self.resumed = admission.resume_tokens
        self.plan: StepPlan = cache.plan(number, admission.resume_tokens, len(self.tokens))
        self.before = [copy for copy in cache.take_copies() if getattr(copy, "source", None) == DEVICE]
        cache.publish(self.plan)
        self.cached, self.written = cache.store_ahead([self.plan]) if ahead else ([], [])
        cache.check_integrity()

    def end(self) -> None:
        self.cache.release(self.number)
        self.cache.check_integrity()


def serve(cache: HybridPrefixCache, numbers: range, *, ahead: bool = True) -> list[Forward]:
    forwards = []
    for number in numbers:
        forwards.append(Forward(cache, number, ahead=ahead))
        forwards[-1].end()
    return forwards


@each_memory
def test_no_forward_waits_for_stores_of_what_it_evicts(memory):
    cache = make(memory)
    forwards = serve(cache, range(20))
    evicted = cache.stats()
    assert any(forward.before for forward in forwards), "the first evictions were not foreseen"
    assert evicted.evictions > 40 and evicted.kv_evictions > 40
    late = forwards[-10:]
    assert not any(forward.before for forward in late)
    assert all(forward.cached or forward.written for forward in late)
    assert any(forward.written for forward in forwards)


@each_memory
@pytest.mark.parametrize("policy", ["lru", "recompute_cost"])
def test_what_is_evicted_is_on_the_host_as_if_nothing_were_stored_ahead(memory, policy):
    """The host has room for all."""
    on_host = []
    for ahead in (True, False):
        cache = make(memory, eviction_policy=policy, host_pages=4000)
        serve(cache, range(20), ahead=ahead)
        nodes = list(cache.inspect.nodes())
        on_host.append(Counter(node.depth_blocks for node in nodes if node.block_id == NO_BLOCK))
        lost = [
            node for node in nodes if node.slot == NO_SLOT and node.reason is not None and node.host_slot == NO_SLOT
        ]
        assert not lost
        stats = cache.stats()
        # Each entry is stored once.
        tags = [cache.inspect.host_tier.entries.tag(entry) for entry in cache.inspect.host_tier.entries._pages]
        assert len({(tag.kind, tag.key) for tag in tags}) == len(tags) == stats.tiers["host"].stores
    assert on_host[0] == on_host[1]


@each_memory
def test_states_in_flight_are_stored_after_their_forward(memory):
    cache = make(memory)
    serve(cache, range(3))
    forward = Forward(cache, 3)
    host = cache.inspect.host_tier
    slots = {checkpoint.slot: checkpoint for checkpoint in forward.plan.checkpoints}
    keys = cache.chain(forward.tokens).keys
    assert forward.written
    assert not {copy.device_id for copy in forward.cached if copy.tag.kind == EntryKind.STATE} & slots.keys()
    nodes = {node.key: node for node in cache.inspect.nodes()}
    for copy in forward.written:
        depth = slots[copy.device_id].position_tokens // BLOCK
        assert (copy.tag.kind, copy.tag.key) == (EntryKind.STATE, keys[depth - 1])
        node = nodes[copy.tag.key]
        assert node.slot == copy.device_id and host.entries.pages(node.host_slot) == copy.pages
    forward.end()
    serve(cache, range(4, 20))
    assert all(node.slot == NO_SLOT for node in nodes.values())
    match = cache.match(cache.chain(forward.tokens))
    assert match.resume_tokens == 0 and match.loadable_blocks == 8


def test_what_is_queued_comes_first_and_after_the_forward():
    """What publication stores for a shared tier is what the forward writes."""
    cache = make(SPLIT, behind=TierBehind("s", Shared()))
    forwards = serve(cache, range(12))
    stores = [copy for each in forwards for copy in (*each.cached, *each.written) if copy.source == DEVICE]
    assert cache.stats().tiers["host"].stores == len(stores) + sum(len(each.before) for each in forwards)
    for forward in forwards:
        keys = set(cache.chain(forward.tokens).keys)
        published = [copy for copy in forward.written if copy.tag.key in keys]
        assert published and published == forward.written[: len(published)]


def check_pages_that_are_written_twice() -> int:
    """Hosts so small that what is stored ahead takes the place of what was just published. Returns how many pages that were."""
    twice = 0
    for seed in range(30):
        dice = random.Random(seed)
        cache = make(SPLIT, behind=TierBehind("s", Shared()), host_pages=dice.choice([10, 14, 20, 30]))
        host, last = cache.inspect.host_tier, {}
        for number in range(20):
            forward = Forward(cache, number)
            forward.end()
            pages = Counter(page for copy in (*forward.cached, *forward.written) for page in copy.pages)
            twice += sum(count > 1 for count in pages.values())
            copies = (*forward.before, *forward.cached, *forward.written)
            last |= {page: copy.tag for copy in copies for page in copy.pages}
            for entry in host.entries._pages:
                assert {last[page] for page in host.entries.pages(entry)} == {host.entries.tag(entry)}
    return twice


def test_a_page_that_is_written_twice_ends_with_what_the_host_names(monkeypatch):
    monkeypatch.setattr(store_ahead, "AHEAD_PART", 1)
    assert check_pages_that_are_written_twice()


def test_a_split_that_ignores_pages_is_found(monkeypatch):
    monkeypatch.setattr(store_ahead, "AHEAD_PART", 1)
    run = StoreAhead.run

    def by_what_is_written_alone(self: StoreAhead, written: Any) -> tuple[list[Any], list[Any]]:
        every = [*chain(*run(self, written))]
        return (
            [copy for copy in every if (copy.tag.kind, copy.device_id) not in written],
            [copy for copy in every if (copy.tag.kind, copy.device_id) in written],
        )

    monkeypatch.setattr(StoreAhead, "run", by_what_is_written_alone)
    with pytest.raises(AssertionError):
        check_pages_that_are_written_twice()


def check_random_steps(memory: dict[str, int]) -> Counter[str]:
    """Steps of several requests, many of which compute what is cached already, with a shared tier, which gets the KV before a state.

    Checks what is in flight and the order of the offers. Returns what happened.
    """
    seen: Counter[str] = Counter()
    for seed in range(20):
        dice = random.Random(seed)
        options = {"eviction_policy": dice.choice(["lru", "recompute_cost"]), "host_pages": dice.choice([30, 60, 120])}
        cache = make(memory, behind=TierBehind("s", Shared()), **options)
        offered: set[tuple[EntryKind, bytes]] = set()
        parents: dict[bytes, bytes] = {}
        numbers = iter(range(1000))
        turns: list[list[int]] = [[]]  # prompts with their answers
        for _ in range(25):
            plans, in_flight = [], set()
            running = []
            for number in islice(numbers, dice.randrange(1, 4)):
                tokens = [*dice.choice(turns[-3:])] or [dice.randrange(3)]
                tokens += range(dice.randrange(5, 5 * BLOCK))
                match = cache.match(cache.chain(tokens), read=dice.random() < 0.6)
                admission = cache.admit(number, match)
                if admission is None:
                    continue
                plan = cache.plan(number, admission.resume_tokens, len(tokens))
                plans.append(plan)
                running.append((number, tokens))
                written = admission.block_ids[admission.stored_tokens // BLOCK :]
                in_flight |= {(EntryKind.KV, block_id) for block_id in written}
                in_flight |= {(EntryKind.STATE, checkpoint.slot) for checkpoint in plan.checkpoints}
            copies = [cache.take_copies()]
            for plan in plans:
                cache.publish(plan)
            queued = len(cache._store.copies)
            now, later = cache.store_ahead(plans)
            cache.check_integrity()
            copies += [now, later]
            assert not in_flight & {(copy.tag.kind, copy.device_id) for copy in now if copy.source == DEVICE}
            kv = [copy for copy in later[queued:] if copy.source == DEVICE and copy.tag.kind == EntryKind.KV]
            seen["KV in flight"] += sum((copy.tag.kind, copy.device_id) in in_flight for copy in kv)
            for number, tokens in running:
                if dice.random() < 0.5 and cache.grow(number, len(tokens) + 2 * BLOCK) is not None:
                    cache.append(number, range(2 * BLOCK))
                    turns.append([*tokens, *range(2 * BLOCK)] if len(tokens) < 12 * BLOCK else [])
                    end = (len(tokens) + 2 * BLOCK - 1) // BLOCK * BLOCK
                    seen["decoded"] += cache.checkpoint_decoded(number, end) is not None
                copies.append(cache.take_copies())
                cache.release(number)
            for copy in chain(*copies):
                if isinstance(copy, BlockTransfer):
                    parents[copy.tag.key] = copy.tag.parent
                    if copy.target == "s":
                        offered.add((copy.tag.kind, copy.tag.key))
                        if copy.tag.kind == EntryKind.STATE:
                            key = copy.tag.key
                            while key:
                                assert (EntryKind.KV, key) in offered, "a state before the KV on its path"
                                key = parents[key]
                            seen["states offered"] += 1
    return seen


@each_memory
def test_what_a_forward_writes_is_stored_after_it_and_offered_in_order(memory, monkeypatch):
    monkeypatch.setattr(store_ahead, "AHEAD_PART", 2)
    seen = check_random_steps(memory)
    assert min(seen["KV in flight"], seen["decoded"], seen["states offered"]) > 0, seen


@each_memory
@pytest.mark.parametrize("kind", list(EntryKind), ids=lambda kind: kind.name)
def test_copies_of_what_is_not_written_yet_are_found(memory, kind, monkeypatch):
    monkeypatch.setattr(store_ahead, "AHEAD_PART", 2)
    run = StoreAhead.run
    monkeypatch.setattr(
        StoreAhead, "run", lambda self, written: run(self, {each for each in written if each[0] != kind})
    )
    with pytest.raises(AssertionError):
        check_random_steps(memory)


class Forgetful(DictionaryTier):
    """A tier behind the host that refuses some entries: all that come as the ``every``-th. It keeps tags only."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.put_entries = every, 0

    def carry_out(self, copies: Sequence[Any]) -> None:
        for copy in copies:
            if isinstance(copy, BlockTransfer) and copy.source == HOST_TIER and copy.target != DEVICE:
                self.put_entries += 1
                if not self.every or self.put_entries % self.every:
                    self.entries[copy.tag.kind, copy.tag.key] = (copy.tag, bytearray(), 0)


def test_ranks_whose_tiers_behind_the_host_differ_store_the_same():
    """What is queued for such a tier differs, and what is stored ahead may not."""
    tiers, kept = (Forgetful(0), Forgetful(2)), []
    for tier in tiers:
        behind = TierBehind("behind", tier, agree=lambda depth: 0)
        cache = make(SPLIT, host_pages=64, behind=behind, secret=b"ranks")
        for number in range(60):
            tokens = [number % 23, *range(8 * BLOCK)]
            admission = cache.admit(number, cache.match(cache.chain(tokens)))
            plan = cache.plan(number, admission.resume_tokens, len(tokens))
            tier.carry_out(cache.take_copies())
            cache.publish(plan)
            for copies in cache.store_ahead([plan]):
                tier.carry_out(copies)
            cache.release(number)
            cache.check_integrity()
            nodes = cache.inspect.nodes()
            kept.append(sorted((node.key, node.block_id, node.slot, node.host_block, node.host_slot) for node in nodes))
    assert len(tiers[0].entries) > len(tiers[1].entries)
    assert kept[:60] == kept[60:]


def test_a_state_in_flight_that_the_host_has_is_not_stored_again():
    cache = make(SPLIT)
    serve(cache, range(12))
    tokens = [2, *range(8 * BLOCK)]
    assert cache.match(cache.chain(tokens)).loadable_blocks == 8
    forward = Forward(cache, 12, tokens)  # without a load: it computes what the host has
    assert forward.resumed == 0 and forward.plan.checkpoints and not forward.written
    forward.end()


def test_room_on_the_host_is_bounded(monkeypatch):
    for part, most in ((16, HOST["host_pages"] // 16), (80, 8), (1000, 0)):
        monkeypatch.setattr(store_ahead, "AHEAD_PART", part)
        cache = make(SPLIT)
        pages = [sum(len(copy.pages) for copy in (*each.cached, *each.written)) for each in serve(cache, range(12))]
        assert max(pages) <= most and (max(pages) > 0) == (most > 0)


@each_memory
@pytest.mark.parametrize("policy", ["lru", "recompute_cost"])
def test_a_full_host_keeps_what_was_stored_ahead_until_it_is_evicted(memory, policy, monkeypatch):
    monkeypatch.setattr(store_ahead, "AHEAD_PART", 4)
    waited = {}
    for ahead in (True, False):
        cache = make(memory, eviction_policy=policy, host_pages=160)
        forwards = serve(cache, range(40), ahead=ahead)
        late = forwards[-20:]
        assert cache.stats().tiers["host"].evictions > 100
        for forward in late:
            copies = [copy for copy in (*forward.cached, *forward.written) if copy.source == DEVICE]
            pages = [page for copy in copies for page in copy.pages]
            assert len(set(pages)) == len(pages), "a page is written twice in one call"
        waited[ahead] = sum(len(forward.before) for forward in late)
    assert waited[True] <= waited[False] / 4, waited


@pytest.mark.parametrize("policy", ["lru", "recompute_cost"])
def test_a_state_whose_kv_left_while_it_was_pinned_goes_with_the_next_time(policy, monkeypatch):
    """On small hosts: there is no room for the KV of guesses."""
    monkeypatch.setattr(store_ahead, "AHEAD_PART", 4)
    pinned = []
    for seed in range(20):
        dice = random.Random(seed)
        blocks = dice.choice([12, 20, 40])
        sizes = {"kv_blocks": blocks, "state_slots": dice.choice([4, 9, 20, 30])}
        pages = {"host_pages": dice.choice([16, 24, 32, 48, 64, 96]), "host_state_pages": dice.choice([1, 2, 4, 8])}
        cache = make(sizes, eviction_policy=policy, retention_interval_tokens=8, **pages)
        host = cache.inspect.host_tier
        let_go = host.let_go_of_ahead

        def without_kv(cache: HybridPrefixCache = cache) -> list[Node]:
            states = [node for node in cache.inspect.nodes() if node.host_slot != NO_SLOT]
            return [node for node in states if node.block_id == node.host_block == NO_BLOCK]

        def noted(without_kv: Any = without_kv, let_go: Any = let_go) -> None:
            pinned.extend(without_kv())
            let_go()

        monkeypatch.setattr(host, "let_go_of_ahead", noted)
        for number in range(60):
            head = dice.choice([dice.randrange(4), 100 + number])
            tokens = [head, *range(dice.randrange(5, blocks * BLOCK - 4))]
            Forward(cache, number, tokens, load=True).end()
            assert {node.host_slot for node in without_kv()} <= set(host.ahead)
    assert pinned, "it happened"


def test_pins_end_with_the_next_time():
    cache = make(SPLIT)
    serve(cache, range(6))
    host = cache.inspect.host_tier
    ahead = list(host.ahead)
    assert ahead and set(ahead) <= host.entries.pins().keys()
    forward = Forward(cache, 6)
    assert not set(ahead) & set(host.ahead) and host.entries.pins().keys() == set(host.ahead)
    forward.end()
    cache.reset()
    assert not host.ahead and not host.entries.pins()


@each_memory
def test_what_makes_room_is_offered_without_waiting_for_the_forward(memory, monkeypatch):
    monkeypatch.setattr(store_ahead, "AHEAD_PART", 4)
    cache = make(memory, host_pages=100, behind=TierBehind("behind", DictionaryTier("")))
    forwards = serve(cache, range(20))
    cached = [copy for forward in forwards for copy in forward.cached]
    written = [copy for forward in forwards for copy in forward.written]
    assert {copy.source for copy in cached} == {DEVICE, HOST_TIER} and {copy.source for copy in written} == {DEVICE}


class Shared(SharedTier):
    """Notes what it is offered."""

    same_on_all_ranks = True
    least_blocks = 1

    def contains(self, kind: EntryKind, key: bytes) -> bool:
        return False

    def put(self, entries: Sequence[Entry]) -> Sequence[bool]:
        raise AssertionError("nothing is copied here")

    def get(self, tags: Sequence[Tag], buffers: Sequence[memoryview]) -> Sequence[int | None]:
        raise AssertionError("nothing is copied here")

    def remove(self, tags: Any) -> None:
        raise AssertionError("nothing is copied here")

    def clear(self) -> None:
        raise AssertionError("nothing is copied here")

    def invalidate(self, epoch: int) -> None:
        raise AssertionError("nothing is copied here")


@each_memory
def test_a_shared_tier_gets_a_guess_that_was_stored_ahead_once_it_is_used(memory):
    cache = make(memory, behind=TierBehind("shared", Shared()))
    serve(cache, range(3))
    forward = Forward(cache, 3)
    guesses = {copy.tag.key for copy in forward.written if copy.source == DEVICE and copy.tag.kind == EntryKind.STATE}
    forward.end()
    cache.take_copies()
    keys = cache.chain(forward.tokens).keys
    depth = max(depth for depth in range(1, 8) if keys[depth - 1] in guesses)
    match = cache.match(cache.chain(forward.tokens[: depth * BLOCK + 1]))
    assert match.resume_tokens == depth * BLOCK
    assert cache.admit(4, match) is not None
    offered = {(copy.tag.kind, copy.tag.key) for copy in cache.take_copies() if copy.target == "shared"}
    assert offered == {(EntryKind.STATE, keys[depth - 1]), *((EntryKind.KV, key) for key in keys[:depth])}


def test_nothing_is_stored_ahead_for_what_evicts_nothing_or_while_copies_on_the_device_wait():
    cache = make(SPLIT | {"kv_blocks": 400, "state_slots": 400})
    assert not any(forward.cached or forward.written for forward in serve(cache, range(12)))
    cache = make(SPLIT)
    serve(cache, range(6))
    assert cache.store_ahead([]) == ([], []), "that was done"
    assert len(cache.blocks.allocate(30)) == 30
    queued = list(cache._store.copies)
    cache._store.copies.append(object())
    assert cache.store_ahead([]) == ([], []) and len(cache._store.copies) == len(queued) + 1, "it is no transfer"


def test_a_state_that_is_not_copied_to_its_slot_yet_is_not_stored():
    """Nor one that a request will read: both are not evicted now."""
    cache = make(SPLIT)
    serve(cache, range(6))
    table = cache._store.checkpoints
    slots = {node.slot for node in table.next_evicted(guesses=99, others=99)}
    assert len(slots) == SPLIT["state_slots"]
    first, second = sorted(slots)[:2]
    table.protect(first)
    cache._store.slots.pin(second)
    assert {node.slot for node in table.next_evicted(guesses=99, others=99)} == slots - {first, second}


def test_guesses_and_others_are_counted_apart():
    cache = make(SPLIT)
    serve(cache, range(6))
    table = cache._store.checkpoints
    every = table.next_evicted(guesses=99, others=99)
    guesses = [node for node in every if node.reason == CheckpointReason.INTERVAL]
    others = [node for node in every if node.reason != CheckpointReason.INTERVAL]
    assert guesses and others
    assert table.next_evicted(guesses=1, others=0) == guesses[:1]
    assert table.next_evicted(guesses=0, others=1, but=guesses) == others[:1]
    assert table.next_evicted(guesses=0, others=1) == guesses[:1], "which go before all others"
    assert table.next_evicted(guesses=1, others=1) == guesses[:2]


def states_stored_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    run = StoreAhead.run
    patch.setattr(StoreAhead, "run", lambda *args: ([*chain(*run(*args))], []))


def copies_that_are_not_spare(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "let_go_of_ahead", lambda self: (self.entries.unpin(self.ahead), self.ahead.clear()))


def pins_that_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "let_go_of_ahead", lambda self: self.ahead.clear())


MUTANTS = [
    states_stored_before_they_are_written,
    copies_that_are_not_spare,
    pins_that_stay,
]


@pytest.mark.parametrize("shared", [False, True], ids=["split", "one memory"])
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_are_found(mutant, shared, monkeypatch):
    monkeypatch.setattr(store_ahead, "AHEAD_PART", 3)
    mutant(monkeypatch)
    test_stateful.fail_unless_a_seed_fails(shared=shared)
