"""The arena alone: what is stored comes back bit by bit, whatever is written in between. On a GPU beside a busy stream."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.tiers import background, entry_copies, loads, shared_tier_moves, stores
from megatron_hybrid_prefix.tiers.arena import HostArena
from megatron_hybrid_prefix.tiers.base import Entry, Filling, SharedTier, Tier
from megatron_hybrid_prefix.tiers.pinned import allocate, choose_page_bytes, pin, unpin
from megatron_hybrid_prefix.tiers.queue import HostQueue
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, EntryKind, Tag
from tests.harness.limits import HANG_S, wait_until
from tests.harness.plugins.dictionary_tier import DictionaryTier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCKS, SLOTS, PAGES = 12, 10, 60


class Pools:
    """KV and two components of a state on a device, and an arena for them."""

    def __init__(
        self,
        device: str,
        scale: int = 1,
        *,
        mamba_layers: int = 3,
        behind: Tier | None = None,
    ) -> None:
        kv = torch.zeros(4, BLOCKS, 6 * scale, 2, dtype=torch.bfloat16, device=device)
        conv = torch.zeros(mamba_layers, SLOTS, 5 * scale, 3, dtype=torch.bfloat16, device=device)
        ssm = torch.zeros(mamba_layers, SLOTS, 7 * scale, dtype=torch.float32, device=device)
        self.tensors = {EntryKind.KV: [kv], EntryKind.STATE: [conv, ssm]}
        sizes = {k: sum(t[:, 0].numel() * t.element_size() for t in ts) for k, ts in self.tensors.items()}
        self.page_bytes = choose_page_bytes(sizes.values())
        self.pages_of = {kind: max(1, -(-size // self.page_bytes)) for kind, size in sizes.items()}
        self.arena = HostArena(
            lambda: self.tensors,
            pages=PAGES * max(self.pages_of.values()),
            page_bytes=self.page_bytes,
            pages_of=self.pages_of,
            device=device,
            behind=behind,
        )

    def write(self, kind: EntryKind, index: int, value: float) -> None:
        for number, tensor in enumerate(self.tensors[kind]):
            tensor[:, index] = value + number

    def read(self, kind: EntryKind, index: int) -> list[torch.Tensor]:
        return [tensor[:, index].cpu() for tensor in self.tensors[kind]]

    def unit(
        self, kind: EntryKind, index: int, entry: int, load_id: int | None = None, key: bytes = b"k"
    ) -> BlockTransfer:
        count = max(self.pages_of.values())
        pages = range(entry * count, entry * count + self.pages_of[kind])
        # Several pages are not contiguous: an entry is stored wherever there is room.
        tag = Tag(kind=kind, key=key, depth_tokens=1, epoch=0)
        return BlockTransfer(
            source=DEVICE if load_id is None else HOST,
            target=HOST if load_id is None else DEVICE,
            device_id=index,
            pages=tuple(reversed(pages)),
            tag=tag,
            load_id=load_id,
        )

    def behind_unit(self, kind: EntryKind, entry: int, key: bytes, *, take: bool) -> BlockTransfer:
        """A transfer from the host to the tier behind it, or back."""
        unit = self.unit(kind, 0, entry, key=key)
        source, target = (HOST, "behind") if take else ("behind", HOST)
        return unit._replace(source=source, target=target, device_id=None)


class OnItsWay:
    """The mark of a store."""

    def query(self) -> bool:
        return False


class AnyOrder:
    """Random moves and writes over slow streams, and what each place on the device must hold.

    Staging buffers are small, so that they are reused often.
    """

    def __init__(self, device: str, seed: int, monkeypatch: pytest.MonkeyPatch, behind: Tier | None = None) -> None:
        scale = 1 if device == "cpu" else 20_000
        monkeypatch.setattr(stores, "FIRST_BYTES", 30 * scale * 8)
        if seed % 2:  # by the copy engines
            monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
        monkeypatch.setattr(stores, "STAGING_BYTES", 3 * 30 * scale * 8)
        monkeypatch.setattr(loads, "STAGING_BYTES", 2 * 30 * scale * 8)
        self.pools = Pools(device, scale, behind=behind)
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
        arena.wait_for_stores()

    def write_some(self, value: float) -> None:
        for _ in range(self.dice.randint(0, 4)):
            self._write(self.dice.choice(self.places), value)
        if self._delays.random() < 0.5:  # else what needs the copies launches them
            self.pools.arena.send()

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
    load_id = 0
    for step in range(40):
        units = []
        for _ in range(dice.randint(0, 12)):
            if on_host and dice.random() < 0.4:
                entry = dice.choice(sorted(on_host))
                kind, value = on_host[entry]
                index = dice.randrange(BLOCKS if kind == EntryKind.KV else SLOTS)
                units.append(pools.unit(kind, index, entry, load_id))
                on_device[kind, index] = value
            else:
                kind, index = dice.choice(places)
                entry = dice.randrange(PAGES)
                units.append(pools.unit(kind, index, entry))
                on_host[entry] = (kind, on_device[kind, index])
        world.carry_out(units)
        if any(unit.load_id is not None for unit in units):
            if dice.random() < 0.7:
                pools.arena.wait_for_load(load_id)
                assert not pools.arena.has_failed(load_id)
            else:
                pools.arena.wait_for_load(load_id)
                pools.arena.forget(load_id)
            load_id += 1
        world.write_some(1000 + step)
    world.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_moves_with_a_tier_behind(device, seed, monkeypatch):
    """The same, with entries that move from the host to a dictionary and come back into other pages."""
    world = AnyOrder(device, seed, monkeypatch, behind=DictionaryTier())
    pools, dice, places, on_device = world.pools, world.dice, world.places, world.on_device
    on_host: dict[int, tuple[EntryKind, float]] = {}
    taken: set[tuple[EntryKind, float]] = set()
    for step in range(40):
        units = []
        for _ in range(dice.randint(0, 12)):
            what, entry = dice.choice(["store", "load", "take", "give"]), dice.randrange(PAGES)
            kind, index = dice.choice(places)
            if what == "store":
                on_host[entry] = (kind, on_device[kind, index])
                units.append(pools.unit(kind, index, entry, key=str(on_device[kind, index]).encode()))
            elif what == "give" and taken:
                on_host[entry] = kind, value = dice.choice(sorted(taken))
                units.append(pools.behind_unit(kind, entry, str(value).encode(), take=False))
            elif on_host:
                entry = dice.choice(sorted(on_host))
                kind, value = on_host[entry]
                if what == "take":
                    units.append(pools.behind_unit(kind, entry, str(value).encode(), take=True))
                    taken.add((kind, value))
                else:
                    index = dice.randrange(BLOCKS if kind == EntryKind.KV else SLOTS)
                    units.append(pools.unit(kind, index, entry, step, key=str(value).encode()))
                    on_device[kind, index] = value
        world.carry_out(units)
        pools.arena.wait_for_load(step)
        assert pools.arena.has_failed(step) == all(unit.load_id != step for unit in units)  # true of one that never was
        world.write_some(1000 + step)
    world.check()
    assert pools.arena.behind_stats.bytes_stored > 0 < pools.arena.behind_stats.bytes_loaded


class SlowFilling:
    """Entries that a `SlowTier` reads when it is waited for."""

    def __init__(self, tier: SlowTier, *work: Any) -> None:
        self._tier, self._work = tier, work

    def wait(self) -> list[int | None]:
        return [self._tier.read(tag, views) for tag, views in zip(*self._work, strict=True)]

    def close(self) -> None: ...


class SlowTier(SharedTier):
    """A dictionary whose threads take their time, and lose some entries."""

    threads = 2

    def __init__(self, seed: int, *, fills: bool = False) -> None:
        self.fills = fills
        self.entries: dict[tuple[EntryKind, bytes], tuple[bytes, int]] = {}
        self._dice = random.Random(seed)

    def contains(self, kind: EntryKind, key: bytes) -> bool:
        return (kind, key) in self.entries

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        for tag, data, checksum in entries:
            time.sleep(self._dice.choice([0, 0.001]))
            self.entries[tag.kind, tag.key] = bytes(data), checksum
        return [True] * len(entries)

    def get(self, tags: Sequence[Tag], buffers: Sequence[memoryview]) -> list[int | None]:
        return [self.read(tag, [buffer]) for tag, buffer in zip(tags, buffers, strict=True)]

    def fill(self, tags: Sequence[Tag], buffers: Sequence[Sequence[memoryview]]) -> Filling:
        assert self.fills
        return SlowFilling(self, tags, buffers)

    def read(self, tag: Tag, views: Sequence[memoryview]) -> int | None:
        data, checksum = self.entries.get((tag.kind, tag.key), (b"", 0))
        if len(data) != sum(map(len, views)) or self._dice.random() < 0.05:
            return None
        for view in views:
            time.sleep(self._dice.choice([0, 0.001]))
            view[:], data = data[: len(view)], data[len(view) :]
        return checksum

    def remove(self, tags: Iterable[Tag]) -> None: ...

    def clear(self) -> None: ...


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_moves_with_a_shared_tier(device, seed, fills, monkeypatch):
    """Pages are given away while threads read and write them. What arrives is what was stored, or it does not arrive."""
    tier = SlowTier(seed, fills=fills)
    world = AnyOrder(device, seed, monkeypatch, behind=tier)
    monkeypatch.setattr(
        shared_tier_moves, "GROUP_BYTES", 1 if seed % 2 else 1000
    )  # a group for each entry, or for some
    pools, dice, places, on_device = world.pools, world.dice, world.places, world.on_device
    arena, on_host, taken, ends = pools.arena, {}, set(), Counter()
    refused: set[int] = set()  # pages of stores that were not done, because they were being filled
    overwrite = arena._shared.overwrite

    def noted(run: Sequence[BlockTransfer]) -> list[BlockTransfer]:
        done = overwrite(run)
        for unit in run:
            (refused.difference_update if unit in done else refused.update)(unit.pages)
        return done

    monkeypatch.setattr(arena._shared, "overwrite", noted)
    for step in range(60):
        units, loads = [], {}
        for _ in range(dice.randint(0, 12)):
            what, entry, place = dice.choice(["store", "take", "give"]), dice.randrange(8), dice.choice(places)
            if what == "store":
                on_host[entry] = (place[0], on_device[place])
                units.append(pools.unit(*place, entry, key=str(on_device[place]).encode()))
            elif what == "give" and taken:
                on_host[entry] = kind, value = dice.choice(sorted(taken))
                units.append(pools.behind_unit(kind, entry, str(value).encode(), take=False))
            elif what == "take" and entry in on_host:
                kind, value = on_host[entry]
                units.append(pools.behind_unit(kind, entry, str(value).encode(), take=True))
                taken.add((kind, value))
        for entry in dice.sample(sorted(on_host), min(len(on_host), dice.randint(0, 2))):
            kind, value = on_host[entry]
            index = dice.randrange(BLOCKS if kind == EntryKind.KV else SLOTS)
            if (kind, index) not in loads:
                units.append(pools.unit(kind, index, entry, step, key=str(value).encode()))
                loads[kind, index] = value, entry
        world.carry_out(units)
        arrived = arena.fetched(step, dice.choice([0.0, HANG_S])) if arena.is_put_off(step) else True
        if arrived and arena.is_put_off(step):
            arena.run_put_off(step)
            ends["waited"] += 1
        failed = False
        if arrived:
            arena.wait_for_load(step)
            failed = bool(loads) and arena.has_failed(step)
            assert not failed or any(not refused.isdisjoint(unit.pages) for unit in units if unit.load_id == step)
        if arrived and not failed:
            on_device |= {place: value for place, (value, _) in loads.items()}
        else:
            ends["refused" if failed else "late" if arrived is None else "missing"] += 1
            arena.drop_put_off(step)
            for place in loads:  # part of it may have been loaded; what the model writes now comes after that
                world._write(place, 2000 + step)
            for _, entry in loads.values():  # the cache drops what did not arrive
                del on_host[entry]
        world.write_some(1000 + step)
    world.check()
    assert fills or not ends["refused"]
    # However long the threads took before: once they have done what they can, an entry comes back.
    tier._dice = Never()
    assert arena.drain(HANG_S)
    first, second = (pools.unit(EntryKind.KV, 0, entry, key=b"end") for entry in (0, 1))
    wait_until(lambda: not arena._shared._background.overwrite([*first.pages, *second.pages]), "no page is filled")
    world.carry_out([first, pools.behind_unit(EntryKind.KV, 0, b"end", take=True)])
    assert arena.drain(HANG_S) and arena.behind_stats.bytes_stored > 0
    world.carry_out(
        [
            pools.behind_unit(EntryKind.KV, 1, b"end", take=False),
            pools.unit(EntryKind.KV, 1, 1, load_id=1000, key=b"end"),
        ]
    )
    assert arena.fetched(1000, HANG_S)
    arena.run_put_off(1000)
    arena.wait_for_load(1000)
    assert not arena.has_failed(1000)
    on_device[EntryKind.KV, 1] = on_device[EntryKind.KV, 0]
    world.check()
    arena.close()


def test_a_load_whose_page_went_to_another_entry_is_a_miss(monkeypatch):
    """Two requests waited for one entry. It was late for the first, so its page went to another entry."""
    tier = SlowTier(0)
    monkeypatch.setattr(tier, "_dice", Never())
    pools = Pools("cpu", behind=tier)
    for key in (b"a", b"b"):
        pools.arena.carry_out([pools.unit(EntryKind.KV, 0, 0, key=key)])
        pools.arena.carry_out([pools.behind_unit(EntryKind.KV, 0, key, take=True)])
        assert pools.arena.drain(HANG_S)
    fetch = [pools.behind_unit(EntryKind.KV, 1, key, take=False) for key in (b"a", b"b")]
    pools.arena.carry_out([fetch[0], pools.unit(EntryKind.KV, 3, 1, load_id=7, key=b"a"), fetch[1]])
    assert pools.arena.is_put_off(7)
    assert pools.arena.fetched(7, HANG_S) is False
    pools.arena.drop_put_off(7)
    pools.arena.carry_out([pools.unit(EntryKind.KV, 3, 1, load_id=8, key=b"b")])
    assert pools.arena.fetched(8, HANG_S) is True
    pools.arena.run_put_off(8)
    assert not pools.arena.has_failed(8)


def test_a_load_that_is_put_off_also_needs_what_was_just_stored(monkeypatch):
    """Its copy to the host need not be launched yet."""
    tier = SlowTier(0)
    monkeypatch.setattr(tier, "_dice", Never())
    pools = Pools("cpu", behind=tier)
    for index in range(2):
        pools.write(EntryKind.KV, index, 1.0 + index)
    pools.arena.carry_out([pools.unit(EntryKind.KV, 0, 0), pools.behind_unit(EntryKind.KV, 0, b"k", take=True)])
    assert pools.arena.drain(HANG_S)
    pools.arena.carry_out([pools.behind_unit(EntryKind.KV, 1, b"k", take=False)])
    load = [pools.unit(EntryKind.KV, 3, 1, load_id=7), pools.unit(EntryKind.KV, 4, 2, load_id=7, key=b"new")]
    pools.arena.carry_out([pools.unit(EntryKind.KV, 1, 2, key=b"new"), *load], send=False)
    assert pools.arena.is_put_off(7) and pools.arena.fetched(7, HANG_S)
    pools.arena.run_put_off(7)
    assert not pools.arena.has_failed(7)
    assert [pools.read(EntryKind.KV, index)[0].unique().tolist() for index in (3, 4)] == [[1.0], [2.0]]


@pytest.mark.parametrize("end", ["arrives", "dropped", "dropped before"])
def test_what_has_arrived_is_loaded_while_the_rest_is_read(end, monkeypatch):
    """If the load is given up, the model waits for what was launched of it."""
    monkeypatch.setattr(shared_tier_moves, "GROUP_BYTES", 1)
    tier = SlowTier(0)
    monkeypatch.setattr(tier, "_dice", Never())
    pools = Pools("cpu", behind=tier)
    for index, key in enumerate((b"a", b"b")):
        pools.write(EntryKind.KV, index, 1.0 + index)
        store = [
            pools.unit(EntryKind.KV, index, index, key=key),
            pools.behind_unit(EntryKind.KV, index, key, take=True),
        ]
        pools.arena.carry_out(store)
    assert pools.arena.drain(HANG_S)
    may_read, read, waits = threading.Event(), tier.read, []
    slow = {b"b"} if end != "dropped before" else {b"a", b"b"}

    def slow_read(tag: Tag, views: Sequence[memoryview]) -> int | None:
        assert tag.key not in slow or may_read.wait(HANG_S)
        return read(tag, views)

    monkeypatch.setattr(tier, "read", slow_read)
    monkeypatch.setattr(pools.arena.loads.queue, "wait", waits.append)
    fetch = [pools.behind_unit(EntryKind.KV, 2 + index, key, take=False) for index, key in enumerate((b"a", b"b"))]
    load = [pools.unit(EntryKind.KV, 5 + index, 2 + index, 7, key=key) for index, key in enumerate((b"a", b"b"))]
    pools.arena.carry_out([*fetch, *load])
    expected = [[0.0] if end == "dropped before" else [1.0], [0.0]]

    def is_loaded() -> bool:
        assert pools.arena.fetched(7, 0.1) is None
        return [pools.read(EntryKind.KV, index)[0].unique().tolist() for index in (5, 6)] == expected

    wait_until(is_loaded, "what has arrived is loaded, and nothing else")
    if end == "arrives":
        may_read.set()
        assert pools.arena.fetched(7, HANG_S) is True
        pools.arena.run_put_off(7)
        assert not pools.arena.has_failed(7) and pools.read(EntryKind.KV, 6)[0].unique().tolist() == [2.0]
    else:
        pools.arena.drop_put_off(7)
        assert len(waits) == (end == "dropped")
        may_read.set()
    pools.arena.close()


def test_a_wrong_entry_of_any_group_fails_the_load(monkeypatch):
    monkeypatch.setattr(shared_tier_moves, "GROUP_BYTES", 1)
    tier = SlowTier(0)
    monkeypatch.setattr(tier, "_dice", Never())
    pools = Pools("cpu", behind=tier)
    keys = (b"a", b"b", b"c")
    for load_id, wrong in enumerate(keys):
        tier.entries.clear()
        for index, key in enumerate(keys):
            pools.arena.carry_out([pools.unit(EntryKind.KV, index, index, key=key)])
            pools.arena.carry_out([pools.behind_unit(EntryKind.KV, index, key, take=True)])
            assert pools.arena.drain(HANG_S)
        data, checksum = tier.entries[EntryKind.KV, wrong]
        tier.entries[EntryKind.KV, wrong] = data, checksum ^ 1
        units = [pools.behind_unit(EntryKind.KV, 3 + index, key, take=False) for index, key in enumerate(keys)]
        units += [pools.unit(EntryKind.KV, 5 + index, 3 + index, load_id, key=key) for index, key in enumerate(keys)]
        pools.arena.carry_out(units)
        assert pools.arena.fetched(load_id, HANG_S)
        pools.arena.run_put_off(load_id)
        assert pools.arena.has_failed(load_id), wrong
    pools.arena.close()


def test_the_checksum_of_an_entry_from_behind_goes_back_with_it(monkeypatch):
    """Also if an earlier store brings older checksums to the host after the entry has arrived there."""
    tier = SlowTier(0)
    monkeypatch.setattr(tier, "_dice", Never())
    pools = Pools("cpu", behind=tier)
    pools.write(EntryKind.KV, 0, 3.0)
    pools.arena.carry_out([pools.unit(EntryKind.KV, 0, 0), pools.behind_unit(EntryKind.KV, 0, b"k", take=True)])
    assert pools.arena.drain(HANG_S)
    stored = dict(tier.entries)
    pools.arena.carry_out([pools.behind_unit(EntryKind.KV, 1, b"k", take=False)])
    pools.arena.carry_out([pools.unit(EntryKind.KV, 3, 1, load_id=7)])
    assert pools.arena.fetched(7, HANG_S)
    pools.arena.run_put_off(7)
    monkeypatch.setattr(
        pools.arena.contents, "sums_seen", torch.zeros_like(pools.arena.contents.sums)
    )  # as of before it arrived
    tier.entries.clear()
    pools.arena.carry_out([pools.behind_unit(EntryKind.KV, 1, b"k", take=True)])
    assert pools.arena.drain(HANG_S) and tier.entries == stored


def test_a_page_that_is_being_filled_takes_nothing_else(monkeypatch, caplog):
    """The disk hangs, and the page's load was given up. What goes there is lost, and nothing waits for the disk."""
    tier = SlowTier(0, fills=True)
    monkeypatch.setattr(tier, "_dice", Never())
    pools = Pools("cpu", behind=tier)
    arena, read, begun, answers = pools.arena, tier.read, threading.Event(), threading.Event()
    pools.write(EntryKind.KV, 0, 3.0)
    arena.carry_out([pools.unit(EntryKind.KV, 0, 0, key=b"a"), pools.behind_unit(EntryKind.KV, 0, b"a", take=True)])
    assert arena.drain(HANG_S)

    def hangs(tag: Tag, views: Sequence[memoryview]) -> int | None:
        begun.set()
        assert answers.wait(HANG_S)
        return read(tag, views)

    monkeypatch.setattr(tier, "read", hangs)
    arena.carry_out([pools.behind_unit(EntryKind.KV, 1, b"a", take=False)])
    arena.carry_out([pools.unit(EntryKind.KV, 3, 1, load_id=7, key=b"a")])
    assert begun.wait(HANG_S) and arena.fetched(7, 0.01) is None
    arena.drop_put_off(7)
    store = pools.unit(EntryKind.KV, 0, 1, key=b"b")
    for _ in range(2):  # the page stays taken
        arena.carry_out([store, pools.unit(EntryKind.KV, 0, 2, key=b"c")])
    assert "have no place" in caplog.text
    for load_id, (entry, key) in enumerate([(1, b"b"), (2, b"c")], start=8):
        arena.carry_out([pools.unit(EntryKind.KV, 4, entry, load_id=load_id, key=key)])
        assert arena.has_failed(load_id) == (key == b"b")
    arena.carry_out([pools.behind_unit(EntryKind.KV, 1, b"a", take=False)])  # put off as on ranks where nothing hangs
    arena.carry_out([pools.unit(EntryKind.KV, 3, 1, load_id=10, key=b"a")])
    assert arena.is_put_off(10)
    answers.set()
    assert arena.fetched(10, HANG_S) is False
    arena.drop_put_off(10)
    wait_until(lambda: not arena._shared._background.overwrite(store.pages), "the disk answers")
    arena.carry_out([store, pools.unit(EntryKind.KV, 5, 1, load_id=11, key=b"b")])
    assert not arena.has_failed(11) and pools.read(EntryKind.KV, 5)[0].unique().tolist() == [3.0]
    arena.close()


class Never(random.Random):
    """Dice by which nothing is slow or lost."""

    def random(self) -> float:
        return 0.9

    def choice(self, values: Sequence[float]) -> float:
        return values[0]


def test_a_process_that_ends_writes_what_is_left(monkeypatch):
    tier = SlowTier(0)
    pools, may_write, put = Pools("cpu", behind=tier), threading.Event(), tier.put
    monkeypatch.setattr(tier, "put", lambda entries: may_write.wait(HANG_S) and put(entries))
    for index in range(4):
        key = str(index).encode()
        pools.arena.carry_out(
            [pools.unit(EntryKind.KV, index, index, key=key), pools.behind_unit(EntryKind.KV, index, key, take=True)]
        )
    threading.Timer(0.05, may_write.set).start()
    monkeypatch.setattr(tier, "wait_s", HANG_S, raising=False)
    monkeypatch.setattr(background, "_END_S", HANG_S)
    pools.arena._shared._background.finish()
    assert len(tier.entries) == 4
    assert not any(thread.is_alive() for thread in pools.arena._shared._background._threads)


def test_a_process_that_ends_does_not_wait_for_a_disk_that_hangs(monkeypatch):
    tier = SlowTier(0)
    pools, never = Pools("cpu", behind=tier), threading.Event()
    monkeypatch.setattr(tier, "put", lambda entries: never.wait(HANG_S) or [False])
    monkeypatch.setattr(tier, "wait_s", 0.01, raising=False)
    monkeypatch.setattr(background, "_END_S", 0.01)
    units = [pools.unit(EntryKind.KV, 1, 1, key=b"k"), pools.behind_unit(EntryKind.KV, 1, b"k", take=True)]
    pools.arena.carry_out(units)
    pools.arena._shared._background.finish()
    assert tier.entries == {}
    never.set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", list(EntryKind))
def test_a_wrong_bit_behind_the_host_is_noticed(device, kind):
    behind = DictionaryTier()
    pools = Pools(device, behind=behind)
    for index, key in ((1, b"a"), (2, b"b")):
        pools.write(kind, index, 3.0 * index)
        pools.arena.carry_out([pools.unit(kind, index, index, key=key), pools.behind_unit(kind, index, key, take=True)])
    behind.entries[kind, b"a"][1][1] ^= 2
    for load_id, key in enumerate((b"a", b"b", b"c")):
        back = pools.behind_unit(kind, 7, key, take=False)
        pools.arena.carry_out([back, pools.unit(kind, 4, 7, load_id, key=key)])
        pools.arena.wait_for_load(load_id)
    assert [pools.arena.has_failed(load_id) for load_id in range(3)] == [True, False, True]


@pytest.mark.parametrize("device", DEVICES)
def test_the_later_of_two_moves_to_one_place_wins(device):
    """An entry replaced at once by another one in the same pages; a block that is loaded twice."""
    pools = Pools(device)
    for index in range(BLOCKS):
        pools.write(EntryKind.KV, index, index)
    pools.arena.carry_out(
        [pools.unit(EntryKind.KV, index, 5) for index in (3, 4, 1)] + [pools.unit(EntryKind.KV, 6, 7)]
    )
    units = [pools.unit(EntryKind.KV, 2, entry, load_id=0) for entry in (7, 5)]
    pools.arena.carry_out([*units, pools.unit(EntryKind.KV, 8, 7, load_id=0)])
    pools.arena.wait_for_load(0)
    assert not pools.arena.has_failed(0)
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
    pools.arena.memory[unit.pages[-1] * pools.page_bytes + 1] ^= 2
    pools.arena.carry_out([pools.unit(kind, 2, 5, load_id=1), pools.unit(kind, 3, 5, load_id=2)])
    pools.arena.wait_for_load(1)
    assert pools.arena.has_failed(1) and pools.arena.has_failed(2)
    pools.arena.carry_out([pools.unit(kind, 1, 5), pools.unit(kind, 2, 5, load_id=3)])
    assert not pools.arena.has_failed(3)


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
        pools.arena.memory[pools.unit(kind, 1, 1).pages[-1] * pools.page_bytes] ^= 2
    wrong = pools.unit(kind, 5, 1, load_id=1, key=b"other" if fault == "tag" else b"k")
    copies, name = pools.arena._copies, "to_staging" if fault == "copy engine" else "to_places"
    original = getattr(copies, name)

    def fails(batch, staging):
        if wrong in batch.units:
            raise RuntimeError("the copy engine is on fire")
        original(batch, staging)

    if fault.startswith("copy"):
        monkeypatch.setattr(copies, name, fails)
    # Before it another wrong entry goes to the place of a right one, which is loaded later.
    pools.arena.carry_out([wrong._replace(device_id=6), wrong])
    pools.arena.carry_out([pools.unit(kind, 6, 2, load_id=2)])
    for load_id in (1, 2):
        pools.arena.wait_for_load(load_id)
    assert [pools.arena.has_failed(load_id) for load_id in (1, 2)] == [True, False]
    values = [{float(value) for value in tensor.unique()} for index in (5, 6) for tensor in pools.read(kind, index)]
    parts = len(pools.tensors[kind])
    assert values == [{0.0}] * parts + [{5.0 + number} for number in range(parts)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["batches", "upload", "to_places", "zero_wrong"])
def test_a_load_whose_launch_raises_is_wrong(device, name, monkeypatch):
    """Also if another part of it was launched before; other loads are right."""
    pools = Pools(device)
    for index in (1, 2):
        pools.write(EntryKind.KV, index, index)
    pools.arena.carry_out([pools.unit(EntryKind.KV, index, index) for index in (1, 2)])
    pools.arena.carry_out([pools.unit(EntryKind.KV, 5, 1, load_id=1), pools.unit(EntryKind.KV, 6, 1, load_id=2)])

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise SystemError("no memory for a launch")  # of no kind that counts as a failed copy

    with monkeypatch.context() as patch, pytest.raises(SystemError):
        patch.setattr(pools.arena._copies, name, fails)
        pools.arena.carry_out([pools.unit(EntryKind.KV, 7, 2, load_id=load_id) for load_id in (1, 3)])
    assert [pools.arena.has_failed(load_id) for load_id in (1, 2, 3, 4)] == [True, False, True, True]


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_for_a_wrong_entry_do_not_hit_a_later_one_in_its_place(device):
    """Both in one launch: the block went to another request, whose load is right."""
    pools = Pools(device)
    for index in (1, 2):
        pools.write(EntryKind.KV, index, index)
    pools.arena.carry_out([pools.unit(EntryKind.KV, index, index) for index in (1, 2)])
    pools.arena.finish()
    pools.arena.memory[pools.unit(EntryKind.KV, 1, 1).pages[0] * pools.page_bytes] ^= 2
    pools.arena.carry_out([pools.unit(EntryKind.KV, 6, index, load_id=index) for index in (1, 2)])
    for load_id in (1, 2):
        pools.arena.wait_for_load(load_id)
    assert [pools.arena.has_failed(load_id) for load_id in (1, 2)] == [True, False]
    assert [float(tensor.unique()) for tensor in pools.read(EntryKind.KV, 6)] == [2.0]


def test_what_could_not_be_brought_is_not_loaded(monkeypatch):
    """The bytes that the staging buffer had before may be those of an equal entry, with its checksum."""
    monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    pools = Pools("cpu")
    for index in range(2):
        pools.write(EntryKind.KV, index, 1.0 + index)
        pools.arena.carry_out([pools.unit(EntryKind.KV, index, index, key=bytes([index]))])
    for load_id in range(2):  # both halves of the buffer hold an entry
        pools.arena.carry_out([pools.unit(EntryKind.KV, 5, 0, load_id=load_id, key=b"\0")])
        assert not pools.arena.has_failed(load_id)
    pools.write(EntryKind.KV, 6, 7.0)
    with monkeypatch.context() as broken:
        broken.setattr(entry_copies, "copy_ranges", raises)
        pools.arena.carry_out([pools.unit(EntryKind.KV, 6, 1, load_id=2, key=b"\1")])
    assert pools.arena.has_failed(2) and not pools.read(EntryKind.KV, 6)[0].any()


def raises(*_: object, **__: object) -> None:
    raise RuntimeError("the driver refuses")


def test_later_loads_do_not_fail_for_earlier_ones(monkeypatch):
    """The flags of loads are used again."""
    monkeypatch.setattr(loads, "_LOADS", 2)
    pools = Pools("cpu")
    pools.write(EntryKind.KV, 1, 3.0)
    for entry in (5, 6):
        pools.arena.carry_out([pools.unit(EntryKind.KV, 1, entry)])
    pools.arena.memory[pools.unit(EntryKind.KV, 1, 5).pages[-1] * pools.page_bytes] ^= 2
    for load_id, entry in enumerate((5, 6, 6, 5)):
        pools.arena.carry_out([pools.unit(EntryKind.KV, 2, entry, load_id=load_id)])
        assert pools.arena.has_failed(load_id) == (entry == 5), load_id


@pytest.mark.parametrize("copy", ["_gather", "_store"])
def test_a_store_that_fails_leaves_nothing_in_its_pages(copy, monkeypatch):
    """Some of the earlier entry there may be overwritten."""

    def fails(batch: Any, **options: Any) -> None:
        raise RuntimeError("the kernel is on fire")

    pools = Pools("cpu")
    pools.arena.carry_out([pools.unit(EntryKind.KV, 1, 5, key=b"old")])
    pools.arena.stores.stored = OnItsWay()
    monkeypatch.setattr(pools.arena.stores, copy, fails)
    pools.arena.carry_out([pools.unit(EntryKind.KV, 2, 5, key=b"new")])
    for load_id, key in enumerate((b"old", b"new")):
        pools.arena.carry_out([pools.unit(EntryKind.KV, 3, 5, load_id, key=key)])
        assert pools.arena.has_failed(load_id), key


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fails", ["nothing", "straight_to_pages", "the second straight_to_pages", "sum"])
def test_what_goes_straight_to_the_host_arrives_or_is_not_there(device, fails, monkeypatch):
    """What the engines refuse is copied as the others are. A checksum that could not be computed is not taken for one."""
    monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    pools = Pools(device)
    entries = [(kind, index) for kind in EntryKind for index in (1, 2)]
    for kind, index in entries:
        pools.write(kind, index, 3.0 + index)
    ways: list[str] = []
    for owner, name in (
        (pools.arena._copies, "straight_to_pages"),
        (pools.arena._copies, "sum"),
        (pools.arena.stores, "_store"),
    ):
        original = getattr(owner, name)

        def run(batch: Any, name: str = name, original: Any = original) -> None:
            ways.append(name)
            if fails in (name, f"the second {name}") and ways.count(name) == fails.startswith("the second") + 1:
                raise RuntimeError("on fire")
            original(batch)

        monkeypatch.setattr(owner, name, run)
    pools.arena.carry_out([pools.unit(kind, index, 2 * index + kind) for kind, index in entries])
    pools.arena.wait_for_stores()
    for kind, index in entries:
        pools.write(kind, index, 9.0)
    assert (
        ways
        == {
            "nothing": ["straight_to_pages", "straight_to_pages", "sum", "sum"],
            "straight_to_pages": ["straight_to_pages", "_store", "_store"],
            "the second straight_to_pages": ["straight_to_pages", "straight_to_pages", "_store", "sum"],
            "sum": ["straight_to_pages", "straight_to_pages", "sum", "sum"],
        }[fails]
    )
    for load_id, (kind, index) in enumerate(entries):
        is_there = fails != "sum" or kind != EntryKind.KV  # the first batch
        pools.arena.carry_out([pools.unit(kind, index + 2, 2 * index + kind, load_id)])
        pools.arena.wait_for_load(load_id)
        assert pools.arena.has_failed(load_id) != is_there
        if is_there:
            values = [tensor.unique().tolist() for tensor in pools.read(kind, index + 2)]
            assert values == [[3.0 + index + number] for number in range(len(values))]


def test_another_tag_is_noticed():
    pools = Pools("cpu")
    pools.arena.carry_out([pools.unit(EntryKind.KV, 1, 5), pools.unit(EntryKind.KV, 2, 5, load_id=1, key=b"other")])
    assert pools.arena.has_failed(1)
    pools.arena.carry_out([pools.unit(EntryKind.KV, 2, 7, load_id=2)])  # nothing was ever stored there
    assert pools.arena.has_failed(2)


@pytest.mark.parametrize("device", DEVICES)
def test_many_entries_of_one_batch_arrive(device, monkeypatch):
    """More than are launched at first, in pages that are apart."""
    monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    pools, count = Pools(device), 9
    for index in range(count):
        pools.write(EntryKind.KV, index, 5 + index)
    entries = random.Random(0).sample(range(0, PAGES, 2), count)
    pools.arena.carry_out([pools.unit(EntryKind.KV, index, entry) for index, entry in enumerate(entries)])
    pools.arena.wait_for_stores()
    for index in range(count):
        pools.write(EntryKind.KV, index, 0)
    (batch,) = pools.arena._copies.batches([pools.unit(EntryKind.KV, n, e, 1) for n, e in enumerate(entries)], None)
    assert len(batch.units) == count > entry_copies.FIRST_RANGES
    pools.arena.carry_out(batch.units)
    pools.arena.wait_for_load(1)
    assert not pools.arena.has_failed(1)
    assert [float(pools.read(EntryKind.KV, index)[0].unique()) for index in range(count)] == [*range(5, 5 + count)]


def test_neighbouring_pages_of_two_entries_are_no_neighbours_in_the_buffer(monkeypatch):
    """Entries that fill one of their two pages, as on a rank with fewer layers than others."""
    monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    kv = torch.arange(4 * 512).view(1, 4, 512).to(torch.uint8)
    kv += torch.arange(4, dtype=torch.uint8)[None, :, None]
    arena = HostArena(lambda: {EntryKind.KV: [kv]}, pages=8, page_bytes=512, pages_of={EntryKind.KV: 2}, device="cpu")
    tag = Tag(kind=EntryKind.KV, key=b"k", depth_tokens=1, epoch=0)
    for source, target, first, load_id in ((DEVICE, HOST, 0, None), (HOST, DEVICE, 2, 1)):
        ends = {"source": source, "target": target, "tag": tag, "load_id": load_id}
        arena.carry_out([BlockTransfer(device_id=first + n, pages=(n, 4 + n), **ends) for n in range(2)])
    assert not arena.has_failed(1)
    assert torch.equal(kv[:, :2], kv[:, 2:]) and not torch.equal(kv[:, 0], kv[:, 1])


def test_a_stage_without_recurrent_layers_moves_nothing_of_states():
    pools = Pools("cpu", mamba_layers=0)
    pools.arena.carry_out([pools.unit(EntryKind.STATE, 1, 5), pools.unit(EntryKind.STATE, 2, 5, load_id=1)])
    assert not pools.arena.has_failed(1) and pools.arena.bytes_stored == pools.arena.bytes_loaded == 0


def test_a_stage_without_recurrent_layers_waits_for_states_as_the_others_do(monkeypatch):
    """Else its ranks would not join the others when they agree on a load. The empty entry is right when it arrives."""
    tier = SlowTier(0)
    monkeypatch.setattr(tier, "_dice", Never())
    pools = Pools("cpu", mamba_layers=0, behind=tier)
    pools.arena.carry_out([pools.unit(EntryKind.STATE, 1, 5), pools.behind_unit(EntryKind.STATE, 5, b"k", take=True)])
    assert pools.arena.drain(HANG_S) and len(tier.entries) == 1
    fetch = pools.behind_unit(EntryKind.STATE, 6, b"k", take=False)
    pools.arena.carry_out([fetch, pools.unit(EntryKind.STATE, 2, 6, load_id=1)])
    assert pools.arena.is_put_off(1) and pools.arena.fetched(1, HANG_S)
    pools.arena.run_put_off(1)
    assert not pools.arena.has_failed(1)
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
    """It waits for what is copied straight to the host, and for the last gather or sum; once, and not for other copies to the host."""
    monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    monkeypatch.setattr(stores, "STAGING_BYTES", 1)  # a batch each
    pools = Pools("cpu")
    monkeypatch.setattr(stores, "FIRST_BYTES", pools.pages_of[EntryKind.KV] * pools.page_bytes)
    pools.arena.stores.queue = marks = Marks()
    pools.arena.wait_for_stores()
    assert marks.waited == []
    made = []
    monkeypatch.setattr(pools.arena.stores, "_store", lambda batch: made.append(marks.made))
    units = [pools.unit(EntryKind.KV, 1, 5), pools.unit(EntryKind.KV, 2, 6), pools.unit(EntryKind.STATE, 2, 7)]
    pools.arena.carry_out(units)
    pools.arena.wait_for_stores()
    pools.arena.wait_for_stores()
    assert made == [2, 3] and marks.waited == [1, -4]


@pytest.mark.gpu
def test_a_write_right_after_a_store_does_not_spoil_it():
    """The stream of the stores is slow. A write by the model must wait for it."""
    pools = Pools("cuda", 1000)
    for kind, index in ((EntryKind.KV, 1), (EntryKind.STATE, 2)):
        pools.write(kind, index, 3.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(pools.arena.stores.queue._stream):
        torch.cuda._sleep(200_000_000)
    pools.arena.carry_out([pools.unit(EntryKind.KV, 1, 5), pools.unit(EntryKind.STATE, 2, 6)])
    pools.arena.wait_for_stores()
    for kind, index in ((EntryKind.KV, 1), (EntryKind.STATE, 2)):
        pools.write(kind, index, 7.0)
    pools.arena.carry_out([pools.unit(EntryKind.KV, 3, 5, load_id=1), pools.unit(EntryKind.STATE, 4, 6, load_id=1)])
    pools.arena.wait_for_load(1)
    assert not pools.arena.has_failed(1)
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


@pytest.mark.gpu
def test_the_end_of_an_arena_unpins_its_memory():
    pools = Pools("cuda")
    memory, device = pools.arena.memory, torch.device("cuda")
    with pytest.raises(RuntimeError):
        pin(memory, device)
    assert torch.ones(3, device=device).sum().item() == 3  # the error is gone with its exception
    del pools
    gc.collect()
    pin(memory, device)
    unpin(memory, device)


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_the_cpu_does_not_wait_for_transfers():
    pools = Pools("cuda", 1000)
    ids = [(EntryKind.KV, 1, 5), (EntryKind.STATE, 2, 6)]
    stores, loads = ([pools.unit(*entry, load_id=load_id) for entry in ids] for load_id in (None, 1))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pools.arena.carry_out(stores)
        pools.arena.wait_for_stores()
        pools.arena.carry_out(loads)
        pools.arena.wait_for_load(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not pools.arena.has_failed(1)
