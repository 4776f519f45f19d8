"""`BlockTransfer`: one move between two tiers, of a KV block or of a state.

Who decides on moves (``index/host_tier.py``, ``index/loads.py``) and who carries them out (`arena.py`) share nothing else. A
queue of transfers is carried out in its order, so a place may be given to another use as soon as its transfer is in the
queue. The chain of tiers is device, host, and at most one tier behind the host; every transfer begins or ends on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

DEVICE = "device"
HOST = "host"


class EntryKind(IntEnum):
    """What is moved."""

    KV = 0  # the KV of one block, in all attention layers
    STATE = 1  # one recurrent state, in all recurrent layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """What an entry of a tier holds; compared when it is loaded.

    Attributes:
        kind: KV or state.
        key: Of the block, which names all tokens up to its end, under their salt and weights. For what a preempted
            request left behind: its request id, in bytes.
        depth_tokens: Tokens up to and with it.
        epoch: Weights epoch.
    """

    kind: EntryKind
    key: bytes
    depth_tokens: int
    epoch: int

    @property
    def digest(self) -> int:
        """A signed 64-bit number that stands for all of it."""
        text = f"{self.kind.name} {self.key.hex()} {self.depth_tokens} {self.epoch}".encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), signed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTransfer:
    """One move.

    Attributes:
        source: Name of a tier: `DEVICE`, `HOST`, or that of the tier behind the host.
        target: As above.
        pages: Pages on the host, in the order of the bytes.
        tag: What is moved.
        device_id: KV block or slot, by the kind of the tag, where the device is one end; else None.
        load_id: Of the load that it is a part of; None unless it goes to the device.
    """

    source: str
    target: str
    pages: tuple[int, ...]
    tag: Tag
    device_id: int | None = None
    load_id: int | None = None
