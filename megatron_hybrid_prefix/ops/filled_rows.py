"""Memory for what is computed of packed sequences, in which only the padding of a step is written."""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import runs_kernel, tl, triton

_ROWS, _BLOCK = 16, 1024  # of a program


def empty_up_to(end: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Rows that are zero from ``end`` on. The others are undefined: the caller fills them.

    Args:
        end: (1,) integer on the device of ``like``.
        like: (rows, ...); gives shape, type and device.

    Returns:
        The shape and type of ``like``, contiguous.
    """
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if not runs_kernel(out):
        out[int(end) :] = 0
    elif len(out):
        _zero_after_kernel[(triton.cdiv(len(out), _ROWS),)](
            out, end, len(out), out[0].numel(), ROWS=_ROWS, BLOCK=_BLOCK
        )
    return out


if triton is not None:

    @triton.jit
    def _zero_after_kernel(
        out_ptr: tl.tensor,  # (rows, width)
        end_ptr: tl.tensor,  # (1,)
        rows: tl.tensor,
        width: tl.tensor,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        """One program: ROWS rows, as a rule none of them padding."""
        first = tl.maximum(tl.program_id(0) * ROWS, tl.load(end_ptr).to(tl.int32))
        last = tl.minimum((tl.program_id(0) + 1) * ROWS, rows)
        of_row = out_ptr + first.to(tl.int64) * width
        for _ in range(first, last):
            for start in range(0, width, BLOCK):
                column = start + tl.arange(0, BLOCK)
                tl.store(of_row + column, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=column < width)
            of_row += width
