"""`BlockTransfer`: one move between two tiers, of a KV block or of a state.

The tiers and ``requests/loads.py`` decide on transfers, ``transfers/`` runs them; they share nothing else. Transfers
run in the order of their queue, so a page or slot may be reused as soon as its transfer is queued. The tiers are the device, the
host, and at most one tier below the host. Every transfer begins or ends on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from hashlib import blake2b
from typing import NamedTuple

DEVICE = "device"
HOST = "host"
SHARED = "shared"  # the tier below the host


class EntryKind(IntEnum):
    """What a transfer moves."""

    KV = 0  # the KV of one block, in all attention layers
    STATE = 1  # one checkpoint, in all recurrent layers
    LIVE = 2  # the live state of a preempted request


# Not frozen: each eviction makes one, and a frozen one takes three times as long.
@dataclass(slots=True, unsafe_hash=True)
class Tag:
    """Name of an entry's content; compared when the entry is loaded. Never changed.

    Attributes:
        kind: KV or state.
        key: Key of the block, made of all tokens up to its end, their salt and the weights epoch. For an entry that a
            preempted request swapped out: the request id, in bytes.
        depth_tokens: Tokens up to the end of the entry.
        epoch: Weights epoch.
        parent: Key of the previous block; empty for the first one. Not compared.
    """

    kind: EntryKind
    key: bytes
    depth_tokens: int
    epoch: int
    parent: bytes = field(default=b"", compare=False)

    @property
    def digest(self) -> int:
        """Hash of the tag: a signed 64-bit number."""
        text = f"{self.kind.name} {self.key.hex()} {self.depth_tokens} {self.epoch}".encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), signed=True)


class BlockTransfer(NamedTuple):
    """One move of an entry. A tuple, because each eviction makes one.

    Attributes:
        source: Name of a tier: `DEVICE`, `HOST` or `SHARED`.
        target: Likewise.
        pages: Pages on the host, in the order of the bytes.
        tag: Of the entry that is moved.
        device_id: KV block or slot (by the tag's kind) if the device is one end; else below 0.
        load_id: The load it belongs to; below 0 unless the target is the device.
        is_coming: The entry is being read from the tier below the host.
    """

    source: str
    target: str
    pages: tuple[int, ...]
    tag: Tag
    device_id: int = -1
    load_id: int = -1
    is_coming: bool = False


class LoadState(StrEnum):
    """The state of a `Load`. The same on all ranks, which agree where time or bytes decide. Failures have the name they are counted by."""

    FETCHING = "fetching"  # some entries are being read from the tier below
    COPYING = "copying"  # all its entries are on the host; copies to the device are queued or launched
    ARRIVED = "arrived"  # a forward has used it, and it was right
    FAILED = "host_load_failed"  # other bytes than what was stored
    MISSING = "tier_load_missing"  # the tier below did not have an entry that it promised
    LATE = "tier_load_late"  # the tier below took longer than a request waits
    GIVEN_UP = "host_load_given_up"  # its request does not need it any more


class BlockMove(NamedTuple):
    """A copy of a KV block, in all attention layers, within the memory that KV and states share on the device.

    A tuple, because many may be made in one step.
    """

    source_block: int
    target_block: int


class StateMove(NamedTuple):
    """A copy of a checkpoint to another slot of its size, within that memory."""

    source_slot: int
    target_slot: int


class PageClear(NamedTuple):
    """Zeros in a page that held a state, before it gets KV.

    Attention may read a KV block to its end, and multiply by zero what is after the last token: that has to be a number.
    """

    page: int


class LoadOver(NamedTuple):
    """The load has ended. Its blocks and its slot may be reused, so the model's later launches wait for what was launched of it."""

    load_id: int


type Copy = BlockTransfer | BlockMove | StateMove | PageClear | LoadOver
"""What the cache decided to write on the device or to another tier. Copies run in the order of their queue."""
