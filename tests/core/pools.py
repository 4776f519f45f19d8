"""An mover over small pools, tiers behind it that are slow or wait to be told, and random moves in all of them."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_hybrid_prefix.metrics import TierStats
from megatron_hybrid_prefix.tiers.base import Entry, Tier
from megatron_hybrid_prefix.tiers.behind import TierBehind
from megatron_hybrid_prefix.tiers.settings import TierSettings
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, SHARED, BlockTransfer, EntryKind, LoadState, Tag
from megatron_hybrid_prefix.transfers import entry_copies, to_device, to_host
from megatron_hybrid_prefix.transfers.entry_copies import Tensors
from megatron_hybrid_prefix.transfers.host_pages import HostSizes, choose_page_bytes
from megatron_hybrid_prefix.transfers.mover import DeviceMover, Mover
from megatron_hybrid_prefix.transfers.queue import HostQueue
from megatron_hybrid_prefix.transfers.to_device import Transfer
from tests.harness.limits import HANG_S
from tests.harness.plugins.dictionary_tier import DictionaryTier

KV, STATE = EntryKind.KV, EntryKind.STATE
BLOCKS, SLOTS, PAGES = 12, 10, 60
NAMESPACE = bytes(range(16))


def a_mover(
    tensors: Tensors,
    device: str = "cpu",
    *,
    pages: int,
    page_bytes: int,
    least_pages: int = 1,
    tier: TierBehind | None = None,
) -> Mover:
    """Of these tensors, with so many pages for an entry at least; nothing is queued for it. It is the only rank."""
    counts = {kind: sum(each[:, 0].nbytes for each in of_kind) for kind, of_kind in tensors.items()}
    pages_of = {kind: max(least_pages, -(-size // page_bytes)) for kind, size in counts.items()}
    sizes = HostSizes(pages=pages, page_bytes=page_bytes, pages_of=pages_of)
    on_device = DeviceMover(lambda **_: [], lambda: None)
    on_device.tensors = lambda: tensors  # type: ignore[method-assign]
    return Mover(on_device, sizes=sizes, device=torch.device(device), tier=tier, max_of_ranks=lambda values: values)


class Pools:
    """KV and two components of a state on a device, and an mover for them; with ``tier``, a tier behind it."""

    def __init__(self, device: str = "cpu", scale: int = 1, *, mamba_layers: int = 3, tier: Tier | None = None) -> None:
        kv = torch.zeros(4, BLOCKS, 6 * scale, 2, dtype=torch.bfloat16, device=device)
        conv = torch.zeros(mamba_layers, SLOTS, 5 * scale, 3, dtype=torch.bfloat16, device=device)
        ssm = torch.zeros(mamba_layers, SLOTS, 7 * scale, dtype=torch.float32, device=device)
        self.tensors = {KV: [kv], STATE: [conv, ssm]}
        sizes = {k: sum(t[:, 0].numel() * t.element_size() for t in ts) for k, ts in self.tensors.items()}
        self.fetching = set[int]()  # loads whose entries all come from the tier behind
        self.page_bytes = choose_page_bytes(sizes.values())
        self.pages_of = {kind: max(1, -(-size // self.page_bytes)) for kind, size in sizes.items()}
        behind = None if tier is None else TierBehind(tier)
        if behind is not None:
            behind.name_entries(lambda: NAMESPACE)
        pages = PAGES * max(self.pages_of.values())
        self.mover = a_mover(self.tensors, device, pages=pages, page_bytes=self.page_bytes, tier=behind)
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
        self.mover.drain_queues()
        self.mover.pages.memory[self.unit(kind, 0, entry).pages[page] * self.page_bytes] ^= 2

    # -- transfers -----------------------------------------------------------------------------------------------------

    def unit(
        self, kind: EntryKind, index: int, entry: int, load: Transfer | None = None, key: bytes = b"k"
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
            load_id=-1 if load is None else load.load_id,
            is_coming=load is not None and load.load_id in self.fetching,
        )

    def behind_unit(self, kind: EntryKind, entry: int, key: bytes, *, take: bool) -> BlockTransfer:
        """A transfer from the host to the tier behind it, or back."""
        source, target = (HOST, SHARED) if take else (SHARED, HOST)
        return self.unit(kind, 0, entry, key=key)._replace(source=source, target=target, device_id=-1)

    def store(self, index: int, entry: int, key: bytes = b"k", kind: EntryKind = KV) -> None:
        self.mover.carry_out([self.unit(kind, index, entry, key=key)])

    def load(self, index: int, entry: int, key: bytes = b"k", kind: EntryKind = KV) -> bool:
        """Whether it is right."""
        load = self.new_load()
        self.mover.carry_out([self.unit(kind, index, entry, load, key)])
        return self.is_right(load)

    def is_right(self, load: Transfer) -> bool:
        self.mover.to_device.wait_for(load)
        return not self.mover.to_device.is_wrong(load)

    def new_load(self, load_id: int | None = None, *, fetches: bool = False) -> Transfer:
        load = self.mover.to_device.transfer(next(self._load_ids) if load_id is None else load_id)
        if fetches:
            self.fetching.add(load.load_id)
        return load

    def offer(self, index: int, entry: int, key: bytes = b"k", kind: EntryKind = KV) -> None:
        """Stores an entry, and begins to write it to the tier behind."""
        self.mover.carry_out([self.unit(kind, index, entry, key=key), self.behind_unit(kind, entry, key, take=True)])

    def give_to_tier(self, index: int, entry: int, key: bytes = b"k", kind: EntryKind = KV) -> None:
        """Stores an entry, and writes it to the tier behind."""
        self.offer(index, entry, key, kind)
        assert self.mover.behind.threads.drain(HANG_S)

    def bring(self, index: int, entry: int, key: bytes = b"k", kind: EntryKind = KV) -> Transfer:
        """Begins to read an entry from the tier behind, and a load that waits for it."""
        load = self.new_load(fetches=True)
        self.mover.carry_out([self.behind_unit(kind, entry, key, take=False), self.unit(kind, index, entry, load, key)])
        return load

    def behind_stats(self) -> TierStats:
        stats = TierStats()
        self.mover.behind.count(stats)
        return stats

    def arrives(self, load: Transfer, wait_s: float = HANG_S) -> bool | None:
        """Whether all that the load waits for has arrived; None: not all of it is known yet."""
        return {LoadState.COPYING: True, LoadState.MISSING: False}.get(self.mover.behind.fetched(load, wait_s))


OnItsWay = partial(SimpleNamespace, query=lambda: False, synchronize=lambda: None)
"""The mark of a store. On the CPU it has run at once."""


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
        monkeypatch.setattr(to_host, "STAGING_BYTES", 3 * 30 * scale * 8)
        monkeypatch.setattr(to_device, "STAGING_BYTES", 2 * 30 * scale * 8)
        self.pools = Pools(device, scale, tier=tier)
        self.dice, self._delays = random.Random(seed), random.Random(seed)
        self.places = [(KV, i) for i in range(BLOCKS)] + [(STATE, i) for i in range(SLOTS)]
        self.on_device: dict[tuple[EntryKind, int], float] = {}
        for number, place in enumerate(self.places):
            self.write(place, number)

    def carry_out(self, units: list[BlockTransfer]) -> None:
        mover = self.pools.mover
        if isinstance(mover.to_host.queue, HostQueue):
            mover.to_host.stored = self._delays.choice([None, OnItsWay()])
        for queue in (mover.to_host.queue, mover.to_device.queue):
            if not isinstance(queue, HostQueue) and self._delays.random() < 0.3:  # what does not wait for it shows
                with torch.cuda.stream(queue._stream):
                    torch.cuda._sleep(2_000_000)
        mover.carry_out(units)
        if self._delays.random() < 0.5:
            mover.to_host.send()
        mover.to_host.wait()

    def place_of(self, kind: EntryKind) -> tuple[EntryKind, int]:
        """Any place where such an entry may be loaded."""
        return kind, self.dice.randrange(BLOCKS if kind == KV else SLOTS)

    def write_some(self, value: float) -> None:
        for _ in range(self.dice.randint(0, 4)):
            self.write(self.dice.choice(self.places), value)
        if self._delays.random() < 0.5:  # else what needs the copies launches them
            self.pools.mover.to_host.send()

    def check(self) -> None:
        for place, value in self.on_device.items():
            assert self.pools.holds(*place, value), place

    def write(self, place: tuple[EntryKind, int], value: float) -> None:
        self.pools.write(*place, value)
        self.on_device[place] = value
