"""States are kept and restored bit by bit. The scan gives the same bits from whichever boundary it starts."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end

TOKENS = 512


@pytest.mark.parametrize("chunk_tokens", [64, 128])
@pytest.mark.parametrize("block_tokens", [64, 96, 256])
def test_the_scan_has_the_same_bits_from_every_boundary(platform, block_tokens, chunk_tokens):
    from megatron.core.ssm import mamba_mixer as upstream

    from megatron_hybrid_prefix.layers.step import ChunkGrid

    heads, headdim, groups, d_state = 4, 32, 2, 16
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    x, dt = draw(TOKENS, heads, headdim), draw(TOKENS, heads)
    B, C = draw(TOKENS, groups, d_state), draw(TOKENS, groups, d_state)
    A, D, dt_bias = -torch.rand(heads, generator=generator) - 0.1, draw(heads), draw(heads)
    grid = ChunkGrid(chunk_tokens=chunk_tokens, block_tokens=block_tokens)

    def scan(start: int, state: torch.Tensor):
        ends = grid.ends(start, TOKENS)
        y = torch.full_like(x[start:], float("nan"))
        _, states = upstream.mamba_chunk_scan_combined_varlen(
            x=x[start:].contiguous(),
            dt=dt[start:].contiguous(),
            A=A,
            B=B[start:].contiguous(),
            C=C[start:].contiguous(),
            chunk_size=chunk_tokens,
            cu_chunk_seqlens=torch.tensor([0, *(end - start for end in ends)], dtype=torch.int32),
            last_chunk_indices=torch.tensor([len(ends) - 1], dtype=torch.int32),
            seq_idx=torch.zeros(len(ends), dtype=torch.int32),
            out=y,
            D=D,
            dt_bias=dt_bias,
            initial_states=state[None],
            return_raw_states=True,
            dt_softplus=True,
            state_dtype=torch.float32,
        )
        return y, dict(zip(ends, states, strict=True))

    whole, states = scan(0, torch.zeros(heads, headdim, d_state))
    for boundary in range(block_tokens, TOKENS, block_tokens):
        tail, tail_states = scan(boundary, states[boundary])
        assert torch.equal(tail, whole[boundary:])
        assert all(torch.equal(state, states[end]) for end, state in tail_states.items())


@pytest.mark.parametrize("block_size_tokens", [64, 96])
def test_a_checkpoint_is_the_live_state_at_its_boundary_and_is_what_a_hit_reads(tiny, monkeypatch, block_size_tokens):
    from megatron.core.ssm import mamba_mixer as upstream

    engine = build_engine(
        tiny, HybridPrefixConfig(mamba_gb=0.002), max_sequence_length=1024, block_size_tokens=block_size_tokens
    )
    context, scan = engine.context, upstream.mamba_chunk_scan_combined_varlen
    read: list[torch.Tensor] = []

    def recording(**fields):
        read.append(fields["initial_states"][0].clone())
        return scan(**fields)

    monkeypatch.setattr(upstream, "mamba_chunk_scan_combined_varlen", recording)
    prompt = random_tokens(3 * block_size_tokens, seed=1)
    finished: dict = {}
    engine.add_request(0, prompt, greedy(2))
    run_to_end(engine, finished, steps=1)  # the prefill, whose last token ends a block
    live = int(context.mamba_metadata.request_to_mamba_state_idx[0])
    tail = max([node for node in context.prefix_cache.nodes() if node.slot >= 0], key=lambda n: n.depth_blocks)
    state = context.shared_memory.state
    assert tail.depth_blocks == 3
    now = state(context.states.live.slot(live))
    kept = {name: tensor.clone() for name, tensor in state(tail.slot).items()}
    assert all(torch.equal(now[name], kept[name]) for name in kept)
    run_to_end(engine, finished)

    read.clear()
    engine.add_request(1, prompt + random_tokens(5, seed=2), greedy(2))
    run_to_end(engine, finished)
    assert finished[1].num_cached_tokens == len(prompt)
    assert len(read) == tiny.hybrid_config.layer_pattern.count("M")
    assert all(torch.equal(read[layer], ssm) for layer, ssm in enumerate(kept["ssm"]))
    for name, tensor in state(tail.slot).items():  # reading it, and computing on, did not change it
        assert torch.equal(tensor, kept[name])
