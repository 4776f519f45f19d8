"""The interface between routes and engine: a `Backend` runs `GenerationTask`s and delivers their `Update`s."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_hybrid_prefix.serve.errors import ApiError, stopping
from megatron_hybrid_prefix.serve.metrics import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The new output of one task after a step.

    Attributes:
        tokens: New token ids.
        log_probs: Their natural-log probabilities; empty unless requested.
        top_log_probs: For each token, name (``token_id:5``) and log-probability of the likeliest tokens; empty unless
            requested.
        prompt_log_probs: Of each prompt token after the first; in the first update, if requested.
        prompt_top_log_probs: The same of the likeliest tokens.
        cached_tokens: Prompt tokens that were skipped.
        reuse: Of the first update: the fields of a `Reuse`.
        routes: (tokens but the last one, layers, experts of a token); in the last update, if the engine records them.
        finished: Whether this is the last update.
        error: Why the task failed; set only in the last update. For the log: it may name what clients must not see.
        reply: In place of it: what the client is told of a task that ended for a reason outside of it.
    """

    tokens: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    top_log_probs: Sequence[dict[str, float]] = ()
    prompt_log_probs: Sequence[float] = ()
    prompt_top_log_probs: Sequence[dict[str, float]] = ()
    cached_tokens: int = 0
    reuse: dict[str, Any] | None = None
    routes: Any = None
    finished: bool = False
    error: str | None = None
    reply: ApiError | None = None


@dataclass(eq=False, slots=True, kw_only=True)
class GenerationTask:
    """One answer to one prompt. ``deliver`` receives its updates, on the asyncio side.

    Attributes:
        prompt: Token ids.
        sampling: Fields and attributes of megatron's ``SamplingParams``.
        deliver: Called with each update, until the last one or until the task is aborted.
        stop: Stop strings. The receiver of the updates ends the task at one of them.
        arrived_s: Arrival time of the request, for the time to first token.
        closed: True: no more updates are delivered.
    """

    prompt: list[int]
    sampling: dict[str, Any]
    deliver: Callable[[Update], None]
    stop: Sequence[str] = ()
    arrived_s: float = field(default_factory=time.perf_counter)
    closed: bool = False
    request_id: int | None = None  # this field and the next belong to the engine's thread
    seen_tokens: int = 0


class Backend(ABC):
    """Generates for the routes. All methods are called in the running asyncio loop.

    Attributes:
        failures: Steps that raised.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._open: set[GenerationTask] = set()

    @property
    def open_sequences(self) -> int:
        """Answers that run or wait."""
        return len(self._open)

    @property
    @abstractmethod
    def problem(self) -> str | None:
        """Why the backend cannot generate any more; None while it can."""

    @property
    def replica_steps_s(self) -> dict[str, float]:
        """Seconds since each replica that can generate began its current step, by name; 0 between steps."""
        return {"0": 0.0}

    @property
    def lost_replicas(self) -> frozenset[str]:
        """Names of replicas that ended, while others go on."""
        return frozenset()

    @property
    def is_running(self) -> bool:
        """Whether a thread of the backend still runs, which keeps the process from ending."""
        return False

    @abstractmethod
    def start(self) -> None:
        """Starts the backend."""

    @abstractmethod
    async def stop(self) -> None:
        """Stops the backend. Unfinished tasks get no more updates."""

    @abstractmethod
    def submit(self, task: GenerationTask) -> None:
        """Queues a task."""

    @abstractmethod
    def abort(self, task: GenerationTask) -> None:
        """Aborts a task, finished or not. It gets no more updates."""

    def end_all(self) -> None:
        """Ends all tasks because the server is told to stop: each gets a last update."""
        for task in list(self._open):
            self.abort(task)
            task.deliver(Update(finished=True, reply=stopping()))

    @abstractmethod
    async def snapshots(self) -> dict[str, list[Sample]]:
        """The `engine_snapshot` of each replica, by name.

        Raises:
            RuntimeError: The backend has a problem.
        """

    @abstractmethod
    async def explain(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """What each replica would reuse of a prompt now, by name: the fields of an `Explanation`, or an ``error``.

        Args:
            prompt: Token ids.
            sampling: As of `GenerationTask`.

        Raises:
            RuntimeError: The backend has a problem.
        """

    @abstractmethod
    async def reset_cache(self) -> None:
        """Empties the prefix cache: nothing cached so far is reused.

        Raises:
            RuntimeError: The backend has a problem.
        """


def explained(engine: Any, prompt: list[int], params: Any) -> dict[str, Any]:
    """The fields of what `HybridPrefixEngine.explain` returns, or an ``error`` in words. Call it in the engine's thread."""
    try:
        found: dict[str, Any] = engine.explain(prompt, params).as_dict()
    except ValueError as error:
        return {"error": str(error)}
    return found


def new_output(parts: Sequence[Any], seen_tokens: int, prompt_tokens: int) -> dict[str, Any]:
    """Output of a request after its first ``seen_tokens`` tokens, as fields of `Update`.

    Args:
        parts: The parts of the request's record; several if it was preempted.
        seen_tokens: Generated tokens that were delivered before.
        prompt_tokens: Length of its prompt.
    """
    tokens = _since(parts, "generated_tokens", seen_tokens)
    of_prompt, tops_of_prompt = ([], []) if seen_tokens else prompt_log_probs(parts, prompt_tokens)
    return {
        "tokens": tokens,
        "log_probs": _since(parts, "generated_log_probs", seen_tokens)[: len(tokens)],
        "top_log_probs": _since(parts, "generated_top_n_logprobs", seen_tokens)[: len(tokens)],
        "prompt_log_probs": of_prompt,
        "prompt_top_log_probs": tops_of_prompt,
        "cached_tokens": int(parts[0].num_cached_tokens),
        "reuse": None if seen_tokens else getattr(parts[0].sampling_params, "cache_reuse", None),
        "routes": parts[-1].routing_indices,
    }


def _since(parts: Sequence[Any], name: str, start: int) -> list[Any]:
    """Items from ``start`` on of a list that is split over the parts of a preempted request."""
    found: list[Any] = []
    for part in parts:
        items = getattr(part, name) or ()
        found += items[start:]
        start = max(0, start - len(items))
    return found


def prompt_log_probs(parts: Sequence[Any], prompt_tokens: int) -> tuple[list[float], list[dict[str, float]]]:
    """Log-probs and top log-probs of a request's prompt, from the parts of its record. Empty unless it asked for them."""
    wanted = prompt_tokens - 1
    for part in parts:  # a request that was preempted while its prompt was computed has the first ones twice
        if len(part.prompt_log_probs or ()) >= wanted > 0:
            return part.prompt_log_probs[:wanted], (part.prompt_top_n_logprobs or [])[:wanted]
    return [], []


def refusal(request: Any) -> str:
    """Why a request of the engine failed."""
    causes = (event.payload for event in request.events if isinstance(event.payload, Exception))
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes) or "the engine refused the request"
