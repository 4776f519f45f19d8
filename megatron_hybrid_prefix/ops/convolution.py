"""The causal convolution of a prefill, from windows in slots.

Megatron's kernel wants its inputs contiguous. Those of a Gated DeltaNet layer are a part of a wider projection; this one reads
them where they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix.ops.triton_or_torch import runs_kernel, tl, triton

_TOKENS, _CHANNELS = 8, 256  # of a program


def convolve_from_slots(
    inputs: torch.Tensor,
    windows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    sources: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """Depthwise causal convolution and SiLU of packed sequences, each after the inputs in its slot's window.

    Computes in float32 from inputs in the windows' type, and rounds to that type.

    Args:
        inputs: (tokens, dim), floating; rows may be strided.
        windows: (slots, dim, taps), the pool of one layer, newest input last; strided over slots, contiguous inside a slot.
        weight: (dim, taps) in the windows' type, contiguous; the last column meets the token itself.
        bias: (dim,), or None.
        sources: (tokens,) integer, the slot of the window before each token's sequence.
        starts: (tokens,) integer, the row where each token's sequence starts.

    Returns:
        (tokens, dim) in the inputs' type, contiguous.
    """
    if inputs.dtype == torch.float64 or not runs_kernel(inputs):
        return _reference(inputs, windows, weight, bias, sources, starts)
    tokens, dim = inputs.shape
    assert windows[0].is_contiguous() and weight.is_contiguous()
    if inputs.stride(1) != 1:
        inputs = inputs.contiguous()
    out = torch.empty((tokens, dim), dtype=inputs.dtype, device=inputs.device)
    if tokens:
        _convolve_kernel[(triton.cdiv(dim, _CHANNELS), triton.cdiv(tokens, _TOKENS))](
            inputs,
            windows,
            weight,
            weight if bias is None else bias,
            sources,
            starts,
            out,
            inputs.stride(0),
            windows.stride(0),
            tokens,
            dim,
            TAPS=windows.shape[2],
            BIAS=bias is not None,
            TOKENS=_TOKENS,
            CHANNELS=_CHANNELS,
        )
    return out


def _reference(
    inputs: torch.Tensor,
    windows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sources: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """The same in plain PyTorch. Adds the taps from the oldest on, as a decode does: the bits are the same."""
    taps = windows.shape[2]
    wide = torch.promote_types(windows.dtype, torch.float32)
    x = inputs.to(windows.dtype).to(wide)
    rows = torch.arange(len(x), device=x.device)
    total = x.new_zeros(x.shape) if bias is None else bias.to(windows.dtype).to(wide).expand_as(x)
    for tap in range(taps):
        at = rows - (taps - 1) + tap
        values = x[at.clamp(min=0)]
        before = torch.nonzero(at < starts).squeeze(1)
        columns = (taps + at - starts)[before]
        values[before] = windows[sources[before].long(), :, columns.long()].to(wide)
        total = total + values * weight[:, tap].to(wide)
    return F.silu(total).to(windows.dtype).to(inputs.dtype)


if triton is not None:

    @triton.jit
    def _convolve_kernel(
        inputs_ptr: tl.tensor,  # (tokens, dim), strided over tokens
        windows_ptr: tl.tensor,  # (slots, dim, TAPS), strided over slots
        weight_ptr: tl.tensor,  # (dim, TAPS)
        bias_ptr: tl.tensor,  # (dim,); unused without BIAS
        sources_ptr: tl.tensor,  # (tokens,)
        starts_ptr: tl.tensor,  # (tokens,)
        out_ptr: tl.tensor,  # (tokens, dim), contiguous
        stride_inputs: tl.int64,
        stride_slot: tl.int64,
        tokens: tl.tensor,
        dim: tl.tensor,
        TAPS: tl.constexpr,
        BIAS: tl.constexpr,
        TOKENS: tl.constexpr,
        CHANNELS: tl.constexpr,
    ) -> None:
        """One program: CHANNELS channels of TOKENS tokens."""
        channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
        filled, inside = token < tokens, channel < dim
        mask = filled[:, None] & inside[None, :]
        kept = windows_ptr.dtype.element_ty
        start = tl.load(starts_ptr + token, mask=filled, other=0)
        source = tl.load(sources_ptr + token, mask=filled, other=0).to(tl.int64)
        # Few programs hold a token whose taps reach back to before its sequence.
        reaches_back = tl.max(tl.where(filled & (token - start < TAPS - 1), 1, 0), 0) > 0
        total = tl.zeros([TOKENS, CHANNELS], dtype=tl.float32)
        if BIAS:
            bias = tl.load(bias_ptr + channel, mask=inside, other=0.0)
            total += bias.to(kept).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            row = token - (TAPS - 1) + tap
            own = row >= start
            value = tl.load(
                inputs_ptr + row.to(tl.int64)[:, None] * stride_inputs + channel[None, :],
                mask=mask & own[:, None],
                other=0.0,
            )
            value = value.to(kept).to(tl.float32)
            if reaches_back:
                column = TAPS + row - start
                value += tl.load(
                    windows_ptr + (source * stride_slot + column)[:, None] + (channel * TAPS)[None, :],
                    mask=mask & (~own)[:, None],
                    other=0.0,
                ).to(tl.float32)
            weight = tl.load(weight_ptr + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            total += value * weight[None, :]
        result = (total / (1.0 + tl.exp(-total))).to(kept).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token.to(tl.int64)[:, None] * dim + channel[None, :], result, mask=mask)
