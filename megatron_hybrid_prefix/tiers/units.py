"""`TransferUnit`: one move between device and host, of a KV block or of a state.

Who decides on moves (``index/host_tier.py``, ``cache.py``) and who carries them out (`arena.py`) share nothing else. A queue of units
is carried out in its order, so a place may be given to another use as soon as its unit is in the queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """What is moved."""

    KV = 0  # the KV of one block, in all attention layers
    STATE = 1  # one recurrent state, in all recurrent layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """What an entry on the host holds; compared when it is loaded.

    Attributes:
        kind: KV or state.
        key: Of the block, which names all tokens up to its end, under their salt and weights. For what a preempted
            request left behind: its request id, in bytes.
        depth_tokens: Tokens up to and with it.
        epoch: Weights epoch.
    """

    kind: Kind
    key: bytes
    depth_tokens: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferUnit:
    """One move.

    Attributes:
        to_host: Direction.
        device_id: KV block or slot on the device, by the kind of the tag.
        pages: Pages on the host, in the order of the bytes.
        tag: What is moved.
        load_id: Of the load that it is a part of; None to the host.
    """

    to_host: bool
    device_id: int
    pages: tuple[int, ...]
    tag: Tag
    load_id: int | None = None
