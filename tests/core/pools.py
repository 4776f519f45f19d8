"""An arena over small pools, tiers behind it that are slow or wait to be told, and random moves in all of them."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence

import pytest
import torch

from megatron_hybrid_prefix.tiers import entry_copies, loads, stores
from megatron_hybrid_prefix.tiers.arena import HostArena
from megatron_hybrid_prefix.tiers.base import Entry, Tier
from megatron_hybrid_prefix.tiers.behind import TierBehind
from megatron_hybrid_prefix.tiers.pinned import choose_page_bytes
from megatron_hybrid_prefix.tiers.queue import HostQueue
from megatron_hybrid_prefix.tiers.settings import TierSettings
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, SHARED, BlockTransfer, EntryKind, Load, LoadState, Tag
from tests.harness.limits import HANG_S
from tests.harness.plugins.dictionary_tier import DictionaryTier

KV, STATE = EntryKind.KV, EntryKind.STATE
BLOCKS, SLOTS, PAGES = 12, 10, 60
NAMESPACE = bytes(range(16))


def a_load(load_id: int = 0, state: LoadState = LoadState.COPYING) -> Load:
    return Load(load_id=load_id, request_id=load_id, state=state, depth_tokens=1, pinned=())


class Pools:
    """KV and two components of a state on a device, and an arena for them; with ``tier``, a tier behind it."""

    def __init__(self, device: str = "cpu", scale: int = 1, *, mamba_layers: int = 3, tier: Tier | None = None) -> None:
        kv = torch.zeros(4, BLOCKS, 6 * scale, 2, dtype=torch.bfloat16, device=device)
        conv = torch.zeros(mamba_layers, SLOTS, 5 * scale, 3, dtype=torch.bfloat16, device=device)
        ssm = torch.zeros(mamba_layers, SLOTS, 7 * scale, dtype=torch.float32, device=device)
        self.tensors = {KV: [kv], STATE: [conv, ssm]}
        sizes = {k: sum(t[:, 0].numel() * t.element_size() for t in ts) for k, ts in self.tensors.items()}
        self.page_bytes = choose_page_bytes(sizes.values())
        self.pages_of = {kind: max(1, -(-size // self.page_bytes)) for kind, size in sizes.items()}
        behind = None if tier is None else TierBehind(tier)
        if behind is not None:
            behind.name_entries(lambda: NAMESPACE)
        self.arena = HostArena(
            lambda: self.tensors,
            pages=PAGES * max(self.pages_of.values()),
            page_bytes=self.page_bytes,
            pages_of=self.pages_of,
            device=device,
            behind=behind,
        )
        self._load_ids = itertools.count(100)

    # -- contents ------------------------------------------------------------------------------------------------------

    def write(self, kind: EntryKind, index: int, value: float) -> None:
        """The next component gets one more."""
        for number, tensor in enumerate(self.tensors[kind]):
            tensor[:, index] = value + number

    def read(self, kind: EntryKind, index: int) -> list[torch.Tensor]:
        return [tensor[:, index].cpu() for tensor in self.tensors[kind]]

    def holds(self, kind: EntryKind, index: int, value: float) -> bool:
        """Whether all of it is what `write` writes."""
        return all(
            bool(torch.all(tensor == torch.tensor(value + number).to(tensor.dtype)))
            for number, tensor in enumerate(self.read(kind, index))
        )

    def value(self, index: int) -> float:
        """What all of a KV block holds."""
        (value,) = self.read(KV, index)[0].unique().tolist()
        return value

    def flip_a_bit(self, kind: EntryKind, entry: int, page: int = -1) -> None:
        """On the host, in this page of the entry."""
        self.arena.finish()
        self.arena.pages.memory[self.unit(kind, 0, entry).pages[page] * self.page_bytes] ^= 2

    # -- transfers -----------------------------------------------------------------------------------------------------

    def unit(
        self, kind: EntryKind, index: int, entry: int, load: Load | None = None, key: bytes = b"k"
    ) -> BlockTransfer:
        """A store, or a transfer of a load."""
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
        source, target = (HOST, SHARED) if take else (SHARED, HOST)
        return self.unit(kind, 0, entry, key=key)._replace(source=source, target=target, device_id=None)

    def store(self, index: int, entry: int, key: bytes = b"k", kind: EntryKind = KV) -> None:
        self.arena.carry_out([self.unit(kind, index, entry, key=key)])

    def load(self, index: int, entry: int, key: bytes = b"k", kind: EntryKind = KV) -> bool:
        """Whether it is right."""
        load = self.new_load()
        self.arena.carry_out([self.unit(kind, index, entry, load, key)])
        return self.is_right(load)

    def is_right(self, load: Load) -> bool:
        self.arena.loads.wait_for(load)
        return not self.arena.loads.is_wrong(load)

    def new_load(self, state: LoadState = LoadState.COPYING) -> Load:
        return a_load(next(self._load_ids), state)

    def offer(self, index: int, entry: int, key: bytes = b"k", kind: EntryKind = KV) -> None:
        """Stores an entry, and begins to write it to the tier behind."""
        self.arena.carry_out([self.unit(kind, index, entry, key=key), self.behind_unit(kind, entry, key, take=True)])

    def give_to_tier(self, index: int, entry: int, key: bytes = b"k", kind: EntryKind = KV) -> None:
        """Stores an entry, and writes it to the tier behind."""
        self.offer(index, entry, key, kind)
        assert self.arena.behind is not None and self.arena.behind.threads.drain(HANG_S)

    def bring(self, index: int, entry: int, key: bytes = b"k", kind: EntryKind = KV) -> Load:
        """Begins to read an entry from the tier behind, and a load that waits for it."""
        load = self.new_load(LoadState.FETCHING)
        self.arena.carry_out([self.behind_unit(kind, entry, key, take=False), self.unit(kind, index, entry, load, key)])
        return load

    def arrives(self, load: Load, wait_s: float = HANG_S) -> bool | None:
        """Whether all that the load waits for has arrived; None: not all of it is known yet."""
        assert self.arena.behind is not None
        return self.arena.behind.fetched(load, wait_s)


class OnItsWay:
    """The mark of a store."""

    def query(self) -> bool:
        return False


# -- tiers -------------------------------------------------------------------------------------------------------------


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
        may_read: Reads of the keys in ``slow`` may run.
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


# -- random moves ------------------------------------------------------------------------------------------------------


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
        self.places = [(KV, i) for i in range(BLOCKS)] + [(STATE, i) for i in range(SLOTS)]
        self.on_device: dict[tuple[EntryKind, int], float] = {}
        for number, place in enumerate(self.places):
            self.write(place, number)

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

    def place_of(self, kind: EntryKind) -> tuple[EntryKind, int]:
        """Any place where such an entry may be loaded."""
        return kind, self.dice.randrange(BLOCKS if kind == KV else SLOTS)

    def write_some(self, value: float) -> None:
        for _ in range(self.dice.randint(0, 4)):
            self.write(self.dice.choice(self.places), value)
        if self._delays.random() < 0.5:  # else what needs the copies launches them
            self.pools.arena.stores.send()

    def check(self) -> None:
        for place, value in self.on_device.items():
            assert self.pools.holds(*place, value), place

    def write(self, place: tuple[EntryKind, int], value: float) -> None:
        self.pools.write(*place, value)
        self.on_device[place] = value
