"""`ReplicaLoop`: a `Backend` for data-parallel replicas, on rank 0.

Rank 0 has the routes, megatron's coordinator (a separate process), a client of it, and the first rank of the first replica.
Requests and aborts go through the coordinator to one replica, and new tokens come back the same way after each step. The
coordinator tells of a replica that it cannot reach: its requests get an error, and the other replicas go on. Torchrun then ends all.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq

from megatron_hybrid_prefix.mcore.ranks.client import ReplicaClient
from megatron_hybrid_prefix.mcore.ranks.coordinator import CoordinatorProcess
from megatron_hybrid_prefix.mcore.ranks.messages import TELL_ALIVE, TELL_EXPLAIN, TELL_SNAPSHOT, Routing
from megatron_hybrid_prefix.serve.backend import Backend, GenerationTask, Update, new_output, refusal
from megatron_hybrid_prefix.serve.errors import ApiError
from megatron_hybrid_prefix.serve.metrics import Sample
from megatron_hybrid_prefix.serve.ranks import END_S, RankEngine
from megatron_hybrid_prefix.upstream.names import SamplingParams

logger = logging.getLogger(__name__)

_WATCH_S = 0.5  # between two questions whether the replicas are alive
_SNAPSHOT_S = 0.5  # wait this long for replicas in a step
_EXPLAIN_S = 10.0  # the same for an explanation
_SILENT_S = 2.0  # a replica without an answer for so long is in a step
_CONNECT_S = 10.0  # for the coordinator's first reply


class ReplicaLoop(Backend):
    """All replicas, as a `Backend` on rank 0.

    Args:
        rank: The engine of this process, connected.
        coordinator: The coordinator's process, ready.
        replicas: Number of replicas.
        on_first_token: Called with the seconds since arrival and whether the cache was hit.
        on_failure: Called once the backend cannot generate any more.

    Attributes:
        ended_well: Whether `stop` stopped all ranks.
    """

    def __init__(
        self,
        rank: RankEngine,
        coordinator: CoordinatorProcess,
        replicas: int,
        on_first_token: Callable[[float, bool], None],
        on_failure: Callable[[], None],
    ) -> None:
        super().__init__()
        self._rank, self._coordinator, self._replicas = rank, coordinator, range(replicas)
        self._on_first_token, self._on_failure = on_first_token, on_failure
        self._epoch = 0
        self._broken: str | None = None
        self._live: dict[int, GenerationTask] = {}
        self._lost: dict[int, str] = {}  # why, by replica
        self._heard_s: dict[int, float] = {}  # when the last answer came, by replica
        self._answers: dict[int, dict[int, Any]] = {}  # by open question and replica
        self._answer_came, self._asked = asyncio.Event(), 0
        self._snapshots: dict[int, list[Sample]] = {}  # the last ones, by replica
        self._stopping = False
        self.ended_well = False
        self._client: ReplicaClient | None = None
        self._watching: asyncio.Task[None] | None = None

    # -- tasks ---------------------------------------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        return self._broken

    def submit(self, task: GenerationTask) -> None:
        if self._broken is not None or self._client is None:
            task.deliver(Update(finished=True, error=self._broken or "the server has not started"))
            return
        fields = dict(task.sampling)
        routing = Routing(
            key=fields.pop("routing_key", None),
            salt=fields.get("cache_salt"),
            reads=fields.get("cache_read", True),
            writes=fields.get("cache_write", True),
        )
        task.request_id = self._client.submit(task.prompt, SamplingParams.deserialize(fields), routing)
        self._open.add(task)
        self._live[task.request_id] = task

    def abort(self, task: GenerationTask) -> None:
        if task.closed:
            return
        self._close(task)
        if self._client is not None and task.request_id is not None and self._broken is None:
            self._client.abort(task.request_id)

    async def reset_cache(self) -> None:
        if self._broken is not None or self._client is None:
            raise RuntimeError(self._broken or "the server has not started")
        self._epoch += 1
        self._client.set_generation_epoch(self._epoch)  # reaches the replicas before the next task does

    def _close(self, task: GenerationTask) -> None:
        task.closed = True
        self._open.discard(task)
        if task.request_id is not None:
            self._live.pop(task.request_id, None)

    # -- output of the replicas: `Answers` -----------------------------------------------------------------------------

    def progressed(self, request_id: int, output: dict[str, Any]) -> None:
        self._deliver(request_id, Update(**output))

    def finished(self, request_id: int, request: Any) -> None:
        task = self._live.get(request_id)
        if task is not None:
            output = new_output([request], task.seen_tokens, len(task.prompt))
            self._deliver(
                request_id, Update(**output, finished=True, error=refusal(request) if request.failed() else None)
            )

    def lost(self, replica: int, request_ids: list[int]) -> None:
        if not self._stopping:
            self._lose(replica, "the coordinator cannot reach it")
        message = "The replica that computed this answer has ended. Try again."
        for request_id in request_ids:
            self._deliver(request_id, Update(finished=True, reply=ApiError(503, message, code="replica_lost")))

    def answered(self, replica: int, what: str, number: int, answer: str) -> None:
        found = json.loads(answer)
        self._heard_s[replica] = time.monotonic()
        if what == TELL_SNAPSHOT:
            self._snapshots[replica] = found
        if number in self._answers:
            self._answers[number][replica] = found
            self._answer_came.set()

    def _deliver(self, request_id: int, update: Update) -> None:
        task = self._live.get(request_id)
        if task is None:
            return  # aborted meanwhile
        if update.tokens and not task.seen_tokens:
            self._on_first_token(time.perf_counter() - task.arrived_s, update.cached_tokens > 0)
        task.seen_tokens += len(update.tokens)
        if update.finished:
            self._close(task)
        task.deliver(update)

    # -- the replicas --------------------------------------------------------------------------------------------------

    @property
    def replica_steps_s(self) -> dict[str, float]:
        now_s = time.monotonic()
        silent_s = {name: now_s - self._heard_s.get(name, now_s) for name in self._replicas if name not in self._lost}
        return {str(name): 0.0 if since_s < _SILENT_S else since_s for name, since_s in silent_s.items()}

    @property
    def lost_replicas(self) -> frozenset[str]:
        return frozenset(map(str, self._lost))

    async def snapshots(self) -> dict[str, list[Sample]]:
        """See `Backend`. Replicas in a long step keep their last snapshot. Counters of lost replicas stay."""
        await self._ask(TELL_SNAPSHOT, _SNAPSHOT_S)
        found: dict[str, list[Sample]] = {}
        for replica in self._replicas:
            is_lost = replica in self._lost
            samples = self._snapshots.get(replica, [])
            kept = [sample for sample in samples if sample[0] == "counter" or not is_lost]
            found[str(replica)] = [*kept, ("gauge", "replica_up", float(not is_lost), {})]
        return found

    async def explain(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, dict[str, Any]]:
        answers = await self._ask(TELL_EXPLAIN, _EXPLAIN_S, prompt, sampling)
        late = {"error": f"no answer within {_EXPLAIN_S:g} s: it is in a long step, or lost"}
        return {str(replica): answers.get(replica, late) for replica in self._replicas}

    async def _ask(self, what: str, wait_s: float, prompt: Sequence[int] = (), sampling: Any = None) -> dict[int, Any]:
        """Asks all replicas, and waits for those that are not lost. Returns their answers."""
        self._asked = number = self._asked + 1
        answers = self._answers[number] = {}
        if self._client is not None and self._broken is None:
            self._client.ask(number, what, list(prompt), sampling or {})
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while set(self._replicas) - set(self._lost) - answers.keys():
                        self._answer_came.clear()
                        await self._answer_came.wait()
        del self._answers[number]
        return answers

    async def _watch(self) -> None:
        while self._broken is None:
            await self._ask(TELL_ALIVE, _WATCH_S)
            if self._rank.error is not None:
                self._lose(0, self._rank.error)
            if not self._coordinator.is_alive:
                self._break("the coordinator ended unexpectedly")
            await asyncio.sleep(_WATCH_S)

    def _lose(self, replica: int, why: str) -> None:
        """Gives a replica up: it gets no more requests. The coordinator says which it had."""
        if replica in self._lost:
            return
        self._lost[replica] = why
        self.failures += 1
        logger.error("replica %d is lost: %s", replica, why)
        if self._client is not None:
            self._client.remove(replica)
        if len(self._lost) == len(self._replicas):
            self._break(f"all replicas are lost; the last one: {why}")

    def _break(self, why: str) -> None:
        if self._broken is not None:
            return
        self._broken = why
        self.failures += 1
        logger.error("%s", why)
        for request_id in list(self._live):
            self._deliver(request_id, Update(finished=True, error=why))
        self._on_failure()

    # -- start and end -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._client = ReplicaClient(self._coordinator.address, self)
        self._client.connect(_CONNECT_S)
        self._heard_s = dict.fromkeys(self._replicas, time.monotonic())
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stops all replicas on all ranks. With a lost one this is not possible, see `ended_well`."""
        assert self._watching is not None and self._client is not None
        self._stopping = True
        self._watching.cancel()
        try:
            if self._broken is None and not self._lost:
                async with asyncio.timeout(END_S):
                    self._client.pause_engines()
                    await self._rank.wait_until_paused()
                    self._client.stop_engines()
                    await asyncio.to_thread(self._rank.thread.join, END_S)
                    self.ended_well = not self._rank.thread.is_alive() and self._rank.error is None
                self._client.shutdown_coordinator()
        except TimeoutError:
            logger.error("the replicas did not stop within %g s", END_S)
        except (RuntimeError, asyncio.CancelledError, zmq.ZMQError):
            logger.exception("the replicas did not stop")
        finally:
            await asyncio.to_thread(self._coordinator.stop, END_S if self.ended_well else 0.0)
            self._client.stop()
