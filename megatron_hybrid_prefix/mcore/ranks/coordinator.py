"""Replicas of megatron's data-parallel coordinator: the coordinator's process, and how ranks meet before they serve.

Clients send requests to the coordinator over ZeroMQ. It routes each to the replica that has the longest part of its prefix,
unless that replica is overloaded. It passes on output after each step, aborts, and what became of a lost replica's requests.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from functools import cached_property
from itertools import islice
from multiprocessing.connection import wait
from typing import Any, override

import torch

from megatron_hybrid_prefix.mcore.ranks.messages import ANSWER, ASK, LOST, REMOVE, SUBMIT, Routing, pack, unpack
from megatron_hybrid_prefix.upstream.check import check_overrides
from megatron_hybrid_prefix.upstream.config import PrefixCachingCoordinatorPolicy, get_pg_size
from megatron_hybrid_prefix.upstream.coordinator import CoordinatorSeam, replica_of

_MEET_MS = 50


class PrefixCoordinator(CoordinatorSeam):
    """Megatron's coordinator with messages of this package, limits on what it remembers, and fair ties.

    Of equally loaded replicas megatron takes the first, so a server that is rarely busy would use one replica only. A
    replica that has a whole prompt would get all requests with it, however many wait there.
    """

    most_blocks = 2**20  # that it remembers; each takes about 300 bytes
    most_keys = 2**16  # of requests that have one
    _last_replica = -1  # that got a prompt which no replica knows
    _routing = Routing()  # of the request that is being submitted

    @cached_property
    def _replica_by_key(self) -> dict[str, bytes]:
        """Replicas by `Routing.key`; least recently used key first."""
        return {}

    # -- messages --------------------------------------------------------------------------------------------------------

    def receive(self, sender: bytes, kind: bytes, *contents: bytes) -> bytes | None:
        if kind == SUBMIT:
            self._routing = Routing(**unpack(contents[0]))
            return contents[1]
        values = [unpack(frame) for frame in contents]
        if kind == ASK:
            number, what, prompt, sampling = values
            for name in list(self.identity_to_rank_index):  # one that is gone is removed here
                self.tell(name, what, number, prompt, sampling)
        elif kind == ANSWER:
            for name in self.known_clients:
                self.send(name, ANSWER, pack(replica_of(sender)), *contents)
        elif kind == REMOVE:
            self.remove_replica(values[0])
        return None

    def replica_removed(self, replica: int, request_ids: list[int]) -> None:
        """Tells all clients."""
        lost: dict[bytes, list[int]] = {name: [] for name in self.known_clients}
        for request_id in request_ids:
            client = self.forget(request_id)
            if client is not None:
                lost[client[0]].append(client[1])
        for name, own in lost.items():
            self.send(name, LOST, pack(replica), pack(own))

    @override
    def detokenize(self, finished_request: dict[str, Any]) -> None:
        """Clients turn tokens into text themselves, as they arrive."""

    # -- the choice of a replica -----------------------------------------------------------------------------------------

    def compute_request_hashes(self, prompt: str | list[int]) -> list[int]:
        """Prompts with different salts share no keys."""
        if not (self._routing.reads or self._routing.writes):
            return []
        bits = self._routing.salt_bits
        return [key ^ bits for key in super().compute_request_hashes(prompt)]

    def get_least_loaded_data_parallel_rank(self) -> bytes:
        """Of equally loaded replicas takes the one after the last choice."""
        loads = self.pending_requests
        if not loads:
            return super().get_least_loaded_data_parallel_rank()  # raises
        last, count = self._last_replica, len(loads)
        self._last_replica = min(range(count), key=lambda replica: (loads[replica], (replica - last - 1) % count))
        return self.name_of(self._last_replica)

    @override
    def get_best_data_parallel_rank(self, request_hashes: list[int]) -> bytes:
        """A request with a known key goes where the key's last request went."""
        key, by_key = self._routing.key, self._replica_by_key
        if key is None:
            return self._best_for_prompt(request_hashes)
        name = by_key.pop(key, None)
        if name is None or name not in self.identity_to_rank_index:
            name = self._best_for_prompt(request_hashes)
        by_key[key] = name
        if len(by_key) > self.most_keys:
            del by_key[next(iter(by_key))]
        return name

    def _best_for_prompt(self, request_hashes: list[int]) -> bytes:
        """A prompt goes to the least loaded replica if none knows it, if the one that knows it is overloaded, or if any will do."""
        known = self.replicas_by_block
        if not self._routing.reads or not any(known.get(key) for key in request_hashes):
            return self.get_least_loaded_data_parallel_rank()
        name: bytes = super().get_best_data_parallel_rank(request_hashes)
        return self.get_least_loaded_data_parallel_rank() if self._is_overloaded(name) else name

    def _is_overloaded(self, name: bytes) -> bool:
        """Whether a request would wait for this replica, and much longer than for the least loaded one.

        Megatron's score does not count what waits, so it never leaves a replica that has all blocks of a prompt.
        """
        pending, at_once = self.pending_requests, int(self.max_requests)
        own, least = pending[self.identity_to_rank_index[name]], min(pending)
        return own >= at_once and (least < at_once or own >= least + at_once)

    def note_blocks(self, rank_identity: bytes, keys: list[int]) -> None:
        """Over the limit, forgets the blocks that were least recently used."""
        if not self._routing.writes:
            return
        known = self.replicas_by_block
        for key in keys:
            known[key] = known.pop(key, {})
        super().note_blocks(rank_identity, keys)
        if len(known) > self.most_blocks:
            for key in list(islice(known, len(known) - self.most_blocks * 3 // 4)):
                del known[key]


class CoordinatorProcess:
    """The coordinator of all replicas, in a process that ends with this process at the latest.

    It ignores SIGINT and SIGTERM, which the terminal or torchrun send to all processes: running requests still need it.

    Args:
        engine: The engine of the first rank of the first replica.
        hostname: Host to listen on: ``address``, with ``port``.

    Raises:
        RuntimeError: It did not start.
        UpstreamDriftError: As `check_overrides`, of what a coordinator needs.
    """

    def __init__(self, engine: Any, hostname: str) -> None:
        check_overrides(PrefixCoordinator)
        spawn = multiprocessing.get_context("spawn")
        receiver, sender = spawn.Pipe(duplex=False)
        self._ready: Any = spawn.Event()
        self._process = spawn.Process(
            target=_run,
            kwargs={
                "pipe_connection": sender,
                "ready_event": self._ready,
                "data_parallel_size": get_pg_size(engine.pg_collection.dp),
                "tokenizer": None,  # prompts are token ids
                "max_requests": engine.context.max_requests,
                "block_size_tokens": engine.context.block_size_tokens,
                "enable_prefix_caching": engine.context.enable_prefix_caching,
                # Routing by the first block only would send all conversations with one system prompt to one replica.
                "prefix_caching_coordinator_policy": PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
                "hostname": hostname,
            },
        )
        self._process.start()
        sender.close()
        try:
            self.address: str = receiver.recv()
        except EOFError:
            self.stop()
            raise RuntimeError("the coordinator did not start; its error is above") from None
        self.port = int(self.address.rpartition(":")[2])

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until all replicas are connected.

        Raises:
            RuntimeError: Not all are connected after ``timeout_s`` seconds.
        """
        if not self._ready.wait(timeout_s):
            raise RuntimeError(f"not all replicas were connected after {timeout_s:g} s")

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def stop(self, timeout_s: float = 0.0) -> None:
        """Wait up to ``timeout_s`` seconds for the process to end, then kill it."""
        self._process.join(timeout_s)
        self._process.kill()
        self._process.join()
        self._ready = None  # frees its semaphores, also if this process does not end as usual


def _run(**arguments: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    PrefixCoordinator.entrypoint(**arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def meet_subscribers(engine: Any) -> None:
    """Wait until every rank receives what the first rank of its group publishes. Earlier messages would be lost.

    Megatron's engine publishes as soon as the sockets exist. If a rank misses a message with requests, it waits for the other
    ranks, and they wait for it.

    Args:
        engine: Just connected by ``start_listening_to_data_parallel_coordinator``.
    """
    first = engine.is_mp_coordinator
    socket = engine.model_parallel_publisher_socket if first else engine.model_parallel_subscriber_socket
    _meet(socket, first, engine.pg_collection.mp)
    for name in ("expert_parallel_zmq_communicator", "world_zmq_communicator"):
        communicator = getattr(engine, name, None)
        if communicator is not None:
            group = engine.pg_collection.ep if name.startswith("expert") else None
            _meet(communicator.bcast_sock, communicator.is_leader, group)


def _meet(socket: Any, publishes: bool, group: Any) -> None:
    if torch.distributed.get_world_size(group) == 1:
        return
    heard = torch.zeros(1, dtype=torch.int32, device=torch.cuda.current_device())
    while not heard.item():
        if publishes:
            socket.send(b"hello")
        heard.fill_(int(publishes or socket.poll(_MEET_MS) > 0))
        torch.distributed.all_reduce(heard, op=torch.distributed.ReduceOp.MIN, group=group)
    if publishes:
        socket.send(b"start")
    else:
        while socket.recv() != b"start":
            pass
