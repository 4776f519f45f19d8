"""The tiers that processes share, for one set of tests: a folder, and Mooncake Store (a fake of it)."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid_prefix.tiers import file as file_tier
from megatron_hybrid_prefix.tiers.file import HEADER_BYTES
from tests.harness.fake_mooncake import FakeCluster, use_fake_mooncake
from tests.harness.lifecycle_helpers import EngineHarness
from tests.harness.limits import HANG_S


class Folder:
    """A folder of files. Once `close_gate` was called, reads wait until ``gate`` is set; the first that waits sets ``asked``."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._monkeypatch = path, monkeypatch
        self.gate, self.asked = threading.Event(), threading.Event()

    def url(self, **parameters: Any) -> str:
        """Of a tier that takes everything and is never late."""
        # A thread that looks at the folder may see a fault before a request does.
        return _url(f"file://{self.path}", {"gb": 1, "refresh_s": 10.0**6} | parameters)

    def entries(self, kind: str = "") -> list[Path]:
        """Files of entries."""
        return sorted(path for path in self.path.rglob(f"{kind}*-*-*-*"))

    def spoil(self, fault: str) -> None:
        """One of `FAULTS`; only of what is stored now."""
        path = self.entries("kv" if "kv" in fault else "state")[0]
        content = bytearray(path.read_bytes())
        if fault == "all gone":
            shutil.rmtree(self.path)
        elif fault == "unreadable":

            def fails(*arguments: Any) -> int:
                raise OSError(5, "Input/output error")

            self._monkeypatch.setattr(file_tier.os, "preadv", fails)
        elif "gone" in fault:
            path.unlink()
        elif "bit" in fault:
            content[HEADER_BYTES + 17] ^= 4
            path.write_bytes(content)
        else:
            path.write_bytes(content[:-100])

    def mend(self) -> None:
        """Reads work again. What is stored stays as it is."""
        self._monkeypatch.undo()

    def close_gate(self) -> None:
        """Reads wait from now on."""
        read_file = file_tier.read_file

        def slow(*arguments: Any) -> Any:
            self.asked.set()
            assert self.gate.wait(HANG_S)
            return read_file(*arguments)

        self._monkeypatch.setattr(file_tier, "read_file", slow)


class Mooncake:
    """A Mooncake Store in this process."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = FakeCluster()
        use_fake_mooncake(monkeypatch, self.cluster)

    def url(self, **parameters: Any) -> str:
        """Of a tier that takes everything and is never late."""
        return _url("mooncake://127.0.0.1:50051", {"ask_s": HANG_S, "refresh_s": 1e-9} | parameters)

    def entries(self, kind: str = "") -> list[str]:
        """Names of entries."""
        return [name for name in self.cluster.objects if f"/{kind}" in name]

    def spoil(self, fault: str) -> None:
        """One of `FAULTS`."""
        name = self.entries("kv/" if "kv" in fault else "state/")[0]
        if "bit" in fault:
            self.cluster.objects[name][-17] ^= 4
        elif "truncated" in fault:
            del self.cluster.objects[name][-100:]
        elif "gone" in fault:
            self.cluster.lost = name
        else:
            self.cluster.broken_transfers = 1

    def mend(self) -> None:
        """Nothing more is lost."""
        self.cluster.lost = None


STORES = {"folder": Folder, "mooncake": Mooncake}
# By store and fault: the tier's reason, and the cache's.
FAULTS = {
    ("folder", "kv bit"): ("wrong", "host_load_failed"),
    ("folder", "state bit"): ("wrong", "host_load_failed"),
    ("folder", "kv truncated"): ("not_valid", "tier_load_missing"),
    ("folder", "state truncated"): ("not_valid", "tier_load_missing"),
    ("folder", "kv gone"): ("gone", "tier_load_missing"),
    ("folder", "state gone"): ("gone", "tier_load_missing"),
    ("folder", "all gone"): ("gone", "tier_load_missing"),
    ("folder", "unreadable"): ("read_EIO", "tier_load_missing"),
    ("mooncake", "kv bit"): ("wrong", "host_load_failed"),
    ("mooncake", "state bit"): ("wrong", "host_load_failed"),
    ("mooncake", "kv truncated"): ("not_valid", "tier_load_missing"),
    ("mooncake", "state gone"): ("gone", "tier_load_missing"),
    ("mooncake", "transfer"): ("read_transfer_failed", "tier_load_missing"),
}


def _url(place: str, parameters: dict[str, Any]) -> str:
    parameters = {"min_tokens": 0, "wait_s": HANG_S} | parameters
    return f"{place}?" + "&".join(f"{name}={value}" for name, value in parameters.items())


def written(served: EngineHarness) -> EngineHarness:
    """Waits until the tier has everything."""
    assert served.context.host_moves.drain(HANG_S)
    return served


def stats_of(served: EngineHarness) -> Any:
    """The tier's figures."""
    return served.context.prefix_stats().tiers["shared"]


def tier_of(served: EngineHarness) -> Any:
    """The tier."""
    return served.cache._store.host.behind.tier
