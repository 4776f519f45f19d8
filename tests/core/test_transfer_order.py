"""Which launches of the arena wait for which, on simulated CUDA streams: what no test of the bytes can show without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_hybrid_prefix.mcore.state.moves import HostMoves
from megatron_hybrid_prefix.tiers import entry_copies, loads, stores
from megatron_hybrid_prefix.tiers.queue import BUFFERS, DeviceQueue
from megatron_hybrid_prefix.tiers.units import BlockTransfer, EntryKind, LoadState
from tests.core.test_host_arena import Pools, a_load


class Stream:
    """A stream, as the set of all launches that its next launch runs after."""

    current: ClassVar[list[Stream]] = []  # the last one is
    device_index = 0

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.known: set[str] = set()

    def __enter__(self) -> None:
        assert self not in self.current[1:], "a stream is entered twice"
        self.current.append(self)

    def __exit__(self, *error: object) -> None:
        assert self.current.pop() is self

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

    def record(self, stream: Stream | None = None) -> None:
        self.known = set((stream or torch.cuda.current_stream()).known)  # type: ignore[union-attr]

    def synchronize(self) -> None:
        """What is launched has run at once, on the CPU."""


class Launches:
    """An arena over simulated streams. Each launch has a name and, in `before`, all launches that it runs after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = Stream()
        Stream.current[:] = [self.model]
        self.before: dict[str, set[str]] = {}
        for name, value in (("Stream", Stream), ("Event", Event)):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream.current[-1])
        monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
        for module in (stores, loads):
            monkeypatch.setattr(module, "STAGING_BYTES", 1)  # half of a buffer holds one entry
        self.pools = Pools("cpu")
        self.entry_bytes = self.pools.pages_of[EntryKind.KV] * self.pools.page_bytes
        self.arena = self.pools.arena
        device = torch.device("cpu")
        self.arena.stores.queue, self.arena.loads.queue = DeviceQueue(device), DeviceQueue(device, BUFFERS)
        self.arena.stores.stored = Event()  # a store that is on its way
        for owner, names in (
            (self.arena.copies, ("gather", "to_pages", "to_staging")),
            (self.arena.loads, ("_load",)),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, self._launches(name, getattr(owner, name)))
        self.options: dict[str, dict[str, Any]] = {}  # by launch
        self._uploaded: dict[str, str] = {}  # by place on the device: the upload of its ids
        upload = self.arena.copies.upload

        def launch_upload(batches: Any, *more: Any) -> Any:
            name = f"_upload {len(self.before)}"
            self.launch(name)
            self._uploaded |= {str(unit.device_id): name for batch in batches for unit in batch.units}
            return upload(batches, *more)

        monkeypatch.setattr(self.arena.copies, "upload", launch_upload)
        put_sums = self.arena.contents.put_sums

        def launch_put_sums(first_pages: torch.Tensor, sums: torch.Tensor) -> None:
            self.launch(*(f"put_sums {page}" for page in first_pages.tolist()))
            put_sums(first_pages, sums)

        monkeypatch.setattr(self.arena.contents, "put_sums", launch_put_sums)
        monkeypatch.setattr(self.arena.contents, "show_sums", lambda: self.launch("show_sums"))

    def launch(self, *names: str) -> None:
        """One launch, which does several things at a time."""
        stream = Stream.current[-1]
        for name in names:
            if name.startswith(("gather", "to_pages", "_load")):
                assert self._uploaded[name.split()[1]] in stream.known
            self.before[name] = set(stream.known)
        stream.known.update(names)

    def first_page(self, entry: int) -> int:
        return self.pools.unit(EntryKind.KV, 0, entry).pages[0]

    def _launches(self, what: str, run: Any) -> Any:
        def launch(batch: Any, **options: Any) -> None:
            for unit in batch.units:
                self.launch(f"{what} {unit.device_id}")
                self.options[f"{what} {unit.device_id}"] = options
            run(batch, **options)

        return launch


@pytest.fixture
def world() -> Iterator[Launches]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Launches(monkeypatch)


def test_stores_wait_for_what_they_need(world: Launches) -> None:
    before, pools = world.before, world.pools
    world.launch("forward")
    world.arena.carry_out([pools.unit(EntryKind.KV, n, n) for n in range(3)])
    world.arena.stores.wait()
    world.launch("next forward")
    world.arena.carry_out([pools.unit(EntryKind.KV, n, n) for n in (3, 4)])
    for n in range(5):
        assert {"forward", *(f"gather {m}" for m in range(n))} <= before[f"gather {n}"]
        assert f"gather {n}" in before[f"to_pages {n}"]
        # The half is free once its last entry is on its way to the host; the other half's may be in flight.
        stored = {name for name in before[f"gather {n}"] if name.startswith("to_pages")}
        assert stored == {f"to_pages {m}" for m in range(n - 1)}
    assert {f"gather {n}" for n in range(3)} <= before["next forward"]


def test_checksums_are_noted_after_they_are_computed_and_before_they_are_compared(world: Launches) -> None:
    """By the gather."""
    world.arena.carry_out([world.pools.unit(EntryKind.KV, n, n) for n in range(3)])
    load = a_load()
    world.arena.carry_out([world.pools.unit(EntryKind.KV, 5 + n, n, load) for n in range(3)])
    for n in range(3):
        noted = f"put_sums {world.first_page(n)}"
        assert f"gather {n}" in world.before[noted]
        assert noted in world.before["_load 5"]
    assert not world.arena.loads.is_wrong(load)
    noted = {name for name in world.before if name.startswith("put_sums")}
    assert len(noted) == 3 and noted <= world.before["show_sums"], "threads see the checksums of this store"


def test_stores_to_the_same_pages_run_one_after_the_other(world: Launches) -> None:
    """Also their checksums are noted in this order: no order is defined within one launch."""
    world.arena.stores.stored.is_over = True
    noted: list[list[int]] = []
    put_sums = world.arena.contents.put_sums
    world.arena.contents.put_sums = lambda pages, sums: (noted.append(pages.tolist()), put_sums(pages, sums))  # type: ignore[assignment]
    for device_id in range(3):
        world.pools.write(EntryKind.KV, device_id, 1.0 + device_id)
    world.arena.carry_out([world.pools.unit(EntryKind.KV, n, 5) for n in range(3)])
    assert noted == [[world.first_page(5)]] * 3
    assert "to_pages 0" in world.before["to_pages 1"] and "to_pages 1" in world.before["to_pages 2"]
    assert {"to_pages 1", "to_pages 2"} <= world.before.keys()  # the model does not wait until they are on the host
    load = a_load()
    world.arena.carry_out([world.pools.unit(EntryKind.KV, 7, 5, load)])
    assert not world.arena.loads.is_wrong(load) and world.pools.read(EntryKind.KV, 7)[0].unique().tolist() == [3.0]


def test_what_an_error_kept_from_the_host_is_not_there(world: Launches) -> None:
    """An error that is not of one copy goes to the caller; its entries are not on the host."""
    world.arena.stores.stored.is_over = True

    def fails(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(world.arena.copies, "upload", fails)
        units = [world.pools.unit(EntryKind.KV, n, n) for n in range(2)]
        with pytest.raises(RuntimeError, match="out of memory"):
            world.arena.carry_out(units)
    assert not any(world.arena.contents.holds(unit) for unit in units), "no checksum was computed"
    load = a_load()
    world.arena.carry_out([world.pools.unit(EntryKind.KV, 5, 0, load)])
    assert world.arena.loads.is_wrong(load)


def test_small_pages_are_gathered(world: Launches) -> None:
    world.arena.stores.stored.is_over = True
    world.arena.copies.by_engine = False
    world.arena.carry_out([world.pools.unit(EntryKind.KV, n, n) for n in range(5)])
    world.arena.stores.wait()
    world.launch("next forward")
    assert {name for name in world.before if name.startswith("to_pages")} == {f"to_pages {n}" for n in range(5)}
    assert {f"gather {n}" for n in range(5)} <= world.before["next forward"]


def test_what_shares_a_half_of_the_buffer_is_gathered_while_the_rest_is_copied(world: Launches) -> None:
    pools, staging = world.pools, world.arena.stores._staging
    staging.half_bytes, staging.memory = 2 * staging.half_bytes, staging.memory.repeat(2)
    world.arena.carry_out([pools.unit(EntryKind.KV, 0, 0), pools.unit(EntryKind.STATE, 1, 1)])
    assert {"gather 0", "to_pages 0", "gather 1"} <= world.before["to_pages 1"]
    assert "to_pages 0" not in world.before["gather 1"]


def test_copies_that_are_sent_later_do_not_wait_for_the_forward(world: Launches) -> None:
    """Nor does the forward wait for them."""
    before, pools = world.before, world.pools
    world.arena.stores.stored.is_over = True
    world.launch("forward")
    world.arena.carry_out([pools.unit(EntryKind.KV, n, n) for n in range(2)], send=False)
    world.arena.stores.wait()
    world.launch("next forward")
    assert {name.split()[0] for name in before} == {"forward", "_upload", "gather", "next"}
    assert {"forward", "gather 0", "gather 1"} <= before["next forward"]
    world.arena.stores.send()
    for n in range(2):
        assert f"gather {n}" in before[f"to_pages {n}"]
        assert "next forward" not in before[f"to_pages {n}"]
        assert f"gather {n}" in before[f"put_sums {world.first_page(n)}"]
    assert {"to_pages 0", "to_pages 1"} <= world.arena.stores.stored.known
    launches = len(before)
    world.arena.stores.send()
    assert len(before) == launches, "they are sent once"


class Published:
    """A cache without copies, but for what publication queued."""

    layout = None

    def __init__(self, *copies: BlockTransfer) -> None:
        self.copies = list(copies)

    def take_copies(self, published: bool = False) -> list[BlockTransfer]:
        if not published:
            return []
        copies, self.copies = self.copies, []
        return copies


def moves_of(world: Launches, cache: Any) -> HostMoves:
    moves = HostMoves.__new__(HostMoves)
    memory = SimpleNamespace(layout=None, row=lambda slot: slot)
    vars(moves).update(arena=world.arena, sends_later=True, _context=SimpleNamespace(shared_memory=memory))
    moves.serve(cache)
    return moves


def test_what_publication_queued_is_stored_after_the_forward_that_writes_it(world: Launches) -> None:
    """What comes later waits until it is gathered, though nothing else is stored."""
    before, pools = world.before, world.pools
    world.arena.stores.stored.is_over = True
    moves = moves_of(world, Published(pools.unit(EntryKind.KV, 1, 1)))
    moves.launch(send=False)
    world.launch("forward")
    moves.forward_launched()
    assert "forward" in before["gather 1"] and "gather 1" in before["to_pages 1"]
    assert world.options["gather 1"]["beside"], "sampling does not wait for its programs"
    world.launch("sampling")
    assert "gather 1" not in before["sampling"]
    moves.launch(send=False)
    world.launch("next forward")
    assert "gather 1" in before["next forward"] and "to_pages 1" not in before["next forward"]


def test_what_publication_queued_waits_for_a_controller_that_does_not_say_when_a_forward_is(world: Launches) -> None:
    moves = moves_of(world, Published(world.pools.unit(EntryKind.KV, 0, 0)))
    moves.sends_later = False
    moves.launch()
    moves.forward_launched()
    assert not world.before


def test_what_comes_after_a_load_that_was_given_up_waits_for_it(world: Launches) -> None:
    """Its blocks and its slot may be another's. A load that still runs holds its own, and is not waited for."""
    before, own = world.before, [a_load(load_id) for load_id in range(2)]
    moves = moves_of(world, Published())
    for load in reversed(own):
        world.arena.carry_out([world.pools.unit(EntryKind.KV, 8 + load.load_id, 20, load)])
    moves.launch(send=False)
    world.launch("forward")
    assert not {"_load 8", "_load 9"} & before["forward"] and set(world.arena.loads.running) == set(own)
    own[1].state = LoadState.GIVEN_UP
    moves.launch(send=False)
    world.launch("next forward")
    assert "_load 9" in before["next forward"] and "_load 8" not in before["next forward"]
    assert world.arena.loads.running == own[:1]


def test_what_needs_the_copies_to_the_host_sends_them(world: Launches) -> None:
    before, pools = world.before, world.pools

    def carry_out(*units: Any) -> None:
        world.arena.carry_out(units, send=False)

    world.arena.stores.stored.is_over = True
    carry_out(pools.unit(EntryKind.KV, 0, 0), pools.unit(EntryKind.KV, 1, 1))
    carry_out(pools.unit(EntryKind.KV, 9, 20, a_load(1)))
    assert {"gather 0", "gather 1"} <= before["to_staging 9"], "it may write there"
    assert "to_pages 0" not in before, "a load of another entry"
    load = a_load(2)
    carry_out(pools.unit(EntryKind.KV, 10, 1, load))
    assert {"to_pages 0", "to_pages 1"} <= before["to_staging 10"]
    assert not world.arena.loads.is_wrong(load)
    carry_out(pools.unit(EntryKind.KV, 2, 2), pools.unit(EntryKind.KV, 3, 3))
    world.launch("forward")
    carry_out(pools.unit(EntryKind.KV, 4, 2))
    assert "to_pages 2" in before["gather 4"], "it takes its half of the buffer, and its pages"
    assert not any("forward" in before[name] for name in ("to_pages 2", "to_pages 3")) and "to_pages 4" not in before
    carry_out(pools.unit(EntryKind.KV, 5, 6))
    assert "gather 5" in before and "to_pages 4" not in before, "there is room beside it"
    carry_out(pools.unit(EntryKind.KV, 11, 3, a_load(3)))
    assert "to_pages 3" in before["to_staging 11"] and "to_pages 4" not in before, "a load of what was sent"
    carry_out(pools.unit(EntryKind.KV, 8, 2, a_load(4)))
    assert {"to_pages 4", "to_pages 5"} <= before["to_staging 8"]
    carry_out(pools.unit(EntryKind.KV, 6, 7))
    world.arena.finish()
    assert "to_pages 6" in before


def test_copies_are_sent_where_the_buffer_or_a_page_is_needed_again(world: Launches) -> None:
    before, pools = world.before, world.pools
    for n in range(6):
        pools.write(EntryKind.KV, n, 1.0 + n)
    world.arena.carry_out([pools.unit(EntryKind.KV, n, n) for n in range(3)], send=False)
    assert "to_pages 0" in before["gather 2"] and not {"to_pages 1", "to_pages 2"} & before.keys()
    world.arena.carry_out([pools.unit(EntryKind.KV, n, 5) for n in (3, 4, 5)], send=False)
    assert {"to_pages 2", "to_pages 3"} <= before["to_pages 4"] and "to_pages 5" not in before
    load = a_load()
    world.arena.carry_out([pools.unit(EntryKind.KV, 7, 5, load)], send=False)
    assert "to_pages 5" in before["to_staging 7"]
    assert not world.arena.loads.is_wrong(load) and pools.read(EntryKind.KV, 7)[0].unique().tolist() == [6.0]


def test_loads_wait_for_what_they_need(world: Launches) -> None:
    before, pools = world.before, world.pools
    world.launch("forward")
    world.arena.carry_out([pools.unit(EntryKind.KV, n, n) for n in range(2)])
    load = a_load(1)
    world.arena.carry_out([pools.unit(EntryKind.KV, 5 + n, n % 2, load) for n in range(5)])
    world.arena.carry_out([pools.unit(EntryKind.KV, 10, 1, a_load(2))])
    for n in range(5, 11):
        assert {"forward", "gather 1", "to_pages 1"} <= before[f"to_staging {n}"]
        assert f"to_staging {n}" in before[f"_load {n}"]
        # Copies to one half go on while the other half is used.
        loaded = {name for name in before[f"to_staging {n}"] if name.startswith("_load")}
        assert loaded == {f"_load {m}" for m in range(5, n - 1)}
        assert f"to_staging {n + 1}" not in before[f"_load {n}"]
    world.arena.loads.wait_for(load)
    world.launch("next forward")
    assert {f"_load {n}" for n in range(5, 10)} <= before["next forward"]
    # A store to a page, or from a block, that an unfinished load uses.
    world.arena.carry_out([pools.unit(EntryKind.KV, 3, 1)])
    assert "_load 10" in before["gather 3"]
