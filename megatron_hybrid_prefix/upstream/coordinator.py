"""`CoordinatorSeam`: megatron's data-parallel coordinator, its private hooks under neutral names.

Megatron's loops end at a header that they do not know. So messages of this package start with a frame that no message of
megatron's can have, and are taken off the socket before megatron's loop sees them. New tokens of unfinished answers and aborts are
megatron's own messages, see `streamed`: its main has them, and 0.19 gets them in such a frame.

This module also has the other names that the coordinator's process needs. That process must not import an engine's modules,
because they need a running platform.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, override

import msgpack
import zmq
from megatron.core.inference.contexts.dynamic_context import ContextOverflowError
from megatron.core.inference.data_parallel_inference_coordinator.coordinator import DataParallelInferenceCoordinator
from megatron.core.inference.headers import Headers
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status

from megatron_hybrid_prefix.errors import FieldError, UpstreamDriftError, shown
from megatron_hybrid_prefix.sampling import check_integer
from megatron_hybrid_prefix.support.environment import INSTALL_VARIABLE, OPTIONAL, say
from megatron_hybrid_prefix.upstream import modules
from megatron_hybrid_prefix.upstream.capabilities import form_of
from megatron_hybrid_prefix.upstream.check import check_overrides
from megatron_hybrid_prefix.upstream.rebinding import Rebinding

_HAS_ABORTS = form_of("aborts and new tokens") == "yes"

OWN = b"\xc1"
"""Start of the first frame of this package's messages. Msgpack, of which megatron's are made, never uses this byte."""

WRAPPED = OWN + b"megatron"
"""First frame where the next one is a message of megatron's main, for a megatron that does not have it."""

PARTIAL, ABORT = 22, 23
"""Megatron's headers ``ENGINE_REPLY_PARTIAL`` (replica, coordinator, client) and ``ABORT_REQUEST`` (client, coordinator)."""

TELL_ABORT = "abort"
"""What all ranks of a replica are told of a request to abort, see `CoordinatorSeam.tell`."""

MARK = "hybrid_prefix_message"
"""Attribute of the sampling parameters in a message that submits no request, but tells a replica something.

Megatron's engine hands such a message to all ranks of a replica, between the same two steps, like a new request.
"""

logger = logging.getLogger(__name__)


def streamed(header: int, *contents: Any) -> list[bytes]:
    """Frames of a `PARTIAL` or `ABORT` message.

    Needless from 1addfbd78d (0.20): `WRAPPED`, and all that reads it. Megatron's loops know these headers since then.
    """
    message = msgpack.packb([header, *contents], use_bin_type=True)
    return [message] if _HAS_ABORTS else [WRAPPED, message]


def refused(request_id: int, why: str) -> DynamicInferenceRequest:
    """A failed request, for one that a replica does not have.

    Its only error is of the one class of megatron's that it can send and that says nothing of its own.
    """
    request = DynamicInferenceRequest(request_id=request_id, generated_text="", status=Status.FAILED)
    request.add_event_error_nontransient(ContextOverflowError(request_id, why, is_transient=False))
    request.add_event_fail()
    return request


class CoordinatorSeam(DataParallelInferenceCoordinator):
    """Megatron's coordinator, which answers every request of megatron's clients; a subclass overrides the methods without an
    underscore.

    Megatron's own ends at a request that it cannot read, or if no replica is left; and it forgets the requests of a replica
    that ended. Its clients wait on.

    Attributes:
        most_queued: Messages that wait for a replica or a client that does not read, besides those in the buffers of TCP and of
            the peer. One more, and the replica is removed, or the client's message is dropped. ZeroMQ's default is 1000, which
            a busy server may queue during one long step.
    """

    __needs__ = {"coordinator's messages": "of one frame"}  # noqa: RUF012
    router_socket: Any
    client_request_to_request_id: dict[Any, int]  # where clients can abort
    _handlers: dict[Headers, Callable[..., bool | None]]
    most_queued = 2**14
    _unregistered: frozenset[bytes] = frozenset()

    def start(self) -> None:
        """First takes messages of this package off the socket."""
        self.router_socket = _FilteredSocket(
            self.router_socket, self._take, self.identity_to_rank_index, self.most_queued
        )
        own = {
            "SUBMIT_REQUEST": partial(self._submit, self._handlers[Headers.SUBMIT_REQUEST]),
            "ABORT_REQUEST": self._abort,
            "ENGINE_REPLY_PARTIAL": self._pass_on,
            "SUBMIT_REQUEST_WITH_KV": self._refuse_handoff,
            "RELEASE_KV": lambda *message: None,
        }
        self._handlers |= {header: own[header.name] for header in self._handlers if header.name in own}
        super().start()

    def _submit(self, submit: Callable[..., bool | None], _: Any, client: bytes, message: Sequence[Any]) -> None:
        _, client_request_id, prompt, params, *_ = message
        why = _unreadable(prompt, params)
        if why is None:
            # The engine sets it by the other fields, but first asserts that it agrees with them.
            params["return_prompt_top_n_logprobs"] = False
            why = "no replica is left" if submit(self, client, message) else None
        if why is not None and client in self.known_clients:
            self._reply_refused((client, client_request_id), why)

    def _abort(self, _: Any, client: bytes, message: Sequence[Any]) -> None:
        """Tells the replica to abort a request now.

        Megatron's main tells it to generate no more tokens. A request that waits then still computes its prompt, one that is paused
        still resumes, and each gets one more token.
        """
        request_id = self.request_of(client, message[1])
        if request_id is not None and request_id in self.request_id_to_rank:
            self.tell(self.request_id_to_rank[request_id], TELL_ABORT, request_id)

    def _refuse_handoff(self, _: Any, client: bytes, message: Sequence[Any]) -> None:
        """The engine takes no states of other engines. Megatron's own would end at the message, and at one to release them."""
        if client in self.known_clients:
            self._reply_refused((client, message[1]), "this engine takes no KV cache of another engine")

    def _pass_on(self, _: Any, replica: bytes, message: Sequence[Any]) -> None:
        """New tokens of unfinished requests go to their clients, as with megatron's main, which ends at a forgotten request."""
        del replica
        for output in message[1]:
            client = self.client_of(output["request_id"])
            if client is not None:
                self.send(client[0], *streamed(PARTIAL, client[1], output))

    def _reply_refused(self, client: tuple[bytes, int], why: str) -> None:
        name, client_request_id = client
        reply = [Headers.ENGINE_REPLY.value, client_request_id, refused(client_request_id, why).serialize()]
        self.send(name, msgpack.packb(reply, use_bin_type=True))

    def compute_request_hashes(self, prompt: str | list[int]) -> list[int]:
        """See upstream; none of a prompt that has none."""
        try:
            keys: list[int] = super().compute_request_hashes(prompt)
        except Exception as error:  # no token ids, or a text that cannot be tokenized: the replica says what is wrong
            logger.warning("a prompt has no keys: %s: %s", type(error).__name__, error)
            return []
        return keys

    def _take(self, sender: bytes, frames: Sequence[bytes]) -> bytes | None:
        if frames == [b""]:  # a replica registers, perhaps again
            self._unregistered -= {sender}
        if sender in self._unregistered:
            return None  # megatron 0.19 ends at a reply of a replica that it has removed, its main at one to a forgotten request
        if frames[0] == WRAPPED:
            message = msgpack.unpackb(frames[1], raw=False)
            {PARTIAL: self._pass_on, ABORT: self._abort}[message[0]](self, sender, message)
            return None
        return self.receive(sender, *frames) if frames[0].startswith(OWN) else frames[0]

    @override
    def _update_rank_hashes(self, rank_identity: bytes, request_hashes: list[int]) -> None:
        """Limits the number of blocks that are remembered."""
        self.note_blocks(rank_identity, request_hashes)

    def _remove_engine(self, identity: bytes) -> None:
        """Clients learn which requests are lost."""
        requests = [request for request, replica in self.request_id_to_rank.items() if replica == identity]
        super()._remove_engine(identity)
        self._unregistered |= {identity}
        self.replica_removed(replica_of(identity), requests)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def receive(self, sender: bytes, kind: bytes, *contents: bytes) -> bytes | None:
        """A message of this package arrived. The result goes on to megatron as a message of the sender."""
        del sender, kind, contents
        return None

    def note_blocks(self, rank_identity: bytes, keys: list[int]) -> None:
        """A replica got a request and will hold these blocks."""
        super()._update_rank_hashes(rank_identity, keys)

    def replica_removed(self, replica: int, request_ids: list[int]) -> None:
        """A replica disconnected, cannot be reached or was removed. It will not reply to these requests."""
        for request_id in request_ids:
            client = self.forget(request_id)
            if client is not None:
                self._reply_refused(client, f"replica {replica} ended")

    # -- private state -------------------------------------------------------------------------------------------------

    @property
    def replicas_by_block(self) -> dict[int, dict[int, int]]:
        """The replicas that hold a block, by the block's key; oldest key first."""
        return self._hash_table

    @property
    def pending_requests(self) -> list[int]:
        """Unfinished requests of each replica."""
        return self._pending_counts.tolist()

    def name_of(self, replica: int) -> bytes:
        """A replica's ZeroMQ identity, by its index in `pending_requests`."""
        return self._identities_list[replica]

    def remove_replica(self, replica: int) -> None:
        """Send a replica no more requests, and ignore what it sends."""
        name = identity_of(replica)
        if name in self.identity_to_rank_index:
            self._remove_engine(name)

    def request_of(self, client: bytes, client_request_id: int) -> int | None:
        """Id of a client's unfinished request; None: it has ended."""
        for request_id, own in self.request_id_to_client_request_id.items():
            if own == client_request_id and self.request_id_to_client_id[request_id] == client:
                return int(request_id)
        return None

    def client_of(self, request_id: int) -> tuple[bytes, int] | None:
        """The client of an unfinished request, and the client's id of it."""
        if request_id not in self.request_id_to_client_id:
            return None
        return self.request_id_to_client_id[request_id], self.request_id_to_client_request_id[request_id]

    def forget(self, request_id: int) -> tuple[bytes, int] | None:
        """Forget a request that gets no reply. Returns its `client_of`."""
        client = self.client_of(request_id)
        self.request_id_to_client_id.pop(request_id, None)
        self.request_id_to_client_request_id.pop(request_id, None)
        if _HAS_ABORTS:
            self.client_request_to_request_id.pop(client, None)
        replica = self.request_id_to_rank.pop(request_id, None)
        if replica in self.identity_to_rank_index:
            self._pending_counts[self.identity_to_rank_index[replica]] -= 1
        return client

    def tell(
        self,
        replica: bytes,
        what: str,
        number: int,
        prompt: Sequence[int] = (),
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """Send all ranks of a replica a message. Its engine gets it as `EngineSeam.message_received`."""
        message = [Headers.SUBMIT_REQUEST.value, number, list(prompt), {**(params or {}), MARK: what}]
        self._send_to_engine(replica, msgpack.packb(message, use_bin_type=True))

    def send(self, receiver: bytes, *frames: bytes) -> None:
        """Send a message of this package to a client."""
        self.router_socket.send_multipart([receiver, *frames])


def _unreadable(prompt: Any, params: Any) -> str | None:
    """Why megatron's coordinator or engine would end at this request; None: they would not."""
    if not isinstance(prompt, str | list):
        return f"the prompt {shown(prompt)} must be text or a list of token ids"
    if not isinstance(params, dict):
        return f"the sampling parameters {shown(params)} must be an object"
    try:
        check_integer("top_n_logprobs", params.get("top_n_logprobs", 0))
        check_integer("streaming_interval", params.get("streaming_interval", 1), 1)
    except FieldError as error:
        return str(error)
    return None


def identity_of(replica: int) -> bytes:
    """The ZeroMQ identity that megatron's engine gives to the first rank of a replica."""
    return f"mp-coord-{replica}".encode()


def replica_of(identity: bytes) -> int:
    """The number of the replica with this identity."""
    return int(identity.rpartition(b"-")[2])


def _ours(original: type) -> type:
    if not issubclass(CoordinatorSeam, original):
        raise TypeError(
            f"{original.__name__} is in the place of megatron's coordinator, where this package puts its own"
        )
    try:
        check_overrides(CoordinatorSeam)
    except UpstreamDriftError as error:
        if os.environ.get(INSTALL_VARIABLE) != OPTIONAL:
            raise
        say(logger, f"megatron's own coordinator, {INSTALL_VARIABLE}={OPTIONAL}: {error}")
        return original
    return CoordinatorSeam


LAUNCHED = Rebinding(
    owner=modules.DYNAMIC_ENGINE,
    name="DataParallelInferenceCoordinator",
    make=_ours,
    why="megatron's engine names the class of the coordinator that it starts; replaced while it does",
)


class _FilteredSocket:
    """A router socket that passes on what ``take`` returns, and that never waits for a peer.

    Megatron's coordinator has one thread. A send that waits for a peer would keep it from all messages of the others.

    Args:
        socket: Megatron's router socket. It raises if a message cannot be routed.
        take: Gets the sender and the frames of each message. Returns the frame for megatron; None: nothing is left.
        replicas: Identities of the replicas that get requests, at any time.
        most_queued: Messages that may wait for each peer.
    """

    def __init__(
        self,
        socket: Any,
        take: Callable[[bytes, Sequence[bytes]], bytes | None],
        replicas: Container[bytes],
        most_queued: int,
    ) -> None:
        self._socket, self._take, self._replicas, self._most_queued = socket, take, replicas, most_queued
        self._limited: set[bytes] = set()  # peers that have this limit
        self._dropping: set[bytes] = set()  # clients that did not get the last message
        socket.setsockopt(zmq.SNDHWM, most_queued)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv_multipart(self) -> list[bytes]:
        while True:
            sender, *frames = self._socket.recv_multipart()
            if sender not in self._limited:  # ZeroMQ applies the option to peers that are connected
                self._limited.add(sender)
                self._socket.setsockopt(zmq.SNDHWM, self._most_queued)
            passed = self._take(sender, frames)
            if passed is not None:
                return [sender, passed]

    def send_multipart(self, frames: Sequence[bytes]) -> None:
        """Send a message, or drop it if its receiver is a client that cannot take it.

        Raises:
            zmq.ZMQError: EHOSTUNREACH: the receiver is a replica, and gone or too far behind. Megatron then removes it.
        """
        receiver = frames[0]
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            is_full = error.errno == zmq.EAGAIN
            why = f"{self._most_queued} messages wait for it" if is_full else "it is not connected"
            if receiver in self._replicas:
                logger.error("replica %d cannot be reached: %s", replica_of(receiver), why)
                raise zmq.ZMQError(zmq.EHOSTUNREACH) from error
            if receiver not in self._dropping:
                logger.error("messages to client %s are dropped: %s", receiver.hex(), why)
            self._dropping.add(receiver)
        else:
            self._dropping.discard(receiver)
