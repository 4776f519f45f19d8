"""Which launches of the mover wait for which, on simulated CUDA streams: what no test of the bytes can show without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_hybrid_prefix.tiers.units import Copy, LoadOver
from megatron_hybrid_prefix.transfers import entry_copies, to_device, to_host
from megatron_hybrid_prefix.transfers.mover import DeviceMover, Mover
from megatron_hybrid_prefix.transfers.queue import BUFFERS, DeviceQueue
from megatron_hybrid_prefix.transfers.to_device import Transfer
from tests.core.pools import KV, Pools


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
    """An mover over simulated streams. Each launch has a name and, in `before`, all launches that it runs after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = Stream()
        Stream.current[:] = [self.model]
        self.before: dict[str, set[str]] = {}
        for name, value in (("Stream", Stream), ("Event", Event)):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream.current[-1])
        monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
        for module in (to_host, to_device):
            monkeypatch.setattr(module, "STAGING_BYTES", 1)  # half of a buffer holds one entry
        self.pools = Pools()
        self.mover = self.pools.mover
        device = torch.device("cpu")
        self.mover.to_host.queue, self.mover.to_device.queue = DeviceQueue(device), DeviceQueue(device, BUFFERS)
        self.mover.to_host.stored = Event()  # a store that is on its way
        for owner, names in (
            (self.mover.copies, ("gather", "to_pages", "to_staging")),
            (self.mover.to_device, ("_load",)),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, self._launches(name, getattr(owner, name)))
        self.options: dict[str, dict[str, Any]] = {}  # by launch
        self._uploaded: dict[str, str] = {}  # by place on the device: the upload of its ids
        upload = self.mover.copies.upload

        def launch_upload(batches: Any, *more: Any) -> Any:
            name = f"_upload {len(self.before)}"
            self.launch(name)
            self._uploaded |= {str(unit.device_id): name for batch in batches for unit in batch.units}
            return upload(batches, *more)

        monkeypatch.setattr(self.mover.copies, "upload", launch_upload)
        put_sums = self.mover.pages.put_sums

        def launch_put_sums(first_pages: torch.Tensor, sums: torch.Tensor) -> None:
            self.launch(*(f"put_sums {page}" for page in first_pages.tolist()))
            put_sums(first_pages, sums)

        monkeypatch.setattr(self.mover.pages, "put_sums", launch_put_sums)
        monkeypatch.setattr(self.mover.pages, "show_sums", lambda: self.launch("show_sums"))

    def launch(self, *names: str) -> None:
        """One launch, which does several things at a time."""
        stream = Stream.current[-1]
        for name in names:
            if name.startswith(("gather", "to_pages", "_load")):
                assert self._uploaded[name.split()[1]] in stream.known
            self.before[name] = set(stream.known)
        stream.known.update(names)

    def store(self, *entries: int, send: bool = True) -> None:
        """Stores KV blocks, each in an entry with its number."""
        self.mover.carry_out([self.pools.unit(KV, n, n) for n in entries])
        if send:
            self.mover.to_host.send()

    def load(self, device_id: int, *entries: int, load_id: int = 0) -> Transfer:
        """A load of these entries, to this block and those after it."""
        load = self.pools.new_load(load_id)
        units = [self.pools.unit(KV, device_id + n, entry, load) for n, entry in enumerate(entries)]
        self.mover.carry_out(units)
        return load

    def next_forward(self) -> None:
        """The model waits for the stores."""
        self.mover.to_host.wait()
        self.launch("next forward")

    def first_page(self, entry: int) -> int:
        return self.pools.unit(KV, 0, entry).pages[0]

    def _launches(self, what: str, run: Any) -> Any:
        def launch(batch: Any, **options: Any) -> None:
            for unit in batch.units:
                self.launch(f"{what} {unit.device_id}")
                self.options[f"{what} {unit.device_id}"] = options
            run(batch, **options)

        return launch


@pytest.fixture
def world() -> Iterator[Launches]:
    """A store is on its way."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Launches(monkeypatch)


@pytest.fixture
def idle(world: Launches) -> Launches:
    """No store is on its way."""
    world.mover.to_host.stored.is_over = True
    return world


def test_stores_wait_for_what_they_need(world: Launches) -> None:
    before, _pools = world.before, world.pools
    world.launch("forward")
    world.store(*range(3))
    world.next_forward()
    world.store(3, 4)
    for n in range(5):
        assert {"forward", *(f"gather {m}" for m in range(n))} <= before[f"gather {n}"]
        assert f"gather {n}" in before[f"to_pages {n}"]
        # The half is free once its last entry is on its way to the host; the other half's may be in flight.
        stored = {name for name in before[f"gather {n}"] if name.startswith("to_pages")}
        assert stored == {f"to_pages {m}" for m in range(n - 1)}
    assert {f"gather {n}" for n in range(3)} <= before["next forward"]


def test_checksums_are_noted_after_they_are_computed_and_before_they_are_compared(idle: Launches) -> None:
    """By the gather."""
    idle.store(*range(3))
    load = idle.load(5, *range(3))
    for n in range(3):
        noted = f"put_sums {idle.first_page(n)}"
        assert f"gather {n}" in idle.before[noted]
        assert noted in idle.before["_load 5"]
    assert not idle.mover.to_device.is_wrong(load)
    noted = {name for name in idle.before if name.startswith("put_sums")}
    assert len(noted) == 3 and noted <= idle.before["show_sums"], "threads see the checksums of this store"


def test_stores_to_the_same_pages_run_one_after_the_other(idle: Launches) -> None:
    """Also their checksums are noted in this order: no order is defined within one launch."""
    noted: list[list[int]] = []
    put_sums = idle.mover.pages.put_sums
    idle.mover.pages.put_sums = lambda pages, sums: (noted.append(pages.tolist()), put_sums(pages, sums))  # type: ignore[assignment]
    for device_id in range(3):
        idle.pools.write(KV, device_id, 1.0 + device_id)
    idle.mover.carry_out([idle.pools.unit(KV, n, 5) for n in range(3)])
    idle.mover.to_host.send()
    assert noted == [[idle.first_page(5)]] * 3
    assert "to_pages 0" in idle.before["to_pages 1"] and "to_pages 1" in idle.before["to_pages 2"]
    assert {"to_pages 1", "to_pages 2"} <= idle.before.keys()  # the model does not wait until they are on the host
    assert not idle.mover.to_device.is_wrong(idle.load(7, 5)) and idle.pools.value(7) == 3.0


def test_what_an_error_kept_from_the_host_is_not_there(idle: Launches) -> None:
    """An error that is not of one copy goes to the caller; its entries are not on the host."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(idle.mover.copies, "upload", fails)
        units = [idle.pools.unit(KV, n, n) for n in range(2)]
        with pytest.raises(RuntimeError, match="out of memory"):
            idle.mover.carry_out(units)
    assert not any(idle.mover.pages.holds(unit) for unit in units), "no checksum was computed"
    load = idle.load(5, 0)
    assert idle.mover.to_device.is_wrong(load)


def test_small_pages_are_gathered(idle: Launches) -> None:
    """The engines pause after each copy."""
    idle.mover.copies.by_engine = False
    idle.store(*range(5))
    idle.next_forward()
    stored = {name for name in idle.before if name.startswith("to_pages")}
    assert stored == {f"to_pages {n}" for n in range(5)}
    assert {f"gather {n}" for n in range(5)} <= idle.before["next forward"]


def test_copies_that_are_sent_later_do_not_wait_for_the_forward(idle: Launches) -> None:
    """Nor does the forward wait for them."""
    before, _pools = idle.before, idle.pools
    idle.launch("forward")
    idle.store(*range(2), send=False)
    idle.next_forward()
    assert {name.split()[0] for name in before} == {"forward", "_upload", "gather", "next"}
    assert {"forward", "gather 0", "gather 1"} <= before["next forward"]
    idle.mover.to_host.send()
    for n in range(2):
        assert f"gather {n}" in before[f"to_pages {n}"]
        assert "next forward" not in before[f"to_pages {n}"]
        assert f"gather {n}" in before[f"put_sums {idle.first_page(n)}"]
    assert {"to_pages 0", "to_pages 1"} <= idle.mover.to_host.stored.known
    launches = len(before)
    idle.mover.to_host.send()
    assert len(before) == launches, "they are sent once"


class Queue:
    """What a cache has queued: at each launch, and by publication."""

    def __init__(self, mover: Mover, *published: Copy) -> None:
        self.queued: list[Copy] = []
        self.published = list(published)
        memory: Any = SimpleNamespace(layout=None, row=lambda slot: slot)
        mover._on_device = DeviceMover(self, lambda: memory)

    def __call__(self, *, published: bool = False) -> list[Copy]:
        copies = list(self.published if published else self.queued)
        (self.published if published else self.queued).clear()
        return copies


def test_what_publication_queued_is_stored_after_the_forward_that_writes_it(idle: Launches) -> None:
    """What comes later waits until it is gathered, though nothing else is stored."""
    before, mover = idle.before, idle.mover
    Queue(mover, idle.pools.unit(KV, 1, 1))
    mover.launch()
    idle.launch("forward")
    mover.send()
    idle.launch("sampling")
    assert "gather 1" not in before["sampling"], "it is not known yet whether it is finite"
    mover.step_ended()
    assert "forward" in before["gather 1"] and "gather 1" in before["to_pages 1"]
    assert idle.options["gather 1"]["beside"], "what follows does not wait for its programs"
    mover.launch()
    idle.launch("next forward")
    assert "gather 1" in before["next forward"] and "to_pages 1" not in before["next forward"]


def test_what_is_left_is_sent_at_the_end_of_a_step(idle: Launches) -> None:
    """With a controller that does not say when a forward is launched."""
    queue = Queue(idle.mover)
    queue.queued.append(idle.pools.unit(KV, 0, 0))
    idle.mover.launch()
    assert "gather 0" in idle.before and "to_pages 0" not in idle.before
    idle.mover.step_ended()
    assert "to_pages 0" in idle.before


def test_what_comes_after_a_load_that_was_given_up_waits_for_it(world: Launches) -> None:
    """Its blocks and its slot may be another's. A load that still runs holds its own, and is not waited for."""
    before, mover, queue = world.before, world.mover, Queue(world.mover)
    own = [world.load(8 + load_id, 20, load_id=load_id) for load_id in (1, 0)][::-1]
    mover.launch()
    world.launch("forward")
    assert not {"_load 8", "_load 9"} & before["forward"]
    queue.queued.append(LoadOver(1))
    mover.launch()
    world.launch("next forward")
    assert "_load 9" in before["next forward"] and "_load 8" not in before["next forward"]
    assert mover.to_device.transfers == {0: own[0]} and own[0].places


def test_what_needs_the_copies_to_the_host_sends_them(idle: Launches) -> None:
    before, pools = idle.before, idle.pools
    idle.store(0, 1, send=False)
    idle.load(9, 20, load_id=1)
    assert {"gather 0", "gather 1"} <= before["to_staging 9"], "it may write there"
    assert "to_pages 0" not in before, "a load of another entry"
    load = idle.load(10, 1, load_id=2)
    assert {"to_pages 0", "to_pages 1"} <= before["to_staging 10"]
    assert not idle.mover.to_device.is_wrong(load)
    idle.store(2, 3, send=False)
    idle.launch("forward")
    idle.mover.carry_out([pools.unit(KV, 4, 2)])
    assert "to_pages 2" in before["gather 4"], "it takes its half of the buffer, and its pages"
    assert not any("forward" in before[name] for name in ("to_pages 2", "to_pages 3")) and "to_pages 4" not in before
    idle.mover.carry_out([pools.unit(KV, 5, 6)])
    assert "gather 5" in before and "to_pages 4" not in before, "there is room beside it"
    idle.load(11, 3, load_id=3)
    assert "to_pages 3" in before["to_staging 11"] and "to_pages 4" not in before, "a load of what was sent"
    idle.load(8, 2, load_id=4)
    assert {"to_pages 4", "to_pages 5"} <= before["to_staging 8"]
    idle.mover.carry_out([pools.unit(KV, 6, 7)])
    idle.mover.drain_queues()
    assert "to_pages 6" in before


def test_copies_are_sent_where_the_buffer_or_a_page_is_needed_again(world: Launches) -> None:
    before, pools = world.before, world.pools
    for n in range(6):
        pools.write(KV, n, 1.0 + n)
    world.store(*range(3), send=False)
    assert "to_pages 0" in before["gather 2"] and not {"to_pages 1", "to_pages 2"} & before.keys()
    world.mover.carry_out([pools.unit(KV, n, 5) for n in (3, 4, 5)])
    assert {"to_pages 2", "to_pages 3"} <= before["to_pages 4"] and "to_pages 5" not in before
    load = world.load(7, 5)
    assert "to_pages 5" in before["to_staging 7"]
    assert not world.mover.to_device.is_wrong(load) and pools.value(7) == 6.0


def test_loads_wait_for_what_they_need(world: Launches) -> None:
    before, pools = world.before, world.pools
    world.launch("forward")
    world.store(*range(2))
    load = world.load(5, 0, 1, 0, 1, 0, load_id=1)
    world.load(10, 1, load_id=2)
    for n in range(5, 11):
        assert {"forward", "gather 1", "to_pages 1"} <= before[f"to_staging {n}"]
        assert f"to_staging {n}" in before[f"_load {n}"]
        # Copies to one half go on while the other half is used.
        loaded = {name for name in before[f"to_staging {n}"] if name.startswith("_load")}
        assert loaded == {f"_load {m}" for m in range(5, n - 1)}
        assert f"to_staging {n + 1}" not in before[f"_load {n}"]
    world.mover.to_device.wait_for(load)
    world.launch("next forward")
    assert {f"_load {n}" for n in range(5, 10)} <= before["next forward"]
    # A store to a page, or from a block, that an unfinished load uses.
    world.mover.carry_out([pools.unit(KV, 3, 1)])
    assert "_load 10" in before["gather 3"]
