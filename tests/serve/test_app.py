"""`Api` with a backend that never answers, or that cannot be reached."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hybrid_prefix.serve import replicas
from megatron_hybrid_prefix.serve.app import Api, Limits
from megatron_hybrid_prefix.serve.backend import Backend, GenerationTask, Update
from megatron_hybrid_prefix.serve.engine_loop import EngineLoop
from megatron_hybrid_prefix.serve.errors import ApiError
from megatron_hybrid_prefix.serve.event_stream import EventStream
from megatron_hybrid_prefix.serve.generation import Generation
from megatron_hybrid_prefix.serve.metrics import ServerMetrics
from megatron_hybrid_prefix.serve.protocol import read_request
from megatron_hybrid_prefix.serve.replicas import ReplicaLoop
from tests.harness.limits import HANG_S
from tests.serve.test_clients import served


class Fake(Backend):
    """Answers each task, except the first ``silent`` ones. Its next ``broken`` submissions raise."""

    problem = None

    def __init__(self, silent: int = 0, broken: int = 0) -> None:
        super().__init__()
        self.silent, self.broken = silent, broken
        self.submitted: list[GenerationTask] = []

    def submit(self, task: GenerationTask) -> None:
        self.submitted.append(task)
        if len(self.submitted) > 1 and self.broken:
            raise ConnectionError("nobody listens")
        self._open.add(task)
        if len(self.submitted) > self.silent:
            task.deliver(Update(tokens=[65], finished=True))

    def abort(self, task: GenerationTask) -> None:
        task.closed = True
        self._open.discard(task)

    def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def snapshots(self) -> dict[str, dict[str, Any]]:
        return {}

    async def explain(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {}

    async def reset_cache(self) -> None: ...


def api(backend: Backend) -> Api:
    limits = Limits(sequences=4, body_bytes=1000, step_s=0.05, keys={"key": "tenant"}, max_per_tenant=4)
    return Api(backend, served(), limits, ServerMetrics(1))


def test_a_probe_without_a_token_is_closed_and_the_next_one_is_new():
    backend = Fake(silent=1)
    made = api(backend)

    async def probe() -> int:
        try:
            return (await made._health_generate(None)).status_code
        except ApiError as error:
            return error.status

    async def probes() -> list[int]:
        return [*await asyncio.gather(probe(), probe()), await probe(), await probe()]

    assert asyncio.run(probes()) == [503, 503, 200, 200]
    assert len(backend.submitted) == 3 and all(task.closed for task in backend.submitted)


def test_a_backend_that_cannot_be_reached_keeps_no_places():
    backend = Fake(broken=1)
    made = api(backend)

    async def ask() -> None:
        fields = {"model": "tiny", "prompt": "x", "n": 3}
        asked = read_request(fields, "completions", made._served, "tenant")
        request: Any = SimpleNamespace(receive=asyncio.Event().wait, state=SimpleNamespace())
        await made._answer(request, Generation(asked, backend, made._served, 0.0))

    with pytest.raises(ConnectionError):
        asyncio.run(ask())
    assert made._open_of_tenant["tenant"] == 0 and backend.open_sequences == 0 and len(backend.submitted) == 2


def test_a_request_that_was_not_sent_to_a_replica_is_not_open():
    class Client:
        def submit(self, *_: Any) -> int:
            raise ConnectionError("nobody listens")

    loop = ReplicaLoop(None, None, 2, None, None)
    loop._client = Client()
    with pytest.raises(ConnectionError):
        loop.submit(GenerationTask(prompt=[1], sampling={}, deliver=print, arrived_s=0.0, stop=[]))
    assert loop.open_sequences == 0


def test_a_replica_that_never_answers_is_in_a_step(monkeypatch):
    client = SimpleNamespace(connect=lambda timeout_s: None)
    monkeypatch.setattr(replicas, "ReplicaClient", lambda *_: client)
    monkeypatch.setattr(replicas, "_SILENT_S", 0.0)
    monkeypatch.setattr(ReplicaLoop, "_watch", lambda self: asyncio.sleep(0))

    async def started() -> ReplicaLoop:
        loop = ReplicaLoop(None, SimpleNamespace(address=""), 2, None, None)
        assert loop.replica_steps_s == {"0": 0.0, "1": 0.0}
        loop.start()
        return loop

    assert min(asyncio.run(started()).replica_steps_s.values()) > 0


def test_nothing_waits_for_a_thread_that_has_ended(monkeypatch):
    """Who asked just before the end gets an answer: a call its result, a task an error."""
    engine: Any = SimpleNamespace(has_unfinished_requests=lambda: False)
    found: list[Update] = []

    async def ask_late() -> int:
        loop = EngineLoop(engine)
        loop.start()
        await loop.stop(HANG_S)
        monkeypatch.setattr(EngineLoop, "problem", None)
        loop.submit(GenerationTask(prompt=[1], sampling={}, deliver=found.append))
        return await asyncio.wait_for(loop.call(lambda: 7), HANG_S)

    assert asyncio.run(ask_late()) == 7
    assert [update.finished for update in found] == [True] and found[0].error


def test_what_is_asked_while_the_thread_ends_is_answered(monkeypatch):
    """The command comes after the thread has looked for commands for the last time."""
    engine: Any = SimpleNamespace(has_unfinished_requests=lambda: False)

    async def ask_in_between() -> int:
        loop = EngineLoop(engine)
        told, next_commands = threading.Event(), loop._next_commands

        def commands() -> list[Any]:
            found = next_commands()
            if loop._stopping:
                assert told.wait(HANG_S)
            return found

        monkeypatch.setattr(loop, "_next_commands", commands)
        loop.start()
        stopping = asyncio.create_task(loop.stop(HANG_S))
        while not loop._stopping:
            await asyncio.sleep(0)
        asked = asyncio.create_task(loop.call(lambda: 7))
        await asyncio.sleep(0)
        told.set()
        await stopping
        return await asyncio.wait_for(asked, HANG_S)

    assert asyncio.run(ask_in_between()) == 7


class Closed:
    """A generation that only notes that it was closed."""

    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


def test_the_end_of_a_stream_is_told_when_sending_raises():
    """Otherwise the places of its tenant would never be free again."""
    generation, ends = Closed(), []

    async def no_chunks():
        return
        yield

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        raise RuntimeError("no such connection")

    stream = EventStream(generation, no_chunks(), {}, lambda *end: ends.append(end))
    with pytest.raises(RuntimeError, match="no such connection"):
        asyncio.run(stream({}, receive, send))
    assert ends == [(generation, False)] and generation.closed == 1
