"""`gpu/long_episodes.py` on the CPU: this package's cache has no tail of log-probs, and the test sees that of wrong states."""

from __future__ import annotations

import math
from functools import cache, partial

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


def played(_, preset, form, name, spoil=lambda engine: None, every=1):
    """Log-probs as `play` returns them, and requests that the engine preempted; on several ranks, too."""
    form = Form(*form)
    source = source_of(preset, None, form)
    agents = agents_of(form, source)
    engine = built(name, model_of(source), agents, form)
    spoil(engine)
    return play(engine, agents, every), engine.evicted_request_count


@pytest.fixture(scope="module")
def episodes(platform):
    """Of a preset and a form: the tail of what `play` returns, that of caching off, the first agent, and its plain forward."""

    @cache
    def of(preset, form):
        source = source_of(preset, None, form)
        agents = agents_of(form, source)
        right = in_one_forward(model_of(source), agents, form)
        tail = partial(tail_of, agents=agents, right=right, longest=form.longest)
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


CASES = [
    ("ours", "tiny", FORM, None),
    ("ours, host", "tiny", FORM, None),
    ("ours, bits", "tiny-mtp", SMALL, None),
    ("ours, drafts", "tiny-mtp", SMALL, None),
    pytest.param("ours, tight", "tiny-moe", SMALL, {"tp": 2, "ep": 2, "etp": 1}, marks=pytest.mark.multi),
]


@pytest.mark.parametrize(("name", "preset", "form", "sizes"), CASES)
def test_ours_has_no_tail(episodes, tmp_path, name, preset, form, sizes):
    """Nor if running requests are preempted, and on ranks that each have their own experts."""
    tail, off, *_ = episodes(preset, form)
    part = [f"{__name__}:played", preset, form, name]
    ranks = run_play(tmp_path, {"sizes": sizes, "parts": {"ours": part}}) if sizes else [{"ours": played(*part)}]
    for found, preempted in (rank["ours"] for rank in ranks):
        own = tail(found)
        assert worse(own, off) == []
        assert max(largest(own), largest(off)) < 0.01
        assert (preempted > 0) == ("share" in ENGINES[name])


@pytest.mark.parametrize(("name", "spoil"), [("megatron", lambda engine: None), ("ours", zeroed)])
def test_the_tail_of_wrong_states_is_seen(episodes, name, spoil):
    tail, off, *_ = episodes("tiny", FORM)
    found = tail(played(None, "tiny", FORM, name, spoil, every=2)[0])
    assert worse(found, off) != []
    assert largest(found) > 1 and math.exp(largest(found)) > 2
