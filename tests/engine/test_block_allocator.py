"""The block allocator when it replaces megatron's without this package's context or cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_hybrid_prefix.mcore import HybridPrefixBlockAllocator


@pytest.fixture
def allocator(platform):
    return HybridPrefixBlockAllocator(SimpleNamespace(), total_count=9, paused_count=2, enable_prefix_caching=False)


def test_sizes_are_megatrons(allocator):
    assert (allocator.total_count, allocator.paused_count, allocator.active_count) == (9, 2, 6)
    assert allocator.dummy_block_idx == 8 and allocator.total_avail == 8


def test_blocks_go_out_and_come_back(allocator):
    first = allocator.allocate_memory_blocks(5)
    assert len(set(first.tolist())) == 5 and allocator.total_avail == 3
    assert allocator.block_ref_counts.tolist() == [int(block in first) for block in range(9)]
    assert allocator.allocate_memory_blocks(4) is None and not allocator.is_memory_available(4)
    allocator.release_memory_blocks(first[:3])
    assert allocator.total_avail == 6 and allocator.get_evictable_block_count() == 0
    allocator.reset()
    assert allocator.total_avail == 8
    assert sorted(allocator.allocate_memory_blocks(8).tolist()) == list(range(8))
    assert allocator.block_ref_counts.dtype == torch.int32
