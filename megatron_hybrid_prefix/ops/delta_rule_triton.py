"""Triton kernels of the gated delta rule (``delta_rule.py`` has the mathematics, the wrappers and the reference).

A prefill runs two kernels:

1. `_prepare_kernel` computes all that does not depend on the state, for all chunks of the step at once: norms, scores, the
   inverse of each chunk's triangular system, and what its tokens write if the state before it is zero.
2. `_pass_kernel` passes the states along the chunks of a sequence and computes the outputs. It starts from any slot and
   writes planned states to their slots.

The second one keeps the state in float32 from the source slot to the last chunk. Products take operands of the inputs'
type, and accumulate in float32.

Chunks are cut at the multiples of 64: all chunks of a sequence but the first and the last hold 64 tokens. A chunk's
arithmetic depends on its tokens and the state before it alone, not on its place in the step: a request that resumes at
the end of a chunk computes the same bits as one that does not.

A decode runs `_update_kernel`. Its products have the accuracy of float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_hybrid_prefix.ops.rings import RingRows, at_once, entry_at, times
from megatron_hybrid_prefix.ops.triton_or_torch import jit, multiprocessors, tl, triton

CHUNK = 64
"""Tokens of a chunk: the chunk quantum of this family of layers."""
EPSILON = 1e-6
"""Added to a squared norm, as everywhere in this family of layers."""
PART = 16
"""Rows of the diagonal blocks that are inverted by substitution."""

_BYTES = 16384  # of a state, some columns of it, that a program of a decode reads at once
_WARPS, _STAGES, _REGISTERS = 2, 3, 160  # of such a program; of its loop over them; of a thread at most
_FLUSH, _AHEAD = 32, 4  # rows of a state that are advanced at once, and stages of that loop
_PIECES = 8  # that a program takes at most
_PROGRAMS = 3  # of a multiprocessor; a program takes fewer before there are fewer
_CORES = True  # whether what has 16 bits meets on tensor cores


class Launch(NamedTuple):
    """Constants that the kernels of a prefill are compiled with, each as keyword arguments."""

    prepare: dict[str, Any]
    pass_on: dict[str, Any]


def check_heads(dtype: torch.dtype, key_size: int, value_size: int) -> None:
    """Checks that the kernels of a prefill support inputs of this type and heads of these sizes.

    Raises:
        ValueError: Keys are too long for the memory of a multiprocessor. Or the type has 16 bits, and a size is no multiple
            of 16. The assembler of Triton 3.6 (ptxas 12.8) miscompiles kernels for some of those, and outputs are wrong:
            ``tests/kernels/compiled.py`` has the fault.
    """
    if triton.next_power_of_2(key_size) * dtype.itemsize > 1024:
        raise ValueError(f"heads of {key_size} key channels in {dtype}: at most {1024 // dtype.itemsize} are supported")
    if dtype.itemsize == 2 and (key_size % 16 or value_size % 16):
        raise ValueError(f"heads of {key_size} key and {value_size} value channels in {dtype}: use multiples of 16")


def launch_options(
    dtype: torch.dtype, key_size: int, value_size: int, *, normalise: bool, opened: bool = False
) -> Launch:
    """Tiles, warps and pipeline stages for inputs of this type and heads of these sizes, which `check_heads` accepts.

    ``opened``: for the open chunks of a decode. A tile of other columns gives an element the same bits, other warps do not.
    """
    least = 16 if dtype == torch.float32 else 64  # rows of an instruction on tensor cores
    block_k, block_v = (max(least, triton.next_power_of_2(size)) for size in (key_size, value_size))
    row_bytes = block_k * dtype.itemsize
    shared: dict[str, Any] = {"K": key_size, "V": value_size, "BLOCK_K": block_k, "WIDTH_V": block_v, "CHUNK": CHUNK}
    shared["OPEN"] = opened
    prepare: dict[str, Any] = {"NORMALISE": normalise, "PART": PART}
    if dtype == torch.float32:
        # No tensor cores. The compiler unrolls these products: smaller tiles, on more threads, keep that short.
        shared["PRECISION"] = "ieee"
        prepare |= {"MERGE": "ieee", "TILE_K": min(32, block_k), "TILE_V": min(32, block_v), "num_warps": 16}
        columns, pass_warps, stages = 16, 8, 1
    else:
        shared["PRECISION"] = "tf32"
        prepare |= {"MERGE": "tf32", "TILE_K": min(128, block_k), "TILE_V": min(128, block_v)}
        # With 168 registers a thread, a multiprocessor holds three programs. The operands of all stages of the last kernel
        # lie in shared memory. These are the fastest of those tried on an H200, with heads of 128 x 128.
        prepare |= {"num_warps": 4, "maxnreg": 168} if row_bytes <= 256 else {"num_warps": 8}
        columns, pass_warps, stages = (32, 4, 3) if row_bytes <= 256 else (16, 4, 2) if row_bytes <= 512 else (16, 8, 1)
    if opened:
        columns, stages = columns if dtype == torch.float32 else 64, 1
    pass_on = {"BLOCK_V": columns, "num_warps": pass_warps, "num_stages": stages}
    return Launch(prepare=shared | prepare, pass_on=shared | pass_on)


def scan_by_kernels(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    chunk_bounds: torch.Tensor,
    first_chunks: torch.Tensor,
    source_slots: torch.Tensor,
    live_slots: torch.Tensor,
    chunk_slots: torch.Tensor,
    *,
    normalise: bool,
    kept: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """`scan_delta_rule` on a GPU. With ``added``, of `OpenChunks`, k, v, log-decays and beta are rings, q and results of new tokens.

    All chunks of a sequence but the first and the last must hold `CHUNK` tokens; the first and the last at most so many.
    An empty chunk must be the only one of its sequence, and have no slot. Temporary memory: for each chunk and value head
    64 rows of K, V and 64 elements in the type of ``v`` (for 16,384 tokens and 64 heads of 128 x 128 in bfloat16, 0.6 GiB).
    """
    tokens, heads, value_size = v.shape
    key_heads, key_size = q.shape[1:]
    chunks = chunk_slots.shape[0]
    check_heads(v.dtype, key_size, value_size)
    if not chunks:
        return torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    outputs = (
        torch.empty(v.shape, dtype=v.dtype, device=v.device) if added is None else v.new_zeros(chunks, *v.shape[1:])
    )
    q, k, v = (_aligned(tensor) for tensor in (q, k, v))
    log_decay, beta = log_decay.contiguous(), beta.contiguous()
    kept = states if kept is None else kept
    assert states[0].is_contiguous() and kept[0].is_contiguous()
    options = launch_options(v.dtype, key_size, value_size, normalise=normalise, opened=added is not None)

    def by_chunk(*shape: int, dtype: torch.dtype = v.dtype) -> torch.Tensor:
        return torch.empty(chunks, heads, *shape, dtype=dtype, device=v.device)

    against = by_chunk(CHUNK, options.pass_on["BLOCK_K"])
    values = by_chunk(CHUNK, options.pass_on["WIDTH_V"])
    scores = by_chunk(CHUNK, CHUNK)
    factors, decays = by_chunk(2, CHUNK, dtype=torch.float32), by_chunk(dtype=torch.float32)
    _prepare_kernel[(heads, chunks)](
        q,
        k,
        v,
        log_decay,
        beta,
        against,
        values,
        scores,
        factors,
        decays,
        outputs,
        chunk_bounds,
        chunk_bounds if added is None else added,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        tokens if added is None else 0,
        key_size**-0.5,
        EPSILON,
        heads,
        key_heads,
        **options.prepare,
    )
    # Not autotuned: a kernel that writes slots in place must not be run more often than asked for.
    _pass_kernel[(triton.cdiv(value_size, options.pass_on["BLOCK_V"]), heads, source_slots.shape[0])](
        q,
        k,
        against,
        values,
        scores,
        factors,
        decays,
        states,
        kept,
        outputs,
        chunk_bounds,
        first_chunks,
        source_slots,
        live_slots,
        chunk_slots,
        chunk_bounds if added is None else added,
        q.stride(0),
        k.stride(0),
        states.stride(0),
        kept.stride(0),
        heads,
        key_heads,
        **options.pass_on,
    )
    return outputs


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """(tokens, heads, K) without gaps but between rows, in 16-bit types aligned to 16 channels; a copy where it is not."""
    tensor = contiguous_from(tensor, 1)
    if tensor.dtype.itemsize == 2 and (tensor.stride(0) % 16 or tensor.data_ptr() % 16):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def update_by_kernel(
    inputs: tuple[torch.Tensor, ...],
    states: torch.Tensor,
    rows: RingRows,
    rings: tuple[torch.Tensor, ...],
    normalise: bool,
) -> torch.Tensor:
    """`update_delta_rule` on a GPU, with q, k, v, log-decays and beta, and keys, what is written and decays of the rings."""
    q, k, v = (contiguous_from(tensor, 2) for tensor in inputs[:3])
    count, tokens, heads, value_size = v.shape
    key_heads, key_size = k.shape[2:]
    outputs = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not count:
        return outputs
    assert all(tensor[0].is_contiguous() for tensor in (states, *rings))
    tile = update_tile(key_size, value_size, states.element_size(), rings[0].shape[1], tokens)
    repeat = heads // key_heads
    pieces = repeat * triton.cdiv(value_size, tile["BLOCK_V"])
    together = at_once(_PIECES, pieces, count * key_heads, _PROGRAMS * multiprocessors(v.device))
    # Not in Triton's interpreter, whose products of bfloat16 are wrong.
    cores = _CORES and v.is_cuda and q.dtype == k.dtype == rings[0].dtype == torch.bfloat16
    given = q, k, v, *(tensor.contiguous() for tensor in inputs[3:]), states, *rings, outputs, *rows
    strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *(tensor.stride(0) for tensor in (states, *rings))
    numbers = heads, together, key_size**-0.5, EPSILON
    grid = key_heads * triton.cdiv(pieces, together), count
    _update_kernel[grid](*given, *strides, *numbers, REPEAT=repeat, NORMALISE=normalise, CORES=cores, **tile)
    return outputs


def update_tile(key_size: int, value_size: int, itemsize: int, entries: int, tokens: int) -> dict[str, Any]:
    """What a program of a decode reads of a state and of entries at once: the same for any number of states."""
    columns, block_k = (max(16, triton.next_power_of_2(size)) for size in (value_size, key_size))
    columns, together = min(columns, max(16, _BYTES // (block_k * itemsize))), entries - max(1, tokens)
    tile = {"K": key_size, "V": value_size, "TOKENS": tokens, "BLOCK_T": max(8, triton.next_power_of_2(tokens))}
    tile |= {"ENTRIES": entries, "BLOCK_E": max(16, triton.next_power_of_2(together)), "BLOCK_K": block_k}
    tile |= {"BLOCK_V": columns, "PART_K": min(_FLUSH, block_k), "HEADS": triton.next_power_of_2(_PIECES)}
    more = (
        tokens > 1 or together > 32 or key_size < block_k
    )  # warps, for their registers; else programs of a multiprocessor
    few = None if more or block_k > 128 else _REGISTERS
    tile |= {"num_warps": 2 * _WARPS if more else _WARPS, "maxnreg": few}
    return tile | {"STAGES": _STAGES, "AHEAD": _AHEAD}


def contiguous_from(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """``tensor``, or a copy, whose dimensions from ``dim`` on lie without gaps; those before may be strided."""
    sizes, strides = tensor.shape[dim:], tensor.stride()[dim:]
    dense = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != dense:
            return tensor.contiguous()
        dense *= size
    return tensor


# One program for any number of heads: what a GPU compiles is what was tested there.
_NUMBERS = ["tokens", "heads", "key_heads"]


@jit
def _decayed(g: tl.tensor) -> tl.tensor:
    """(i, j): exp of g_i - g_j, along the last dimension; 1 where that would be positive, which the caller masks."""
    return tl.exp(tl.minimum(tl.expand_dims(g, -1) - tl.expand_dims(g, -2), 0.0))


@jit
def _unit(x: tl.tensor, epsilon: tl.tensor, NORMALISE: tl.constexpr) -> tl.tensor:
    """(rows,) float32: what makes each row of ``x`` a unit vector; 1 if that is not asked for."""
    x = x.to(tl.float32)
    squared = tl.sum(x * x, 1)
    return 1 / tl.sqrt(squared + epsilon) if NORMALISE else tl.full(squared.shape, 1.0, tl.float32)


@jit(do_not_specialize=_NUMBERS)
def _prepare_kernel(
    q_ptr: tl.tensor,  # (tokens, key heads, K), strided over tokens
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,  # (tokens, heads, V), likewise
    log_decay_ptr: tl.tensor,  # (tokens, heads) float32, contiguous
    beta_ptr: tl.tensor,  # (tokens, heads), contiguous
    against_ptr: tl.tensor,  # (chunks, heads, CHUNK, BLOCK_K): its product with the state before the chunk is subtracted
    values_ptr: tl.tensor,  # (chunks, heads, CHUNK, WIDTH_V): what is written if that state is zero
    scores_ptr: tl.tensor,  # (chunks, heads, CHUNK, CHUNK): the outputs' share of what is written in the chunk
    factors_ptr: tl.tensor,  # (chunks, heads, 2, CHUNK) float32: of queries against the state, of keys into it
    decays_ptr: tl.tensor,  # (chunks, heads) float32: how much of the state is left after the chunk
    out_ptr: tl.tensor,  # (tokens, heads, V), contiguous: zero after the last chunk
    bounds_ptr: tl.tensor,
    added_ptr: tl.tensor,  # (chunks,): with OPEN the entries of a ring that chunks end with
    stride_q: tl.int64,
    stride_k: tl.int64,
    stride_v: tl.int64,
    tokens: tl.tensor,
    scale: tl.tensor,
    epsilon: tl.tensor,
    heads: tl.tensor,
    key_heads: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    NORMALISE: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGE: tl.constexpr,
    OPEN: tl.constexpr,
) -> None:
    """One program: one head of one chunk. Rows after the chunk's end are zero in all that it writes.

    Of an open one, rows that `_pass_kernel` does not read are not written: those after its end, and of scores all but that of the last
    token, whose query is the row of the chunk.

    It inverts I + A, where A[i, j] = beta_i exp(g_i - g_j) k_i k_j for j < i. Blocks on the diagonal are inverted by
    substitution; with D, the matrix of these, and N = D (A - blocks on the diagonal), the inverse is
    (I + N^2) (I - N) D, as N^4 = 0.
    """
    PARTS: tl.constexpr = CHUNK // PART
    tl.static_assert(PARTS == 4)
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunks = tl.num_programs(1)
    start, end = tl.load(bounds_ptr + chunk).to(tl.int64), tl.load(bounds_ptr + chunk + 1).to(tl.int64)
    inside, part, parts = tl.arange(0, CHUNK), tl.arange(0, PART), tl.arange(0, PARTS)
    entry = tl.load(added_ptr + chunk) if OPEN else 0
    behind = tokens if OPEN else tl.load(bounds_ptr + chunks).to(tl.int64) + chunk * PART
    for first in range(behind, tokens, chunks * PART):
        row = first + part
        for column in tl.static_range(0, V, TILE_V):
            in_v = column + tl.arange(0, TILE_V)
            zero = tl.zeros([PART, TILE_V], dtype=out_ptr.dtype.element_ty)
            out = out_ptr + (row * heads + head)[:, None] * V + in_v[None, :]
            tl.store(out, zero, mask=(row < tokens)[:, None] & (in_v < V)[None, :])
    if start == end:
        return
    dtype = values_ptr.dtype.element_ty
    cell = chunk * heads + head
    count = (end - start).to(tl.int32)
    filled, asked, q_start, kept = inside < count, inside < count, start, None
    if OPEN:
        start, q_start = entry + 1 - count, chunk + 1 - count
        asked, kept = inside == count - 1, filled[:, None]
    of_gates = start * heads + head + inside * heads
    log_decay = tl.load(log_decay_ptr + of_gates, mask=filled, other=0.0)
    beta = tl.load(beta_ptr + of_gates, mask=filled, other=0.0).to(tl.float32)
    g, total = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
    key_head = head // (heads // key_heads)
    of_k, of_q = k_ptr + start * stride_k + key_head * K, q_ptr + q_start * stride_q + key_head * K
    in_k = tl.arange(0, BLOCK_K)
    mask = filled[:, None] & (in_k < K)[None, :]
    k = tl.load(of_k + inside[:, None] * stride_k + in_k[None, :], mask=mask, other=0.0)
    unit_k = _unit(k, epsilon, NORMALISE)
    mask = asked[:, None] & (in_k < K)[None, :]
    q = tl.load(of_q + inside[:, None] * stride_q + in_k[None, :], mask=mask, other=0.0)
    unit_q = _unit(q, epsilon, NORMALISE) * scale

    decayed = _decayed(g) * unit_k[None, :]
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decayed * unit_q[:, None]
    scores = tl.where(inside[:, None] >= inside[None, :], scores, 0.0)
    in_scores = inside[:, None] * CHUNK + inside[None, :]
    tl.store(scores_ptr + cell * CHUNK * CHUNK + in_scores, scores.to(dtype), mask=asked[:, None] if OPEN else None)
    of_factors = factors_ptr + cell * 2 * CHUNK + inside
    tl.store(of_factors, unit_q * tl.exp(g))
    tl.store(of_factors + CHUNK, tl.where(filled, unit_k * tl.exp(total - g), 0.0))
    tl.store(decays_ptr + cell, tl.exp(total))

    of_v = v_ptr + start * stride_v + head * V

    # Blocks on the diagonal, all at once. Row i of an inverse is e_i - sum over j < i of A[i, j] times row j. It is
    # transposed here: the sum is then one over columns, which lie closer together.
    k_parts = tl.reshape(k, [PARTS, PART, BLOCK_K])
    blocks = tl.dot(k_parts, tl.permute(k_parts, (0, 2, 1)), input_precision=PRECISION)
    blocks *= _decayed(tl.reshape(g, [PARTS, PART])) * tl.reshape(unit_k, [PARTS, PART])[:, None, :]
    blocks *= tl.reshape(beta * unit_k, [PARTS, PART])[:, :, None]
    blocks = tl.where((part[:, None] > part[None, :])[None, :, :], blocks, 0.0)
    inverse = tl.where((part[:, None] == part[None, :])[None, :, :], 1.0, tl.zeros([PARTS, PART, PART], tl.float32))
    for i in tl.static_range(1, PART):
        row = tl.sum(tl.where((part == i)[None, :, None], blocks, 0.0), 1)
        added = tl.sum(inverse * row[:, None, :], 2)[:, :, None]
        inverse = tl.where((part == i)[None, None, :], inverse - added, inverse)
    inverse = tl.broadcast_to(tl.permute(inverse, (0, 2, 1))[:, :, None, :], [PARTS, PART, PARTS, PART])
    inverse = tl.where((parts[:, None] == parts[None, :])[:, None, :, None], inverse, 0.0)
    diagonal = tl.reshape(inverse, [CHUNK, CHUNK])

    inverse = diagonal
    if not OPEN or count > PART:  # else nothing is below the blocks
        below = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decayed * (beta * unit_k)[:, None]
        below = tl.where((inside // PART)[:, None] > (inside // PART)[None, :], below, 0.0)
        below = tl.dot(diagonal, below, input_precision=MERGE)
        inverse = diagonal - tl.dot(below, diagonal, input_precision=MERGE)
        if not OPEN or count > 2 * PART:  # else its square is zero
            below = tl.dot(below, below, input_precision=MERGE)
            inverse += tl.dot(below, inverse, input_precision=MERGE)

    left = (inverse * beta[None, :]).to(dtype)
    for column in tl.static_range(0, WIDTH_V, TILE_V):
        in_v = column + tl.arange(0, TILE_V)
        mask = filled[:, None] & (in_v < V)[None, :]
        v = tl.load(of_v + inside[:, None] * stride_v + in_v[None, :], mask=mask, other=0.0)
        values = tl.dot(left, v, input_precision=PRECISION).to(dtype)
        tl.store(values_ptr + (cell * CHUNK + inside)[:, None] * WIDTH_V + in_v[None, :], values, mask=kept)
    left = (inverse * (beta * unit_k * tl.exp(g))[None, :]).to(dtype)
    for column in tl.static_range(0, BLOCK_K, TILE_K):
        in_k = column + tl.arange(0, TILE_K)
        if TILE_K != BLOCK_K:
            mask = filled[:, None] & (in_k < K)[None, :]
            k = tl.load(of_k + inside[:, None] * stride_k + in_k[None, :], mask=mask, other=0.0)
        against = tl.dot(left, k, input_precision=PRECISION).to(dtype)
        tl.store(against_ptr + (cell * CHUNK + inside)[:, None] * BLOCK_K + in_k[None, :], against, mask=kept)


@jit(do_not_specialize=_NUMBERS)
def _pass_kernel(
    q_ptr: tl.tensor,  # (tokens, key heads, K), strided over tokens
    k_ptr: tl.tensor,
    against_ptr: tl.tensor,  # what `_prepare_kernel` has written
    values_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    states_ptr: tl.tensor,  # (slots, heads, K, V), strided over slots
    kept_states_ptr: tl.tensor,
    out_ptr: tl.tensor,  # (tokens, heads, V), contiguous
    bounds_ptr: tl.tensor,
    first_chunks_ptr: tl.tensor,
    source_slots_ptr: tl.tensor,
    live_slots_ptr: tl.tensor,
    chunk_slots_ptr: tl.tensor,
    added_ptr: tl.tensor,  # as of `_prepare_kernel`
    stride_q: tl.int64,
    stride_k: tl.int64,
    stride_slot: tl.int64,
    stride_kept: tl.int64,
    heads: tl.tensor,
    key_heads: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    OPEN: tl.constexpr,
) -> None:
    """One program: BLOCK_V columns of one head's state, along all chunks of one sequence, or of an open chunk, with its last token's output."""
    column, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    in_k, in_v = tl.arange(0, BLOCK_K), column * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = tl.arange(0, CHUNK)
    k_mask, v_mask = in_k < K, in_v < V
    dtype = values_ptr.dtype.element_ty
    kept_dtype = states_ptr.dtype.element_ty
    # Where a program reads and writes, counted from the start of a chunk or a state: the same for all chunks. What the
    # state before a chunk is multiplied with, rows of keys and queries, is one operand of twice as many rows.
    mask = k_mask[:, None] & v_mask[None, :]
    in_state = in_k[:, None] * V + in_v[None, :]
    in_values = inside[:, None] * WIDTH_V + in_v[None, :]
    in_scores = inside[:, None] * CHUNK + inside[None, :]
    in_out = inside[:, None] * (heads * V) + in_v[None, :]
    row, of_against = tl.arange(0, 2 * CHUNK) % CHUNK, tl.arange(0, 2 * CHUNK) < CHUNK
    before_head = head.to(tl.int64) * K * V
    of_head, of_kept = states_ptr + before_head, kept_states_ptr + before_head
    of_key_head = head // (heads // key_heads) * K
    of_factors = factors_ptr + inside

    first, last, entry, filled = sequence.to(tl.int64), sequence.to(tl.int64) + 1, 0, -1
    if OPEN:  # of one chunk: nothing that is read says where other reads are, but these
        entry, filled = tl.load(added_ptr + sequence), tl.load(live_slots_ptr + sequence)
    else:
        first, last = tl.load(first_chunks_ptr + sequence), tl.load(first_chunks_ptr + sequence + 1)
    source = tl.load(source_slots_ptr + sequence)
    # All chunks but the first and the last are full: where they start is not looked up, so loads can run ahead. What is
    # looked up for a chunk is loaded while the one before it is computed. Of an empty chunk nothing is prepared.
    begin, second = tl.load(bounds_ptr + first).to(tl.int64), tl.load(bounds_ptr + first + 1).to(tl.int64)
    stop = tl.load(bounds_ptr + last).to(tl.int64)
    if not OPEN:
        last = tl.where(begin < second, last, first)
    cell = first * heads + head
    some = first < last
    decay = tl.load(decays_ptr + cell, mask=some, other=0.0)
    slot = tl.load(chunk_slots_ptr + first, mask=some, other=-1)
    f_queries = tl.load(of_factors + cell * 2 * CHUNK, mask=some & (inside >= 0), other=0.0)
    f_keys = tl.load(of_factors + (cell * 2 + 1) * CHUNK, mask=some & (inside >= 0), other=0.0)
    state = tl.load(of_head + source * stride_slot + in_state, mask=mask, other=0.0).to(tl.float32)
    for chunk in range(first, last):
        cell = chunk * heads + head
        more = chunk + 1 < last
        next_decay = tl.load(decays_ptr + cell + heads, mask=more, other=0.0)
        next_slot = tl.load(chunk_slots_ptr + chunk + 1, mask=more, other=-1)
        next_queries = tl.load(of_factors + (cell + heads) * 2 * CHUNK, mask=more & (inside >= 0), other=0.0)
        next_keys = tl.load(of_factors + ((cell + heads) * 2 + 1) * CHUNK, mask=more & (inside >= 0), other=0.0)
        start = tl.where(chunk == first, begin, second + (chunk - first - 1) * CHUNK)
        end = tl.where(chunk == first, second, tl.minimum(start + CHUNK, stop))
        count = (end - start).to(tl.int32)
        asked, kept, of_last, zero, q_start, full = inside < count, None, None, None, start, True
        of_asked = of_against | (row < count)
        if OPEN:
            start, q_start = entry + 1 - count, chunk + 1 - count
            asked, kept, zero = inside == count - 1, (inside < count)[:, None], 0.0
            of_last, full = asked[:, None], filled >= 0
            of_asked = tl.where(of_against, row < count, row == count - 1)
        of_rows = tl.where(
            of_against,
            against_ptr + (cell * CHUNK + row) * BLOCK_K,
            q_ptr + q_start * stride_q + of_key_head + row * stride_q,
        )
        rows = tl.load(of_rows[:, None] + in_k[None, :], mask=of_asked[:, None] & k_mask[None, :], other=0.0)
        values = tl.load(values_ptr + cell * CHUNK * WIDTH_V + in_values, mask=kept, other=zero).to(tl.float32)
        scores = tl.load(scores_ptr + cell * CHUNK * CHUNK + in_scores, mask=of_last, other=zero)
        both = tl.reshape(tl.dot(rows, state.to(dtype), input_precision=PRECISION), [2, CHUNK, BLOCK_V])
        known, out = tl.split(tl.permute(both, (1, 2, 0)))
        values -= known
        if full:
            keys = tl.load(
                k_ptr + start * stride_k + of_key_head + inside[None, :] * stride_k + in_k[:, None],
                mask=(inside < count)[None, :] & k_mask[:, None],
                other=0.0,
            )
            written = (values * f_keys[:, None]).to(dtype)
            after = tl.dot(keys, written, state * decay, input_precision=PRECISION)
            if OPEN:
                tl.store(of_head + filled * stride_slot + in_state, after.to(kept_dtype), mask=mask)
            else:
                state = after
        out = tl.dot(scores, values.to(dtype), out * f_queries[:, None], input_precision=PRECISION)
        tl.store(
            out_ptr + (q_start * heads + head) * V + in_out,
            out.to(out_ptr.dtype.element_ty),
            mask=asked[:, None] & v_mask[None, :],
        )
        if not OPEN:  # noqa: SIM102  (known when it is compiled)
            if slot >= 0:
                tl.store(of_kept + slot * stride_kept + in_state, state.to(kept_dtype), mask=mask)
        decay = next_decay
        slot = next_slot
        f_queries = next_queries
        f_keys = next_keys
    slot = tl.load(live_slots_ptr + sequence)
    if not OPEN:  # noqa: SIM102
        if slot >= 0:
            tl.store(of_head + slot * stride_slot + in_state, state.to(kept_dtype), mask=mask)


@jit(do_not_specialize=["together"])  # one program for any number: what rows get does not depend on it
def _update_kernel(
    q_ptr: tl.tensor,  # (rows, TOKENS, key heads, K), strided over rows and tokens
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,  # (rows, TOKENS, heads, V), likewise
    log_decay_ptr: tl.tensor,  # (rows, TOKENS, heads) float32, contiguous
    beta_ptr: tl.tensor,  # (rows, TOKENS, heads), contiguous
    states_ptr: tl.tensor,  # (slots, heads, K, V), strided over slots
    keys_ptr: tl.tensor,  # (rings, ENTRIES, key heads, K), strided over rings
    written_ptr: tl.tensor,  # (rings, ENTRIES, heads, V), likewise
    decays_ptr: tl.tensor,  # (rings, ENTRIES, heads) float32, likewise
    out_ptr: tl.tensor,  # (rows, TOKENS, heads, V), contiguous
    slots_ptr: tl.tensor,  # (rows,), as the next ones: `RingRows`
    rings_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    origins_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    stride_q_row: tl.int64,
    stride_q_token: tl.int64,
    stride_k_row: tl.int64,
    stride_k_token: tl.int64,
    stride_v_row: tl.int64,
    stride_v_token: tl.int64,
    stride_slot: tl.int64,
    stride_keys: tl.int64,
    stride_written: tl.int64,
    stride_decays: tl.int64,
    heads: tl.tensor,
    together: tl.tensor,
    scale: tl.tensor,
    epsilon: tl.tensor,
    REPEAT: tl.constexpr,
    ENTRIES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TOKENS: tl.constexpr,
    NORMALISE: tl.constexpr,
    CORES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART_K: tl.constexpr,
    HEADS: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program: ``together`` pieces of states of one key head's heads, or fewer, and the tokens of one row.

    A piece has BLOCK_V columns of a head's state. What heads share is computed once; the next pieces are on their way while one is
    used. Keys and queries are one operand of 2 BLOCK_T rows. The entries of this step are not among those that it reads; keys
    are written by the first of a key head's programs, decays by that of a head's first piece.
    """
    PIECES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    # Float32 meets few vectors without tensor cores: to split it takes longer.
    DOTS: tl.constexpr = CORES and (states_ptr.dtype.element_ty != tl.float32 or TOKENS > 1)
    row, chunks = tl.program_id(1).to(tl.int64), tl.cdiv(REPEAT * PIECES, together)
    key_head, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * together
    last, first_head = tl.minimum(first + together, REPEAT * PIECES), key_head * REPEAT + first // PIECES
    in_k, in_v, number = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_E)
    both, of_head = tl.arange(0, 2 * BLOCK_T), tl.arange(0, HEADS)
    token, is_query = both % BLOCK_T, both >= BLOCK_T
    k_mask, filled = in_k < K, token < TOKENS
    slot, ring, kept = tl.load(slots_ptr + row), tl.load(rings_ptr + row), tl.load(kept_ptr + row)
    position, origin, end = tl.load(positions_ptr + row), tl.load(origins_ptr + row), tl.load(ends_ptr + row)
    of_row = row * TOKENS * heads
    if slot < 0:
        for piece in range(first, last):
            column, head = piece % PIECES * BLOCK_V, key_head * REPEAT + piece // PIECES
            of_out = out_ptr + (of_row + token * heads + head)[:, None] * V + (column + in_v)[None, :]
            zeros = tl.zeros([2 * BLOCK_T, BLOCK_V], dtype=out_ptr.dtype.element_ty)
            tl.store(of_out, zeros, mask=(is_query & filled)[:, None] & (in_v < V - column)[None, :])
        return
    key_heads = heads // REPEAT
    of_keys, of_decays = keys_ptr + ring * stride_keys + key_head * K, decays_ptr + ring * stride_decays + first_head
    of_written = written_ptr + ring * stride_written
    of_states, to_kept = states_ptr + slot * stride_slot, (kept - slot) * stride_slot
    h_mask, of_gate = (of_head < REPEAT - first // PIECES)[None, :], of_decays + of_head[None, :]
    if (end > origin) | (kept >= 0):
        at, after, count = entry_at(origin, number, ENTRIES), entry_at(origin, number + 1, ENTRIES), end - origin
        inside = (number < count)[:, None]
        decay = tl.exp(tl.sum(tl.load(of_gate + (at * heads)[:, None], mask=inside & h_mask, other=0.0), 0))
        of_later, others = of_gate + (after * heads)[:, None], (number + 1 < count)[:, None] & h_mask
        weight = tl.exp(tl.cumsum(tl.load(of_later, mask=others, other=0.0), 0, reverse=True))
        for turn in tl.range(0, (last - first) * (BLOCK_K // PART_K), num_stages=AHEAD):
            piece = first + turn // (BLOCK_K // PART_K)
            part = turn % (BLOCK_K // PART_K) * PART_K + tl.arange(0, PART_K)
            column, head = piece % PIECES * BLOCK_V, piece // PIECES - first // PIECES
            v_mask, of_channel = (in_v < V - column)[None, :], (first_head + head) * V + column + in_v[None, :]
            mask, of_part = (part < K)[:, None] & v_mask, of_states + (first_head + head) * (K * V) + part[:, None] * V
            of_part += column + in_v[None, :]
            state = tl.load(of_part, mask=mask, other=0.0).to(tl.float32)
            of_some = of_keys + (at * (key_heads * K))[None, :] + part[:, None]
            keys = tl.load(of_some, mask=(part < K)[:, None] & (number < count)[None, :], other=0.0)
            of_entries = of_written + (at * (heads * V))[:, None] + of_channel
            written = tl.load(of_entries, mask=inside & v_mask, other=0.0)
            later = tl.sum(tl.where((of_head == head)[None, :], weight, 0.0), 1)
            if CORES and written_ptr.dtype.element_ty != tl.float32:
                added = times(keys.to(tl.float32) * later[None, :], written)
            else:
                added = times(keys if CORES else keys.to(tl.float32), written.to(tl.float32) * later[:, None])
            left = tl.sum(tl.where(of_head == head, decay, 0.0), 0)
            state = tl.where(end > origin, state * left + added, state).to(states_ptr.dtype.element_ty)
            tl.store(of_part, state, mask=mask & (end > origin))
            tl.store(of_part + to_kept, state, mask=mask & (kept >= 0))
        tl.debug_barrier()  # it is read again, by other threads
    if TOKENS > 0:
        # Entries since the end, then this step's tokens; of those, ``new`` says which, and is negative for others.
        at, after, new = entry_at(end, number, ENTRIES), entry_at(end, number + 1, ENTRIES), number - (position - end)
        of_k = k_ptr + row * stride_k_row + token * stride_k_token
        of_both = tl.where(is_query, q_ptr + row * stride_q_row + token * stride_q_token, of_k) + key_head * K
        x = tl.load(of_both[:, None] + in_k[None, :], mask=filled[:, None] & k_mask[None, :], other=0.0)
        of_some = of_keys + at[None, :] * (key_heads * K) + in_k[:, None]
        keys = tl.load(of_some, mask=(new < 0)[None, :] & k_mask[:, None], other=0.0)
        decay = tl.load(of_gate + (at * heads)[:, None], mask=(new < 0)[:, None] & h_mask, other=0.0)
        later = tl.load(of_gate + (after * heads)[:, None], mask=(new < -1)[:, None] & h_mask, other=0.0)
        later, decay = tl.exp(tl.cumsum(later, 0, reverse=True)), tl.exp(tl.sum(decay, 0))
        unit = _unit(x, epsilon, NORMALISE)
        scores, meets = times(x, keys) * unit[:, None], times(x, tl.trans(x)) * unit[:, None]
        real, own = of_head < REPEAT - first // PIECES, (of_head + first // PIECES) * PIECES
        own = real & (own >= first) & (own < last)
        # Of each token, by head; then of each token's key and query, and of those by earlier keys.
        none: tl.tuple = ()
        decays, gains, rows, seen, met = none, none, none, none, none
        for t in tl.static_range(TOKENS):
            of_gates = of_row + t * heads + first_head + of_head
            gate = tl.load(log_decay_ptr + of_gates, mask=real, other=0.0)
            tl.store(of_decays + entry_at(position, t, ENTRIES) * heads + of_head, gate, mask=own)
            beta = tl.load(beta_ptr + of_gates, mask=real, other=0.0).to(tl.float32)
            decays += (tl.exp(gate),)
            gains += (beta * tl.sum(tl.where(both == t, unit, 0.0), 0),)
            for r in tl.static_range(2):
                is_row = (both == t + r * BLOCK_T)[:, None]
                for s in tl.static_range(TOKENS):
                    met += (tl.sum(tl.sum(tl.where(is_row & (both == s)[None, :], meets, 0.0), 1), 0),)
                if not DOTS:
                    rows += (tl.sum(tl.where(is_row, x.to(tl.float32) * unit[:, None], 0.0), 0)[:, None],)
                    seen += (tl.sum(tl.where(is_row, scores, 0.0), 0),)
        if first == 0:
            of_x = of_keys + entry_at(position, token, ENTRIES)[:, None] * (key_heads * K) + in_k[None, :]
            tl.store(of_x, x.to(keys_ptr.dtype.element_ty), mask=(filled & (token == both))[:, None] & k_mask[None, :])
        for piece in tl.range(first, last, num_stages=STAGES):
            column, head = piece % PIECES * BLOCK_V, piece // PIECES - first // PIECES
            of_channel, v_mask = (first_head + head) * V + column, in_v < V - column if V % BLOCK_V else in_v >= 0
            this = of_head == head
            of_piece = of_states + (first_head + head) * (K * V) + column + in_k[:, None] * V + in_v[None, :]
            state = tl.load(of_piece, mask=k_mask[:, None] & v_mask[None, :], other=0.0)
            of_entries = of_written + of_channel + at[:, None] * (heads * V) + in_v[None, :]
            written = tl.load(of_entries, mask=(new < 0)[:, None] & v_mask[None, :], other=0.0)
            values, gates, heard, fresh = none, none, none, none  # of each token
            for t in tl.static_range(TOKENS):
                of_v = v_ptr + row * stride_v_row + t * stride_v_token + of_channel + in_v
                values += (tl.load(of_v, mask=v_mask, other=0.0).to(tl.float32),)
                gates += (tl.sum(tl.where(this, decays[t], 0.0), 0),)
            older = tl.sum(tl.where(this[None, :], later, 0.0), 1)
            oldest = tl.sum(tl.where(this, decay, 0.0), 0)
            if DOTS:  # what the state and the entries say to each token's key and query
                left = tl.full([2 * BLOCK_T], 1.0, tl.float32)
                for t in tl.static_range(TOKENS):
                    left *= tl.where(token >= t, gates[t], 1.0)
                old = times(scores * left[:, None] * older[None, :], written)
                sums = times(x, state) * (unit * left * oldest)[:, None] + old
                for r in tl.static_range(2 * TOKENS):
                    is_row = (both == r // 2 + r % 2 * BLOCK_T)[:, None]
                    heard += (tl.sum(tl.where(is_row, sums, 0.0), 0),)
            else:  # each thread first adds its own products
                left = 1.0
                for r in tl.static_range(2 * TOKENS):
                    left *= gates[r // 2] if r % 2 == 0 else 1.0
                    old = tl.sum(written.to(tl.float32) * (seen[r] * older)[:, None], 0)
                    heard += ((tl.sum(state.to(tl.float32) * rows[r], 0) * oldest + old) * left,)
            for t in tl.static_range(TOKENS):
                for r in tl.static_range(2):
                    total = heard[2 * t + r]
                    for s in tl.static_range(t + r):
                        after_it = met[(2 * t + r) * TOKENS + s]
                        for u in tl.static_range(s + 1, t + 1):
                            after_it *= gates[u]
                        total += after_it * fresh[s].to(tl.float32)
                    if r == 0:
                        gain = tl.sum(tl.where(this, gains[t], 0.0), 0)
                        fresh += ((gain * (values[t] - total)).to(written_ptr.dtype.element_ty),)
                        of_fresh = of_written + of_channel + entry_at(position, t, ENTRIES) * (heads * V) + in_v
                        tl.store(of_fresh, fresh[t], mask=v_mask)
                    else:
                        of_out = out_ptr + (of_row + t * heads) * V + of_channel + in_v
                        tl.store(of_out, (total * scale).to(out_ptr.dtype.element_ty), mask=v_mask)
