"""Sampling that does not wait for the device draws what megatron's draws."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.inference.sampling.torch_sampling import TorchSampling

from megatron_hybrid_prefix.upstream.controller import QueuedSampling

VOCABULARY = 16
FLAGS = {"no_top_k": False, "no_top_p": False}
# Temperature, top-k and top-p of a request.
some_parameters = st.sampled_from([(1.0, 1, 0.0), (1.0, 0, 0.0), (0.7, 0, 0.9), (1.0, 3, 0.0)])


def step(requests):
    """A context in which these requests are active."""
    columns = dict(zip(("temperature", "top_k", "top_p"), map(list, zip(*requests, strict=True)), strict=True))
    dtypes = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32}
    room = [0, 0]  # rows of no request
    tables = {name: torch.tensor(values + room, dtype=dtypes[name]) for name, values in columns.items()}
    return SimpleNamespace(
        total_request_count=len(requests) + 1, paused_request_count=1, active_request_metadata=tables
    )


def samplings():
    return [kind(torch.Generator().manual_seed(5), VOCABULARY) for kind in (TorchSampling, QueuedSampling)]


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(some_parameters, min_size=1, max_size=6),
    rows_each=st.sampled_from([None, 1, 3]),
    gathered=st.booleans(),
    with_output=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_draws_what_megatrons_draws(requests, rows_each, gathered, with_output, seed, platform):
    context, count = step(requests), len(requests) * (rows_each or 1)
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count + 4, VOCABULARY, generator=generator)
    fields = dict(FLAGS)
    if gathered:
        fields["gather_indices"] = torch.randperm(count + 4, generator=generator)
    if rows_each is not None:
        fields["token_to_request_index"] = torch.arange(len(requests)).repeat_interleave(rows_each)
    found = []
    for sampling in samplings():
        output = torch.full((count,), -1) if with_output else None
        tokens = [sampling.sample_kernel(logits, count, context, output=output, **fields).clone() for _ in range(3)]
        assert not with_output or torch.equal(output, tokens[-1])
        found.append(torch.stack(tokens))
    assert torch.equal(*found)


@settings(max_examples=50, deadline=None)
@given(requests=st.lists(some_parameters, min_size=1, max_size=4), rows_each=st.sampled_from([None, 2]))
def test_log_probs_are_megatrons(requests, rows_each, platform):
    context, count = step(requests), len(requests) * (rows_each or 1)
    logits = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(count))
    of_rows = None if rows_each is None else torch.arange(len(requests)).repeat_interleave(rows_each)
    expected, found = (
        sampling.log_probs_kernel(logits, context, token_to_request_index=of_rows) for sampling in samplings()
    )
    assert torch.equal(expected, found)


def test_engines_have_it(platform):
    from megatron_hybrid_prefix import build_engine
    from megatron_hybrid_prefix.models import build_hybrid_model
    from tests.harness.engine_helpers import kv_budget

    model = build_hybrid_model("tiny", platform=platform)
    engine = build_engine(model, max_requests=2, **kv_budget(model, 8, block_tokens=64, max_requests=2))
    assert type(engine.controller._sampling._backend) is QueuedSampling


def test_no_rows_are_no_error(platform):
    """A step of asynchronous scheduling in which a prompt's chunk had no room: megatron's sampling raises."""
    nothing = step([(1.0, 1, 0.0)])
    nothing.total_request_count = nothing.paused_request_count
    megatrons, ours = samplings()
    logits = torch.zeros(4, VOCABULARY)
    of_drafts = {"token_to_request_index": torch.arange(0)}
    for fields in (FLAGS, FLAGS | of_drafts):
        assert ours.sample_kernel(logits, 0, nothing, **fields).shape == (0,)
    with pytest.raises((ValueError, RuntimeError)):
        megatrons.sample_kernel(logits, 0, nothing, **FLAGS)
