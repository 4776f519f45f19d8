"""Speculative bookkeeping: against upstream's own PyTorch module where that is installed, and against loops."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix.platform.kernels import speculative


@pytest.fixture(scope="module")
def upstream():
    """The functions of upstream's `mtp_utils_pytorch.py`, run from its source: it needs torch only."""
    spec = find_spec("megatron")
    if spec is None:
        pytest.skip("megatron-core is not installed")
    rest = "core/inference/text_generation_controllers/mtp_utils_pytorch.py"
    path = next(p for root in spec.submodule_search_locations if (p := Path(root) / rest).exists())
    scope = {}
    exec(compile(ast.parse(path.read_text()), str(path), "exec"), scope)
    return scope


def tokens(seed, decode, prefill, drafts, padding=0):
    """Returns (fed, sampled): packed tokens of few kinds, so that drafts are often right."""
    g = torch.Generator().manual_seed(seed)
    n = decode * (drafts + 1) + prefill
    return torch.randint(0, 2, (n + padding,), generator=g), torch.randint(0, 2, (n,), generator=g)


def verify_by_loops(fed, sampled, decode, prefill, drafts):
    """Returns (last accepted packed index per request, accepted packed indices)."""
    last, accepted = [], set()
    for r in range(decode):
        base = r * (drafts + 1)
        n = 1
        while n <= drafts and fed[base + n] == sampled[base + n - 1]:
            n += 1
        accepted |= set(range(base, base + n))
        last.append(base + n - 1)
    for p in range(prefill):
        index = decode * (drafts + 1) + p
        accepted.add(index)
        last.append(index)
    return last, accepted


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1000),
    decode=st.integers(0, 4),
    prefill=st.integers(0, 3),
    drafts=st.integers(1, 4),
    padding=st.integers(0, 2),
    two_dims=st.booleans(),
)
def test_verify_accepts_the_leading_matches(seed, decode, prefill, drafts, padding, two_dims):
    fed, sampled = tokens(seed, decode, prefill, drafts, padding)
    last, mask, returned = speculative.verify_speculative_tokens(
        fed[None] if two_dims else fed, sampled, decode, prefill, drafts
    )
    expected, accepted = verify_by_loops(fed, sampled, decode, prefill, drafts)
    assert last.dtype == torch.int64
    assert last.tolist() == expected
    assert mask.dtype == torch.bool
    assert set(mask.nonzero().flatten().tolist()) == accepted
    assert torch.equal(returned, fed)


@pytest.mark.parametrize("seed", range(10))
def test_verify_and_prepare_agree_with_upstream(upstream, seed):
    decode, prefill, drafts = 3, 2, 3
    fed, sampled = tokens(seed, decode, prefill, drafts)
    mine = speculative.verify_speculative_tokens(fed, sampled, decode, prefill, drafts)
    theirs = upstream["verify_speculative_tokens"](fed, sampled, decode, prefill, drafts)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
    results = []
    for function in (speculative.prepare_next_forward_pass, upstream["prepare_next_forward_pass"]):
        buffers = [torch.full((7,), -9), torch.full((7,), -9), torch.full((7, drafts), -9), torch.full((7,), -9)]
        function(decode, sampled, torch.arange(len(sampled)) * 10, mine[0], mine[1], fed, *buffers, drafts)
        results.append(buffers)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1000), decode=st.integers(0, 4), prefill=st.integers(0, 3), drafts=st.integers(1, 3))
def test_prepare_fills_the_rows_of_active_requests_only(seed, decode, prefill, drafts):
    fed, sampled = tokens(seed, decode, prefill, drafts)
    last, mask, _ = speculative.verify_speculative_tokens(fed, sampled, decode, prefill, drafts)
    rows = torch.arange(100, 100 + len(sampled), dtype=torch.int32)
    newest, positions = torch.full((9,), -9), torch.full((9,), -9, dtype=torch.int32)
    kept, counts = torch.full((9, drafts), -9), torch.full((9,), -9)
    speculative.prepare_next_forward_pass(
        decode, sampled, rows, last, mask, fed, newest, positions, kept, counts, drafts
    )
    for r in range(9):
        if r < decode + prefill:
            assert newest[r] == sampled[last[r]]
            assert positions[r] == rows[last[r]]
        else:
            assert newest[r] == positions[r] == -9
        if r < decode:
            base = r * (drafts + 1)
            n = int(last[r]) - base
            assert counts[r] == n
            assert kept[r].tolist() == [*fed[base + 1 : base + 1 + n].tolist(), *[-1] * (drafts - n)]
        else:
            assert counts[r] == -9
            assert (kept[r] == -9).all()


@pytest.mark.parametrize("current_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_states_are_rolled_back_to_the_accepted_token(upstream, current_dtype, num_layers):
    intermediate = torch.randn(2, 5, 3, 4, 2)
    current = torch.full((2, 5, 4, 2), float("nan"), dtype=current_dtype)
    theirs = current.clone()
    args = (torch.tensor([0, 1, 0]), torch.tensor([3, 2, 0]), torch.tensor([2, 1, 0]), num_layers)
    speculative.mamba_state_selective_copy(intermediate, current, *args)
    upstream["mamba_state_selective_copy"](intermediate, theirs, *args)
    assert torch.equal(current.nan_to_num(9.0), theirs.nan_to_num(9.0))
    for layer in range(num_layers):
        assert torch.equal(current[layer, 3], intermediate[layer, 3, 2].to(current_dtype))
    assert current[:, 2].isnan().all()  # a prefill request


def test_a_prefill_request_needs_no_slot_but_a_decode_request_does():
    intermediate, current = torch.randn(1, 2, 2, 3), torch.zeros(1, 2, 3)
    one = torch.tensor([1])
    speculative.mamba_state_selective_copy(intermediate, current, one, torch.tensor([-1]), one, 1)
    assert (current == 0).all()
    with pytest.raises(IndexError, match="slot -1"):
        speculative.mamba_state_selective_copy(intermediate, current, torch.tensor([0]), torch.tensor([-1]), one, 1)


def test_no_requests():
    empty = torch.zeros(0, dtype=torch.int64)
    last, mask, _ = speculative.verify_speculative_tokens(empty, empty, 0, 0, 2)
    assert last.shape == mask.shape == (0,)
    speculative.prepare_next_forward_pass(0, empty, empty, last, mask, empty, empty, empty, empty[:, None], empty, 2)
    speculative.mamba_state_selective_copy(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 1), empty, empty, empty, 1)
