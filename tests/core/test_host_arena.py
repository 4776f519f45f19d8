"""The arena alone: what is stored comes back bit by bit, whatever is written in between. On a GPU beside a busy stream."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.mcore.state import moves
from megatron_hybrid_prefix.tiers import entry_copies, jobs, loads, stores, tier_moves
from megatron_hybrid_prefix.tiers.arena import HostArena
from megatron_hybrid_prefix.tiers.base import Entry, Tier, TierBehind
from megatron_hybrid_prefix.tiers.pinned import allocate, choose_page_bytes, pin, unpin
from megatron_hybrid_prefix.tiers.queue import HostQueue
from megatron_hybrid_prefix.tiers.settings import TierSettings
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, SHARED, BlockTransfer, EntryKind, Load, LoadState, Tag
from tests.harness.limits import HANG_S, wait_until
from tests.harness.plugins.dictionary_tier import DictionaryTier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(gib=1))]
BLOCKS, SLOTS, PAGES = 12, 10, 60
NAMESPACE = bytes(range(16))


def a_load(load_id: int = 0, state: LoadState = LoadState.ASKED) -> Load:
    return Load(load_id=load_id, request_id=load_id, state=state, depth_tokens=1, pinned=())


def a_fetch(load_id: int = 0) -> Load:
    """A load that waits for entries from the tier behind."""
    return a_load(load_id, LoadState.FETCHING)


class Pools:
    """KV and two components of a state on a device, and an arena for them."""

    def __init__(
        self,
        device: str,
        scale: int = 1,
        *,
        mamba_layers: int = 3,
        tier: Tier | None = None,
    ) -> None:
        kv = torch.zeros(4, BLOCKS, 6 * scale, 2, dtype=torch.bfloat16, device=device)
        conv = torch.zeros(mamba_layers, SLOTS, 5 * scale, 3, dtype=torch.bfloat16, device=device)
        ssm = torch.zeros(mamba_layers, SLOTS, 7 * scale, dtype=torch.float32, device=device)
        self.tensors = {EntryKind.KV: [kv], EntryKind.STATE: [conv, ssm]}
        sizes = {k: sum(t[:, 0].numel() * t.element_size() for t in ts) for k, ts in self.tensors.items()}
        self.page_bytes = choose_page_bytes(sizes.values())
        self.pages_of = {kind: max(1, -(-size // self.page_bytes)) for kind, size in sizes.items()}
        self.behind = None if tier is None else TierBehind(tier)
        if self.behind is not None:
            self.behind.name_entries(lambda: NAMESPACE)
        self.arena = HostArena(
            lambda: self.tensors,
            pages=PAGES * max(self.pages_of.values()),
            page_bytes=self.page_bytes,
            pages_of=self.pages_of,
            device=device,
            behind=self.behind,
        )

    def write(self, kind: EntryKind, index: int, value: float) -> None:
        for number, tensor in enumerate(self.tensors[kind]):
            tensor[:, index] = value + number

    def read(self, kind: EntryKind, index: int) -> list[torch.Tensor]:
        return [tensor[:, index].cpu() for tensor in self.tensors[kind]]

    def unit(
        self, kind: EntryKind, index: int, entry: int, load: Load | None = None, key: bytes = b"k"
    ) -> BlockTransfer:
        count = max(self.pages_of.values())
        pages = range(entry * count, entry * count + self.pages_of[kind])
        # Several pages are not contiguous: an entry is stored wherever there is room.
        tag = Tag(kind=kind, key=key, depth_tokens=1, epoch=0)
        return BlockTransfer(
            source=DEVICE if load is None else HOST,
            target=HOST if load is None else DEVICE,
            device_id=index,
            pages=tuple(reversed(pages)),
            tag=tag,
            load=load,
        )

    def behind_unit(self, kind: EntryKind, entry: int, key: bytes, *, take: bool) -> BlockTransfer:
        """A transfer from the host to the tier behind it, or back."""
        unit = self.unit(kind, 0, entry, key=key)
        source, target = (HOST, SHARED) if take else (SHARED, HOST)
        return unit._replace(source=source, target=target, device_id=None)

    def bring(self, kind: EntryKind, index: int, entry: int, key: bytes, load_id: int = 0) -> Load:
        """Begins to read an entry from the tier behind, and a load that waits for it."""
        load = a_fetch(load_id)
        self.arena.carry_out([self.behind_unit(kind, entry, key, take=False), self.unit(kind, index, entry, load, key)])
        return load

    def give_to_tier(self, kind: EntryKind, index: int, entry: int, key: bytes) -> None:
        """Stores an entry, and writes it to the tier behind."""
        self.arena.carry_out([self.unit(kind, index, entry, key=key), self.behind_unit(kind, entry, key, take=True)])
        assert self.arena.behind is not None and self.arena.behind.threads.drain(HANG_S)


class OnItsWay:
    """The mark of a store."""

    def query(self) -> bool:
        return False


class AnyOrder:
    """Random moves and writes over slow streams, and what each place on the device must hold.

    Staging buffers are small, so that they are reused often.
    """

    def __init__(self, device: str, seed: int, monkeypatch: pytest.MonkeyPatch, tier: Tier | None = None) -> None:
        scale = 1 if device == "cpu" else 20_000
        if seed % 2:  # by the copy engines
            monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
        monkeypatch.setattr(stores, "STAGING_BYTES", 3 * 30 * scale * 8)
        monkeypatch.setattr(loads, "STAGING_BYTES", 2 * 30 * scale * 8)
        self.pools = Pools(device, scale, tier=tier)
        self.dice, self._delays = random.Random(seed), random.Random(seed)
        self.places = [(EntryKind.KV, i) for i in range(BLOCKS)] + [(EntryKind.STATE, i) for i in range(SLOTS)]
        self.on_device: dict[tuple[EntryKind, int], float] = {}
        for number, place in enumerate(self.places):
            self._write(place, number)

    def carry_out(self, units: list[BlockTransfer]) -> None:
        arena = self.pools.arena
        if isinstance(arena.stores.queue, HostQueue):
            arena.stores.stored = self._delays.choice([None, OnItsWay()])
        for queue in (arena.stores.queue, arena.loads.queue):
            if not isinstance(queue, HostQueue) and self._delays.random() < 0.3:  # what does not wait for it shows
                with torch.cuda.stream(queue._stream):
                    torch.cuda._sleep(2_000_000)
        arena.carry_out(units, send=self._delays.random() < 0.5)
        arena.stores.wait()

    def write_some(self, value: float) -> None:
        for _ in range(self.dice.randint(0, 4)):
            self._write(self.dice.choice(self.places), value)
        if self._delays.random() < 0.5:  # else what needs the copies launches them
            self.pools.arena.stores.send()

    def check(self) -> None:
        for place, value in self.on_device.items():
            for number, tensor in enumerate(self.pools.read(*place)):
                assert torch.all(tensor == torch.tensor(value + number).to(tensor.dtype)), place

    def _write(self, place: tuple[EntryKind, int], value: float) -> None:
        self.pools.write(*place, value)
        self.on_device[place] = value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_moves_and_writes(device, seed, monkeypatch):
    """Compared with a dictionary."""
    world = AnyOrder(device, seed, monkeypatch)
    pools, dice, places, on_device = world.pools, world.dice, world.places, world.on_device
    on_host: dict[int, tuple[EntryKind, float]] = {}
    load_ids = itertools.count()
    for step in range(40):
        units, own = [], []
        for _ in range(dice.randint(0, 12)):
            if on_host and dice.random() < 0.4:
                if not units or units[-1].load is None or dice.random() < 0.3:
                    own.append(a_load(next(load_ids)))
                entry = dice.choice(sorted(on_host))
                kind, value = on_host[entry]
                index = dice.randrange(BLOCKS if kind == EntryKind.KV else SLOTS)
                units.append(pools.unit(kind, index, entry, own[-1]))
                on_device[kind, index] = value
            else:
                kind, index = dice.choice(places)
                entry = dice.randrange(PAGES)
                units.append(pools.unit(kind, index, entry))
                on_host[entry] = (kind, on_device[kind, index])
        world.carry_out(units)
        for load in own:
            pools.arena.loads.wait_for(load)
            if dice.random() < 0.7:
                assert not pools.arena.loads.is_wrong(load)
            else:
                pools.arena.loads.forget(load)
        world.write_some(1000 + step)
    world.check()


class SlowTier(DictionaryTier):
    """Its threads take their time, and it loses some entries."""

    def __init__(self, seed: int) -> None:
        super().__init__(TierSettings(min_tokens=0, threads=2))
        self.dice = random.Random(seed)

    def put(self, namespace: bytes, entry: Entry) -> bool:
        time.sleep(self.dice.choice([0, 0.001]))
        return super().put(namespace, entry)

    def get(self, namespace: bytes, tag: Tag, buffers: Sequence[memoryview]) -> int | None:
        found, data, checksum = self.entries.get((namespace, tag.kind, tag.key), (None, b"", 0))
        if found != tag or self.dice.random() < 0.05:
            return None
        for buffer in buffers:
            time.sleep(self.dice.choice([0, 0.001]))
            buffer[:], data = data[: len(buffer)], data[len(buffer) :]
        return checksum


class Never(random.Random):
    """Dice by which nothing is slow or lost."""

    def random(self) -> float:
        return 0.9

    def choice(self, values: Sequence[float]) -> float:
        return values[0]


class SteadyTier(DictionaryTier):
    """Reads and writes when it may.

    Attributes:
        may_read: The reads of these keys may run; None: all.
        began: A read has begun.
        slow: Keys whose reads wait for `may_read`; None: all.
        may_write: Writes may run.
    """

    def __init__(self) -> None:
        super().__init__(TierSettings(min_tokens=0, threads=2))
        self.may_read, self.began, self.may_write = threading.Event(), threading.Event(), threading.Event()
        self.slow: set[bytes] | None = None
        self.may_read.set()
        self.may_write.set()

    def put(self, namespace: bytes, entry: Entry) -> bool:
        return self.may_write.wait(HANG_S) and super().put(namespace, entry)

    def get(self, namespace: bytes, tag: Tag, buffers: Sequence[memoryview]) -> int | None:
        self.began.set()
        assert (self.slow is not None and tag.key not in self.slow) or self.may_read.wait(HANG_S)
        return super().get(namespace, tag, buffers)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_moves_with_a_tier_behind(device, seed, monkeypatch):
    """Pages are given away while threads read and write them. What arrives is what was stored, or it does not arrive."""
    tier = SlowTier(seed)
    world = AnyOrder(device, seed, monkeypatch, tier=tier)
    monkeypatch.setattr(tier_moves, "GROUP_BYTES", 1 if seed % 4 < 2 else 1000)  # a group for each entry, or for some
    pools, dice, places, on_device = world.pools, world.dice, world.places, world.on_device
    arena, on_host, taken, ends = pools.arena, {}, set(), Counter()
    here: set[int] = set()  # entries on the host that come from the device, or have arrived
    refused: set[int] = set()  # pages of stores that were not done, because a thread read there
    refused_now: set[int] = set()  # the same, and those of this step
    load_ids, overwrite = itertools.count(), arena.behind.overwrite

    def noted(run: Sequence[BlockTransfer]) -> list[BlockTransfer]:
        done = overwrite(run)
        for unit in run:
            (refused.difference_update if unit in done else refused.update)(unit.pages)
        refused_now.update(refused)
        return done

    def load_of(entry: int, load: Load) -> tuple[tuple[EntryKind, int], BlockTransfer]:
        kind, value = on_host[entry]
        place = kind, dice.randrange(BLOCKS if kind == EntryKind.KV else SLOTS)
        return place, pools.unit(*place, entry, load, key=str(value).encode())

    monkeypatch.setattr(arena.behind, "overwrite", noted)
    for step in range(60):
        units: list[BlockTransfer] = []
        loaded: dict[tuple[EntryKind, int], float] = {}
        own: dict[Load, dict[tuple[EntryKind, int], float]] = {}
        refused_now.clear()
        refused_now.update(refused)
        for _ in range(dice.randint(0, 12)):
            what, entry, place = dice.choice(["store", "take", "give", "load"]), dice.randrange(8), dice.choice(places)
            if what == "store" and place not in loaded:
                on_host[entry] = (place[0], on_device[place])
                here.add(entry)
                units.append(pools.unit(*place, entry, key=str(on_device[place]).encode()))
            elif what == "give" and taken:
                on_host[entry] = kind, value = dice.choice(sorted(taken))
                here.discard(entry)
                units.append(pools.behind_unit(kind, entry, str(value).encode(), take=False))
            elif what == "take" and entry in on_host:
                kind, value = on_host[entry]
                units.append(pools.behind_unit(kind, entry, str(value).encode(), take=True))
                taken.add((kind, value))
            elif what == "load" and entry in here:
                load = a_load(next(load_ids))
                place, unit = load_of(entry, load)
                if place not in loaded:
                    units.append(unit)
                    own[load] = {place: on_host[entry][1]}
                    loaded |= own[load]
        load, entries = a_load(next(load_ids)), set()
        for entry in dice.sample(sorted(on_host), min(len(on_host), dice.randint(0, 2))):
            place, unit = load_of(entry, load)
            if place not in loaded:
                units.append(unit)
                entries.add(entry)
                own.setdefault(load, {})[place] = loaded[place] = on_host[entry][1]
        if not here.issuperset(entries):
            load.state = LoadState.FETCHING
        world.carry_out(units)
        for load, values in own.items():
            is_fetch, arrived = load.state is LoadState.FETCHING, True
            if is_fetch:
                arena.stores.send()
                arrived = arena.behind.fetched(load, dice.choice([0.0, HANG_S]))
            failed = False
            if arrived:
                arena.loads.wait_for(load)
                failed = arena.loads.is_wrong(load)
                assert not failed or any(not refused_now.isdisjoint(unit.pages) for unit in load.transfers)
                assert not (failed and is_fetch)
            if arrived and not failed:
                ends["waited" if is_fetch else "here"] += 1
                here.update(entries if is_fetch else ())
                on_device |= values
                continue
            ends["refused" if failed else "late" if arrived is None else "missing"] += 1
            arena.drop(load)
            for place in values:  # part of it may have been loaded; what the model writes now comes after that
                world._write(place, 2000 + step)
            for entry in entries if is_fetch else ():  # the cache drops what did not arrive
                del on_host[entry]
                here.discard(entry)
        world.write_some(1000 + step)
    world.check()
    assert min(ends["here"], ends["waited"]) > 0
    # However long the threads took before: once they have done what they can, an entry comes back.
    tier.dice = Never()
    assert arena.behind.threads.drain(HANG_S)
    first, second = (pools.unit(EntryKind.KV, 0, entry, key=b"end") for entry in (0, 1))
    threads = arena.behind.threads
    wait_until(lambda: not threads.overwrite([*first.pages, *second.pages]), "no page is being read into")
    world.carry_out([first, pools.behind_unit(EntryKind.KV, 0, b"end", take=True)])
    assert arena.behind.threads.drain(HANG_S) and arena.behind.stats.bytes_stored > 0
    load = pools.bring(EntryKind.KV, 1, 1, b"end", load_id=next(load_ids))
    assert arena.behind.fetched(load, HANG_S)
    arena.loads.wait_for(load)
    assert not arena.loads.is_wrong(load)
    on_device[EntryKind.KV, 1] = on_device[EntryKind.KV, 0]
    world.check()
    assert arena.behind.stats.bytes_loaded > 0
    arena.close()


def test_a_load_whose_page_went_to_another_entry_is_a_miss():
    """Two requests waited for one entry. It was late for the first, so its page went to another entry."""
    pools = Pools("cpu", tier=SteadyTier())
    for key in (b"a", b"b"):
        pools.give_to_tier(EntryKind.KV, 0, 0, key)
    loads = a_fetch(7), a_fetch(8), a_fetch(9)
    fetch = [pools.behind_unit(EntryKind.KV, 1, key, take=False) for key in (b"a", b"b")]
    pools.arena.carry_out([fetch[0], pools.unit(EntryKind.KV, 3, 1, loads[0], key=b"a"), fetch[1]])
    assert pools.arena.behind.fetched(loads[0], HANG_S) is False
    pools.arena.drop(loads[0])
    pools.arena.carry_out([pools.unit(EntryKind.KV, 3, 1, loads[1], key=b"b")])
    assert pools.arena.behind.fetched(loads[1], HANG_S) is True
    assert not pools.arena.loads.is_wrong(loads[1])
    pools.arena.carry_out([pools.unit(EntryKind.KV, 3, 1, loads[2], key=b"a")])
    assert pools.arena.behind.fetched(loads[2], HANG_S) is False
    pools.arena.close()


@pytest.mark.parametrize("written_again", [False, True])
def test_an_entry_that_arrived_for_one_load_and_is_gone_is_a_miss_for_the_other(written_again):
    """And the entry that its page went to is right. The first may have gone back to the tier, which had lost it."""
    pools = Pools("cpu", tier=SteadyTier())
    arena = pools.arena
    for index in range(2):
        pools.write(EntryKind.KV, index, 1.0 + index)
    pools.give_to_tier(EntryKind.KV, 0, 0, b"a")
    first, second, third = a_fetch(0), a_fetch(1), a_load(2)
    units = [pools.unit(EntryKind.KV, 3 + load.load_id, 1, load, key=b"a") for load in (first, second)]
    arena.carry_out([pools.behind_unit(EntryKind.KV, 1, b"a", take=False), *units])
    assert arena.behind.fetched(first, HANG_S) is True and not arena.loads.is_wrong(first)
    if written_again:
        arena.carry_out([pools.behind_unit(EntryKind.KV, 1, b"a", take=True)])
        assert arena.behind.threads.drain(HANG_S)
    arena.carry_out([pools.unit(EntryKind.KV, 1, 1, key=b"b")])
    assert arena.behind.fetched(second, HANG_S) is False
    arena.carry_out([pools.unit(EntryKind.KV, 5, 1, third, key=b"b")])
    assert not arena.loads.is_wrong(third) and pools.read(EntryKind.KV, 5)[0].unique().tolist() == [2.0]
    arena.close()


def check_that_it_arrives_late(pools: Pools, tier: SteadyTier, kind: EntryKind, *places: int) -> None:
    """An entry with the key ``k`` is not here until the tier has read it; then its load is right."""
    tier.may_read.clear()
    load = pools.bring(kind, *places, b"k")
    assert pools.arena.behind.fetched(load) is None
    tier.may_read.set()
    assert pools.arena.behind.fetched(load, HANG_S) and not pools.arena.loads.is_wrong(load)


def test_an_entry_that_is_read_again_in_its_place_is_not_here_until_it_has_arrived():
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    pools.give_to_tier(EntryKind.KV, 0, 0, b"k")
    check_that_it_arrives_late(pools, tier, EntryKind.KV, 3, 0)
    pools.arena.close()


def test_a_load_that_fetches_also_needs_what_was_just_stored(monkeypatch):
    """Its copy to the host need not be launched yet."""
    pools = Pools("cpu", tier=SteadyTier())
    for index in range(2):
        pools.write(EntryKind.KV, index, 1.0 + index)
    pools.give_to_tier(EntryKind.KV, 0, 0, b"k")
    pools.arena.carry_out([pools.behind_unit(EntryKind.KV, 1, b"k", take=False)])
    load = a_fetch()
    units = [pools.unit(EntryKind.KV, 3, 1, load), pools.unit(EntryKind.KV, 4, 2, load, key=b"new")]
    pools.arena.carry_out([pools.unit(EntryKind.KV, 1, 2, key=b"new"), *units], send=False)
    monkeypatch.setattr(moves, "max_over_model_ranks", lambda values, groups: values)
    load.deadline_s, ended = time.monotonic() + HANG_S, []
    cache = SimpleNamespace(loads=SimpleNamespace(end_fetch=lambda *end: ended.append(end)))
    host_moves = moves.HostMoves.__new__(moves.HostMoves)
    vars(host_moves).update(arena=pools.arena, _cache=cache, _groups=None, _page_bytes=pools.page_bytes)
    assert host_moves.fetch(load, wait=True) is LoadState.COPYING and ended == [(load, LoadState.COPYING)]
    assert not pools.arena.loads.is_wrong(load)
    assert [pools.read(EntryKind.KV, index)[0].unique().tolist() for index in (3, 4)] == [[1.0], [2.0]]
    pools.arena.close()


@pytest.mark.parametrize("end", ["arrives", "dropped", "dropped before", "zeros"])
def test_what_has_arrived_is_loaded_while_the_rest_is_read(end, monkeypatch):
    """If the load is given up, the model waits for what was launched of it."""
    monkeypatch.setattr(tier_moves, "GROUP_BYTES", 1)
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    keys = (b"a", b"b")
    for index, key in enumerate(keys):
        pools.write(EntryKind.KV, index, 1.0 + index)
        pools.give_to_tier(EntryKind.KV, index, index, key)
        pools.write(EntryKind.KV, 5 + index, 9.0)
    waits: list[Any] = []
    tier.slow = {b"b"} if end != "dropped before" else {b"a", b"b"}
    tier.may_read.clear()
    monkeypatch.setattr(pools.arena.loads.queue, "wait", waits.append)
    load = a_fetch()
    fetch = [pools.behind_unit(EntryKind.KV, 2 + index, key, take=False) for index, key in enumerate(keys)]
    units = [pools.unit(EntryKind.KV, 5 + index, 2 + index, load, key=key) for index, key in enumerate(keys)]
    pools.arena.carry_out([*fetch, *units])

    def values() -> list[list[float]]:
        return [pools.read(EntryKind.KV, index)[0].unique().tolist() for index in (5, 6)]

    def is_loaded() -> bool:
        assert pools.arena.behind.fetched(load, 0.1) is None
        return values() == ([[9.0], [9.0]] if end == "dropped before" else [[1.0], [9.0]])

    wait_until(is_loaded, "what has arrived is loaded, and nothing else")
    if end == "arrives":
        tier.may_read.set()
        assert pools.arena.behind.fetched(load, HANG_S) is True
        assert not pools.arena.loads.is_wrong(load) and values() == [[1.0], [2.0]]
    else:
        pools.arena.drop(load, zero=end == "zeros")
        assert len(waits) == (end != "dropped before")
        assert not pools.arena.loads.running
        assert values() == {"dropped": [[1.0], [9.0]], "zeros": [[0.0], [0.0]]}.get(end, [[9.0], [9.0]])
        tier.may_read.set()
    pools.arena.close()


def test_a_load_that_is_over_before_it_is_launched_is_not_launched():
    """Its block may be another's by then."""
    pools = Pools("cpu", tier=SteadyTier())
    pools.write(EntryKind.KV, 0, 3.0)
    pools.give_to_tier(EntryKind.KV, 0, 0, b"k")
    own = [a_load(number, state) for number, state in enumerate((LoadState.ASKED, LoadState.GIVEN_UP))]
    pools.arena.carry_out([pools.unit(EntryKind.KV, 3 + number, 0, load) for number, load in enumerate(own)])
    assert [pools.read(EntryKind.KV, index)[0].unique().tolist() for index in (3, 4)] == [[3.0], [0.0]]
    assert [pools.arena.loads.is_wrong(load) for load in own] == [False, True]
    pools.arena.close()


def test_a_wrong_entry_of_any_group_fails_the_load(monkeypatch):
    monkeypatch.setattr(tier_moves, "GROUP_BYTES", 1)
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    keys = (b"a", b"b", b"c")
    for load_id, wrong in enumerate(keys):
        tier.entries.clear()
        for index, key in enumerate(keys):
            pools.give_to_tier(EntryKind.KV, index, index, key)
        tag, data, checksum = tier.entries[NAMESPACE, EntryKind.KV, wrong]
        tier.entries[NAMESPACE, EntryKind.KV, wrong] = tag, data, checksum ^ 1
        load = a_fetch(load_id)
        units = [pools.behind_unit(EntryKind.KV, 3 + index, key, take=False) for index, key in enumerate(keys)]
        units += [pools.unit(EntryKind.KV, 5 + index, 3 + index, load, key=key) for index, key in enumerate(keys)]
        pools.arena.carry_out(units)
        assert pools.arena.behind.fetched(load, HANG_S)
        assert pools.arena.loads.is_wrong(load), wrong
    pools.arena.close()


def test_the_checksum_of_an_entry_from_behind_goes_back_with_it(monkeypatch):
    """Also if an earlier store brings older checksums to the host after the entry has arrived there."""
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    pools.write(EntryKind.KV, 0, 3.0)
    pools.give_to_tier(EntryKind.KV, 0, 0, b"k")
    stored = dict(tier.entries)
    load = pools.bring(EntryKind.KV, 3, 1, b"k")
    assert pools.arena.behind.fetched(load, HANG_S)
    sums = torch.zeros_like(pools.arena.contents.sums)
    monkeypatch.setattr(pools.arena.contents, "sums_seen", sums)  # as of before it arrived
    tier.entries.clear()
    pools.arena.carry_out([pools.behind_unit(EntryKind.KV, 1, b"k", take=True)])
    assert pools.arena.behind.threads.drain(HANG_S) and tier.entries == stored
    pools.arena.close()


def test_the_checksum_of_an_entry_from_behind_does_not_go_back_with_another_of_its_name():
    """One that was computed again, in the same page: it may have other bytes."""
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    pools.give_to_tier(EntryKind.KV, 0, 0, b"k")
    load = pools.bring(EntryKind.KV, 3, 1, b"k")
    assert pools.arena.behind.fetched(load, HANG_S)
    tier.entries.clear()
    pools.write(EntryKind.KV, 0, 5.0)
    pools.give_to_tier(EntryKind.KV, 0, 1, b"k")
    load = pools.bring(EntryKind.KV, 3, 2, b"k", load_id=1)
    assert pools.arena.behind.fetched(load, HANG_S) and not pools.arena.loads.is_wrong(load)
    assert pools.read(EntryKind.KV, 3)[0].unique().tolist() == [5.0]
    pools.arena.close()


def test_a_page_that_is_being_read_into_takes_nothing_else(caplog):
    """The disk hangs, and the page's load was given up. What goes there is lost, and nothing waits for the disk."""
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    arena = pools.arena
    pools.write(EntryKind.KV, 0, 3.0)
    pools.give_to_tier(EntryKind.KV, 0, 0, b"a")
    tier.may_read.clear()
    load = pools.bring(EntryKind.KV, 3, 1, b"a")
    assert tier.began.wait(HANG_S) and arena.behind.fetched(load, 0.01) is None
    arena.drop(load)
    store = pools.unit(EntryKind.KV, 0, 1, key=b"b")
    for _ in range(2):  # the page stays taken
        arena.carry_out([store, pools.unit(EntryKind.KV, 0, 2, key=b"c")])
    assert "have no place" in caplog.text
    for load_id, (entry, key) in enumerate([(1, b"b"), (2, b"c")], start=8):
        load = a_load(load_id)
        arena.carry_out([pools.unit(EntryKind.KV, 4, entry, load, key=key)])
        assert arena.loads.is_wrong(load) == (key == b"b")
    load = pools.bring(EntryKind.KV, 3, 1, b"a", load_id=10)
    tier.may_read.set()
    assert arena.behind.fetched(load, HANG_S) is False
    arena.drop(load)
    wait_until(lambda: not arena.behind.threads.overwrite(store.pages), "the disk answers")
    load = a_load(11)
    arena.carry_out([store, pools.unit(EntryKind.KV, 5, 1, load, key=b"b")])
    assert not arena.loads.is_wrong(load) and pools.read(EntryKind.KV, 5)[0].unique().tolist() == [3.0]
    arena.close()


def test_what_is_not_on_the_host_is_not_written():
    """Else other bytes would get this name, with a checksum that is right for them."""
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    pools.arena.carry_out([pools.unit(EntryKind.KV, 0, 0, key=b"other")])
    pools.arena.carry_out([pools.behind_unit(EntryKind.KV, 0, b"k", take=True)])
    assert pools.arena.behind.threads.drain(HANG_S) and tier.entries == {} and pools.arena.behind.stats.full == 1
    pools.arena.close()


def test_an_entry_that_is_offered_twice_is_written_once():
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    tier.may_write.clear()
    offer = pools.behind_unit(EntryKind.KV, 0, b"k", take=True)
    pools.arena.carry_out([pools.unit(EntryKind.KV, 0, 0, key=b"k"), offer])
    pools.arena.carry_out([offer])
    tier.may_write.set()
    assert pools.arena.behind.threads.drain(HANG_S)
    (stored,) = tier.entries.values()
    assert pools.arena.behind.stats.bytes_stored == len(stored[1]) and pools.arena.behind.stats.full == 0
    pools.arena.close()


@pytest.mark.parametrize("way", ["write", "read"])
def test_a_thread_waits_for_the_transfers_that_use_its_pages(way, monkeypatch):
    """For those that are on their way when it is asked: stores write there, and loads read there."""
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    arena, done, marks = pools.arena, [], (OnItsWay(), OnItsWay())
    pools.give_to_tier(EntryKind.KV, 0, 0, b"a")
    pools.arena.carry_out([pools.unit(EntryKind.KV, 0, 1, key=b"b")])
    arena.stores.stored, arena.loads.last = marks
    for queue, name in ((arena.stores.queue, "stores"), (arena.loads.queue, "loads")):
        monkeypatch.setattr(queue, "finish", lambda mark, name=name: done.append((name, mark)))
    for name in ("put", "get"):
        original = getattr(tier, name)
        monkeypatch.setattr(tier, name, lambda *args, f=original, name=name: (done.append(name), f(*args))[1])
    if way == "write":
        arena.carry_out([pools.behind_unit(EntryKind.KV, 1, b"b", take=True)])
        assert arena.behind.threads.drain(HANG_S) and done == [("stores", marks[0]), "put"]
    else:
        load = pools.bring(EntryKind.KV, 3, 2, b"a")
        assert arena.behind.fetched(load, HANG_S) and done == [("stores", marks[0]), ("loads", marks[1]), "get"]
    arena.close()


def test_what_is_overwritten_while_a_thread_copies_it_is_not_written(monkeypatch):
    """The thread looks again after it has copied the bytes and the checksum."""
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    arena, seen_checksum = pools.arena, pools.arena.contents.seen_checksum

    def overwritten(page: int, tag: Tag) -> int:
        assert not arena.behind.threads.overwrite([page])
        return seen_checksum(page, tag)

    monkeypatch.setattr(arena.contents, "seen_checksum", overwritten)
    pools.give_to_tier(EntryKind.KV, 0, 0, b"k")
    assert tier.entries == {} and arena.behind.stats.full == 1 and arena.behind.stats.bytes_stored == 0
    arena.close()


@pytest.mark.parametrize("page", [0, -1])
def test_what_is_written_late_is_what_was_stored_or_nothing(page):
    """The disk takes its time. One of the entry's pages goes to another entry, before a thread gets to it."""
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    arena = pools.arena
    tier.may_write.clear()
    for index in range(4):  # more than there are threads
        pools.write(EntryKind.STATE, index, 3.0)
        key = str(index).encode()
        units = [pools.unit(EntryKind.STATE, index, index, key=key)]
        arena.carry_out([*units, pools.behind_unit(EntryKind.STATE, index, key, take=True)])
    other = pools.unit(EntryKind.KV, 0, 9, key=b"other")
    arena.carry_out([other._replace(pages=(pools.unit(EntryKind.STATE, 0, 3).pages[page], *other.pages[1:]))])
    tier.may_write.set()
    assert arena.behind.threads.drain(HANG_S)
    assert sorted(key for _, _, key in tier.entries) == [b"0", b"1", b"2"] and arena.behind.stats.full == 1
    arena.close()


@pytest.mark.parametrize("method", ["put", "wants", "get"])
def test_a_tier_that_raises_loses_this_entry_only(method, monkeypatch, caplog):
    """Its threads live on. What it cannot read is a miss, and what it cannot write is counted."""
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    arena, original = pools.arena, getattr(tier, method)

    def fails(namespace: bytes, what: Any, *more: Any) -> Any:
        if getattr(what, "tag", what).key.startswith(b"bad"):
            raise LookupError("the disk is on fire")
        return original(namespace, what, *more)

    monkeypatch.setattr(tier, method, fails)
    keys = [b"bad 0", b"bad 1", b"bad 2", b"bad 3", b"good"]  # more than there are threads
    for entry, key in enumerate(keys):
        pools.write(EntryKind.KV, entry, 1.0 + entry)
        pools.give_to_tier(EntryKind.KV, entry, entry, key)
    assert len(tier.entries) == (5 if method == "get" else 1)
    assert arena.behind.stats.full == (0 if method == "get" else 4)
    for number, key in enumerate(keys):
        load = pools.bring(EntryKind.KV, 7, 9, key, load_id=number)
        assert arena.behind.fetched(load, HANG_S) == (key == b"good")
        if key == b"good":
            assert not arena.loads.is_wrong(load) and pools.read(EntryKind.KV, 7)[0].unique().tolist() == [5.0]
        else:
            arena.drop(load)
    assert caplog.text.count("the disk is on fire") == 4
    arena.close()


def test_entries_of_other_weights_are_not_moved():
    """Nor is the tier asked for them."""
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    arena = pools.arena
    pools.write(EntryKind.KV, 0, 3.0)
    pools.give_to_tier(EntryKind.KV, 0, 0, b"k")
    pools.behind.invalidate(1)
    load = pools.bring(EntryKind.KV, 3, 1, b"k")
    assert arena.behind.fetched(load, HANG_S) is False and not tier.began.is_set()
    arena.drop(load)
    pools.give_to_tier(EntryKind.KV, 0, 2, b"late")
    assert len(tier.entries) == 1 and arena.behind.stats.full == 1
    arena.close()


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_an_arena_that_ends_writes_what_is_left_and_ends_its_threads(how):
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    tier.may_write.clear()
    for index in range(4):
        key = str(index).encode()
        store = pools.unit(EntryKind.KV, index, index, key=key)
        pools.arena.carry_out([store, pools.behind_unit(EntryKind.KV, index, key, take=True)])
    threads = pools.arena.behind.threads._threads
    assert len(threads) == 4 and all(thread.is_alive() for thread in threads)
    if how == "closed":
        pools.arena.close()
    else:
        del pools
        gc.collect()
    tier.may_write.set()
    for thread in threads:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in threads) and len(tier.entries) == 4


def test_a_process_that_ends_writes_what_is_left(monkeypatch):
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    tier.may_write.clear()
    for index in range(4):
        key = str(index).encode()
        store = pools.unit(EntryKind.KV, index, index, key=key)
        pools.arena.carry_out([store, pools.behind_unit(EntryKind.KV, index, key, take=True)])
    threading.Timer(0.05, tier.may_write.set).start()
    monkeypatch.setattr(tier, "wait_s", HANG_S)
    monkeypatch.setattr(jobs, "_END_S", HANG_S)
    pools.arena.behind.threads.finish()
    assert len(tier.entries) == 4
    assert not any(thread.is_alive() for thread in pools.arena.behind.threads._threads)


def test_a_process_that_ends_does_not_wait_for_a_disk_that_hangs(monkeypatch):
    tier = SteadyTier()
    pools = Pools("cpu", tier=tier)
    tier.may_write.clear()
    monkeypatch.setattr(tier, "wait_s", 0.01)
    monkeypatch.setattr(jobs, "_END_S", 0.01)
    pools.arena.carry_out(
        [pools.unit(EntryKind.KV, 1, 1, key=b"k"), pools.behind_unit(EntryKind.KV, 1, b"k", take=True)]
    )
    pools.arena.behind.threads.finish()
    assert tier.entries == {}
    tier.may_write.set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", list(EntryKind))
def test_a_wrong_bit_behind_the_host_is_noticed(device, kind):
    tier = SteadyTier()
    pools = Pools(device, tier=tier)
    for index, key in ((1, b"a"), (2, b"b")):
        pools.write(kind, index, 3.0 * index)
        pools.give_to_tier(kind, index, index, key)
    tier.entries[NAMESPACE, kind, b"a"][1][1] ^= 2
    for load_id, key in enumerate((b"a", b"b", b"c")):
        load = pools.bring(kind, 4, 7, key, load_id)
        assert pools.arena.behind.fetched(load, HANG_S) == (key != b"c")
        pools.arena.loads.wait_for(load)
        assert pools.arena.loads.is_wrong(load) == (key != b"b")
    pools.arena.close()


@pytest.mark.parametrize("device", DEVICES)
def test_the_later_of_two_moves_to_one_place_wins(device):
    """An entry replaced at once by another one in the same pages; a block that is loaded twice."""
    pools = Pools(device)
    for index in range(BLOCKS):
        pools.write(EntryKind.KV, index, index)
    pools.arena.carry_out(
        [pools.unit(EntryKind.KV, index, 5) for index in (3, 4, 1)] + [pools.unit(EntryKind.KV, 6, 7)]
    )
    load = a_load()
    units = [pools.unit(EntryKind.KV, 2, entry, load) for entry in (7, 5)]
    pools.arena.carry_out([*units, pools.unit(EntryKind.KV, 8, 7, load)])
    pools.arena.loads.wait_for(load)
    assert not pools.arena.loads.is_wrong(load)
    assert [float(pools.read(EntryKind.KV, index)[0].max()) for index in (2, 8)] == [1, 6]
    assert [float(pools.read(EntryKind.KV, index)[0].min()) for index in (2, 8)] == [1, 6]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", list(EntryKind))
def test_a_wrong_bit_is_noticed(device, kind):
    pools = Pools(device)
    pools.write(kind, 1, 3.0)
    unit = pools.unit(kind, 1, 5)
    pools.arena.carry_out([unit])
    pools.arena.finish()
    pools.arena.pages.memory[unit.pages[-1] * pools.page_bytes + 1] ^= 2
    own = [a_load(load_id) for load_id in range(3)]
    pools.arena.carry_out([pools.unit(kind, 2 + number, 5, own[number]) for number in range(2)])
    pools.arena.loads.wait_for(own[0])
    assert pools.arena.loads.is_wrong(own[0]) and pools.arena.loads.is_wrong(own[1])
    pools.arena.carry_out([pools.unit(kind, 1, 5), pools.unit(kind, 2, 5, own[2])])
    assert not pools.arena.loads.is_wrong(own[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", list(EntryKind))
@pytest.mark.parametrize("fault", ["bit", "tag", "copy", "copy engine"])
def test_what_is_wrong_or_missing_is_zeros(device, kind, fault, monkeypatch):
    """Not what it was before, nor what was loaded: both may be NaN. The other entries of the load are right."""
    if fault == "copy engine":
        monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    pools = Pools(device)
    for index in range(SLOTS):
        pools.write(kind, index, 3.0 + index)
    pools.arena.carry_out([pools.unit(kind, index, index) for index in (1, 2)])
    pools.arena.finish()
    if fault == "bit":
        pools.arena.pages.memory[pools.unit(kind, 1, 1).pages[-1] * pools.page_bytes] ^= 2
    own = a_load(1), a_load(2)
    wrong = pools.unit(kind, 5, 1, own[0], key=b"other" if fault == "tag" else b"k")
    copies, name = pools.arena.copies, "to_staging" if fault == "copy engine" else "to_places"
    original = getattr(copies, name)

    def fails(batch):
        if wrong in batch.units:
            raise RuntimeError("the copy engine is on fire")
        original(batch)

    if fault.startswith("copy"):
        monkeypatch.setattr(copies, name, fails)
    # Before it another wrong entry goes to the place of a right one, which is loaded later.
    pools.arena.carry_out([wrong._replace(device_id=6), wrong])
    pools.arena.carry_out([pools.unit(kind, 6, 2, own[1])])
    for load in own:
        pools.arena.loads.wait_for(load)
    assert [pools.arena.loads.is_wrong(load) for load in own] == [True, False]
    values = [{float(value) for value in tensor.unique()} for index in (5, 6) for tensor in pools.read(kind, index)]
    parts = len(pools.tensors[kind])
    assert values == [{0.0}] * parts + [{5.0 + number} for number in range(parts)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["batches", "upload", "to_places", "zero_wrong"])
def test_a_load_whose_launch_raises_is_wrong(device, name, monkeypatch):
    """Also if another part of it was launched before; other loads are right. One that was never launched is wrong, too."""
    pools = Pools(device)
    own = [a_load(load_id) for load_id in range(4)]
    for index in (1, 2):
        pools.write(EntryKind.KV, index, index)
    pools.arena.carry_out([pools.unit(EntryKind.KV, index, index) for index in (1, 2)])
    pools.arena.carry_out([pools.unit(EntryKind.KV, 5 + number, 1, own[number]) for number in range(2)])

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise SystemError("no memory for a launch")  # of no kind that counts as a failed copy

    with monkeypatch.context() as patch, pytest.raises(SystemError):
        patch.setattr(pools.arena.copies, name, fails)
        pools.arena.carry_out([pools.unit(EntryKind.KV, 7, 2, own[number]) for number in (0, 2)])
    assert [pools.arena.loads.is_wrong(load) for load in own] == [True, False, True, True]


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_for_a_wrong_entry_do_not_hit_a_later_one_in_its_place(device):
    """Both in one launch: the block went to another request, whose load is right."""
    pools = Pools(device)
    for index in (1, 2):
        pools.write(EntryKind.KV, index, index)
    pools.arena.carry_out([pools.unit(EntryKind.KV, index, index) for index in (1, 2)])
    pools.arena.finish()
    pools.arena.pages.memory[pools.unit(EntryKind.KV, 1, 1).pages[0] * pools.page_bytes] ^= 2
    own = a_load(1), a_load(2)
    pools.arena.carry_out([pools.unit(EntryKind.KV, 6, load.load_id, load) for load in own])
    for load in own:
        pools.arena.loads.wait_for(load)
    assert [pools.arena.loads.is_wrong(load) for load in own] == [True, False]
    assert [float(tensor.unique()) for tensor in pools.read(EntryKind.KV, 6)] == [2.0]


def test_what_could_not_be_brought_is_not_loaded(monkeypatch):
    """The bytes that the staging buffer had before may be those of an equal entry, with its checksum."""
    monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    pools = Pools("cpu")
    for index in range(2):
        pools.write(EntryKind.KV, index, 1.0 + index)
        pools.arena.carry_out([pools.unit(EntryKind.KV, index, index, key=bytes([index]))])
    *right, wrong = (a_load(load_id) for load_id in range(3))
    for load in right:  # both halves of the buffer hold an entry
        pools.arena.carry_out([pools.unit(EntryKind.KV, 5, 0, load, key=b"\0")])
        assert not pools.arena.loads.is_wrong(load)
    pools.write(EntryKind.KV, 6, 7.0)
    with monkeypatch.context() as broken:
        broken.setattr(entry_copies, "copy_ranges", raises)
        pools.arena.carry_out([pools.unit(EntryKind.KV, 6, 1, wrong, key=b"\1")])
    assert pools.arena.loads.is_wrong(wrong) and not pools.read(EntryKind.KV, 6)[0].any()


def raises(*_: object, **__: object) -> None:
    raise RuntimeError("the driver refuses")


def test_later_loads_do_not_fail_for_earlier_ones(monkeypatch):
    """The flags of loads are used again."""
    monkeypatch.setattr(loads, "_LOADS", 2)
    pools = Pools("cpu")
    pools.write(EntryKind.KV, 1, 3.0)
    for entry in (5, 6):
        pools.arena.carry_out([pools.unit(EntryKind.KV, 1, entry)])
    pools.arena.pages.memory[pools.unit(EntryKind.KV, 1, 5).pages[-1] * pools.page_bytes] ^= 2
    for load_id, entry in enumerate((5, 6, 6, 5)):
        load = a_load(load_id)
        pools.arena.carry_out([pools.unit(EntryKind.KV, 2, entry, load)])
        assert pools.arena.loads.is_wrong(load) == (entry == 5), load_id


@pytest.mark.parametrize("copy", ["gather", "to_pages"])
def test_a_store_that_fails_leaves_nothing_in_its_pages(copy, monkeypatch):
    """Some of the earlier entry there may be overwritten."""

    def fails(batch: Any, **options: Any) -> None:
        raise RuntimeError("the kernel is on fire")

    pools = Pools("cpu")
    pools.arena.carry_out([pools.unit(EntryKind.KV, 1, 5, key=b"old")])
    pools.arena.stores.stored = OnItsWay()
    monkeypatch.setattr(pools.arena.copies, copy, fails)
    pools.arena.carry_out([pools.unit(EntryKind.KV, 2, 5, key=b"new")])
    for load_id, key in enumerate((b"old", b"new")):
        load = a_load(load_id)
        pools.arena.carry_out([pools.unit(EntryKind.KV, 3, 5, load, key=key)])
        assert pools.arena.loads.is_wrong(load), key


def test_another_tag_is_noticed():
    pools = Pools("cpu")
    own = a_load(1), a_load(2)
    pools.arena.carry_out([pools.unit(EntryKind.KV, 1, 5), pools.unit(EntryKind.KV, 2, 5, own[0], key=b"other")])
    assert pools.arena.loads.is_wrong(own[0])
    pools.arena.carry_out([pools.unit(EntryKind.KV, 2, 7, own[1])])  # nothing was ever stored there
    assert pools.arena.loads.is_wrong(own[1])


@pytest.mark.parametrize("device", DEVICES)
def test_many_entries_of_one_batch_arrive(device, monkeypatch):
    """More than are launched at first, in pages that are apart."""
    monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    pools, count = Pools(device), 9
    for index in range(count):
        pools.write(EntryKind.KV, index, 5 + index)
    entries = random.Random(0).sample(range(0, PAGES, 2), count)
    pools.arena.carry_out([pools.unit(EntryKind.KV, index, entry) for index, entry in enumerate(entries)])
    pools.arena.stores.wait()
    for index in range(count):
        pools.write(EntryKind.KV, index, 0)
    load = a_load()
    units, staging = [pools.unit(EntryKind.KV, n, e, load) for n, e in enumerate(entries)], pools.arena.loads._staging
    (batch,) = pools.arena.copies.batches(units, staging)
    assert len(batch.units) == count > entry_copies.FIRST_RANGES
    pools.arena.carry_out(batch.units)
    pools.arena.loads.wait_for(load)
    assert not pools.arena.loads.is_wrong(load)
    assert [float(pools.read(EntryKind.KV, index)[0].unique()) for index in range(count)] == [*range(5, 5 + count)]


def test_neighbouring_pages_of_two_entries_are_no_neighbours_in_the_buffer(monkeypatch):
    """Entries that fill one of their two pages, as on a rank with fewer layers than others."""
    monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    kv = torch.arange(4 * 512).view(1, 4, 512).to(torch.uint8)
    kv += torch.arange(4, dtype=torch.uint8)[None, :, None]
    arena = HostArena(lambda: {EntryKind.KV: [kv]}, pages=8, page_bytes=512, pages_of={EntryKind.KV: 2}, device="cpu")
    tag = Tag(kind=EntryKind.KV, key=b"k", depth_tokens=1, epoch=0)
    load = a_load()
    for source, target, first, of_load in ((DEVICE, HOST, 0, None), (HOST, DEVICE, 2, load)):
        ends = {"source": source, "target": target, "tag": tag, "load": of_load}
        arena.carry_out([BlockTransfer(device_id=first + n, pages=(n, 4 + n), **ends) for n in range(2)])
    assert not arena.loads.is_wrong(load)
    assert torch.equal(kv[:, :2], kv[:, 2:]) and not torch.equal(kv[:, 0], kv[:, 1])


def test_a_stage_without_recurrent_layers_moves_nothing_of_states():
    pools = Pools("cpu", mamba_layers=0)
    load = a_load()
    pools.arena.carry_out([pools.unit(EntryKind.STATE, 1, 5), pools.unit(EntryKind.STATE, 2, 5, load)])
    assert not pools.arena.loads.is_wrong(load) and pools.arena.stores.bytes == pools.arena.loads.bytes == 0


def test_a_stage_without_recurrent_layers_waits_for_states_as_the_others_do():
    """Else its ranks would not join the others when they agree on a load. The empty entry is right when it arrives."""
    tier = SteadyTier()
    pools = Pools("cpu", mamba_layers=0, tier=tier)
    pools.give_to_tier(EntryKind.STATE, 1, 5, b"k")
    assert len(tier.entries) == 1
    check_that_it_arrives_late(pools, tier, EntryKind.STATE, 2, 6)
    pools.arena.close()


class Marks(HostQueue):
    """A queue that creates events, and records which ones are waited for. Negative: made in `ahead` or `beside`."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self._sign = 0, 1
        self.waited: list[int] = []

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        self._sign = -1
        yield
        self._sign = 1

    def ahead(self, buffer: int) -> contextlib.AbstractContextManager[None]:
        return self.beside()

    def mark(self) -> int:
        self.made += 1
        return self._sign * self.made

    def wait(self, mark: int) -> None:
        self.waited.append(mark)


def test_the_model_waits_until_its_targets_were_read(monkeypatch):
    """It waits for the last gather; once, and not for the copies to the host."""
    monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    monkeypatch.setattr(stores, "STAGING_BYTES", 1)  # a batch each
    pools = Pools("cpu")
    pools.arena.stores.queue = marks = Marks()
    pools.arena.stores.wait()
    assert marks.waited == []
    made = []
    monkeypatch.setattr(pools.arena.copies, "to_pages", lambda batch: made.append(marks.made))
    units = [pools.unit(EntryKind.KV, 1, 5), pools.unit(EntryKind.KV, 2, 6), pools.unit(EntryKind.STATE, 2, 7)]
    pools.arena.carry_out(units)
    pools.arena.stores.wait()
    pools.arena.stores.wait()
    assert made == [1, 2, 3] and marks.waited == [-3]


@pytest.mark.gpu(gib=1)
def test_a_write_right_after_a_store_does_not_spoil_it():
    """The stream of the stores is slow. A write by the model must wait for it."""
    pools = Pools("cuda", 1000)
    for kind, index in ((EntryKind.KV, 1), (EntryKind.STATE, 2)):
        pools.write(kind, index, 3.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(pools.arena.stores.queue._stream):
        torch.cuda._sleep(200_000_000)
    pools.arena.carry_out([pools.unit(EntryKind.KV, 1, 5), pools.unit(EntryKind.STATE, 2, 6)])
    pools.arena.stores.wait()
    for kind, index in ((EntryKind.KV, 1), (EntryKind.STATE, 2)):
        pools.write(kind, index, 7.0)
    load = a_load()
    pools.arena.carry_out([pools.unit(EntryKind.KV, 3, 5, load), pools.unit(EntryKind.STATE, 4, 6, load)])
    pools.arena.loads.wait_for(load)
    assert not pools.arena.loads.is_wrong(load)
    for kind, index, first in (
        (EntryKind.KV, 1, 7.0),
        (EntryKind.STATE, 2, 7.0),
        (EntryKind.KV, 3, 3.0),
        (EntryKind.STATE, 4, 3.0),
    ):
        for number, tensor in enumerate(pools.read(kind, index)):
            assert torch.all(tensor == first + number)


def test_memory_to_pin():
    """All of it can be used, as words too; it begins with a whole huge page, and lives as long as a part of it does."""
    memory = allocate(3 * 4096 + 512)
    assert memory.shape == (3 * 4096 + 512,) and memory.data_ptr() % 2**21 == 0
    assert not memory.any()
    words = memory.view(-1, 512)[:, 256:].view(torch.int64)
    words.fill_(-1)
    del memory
    gc.collect()
    assert words.sum().item() == -words.numel()


def test_memory_that_the_system_does_not_have():
    with pytest.raises(MemoryError):
        allocate(2**60)


@pytest.mark.gpu(gib=1)
def test_the_end_of_an_arena_unpins_its_memory():
    pools = Pools("cuda")
    memory, device = pools.arena.pages.memory, torch.device("cuda")
    with pytest.raises(RuntimeError):
        pin(memory, device)
    assert torch.ones(3, device=device).sum().item() == 3  # the error is gone with its exception
    del pools
    gc.collect()
    pin(memory, device)
    unpin(memory, device)


@pytest.mark.gpu(gib=1)
def test_an_arena_that_ends_while_a_graph_is_captured_unpins_later():
    memory, device, ones = torch.empty(1 << 20, dtype=torch.uint8), torch.device("cuda"), torch.ones(3, device="cuda")
    pin(memory, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twos = ones + 1
        unpin(memory, device)
    graph.replay()
    assert twos.sum().item() == 6
    pin(memory, device)
    unpin(memory, device)


@pytest.mark.parametrize(
    ("kv_bytes", "state_bytes"),
    [(4 << 20, 27 << 20), (4 << 20, 4 << 20), (4 << 20, (4 << 20) + 512), (0, 1 << 20), (1 << 20, 0), (300, 70_000)],
)
def test_pages_waste_little(kv_bytes, state_bytes):
    page = choose_page_bytes([kv_bytes, state_bytes])
    assert page % 512 == 0
    for size in filter(None, (kv_bytes, state_bytes)):
        assert -(-size // page) * page <= max(1.15 * size, size + 512)
        assert -(-size // page) <= 300


@pytest.mark.gpu(gib=1)
def test_the_cpu_does_not_wait_for_transfers():
    pools, load = Pools("cuda", 1000), a_load()
    ids = [(EntryKind.KV, 1, 5), (EntryKind.STATE, 2, 6)]
    stores, loads = ([pools.unit(*entry, of_load) for entry in ids] for of_load in (None, load))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pools.arena.carry_out(stores)
        pools.arena.stores.wait()
        pools.arena.carry_out(loads)
        pools.arena.loads.wait_for(load)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not pools.arena.loads.is_wrong(load)
