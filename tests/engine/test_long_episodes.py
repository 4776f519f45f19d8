"""`gpu/long_episodes.py` on the CPU: this package's cache has no tail of log-probs, and the test sees that of wrong states."""

from __future__ import annotations

import math
from functools import cache

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
from tests.harness.workers.launch import run_play

FORM = Form(longest=896, block=16, chunk=128, answer=8, turns=200)
SMALL = FORM._replace(longest=512, answer=32, turns=40)


def played(_model, preset, form, name, spoil=lambda engine: None, every=1):
    """Log-probs of an engine as `play` returns them, and whether it preempted; on several ranks, too."""
    source, form = source_of(preset, None, Form(*form)), Form(*form)
    agents = agents_of(form, source)
    engine = built(name, model_of(source), agents, form)
    spoil(engine)
    return play(engine, agents, every), getattr(engine, "evicted_request_count", 0)


@pytest.fixture(scope="module")
def episodes(platform):
    """Of a preset and a form: the tail of what `played` returns, that of caching off, the first agent, and its plain forward."""

    @cache
    def of(preset, form):
        source = source_of(preset, None, form)
        agents = agents_of(form, source)
        right = in_one_forward(model_of(source), agents, form)

        def tail(found):
            return tail_of(found, agents, right, form.longest)

        return tail, tail(played(None, preset, form, "off")[0]), agents[0], right[0]

    return of


def largest(tail):
    return max(one["largest"] for one in tail["position"])


def test_the_plain_forward_is_a_loop_over_tokens(episodes):
    _, _, agent, right = episodes("tiny", FORM)
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


def has_no_tail(of, found):
    tail, off, *_ = of
    own = tail(found)
    assert worse(own, off) == []
    assert max(largest(own), largest(off)) < 0.01


CASES = [
    ("ours", "tiny", FORM),
    ("ours, host", "tiny", FORM),
    ("ours, bits", "tiny-mtp", SMALL),
    ("ours, drafts", "tiny-mtp", SMALL),
]


@pytest.mark.parametrize(("name", "preset", "form"), CASES)
def test_ours_has_no_tail(episodes, name, preset, form):
    found, preempted = played(None, preset, form, name)
    has_no_tail(episodes(preset, form), found)
    assert (preempted > 0) == ("share" in ENGINES[name])


@pytest.mark.multi
def test_ranks_have_no_tail(episodes, tmp_path):
    """Tensor-parallel layers, experts of which each rank has its own, and a host tier to which preempted requests go."""
    part = ["tests.engine.test_long_episodes:played", "tiny-moe", SMALL, "ours, tight"]
    for rank in run_play(tmp_path, {"sizes": {"tp": 2, "ep": 2, "etp": 1}, "parts": {"ours": part}}):
        found, preempted = rank["ours"]
        has_no_tail(episodes("tiny-moe", SMALL), found)
        assert preempted > 0


@pytest.mark.parametrize(("name", "spoil"), [("megatron", lambda engine: None), ("ours", zeroed)])
def test_the_tail_of_wrong_states_is_seen(episodes, name, spoil):
    tail, off, *_ = episodes("tiny", FORM)
    found = tail(played(None, "tiny", FORM, name, spoil, every=2)[0])
    assert worse(found, off) != []
    assert largest(found) > 1 and math.exp(largest(found)) > 2
