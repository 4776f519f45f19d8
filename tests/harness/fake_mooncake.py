"""A Mooncake Store in this process: the calls that ``tiers/mooncake.py`` uses, with the codes that the real one returned.

``tests/mooncake/test_mooncake_store.py`` runs the same calls on both.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

from tests.harness.limits import HANG_S


class FakeCluster:
    """A master, and memory that others lend."""

    def __init__(self) -> None:
        self.objects: dict[str, bytearray] = {}
        self.leased: set[str] = set()
        self.questions: list[list[str]] = []
        self.removals: list[tuple[str, bool]] = []
        self.room_bytes = 2**40
        self.is_away = False
        self.lost: str | None = None
        self.broken_transfers = 0
        self.gate, self.waiting = threading.Event(), 0
        self.gate.set()
        self.gated: tuple[str, ...] | None = None

    def restart(self) -> None:
        """The master comes back. It has forgotten all objects."""
        self.objects.clear()
        self.leased.clear()
        self.is_away = False


class FakeStore:
    """A client of a `FakeCluster`."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster, self.memory, self.closed = cluster, {}, False

    def setup(self, *arguments: Any) -> int:
        self._enter()
        return -1 if self.cluster.is_away else 0

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        self._enter()
        if any(at < buffer_ptr + size and buffer_ptr < at + length for at, length in list(self.memory.items())):
            return -600
        self.memory[buffer_ptr] = size
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.cluster.questions.append(list(keys))
        self._enter()
        return [-900 if self.cluster.is_away else int(key in self.cluster.objects) for key in keys]

    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self._enter()
        return [self._put(*each) for each in zip(keys, pointers, sizes, strict=True)]

    def _put(self, key: str, pointers: list[int], sizes: list[int]) -> int:
        if self.cluster.is_away:
            return -900
        if key in self.cluster.objects:
            return 0  # and the old bytes stay
        if sum(map(len, self.cluster.objects.values())) + sum(sizes) > self.cluster.room_bytes:
            return -200
        if self._transfer_breaks():
            return -800
        parts = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        self.cluster.objects[key] = bytearray(b"".join(parts))
        return 0

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self._enter()
        return [self._get(*each) for each in zip(keys, pointers, sizes, strict=True)]

    def _get(self, key: str, pointers: list[int], sizes: list[int]) -> int:
        if self.cluster.is_away:
            return -900
        if self.cluster.lost is not None and self.cluster.lost in key:
            self.cluster.objects.pop(key, None)
        found = self.cluster.objects.get(key)
        if found is None:
            return -704
        self.cluster.leased.add(key)
        if len(found) > sum(sizes):
            return -600
        if len(found) < sum(sizes) or self._transfer_breaks():
            return -800
        at = 0
        for pointer, size in zip(pointers, sizes, strict=True):
            ctypes.memmove(pointer, bytes(found[at : at + size]), size)
            at += size
        return at

    def get_size(self, key: str) -> int:
        self._enter()
        if self.cluster.is_away:
            return -900
        return len(self.cluster.objects[key]) if key in self.cluster.objects else -704

    def remove(self, key: str, force: bool = False) -> int:
        self._enter()
        self.cluster.removals.append((key, force))
        if self.cluster.is_away:
            return -900
        if key in self.cluster.leased and not force:
            return -706
        self.cluster.leased.discard(key)
        return 0 if self.cluster.objects.pop(key, None) is not None else -704

    def close(self) -> int:
        assert not self.closed
        self.closed = True
        return 0

    def _enter(self) -> None:
        assert not self.closed, "the real one ends the process here"
        if self.cluster.gated is not None and sys._getframe(1).f_code.co_name not in self.cluster.gated:
            return
        self.cluster.waiting += 1
        assert self.cluster.gate.wait(HANG_S)
        self.cluster.waiting -= 1

    def _transfer_breaks(self) -> bool:
        breaks = self.cluster.broken_transfers > 0
        self.cluster.broken_transfers -= breaks
        return breaks


def use_fake_mooncake(monkeypatch: Any, cluster: FakeCluster) -> None:
    """All clients that are made from now on are of this cluster."""
    from megatron_hybrid_prefix.tiers import mooncake_client

    monkeypatch.setattr(mooncake_client, "new_store", lambda: FakeStore(cluster))
    monkeypatch.setattr(mooncake_client.MooncakeSettings, "own_address", lambda self: self.host or "127.0.0.1")
