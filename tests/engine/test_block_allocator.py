"""The block allocator when it replaces megatron's without this package's context or cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator

from megatron_hybrid_prefix.mcore import HybridPrefixBlockAllocator
from megatron_hybrid_prefix.upstream.blocks import available_blocks, block_counts


@pytest.fixture
def allocator(platform):
    return HybridPrefixBlockAllocator(SimpleNamespace(), 9, 2, enable_prefix_caching=False)


def test_sizes_are_megatrons(allocator):
    megatrons = KVBlockAllocator(SimpleNamespace(), 9, 2)
    assert block_counts(allocator) == block_counts(megatrons) and block_counts(allocator)[:2] == (9, 2)
    assert allocator.dummy_block_idx == 8 and available_blocks(allocator) == available_blocks(megatrons) == 8


def test_blocks_go_out_and_come_back(allocator):
    first = allocator.allocate_memory_blocks(5)
    assert len(set(first.tolist())) == 5 and available_blocks(allocator) == 3
    assert allocator.block_ref_counts.tolist() == [int(block in first) for block in range(9)]
    assert allocator.allocate_memory_blocks(4) is None and not allocator.is_memory_available(4)
    allocator.release_memory_blocks(first[:3])
    assert available_blocks(allocator) == 6 and allocator.get_evictable_block_count() == 0
    allocator.reset()
    assert available_blocks(allocator) == 8
    assert sorted(allocator.allocate_memory_blocks(8).tolist()) == list(range(8))
    assert allocator.block_ref_counts.dtype == torch.int32
