"""`stores_first`: an order of copies with the same result, in which more stores are launched together."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hybrid_prefix.tiers.units import DEVICE, BlockMove, BlockTransfer, Copy, EntryKind, PageClear


def stores_first(copies: Sequence[Copy], page_blocks: int, page_states: int, first_page_slot: int) -> list[Copy]:
    """Puts stores before moves and clears, unless they read what those write: then more stores are launched together.

    Args:
        copies: Queued copies, in order.
        page_blocks: KV blocks in a page.
        page_states: States in a page: the slots of page p follow ``first_page_slot + p * page_states``.
        first_page_slot: First slot of the first page.

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
                slots.update(range(first, first + page_states))
        elif isinstance(copy, BlockTransfer):
            # Transfers keep their order: they may use the same pages on the host.
            reads_moved = copy.device_id in (moved if copy.tag.kind == EntryKind.KV else slots)
            no_transfer_yet = no_transfer_yet and copy.source == DEVICE and not reads_moved
            if no_transfer_yet:
                stores.append(copy)
                continue
        others.append(copy)
    return stores + others
