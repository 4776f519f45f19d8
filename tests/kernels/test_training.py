"""Forwards of a Mamba2 mixer without a state: against the recurrence, its gradients, and what it refuses."""

import pytest
import torch

from megatron_hybrid_prefix.platform.kernels import training
from megatron_hybrid_prefix.platform.kernels.training import (
    chunked_scan,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)
from tests.kernels import naive

HEADS, DIM, GROUPS, STATE, TAPS = 4, 3, 2, 5, 4
WIDTH = HEADS * DIM
CHANNELS = WIDTH + 2 * GROUPS * STATE


def draw(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def scan_arguments(tokens, batch=2):
    """dt is small: a state outlives several chunks."""
    x, dt, A, B, C = draw(
        tokens,
        (batch, tokens, HEADS, DIM),
        (batch, tokens, HEADS),
        (HEADS,),
        (batch, tokens, GROUPS, STATE),
        (batch, tokens, GROUPS, STATE),
    )
    return x, 0.1 * dt.exp(), -A.exp(), B, C


def mixer_arguments(tokens, batch=2):
    zxbcdt, weight, bias, dt_bias, A, D = draw(
        tokens, (batch, tokens, WIDTH + CHANNELS + HEADS), (CHANNELS, TAPS), (CHANNELS,), (HEADS,), (HEADS,), (HEADS,)
    )
    return zxbcdt, weight, bias, dt_bias, -A.exp(), D


def mixer(*arguments, chunk_size=8):
    return mamba_split_conv1d_scan_combined(
        *arguments, chunk_size, headdim=DIM, ngroups=GROUPS, norm_before_gate=False, activation="silu", seq_idx=None
    )


def loops(zxbcdt, weight, bias, dt_bias, A, D):
    """The same, token by token."""
    rows = []
    for z, xbc, dt in zip(*zxbcdt.split([WIDTH, CHANNELS, HEADS], dim=-1), strict=True):
        convolved = naive.conv_sequence(xbc, weight, bias, torch.zeros(CHANNELS, TAPS - 1, dtype=torch.float64))
        x, B, C = convolved.split([WIDTH, GROUPS * STATE, GROUPS * STATE], dim=-1)
        sizes = [[naive.softplus(float(dt[t, h] + dt_bias[h])) for h in range(HEADS)] for t in range(len(dt))]
        y, _ = naive.mamba_sequence(
            x.reshape(-1, HEADS, DIM),
            torch.tensor(sizes, dtype=torch.float64),
            A,
            B.reshape(-1, GROUPS, STATE),
            C.reshape(-1, GROUPS, STATE),
            torch.zeros(HEADS, DIM, STATE, dtype=torch.float64),
            D=D[:, None].expand(HEADS, DIM),
            z=z.reshape(-1, HEADS, DIM),
        )
        rows.append(y.flatten(1))
    return torch.stack(rows)


@pytest.mark.parametrize("gated", [False, True])
def test_the_scan_of_layers_that_draft_is_the_recurrence(gated):
    x, dt, A, B, C = scan_arguments(9)
    dt_bias, D, z = draw(1, (HEADS,), (HEADS, DIM), x.shape)
    found = mamba_chunk_scan_combined(x, dt, A, B, C, 8, D=D, dt_bias=dt_bias, z=z if gated else None)
    for i in range(len(x)):
        sizes = [[naive.softplus(float(dt[i, t, h] + dt_bias[h])) for h in range(HEADS)] for t in range(9)]
        start = torch.zeros(HEADS, DIM, STATE, dtype=torch.float64)
        sizes = torch.tensor(sizes, dtype=torch.float64)
        right, _ = naive.mamba_sequence(x[i], sizes, A, B[i], C[i], start, D=D, z=z[i] if gated else None)
        torch.testing.assert_close(found[i], right, rtol=1e-12, atol=1e-12)


def test_bfloat16_is_computed_in_float32():
    """Models in bfloat16 run both without autocast: what comes in and goes out is rounded, and the output of the convolution."""
    arguments = [part.bfloat16() for part in mixer_arguments(20)]
    found, right = mixer(*arguments), mixer(*(part.double() for part in arguments))
    torch.testing.assert_close(found, right.bfloat16(), rtol=0.03, atol=0.03)
    arguments = [part.bfloat16() for part in (*scan_arguments(20), *draw(1, (HEADS,), (HEADS,)))]
    found, right = (
        mamba_chunk_scan_combined(x, dt, A, B, C, 8, D=D, dt_bias=dt_bias)
        for x, dt, A, B, C, D, dt_bias in (arguments, [part.double() for part in arguments])
    )
    torch.testing.assert_close(found, right.bfloat16(), rtol=0.01, atol=1e-4)


def test_a_lost_state_between_chunks_is_seen(monkeypatch):
    """A mutant: nothing is carried from chunk to chunk. One chunk does not show it, two do."""
    lower = training._lower
    monkeypatch.setattr(training, "_lower", lambda decay, diagonal: lower(decay, diagonal) * (diagonal == 0))
    for tokens, equal in ((8, True), (9, False)):
        arguments = mixer_arguments(tokens)
        assert torch.allclose(mixer(*arguments), loops(*arguments), rtol=1e-10) == equal


@pytest.mark.parametrize("tokens", [3, 21])
def test_mixer_is_loops_over_tokens(tokens):
    arguments = mixer_arguments(tokens)
    torch.testing.assert_close(mixer(*arguments), loops(*arguments), rtol=1e-11, atol=1e-11)


def test_gradients():
    assert torch.autograd.gradcheck(
        lambda *arguments: mixer(*arguments, chunk_size=4),
        [part.requires_grad_() for part in mixer_arguments(6, batch=1)],
        fast_mode=True,
    )


def test_gradients_are_finite_where_a_state_is_forgotten_at_once():
    x, dt, A, B, C = (part.float().requires_grad_() for part in scan_arguments(20))
    chunked_scan(x, dt * 1e4, A, B, C, 8).sum().backward()
    assert all(bool(part.grad.isfinite().all()) for part in (x, dt, A, B, C))


def test_what_it_cannot_do():
    arguments = mixer_arguments(3)
    with pytest.raises(ValueError, match="packed sequences"):
        mamba_split_conv1d_scan_combined(*arguments, 8, seq_idx=torch.zeros(1, 3), headdim=DIM, ngroups=GROUPS)
    with pytest.raises(ValueError, match="norm_before_gate=True"):
        mamba_split_conv1d_scan_combined(*arguments, 8, headdim=DIM, ngroups=GROUPS)
