"""States are kept bit by bit, and ``verify_hits`` computes a share of the hits again: a wrong cache is noticed.

(What the scan makes of states: tests/kernels/test_chunk_outputs.py.)
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.layers import mamba2
from tests.harness.engine_helpers import random_tokens
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, tokens

PREFIX = tokens(3, 0, seed=1)


@pytest.mark.parametrize("block", [64, 96])
def test_a_checkpoint_is_the_live_state_at_its_boundary_and_is_what_a_hit_reads(model, monkeypatch, block):
    served, scan = EngineHarness(model, block_size_tokens=block), mamba2.scan_by_slots
    context, read = served.context, list[torch.Tensor]()

    def recording(states: Any, bounds: Any, **fields: Any) -> Any:
        read.append(states[fields["source_slots"][0]].clone())
        return scan(states, bounds, **fields)

    monkeypatch.setattr(mamba2, "scan_by_slots", recording)
    prompt = random_tokens(3 * block, seed=1)
    served.add(prompt, 2)
    served.step()  # the prefill, whose last token ends a block
    live = int(context.mamba_metadata.request_to_mamba_state_idx[0])
    tail = max((node for node in served.cache.nodes() if node.slot >= 0), key=lambda node: node.depth_blocks)
    state = context.shared_memory.state
    now, kept = state(context.states.live.slot(live)), {name: part.clone() for name, part in state(tail.slot).items()}
    assert tail.depth_blocks == 3 and all(torch.equal(now[name], kept[name]) for name in kept)
    served.run()

    read.clear()
    assert served.send(prompt + random_tokens(5, seed=2), count=2).num_cached_tokens == len(prompt)
    assert len(read) == model.hybrid_config.layer_pattern.count("M")
    assert all(torch.equal(read[layer], ssm) for layer, ssm in enumerate(kept["ssm"]))
    for name, tensor in state(tail.slot).items():  # reading it, and computing on, did not change it
        assert torch.equal(tensor, kept[name])


@pytest.mark.parametrize(("share", "verified", "chunked"), [(0.0, 0, False), (0.5, 4, True), (1.0, 8, False)])
def test_a_right_cache_has_no_mismatch(model, share, verified, chunked):
    fields = {"enable_chunked_prefill": True, "max_tokens": 192} if chunked else {}
    served = EngineHarness(model, verify_hits=share, **fields)
    for number in range(9):
        served.send(PREFIX + random_tokens(3 + number, seed=10 + number))
    stats = served.context.prefix_stats()
    assert (stats.verified_hits, stats.verify_mismatches) == (verified, 0)
    assert stats.reused_tokens == (8 - verified) * len(PREFIX)
    assert stats.slots_used == 1  # what was computed for the comparison is not kept
    served.check()


@pytest.mark.parametrize("part", ["ssm", "conv", "kv"])
def test_a_wrong_cache_is_noticed(model, part, caplog):
    served = EngineHarness(model, verify_hits=1.0)
    served.send([*PREFIX, 7])
    (node,) = [node for node in served.cache.nodes() if node.slot >= 0]
    if part == "kv":
        served.context.memory_buffer[:, :, node.block_id] *= 1.1
    else:
        served.context.shared_memory.state(node.slot)[part].mul_(1.1)
    with caplog.at_level(logging.WARNING, logger="megatron_hybrid_prefix"):
        served.send([*PREFIX, 3, 4])
    stats = served.context.prefix_stats()
    assert (stats.verified_hits, stats.verify_mismatches) == (1, 1)
    assert f"first {3 * BLOCK} tokens differs from recomputing them; relative difference {part}" in caplog.text
    served.check()  # it did not use what is wrong
