"""The kernels that only move data (cache append, extraction, rows): bit-exact, and nothing else is touched."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix.platform.kernels.extraction import scatter_intermediate_conv, scatter_intermediate_ssm
from megatron_hybrid_prefix.platform.kernels.kv_append import triton_append_key_value_cache
from megatron_hybrid_prefix.platform.kernels.rows import tensor_get_slice_after, tensor_masked_update, tensor_merge
from tests.kernels.places import NAN


def nan(*shape, dtype=torch.float32):
    """Returns a poisoned tensor."""
    return torch.full(shape, NAN, dtype=dtype)


def same(a, b):
    """Whether two tensors hold the same bits, NaN included."""
    return torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30))


def count(value):
    """Returns the one-element int32 tensor that upstream passes counts and positions in."""
    return torch.tensor([value], dtype=torch.int32)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_append_writes_each_token_to_its_place(cache_dtype):
    keys, values = torch.randn(6, 1, 2, 3), torch.randn(6, 1, 2, 3)
    cache = nan(2, 3, 4, 5, 2, 3, dtype=cache_dtype)
    block, position = torch.tensor([3, 3, 0, -1, 1, 2]), torch.tensor([1, 2, 4, 0, 0, 0])
    expected = cache.clone()
    for t in (0, 1, 2, 4):  # token 3 has no block, token 5 is beyond the count
        expected[0, 1, block[t], position[t]] = keys[t, 0].to(cache_dtype)
        expected[1, 1, block[t], position[t]] = values[t, 0].to(cache_dtype)
    triton_append_key_value_cache(1, keys, values, cache, 5, block, position)
    assert same(cache, expected)


@pytest.mark.parametrize("real", [0, 1, 3, 9])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_states_are_extracted_up_to_the_real_count(real, out_dtype):
    states, out = torch.randn(4, 2, 3, 5), nan(6, 2, 3, 5, dtype=out_dtype)
    chunks = torch.tensor([2, 0, 2, 3])
    expected = out.clone()
    for i in range(min(real, 4)):
        expected[i] = states[chunks[i]].to(out_dtype)
    scatter_intermediate_ssm(states, chunks, count(real), out)
    assert same(out, expected)


def test_indices_after_the_real_count_are_not_read():
    states, out = torch.randn(4, 2), nan(3, 2)
    scatter_intermediate_ssm(states, torch.tensor([1, 99, -7]), count(1), out)
    assert torch.equal(out[0], states[1])


@settings(max_examples=100, deadline=None)
@given(
    seq_len=st.integers(1, 9),
    d_conv=st.integers(2, 4),
    positions=st.lists(st.integers(0, 12), min_size=0, max_size=4),
    real=st.integers(0, 5),
)
def test_windows_are_extracted_with_clamped_indices(seq_len, d_conv, positions, real):
    storage = torch.randn(1, seq_len, 7)
    src = storage[:, :, 1:6]  # strided, as the split projection is
    out = nan(5, 5, d_conv)
    expected = out.clone()
    for i in range(min(real, len(positions))):
        for j in range(d_conv):
            expected[i, :, j] = src[0, min(max(positions[i] - d_conv + j, 0), seq_len - 1)]
    scatter_intermediate_conv(src, torch.tensor(positions, dtype=torch.int32), count(real), out, d_conv)
    assert same(out, expected)


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(0, 6), out_rows=st.integers(0, 6), pos=st.integers(0, 8))
def test_slice_after(rows, out_rows, pos):
    source, out = torch.randn(rows, 1, 3), nan(out_rows, 1, 3)
    expected = out.clone()
    for i in range(out_rows):
        if pos + i < rows:
            expected[i] = source[pos + i]
    tensor_get_slice_after(source, out, torch.tensor([pos, 99], dtype=torch.int32))
    assert same(out, expected)


@settings(max_examples=100, deadline=None)
@given(
    rows_a=st.integers(0, 5),
    rows_b=st.integers(0, 5),
    out_rows=st.one_of(st.none(), st.integers(0, 9)),
    pos=st.integers(0, 5),
)
def test_merge(rows_a, rows_b, out_rows, pos):
    pos = min(pos, rows_a)
    a, b = torch.randn(rows_a, 3), torch.randn(rows_b, 3)
    out = None if out_rows is None else nan(out_rows, 3)
    target = a if out is None else out
    expected = target.clone()
    for i in range(target.shape[0]):
        if i < pos:
            expected[i] = a[i]
        elif i < pos + rows_b:
            expected[i] = b[i - pos]
    tensor_merge(a, b, torch.tensor([pos, 99], dtype=torch.int32), output_tensor=out)
    assert same(target, expected)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_update_skips_padding(shape, dtype):
    states = torch.randn(5, *shape).to(dtype)
    before, new = states.clone(), torch.randn(4, *shape)
    new[1] = new[3] = NAN  # the rows of padding entries must not land anywhere, least of all in the last slot
    tensor_masked_update(states, torch.tensor([3, -1, 0, -1], dtype=torch.int32), new)
    for slot in range(5):
        expected = {3: new[0], 0: new[2]}.get(slot, before[slot]).to(dtype)
        assert torch.equal(states[slot], expected)


def test_masked_update_of_padding_only_and_of_a_view():
    states = torch.randn(3, 4, 2)
    before = states.clone()
    tensor_masked_update(states, torch.tensor([-1, -1]), nan(2, 4, 2))
    assert torch.equal(states, before)
    tensor_masked_update(states.transpose(1, 2), torch.tensor([1]), torch.zeros(1, 2, 4))
    assert (states[1] == 0).all()
    assert torch.equal(states[[0, 2]], before[[0, 2]])
