"""`BlockTransfer`: one move between two tiers, of a KV block or of a state.

``index/host_tier.py`` and ``index/loads.py`` decide on transfers, `arena.py` runs them; they share nothing else. Transfers run in
the order of their queue, so a page or slot may be reused as soon as its transfer is queued. The tiers are the device, the
host, and at most one tier behind the host. Every transfer begins or ends on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

DEVICE = "device"
HOST = "host"


class EntryKind(IntEnum):
    """What a transfer moves."""

    KV = 0  # the KV of one block, in all attention layers
    STATE = 1  # one recurrent state, in all recurrent layers


@dataclass(
    slots=True, unsafe_hash=True
)  # not frozen: each eviction makes one, and a frozen one takes three times as long
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
        source: Name of a tier: `DEVICE`, `HOST`, or the name of the tier behind the host.
        target: Likewise.
        pages: Pages on the host, in the order of the bytes.
        tag: What is moved.
        device_id: KV block or slot (by the tag's kind) if the device is one end; else None.
        load_id: Id of the load it belongs to; None unless the target is the device.
    """

    source: str
    target: str
    pages: tuple[int, ...]
    tag: Tag
    device_id: int | None = None
    load_id: int | None = None


class BlockMove(NamedTuple):
    """A copy of a KV block, in all attention layers, within the memory that KV and states share on the device.

    A tuple, because many may be made in one step.
    """

    source_block: int
    target_block: int


class PageClear(NamedTuple):
    """Zeros in a page that held a state, before it gets KV.

    Attention may read a KV block to its end, and multiply what is behind the last token by zero: that has to be a number.
    """

    page: int


type Copy = BlockTransfer | BlockMove | PageClear
"""What the cache decided to write on the device or to another tier. Copies run in the order of their queue."""


def stores_first(copies: Sequence[Copy], page_blocks: int, page_states: int, first_page_slot: int) -> list[Copy]:
    """Puts stores before moves and clears, unless they read what those write: then more stores are launched together.

    Args:
        copies: Queued copies, in order.
        page_blocks: KV blocks in a page.
        page_states: States in a page.
        first_page_slot: Slot of the first page.

    Returns:
        The copies in an order with the same result.
    """
    stores: list[Copy] = []
    others: list[Copy] = []
    moved: set[int] = set()  # blocks that the moves and clears read or write
    slots: set[int] = set()  # of their pages
    no_transfer_yet = True
    for copy in copies:
        if isinstance(copy, BlockMove | PageClear):
            if isinstance(copy, BlockMove):
                blocks = {copy.source_block, copy.target_block}
            else:
                blocks = set(range(copy.page * page_blocks, (copy.page + 1) * page_blocks))
            moved |= blocks
            for page in {block // page_blocks for block in blocks}:
                first = first_page_slot + page * page_states
                slots |= set(range(first, first + page_states))
        else:
            # Transfers keep their order: they may use the same pages on the host.
            reads_moved = copy.device_id in (moved if copy.tag.kind == EntryKind.KV else slots)
            no_transfer_yet = no_transfer_yet and copy.source == DEVICE and not reads_moved
            if no_transfer_yet:
                stores.append(copy)
                continue
        others.append(copy)
    return stores + others
