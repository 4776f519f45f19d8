"""The ranks behind `ReplicaLoop`: `RankEngine` is the engine on each rank, `Board` is where ranks report that they live.

Each rank has a thread that reports a few times a second, whatever its engine does. A rank that must end ends in time:
also if its engine hangs, and it then also ends the other ranks on its host, which may be stopped or hang.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.mcore.ranks.messages import ANSWER, TELL_SNAPSHOT, pack
from megatron_hybrid_prefix.serve.backend import explained, new_output
from megatron_hybrid_prefix.serve.http_server import SAME_SIGNAL_S
from megatron_hybrid_prefix.serve.metrics import engine_snapshot
from megatron_hybrid_prefix.upstream.names import EngineState

logger = logging.getLogger(__name__)

END_S = 1.5  # for all replicas to stop
LEAVE_S = 0.5  # for the rest of the process after that
REPORT_S = 0.5  # between two reports of a rank
_START_S = 120.0


def own_address() -> str:
    """The address at which other ranks reach this process.

    Raises:
        InputError: There are several hosts, but only a loopback address is known.
    """
    on_this_host = os.environ.get("LOCAL_WORLD_SIZE")
    if on_this_host == os.environ.get("WORLD_SIZE"):
        return "127.0.0.1"
    master = os.environ["MASTER_ADDR"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing, only selects the network interface
        address = str(probe.getsockname()[0])
    # Launchers other than torchrun may not say how many ranks a host has. A loopback address reaches one host only.
    if address.startswith("127.") and on_this_host is not None:
        raise InputError(f"MASTER_ADDR={master} is a loopback address; set it to an address that all hosts can reach")
    return address


class Processes:
    """The processes of the other ranks on this host, by rank. Creating it is a collective call."""

    def __init__(self) -> None:
        own = torch.distributed.get_rank()
        places: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(places, (_process_table(), os.getpid()))
        self._handles: dict[int, int] = {}
        for rank, (table, pid) in enumerate(places):
            if rank != own and table is not None and table == places[own][0]:
                try:
                    self._handles[rank] = os.pidfd_open(pid)
                except OSError:
                    logger.warning("rank %d cannot be watched from rank %d", rank, own)

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process has ended. False for ranks on other hosts."""
        handle = self._handles.get(rank)
        if handle is None:
            return False
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self, rank: int) -> None:
        """Ends a rank's process, whatever it does. Does nothing if it has ended, or is on another host."""
        if rank in self._handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)

    def end_all(self) -> None:
        """Ends this process and those of the other ranks on this host, whatever they do."""
        for rank in self._handles:
            self.kill(rank)
        os._exit(1)


def call_later(after_s: float, function: Callable[[], object]) -> None:
    """Calls a function in a thread that many seconds later, unless this process ends before."""
    timer = threading.Timer(after_s, function)
    timer.daemon = True
    timer.start()


def leave(code: int) -> NoReturn:
    """Ends this process at once. The interpreter would take seconds for it, or wait for a thread that hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _process_table() -> str | None:
    """What two processes have in common that see each other under the same numbers. None: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot.strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def listening_store(host: str) -> torch.distributed.TCPStore:
    """A store for other ranks, which listens on this address only. Torch's would listen on all, and it asks for no password."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return torch.distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class Board:
    """Reports of all ranks, in a store on rank 0. Creating it is a collective call.

    Args:
        engine: The engine of this rank.

    Attributes:
        rank: This rank.
        replica: Number of this rank's replica.
        replica_of_rank: Numbers of all ranks' replicas.
        processes: Processes of the other ranks on this host.
    """

    def __init__(self, engine: Any) -> None:
        self.rank = torch.distributed.get_rank()
        self.replica = torch.distributed.get_rank(engine.pg_collection.dp)
        self.processes = Processes()
        self.replica_of_rank: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(self.replica_of_rank, self.replica)
        address: list[Any] = [None]
        if self.rank == 0:
            host = own_address()
            self._store = listening_store(host)
            address = [(host, self._store.port)]
        torch.distributed.broadcast_object_list(address, src=0)
        if self.rank != 0:
            host, port = address[0]
            self._store = torch.distributed.TCPStore(host, port, is_master=False)

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return int(max(self.replica_of_rank)) + 1

    def report(self, report: dict[str, Any]) -> tuple[bool, bool]:
        """Stores this rank's report. Waits while rank 0 is stopped.

        Returns:
            Whether rank 0 has given this replica up, and whether it is about to end.

        Raises:
            RuntimeError: Rank 0 is gone. (Torch's connection errors.)
        """
        self._store.set(f"report {self.rank}", json.dumps(report))
        return self._store.check([f"lost {self.replica}"]), self._store.check(["ending"])

    def reports(self) -> dict[int, dict[str, Any]]:
        """Latest reports by rank. Ranks without one are missing. Only for rank 0."""
        names = {rank: f"report {rank}" for rank in range(len(self.replica_of_rank))}
        return {rank: json.loads(self._store.get(name)) for rank, name in names.items() if self._store.check([name])}

    def will_end(self) -> None:
        """Tells all ranks that rank 0 is about to end. Only for rank 0."""
        self._store.set("ending", "")

    def give_up(self, replica: int) -> None:
        """Ends the other ranks of a replica: those of this host at once, others when they report. Only for rank 0."""
        self._store.set(f"lost {replica}", "")
        for rank, own in enumerate(self.replica_of_rank):
            if own == replica:
                self.processes.kill(rank)


class RankEngine:
    """The engine of one rank, the thread in which it serves the coordinator, and the thread that reports.

    Args:
        engine: An engine of ``build_engine``, without requests.
        board: Gets the reports.
        port: Port of the coordinator. Only rank 0 needs it.

    Attributes:
        thread: The engine's thread.
        error: Why it ended early.
    """

    def __init__(self, engine: Any, board: Board, port: int = 0) -> None:
        self.engine = engine
        self.error: str | None = None
        self._board, self._port = board, port
        self._seen_tokens: dict[int, int] = {}  # of unfinished requests
        self._first_rank_goes_on, self._answered_s = True, time.monotonic()
        self._connected, self._ended = threading.Event(), threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()
        self._reports = threading.Thread(target=self._report, name="reports", daemon=True)
        self._reports.start()

    def last_report(self) -> None:
        """Returns once rank 0 knows that the engine's thread has ended, or soon after."""
        self._reports.join(LEAVE_S)

    @property
    def first_rank_goes_on(self) -> bool:
        """Whether rank 0 was alive a moment ago, and not about to end."""
        return self._first_rank_goes_on and time.monotonic() - self._answered_s < 4 * REPORT_S

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

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(next(self.engine.controller.inference_wrapped_model.model.parameters()).device)
            asyncio.run(self._serve())
        except BaseException as error:  # megatron's tasks end with SystemExit
            logger.exception("an engine ended")
            self.error = f"the engine of rank {self._board.rank} ended: {type(error).__name__}: {error}"
        finally:
            self._connected.set()
            self._ended.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.engine.start_listening_to_data_parallel_coordinator(
            self._port, launch_inference_coordinator=False, hostname=own_address()
        )
        if self.engine.is_mp_coordinator:
            self.engine.on_step, self.engine.on_question = self._send_new_tokens, self._answer
        self._connected.set()
        await self.engine.engine_loop_task

    def _answer(self, what: str, number: int, prompt: list[int], params: Any) -> None:
        engine = self.engine
        answer = engine_snapshot(engine) if what == TELL_SNAPSHOT else explained(engine, prompt, params)
        engine.tell_coordinator(ANSWER, pack(what), pack(number), pack(json.dumps(answer)))

    def _send_new_tokens(self) -> None:
        """Sends what the last step added to unfinished requests. Finished ones come with megatron's reply."""
        requests = self.engine.requests
        outputs, seen_tokens = [], {}
        for request_id, entry in requests.items():
            parts = entry.record.requests
            tokens = sum(len(part.generated_tokens) for part in parts)
            seen = self._seen_tokens.get(request_id, 0)  # a request that replays its answer has fewer now, or none
            if tokens > seen:
                output = new_output(parts, seen, prompt_tokens=len(parts[0].prompt_tokens))
                outputs.append({"request_id": request_id} | output)
            seen_tokens[request_id] = max(seen, tokens)
        self._seen_tokens = seen_tokens
        self.engine.send_partials(outputs)

    # -- the thread that reports -----------------------------------------------------------------------------------------

    def _report(self) -> None:
        number = 0
        while True:
            number += 1
            began_s = self.engine.step_began_s
            step_s = 0.0 if began_s is None else time.perf_counter() - began_s
            report = {"number": number, "error": self.error, "step_s": step_s}
            try:
                is_given_up, is_ending = self._board.report(report)
                self._first_rank_goes_on, self._answered_s = not is_ending, time.monotonic()
            except RuntimeError:
                if self._ended.wait(LEAVE_S):
                    return  # so all ended
                logger.error("rank 0 is gone")
                leave(1)  # the engine may wait for other ranks forever
            if is_given_up and self._board.rank != 0:
                logger.error("rank 0 has given this replica up")
                leave(1)
            if self._ended.wait(REPORT_S) and (self.error is None or report["error"] is not None):
                return


def serve_with_others(engine: Any, drain_s: float) -> NoReturn:
    """Serves on a rank other than 0, until rank 0 ends it, at most ``drain_s`` and a few seconds after SIGTERM.

    The process ends with this call. If the engine failed, the process group could not be ended: other ranks go on.
    """
    board = Board(engine)
    rank = RankEngine(engine, board)
    end_s = END_S + 2 * LEAVE_S  # rank 0 ends before
    told_s: list[float] = []

    def end() -> None:
        if rank.first_rank_goes_on:
            os._exit(1)  # only this rank was told to end
        board.processes.end_all()

    def on_signal(*_: object) -> None:
        # Rank 0 does not wait for open requests at a second signal, see `HttpServer`.
        again = bool(told_s) and time.monotonic() - told_s[0] > SAME_SIGNAL_S
        if again or not told_s:
            call_later(end_s if again else drain_s + end_s, end)
        told_s.append(time.monotonic())

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    while rank.thread.is_alive():
        rank.thread.join(REPORT_S)
    rank.last_report()
    leave(0 if rank.error is None else 1)
