"""`ReplicaClient`: sends requests to the coordinator's replicas, and receives their output token by token."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol

import zmq
import zmq.asyncio

from megatron_hybrid_prefix.mcore.ranks.messages import ANSWER, ASK, LOST, REMOVE, SUBMIT, Routing, pack, unpack
from megatron_hybrid_prefix.upstream.check import check_overrides
from megatron_hybrid_prefix.upstream.client import ClientSeam
from megatron_hybrid_prefix.upstream.names import DynamicInferenceRequest, SamplingParams

logger = logging.getLogger(__name__)


class Answers(Protocol):
    """Receives the output of requests by id, in the asyncio loop."""

    def progressed(self, request_id: int, output: dict[str, Any]) -> None:
        """New output of an unfinished request."""

    def finished(self, request_id: int, request: DynamicInferenceRequest) -> None:
        """A request ended; it has its whole output."""

    def lost(self, replica: int, request_ids: list[int]) -> None:
        """A replica gets no more requests; these were with it and have no more output."""

    def answered(self, replica: int, what: str, number: int, answer: str) -> None:
        """A replica's answer (JSON) to a question, given after all earlier messages of this client."""


class ReplicaClient(ClientSeam):
    """A client of the coordinator at ``address``."""

    def __init__(self, address: str, answers: Answers) -> None:
        check_overrides(ReplicaClient)
        super().__init__(address)
        self._answers = answers

    def connect(self, timeout_s: float) -> None:
        """Connect, and receive from then on. Call it in the running asyncio loop.

        Raises:
            zmq.Again: The coordinator did not reply in time.
        """
        self.socket.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
        self.start()
        self.socket.setsockopt(zmq.RCVTIMEO, -1)
        # Megatron looks for messages every 5 ms. This wakes the loop when one arrives.
        self.socket = zmq.asyncio.Socket.from_socket(self.socket)

    def submit(self, prompt: list[int], params: SamplingParams, routing: Routing) -> int:
        """Submit a request. Returns its id."""
        request_id = self.next_request_id
        self.next_request_id = request_id + 1
        self.socket.send_multipart([SUBMIT, pack(asdict(routing)), self.submission(request_id, prompt, params)])
        return request_id

    def ask(self, number: int, what: str, prompt: list[int], sampling: dict[str, Any]) -> None:
        """Ask all replicas for `Answers.answered` with this number."""
        self.socket.send_multipart([ASK, *map(pack, (number, what, prompt, sampling))])

    def remove(self, replica: int) -> None:
        """Send a replica no more requests. Those that it has are `Answers.lost`."""
        self.socket.send_multipart([REMOVE, pack(replica)])

    async def receive_all(self) -> None:
        while True:
            frames = await self.socket.recv_multipart()
            with suppress(zmq.Again):  # a step sends one message for each answer: waiting for each takes twice as long
                while True:
                    self._receive(*frames)
                    frames = await self.socket.recv_multipart(zmq.NOBLOCK)

    def _receive(self, first: bytes, *contents: bytes) -> None:
        try:
            if first == LOST:
                self._answers.lost(*map(unpack, contents))
            elif first == ANSWER:
                self._answers.answered(*map(unpack, contents))
            elif (reply := self.reply_in(first, *contents)) is not None:
                request_id, output = reply
                if isinstance(output, dict):
                    self._answers.progressed(request_id, output)
                else:
                    self._answers.finished(request_id, output)
        except Exception:  # one bad message must not end all answers
            logger.exception("a message of the coordinator could not be used")
