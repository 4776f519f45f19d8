"""Messages besides megatron's, between clients, coordinator and replicas: a frame with the kind, then frames of msgpack.

============  ============================  ===========================================================================
kind          way                           frames
============  ============================  ===========================================================================
``SUBMIT``    client, coordinator           facts for the choice of a replica (`Routing`); megatron's message
``ASK``       client, coordinator           a number; what is asked (``TELL_SNAPSHOT``, ``TELL_EXPLAIN``, ``TELL_ALIVE``); a prompt;
                                            sampling parameters. Goes on to all replicas
``ANSWER``    replica, coordinator, client  what was asked, number, answer (the coordinator puts the replica's number before them)
``REMOVE``    client, coordinator           number of a replica that is lost
``LOST``      coordinator, client           number of a replica; ids of the client's requests that were with it
============  ============================  ===========================================================================

A finished or refused request comes with megatron's own reply, and so do new tokens and aborts (`upstream.coordinator`). All of
them take one way, so they arrive in order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgpack

from megatron_hybrid_prefix.upstream.coordinator import OWN

SUBMIT = OWN + b"submit"
ASK = OWN + b"ask"
ANSWER = OWN + b"answer"
REMOVE = OWN + b"remove"
LOST = OWN + b"lost"

# What the coordinator tells all ranks of a replica, with a number.
TELL_SNAPSHOT = "snapshot"
TELL_EXPLAIN = "explain"
TELL_ALIVE = "alive"  # an answer says that the replica is between two steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What the choice of a replica depends on, besides the prompt.

    Attributes:
        key: Requests with one key go to one replica, as long as it lives. None: the prompt alone decides.
        salt: Requests with different salts share nothing, so their equal prompts may go to different replicas.
        reads: Whether the request reuses cached prefixes. If not, any replica will do.
        writes: Whether the request's blocks are cached. If not, no later request finds them at its replica.
    """

    key: str | None = None
    salt: str | None = None
    reads: bool = True
    writes: bool = True

    @property
    def salt_bits(self) -> int:
        """64 bits to be added (xor) to the keys of the prompt's blocks."""
        if self.salt is None:
            return 0
        return int.from_bytes(hashlib.blake2b(self.salt.encode(), digest_size=8).digest())


def pack(value: Any) -> bytes:
    """A frame with this value."""
    return msgpack.packb(value, use_bin_type=True)


def unpack(frame: bytes) -> Any:
    """The value of a frame."""
    return msgpack.unpackb(frame, raw=False)
