"""``verify_hits``: a share of the hits is computed again and compared. A wrong cache is noticed."""

from __future__ import annotations

import logging

import pytest

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import get_preset
from tests.harness.engine_helpers import assert_matches, greedy, random_tokens, run_to_end
from tests.harness.naive_model import NaiveHybridModel


def send_sharing(engine, count: int, seed: int = 1) -> dict:
    """Sends a prompt of two blocks, then ``count`` prompts that continue it."""
    finished: dict = {}
    prefix = random_tokens(512, seed=seed)
    for number in range(count + 1):
        own = random_tokens(3 + number, seed=10 + number) if number else [7]
        engine.add_request(number, prefix + own, greedy(3))
        run_to_end(engine, finished)
        engine.context.check_integrity()
    return finished


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("share", "verified"), [(0.0, 0), (0.5, 4), (1.0, 8)])
def test_a_right_cache_has_no_mismatch(tiny, share, verified, chunked):
    fields = {"max_sequence_length": 1024, "enable_chunked_prefill": chunked, "max_tokens": 192 if chunked else 4096}
    prefix = HybridPrefixConfig(mamba_gb=0.002, verify_hits=share, retention_interval_tokens=0)
    engine = build_engine(tiny, prefix, **fields)
    finished = send_sharing(engine, 8)
    stats = engine.context.prefix_stats()
    assert (stats.verified_hits, stats.verify_mismatches) == (verified, 0)
    assert stats.reused_tokens == (8 - verified) * 512
    assert stats.slots_used == 1  # what was computed for the comparison is not kept
    reference = NaiveHybridModel(tiny, get_preset("tiny"))
    for request in finished.values():
        assert_matches(reference, request)


@pytest.mark.parametrize("part", ["ssm", "conv", "kv"])
def test_a_wrong_cache_is_noticed(tiny, part, caplog):
    prefix = HybridPrefixConfig(mamba_gb=0.002, verify_hits=1.0, retention_interval_tokens=0)
    engine = build_engine(tiny, prefix, max_sequence_length=1024)
    send_sharing(engine, 0)
    context = engine.context
    (node,) = [node for node in context.prefix_cache.nodes() if node.slot >= 0]
    if part == "kv":
        context.memory_buffer[:, :, node.block_id] *= 1.1
    else:
        context.shared_memory.state(node.slot)[part].mul_(1.1)
    finished: dict = {}
    with caplog.at_level(logging.WARNING, logger="megatron_hybrid_prefix"):
        engine.add_request(50, [*random_tokens(512, seed=1), 3, 4], greedy(3))
        run_to_end(engine, finished)
    stats = context.prefix_stats()
    assert (stats.verified_hits, stats.verify_mismatches) == (1, 1)
    assert f"first 512 tokens differs from recomputing them; relative difference {part}" in caplog.text
    assert_matches(NaiveHybridModel(tiny, get_preset("tiny")), finished[50])  # it did not use what is wrong


def test_the_share_is_checked():
    with pytest.raises(ValueError, match=r"verify_hits=1\.5: must be from 0 to 1"):
        HybridPrefixConfig(mamba_gb=1, verify_hits=1.5)
