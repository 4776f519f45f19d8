"""What generates behind the routes: `Backend`, and `EngineLoop`, which is one engine in this process.

Sequences go in, their tokens come out after every step. The engine is touched by one thread alone, between two steps. The
asyncio side submits, aborts and asks; what the thread has to say reaches it once a step, in one callback.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_hybrid_prefix.serve.metrics import engine_snapshot

logger = logging.getLogger(__name__)

# An engine that schedules nothing in this many steps in a row never will.
_MAX_IDLE_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a step gave one sequence.

    Attributes:
        tokens: New token ids.
        log_probs: Their natural-log probabilities; empty unless asked for.
        top_log_probs: For each the likeliest tokens' text and log-probability; empty unless asked for.
        cached_tokens: Prompt tokens that were skipped.
        finished: Whether this is the last one.
        error: Why it failed; then it is the last one.
    """

    tokens: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    top_log_probs: Sequence[dict[str, float]] = ()
    cached_tokens: int = 0
    finished: bool = False
    error: str | None = None


@dataclass(eq=False, slots=True, kw_only=True)
class Stream:
    """One prompt to be continued once; ``deliver`` gets its updates, on the asyncio side.

    Attributes:
        prompt: Token ids.
        sampling: Fields and attributes of upstream's ``SamplingParams``.
        deliver: Called with each update, until the last one, or until it is aborted.
        stop: Strings at which whoever gets the updates ends it.
        arrived_s: When the request arrived, for the time to first token.
        closed: Whether no more updates come.
    """

    prompt: list[int]
    sampling: dict[str, Any]
    deliver: Callable[[Update], None]
    stop: Sequence[str] = ()
    arrived_s: float = field(default_factory=time.perf_counter)
    closed: bool = False
    request_id: int | None = None  # from here on only the engine's thread looks at it
    seen_tokens: int = 0


class Backend(ABC):
    """Generates for the routes. All of it is called in the running asyncio loop.

    Attributes:
        open_sequences: That run or wait.
        failures: Steps that raised.
    """

    def __init__(self) -> None:
        self.open_sequences = 0
        self.failures = 0

    @property
    @abstractmethod
    def problem(self) -> str | None:
        """Why nothing can be generated any more; None while all is well."""

    @abstractmethod
    def start(self) -> None:
        """Begins."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends; what is unfinished gets no more updates."""

    @abstractmethod
    def submit(self, sequence: Stream) -> None:
        """Queue a sequence."""

    @abstractmethod
    def abort(self, sequence: Stream) -> None:
        """Give a sequence up, finished or not; it gets no more updates."""

    @abstractmethod
    async def snapshots(self) -> dict[str, dict[str, Any]]:
        """What `engine_snapshot` says of each replica, by name.

        Raises:
            RuntimeError: There is a problem.
        """

    @abstractmethod
    async def reset_cache(self) -> None:
        """Nothing that is cached now is reused.

        Raises:
            RuntimeError: There is a problem.
        """


class EngineLoop(Backend):
    """One engine, and the thread that steps it.

    Args:
        engine: An engine of ``build_engine`` with this package's cache, without requests.
        on_first_token: Called in the engine's thread with seconds since arrival and whether the cache was hit.
    """

    def __init__(self, engine: Any, on_first_token: Callable[[float, bool], None] = lambda seconds, hit: None) -> None:
        super().__init__()
        self.engine = engine
        self._on_first_token = on_first_token
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._broken: str | None = None
        self._live: dict[int, Stream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- the asyncio side ----------------------------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        """See `Backend`."""
        if self._broken is None and not self._thread.is_alive():
            return "the engine's thread is not running"
        return self._broken

    def start(self) -> None:
        """Starts the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, timeout_s: float = 60.0) -> None:
        """Ends the thread after the step it is in."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, timeout_s)

    def submit(self, sequence: Stream) -> None:
        """See `Backend`."""
        self.open_sequences += 1
        self._send(lambda: self._add(sequence))

    def abort(self, sequence: Stream) -> None:
        """See `Backend`."""
        if not sequence.closed:
            self._close(sequence)
            self._send(lambda: self._take_out(sequence))

    async def snapshots(self) -> dict[str, dict[str, Any]]:
        """See `Backend`."""
        return {"0": await self.call(lambda: engine_snapshot(self.engine))}

    async def reset_cache(self) -> None:
        """See `Backend`."""
        await self.call(self.engine.invalidate)

    async def call(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns, called in the engine's thread between two steps.

        Raises:
            RuntimeError: The engine's thread is not running.
        """
        if self.problem is not None:
            raise RuntimeError(self.problem)
        assert self._loop is not None
        loop, future = self._loop, self._loop.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            if future.done():
                return  # the caller went away
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        def command() -> None:
            value, problem = None, None
            try:
                value = function()
            except Exception as error:  # the caller's to handle
                problem = error
            loop.call_soon_threadsafe(settle, value, problem)

        self._send(command)
        return await future

    def _send(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _close(self, sequence: Stream) -> None:
        sequence.closed = True
        self.open_sequences -= 1

    def _receive(self, updates: list[tuple[Stream, Update]]) -> None:
        for sequence, update in updates:
            if sequence.closed:
                continue
            if update.finished:
                self._close(sequence)
            sequence.deliver(update)

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
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
            try:
                step = self.engine.step_modern()
                updates = list(self._collect(step["finished_request_records"]))
                idle_steps = 0 if step["active_request_ids"] or step["finished_request_records"] else idle_steps + 1
                if idle_steps > _MAX_IDLE_STEPS:
                    raise RuntimeError(
                        f"the engine cannot schedule {len(self.engine.waiting_request_ids)} waiting request(s)"
                    )
            except Exception as error:
                logger.exception("a step failed; its requests get an error, and the engine starts over, empty")
                idle_steps = 0
                updates = self._start_over(error)
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

    def _deliver(self, updates: list[tuple[Stream, Update]]) -> None:
        if updates:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._receive, updates)

    def _add(self, sequence: Stream) -> None:
        from megatron.core.inference.sampling_params import SamplingParams

        if sequence.closed:
            return  # gave up before it got here
        if self._broken is not None:
            self._deliver([(sequence, Update(finished=True, error=self._broken))])
            return
        request_id = int(next(self.engine.request_counter))
        try:
            self.engine.add_request(request_id, sequence.prompt, SamplingParams.deserialize(sequence.sampling))
        except Exception as error:
            logger.exception("a request was not taken")
            self.engine.requests.pop(request_id, None)
            self._deliver([(sequence, Update(finished=True, error=f"{type(error).__name__}: {error}"))])
            return
        sequence.request_id = request_id
        self._live[request_id] = sequence

    def _take_out(self, sequence: Stream) -> None:
        request_id = sequence.request_id
        if self._broken is None and request_id is not None and self._live.get(request_id) is sequence:
            del self._live[request_id]
            self.engine.abort_request(request_id)

    def _start_over(self, error: Exception) -> list[tuple[Stream, Update]]:
        self.failures += 1
        why = f"{type(error).__name__}: {error}"
        updates = [(sequence, Update(finished=True, error=why)) for sequence in self._live.values()]
        self._live.clear()
        try:
            self.engine.reset()
        except Exception as second:
            logger.exception("the engine could not start over")
            self._broken = f"the engine could not start over: {type(second).__name__}: {second}"
        return updates

    def _collect(self, finished: Sequence[Any]) -> Iterator[tuple[Stream, Update]]:
        """What the step that just ended gave to whom."""
        records = {record.request_id: record for record in finished}
        for request_id, sequence in list(self._live.items()):
            record = records.get(request_id)
            parts = (record or self.engine.requests[request_id].record).requests
            tokens = _since(parts, "generated_tokens", sequence.seen_tokens)
            if not tokens and record is None:
                continue
            cached_tokens = int(parts[0].num_cached_tokens)
            if tokens and not sequence.seen_tokens:
                self._on_first_token(time.perf_counter() - sequence.arrived_s, cached_tokens > 0)
            log_probs, tops = (
                _since(parts, name, sequence.seen_tokens)[: len(tokens)]
                for name in ("generated_log_probs", "generated_top_n_logprobs")
            )
            sequence.seen_tokens += len(tokens)
            if record is not None:
                del self._live[request_id]
            yield (
                sequence,
                Update(
                    tokens=tokens,
                    log_probs=log_probs,
                    top_log_probs=tops,
                    cached_tokens=cached_tokens,
                    finished=record is not None,
                    error=refusal(parts[-1]) if record is not None and parts[-1].failed() else None,
                ),
            )


def _since(parts: Sequence[Any], name: str, start: int) -> list[Any]:
    """Items of a list that goes on over the parts of a preempted request, from ``start`` on."""
    found: list[Any] = []
    for part in parts:
        items = getattr(part, name) or ()
        found += items[start:]
        start = max(0, start - len(items))
    return found


def refusal(request: Any) -> str:
    """Why a request failed."""
    causes = (event.payload for event in request.events if isinstance(event.payload, Exception))
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes) or "the engine refused it"
