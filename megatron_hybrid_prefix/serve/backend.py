"""What generates behind the routes: a `Backend` takes `GenerationTask`s and gives each its `Update`s."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a step gave one task.

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
class GenerationTask:
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
    def submit(self, task: GenerationTask) -> None:
        """Queue a task."""

    @abstractmethod
    def abort(self, task: GenerationTask) -> None:
        """Give a task up, finished or not; it gets no more updates."""

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


def refusal(request: Any) -> str:
    """Why a request failed."""
    causes = (event.payload for event in request.events if isinstance(event.payload, Exception))
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes) or "the engine refused it"
