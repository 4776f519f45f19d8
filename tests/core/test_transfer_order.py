"""Which launches of the arena wait for which, on simulated CUDA streams: what no test of the bytes can show without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.tiers import loads, stores
from megatron_hybrid_prefix.tiers.queue import BUFFERS, DeviceQueue
from megatron_hybrid_prefix.tiers.units import EntryKind
from tests.core.test_host_arena import Pools


class Stream:
    """A stream, as the set of all launches that its next launch runs after."""

    def __init__(self, *device: object, priority: int = 0) -> None:
        self.known: set[str] = set()

    def wait_event(self, event: Event) -> None:
        self.known |= event.known

    def record_event(self) -> Event:
        event = Event()
        event.known = set(self.known)
        return event


class Event:
    """A point in a stream. Nothing is over until a test says so."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.known: set[str] = set()
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def record(self) -> None:
        self.known = set(torch.cuda.current_stream().known)  # type: ignore[attr-defined]


class Launches:
    """An arena over simulated streams. Each launch has a name and, in `before`, all launches that it runs after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = Stream()
        self._streams = [self.model]
        self.before: dict[str, set[str]] = {}
        for name, value in (("Stream", Stream), ("Event", Event), ("stream", self._on)):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self._streams[-1])
        monkeypatch.setattr(loads, "ENGINE_BYTES", 1)
        for module in (stores, loads):
            monkeypatch.setattr(module, "STAGING_BYTES", 1)  # half of a buffer holds one entry
        self.pools = Pools("cpu")
        self.entry_bytes = self.pools.pages_of[EntryKind.KV] * self.pools.page_bytes
        monkeypatch.setattr(stores, "FIRST_BYTES", self.entry_bytes)
        self.arena = self.pools.arena
        device = torch.device("cpu")
        self.arena.stores.queue, self.arena.loads.queue = DeviceQueue(device), DeviceQueue(device, BUFFERS)
        self.arena.stores.stored = Event()  # a store that is on its way
        for owner, names in (
            (self.arena.stores, ("_gather", "_store")),
            (self.arena.loads, ("_copy_from_pages", "_load")),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, self._launches(name, getattr(owner, name)))
        self._uploaded: list[str] = []
        upload = self.arena._copies.upload

        def launch_upload(*args: Any) -> Any:
            self._uploaded[:] = [f"_upload {len(self.before)}"]
            self.launch(*self._uploaded)
            return upload(*args)

        monkeypatch.setattr(self.arena._copies, "upload", launch_upload)

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self._streams.append(stream)
        yield
        self._streams.pop()

    def launch(self, name: str) -> None:
        stream = self._streams[-1]
        if name.startswith(("_gather", "_store", "_load")):
            assert self._uploaded[0] in stream.known
        self.before[name] = set(stream.known)
        stream.known.add(name)

    def _launches(self, what: str, run: Any) -> Any:
        def launch(batch: Any) -> None:
            assert what != "_gather" or not batch.is_direct
            for unit in batch.units:
                self.launch(f"{what} {unit.device_id}")
            run(batch)

        return launch


@pytest.fixture
def world() -> Iterator[Launches]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Launches(monkeypatch)


def test_stores_wait_for_what_they_need(world: Launches) -> None:
    before, pools = world.before, world.pools
    world.launch("forward")
    world.arena.carry_out([pools.unit(EntryKind.KV, n, n) for n in range(3)])
    world.arena.wait_for_stores()
    world.launch("next forward")
    world.arena.carry_out([pools.unit(EntryKind.KV, n, n) for n in (3, 4)])
    for n in range(5):
        assert {"forward", *(f"_gather {m}" for m in range(n))} <= before[f"_gather {n}"]
        assert f"_gather {n}" in before[f"_store {n}"]
        # The half is free once its last entry is on its way to the host; the other half's may be in flight.
        stored = {name for name in before[f"_gather {n}"] if name.startswith("_store")}
        assert stored == {f"_store {m}" for m in range(n - 1)}
    assert {f"_gather {n}" for n in range(3)} <= before["next forward"]


def test_the_first_entries_of_a_store_go_straight_to_the_host(world: Launches) -> None:
    """While the others are gathered. The model and loads wait for both, but not for the other copies to the host."""
    before, pools = world.before, world.pools
    world.launch("forward")
    world.arena.stores.stored.is_over = True
    world.arena.carry_out([pools.unit(EntryKind.KV, n, n) for n in range(2)])
    world.arena.carry_out([pools.unit(EntryKind.KV, 9, 20, load_id=1)])
    world.arena.wait_for_stores()
    world.launch("next forward")
    world.arena.carry_out([pools.unit(EntryKind.KV, 2, 2)])  # behind a store that is on its way
    assert {name for name in before if name.startswith("_gather")} == {"_gather 1", "_gather 2"}
    assert "_store 0" not in before["_gather 1"]
    for launch in ("_copy_from_pages 9", "next forward"):
        assert {"forward", "_store 0", "_gather 1"} <= before[launch]
        assert "_store 1" not in before[launch]


def test_an_entry_that_is_too_large_is_gathered(world: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model would wait for the host link."""
    world.arena.stores.stored.is_over = True
    monkeypatch.setattr(stores, "FIRST_BYTES", world.entry_bytes - 1)
    world.arena.carry_out([world.pools.unit(EntryKind.KV, 0, 0)])
    assert [name for name in world.before if "upload" not in name] == ["_gather 0", "_store 0"]


def test_what_the_buffer_has_no_room_for_goes_straight_to_the_host(world: Launches) -> None:
    """So the model waits for these, and not until half of the buffer has been copied, too."""
    world.arena.stores.stored.is_over = True
    world.arena.carry_out([world.pools.unit(EntryKind.KV, n, n) for n in range(5)])
    world.arena.wait_for_stores()
    world.launch("next forward")
    assert {name for name in world.before if name.startswith("_gather")} == {"_gather 3", "_gather 4"}
    assert {"_store 0", "_store 1", "_store 2", "_gather 3", "_gather 4"} <= world.before["next forward"]
    assert not {"_store 3", "_store 4"} & world.before["next forward"]


def test_what_shares_a_half_of_the_buffer_is_gathered_while_the_rest_is_copied(world: Launches) -> None:
    pools, staging = world.pools, world.arena.stores._staging
    staging.half_bytes, staging.memory = 2 * staging.half_bytes, staging.memory.repeat(2)
    world.arena.carry_out([pools.unit(EntryKind.KV, 0, 0), pools.unit(EntryKind.STATE, 1, 1)])
    assert {"_gather 0", "_store 0", "_gather 1"} <= world.before["_store 1"]
    assert "_store 0" not in world.before["_gather 1"]


def test_loads_wait_for_what_they_need(world: Launches) -> None:
    before, pools = world.before, world.pools
    world.launch("forward")
    world.arena.carry_out([pools.unit(EntryKind.KV, n, n) for n in range(2)])
    world.arena.carry_out([pools.unit(EntryKind.KV, 5 + n, n % 2, load_id=1) for n in range(5)])
    world.arena.carry_out([pools.unit(EntryKind.KV, 10, 1, load_id=2)])
    for n in range(5, 11):
        assert {"forward", "_gather 1", "_store 1"} <= before[f"_copy_from_pages {n}"]
        assert f"_copy_from_pages {n}" in before[f"_load {n}"]
        # Copies to one half go on while the other half is used.
        loaded = {name for name in before[f"_copy_from_pages {n}"] if name.startswith("_load")}
        assert loaded == {f"_load {m}" for m in range(5, n - 1)}
        assert f"_copy_from_pages {n + 1}" not in before[f"_load {n}"]
    world.arena.wait_for_load(1)
    world.launch("next forward")
    assert {f"_load {n}" for n in range(5, 10)} <= before["next forward"]
    # A store to a page, or from a block, that an unfinished load uses.
    world.arena.carry_out([pools.unit(EntryKind.KV, 3, 1)])
    assert "_load 10" in before["_gather 3"]
