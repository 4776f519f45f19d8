"""`gpu/long_episodes.py` on the CPU: this package's cache has no tail of log-probs, and the test sees that of wrong states."""

from __future__ import annotations

import math

import pytest
import torch

from tests.gpu.long_episodes import (
    ENGINES,
    Form,
    agents_of,
    built,
    in_float64,
    in_one_forward,
    model_of,
    play,
    source_of,
    tail_of,
    worse,
)

FORM = Form(longest=1024, block=16, chunk=128, answer=8, turns=200)


@pytest.fixture(scope="module")
def tails(platform):
    """Tails of engines, and the plain forward's log-probs of the first agent."""
    source = source_of("tiny", None, FORM)
    agents = agents_of(FORM, source)
    right = in_one_forward(model_of(source), agents, FORM)

    def of(name, spoil=lambda engine: None):
        engine = built(name, model_of(source), agents, FORM)
        spoil(engine)
        return tail_of(play(engine, agents, ENGINES[name].get("every", 1)), agents, right, FORM.longest)

    return of, of("off"), agents[0], right[0]


def largest(tail):
    return max(one["largest"] for one in tail["position"])


def test_the_plain_forward_is_a_loop_over_tokens(tails):
    _, _, agent, right = tails
    (exact,) = in_float64(model_of(source_of("tiny", None, FORM)), [agent])
    assert (torch.tensor(exact) - torch.tensor(right)).abs().max() < 1e-3


def zeroed(engine):
    """Every state that a prompt resumes from is made zeros before it is read."""
    context = engine.context
    ready = context.transfer_bookkeeping_to_gpu

    def damaging(*args, **kwargs):
        result = ready(*args, **kwargs)
        for plan in context._step.plans():
            if plan.source_slot is not None:
                for tensor in context.shared_memory.state(plan.source_slot).values():
                    tensor.zero_()
        return result

    context.transfer_bookkeeping_to_gpu = damaging


@pytest.mark.parametrize("name", ["ours", "ours, host"])
def test_ours_has_no_tail(tails, name):
    of, off, *_ = tails
    found = of(name)
    assert worse(found, off) == []
    assert max(largest(found), largest(off)) < 0.01


@pytest.mark.parametrize(("name", "spoil"), [("megatron", lambda engine: None), ("ours", zeroed)])
def test_the_tail_of_wrong_states_is_seen(tails, name, spoil):
    of, off, *_ = tails
    found = of(name, spoil)
    assert worse(found, off) != []
    assert largest(found) > 1 and math.exp(largest(found)) > 2
