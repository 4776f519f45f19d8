"""The tier on a real Mooncake Store: a master, and holders that lend memory, each a process of this host.

``scripts/mooncake.sh`` makes the environment and runs these tests. The tier's logic is tested in ``tests/core`` and
``tests/engine``, with a fake that is compared with the real one here.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.fake_mooncake import FakeCluster, FakeStore
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, tokens
from tests.harness.limits import HANG_S, wait_until
from tests.harness.shared_tiers import stats_of, tier_of, written
from tests.harness.workers.launch import WORKERS, free_port, run_prepared

store_module = pytest.importorskip("mooncake.store", reason="needs scripts/mooncake.sh", exc_type=ImportError)
PROGRAMS = Path(store_module.__file__).parent
PROMPT = tokens(4, 9, seed=1)


class Cluster:
    """A master and a holder, both on loopback."""

    def __init__(self) -> None:
        self.port, self.admin_port = free_port(), free_port()
        self.master, self.holder = self.start_master(), None
        self.holder = self.start_holder()

    def start_master(self) -> subprocess.Popen[bytes]:
        loopback = ("--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", f"--metrics_port={self.admin_port}")
        master = run("mooncake_master", *loopback, f"--rpc_port={self.port}", "--client_ttl=2")

        def listens() -> bool:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return True
            return False

        wait_until(listens, "the master listens")
        return master

    def start_holder(self) -> subprocess.Popen[bytes]:
        before = self.segments()
        where = ("--host=127.0.0.1", f"--port={free_port()}", f"--master_server_address=127.0.0.1:{self.port}")
        holder = run("mooncake_client", *where, "--metadata_server=P2PHANDSHAKE", "--global_segment_size=64MB")
        wait_until(lambda: self.segments() - before, "the holder lends memory")
        return holder

    def segments(self) -> set[str]:
        """Memory that the master knows, by name."""
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/get_all_segments") as page:
            return set(page.read().decode().split())
        return set()

    def url(self, **parameters: Any) -> str:
        parameters = {"min_tokens": 0, "wait_s": HANG_S, "ask_s": HANG_S, "refresh_s": 0.01} | parameters
        return f"mooncake://127.0.0.1:{self.port}?" + "&".join(f"{name}={value}" for name, value in parameters.items())

    def close(self) -> None:
        for process in (self.holder, self.master):
            if process is not None:
                end(process)


def run(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([PROGRAMS / program, *arguments], **quiet)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "a secret for the tests")
    monkeypatch.setenv("MC_LOG_LEVEL", "ERROR")
    found = Cluster()
    yield found
    found.close()


def start(model: Any, cluster: Cluster, **parameters: Any) -> EngineHarness:
    """An engine as of a new process."""
    url = cluster.url(**parameters)
    return EngineHarness(model, slots=6, blocks=20, host_gb=0.01, max_requests=2, shared=url)


def computed(model: Any, cluster: Cluster) -> EngineHarness:
    """An engine that has computed the prompt and written it to the store."""
    served = start(model, cluster)
    served.send(PROMPT)
    return written(served)


def process(cluster: Cluster, out: Path, *seeds: int) -> Any:
    """What another process finds that answers these prompts, and ends."""
    (ended,) = run_prepared(WORKERS / "mooncake_process.py", out, cluster.url(), *seeds)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return json.loads(out.read_text())


# -- the store, and the fake of it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["real", "fake"])
def test_the_fake_returns_the_same_codes(cluster, which):
    fake = FakeCluster()
    fake.room_bytes = 64 * 2**20
    store, other = (store_module.MooncakeDistributedStore() if which == "real" else FakeStore(fake) for _ in range(2))
    memory = np.arange(2**21, dtype=np.uint64).view(np.uint8)
    at = memory.ctypes.data

    def put(key: str, start: int, *sizes: int) -> list[int]:
        places = [at + start + sum(sizes[:number]) for number in range(len(sizes))]
        return store.batch_put_from_multi_buffers([key], [places], [list(sizes)])

    def get(key: str, *sizes: int) -> list[int]:
        memory[2**20 :] = 0
        places = [at + 2**20 + sum(sizes[:number]) for number in range(len(sizes))]
        return other.batch_get_into_multi_buffers([key], [places], [list(sizes)])

    address = ("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", f"127.0.0.1:{cluster.port}")
    assert store.setup(*address) == 0 == other.setup(*address)
    assert store.register_buffer(at, memory.nbytes) == 0 == other.register_buffer(at, memory.nbytes)
    assert store.register_buffer(at, memory.nbytes) == -600
    assert put("a", 0, 104, 3000) == [0]
    assert other.batch_is_exist(["a", "b"]) == [1, 0]
    assert get("a", 104, 3000) == [3104] and (memory[2**20 : 2**20 + 3104] == memory[:3104]).all()
    assert get("b", 104, 3000) == [-704] and get("a", 104, 2999) == [-600] and get("a", 104, 3001) == [-800]
    assert (store.get_size("a"), store.get_size("b")) == (3104, -704)
    assert put("a", 8, 104, 3000) == [0]  # yes, but:
    assert get("a", 104, 3000) == [3104] and (memory[2**20 : 2**20 + 3104] == memory[:3104]).all()
    assert (store.remove("a"), store.remove("a", True), store.remove("a", True)) == (-706, 0, -704)
    assert other.batch_is_exist(["a"]) == [0] and put("a", 8, 104, 3000) == [0]
    assert get("a", 104, 3000) == [3104] and (memory[2**20 : 2**20 + 3104] == memory[8:3112]).all()
    assert put("large", 0, 104, 65 * 2**20) == [-200]
    fake.is_away = True
    end(cluster.master)
    assert other.batch_is_exist(["a", "b"]) == [-900, -900] and put("c", 0, 8) == [-900] == get("a", 104, 3000)
    assert store.close() == 0 == other.close()


# -- engines -----------------------------------------------------------------------------------------------------------


def test_what_one_process_computed_others_resume(model, cluster, tmp_path):
    """A process that has ended; then this one, and another beside it."""
    first = process(cluster, tmp_path / "first.json", 1)
    served = start(model, cluster)
    answer = served.send(PROMPT)
    served.send(tokens(4, 9, seed=2))
    written(served)
    second = process(cluster, tmp_path / "second.json", 1, 2)
    assert [each["cached"] for each in first["answers"]] == [0]
    assert answer.num_cached_tokens == 4 * BLOCK
    assert [each["cached"] for each in second["answers"]] == [4 * BLOCK] * 2
    for found in (first, second):
        assert found["answers"][0]["tokens"] == list(answer.generated_tokens)
        assert found["faults"] == {} == found["fallbacks"]
    assert first["answers"][0]["log_probs"] == pytest.approx(answer.generated_log_probs, rel=0, abs=1e-5)
    assert second["answers"][0]["log_probs"] == list(answer.generated_log_probs)
    served.check()
    served.check_drained()


def test_a_dead_holder(model, cluster):
    """Its objects are gone, and nobody takes new ones, until another holder is there."""
    served = computed(model, cluster)
    end(cluster.holder)
    for seed in (1, 2):
        served.engine.reset()
        assert served.send(tokens(4, 9, seed=seed)).num_cached_tokens == 0
    written(served)
    assert set(stats_of(served).faults) & {"gone", "read_transfer_failed", "write_transfer_failed", "write_no_room"}
    wait_until(lambda: not cluster.segments(), "the master gives it up")
    cluster.holder = cluster.start_holder()
    served.engine.reset()
    served.send(PROMPT)
    written(served)
    other = start(model, cluster)
    assert other.send(PROMPT).num_cached_tokens == 4 * BLOCK
    for each in (served, other):
        each.check()
        each.check_drained()


def test_memory_that_a_server_lends_ends_with_it(model, cluster):
    end(cluster.holder)
    wait_until(lambda: not cluster.segments(), "the master gives it up")
    lender = start(model, cluster, gb=1 / 32)
    lender.send(PROMPT)
    written(lender)
    other = start(model, cluster)
    assert other.send(PROMPT).num_cached_tokens == 4 * BLOCK
    lender.context.host_moves.close()
    wait_until(lambda: not cluster.segments(), "its client has ended")
    other.engine.reset()
    assert other.send(PROMPT).num_cached_tokens == 0
    other.check()
    other.check_drained()


def test_a_dead_master_and_its_return(model, cluster):
    served = computed(model, cluster)
    end(cluster.master)
    served.engine.reset()
    for seed in (1, 2, 3):
        assert served.send(tokens(4, 9, seed=seed)).num_cached_tokens == 0
    written(served)
    assert stats_of(served).faults["no_master"] > 0
    cluster.master = cluster.start_master()
    wait_until(lambda: not tier_of(served)._client.is_down, "the master is found")
    wait_until(cluster.segments, "the holder has found it, too")
    served.send(tokens(4, 9, seed=4))
    written(served)
    other = start(model, cluster)
    assert other.send(tokens(4, 9, seed=4)).num_cached_tokens == 4 * BLOCK
    for each in (served, other):
        each.check()
        each.check_drained()


@pytest.mark.parametrize("who", ["holder", "master"])
def test_who_hangs_is_waited_for_as_long_as_set(model, cluster, who):
    """A stopped process answers nothing; the calls to it return much later, and nobody waits for them."""
    computed(model, cluster)
    served = start(model, cluster, wait_s=0.2, ask_s=0.2 if who == "master" else HANG_S)
    hung = cluster.holder if who == "holder" else cluster.master
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        assert served.send(PROMPT).num_cached_tokens == 0
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    stats = served.context.prefix_stats()
    if who == "holder":
        assert stats.fallbacks == {"tier_load_late": 1, "host_load_given_up": 1}
    else:
        assert stats.fallbacks == {} and set(stats_of(served).faults) == {"late_answer"}
    wait_until(lambda: not tier_of(served)._reads, "the reads return")
    served.check()
    served.check_drained()


def test_the_admin_port_is_on_loopback(cluster):
    """As ``scripts/mooncake.sh`` starts it; Mooncake's default is all addresses."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    local = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    for port in (cluster.port, cluster.admin_port):
        assert [address for address in local if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
