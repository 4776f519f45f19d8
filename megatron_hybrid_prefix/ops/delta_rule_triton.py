"""Triton kernels of the gated delta rule (``delta_rule.py`` has the mathematics, the wrappers and the reference).

A prefill runs five kernels, all of them over every chunk of the step:

1. `_normalise_kernel` scales queries and keys, once for each key head.
2. `_solve_kernel` inverts the triangular system of each chunk.
3. `_write_kernel` computes what the tokens of a chunk write if the state before it is zero, and how it depends on that state.
4. `_pass_kernel` passes the states along the chunks of a sequence. It starts from any slot and writes planned states to
   their slots.
5. `_output_kernel` computes the outputs.

Only the fourth one runs chunk after chunk. It keeps the state in float32 from the source slot to the last chunk; products
take operands of the inputs' type, and accumulate in float32.

Chunks are cut at the multiples of 64: all chunks of a sequence but the first and the last hold 64 tokens. A chunk's
arithmetic depends on its tokens and the state before it alone, not on its place in the step: a request that resumes at
the end of a chunk computes the same bits as one that does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_hybrid_prefix.ops.triton_or_torch import tl, triton

CHUNK = 64
"""Tokens of a chunk: the chunk quantum of this family of layers."""
PART = 16
"""Rows of the diagonal blocks that are inverted by substitution."""

_COLUMNS = 32  # of a state, that a program passes on or updates: the fastest tried on an H200 with heads of 128 x 128


class Launch(NamedTuple):
    """What the kernels of a prefill are compiled with, each as keyword arguments."""

    normalise: dict[str, Any]
    solve: dict[str, Any]
    write: dict[str, Any]
    pass_on: dict[str, Any]
    output: dict[str, Any]


def check_heads(dtype: torch.dtype, key_size: int, value_size: int) -> None:
    """Checks that the kernels of a prefill support inputs of this type and heads of these sizes.

    Raises:
        ValueError: Keys are too long for the memory of a multiprocessor. Or the type has 16 bits, and a size is no multiple
            of 16: on an H200, with Triton 3.6, outputs of heads of 16 key and 40 value channels were wrong in bfloat16.
    """
    if triton.next_power_of_2(key_size) * dtype.itemsize > 1024:
        raise ValueError(f"heads of {key_size} key channels in {dtype}: at most {1024 // dtype.itemsize} are supported")
    if dtype.itemsize == 2 and (key_size % 16 or value_size % 16):
        raise ValueError(f"heads of {key_size} key and {value_size} value channels in {dtype}: use multiples of 16")


def launch_options(dtype: torch.dtype, key_size: int, value_size: int, *, normalise: bool) -> Launch:
    """Tiles, warps and pipeline stages for inputs of this type and heads of these sizes, which `check_heads` accepts."""
    block_k, block_v = (max(16, triton.next_power_of_2(size)) for size in (key_size, value_size))
    row_bytes = block_k * dtype.itemsize
    narrow = min(_COLUMNS, block_v)
    shared = {"BLOCK_K": block_k, "CHUNK": CHUNK}
    if dtype == torch.float32:
        # No tensor cores. The compiler unrolls these products: smaller tiles, on more threads, keep that short.
        dot, solve_warps, tile_warps, output_v = {"PRECISION": "ieee"}, 4, 8, narrow
    else:
        dot, solve_warps, tile_warps, output_v = {"PRECISION": "tf32"}, 1, 4, block_v
    stages = 3 if row_bytes <= 256 else 2 if row_bytes <= 512 else 1  # operands of a stage lie in shared memory
    return Launch(
        normalise={"NORMALISE": normalise, "ROWS": PART, "BLOCK": block_k},
        solve=shared | dot | {"PART": PART, "num_warps": solve_warps},
        write=shared | dot | {"BLOCK_V": block_v, "num_warps": tile_warps},
        pass_on=shared | dot | {"BLOCK_V": narrow, "num_warps": 4, "num_stages": stages},
        output=shared | dot | {"BLOCK_V": output_v, "num_warps": tile_warps},
    )


def scan_by_kernels(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    *,
    normalise: bool,
    epsilon: float,
    chunk_bounds: torch.Tensor,
    first_chunks: torch.Tensor,
    source_slots: torch.Tensor,
    live_slots: torch.Tensor,
    chunk_slots: torch.Tensor,
) -> torch.Tensor:
    """`scan_delta_rule` on a GPU; ``epsilon`` is added to a squared norm.

    All chunks of a sequence but the first and the last must hold `CHUNK` tokens; the first and the last at most so many.
    Temporary memory: a state per chunk in the type of ``v`` (for 16,384 tokens and 64 heads of 128 x 128 in bfloat16, 0.5 GiB),
    and five tensors about as large as ``v``.
    """
    tokens, heads, value_size = v.shape
    key_heads, key_size = q.shape[1:]
    chunks = chunk_slots.shape[0]
    outputs = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    q, k, v = (contiguous_from(tensor, 1) for tensor in (q, k, v))
    log_decay, beta = log_decay.contiguous(), beta.contiguous()
    assert states[0].is_contiguous()
    check_heads(v.dtype, key_size, value_size)
    options = launch_options(v.dtype, key_size, value_size, normalise=normalise)
    unit_q, unit_k = (torch.empty(tensor.shape, dtype=v.dtype, device=v.device) for tensor in (q, k))
    _normalise_kernel[(triton.cdiv(tokens, PART), key_heads)](
        q,
        k,
        unit_q,
        unit_k,
        q.stride(0),
        k.stride(0),
        tokens,
        key_heads,
        key_size,
        key_size**-0.5,
        epsilon,
        **options.normalise,
    )
    inverse = torch.empty(chunks, heads, CHUNK, CHUNK, dtype=v.dtype, device=v.device)
    cumulative = torch.empty(tokens, heads, dtype=torch.float32, device=v.device)
    totals = torch.empty(chunks, heads, dtype=torch.float32, device=v.device)
    _solve_kernel[(chunks, heads)](
        unit_k,
        log_decay,
        beta,
        inverse,
        cumulative,
        totals,
        chunk_bounds,
        heads,
        key_heads,
        key_size,
        **options.solve,
    )
    values = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    against = torch.empty(tokens, heads, key_size, dtype=v.dtype, device=v.device)
    _write_kernel[(chunks, heads)](
        unit_k,
        v,
        beta,
        cumulative,
        inverse,
        values,
        against,
        chunk_bounds,
        v.stride(0),
        heads,
        key_heads,
        key_size,
        value_size,
        **options.write,
    )
    before = torch.empty(chunks, heads, key_size, value_size, dtype=v.dtype, device=v.device)
    # Not autotuned: a kernel that writes slots in place must not be run more often than asked for.
    _pass_kernel[(triton.cdiv(value_size, options.pass_on["BLOCK_V"]), heads, source_slots.shape[0])](
        unit_k,
        values,
        against,
        cumulative,
        totals,
        states,
        before,
        chunk_bounds,
        first_chunks,
        source_slots,
        live_slots,
        chunk_slots,
        states.stride(0),
        heads,
        key_heads,
        key_size,
        value_size,
        **options.pass_on,
    )
    _output_kernel[(triton.cdiv(value_size, options.output["BLOCK_V"]), chunks, heads)](
        unit_q,
        unit_k,
        values,
        cumulative,
        before,
        outputs,
        chunk_bounds,
        heads,
        key_heads,
        key_size,
        value_size,
        **options.output,
    )
    return outputs


def update_by_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    *,
    normalise: bool,
    epsilon: float,
    after: torch.Tensor | None,
) -> torch.Tensor:
    """`update_delta_rule` on a GPU; ``epsilon`` is added to a squared norm."""
    rows, tokens, heads, value_size = v.shape
    key_heads, key_size = q.shape[2:]
    outputs = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not rows:
        return outputs
    q, k, v = (contiguous_from(tensor, 2) for tensor in (q, k, v))
    assert states[0].is_contiguous() and (after is None or after[0, 0].is_contiguous())
    block_v = min(_COLUMNS, triton.next_power_of_2(value_size))
    _update_kernel[(triton.cdiv(value_size, block_v), heads, rows)](
        q,
        k,
        v,
        log_decay.contiguous(),
        beta.contiguous(),
        states,
        slots,
        states if after is None else after,
        outputs,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        states.stride(0),
        *((0, 0) if after is None else after.stride()[:2]),
        tokens,
        heads,
        key_heads,
        key_size,
        value_size,
        key_size**-0.5,
        epsilon,
        NORMALISE=normalise,
        AFTER=after is not None,
        BLOCK_K=triton.next_power_of_2(key_size),
        BLOCK_V=block_v,
    )
    return outputs


def contiguous_from(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """``tensor``, or a copy, whose dimensions from ``dim`` on lie without gaps; those before may be strided."""
    sizes, strides = tensor.shape[dim:], tensor.stride()[dim:]
    dense = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != dense:
            return tensor.contiguous()
        dense *= size
    return tensor


if triton is not None:

    @triton.jit
    def _normalise_kernel(
        q_ptr: tl.tensor,  # (tokens, heads, K), strided over tokens
        k_ptr: tl.tensor,
        q_out_ptr: tl.tensor,  # (tokens, heads, K), contiguous
        k_out_ptr: tl.tensor,
        stride_q: tl.int64,
        stride_k: tl.int64,
        tokens: tl.tensor,
        heads: tl.tensor,
        size: tl.tensor,
        scale: tl.tensor,
        epsilon: tl.tensor,
        NORMALISE: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        """One program: the queries and keys of ROWS tokens in one head."""
        head = tl.program_id(1)
        rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        columns = tl.arange(0, BLOCK)[None, :]
        mask = (rows < tokens) & (columns < size)
        in_head = head * size + columns
        q = tl.load(q_ptr + rows * stride_q + in_head, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + rows * stride_k + in_head, mask=mask, other=0.0).to(tl.float32)
        if NORMALISE:
            q = q / tl.sqrt(tl.sum(q * q, 1) + epsilon)[:, None]
            k = k / tl.sqrt(tl.sum(k * k, 1) + epsilon)[:, None]
        out = rows * heads * size + in_head
        tl.store(q_out_ptr + out, (q * scale).to(q_out_ptr.dtype.element_ty), mask=mask)
        tl.store(k_out_ptr + out, k.to(k_out_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _below(
        key_ptr: tl.tensor,
        rows_a: tl.tensor,
        rows_b: tl.tensor,
        count: tl.tensor,
        stride: tl.tensor,
        size: tl.tensor,
        BLOCK_K: tl.constexpr,
        PRECISION: tl.constexpr,
    ) -> tl.tensor:
        """(rows_a, rows_b) float32: products of keys."""
        offsets = tl.arange(0, BLOCK_K)
        a = tl.load(
            key_ptr + rows_a[:, None] * stride + offsets[None, :],
            mask=(rows_a < count)[:, None] & (offsets < size)[None, :],
            other=0.0,
        )
        b = tl.load(
            key_ptr + rows_b[None, :] * stride + offsets[:, None],
            mask=(rows_b < count)[None, :] & (offsets < size)[:, None],
            other=0.0,
        )
        return tl.dot(a, b, input_precision=PRECISION)

    @triton.jit
    def _decayed(g_a: tl.tensor, g_b: tl.tensor) -> tl.tensor:
        """(a, b): exp of g_a - g_b; 1 where that would be positive, which the caller masks."""
        return tl.exp(tl.minimum(g_a[:, None] - g_b[None, :], 0.0))

    @triton.jit
    def _since(g: tl.tensor) -> tl.tensor:
        """(j, i): exp of g_i - g_j; 1 where that would be positive, which the caller masks."""
        return tl.exp(tl.minimum(g[None, :] - g[:, None], 0.0))

    @triton.jit
    def _solve_kernel(
        k_ptr: tl.tensor,  # (tokens, key heads, K), contiguous
        log_decay_ptr: tl.tensor,  # (tokens, heads) float32, contiguous
        beta_ptr: tl.tensor,  # (tokens, heads), contiguous
        inverse_ptr: tl.tensor,  # (chunks, heads, CHUNK, CHUNK)
        cumulative_ptr: tl.tensor,  # (tokens, heads) float32: log_decay summed from the start of the chunk
        totals_ptr: tl.tensor,  # (chunks, heads) float32: log_decay summed over the chunk
        bounds_ptr: tl.tensor,
        heads: tl.tensor,
        key_heads: tl.tensor,
        size: tl.tensor,
        BLOCK_K: tl.constexpr,
        CHUNK: tl.constexpr,
        PART: tl.constexpr,
        PRECISION: tl.constexpr,
    ) -> None:
        """One program: one head of one chunk. Inverts I + A, where A[i, j] = beta_i exp(g_i - g_j) k_i k_j for j < i.

        The four diagonal blocks are inverted by substitution, those below follow from products of blocks.
        """
        chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        start, end = tl.load(bounds_ptr + chunk).to(tl.int64), tl.load(bounds_ptr + chunk + 1).to(tl.int64)
        if start == end:
            return
        count = (end - start).to(tl.int32)
        gates, betas = log_decay_ptr + start * heads + head, beta_ptr + start * heads + head
        every = tl.arange(0, CHUNK)
        g_all = tl.load(gates + every * heads, mask=every < count, other=0.0)
        tl.store(cumulative_ptr + start * heads + head + every * heads, tl.cumsum(g_all, 0), mask=every < count)
        tl.store(totals_ptr + chunk * heads + head, tl.sum(g_all, 0))

        part = tl.arange(0, PART)
        r0, r1, r2, r3 = part, PART + part, 2 * PART + part, 3 * PART + part
        l0 = tl.load(gates + r0 * heads, mask=r0 < count, other=0.0)
        l1 = tl.load(gates + r1 * heads, mask=r1 < count, other=0.0)
        l2 = tl.load(gates + r2 * heads, mask=r2 < count, other=0.0)
        l3 = tl.load(gates + r3 * heads, mask=r3 < count, other=0.0)
        g0 = tl.cumsum(l0, 0)
        g1 = tl.cumsum(l1, 0) + tl.sum(l0, 0)
        g2 = tl.cumsum(l2, 0) + tl.sum(l0, 0) + tl.sum(l1, 0)
        g3 = tl.cumsum(l3, 0) + tl.sum(l0, 0) + tl.sum(l1, 0) + tl.sum(l2, 0)
        b0 = tl.load(betas + r0 * heads, mask=r0 < count, other=0.0).to(tl.float32)
        b1 = tl.load(betas + r1 * heads, mask=r1 < count, other=0.0).to(tl.float32)
        b2 = tl.load(betas + r2 * heads, mask=r2 < count, other=0.0).to(tl.float32)
        b3 = tl.load(betas + r3 * heads, mask=r3 < count, other=0.0).to(tl.float32)

        stride = key_heads * size
        keys = k_ptr + start * stride + (head // (heads // key_heads)) * size
        # The diagonal blocks are transposed: their columns, which substitution needs, are then sums over rows.
        earlier = part[:, None] < part[None, :]
        d0 = tl.where(
            earlier, b0[None, :] * _since(g0) * _below(keys, r0, r0, count, stride, size, BLOCK_K, PRECISION), 0.0
        )
        d1 = tl.where(
            earlier, b1[None, :] * _since(g1) * _below(keys, r1, r1, count, stride, size, BLOCK_K, PRECISION), 0.0
        )
        d2 = tl.where(
            earlier, b2[None, :] * _since(g2) * _below(keys, r2, r2, count, stride, size, BLOCK_K, PRECISION), 0.0
        )
        d3 = tl.where(
            earlier, b3[None, :] * _since(g3) * _below(keys, r3, r3, count, stride, size, BLOCK_K, PRECISION), 0.0
        )
        a10 = b1[:, None] * _decayed(g1, g0) * _below(keys, r1, r0, count, stride, size, BLOCK_K, PRECISION)
        a20 = b2[:, None] * _decayed(g2, g0) * _below(keys, r2, r0, count, stride, size, BLOCK_K, PRECISION)
        a21 = b2[:, None] * _decayed(g2, g1) * _below(keys, r2, r1, count, stride, size, BLOCK_K, PRECISION)
        a30 = b3[:, None] * _decayed(g3, g0) * _below(keys, r3, r0, count, stride, size, BLOCK_K, PRECISION)
        a31 = b3[:, None] * _decayed(g3, g1) * _below(keys, r3, r1, count, stride, size, BLOCK_K, PRECISION)
        a32 = b3[:, None] * _decayed(g3, g2) * _below(keys, r3, r2, count, stride, size, BLOCK_K, PRECISION)

        # Row i of an inverse is e_i - sum over j < i of A[i, j] times row j.
        t0 = tl.where(part[:, None] == part[None, :], 1.0, 0.0)
        t1 = t0
        t2 = t0
        t3 = t0
        for i in range(1, PART):
            row, column = (part == i)[:, None], (part == i)[None, :]
            t0 -= tl.where(row, tl.sum(tl.sum(tl.where(column, d0, 0.0), 1)[:, None] * t0, 0)[None, :], 0.0)
            t1 -= tl.where(row, tl.sum(tl.sum(tl.where(column, d1, 0.0), 1)[:, None] * t1, 0)[None, :], 0.0)
            t2 -= tl.where(row, tl.sum(tl.sum(tl.where(column, d2, 0.0), 1)[:, None] * t2, 0)[None, :], 0.0)
            t3 -= tl.where(row, tl.sum(tl.sum(tl.where(column, d3, 0.0), 1)[:, None] * t3, 0)[None, :], 0.0)
        t10 = -tl.dot(t1, tl.dot(a10, t0, input_precision="ieee"), input_precision="ieee")
        t21 = -tl.dot(t2, tl.dot(a21, t1, input_precision="ieee"), input_precision="ieee")
        t32 = -tl.dot(t3, tl.dot(a32, t2, input_precision="ieee"), input_precision="ieee")
        t20 = tl.dot(a20, t0, input_precision="ieee") + tl.dot(a21, t10, input_precision="ieee")
        t20 = -tl.dot(t2, t20, input_precision="ieee")
        t31 = tl.dot(a31, t1, input_precision="ieee") + tl.dot(a32, t21, input_precision="ieee")
        t31 = -tl.dot(t3, t31, input_precision="ieee")
        t30 = tl.dot(a30, t0, input_precision="ieee") + tl.dot(a31, t10, input_precision="ieee")
        t30 += tl.dot(a32, t20, input_precision="ieee")
        t30 = -tl.dot(t3, t30, input_precision="ieee")

        dtype = inverse_ptr.dtype.element_ty
        out = inverse_ptr + (chunk * heads + head) * CHUNK * CHUNK + part[:, None] * CHUNK + part[None, :]
        zero = tl.zeros([PART, PART], dtype=dtype)
        tl.store(out, t0.to(dtype))
        tl.store(out + PART, zero)
        tl.store(out + 2 * PART, zero)
        tl.store(out + 3 * PART, zero)
        tl.store(out + PART * CHUNK, t10.to(dtype))
        tl.store(out + PART * CHUNK + PART, t1.to(dtype))
        tl.store(out + PART * CHUNK + 2 * PART, zero)
        tl.store(out + PART * CHUNK + 3 * PART, zero)
        tl.store(out + 2 * PART * CHUNK, t20.to(dtype))
        tl.store(out + 2 * PART * CHUNK + PART, t21.to(dtype))
        tl.store(out + 2 * PART * CHUNK + 2 * PART, t2.to(dtype))
        tl.store(out + 2 * PART * CHUNK + 3 * PART, zero)
        tl.store(out + 3 * PART * CHUNK, t30.to(dtype))
        tl.store(out + 3 * PART * CHUNK + PART, t31.to(dtype))
        tl.store(out + 3 * PART * CHUNK + 2 * PART, t32.to(dtype))
        tl.store(out + 3 * PART * CHUNK + 3 * PART, t3.to(dtype))

    @triton.jit
    def _write_kernel(
        k_ptr: tl.tensor,  # (tokens, key heads, K), contiguous
        v_ptr: tl.tensor,  # (tokens, heads, V), strided over tokens
        beta_ptr: tl.tensor,  # (tokens, heads), contiguous
        cumulative_ptr: tl.tensor,  # (tokens, heads) float32
        inverse_ptr: tl.tensor,  # (chunks, heads, CHUNK, CHUNK)
        values_ptr: tl.tensor,  # (tokens, heads, V), contiguous: what is written if the state before the chunk is zero
        against_ptr: tl.tensor,  # (tokens, heads, K), contiguous: its product with that state is subtracted
        bounds_ptr: tl.tensor,
        stride_v: tl.int64,
        heads: tl.tensor,
        key_heads: tl.tensor,
        key_size: tl.tensor,
        value_size: tl.tensor,
        BLOCK_K: tl.constexpr,
        BLOCK_V: tl.constexpr,
        CHUNK: tl.constexpr,
        PRECISION: tl.constexpr,
    ) -> None:
        """One program: one head of one chunk."""
        chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        start, end = tl.load(bounds_ptr + chunk).to(tl.int64), tl.load(bounds_ptr + chunk + 1).to(tl.int64)
        if start == end:
            return
        inside = tl.arange(0, CHUNK)
        filled = inside < (end - start).to(tl.int32)
        of_inverse = inverse_ptr + (chunk * heads + head) * CHUNK * CHUNK
        inverse = tl.load(of_inverse + inside[:, None] * CHUNK + inside[None, :])
        first = start * heads + head
        beta = tl.load(beta_ptr + first + inside * heads, mask=filled, other=0.0).to(tl.float32)
        g = tl.load(cumulative_ptr + first + inside * heads, mask=filled, other=0.0)

        columns = tl.arange(0, BLOCK_V)
        mask = filled[:, None] & (columns < value_size)[None, :]
        of_v = v_ptr + start * stride_v + head * value_size
        v = tl.load(of_v + inside[:, None] * stride_v + columns[None, :], mask=mask, other=0.0)
        v = (v.to(tl.float32) * beta[:, None]).to(inverse.dtype)
        values = tl.dot(inverse, v, input_precision=PRECISION)
        out = values_ptr + first * value_size + inside[:, None] * (heads * value_size) + columns[None, :]
        tl.store(out, values.to(values_ptr.dtype.element_ty), mask=mask)

        columns = tl.arange(0, BLOCK_K)
        mask = filled[:, None] & (columns < key_size)[None, :]
        of_k = k_ptr + (start * key_heads + head // (heads // key_heads)) * key_size
        k = tl.load(of_k + inside[:, None] * (key_heads * key_size) + columns[None, :], mask=mask, other=0.0)
        k = (k.to(tl.float32) * (beta * tl.exp(g))[:, None]).to(inverse.dtype)
        against = tl.dot(inverse, k, input_precision=PRECISION)
        out = against_ptr + first * key_size + inside[:, None] * (heads * key_size) + columns[None, :]
        tl.store(out, against.to(against_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _pass_kernel(
        k_ptr: tl.tensor,  # (tokens, key heads, K), contiguous
        values_ptr: tl.tensor,  # (tokens, heads, V), contiguous; becomes what the tokens write
        against_ptr: tl.tensor,  # (tokens, heads, K), contiguous
        cumulative_ptr: tl.tensor,  # (tokens, heads) float32
        totals_ptr: tl.tensor,  # (chunks, heads) float32; of empty chunks undefined
        states_ptr: tl.tensor,  # (slots, heads, K, V), strided over slots
        before_ptr: tl.tensor,  # (chunks, heads, K, V): the state before each chunk
        bounds_ptr: tl.tensor,
        first_chunks_ptr: tl.tensor,
        source_slots_ptr: tl.tensor,
        live_slots_ptr: tl.tensor,
        chunk_slots_ptr: tl.tensor,
        stride_slot: tl.int64,
        heads: tl.tensor,
        key_heads: tl.tensor,
        key_size: tl.tensor,
        value_size: tl.tensor,
        BLOCK_K: tl.constexpr,
        BLOCK_V: tl.constexpr,
        CHUNK: tl.constexpr,
        PRECISION: tl.constexpr,
    ) -> None:
        """One program: BLOCK_V columns of one head's state, along all chunks of one sequence."""
        column, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        in_k, in_v = tl.arange(0, BLOCK_K), column * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = tl.arange(0, CHUNK)
        k_mask, v_mask = in_k < key_size, in_v < value_size
        dtype = before_ptr.dtype.element_ty
        kept_dtype = states_ptr.dtype.element_ty
        # Where a program reads and writes, counted from the start of a chunk or a state: the same for all chunks.
        mask = k_mask[:, None] & v_mask[None, :]
        in_state = in_k[:, None] * value_size + in_v[None, :]
        in_against = inside[:, None] * (heads * key_size) + in_k[None, :]
        in_values = inside[:, None] * (heads * value_size) + in_v[None, :]
        in_keys = inside[None, :] * (key_heads * key_size) + in_k[:, None]
        of_head = states_ptr + head.to(tl.int64) * key_size * value_size
        key_head = head // (heads // key_heads)

        first, last = tl.load(first_chunks_ptr + sequence), tl.load(first_chunks_ptr + sequence + 1)
        source = tl.load(source_slots_ptr + sequence)
        state = tl.load(of_head + source * stride_slot + in_state, mask=mask, other=0.0).to(tl.float32)
        # All chunks but the first and the last are full: where they start is not looked up, so loads can run ahead. What is
        # looked up for a chunk is loaded while the one before it is computed.
        begin, second = tl.load(bounds_ptr + first).to(tl.int64), tl.load(bounds_ptr + first + 1).to(tl.int64)
        stop = tl.load(bounds_ptr + last).to(tl.int64)
        total = tl.load(totals_ptr + first * heads + head, mask=second > begin, other=0.0)
        slot = tl.load(chunk_slots_ptr + first, mask=first < last, other=-1)
        for chunk in range(first, last):
            more = chunk + 1 < last
            next_total = tl.load(totals_ptr + (chunk + 1) * heads + head, mask=more, other=0.0)
            next_slot = tl.load(chunk_slots_ptr + chunk + 1, mask=more, other=-1)
            start = tl.where(chunk == first, begin, second + (chunk - first - 1) * CHUNK)
            end = tl.where(chunk == first, second, tl.minimum(start + CHUNK, stop))
            filled = inside < (end - start).to(tl.int32)
            row = start * heads + head
            rounded = state.to(dtype)
            tl.store(before_ptr + (chunk * heads + head) * key_size * value_size + in_state, rounded, mask=mask)
            against = tl.load(
                against_ptr + row * key_size + in_against, mask=filled[:, None] & k_mask[None, :], other=0.0
            )
            of_values = values_ptr + row * value_size + in_values
            v_filled = filled[:, None] & v_mask[None, :]
            values = tl.load(of_values, mask=v_filled, other=0.0).to(tl.float32)
            values -= tl.dot(against, rounded, input_precision=PRECISION)
            tl.store(of_values, values.to(dtype), mask=v_filled)
            g = tl.load(cumulative_ptr + row + inside * heads, mask=filled, other=0.0)
            values = (values * tl.exp(total - g)[:, None]).to(dtype)
            keys = tl.load(
                k_ptr + (start * key_heads + key_head) * key_size + in_keys,
                mask=filled[None, :] & k_mask[:, None],
                other=0.0,
            )
            state = tl.exp(total) * state + tl.dot(keys, values, input_precision=PRECISION)
            tl.store(of_head + slot * stride_slot + in_state, state.to(kept_dtype), mask=mask & (slot >= 0))
            total = next_total
            slot = next_slot
        slot = tl.load(live_slots_ptr + sequence)
        tl.store(of_head + slot * stride_slot + in_state, state.to(kept_dtype), mask=mask & (slot >= 0))

    @triton.jit
    def _output_kernel(
        q_ptr: tl.tensor,  # (tokens, key heads, K), contiguous
        k_ptr: tl.tensor,
        values_ptr: tl.tensor,  # (tokens, heads, V), contiguous: what the tokens write
        cumulative_ptr: tl.tensor,  # (tokens, heads) float32
        before_ptr: tl.tensor,  # (chunks, heads, K, V)
        out_ptr: tl.tensor,  # (tokens, heads, V), contiguous
        bounds_ptr: tl.tensor,
        heads: tl.tensor,
        key_heads: tl.tensor,
        key_size: tl.tensor,
        value_size: tl.tensor,
        BLOCK_K: tl.constexpr,
        BLOCK_V: tl.constexpr,
        CHUNK: tl.constexpr,
        PRECISION: tl.constexpr,
    ) -> None:
        """One program: BLOCK_V columns of one head of one chunk."""
        column, chunk, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
        start, end = tl.load(bounds_ptr + chunk).to(tl.int64), tl.load(bounds_ptr + chunk + 1).to(tl.int64)
        if start == end:
            return
        inside = tl.arange(0, CHUNK)
        filled = inside < (end - start).to(tl.int32)
        in_k, in_v = tl.arange(0, BLOCK_K), column * BLOCK_V + tl.arange(0, BLOCK_V)
        k_mask, v_mask = in_k < key_size, in_v < value_size
        of_key_head = (start * key_heads + head // (heads // key_heads)) * key_size
        stride = key_heads * key_size
        q = tl.load(
            q_ptr + of_key_head + inside[:, None] * stride + in_k[None, :],
            mask=filled[:, None] & k_mask[None, :],
            other=0.0,
        )
        k = tl.load(
            k_ptr + of_key_head + inside[None, :] * stride + in_k[:, None],
            mask=filled[None, :] & k_mask[:, None],
            other=0.0,
        )
        before = tl.load(
            before_ptr + (chunk * heads + head) * key_size * value_size + in_k[:, None] * value_size + in_v[None, :],
            mask=k_mask[:, None] & v_mask[None, :],
            other=0.0,
        )
        first = start * heads + head
        in_values = first * value_size + inside[:, None] * (heads * value_size) + in_v[None, :]
        v_filled = filled[:, None] & v_mask[None, :]
        values = tl.load(values_ptr + in_values, mask=v_filled, other=0.0)
        g = tl.load(cumulative_ptr + first + inside * heads, mask=filled, other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * _decayed(g, g)
        scores = tl.where(inside[:, None] >= inside[None, :], scores, 0.0)
        out = tl.exp(g)[:, None] * tl.dot(q, before, input_precision=PRECISION)
        out += tl.dot(scores.to(values.dtype), values, input_precision=PRECISION)
        tl.store(out_ptr + in_values, out.to(out_ptr.dtype.element_ty), mask=v_filled)

    @triton.jit
    def _update_kernel(
        q_ptr: tl.tensor,  # (rows, tokens, key heads, K), strided over rows and tokens
        k_ptr: tl.tensor,
        v_ptr: tl.tensor,  # (rows, tokens, heads, V), likewise
        log_decay_ptr: tl.tensor,  # (rows, tokens, heads) float32, contiguous
        beta_ptr: tl.tensor,  # (rows, tokens, heads), contiguous
        states_ptr: tl.tensor,  # (slots, heads, K, V), strided over slots
        slots_ptr: tl.tensor,  # (rows,)
        after_ptr: tl.tensor,  # (slots, tokens, heads, K, V), strided over slots and tokens
        out_ptr: tl.tensor,  # (rows, tokens, heads, V), contiguous
        stride_q_row: tl.int64,
        stride_q_token: tl.int64,
        stride_k_row: tl.int64,
        stride_k_token: tl.int64,
        stride_v_row: tl.int64,
        stride_v_token: tl.int64,
        stride_slot: tl.int64,
        stride_after_slot: tl.int64,
        stride_after_token: tl.int64,
        tokens: tl.tensor,
        heads: tl.tensor,
        key_heads: tl.tensor,
        key_size: tl.tensor,
        value_size: tl.tensor,
        scale: tl.tensor,
        epsilon: tl.tensor,
        NORMALISE: tl.constexpr,
        AFTER: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_V: tl.constexpr,
    ) -> None:
        """One program: BLOCK_V columns of one head's state, along the tokens of one row."""
        column, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        in_k, in_v = tl.arange(0, BLOCK_K), column * BLOCK_V + tl.arange(0, BLOCK_V)
        k_mask, v_mask = in_k < key_size, in_v < value_size
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if slot < 0:
            for token in range(tokens):
                out = ((row * tokens + token) * heads + head) * value_size + in_v
                tl.store(out_ptr + out, tl.zeros([BLOCK_V], dtype=out_ptr.dtype.element_ty), mask=v_mask)
            return
        mask = k_mask[:, None] & v_mask[None, :]
        in_state = head.to(tl.int64) * key_size * value_size + in_k[:, None] * value_size + in_v[None, :]
        key_head = head // (heads // key_heads)
        state = tl.load(states_ptr + slot * stride_slot + in_state, mask=mask, other=0.0).to(tl.float32)
        for token in range(tokens):
            of_key = key_head * key_size + in_k
            q = tl.load(q_ptr + row * stride_q_row + token * stride_q_token + of_key, mask=k_mask, other=0.0)
            k = tl.load(k_ptr + row * stride_k_row + token * stride_k_token + of_key, mask=k_mask, other=0.0)
            q, k = q.to(tl.float32), k.to(tl.float32)
            if NORMALISE:
                q = q / tl.sqrt(tl.sum(q * q, 0) + epsilon)
                k = k / tl.sqrt(tl.sum(k * k, 0) + epsilon)
            of_value = row * stride_v_row + token * stride_v_token + head * value_size + in_v
            v = tl.load(v_ptr + of_value, mask=v_mask, other=0.0).to(tl.float32)
            gate = (row * tokens + token) * heads + head
            state = tl.exp(tl.load(log_decay_ptr + gate)) * state
            missing = tl.load(beta_ptr + gate).to(tl.float32) * (v - tl.sum(state * k[:, None], 0))
            state += k[:, None] * missing[None, :]
            out = tl.sum(state * (q * scale)[:, None], 0)
            in_out = ((row * tokens + token) * heads + head) * value_size + in_v
            tl.store(out_ptr + in_out, out.to(out_ptr.dtype.element_ty), mask=v_mask)
            if AFTER:
                after = after_ptr + slot * stride_after_slot + token * stride_after_token + in_state
                tl.store(after, state.to(after_ptr.dtype.element_ty), mask=mask)
        tl.store(states_ptr + slot * stride_slot + in_state, state.to(states_ptr.dtype.element_ty), mask=mask)
