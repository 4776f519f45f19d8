"""Speculative bookkeeping: against upstream's own PyTorch module where that is installed, and against loops."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
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


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1000),
    decode=st.integers(0, 4),
    prefill=st.integers(0, 3),
    drafts=st.integers(1, 4),
    padding=st.integers(0, 2),
    two_dims=st.booleans(),
)
def test_verify_and_prepare_agree_with_upstream(upstream, seed, decode, prefill, drafts, padding, two_dims):
    """Of a step's rows, more than there are requests, only those of requests are written."""
    assume(decode + prefill)  # see `test_no_requests`
    fed, sampled = tokens(seed, decode, prefill, drafts, padding)
    sizes = (decode, prefill, drafts)
    last, mask, returned = speculative.verify_speculative_tokens(fed[None] if two_dims else fed, sampled, *sizes)
    theirs = upstream["verify_speculative_tokens"](fed[: len(sampled)], sampled, *sizes)  # it takes no padding
    assert torch.equal(returned, fed) and last.dtype == torch.int64 and mask.dtype == torch.bool
    assert torch.equal(last, theirs[0]) and torch.equal(mask.nonzero(), theirs[1].nonzero())
    results = []
    for function in (speculative.prepare_next_forward_pass, upstream["prepare_next_forward_pass"]):
        buffers = [torch.full(shape, -9) for shape in ((9,), (9,), (9, drafts), (9,))]
        buffers[1] = buffers[1].int()
        rows = torch.arange(100, 100 + len(sampled), dtype=torch.int32)
        function(decode, sampled, rows, last, mask, fed, *buffers, drafts)
        results.append(buffers)
    assert all(map(torch.equal, *results))


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


def test_no_requests():
    empty = torch.zeros(0, dtype=torch.int64)
    last, mask, _ = speculative.verify_speculative_tokens(empty, empty, 0, 0, 2)
    assert last.shape == mask.shape == (0,)
    speculative.prepare_next_forward_pass(0, empty, empty, last, mask, empty, empty, empty, empty[:, None], empty, 2)
    speculative.mamba_state_selective_copy(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 1), empty, empty, empty, 1)
