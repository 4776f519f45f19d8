"""`EngineLoop`: a `Backend` for one engine in this process.

Tasks go in; new tokens come out after every step. Only one thread touches the engine, between two steps. The asyncio
side sends it commands. The thread answers with one callback per step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any

from megatron_hybrid_prefix.serve.backend import Backend, GenerationTask, Update, explained, new_output, refusal
from megatron_hybrid_prefix.serve.metrics import Sample, engine_snapshot

logger = logging.getLogger(__name__)

# Give up after this many steps in a row in which the engine schedules nothing.
_MAX_IDLE_STEPS = 100
_END_S = 3.0  # for the current step, at the end
_NOT_RUNNING = "the engine's thread is not running"


class EngineLoop(Backend):
    """One engine and the thread that steps it.

    Args:
        engine: An engine of ``build_engine`` with this package's cache, without requests.
        on_first_token: Called in the engine's thread with the seconds since arrival and whether the cache was hit.
    """

    def __init__(self, engine: Any, on_first_token: Callable[[float, bool], None] = lambda seconds, hit: None) -> None:
        super().__init__()
        self.engine = engine
        self._on_first_token = on_first_token
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = self._ended = False
        self._broken: str | None = None
        self._live: dict[int, GenerationTask] = {}
        self._step_began_s: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- the asyncio side ----------------------------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        if self._broken is None and not self._thread.is_alive():
            return _NOT_RUNNING
        return self._broken

    @property
    def replica_steps_s(self) -> dict[str, float]:
        began_s = self._step_began_s
        return {"0": 0.0 if began_s is None else time.perf_counter() - began_s}

    @property
    def is_running(self) -> bool:
        """See `Backend`: whether the engine's thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, timeout_s: float = _END_S) -> None:
        """Ends the thread after its current step. A step that takes longer is left behind: see `is_running`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, timeout_s)

    def submit(self, task: GenerationTask) -> None:
        self._open.add(task)
        self._send(partial(copy_context().run, self._add, task))  # the log has the request's id

    def abort(self, task: GenerationTask) -> None:
        if not task.closed:
            self._close(task)
            self._send(lambda: self._take_out(task))

    async def snapshots(self) -> dict[str, list[Sample]]:
        return {"0": await self.call(lambda: engine_snapshot(self.engine))}

    async def explain(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, dict[str, Any]]:
        from megatron_hybrid_prefix.upstream.names import SamplingParams

        params = SamplingParams.deserialize(sampling)
        return {"0": await self.call(lambda: explained(self.engine, prompt, params))}

    async def reset_cache(self) -> None:
        await self.call(self.engine.invalidate)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Calls ``function`` in the engine's thread, between two steps. Returns its result.

        Raises:
            RuntimeError: The engine's thread is not running.
        """
        if self.problem is not None:
            raise RuntimeError(self.problem)
        answer: Future[Any] = Future()

        def command() -> None:
            if answer.set_running_or_notify_cancel():  # else the caller was cancelled
                try:
                    answer.set_result(function())
                except Exception as error:  # re-raised in the caller
                    answer.set_exception(error)

        self._send(command)
        return await asyncio.wrap_future(answer)

    def _send(self, command: Callable[[], None]) -> None:
        with self._wake:
            if not self._ended:
                self._commands.append(command)
                self._wake.notify()
                return
        command()  # the thread has ended, so nothing else uses the engine

    def _close(self, task: GenerationTask) -> None:
        task.closed = True
        self._open.discard(task)

    def _receive(self, updates: list[tuple[GenerationTask, Update]]) -> None:
        for task, update in updates:
            if task.closed:
                continue
            if update.finished:
                self._close(task)
            task.deliver(update)

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._run_steps()
        finally:
            self._broken = self._broken or _NOT_RUNNING
            with self._wake:
                self._ended = True
                for command in self._commands:  # they came after the last step, and somebody waits for them
                    command()

    def _run_steps(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(next(self.engine.controller.inference_wrapped_model.model.parameters()).device)
        idle_steps = 0
        while True:
            for command in self._next_commands():
                command()
            if self._stopping:
                return
            if not self._has_work():
                continue
            self._step_began_s = time.perf_counter()
            try:
                step = self.engine.step_modern()
                updates = list(self._collect(step["finished_request_records"]))
                idle_steps = 0 if step["active_request_ids"] or step["finished_request_records"] else idle_steps + 1
                if idle_steps > _MAX_IDLE_STEPS:
                    raise RuntimeError(
                        f"the engine cannot schedule {len(self.engine.waiting_request_ids)} waiting request(s)"
                    )
            except Exception as error:
                logger.exception("a step failed: its requests get an error, and the engine is reset")
                idle_steps = 0
                updates = self._start_over(error)
            self._step_began_s = None
            self._deliver(updates)

    def _has_work(self) -> bool:
        return self._broken is None and self.engine.has_unfinished_requests()

    def _next_commands(self) -> list[Callable[[], None]]:
        with self._wake:
            while not (self._commands or self._stopping or self._has_work()):
                self._wake.wait()
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _deliver(self, updates: list[tuple[GenerationTask, Update]]) -> None:
        if updates:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._receive, updates)

    def _add(self, task: GenerationTask) -> None:
        from megatron_hybrid_prefix.upstream.names import SamplingParams

        if task.closed:
            return  # aborted before it was added
        if self._broken is not None:
            self._deliver([(task, Update(finished=True, error=self._broken))])
            return
        request_id = int(next(self.engine.request_counter))
        try:
            self.engine.add_request(request_id, task.prompt, SamplingParams.deserialize(task.sampling))
        except Exception as error:
            logger.error("the engine refused a request", exc_info=not isinstance(error, ValueError))
            self._deliver([(task, Update(finished=True, error=f"{type(error).__name__}: {error}"))])
            return
        task.request_id = request_id
        self._live[request_id] = task

    def _take_out(self, task: GenerationTask) -> None:
        request_id = task.request_id
        if self._broken is None and request_id is not None and self._live.get(request_id) is task:
            del self._live[request_id]
            try:
                self.engine.abort_request(request_id)
            except Exception as error:
                logger.exception("a request could not be aborted: all requests get an error, and the engine is reset")
                self._deliver(self._start_over(error))

    def _start_over(self, error: Exception) -> list[tuple[GenerationTask, Update]]:
        self.failures += 1
        why = f"{type(error).__name__}: {error}"
        updates = [(task, Update(finished=True, error=why)) for task in self._live.values()]
        self._live.clear()
        try:
            self.engine.reset()
        except Exception as second:
            logger.exception("the engine could not be reset")
            self._broken = f"the engine could not be reset: {type(second).__name__}: {second}"
        return updates

    def _collect(self, finished: Sequence[Any]) -> Iterator[tuple[GenerationTask, Update]]:
        """New output of the step that just ended, by task."""
        records = {record.request_id: record for record in finished}
        for request_id, task in list(self._live.items()):
            record = records.get(request_id)
            parts = (record or self.engine.requests[request_id].record).requests
            output = new_output(parts, task.seen_tokens, len(task.prompt))
            tokens = output["tokens"]
            if not tokens and record is None:
                continue
            if tokens and not task.seen_tokens:
                self._on_first_token(time.perf_counter() - task.arrived_s, output["cached_tokens"] > 0)
            task.seen_tokens += len(tokens)
            if record is not None:
                del self._live[request_id]
            failed = record is not None and parts[-1].failed()
            yield task, Update(**output, finished=record is not None, error=refusal(parts[-1]) if failed else None)
