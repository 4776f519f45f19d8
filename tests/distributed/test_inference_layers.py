"""``transformer_impl="inference_optimized"`` without a GPU: what is refused, and models of stand-ins on one and several ranks."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import pytest
import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore.state.weights import WeightSamples
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset, inference_layers
from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from megatron_hybrid_prefix.upstream.capabilities import form_of
from tests.distributed.test_expert_parallel import prompts, session
from tests.harness import inference_layers as stand_ins
from tests.harness.engine_helpers import LOG_PROB_NOISE
from tests.harness.lifecycle_helpers import EngineHarness, tokens
from tests.harness.workers import scenario
from tests.harness.workers.launch import need_ranks, run_play

NOISE, WRONG = LOG_PROB_NOISE, 1e-3
"""Most and least difference of log-probs: of answers that agree, and of those that do not."""
_OF_GDN = get_preset("tiny-gdn")
HAS_SWIGLU = form_of("inference-optimized experts") == "SwiGLU, too"
GDN = {field.name: getattr(_OF_GDN, field.name) for field in fields(_OF_GDN) if field.name.startswith("gdn_")}
# Without a cache, with one, with drafted tokens, and from wrong states of the last rank.
PARTS = {
    "off": session("legacy", cached=False),
    "on": session("async"),
    "drafts": session("async", num_speculative_tokens=1),
    "damaged": session("legacy", ["last: damage"], only_first=True),
}


def findings(model, rank):
    """Of one process, with the requests of a data-parallel rank."""
    return {name: scenario.play(model, **part, rank=rank) for name, part in PARTS.items()}


@pytest.fixture(scope="module")
def model(platform):
    with pytest.MonkeyPatch.context() as patch:
        stand_ins.put_stand_ins(patch.setattr)
        yield stand_ins.build(platform)


@pytest.fixture(scope="module")
def alone(model):
    return cache(lambda rank: findings(model, rank))


def difference(answers, others):
    """The largest one of log-probs."""
    pairs = zip(answers, others, strict=True)
    return max(abs(x - y) for a, b in pairs for x, y in zip(a["log_probs"], b["log_probs"], strict=True))


def from_hits(answers, others):
    """Of two lists, the answers that the first one has from cached tokens."""
    pairs = [(a, b) for a, b in zip(answers, others, strict=True) if a["cached_tokens"]]
    return [a for a, _ in pairs], [b for _, b in pairs]


def test_weights_are_those_of_other_layers(model, platform):
    """By name and value, but for norms, which are parts of other modules."""
    other = build_hybrid_model(stand_ins.CONFIG, seed=0, platform=platform, transformer_impl="local")
    own, others = dict(parameters_by_global_name(model)), dict(parameters_by_global_name(other))
    differ = own.keys() ^ others.keys()
    assert all("norm" in name for name in differ) and len(differ) == 8
    assert sum(".local_experts." in name for name in own) == 2 * 3 * 8
    for name in own.keys() & others.keys():
        assert torch.equal(own[name], others[name]), name


def test_answers_are_those_of_other_layers(platform, alone):
    other = build_hybrid_model(stand_ins.CONFIG, seed=0, platform=platform, transformer_impl="local")
    assert difference(alone(0)["off"]["answers"], findings(other, 0)["off"]["answers"]) < NOISE


@pytest.mark.skipif(not HAS_SWIGLU, reason="this megatron refuses it")
def test_experts_with_a_gate_give_the_answers_of_other_layers(model, platform):
    """`model` has put the stand-ins."""
    gated = replace(stand_ins.CONFIG, activation="swiglu")
    found = findings(stand_ins.build(platform, gated), 0)
    others = findings(build_hybrid_model(gated, seed=0, platform=platform, transformer_impl="local"), 0)
    off, on = found["off"]["answers"], found["on"]["answers"]
    assert difference(off, others["off"]["answers"]) < NOISE
    assert sum(answer["cached_tokens"] > 0 for answer in on) >= len(on) - 2
    assert difference(off, on) < NOISE


def test_hits_say_what_a_computed_prompt_says(alone):
    found = alone(0)
    off, on = found["off"]["answers"], found["on"]["answers"]
    assert sum(answer["cached_tokens"] > 0 for answer in on) >= len(on) - 2
    assert difference(off, on) < NOISE
    assert difference(off, found["drafts"]["answers"]) < NOISE
    damaged, right = from_hits(found["damaged"]["answers"], off[: len(found["damaged"]["answers"])])
    assert difference(damaged, right) > WRONG


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (2, 1), (2, 2), (2, 4)])
def test_several_ranks_say_what_one_says(tp, ep, alone, tmp_path):
    """Sequence-parallel where TP is above 1; all ranks exchange tokens, whatever requests they serve."""
    need_ranks(max(tp, ep))
    play = {
        "sizes": {"tp": tp, "ep": ep, "etp": 1},
        "model": {"kind": "inference"},
        "parts": PARTS | {"shard": ["shard"]},
    }
    found = run_play(tmp_path, play, max(tp, ep))
    for number, rank in enumerate(found):
        right = alone(number // tp)["off"]["answers"]
        assert rank["shard"]["sequence_parallel"] == (tp > 1)
        assert difference(rank["off"]["answers"], right) < NOISE
        assert difference(rank["on"]["answers"], right) < NOISE
        assert difference(rank["drafts"]["answers"], right) < NOISE
        assert [a["cached_tokens"] for a in rank["on"]["answers"]] == [
            a["cached_tokens"] for a in alone(number // tp)["on"]["answers"]
        ]
    damaged, right = from_hits(found[-1]["damaged"]["answers"], right[: len(prompts(number // tp))])
    assert difference(damaged, right) > WRONG


def test_buffers_of_the_first_forward_are_no_new_weights(model):
    """Or else the first idle time would empty the cache. A change of an expert is noticed."""
    experts = [module for module in model.modules() if hasattr(module, "_concatenated_weights_built")]
    for module in experts:  # as before a first forward
        module._buffers.clear()
        module._concatenated_weights_built = False
    samples = WeightSamples(model)
    EngineHarness(model, max_requests=2).send(tokens(0, 9, seed=3), count=1)
    assert sum(bool(module._buffers) for module in experts) == 2  # not those that draft
    assert samples.changed(experts=False) is None
    experts[0]._fc1_weight[3].mul_(1.5)
    assert "linear_fc1.weight3" in samples.changed(experts=False)
    experts[0]._fc1_weight[3].div_(1.5)


def refusal(platform, config=stand_ins.CONFIG, **overrides):
    """The one line that refuses to build such a model."""
    with pytest.raises(ValueError, match=r"^transformer_impl='inference_optimized' ") as error:
        stand_ins.build(platform, config, **overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


RELU2 = "computes experts with activation='relu2'"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (GDN | {"layer_pattern": "MGE*", "activation": "swiglu"}, "Gated DeltaNet layers; use 'transformer_engine'"),
        ({"residual_multiplier": 0.5}, "does not multiply residuals"),
        pytest.param(
            {"activation": "swiglu"},
            f"{RELU2} only in this megatron, not 'swiglu'; use 'transformer_engine'",
            marks=pytest.mark.skipif(HAS_SWIGLU, reason="this megatron computes it"),
        ),
        ({"activation": "gelu"}, " only in this megatron, not 'gelu'"),
        ({"dtype": "float32"}, "computes experts in bfloat16 only, not float32; use 'local'"),
        ({"moe_router_topk": 2, "moe_router_groups": 4, "moe_router_topk_groups": 2}, "choose experts by groups"),
    ],
)
def test_what_these_layers_do_not_compute_is_refused(platform, monkeypatch, changes, message):
    monkeypatch.setattr(inference_layers, "EXPERTS_DTYPE", "bfloat16")
    said = refusal(platform, replace(stand_ins.CONFIG, **{"dtype": "bfloat16"} | changes))
    assert message in said and ("gelu" not in message or RELU2 in said)


def test_layouts_that_are_refused(platform):
    said = refusal(replace(platform, tp=2, etp=2))
    assert "needs whole experts, not etp=2: call ensure_platform(etp=1) first" in said
    said = refusal(replace(platform, tp=2, etp=1), sequence_parallel=False)
    assert "with tp=2 needs sequence_parallel=True" in said


def test_exact_bits_are_refused(model, platform):
    without_experts = replace(stand_ins.CONFIG, layer_pattern="M*-", mtp_num_layers=0, mtp_layer_pattern="")
    dense = stand_ins.build(platform, without_experts)  # `model` has put the stand-ins
    with pytest.raises(
        ValueError, match="layers of transformer_impl='inference_optimized' are not covered; use 'local'"
    ):
        build_engine(dense, HybridPrefixConfig(mamba_gb=0.002, exact="bits"))
