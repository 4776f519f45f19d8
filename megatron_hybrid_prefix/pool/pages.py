"""`Pages`: one memory for KV blocks and states. Which pages hold states, and which hold KV blocks.

The memory is an array of KV blocks. A *page* is as many blocks as one state needs, rounded up::

    page 0                  page 1                  page 2                  rest
    | block 0 | 1 | 2 | 3 | | block 4 | 5 | 6 | 7 | | block 8 | 9 | 10 | 11 | | 12 | 13 |
    | slot 0            | | | slot 1            | | | slot 2              | |

Block k begins at ``k * block_bytes``, page p at ``p * page_bytes``. So blocks and slots are two views of the same memory, and
no address ever changes. A page belongs to states, or to its blocks. The blocks after the last whole page hold KV only.

To give a page to a state, its blocks must be free. If no page is empty, the page with the fewest blocks in use is emptied:
its blocks move into holes of other pages. Only blocks that no request holds may move. New blocks go to the fullest page
that has a hole. So holes are rare, and the blocks of running requests lie close together.

Where checkpoints are kept in fewer bytes than live states, a page of states has either: so many live states, or so many checkpoints. It
has slots of both sizes, and those of one size are in use::

    page 0                  page 1
    | block 0 | 1 | 2 | 3 | | block 4 | 5 | 6 | 7 |
    | slot 0 (live)     | | | slot 5 (live)     | |
    | 1   | 2   | 3   | 4 | | 6   | 7   | 8   | 9 |

Little of a page is lost. Where a state needs little more than n blocks, blocks are spaced a little wider instead, so that n of
them hold it. Where a state is smaller than a block, or not much larger, a page has several slots (`PageLayout.of`).

What is lost:

- ``padding_bytes`` per page of states, or the padding of each block.
- Nothing else is lost for KV: every free block can be allocated.
- A slot is refused, while there are enough free blocks for it, only if every page has a state or a block that a running
  request holds.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from megatron_hybrid_prefix.errors import CacheCorruptionError
from megatron_hybrid_prefix.pool.layout import RingLayout
from megatron_hybrid_prefix.support.arithmetic import ceil_div, round_up

ALIGNMENT_BYTES = 256
"""On a device, blocks and states begin at multiples of it."""
_STATE_SHARE = 0.25  # of the bytes, in a good mix (docs/benchmarks.md): weighs padding of states against padding of KV
_MOST_LOST = 0.1  # of a page of states
_MOST_LOST_OF_KV = 0.04  # of a block, which may be most of the memory
_MOST_LOST_OF_LIVE = 0.25  # of a page of live states that are larger than checkpoints: there are few
_MOST_STATES = 64  # in a page


def own_bytes(state_bytes: int, rings: RingLayout, *, own_slots: int, requests: int) -> int:
    """Bytes before the pages: the engine's own slots, and the rings of so many requests."""
    return own_slots * state_bytes + rings.bytes(requests, ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """How KV blocks and states share one memory.

    Attributes:
        block_bytes: Bytes from one KV block to the next: those of all its attention layers, and padding.
        state_bytes: Bytes of a checkpoint, in all recurrent layers.
        page_blocks: KV blocks in a page.
        page_states: Checkpoints in a page that has checkpoints.
        total_blocks: KV blocks that fit.
        live_bytes: Bytes of a live state; 0: those of a checkpoint, and a page may have both.
        page_live: Live states in a page that has live states; 0 with ``live_bytes``.
    """

    block_bytes: int
    state_bytes: int
    page_blocks: int
    page_states: int
    total_blocks: int = 0
    live_bytes: int = 0
    page_live: int = 0

    @classmethod
    def of(cls, *, block_bytes: int, state_bytes: int, live_bytes: int = 0, alignment_bytes: int = 1) -> PageLayout:
        """The layout that loses least, with as few states in a page as lose at most a tenth of a page and 4 % of a block.

        A page holds a live state, too, and live states lose at most a quarter of it.

        States take whole blocks, rounded up. Or they take one block less, of as many bytes as that needs. A state of 9.07
        blocks: 10 blocks, of which states lose 9.3 %; or 9 blocks that are 0.7 % larger.

        Args:
            block_bytes: Bytes of a KV block, without padding.
            state_bytes: Bytes of a checkpoint.
            live_bytes: Bytes of a live state, if it is larger; else 0.
            alignment_bytes: The distance of blocks is a multiple of it, if it is not ``block_bytes``.

        Raises:
            ValueError: A size is below 1, or ``live_bytes`` is below ``state_bytes``.
        """
        if block_bytes < 1 or state_bytes < 1:
            raise ValueError(f"block_bytes={block_bytes}, state_bytes={state_bytes}: must be 1 or more")
        if live_bytes and live_bytes < state_bytes:
            raise ValueError(f"live_bytes={live_bytes}: must be 0, or state_bytes={state_bytes} or more")
        found: list[tuple[float, float, PageLayout]] = []
        least = max(1, live_bytes // state_bytes)
        for states in range(least, least + _MOST_STATES):
            fewer, more = states * state_bytes // block_bytes, ceil_div(states * state_bytes, block_bytes)
            for blocks in {fewer or more, more}:
                step_bytes = max(block_bytes, round_up(ceil_div(states * state_bytes, blocks), alignment_bytes))
                of_page, of_block = 1 - states * state_bytes / (blocks * step_bytes), 1 - block_bytes / step_bytes
                lost = _STATE_SHARE * of_page + (1 - _STATE_SHARE) * of_block
                live = blocks * step_bytes // live_bytes if live_bytes else 0
                if live_bytes and not live:
                    continue
                of_live = 1 - live * live_bytes / (blocks * step_bytes) if live else 0.0
                shares = of_page / _MOST_LOST, of_block / _MOST_LOST_OF_KV, of_live / _MOST_LOST_OF_LIVE
                layout = cls(
                    block_bytes=step_bytes,
                    state_bytes=state_bytes,
                    page_blocks=blocks,
                    page_states=states,
                    live_bytes=live_bytes,
                    page_live=live,
                )
                found.append((max(shares), lost, layout))
            if any(most <= 1 for most, _, _ in found):
                found = [each for each in found if each[0] <= 1]
                break
        return min(found, key=lambda each: each[1])[2]

    @property
    def least_bytes(self) -> int:
        """Bytes of a page and of a KV block."""
        return (self.page_blocks + 1) * self.block_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.page_blocks * self.block_bytes

    @property
    def padding_bytes(self) -> int:
        """Bytes of a page that its checkpoints leave unused."""
        return self.page_bytes - self.page_states * self.state_bytes

    @property
    def pages(self) -> int:
        """Whole pages."""
        return self.total_blocks // self.page_blocks

    @property
    def slots(self) -> int:
        """Checkpoints that fit, if there is nothing else."""
        return self.pages * self.page_states

    @property
    def page_slots(self) -> int:
        """Slots of a page, of all sizes."""
        return self.page_live + self.page_states

    def cache_sizes(self) -> dict[str, Any]:
        """Arguments of `CacheSettings`."""
        return {
            "kv_blocks": self.total_blocks,
            "page_blocks": self.page_blocks,
            "page_states": (self.page_live, self.page_states) if self.page_live else self.page_states,
        }


_KV, _STATE = 1, 2  # who had a page last; 0: nobody


class PageHeap:
    """Pages by free blocks, or by free slots. Entries may be out of date: the reader checks them.

    O(log pages) per call.

    Args:
        most_first: Whether the page with the most free blocks comes first, else that with the fewest; of equal pages the first.
    """

    def __init__(self, *, most_first: bool) -> None:
        self._sign = -1 if most_first else 1
        self._heap: list[tuple[int, int]] = []
        self._listed: set[tuple[int, int]] = set()

    def push(self, page: int, free: int) -> None:
        """Lists the page with ``free`` free blocks."""
        entry = self._sign * free, page
        if entry not in self._listed:
            self._listed.add(entry)
            heappush(self._heap, entry)

    def first(self, is_listed: Callable[[int, int], bool]) -> int | None:
        """The first page whose entry ``is_listed`` still holds of it and its free blocks."""
        while self._heap:
            free, page = entry = self._heap[0]
            if is_listed(page, self._sign * free):
                return page
            self._listed.remove(entry)
            heappop(self._heap)
        return None


class Pages:
    """The pages of one memory. ``tiers/blocks.py`` and `SlotPool` tell it which blocks and slots are in use.

    A block is free, cached (no request holds it) or held.

    Args:
        blocks: KV blocks that fit.
        page_blocks: KV blocks in a page.
        page_states: States in a page; or live states, and checkpoints, where a page has one or the other.

    Raises:
        ValueError: A number is negative, or a page has no block or no state.

    Attributes:
        page_sizes: States in a page of each size: of one size, or of live states and of checkpoints.
        page_slots: Slots of a page, of all sizes.
        pages_to_states: Pages given to a state so far, of those that last held KV.
        pages_to_kv: Pages given to KV blocks so far, of those that last held a state.
        with_old_state: Pages that were given to KV blocks and still hold the bytes of a state. The caller has them cleared, and
            empties the list.
    """

    def __init__(self, blocks: int, page_blocks: int, page_states: int | tuple[int, int] = 1) -> None:
        self.page_sizes = (page_states,) if isinstance(page_states, int) else page_states
        self.page_slots = sum(self.page_sizes)
        if blocks < 0 or page_blocks < 1 or min(self.page_sizes) < 1:
            raise ValueError(
                f"kv_blocks={blocks}, page_blocks={page_blocks}, page_states={page_states}: must be 0, 1 and 1 or more"
            )
        self.total_blocks, self.page_blocks = blocks, page_blocks
        self._whole = blocks // page_blocks
        self.pages_to_states = self.pages_to_kv = 0
        self.with_old_state: list[int] = []
        self._last_owner = bytearray(ceil_div(blocks, self.page_blocks))
        self.reset()

    def reset(self) -> None:
        """Frees everything. The bytes in the memory stay."""
        size, blocks = self.page_blocks, self.total_blocks
        # Stacks with the lowest id on top.
        self._free_ids = [list(range(min(start + size, blocks) - 1, start - 1, -1)) for start in range(0, blocks, size)]
        self._held = array("i", bytes(4 * len(self._free_ids)))
        self._is_state = bytearray(len(self._free_ids))
        self._by_free = PageHeap(most_first=False)
        self._unheld_by_free = PageHeap(most_first=True)  # whole pages without a held block
        self._changed = set(range(len(self._free_ids)))  # to be listed before a page is looked for
        self.free_blocks = blocks
        self.held_blocks = 0
        self.state_pages = 0
        self.unheld_pages = self._whole

    def __len__(self) -> int:
        return self._whole

    def page_of(self, block_id: int) -> int:
        """The page that the block is in."""
        return block_id // self.page_blocks

    def unheld_without(self, block_ids: Iterable[int]) -> int:
        """Whole pages without a held block, if these blocks were held, too."""
        touched = set(map(self.page_of, block_ids))
        return self.unheld_pages - sum(page < self._whole and not self._held[page] for page in touched)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def take_blocks(self, count: int) -> list[int]:
        """Takes free blocks, which are held from now on. The caller checks that there are enough."""
        block_ids: list[int] = []
        for page, filled in self._fill_holes(count):
            self.free_blocks -= len(filled)
            self.hold(filled[0], len(filled))
            if self._last_owner[page] == _STATE:
                self.pages_to_kv += 1
                self.with_old_state.append(page)
            self._last_owner[page] = _KV
            block_ids += filled
        return block_ids

    def _fill_holes(self, count: int, besides: int | None = None) -> Iterator[tuple[int, list[int]]]:
        """Takes ``count`` free blocks off their pages, the fullest page first. Not those of the page ``besides``."""
        by_free = self._listed(self._by_free)  # once: only the last page has free blocks left
        while count:
            page = by_free.first(lambda page, free: page != besides and self._has_free(page, free))
            assert page is not None, "taken more blocks than are free"
            free = self._free_ids[page]
            filled = free[: -min(count, len(free)) - 1 : -1]
            del free[-len(filled) :]
            self._changed.add(page)
            count -= len(filled)
            yield page, filled

    def hold(self, block_id: int, count: int) -> None:
        """Requests hold ``count`` more blocks of this block's page; below 0: fewer. Those stay cached."""
        page = block_id // self.page_blocks
        before = self._held[page]
        self._held[page] = before + count
        self.held_blocks += count
        if page < self._whole and (before == 0) != (before + count == 0):
            self.unheld_pages += 1 if before else -1
            if before:
                self._changed.add(page)

    def free(self, block_id: int) -> None:
        """Frees a held block."""
        self.evict(block_id)
        self.hold(block_id, -1)

    def evict(self, block_id: int) -> None:
        """Frees a cached block."""
        page = block_id // self.page_blocks
        self._free_ids[page].append(block_id)
        self.free_blocks += 1
        self._changed.add(page)

    # -- slots ---------------------------------------------------------------------------------------------------------

    @property
    def empty_page(self) -> int | None:
        """A page whose blocks are all free; None if there is none."""
        if self.free_blocks < self.page_blocks:
            return None
        page = self._listed(self._unheld_by_free).first(self._is_unheld)
        return page if page is not None and len(self._free_ids[page]) == self.page_blocks else None

    def can_be_emptied(self) -> bool:
        """Whether there is a page without a held block, and room for its blocks elsewhere."""
        return self.unheld_pages > 0 and self.free_blocks >= self.page_blocks

    def empty(self) -> tuple[int, list[tuple[int, int]]]:
        """Chooses the page that is emptied with the fewest moves. The caller carries out the moves.

        Returns:
            The page, and its moves: (from block, to block). From now on the blocks it moves to are cached and the page's
            blocks are free.
        """
        page = self._listed(self._unheld_by_free).first(self._is_unheld)
        assert page is not None and self.can_be_emptied()
        size, free = self.page_blocks, self._free_ids[page]
        start = page * size
        used = sorted({*range(start, start + size)}.difference(free))
        targets: list[int] = []
        for target, filled in self._fill_holes(len(used), besides=page):
            assert self._last_owner[target] != _STATE, "such a page is empty, and would have been taken"
            self._last_owner[target] = _KV
            targets += filled
        free[:] = range(start + size - 1, start - 1, -1)
        self._changed.add(page)
        return page, list(zip(used, targets, strict=True))

    def give_to_state(self, page: int) -> None:
        """Gives an empty page to its slots."""
        if page >= self._whole or self._is_state[page] or len(self._free_ids[page]) != self.page_blocks:
            raise CacheCorruptionError(f"page {page} is given to a state, but is not empty")
        self._is_state[page] = 1
        self.pages_to_states += self._last_owner[page] == _KV
        self._last_owner[page] = _STATE
        self.state_pages += 1
        self.unheld_pages -= 1
        self.free_blocks -= self.page_blocks

    def take_from_state(self, page: int) -> None:
        """The page's slot became free, so its blocks are."""
        if not self._is_state[page]:
            raise CacheCorruptionError(f"page {page} is taken from a state that it does not hold")
        self._is_state[page] = 0
        self.state_pages -= 1
        self.unheld_pages += 1
        self.free_blocks += self.page_blocks
        self._changed.add(page)

    def is_state(self, page: int) -> bool:
        """Whether the page holds a state."""
        return bool(self._is_state[page])

    def free_ids(self) -> list[int]:
        """All free blocks, ascending; O(blocks)."""
        pages = zip(self._free_ids, self._is_state, strict=True)
        return sorted(block_id for free, is_state in pages if not is_state for block_id in free)

    def check(self, ref_counts: array[int]) -> None:
        """Checks the counters against the blocks' ref counts.

        Raises:
            CacheCorruptionError: They differ, or a page of a state has a block that is in use.
        """
        size = self.page_blocks
        held = array("i", bytes(4 * len(self._free_ids)))
        for block_id, ref_count in enumerate(ref_counts):
            held[block_id // size] += ref_count > 0
        for page, free in enumerate(self._free_ids):
            ids = range(page * size, min((page + 1) * size, self.total_blocks))
            if len(set(free)) != len(free) or not set(free) <= set(ids):
                raise CacheCorruptionError(f"page {page}: its free blocks {free} are not its own")
            if self._is_state[page] and (len(free) != size or held[page]):
                raise CacheCorruptionError(f"page {page} holds a state and KV blocks")
        unheld = sum(not held[page] and not self._is_state[page] for page in range(len(self)))
        counted = (self.free_blocks, self.held_blocks, self.state_pages, self.unheld_pages)
        found = (len(self.free_ids()), sum(held), sum(self._is_state), unheld)
        if held != self._held or counted != found:
            raise CacheCorruptionError(f"free, held blocks, states and unheld pages: counted {counted}, are {found}")

    def _listed(self, heap: PageHeap) -> PageHeap:
        """The heap, with all pages that changed since the last look. Many blocks of a page change between two looks."""
        if self._changed:
            for page in self._changed:
                self._list(page)
            self._changed.clear()
        return heap

    def _list(self, page: int) -> None:
        free = len(self._free_ids[page])
        if free:
            self._by_free.push(page, free)
        if not self._held[page] and page < self._whole:
            self._unheld_by_free.push(page, free)

    def _has_free(self, page: int, free: int) -> bool:
        return len(self._free_ids[page]) == free and not self._is_state[page]

    def _is_unheld(self, page: int, free: int) -> bool:
        return len(self._free_ids[page]) == free and not self._held[page] and not self._is_state[page]
