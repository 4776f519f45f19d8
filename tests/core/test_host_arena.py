"""The mover alone: what is stored comes back bit by bit, whatever is written in between. On a GPU beside a busy stream."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, EntryKind, Tag
from megatron_hybrid_prefix.transfers import behind, entry_copies, to_device
from megatron_hybrid_prefix.transfers.host_pages import allocate, choose_page_bytes, pin, unpin
from megatron_hybrid_prefix.transfers.to_device import Transfer
from tests.core.pools import (
    KV,
    NAMESPACE,
    PAGES,
    SLOTS,
    STATE,
    AnyOrder,
    Never,
    OnItsWay,
    Pools,
    SlowTier,
    SteadyTier,
    a_mover,
)
from tests.harness.limits import HANG_S, wait_until

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(gib=1))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_moves_and_writes(device, seed, monkeypatch):
    """Compared with a dictionary."""
    world = AnyOrder(device, seed, monkeypatch)
    pools, dice, places, on_device = world.pools, world.dice, world.places, world.on_device
    on_host: dict[int, tuple[EntryKind, float]] = {}
    for step in range(40):
        units, own = [], []
        for _ in range(dice.randint(0, 12)):
            if on_host and dice.random() < 0.4:
                if not units or units[-1].load_id < 0 or dice.random() < 0.3:
                    own.append(pools.new_load())
                entry = dice.choice(sorted(on_host))
                kind, value = on_host[entry]
                place = world.place_of(kind)
                units.append(pools.unit(*place, entry, own[-1]))
                on_device[place] = value
            else:
                kind, index = dice.choice(places)
                entry = dice.randrange(PAGES)
                units.append(pools.unit(kind, index, entry))
                on_host[entry] = (kind, on_device[kind, index])
        world.carry_out(units)
        for load in own:
            if dice.random() < 0.7:
                assert pools.is_right(load)
            else:
                pools.mover.to_device.wait_for(load)
        world.write_some(1000 + step)
    world.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_moves_with_a_tier_behind(device, seed, monkeypatch):
    """Pages are given away while threads read and write them. What arrives is what was stored, or it does not arrive."""
    tier = SlowTier(seed)
    world = AnyOrder(device, seed, monkeypatch, tier=tier)
    monkeypatch.setattr(behind, "GROUP_BYTES", 1 if seed % 4 < 2 else 1000)  # a group for each entry, or for some
    pools, dice, places, on_device = world.pools, world.dice, world.places, world.on_device
    mover, on_host, taken, ends = pools.mover, {}, set(), Counter()
    here: set[int] = set()  # entries on the host that come from the device, or have arrived
    refused: set[int] = set()  # pages of stores that were not done, because a thread read there
    refused_now: set[int] = set()  # the same, and those of this step
    overwrite = mover.behind.overwrite

    def noted(run: Sequence[BlockTransfer]) -> list[BlockTransfer]:
        done = overwrite(run)
        for unit in run:
            (refused.difference_update if unit in done else refused.update)(unit.pages)
        refused_now.update(refused)
        return done

    def load_of(entry: int, load: Transfer) -> tuple[tuple[EntryKind, int], BlockTransfer]:
        kind, value = on_host[entry]
        place = world.place_of(kind)
        return place, pools.unit(*place, entry, load, key=str(value).encode())

    monkeypatch.setattr(mover.behind, "overwrite", noted)
    for step in range(60):
        units: list[BlockTransfer] = []
        loaded: dict[tuple[EntryKind, int], float] = {}
        own: dict[Transfer, dict[tuple[EntryKind, int], float]] = {}
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
                load = pools.new_load()
                place, unit = load_of(entry, load)
                if place not in loaded:
                    units.append(unit)
                    own[load] = {place: on_host[entry][1]}
                    loaded |= own[load]
        load, entries = pools.new_load(), set()
        for entry in dice.sample(sorted(on_host), min(len(on_host), dice.randint(0, 2))):
            place, unit = load_of(entry, load)
            if place not in loaded:
                units.append(unit)
                entries.add(entry)
                own.setdefault(load, {})[place] = loaded[place] = on_host[entry][1]
        fetching = None if here.issuperset(entries) else load
        units = [unit._replace(is_coming=fetching is not None and unit.load_id == fetching.load_id) for unit in units]
        world.carry_out(units)
        for load, values in own.items():
            is_fetch, arrived = load is fetching, True
            if is_fetch:
                mover.to_host.send()
                arrived = pools.arrives(load, dice.choice([0.0, HANG_S]))
            failed = bool(arrived) and not pools.is_right(load)
            if failed:
                assert not is_fetch and any(not refused_now.isdisjoint(unit.pages) for unit in load.units)
            elif arrived:
                ends["waited" if is_fetch else "here"] += 1
                here.update(entries if is_fetch else ())
                on_device |= values
                continue
            ends["refused" if failed else "late" if arrived is None else "missing"] += 1
            mover.to_device.wait_for(load)
            for place in values:  # part of it may have been loaded; what the model writes now comes after that
                world.write(place, 2000 + step)
            for entry in entries if is_fetch else ():  # the cache drops what did not arrive
                del on_host[entry]
                here.discard(entry)
        world.write_some(1000 + step)
        assert step % 3 or mover.behind.threads.drain(HANG_S)  # else a busy machine reads only what is not written yet
    world.check()
    assert min(ends["here"], ends["waited"]) > 0
    # However long the threads took before: once they have done what they can, an entry comes back.
    tier.dice = Never()
    assert mover.behind.threads.drain(HANG_S)
    first, second = (pools.unit(KV, 0, entry, key=b"end") for entry in (0, 1))
    threads = mover.behind.threads
    wait_until(lambda: not threads.overwrite([*first.pages, *second.pages]), "no page is being read into")
    world.carry_out([first, pools.behind_unit(KV, 0, b"end", take=True)])
    assert mover.behind.threads.drain(HANG_S) and pools.behind_stats().bytes_stored > 0
    load = pools.bring(1, 1, b"end")
    assert pools.arrives(load) and pools.is_right(load)
    on_device[KV, 1] = on_device[KV, 0]
    world.check()
    assert pools.behind_stats().bytes_loaded > 0
    mover.close()


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [EntryKind.KV, EntryKind.STATE])
@pytest.mark.parametrize("fault", ["bit", "tag", "copy", "copy engine"])
def test_what_is_wrong_or_missing_is_zeros(device, kind, fault, monkeypatch):
    """Not what it was before, nor what was loaded: both may be NaN. The other entries of the load are right."""
    if fault == "copy engine":
        monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    pools = Pools(device)
    for index in range(SLOTS):
        pools.write(kind, index, 3.0 + index)
    pools.mover.carry_out([pools.unit(kind, index, index) for index in (1, 2)])
    if fault == "bit":
        pools.flip_a_bit(kind, 1)
    own = pools.new_load(1), pools.new_load(2)
    wrong = pools.unit(kind, 5, 1, own[0], key=b"other" if fault == "tag" else b"k")
    copies, name = pools.mover.copies, "to_staging" if fault == "copy engine" else "to_places"
    original = getattr(copies, name)

    def fails(batch):
        if wrong in batch.units:
            raise RuntimeError("the copy engine is on fire")
        original(batch)

    if fault.startswith("copy"):
        monkeypatch.setattr(copies, name, fails)
    # Before it another wrong entry goes to the place of a right one, which is loaded later.
    pools.mover.carry_out([wrong._replace(device_id=6), wrong])
    pools.mover.carry_out([pools.unit(kind, 6, 2, own[1])])
    assert [pools.is_right(load) for load in own] == [False, True]
    assert not any(tensor.any() for tensor in pools.read(kind, 5)) and pools.holds(kind, 6, 5.0)
    pools.store(1, 1, kind=kind)
    assert pools.load(5, 1, kind=kind), "once it is stored again"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [EntryKind.KV, EntryKind.STATE])
def test_a_wrong_bit_behind_the_host_fails_the_load(device, kind, monkeypatch):
    """In any of the entries of a load, each of which goes to the device in a group of its own."""
    monkeypatch.setattr(behind, "GROUP_BYTES", 1)
    tier, keys = SteadyTier(), (b"a", b"b", b"c")
    pools = Pools(device, tier=tier)
    for wrong in (*keys, b"none"):
        for index, key in enumerate(keys):
            tier.entries.pop((NAMESPACE, kind, key), None)
            pools.write(kind, index, 3.0 * index)
            pools.give_to_tier(index, index, key, kind)
        if wrong in keys:
            tier.entries[NAMESPACE, kind, wrong][1][1] ^= 2
        load = pools.new_load(fetches=True)
        units = [pools.behind_unit(kind, 3 + index, key, take=False) for index, key in enumerate(keys)]
        units += [pools.unit(kind, 5 + index, 3 + index, load, key=key) for index, key in enumerate(keys)]
        pools.mover.carry_out(units)
        assert pools.arrives(load) and pools.is_right(load) == (wrong == b"none")
    assert pools.arrives(pools.bring(4, 7, b"missing", kind)) is False
    pools.mover.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["batches", "upload", "to_places", "zero_wrong"])
def test_a_load_whose_launch_raises_is_wrong(device, name, monkeypatch):
    """Also if another part of it was launched before; other loads are right. One that was never launched is wrong, too."""
    pools = Pools(device)
    own = [pools.new_load() for _ in range(4)]
    pools.mover.carry_out([pools.unit(KV, index, index) for index in (1, 2)])
    pools.mover.carry_out([pools.unit(KV, 5 + number, 1, own[number]) for number in range(2)])

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise SystemError("no memory for a launch")  # of no kind that counts as a failed copy

    with monkeypatch.context() as patch, pytest.raises(SystemError):
        patch.setattr(pools.mover.copies, name, fails)
        pools.mover.carry_out([pools.unit(KV, 7, 2, own[number]) for number in (0, 2)])
    assert [pools.mover.to_device.is_wrong(load) for load in own] == [True, False, True, True]


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_for_a_wrong_entry_do_not_hit_a_later_one_in_its_place(device):
    """Both in one launch: the block went to another request, whose load is right."""
    pools = Pools(device)
    for index in (1, 2):
        pools.write(KV, index, index)
    pools.mover.carry_out([pools.unit(KV, index, index) for index in (1, 2)])
    pools.flip_a_bit(KV, 1, page=0)
    own = pools.new_load(1), pools.new_load(2)
    pools.mover.carry_out([pools.unit(KV, 6, load.load_id, load) for load in own])
    assert [pools.is_right(load) for load in own] == [False, True] and pools.value(6) == 2.0


def raises(*_: object, **__: object) -> None:
    raise RuntimeError("the driver refuses")


def test_what_could_not_be_brought_is_not_loaded(monkeypatch):
    """The bytes that the staging buffer had before may be those of an equal entry, with its checksum."""
    monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    pools = Pools()
    for index in range(2):
        pools.write(KV, index, 1.0 + index)
        pools.store(index, index, key=bytes([index]))
    assert pools.load(5, 0, b"\0") and pools.load(5, 0, b"\0")  # both halves of the buffer hold an entry
    pools.write(KV, 6, 7.0)
    with monkeypatch.context() as broken:
        broken.setattr(entry_copies, "copy_ranges", raises)
        assert not pools.load(6, 1, b"\1")
    assert pools.value(6) == 0.0


def test_later_loads_do_not_fail_for_earlier_ones(monkeypatch):
    """The flags of loads are used again."""
    monkeypatch.setattr(to_device, "_LOADS", 2)
    pools = Pools()
    for entry in (5, 6):
        pools.store(1, entry)
    pools.flip_a_bit(KV, 5)
    assert [pools.load(2, entry) for entry in (5, 6, 6, 5)] == [False, True, True, False]


@pytest.mark.parametrize("copy", ["gather", "to_pages"])
def test_a_store_that_fails_leaves_nothing_in_its_pages(copy, monkeypatch):
    """Some of the earlier entry there may be overwritten."""
    pools = Pools()
    pools.store(1, 5, b"old")
    pools.mover.to_host.stored = OnItsWay()
    monkeypatch.setattr(pools.mover.copies, copy, raises)
    pools.store(2, 5, b"new")
    assert not pools.load(3, 5, b"old") and not pools.load(3, 5, b"new")


# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_many_entries_of_one_batch_arrive(device, monkeypatch):
    """More than are launched at first, in pages that are apart."""
    monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    pools, count = Pools(device), 2 * entry_copies.FIRST_RANGES + 1
    load = pools.new_load()
    for index in range(count):
        pools.write(KV, index, 5 + index)
    entries = random.Random(0).sample(range(0, PAGES, 2), count)
    pools.mover.carry_out([pools.unit(KV, index, entry) for index, entry in enumerate(entries)])
    pools.mover.to_host.wait()
    for index in range(count):
        pools.write(KV, index, 0)
    pools.mover.carry_out([pools.unit(KV, index, entry, load) for index, entry in enumerate(entries)])
    assert pools.is_right(load) and [pools.value(index) for index in range(count)] == [*range(5, 5 + count)]


def test_neighbouring_pages_of_two_entries_are_no_neighbours_in_the_buffer(monkeypatch):
    """Entries that fill one of their two pages, as on a rank with fewer layers than others."""
    monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    kv = torch.arange(4 * 512).view(1, 4, 512).to(torch.uint8)
    kv += torch.arange(4, dtype=torch.uint8)[None, :, None]
    mover = a_mover({KV: [kv]}, pages=8, page_bytes=512, least_pages=2)
    tag = Tag(kind=KV, key=b"k", depth_tokens=1, epoch=0)
    load = mover.to_device.transfer(0)
    for source, target, first, of_load in ((DEVICE, HOST, 0, None), (HOST, DEVICE, 2, load)):
        ends = {"source": source, "target": target, "tag": tag, "load_id": of_load.load_id if of_load else -1}
        mover.carry_out([BlockTransfer(device_id=first + n, pages=(n, 4 + n), **ends) for n in range(2)])
    assert not mover.to_device.is_wrong(load)
    assert torch.equal(kv[:, :2], kv[:, 2:]) and not torch.equal(kv[:, 0], kv[:, 1])


def test_a_stage_without_recurrent_layers_moves_nothing_of_states():
    pools = Pools(mamba_layers=0)
    pools.store(1, 5, kind=STATE)
    assert pools.load(2, 5, kind=STATE) and pools.mover.to_host.bytes == pools.mover.to_device.bytes == 0


# -- memory of the host ------------------------------------------------------------------------------------------------


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
    with pytest.raises(MemoryError):
        allocate(2**60)


@pytest.mark.gpu(gib=1)
def test_the_end_of_an_arena_unpins_its_memory():
    pools = Pools("cuda")
    memory, device = pools.mover.pages.memory, torch.device("cuda")
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
    pools = Pools("cuda", 1000)
    load = pools.new_load()
    ids = [(KV, 1, 5), (STATE, 2, 6)]
    stores, loads = ([pools.unit(*entry, of_load) for entry in ids] for of_load in (None, load))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pools.mover.carry_out(stores)
        pools.mover.to_host.wait()
        pools.mover.carry_out(loads)
        pools.mover.to_device.wait_for(load)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pools.is_right(load)
