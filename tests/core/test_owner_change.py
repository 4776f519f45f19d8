"""Many pages of KV go to states in one step, and every block has its bytes afterwards.

As many short prompts as pages start in one step. Each keeps one state, and no page is empty. So a page is emptied for
each state: its blocks move into the holes of other pages, half of all that changes its owner, or nearly all of it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.mcore.state.moves import Moves
from megatron_hybrid_prefix.policy.boundaries import Boundary, CheckpointReason
from megatron_hybrid_prefix.pool.layout import SlotLayout, StateComponent, StateLayout
from megatron_hybrid_prefix.pool.pages import PageLayout
from megatron_hybrid_prefix.pool.shared_memory import BlockShape, SharedMemory

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(gib=1))]
BLOCK_TOKENS = 4


def start(cache: HybridPrefixCache, number: int, tokens: int) -> None:
    """A prompt starts, is computed in one step, and keeps running."""
    assert cache.admit(number, cache.match(cache.chain([number] * tokens))) is not None
    cache.publish(cache.plan(number, 0, tokens))


def full_cache(layout: PageLayout, cached: int) -> HybridPrefixCache:
    """Each page has ``cached`` blocks, and no request holds one. From now on prompts keep the state at their end."""
    keeps = False

    def rule(*, prompt_tokens: int, **others: object) -> tuple[Boundary, ...]:
        return (Boundary(prompt_tokens, CheckpointReason.TAIL),) if keeps else ()

    size = layout.page_blocks
    settings = {"kv_blocks": layout.total_blocks, "page_blocks": size, "live_states": False, "boundary_rule": rule}
    cache = HybridPrefixCache(CacheSettings(block_tokens=BLOCK_TOKENS, **settings))
    for page in range(layout.pages):  # new blocks come from the fullest page with a hole, so page by page
        start(cache, page, BLOCK_TOKENS * cached)
        assert cache.blocks.allocate(size - cached) is not None
    cache.release_all()
    keeps = True
    return cache


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fill", ["half", "all but one"])
@pytest.mark.parametrize(
    ("page_blocks", "block_bytes", "pages"),
    [(10, 1024, 1), (10, 1024, 10), (10, 1024, 34), (26, 256, 1), (26, 256, 10)],
)
def test_blocks_have_their_bytes(device, fill, page_blocks, block_bytes, pages):
    cached = page_blocks // 2 if fill == "half" else page_blocks - 1
    others = (
        ceil_div(pages * (cached + 1), page_blocks - cached) + 1
    )  # their holes take what moves, and a block of each prompt
    layout = PageLayout(
        block_bytes=block_bytes,
        state_bytes=page_blocks * block_bytes,
        page_blocks=page_blocks,
        page_states=1,
        total_blocks=(pages + others) * page_blocks,
    )
    component = StateComponent(name="state", shape=(1,), dtype="bfloat16")
    slots = SlotLayout((StateLayout(kind="any", layers=1, components=(component,)),))
    block = BlockShape(before=(), after=(block_bytes,), dtype=torch.uint8)
    memory = SharedMemory(slots, layout=layout, block=block, own_slots=0, device=torch.device(device))
    cache = full_cache(layout, cached)
    moves = Moves(SimpleNamespace(shared_memory=memory, prefix_cache=cache))
    origin: dict[int, int] = {}
    cache._store.on_move = lambda source, target: origin.update({target: origin.pop(source, source)})
    labels = memory.kv_rows[0, :, :8].view(torch.int64)[:, 0]
    labels.copy_(torch.arange(len(labels)))
    for number in range(pages):
        start(cache, layout.pages + number, BLOCK_TOKENS)
    moves.launch()
    assert cache.memory_use().pages_to_states == pages and cache.stats().evictions == 0
    assert len(origin) >= pages * cached
    values = labels.tolist()
    assert all(values[block_id] == source for block_id, source in origin.items())
