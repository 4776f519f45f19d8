"""Windows of the convolution against a loop in float64, with all memory that must not be read NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix.ops.conv_windows import conv_windows

NAN = float("nan")
DIM = 3


def by_loops(inputs, initial, sequences, starts, ends):
    """Slide each sequence's window over its inputs, one by one."""
    windows = []
    for sequence, start, end in zip(sequences, starts, ends, strict=True):
        window = initial[sequence].clone()
        for row in range(start, end):
            window = torch.cat([window[:, 1:], inputs[row, :, None]], dim=1)
        windows.append(window)
    return torch.stack(windows) if windows else initial[:0]


def run(inputs, initial, sequences, starts, ends):
    columns = (torch.tensor(column, dtype=torch.int64) for column in (sequences, starts, ends))
    return conv_windows(inputs, initial, *columns)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_windows_match_the_loop(data):
    """Spans shorter than the window, empty ones, any end within them, and padding."""
    d_conv = data.draw(st.sampled_from([2, 3, 4]), label="d_conv")
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=5), label="lengths")
    padding = data.draw(st.integers(0, 3), label="padding rows")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), label="seed"))
    first = [sum(lengths[:i]) for i in range(len(lengths))]
    wanted = [
        (sequence, first[sequence], first[sequence] + computed)
        for sequence, length in enumerate(lengths)
        for computed in data.draw(st.lists(st.integers(0, length), max_size=3), label=f"ends in {sequence}")
    ]
    wanted = data.draw(st.permutations(wanted), label="order")
    sequences, starts, ends = (list(column) for column in zip(*wanted, strict=True)) if wanted else ([], [], [])
    inputs = torch.randn(sum(lengths) + padding, DIM, generator=generator, dtype=torch.float64)
    initial = torch.randn(len(lengths), DIM, d_conv, generator=generator, dtype=torch.float64)
    right = by_loops(inputs, initial, sequences, starts, ends)

    # What no window may read: rows that are no input of it, columns that have left it.
    read_rows, read_columns = torch.zeros(len(inputs), dtype=torch.bool), torch.zeros(len(initial), d_conv).bool()
    for sequence, start, end in wanted:
        read_rows[max(start, end - d_conv) : end] = True
        read_columns[sequence, min(end - start, d_conv) :] = True
    inputs[~read_rows] = NAN
    initial.transpose(1, 2)[~read_columns] = NAN
    windows = run(inputs, initial, sequences, starts, ends)
    assert torch.equal(windows, right)  # copies: bit-equal
    assert windows.shape == (len(wanted), DIM, d_conv)


@pytest.mark.parametrize("d_conv", [2, 3, 4])
def test_short_spans_reach_back_by_hand(d_conv):
    initial = torch.arange(1.0, 1 + d_conv).repeat(2, 1, 1)  # the newest last
    inputs = torch.tensor([[10.0], [11.0], [12.0], [20.0]])
    windows = run(inputs, initial, [0, 0, 0, 1], [0, 0, 0, 3], [0, 1, 3, 4])
    before = [float(i) for i in range(1, 1 + d_conv)]
    assert windows[0, 0].tolist() == before
    assert windows[1, 0].tolist() == [*before[1:], 10.0]
    assert windows[2, 0].tolist() == [*before, 10.0, 11.0, 12.0][-d_conv:]
    assert windows[3, 0].tolist() == [*before[1:], 20.0]


def test_no_tokens_at_all():
    initial = torch.randn(2, DIM, 4)
    assert torch.equal(run(torch.empty(0, DIM), initial, [1, 0], [0, 0], [0, 0]), initial[[1, 0]])
    assert run(torch.empty(0, DIM), initial, [], [], []).shape == (0, DIM, 4)


def test_the_result_has_the_type_of_the_state_and_its_own_memory():
    inputs, initial = torch.randn(5, DIM, dtype=torch.float32), torch.randn(1, DIM, 4, dtype=torch.bfloat16)
    windows = run(inputs, initial, [0, 0], [0, 0], [2, 0])
    assert windows.dtype == torch.bfloat16
    assert torch.equal(windows[0, :, 2:], inputs[:2].T.bfloat16())
    windows.zero_()
    assert initial.abs().sum() > 0


@pytest.mark.parametrize("strided", [False, True])
def test_memory_may_be_strided(strided):
    """The mixer hands over a part of a wider projection, and states gathered from a pool."""
    wide = torch.randn(6, 2 * DIM)
    inputs = wide[:, DIM:] if strided else wide[:, DIM:].contiguous()
    initial = torch.randn(2, 4, DIM).transpose(1, 2) if strided else torch.randn(2, DIM, 4)
    columns = [0, 1], [0, 4], [4, 6]
    assert torch.equal(run(inputs, initial, *columns), by_loops(inputs, initial, *columns))
