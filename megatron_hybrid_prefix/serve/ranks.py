"""`RankEngine`: the engine of each rank behind `ReplicaLoop`, in a thread.

Torchrun ends all ranks if one ends, and kills those that hang. Rank 0 stops the others at the end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

import torch

from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.mcore.ranks.messages import ANSWER, TELL_EXPLAIN, TELL_SNAPSHOT, pack
from megatron_hybrid_prefix.serve.backend import explained, new_output
from megatron_hybrid_prefix.serve.http_server import SAME_SIGNAL_S
from megatron_hybrid_prefix.serve.metrics import engine_snapshot
from megatron_hybrid_prefix.upstream.names import EngineState

logger = logging.getLogger(__name__)

END_S = 1.5  # for all replicas to stop
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


def leave(code: int) -> NoReturn:
    """Ends this process at once. The interpreter would take seconds for it, or wait for a thread that hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class RankEngine:
    """The engine of one rank, and the thread in which it serves the coordinator.

    Args:
        engine: An engine of ``build_engine``, without requests.
        port: Port of the coordinator. Only rank 0 needs it.

    Attributes:
        thread: The engine's thread.
        error: Why it ended early.
    """

    def __init__(self, engine: Any, port: int = 0) -> None:
        self.engine = engine
        self.error: str | None = None
        self._port = port
        self._seen_tokens: dict[int, int] = {}  # of unfinished requests
        self._connected = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

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
            self.error = f"the engine of rank {torch.distributed.get_rank()} ended: {type(error).__name__}: {error}"
        finally:
            self._connected.set()

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
        answer: Any = None
        if what == TELL_SNAPSHOT:
            answer = engine_snapshot(engine)
        elif what == TELL_EXPLAIN:
            answer = explained(engine, prompt, params)
        engine.tell_coordinator(ANSWER, pack(what), pack(number), pack(json.dumps(answer)))

    def _send_new_tokens(self) -> None:
        """Sends what the last step added to unfinished requests. Finished ones come with megatron's reply."""
        requests = self.engine.requests
        outputs, seen_tokens = [], {}
        for request_id, entry in requests.items():
            parts = entry.record.requests
            tokens = sum(len(part.generated_tokens) for part in parts)
            seen = self._seen_tokens.get(request_id, 0)
            if tokens > seen:
                output = new_output(parts, seen, prompt_tokens=len(parts[0].prompt_tokens))
                outputs.append({"request_id": request_id} | output)
            seen_tokens[request_id] = tokens
        self._seen_tokens = seen_tokens
        self.engine.send_partials(outputs)


def serve_with_others(engine: Any, drain_s: float) -> NoReturn:
    """Serves on a rank other than 0, until rank 0 stops it, at most ``drain_s`` and a few seconds after SIGTERM.

    The process ends with this call. If the engine failed, the process group could not be ended: other ranks go on.
    """
    told_s: list[float] = []

    def on_signal(*_: object) -> None:
        # Rank 0 does not wait for open requests at a second signal, see `HttpServer`.
        again = bool(told_s) and time.monotonic() - told_s[0] > SAME_SIGNAL_S
        if again or not told_s:
            signal.setitimer(signal.ITIMER_REAL, 2 * END_S + (0.0 if again else drain_s))  # SIGALRM ends the process
        told_s.append(time.monotonic())

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    rank = RankEngine(engine)
    rank.thread.join()
    leave(0 if rank.error is None else 1)
