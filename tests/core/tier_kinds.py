"""The kinds of tiers behind one set of tests: a dictionary, a folder, and Mooncake Store (a fake of it).

An object of a kind is one place where entries are kept. Its tiers are as of processes that share the place.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid_prefix.policy.registry import make_eviction_policy
from megatron_hybrid_prefix.tiers import file as file_tier
from megatron_hybrid_prefix.tiers import folder as folders
from megatron_hybrid_prefix.tiers import mooncake
from megatron_hybrid_prefix.tiers.base import HEADER_BYTES
from megatron_hybrid_prefix.tiers.registry import parse_url
from megatron_hybrid_prefix.tiers.settings import TierSettings
from megatron_hybrid_prefix.tiers.space import FileName
from megatron_hybrid_prefix.tiers.units import Tag
from tests.core.entries import BLOCK, NAME, SIZE
from tests.harness.fake_mooncake import FakeCluster, use_fake_mooncake
from tests.harness.limits import HANG_S, wait_until
from tests.harness.plugins.dictionary_tier import DictionaryTier


class Dictionary:
    """The tier that documents show. An entry's content is (tag, bytes, checksum).

    Attributes:
        full: What a `put` for which there is no room is counted as.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.monkeypatch, self.full = path, monkeypatch, ""
        self.objects: dict[Any, Any] = {}

    def tier(self, name: bytes = NAME, *, room_bytes: int = 10**9, **settings: Any) -> Any:
        """As of a new process, in this namespace; with room for so many bytes."""
        tier = DictionaryTier(TierSettings(path=str(room_bytes // max(SIZE.values())), min_tokens=0, **settings))
        tier.entries = self.objects
        return tier

    def name(self, name: bytes, of: Tag) -> Any:
        """What `objects` calls an entry."""
        return name, of.kind, of.key

    def content(self, of: Tag, name: bytes = NAME) -> Any:
        """What is kept of an entry."""
        return self.objects[self.name(name, of)]

    def give(self, of: Tag, content: Any) -> None:
        """Puts another content in an entry's place."""
        self.objects[self.name(NAME, of)] = content

    def flip_a_bit(self, of: Tag) -> None:
        """Of its bytes."""
        self.content(of)[1][17] ^= 4

    def settle(self, tier: Any) -> None:
        """Waits until the tier's thread has done what it was given."""


class Stored(Dictionary):
    """Where an entry's content is its header and its bytes.

    Attributes:
        gate: Once `close_gate` was called, reads wait until it is set.
        reasons: What the next `get` and the next `put` are counted as, after `break_calls`.
    """

    reasons: tuple[str, str]
    defaults: dict[str, Any]

    def url(self, **parameters: Any) -> str:
        """Of a tier that takes everything and is never late."""
        parameters = self.defaults | {"min_tokens": 0, "wait_s": HANG_S} | parameters
        return f"{self.place}?" + "&".join(f"{name}={value}" for name, value in parameters.items())

    def tier(self, name: bytes = NAME, *, room_bytes: int = 0, **settings: Any) -> Any:
        kind, read = parse_url(self.url(**self.room(room_bytes) | settings))
        tier = kind(read, block_tokens=BLOCK, make_ranking=lambda: make_eviction_policy("recompute_cost"))
        if name:
            tier.use_namespace(name)
        return tier

    def content(self, of: Tag, name: bytes = NAME) -> bytes:
        return self.read(self.name(name, of))

    def give(self, of: Tag, content: Any) -> None:
        self.write(self.name(NAME, of), content)

    def flip_a_bit(self, of: Tag) -> None:
        self.change(self.name(NAME, of), "bit")

    def change(self, entry: Any, fault: str) -> None:
        content = bytearray(self.read(entry))
        content[HEADER_BYTES + 17] ^= 4
        self.write(entry, content if "bit" in fault else content[:-100])

    def spoil(self, fault: str) -> None:
        """A fault of `FAULTS`, of the first entry of its kind; only of what is stored now."""
        entry = self.entries("kv" if "kv" in fault else "state")[0]
        if fault == "all gone":
            shutil.rmtree(self.path)
        elif "gone" in fault:
            self.lose(entry)
        elif "bit" in fault or "truncated" in fault:
            self.change(entry, fault)
        else:
            self.break_calls()


class Folder(Stored):
    """A folder of files."""

    reasons = "read_EIO", "write_EIO"
    kept = 1  # of two that write one key

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(path, monkeypatch)
        self.place, self.full = f"file://{path}", "no_room"
        # A thread that looks at the folder may see a fault before a request does.
        self.defaults = {"gb": 1, "refresh_s": 10.0**6}
        self.gate, self.asked = threading.Event(), threading.Event()

    def room(self, room_bytes: int) -> dict[str, Any]:
        return {"gb": room_bytes / 2**30} if room_bytes else {}

    def entries(self, kind: str = "") -> list[Path]:
        """Files of entries."""
        return sorted(path for path in self.path.rglob(f"{kind}*-*-*-*"))

    def name(self, name: bytes, of: Tag) -> Path:
        file = file_name(of)
        return self.path / "v1" / name.hex() / file.part / str(file)

    def settle(self, tier: Any) -> None:
        tier.look()

    def break_calls(self) -> None:
        """Reads and writes fail, until `mend`."""

        def fails(*arguments: Any) -> int:
            raise OSError(errno.EIO, "Input/output error")

        def fails_late(file: int, content: memoryview) -> None:
            os.write(file, content[:100])
            fails()

        self.monkeypatch.setattr(file_tier.os, "preadv", fails)
        self.monkeypatch.setattr(folders, "write_all", fails_late)

    def mend(self) -> None:
        """Nothing fails any more. What is stored stays as it is."""
        self.monkeypatch.undo()

    def close_gate(self) -> None:
        """Reads wait from now on."""
        read_file = file_tier.read_file

        def slow(*arguments: Any) -> Any:
            self.asked.set()
            assert self.gate.wait(HANG_S)
            return read_file(*arguments)

        self.monkeypatch.setattr(file_tier, "read_file", slow)

    def lose(self, entry: Path) -> None:
        entry.unlink()

    def read(self, entry: Path) -> bytes:
        return entry.read_bytes()

    def write(self, entry: Path, content: Any) -> None:
        entry.unlink(missing_ok=True)
        entry.write_bytes(content)


def file_name(of: Tag) -> FileName:
    """Of an entry."""
    return FileName(of.kind, of.depth_tokens // BLOCK, of.key, of.parent)


class ShortReads(Folder):
    """A folder whose reads return 700 bytes at most."""

    most = 700

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(path, monkeypatch)
        preadv = os.preadv

        def short(file: int, buffers: list[memoryview], at: int) -> int:
            few, left = [], self.most
            for buffer in buffers:
                few.append(buffer[:left])
                left -= len(few[-1])
            return preadv(file, few, at)

        monkeypatch.setattr(os, "preadv", short)


class ByteReads(ShortReads):
    """One byte at most."""

    most = 1


class Mooncake(Stored):
    """A Mooncake Store in this process."""

    reasons = "read_transfer_failed", "write_transfer_failed"
    kept = 0
    place = "mooncake://127.0.0.1:50051"

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(path, monkeypatch)
        self.cluster, self.full = FakeCluster(), "write_no_room"
        self.objects, self.gate = self.cluster.objects, self.cluster.gate
        self.defaults = {"ask_s": HANG_S, "refresh_s": 1e-9}
        use_fake_mooncake(monkeypatch, self.cluster)

    def room(self, room_bytes: int) -> dict[str, Any]:
        self.cluster.room_bytes = room_bytes or self.cluster.room_bytes
        return {}

    def name(self, name: bytes, of: Tag) -> str:
        return mooncake._object(name, of.kind, of.key)

    def entries(self, kind: str = "") -> list[str]:
        """Names of entries."""
        return [name for name in self.objects if f"/{kind}" in name]

    def settle(self, tier: Any) -> None:
        over = threading.Event()
        tier._client.later(over.set)
        assert over.wait(HANG_S)

    def break_calls(self) -> None:
        self.cluster.broken_transfers = 10**6

    def mend(self) -> None:
        self.cluster.lost, self.cluster.broken_transfers = None, 0

    def close_gate(self) -> None:
        self.cluster.gated = ("batch_get_into_multi_buffers",)
        self.gate.clear()

    def lose(self, entry: str) -> None:
        self.cluster.lost = entry

    def read(self, entry: str) -> bytes:
        return self.objects[entry]

    def write(self, entry: str, content: Any) -> None:
        self.objects[entry] = bytearray(content)


def wait_for_namespace(tier: Any, name: bytes) -> None:
    """The thread of a folder's tier opens another namespace."""
    wait_until(lambda: not hasattr(tier, "_space") or tier._space(name).namespace, "the namespace is open")
