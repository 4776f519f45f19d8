"""Data-parallel replicas: `ReplicaLoop` is the `Backend` on rank 0, `RankEngine` is the engine on every rank.

Rank 0 has the routes, megatron's coordinator (a separate process), megatron's client, and the first rank of the first
replica. The coordinator's protocol only carries whole answers. So a stream arrives in one piece, and an aborted answer
is generated to its end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import zmq

from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.mcore.ranks.coordinator import CoordinatorProcess
from megatron_hybrid_prefix.serve.backend import STOPPED, Backend, GenerationTask, Update, prompt_log_probs, refusal
from megatron_hybrid_prefix.serve.metrics import engine_snapshot
from megatron_hybrid_prefix.upstream.names import EngineState, InferenceClient, SamplingParams

logger = logging.getLogger(__name__)

_SNAPSHOT_S = 1.0  # between two snapshots of a replica
_WATCH_S = 0.5
_START_S = 120.0
_CONNECT_S = 10.0  # for the coordinator's first reply
_END_S = 4.0  # for all replicas to stop
_LEAVE_S = 0.5  # for the rest of the process after that


def leave_in_time(after_s: float = 0.0) -> None:
    """Forces the process to exit ``after_s`` seconds and the replicas' time later, even if it hangs."""
    timer = threading.Timer(after_s + _END_S + _LEAVE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def own_address() -> str:
    """The address at which other ranks reach this process.

    Raises:
        InputError: There are several hosts, but only a loopback address is known.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return "127.0.0.1"
    master = os.environ["MASTER_ADDR"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing, only selects the network interface
        address = str(probe.getsockname()[0])
    if address.startswith("127."):
        raise InputError(f"MASTER_ADDR={master} is a loopback address; set it to an address that all hosts can reach")
    return address


class SnapshotBoard:
    """The latest snapshot of each replica, in a store on rank 0. Creating it is a collective call.

    Args:
        platform: The running platform.
    """

    def __init__(self, platform: Any) -> None:
        self._replicas = platform.dp
        address: list[Any] = [None]
        if platform.rank == 0:
            host = own_address()
            self._store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            address = [(host, self._store.port)]
        torch.distributed.broadcast_object_list(address, src=0)
        if platform.rank != 0:
            host, port = address[0]
            self._store = torch.distributed.TCPStore(host, port, is_master=False)

    @property
    def is_there(self) -> bool:
        """Whether rank 0, which has the store, is alive."""
        try:
            self._store.check(["0"])
        except RuntimeError:  # torch's connection errors
            return False
        return True

    def write(self, replica: int, snapshot: dict[str, Any]) -> None:
        """Stores a replica's snapshot."""
        self._store.set(str(replica), json.dumps(snapshot))

    def read(self) -> dict[str, dict[str, Any]]:
        """Snapshots by replica. Replicas without one are missing."""
        names = [str(number) for number in range(self._replicas)]
        return {name: json.loads(self._store.get(name)) for name in names if self._store.check([name])}


class RankEngine:
    """The engine of one rank, and the thread in which it serves the coordinator.

    Args:
        engine: An engine of ``build_engine``, without requests.
        board: Receives the replica's snapshots.
        port: Port of the coordinator. Only rank 0 needs it.

    Attributes:
        error: Why the thread ended early.
    """

    def __init__(self, engine: Any, board: SnapshotBoard, port: int = 0) -> None:
        self.engine = engine
        self.error: str | None = None
        self._board, self._port = board, port
        self._connected = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the thread to end."""
        self._thread.join(timeout_s)

    def wait_until_connected(self, timeout_s: float = _START_S) -> None:
        """Returns once all ranks are connected.

        Raises:
            RuntimeError: They did not connect in time, or the engine failed.
        """
        if not self._connected.wait(timeout_s) or self.error is not None:
            raise RuntimeError(self.error or f"the ranks did not connect within {timeout_s:g} s")

    async def wait_until_paused(self) -> None:
        """Returns once all replicas are paused. Can be awaited in any asyncio loop."""
        assert self._loop is not None
        waiting = asyncio.run_coroutine_threadsafe(self.engine.wait_until(EngineState.PAUSED), self._loop)
        await asyncio.wrap_future(waiting)

    def _run(self) -> None:
        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(next(self.engine.controller.inference_wrapped_model.model.parameters()).device)
            asyncio.run(self._serve())
        except BaseException as error:  # megatron's tasks end with SystemExit
            logger.exception("an engine ended")
            self.error = f"the engine of rank {torch.distributed.get_rank()} ended: {type(error).__name__}: {error}"
        finally:
            self._connected.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.engine.start_listening_to_data_parallel_coordinator(
            self._port, launch_inference_coordinator=False, hostname=own_address()
        )
        self._connected.set()
        talking = asyncio.create_task(self._talk())
        try:
            await self.engine.engine_loop_task
        finally:
            talking.cancel()

    async def _talk(self) -> None:
        replica = torch.distributed.get_rank(self.engine.pg_collection.dp)
        while self.engine.is_mp_coordinator:
            self._board.write(replica, engine_snapshot(self.engine))
            await asyncio.sleep(_SNAPSHOT_S)


class ReplicaLoop(Backend):
    """All replicas, as a `Backend` on rank 0.

    Args:
        rank: The engine of this process, connected.
        coordinator: The coordinator's process, ready.
        board: Snapshots of all replicas.
        on_first_token: Called with the seconds since arrival and whether the cache was hit.
        on_failure: Called once the backend cannot generate any more.
    """

    def __init__(
        self,
        rank: RankEngine,
        coordinator: CoordinatorProcess,
        board: SnapshotBoard,
        on_first_token: Callable[[float, bool], None],
        on_failure: Callable[[], None],
    ) -> None:
        super().__init__()
        self._rank, self._coordinator, self._board = rank, coordinator, board
        self._on_first_token, self._on_failure = on_first_token, on_failure
        self._epoch = 0
        self._broken: str | None = None
        self._client: Any = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str | None:
        """See `Backend`."""
        return self._broken

    def start(self) -> None:
        """See `Backend`."""
        self._client = InferenceClient(self._coordinator.address, deserialize=True)
        self._client.socket.setsockopt(zmq.RCVTIMEO, int(_CONNECT_S * 1000))  # timeout of the coordinator's first reply
        self._client.start()
        self._client.socket.setsockopt(zmq.RCVTIMEO, -1)
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stops all replicas on all ranks."""
        assert self._watching is not None
        self._watching.cancel()
        try:
            if self._broken is None:
                async with asyncio.timeout(_END_S):
                    self._client.pause_engines()
                    await self._rank.wait_until_paused()
                    self._client.stop_engines()
                    await asyncio.to_thread(self._rank.join, _END_S)
                    if self._rank.is_alive:
                        raise TimeoutError
                self._client.shutdown_coordinator()
        except TimeoutError:
            self._broken = f"the replicas did not stop within {_END_S:g} s"
        except (RuntimeError, asyncio.CancelledError):  # the engine's loop has ended or was closed
            self._broken = self._rank.error or "the engine of rank 0 ended"
        finally:
            await asyncio.to_thread(self._coordinator.stop, 0.0 if self._broken else _LEAVE_S)
            self._client.stop()

    def submit(self, task: GenerationTask) -> None:
        """See `Backend`."""
        if self._broken is not None:
            task.deliver(Update(finished=True, error=self._broken))
            return
        # `TextStream` finds all stop strings in the text. The engine also stops at those it can find in the tokens.
        words = [word for word in task.stop if self._is_exact(word)]
        fields = task.sampling | {"stop_words": words, "detokenize_stop_sequence": True}
        sent_s = (time.perf_counter(), time.time())
        future = self._client.add_request(task.prompt, SamplingParams.deserialize(fields))
        self._open.add(task)  # also while it is aborted, since it is generated to its end
        future.add_done_callback(partial(self._finish, task, sent_s))

    def abort(self, task: GenerationTask) -> None:
        """See `Backend`. The coordinator has no abort, so the task is generated to its end and dropped."""
        task.closed = True

    def end_all(self) -> None:
        """See `Backend`."""
        for task in self._open:
            self._deliver(task, STOPPED)

    async def snapshots(self) -> dict[str, dict[str, Any]]:
        """See `Backend`. Snapshots are about a second old, or older if a replica is in a long step."""
        return await asyncio.to_thread(self._board.read)

    async def reset_cache(self) -> None:
        """See `Backend`."""
        self._epoch += 1
        self._client.set_generation_epoch(self._epoch)  # reaches the replicas before the next task does

    def _is_exact(self, text: str) -> bool:
        """Whether tokenizing and detokenizing gives back the same text."""
        tokenizer = self._rank.engine.controller.tokenizer
        tokens = tokenizer.tokenize(text)
        return bool(tokens) and tokenizer.detokenize(tokens) == text

    def _finish(self, task: GenerationTask, sent_s: tuple[float, float], future: asyncio.Future[Any]) -> None:
        self._open.discard(task)
        if future.cancelled():
            return
        request = future.result()
        cached_tokens = int(request.num_cached_tokens)
        if request.ttft is not None:
            # The engine counts from its own arrival time. On another host this is as accurate as the clocks of both.
            taken_s = next(event.timestamp for event in request.events if event.type.name == "ADD_ENGINE")
            waited_s = sent_s[0] - task.arrived_s + max(0.0, taken_s - sent_s[1])
            self._on_first_token(waited_s + request.ttft, cached_tokens > 0)
        of_prompt, tops_of_prompt = prompt_log_probs([request], len(task.prompt))
        update = Update(
            tokens=request.generated_tokens,
            log_probs=request.generated_log_probs or (),
            top_log_probs=request.generated_top_n_logprobs or (),
            prompt_log_probs=of_prompt,
            prompt_top_log_probs=tops_of_prompt,
            cached_tokens=cached_tokens,
            finished=True,
            error=refusal(request) if request.failed() else None,
        )
        self._deliver(task, update)

    @staticmethod
    def _deliver(task: GenerationTask, update: Update) -> None:
        if not task.closed:
            task.closed = True
            task.deliver(update)

    async def _watch(self) -> None:
        while self._rank.is_alive and self._coordinator.is_alive:
            await asyncio.sleep(_WATCH_S)
        what = "the coordinator" if self._rank.is_alive else "the engine of rank 0"
        self._broken = self._rank.error or f"{what} ended unexpectedly"
        self.failures += 1
        logger.error("%s", self._broken)
        for task in self._open:
            self._deliver(task, Update(finished=True, error=self._broken))
        self._on_failure()


def serve_with_others(engine: Any, platform: Any, drain_s: float) -> int:
    """Serves on a rank other than 0, until rank 0 ends it, at most ``drain_s`` seconds after SIGTERM.

    Returns:
        The exit code.
    """
    board = SnapshotBoard(platform)
    rank = RankEngine(engine, board)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: leave_in_time(drain_s))
    while rank.is_alive:
        rank.join(_SNAPSHOT_S)
        if rank.is_alive and not board.is_there:
            logger.error("rank 0 is gone")
            os._exit(1)  # the engine may wait for other ranks forever
    leave_in_time()  # after a failure, other ranks may hang
    return 0 if rank.error is None else 1
