"""Presets, layouts, and the long memory of ``tiny``, which the exactness tests need to notice a wrong state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.models import PRESETS, build_hybrid_model, get_preset
from megatron_hybrid_prefix.models.config import split_into_stages
from tests.harness.engine_helpers import LOG_PROB_NOISE, NOISES, greedy, random_tokens, run_to_end
from tests.harness.naive_model import NaiveHybridModel


@pytest.mark.parametrize("boundary", [128, 256])
def test_tiny_has_long_memory_in_both_state_components(tiny, boundary):
    reference = NaiveHybridModel(tiny, get_preset("tiny"))
    tokens = random_tokens(boundary + 304, seed=boundary)
    right = reference.log_probs(tokens)
    without_ssm = (reference.log_probs(tokens, zero_ssm_at=boundary) - right).abs()
    without_conv = (reference.log_probs(tokens, zero_conv_at=boundary) - right).abs()
    # The log-prob of the best token, as a test compares it, at each of the next eight positions.
    best = right.argmax(-1, keepdim=True)
    assert without_ssm.gather(1, best)[boundary : boundary + 8].min() >= 1e-3
    assert without_conv.gather(1, best)[boundary : boundary + 3].min() >= 1e-3
    assert without_ssm[boundary + 300].max() >= 1e-3


@pytest.mark.parametrize("preset", ["tiny", pytest.param("tiny-moe", marks=pytest.mark.slow)])
def test_rounding_is_far_below_what_a_wrong_state_changes(platform, preset):
    """The counterpart of the test above: the tolerance between two float32 runs covers noise, and nothing but noise."""
    model = build_hybrid_model(preset, seed=0, platform=platform)
    reference, most = NaiveHybridModel(model, model.hybrid_config), 0.0
    for seed, length in enumerate((3, 129, 600)):
        tokens = random_tokens(length, seed=seed)
        following = torch.tensor(tokens)[1:, None]
        noise, exact = reference.noise(tokens), reference.log_probs(tokens)
        for chosen in (following, exact[:-1].argmax(-1, keepdim=True)):
            most = max(most, float(noise[:-1].gather(1, chosen).max()))
    assert LOG_PROB_NOISE / 10 <= NOISES * most <= LOG_PROB_NOISE <= 1e-3 / 5


@pytest.mark.parametrize("component", ["mamba_ssm_states", "mamba_conv_states"])
def test_zeroing_a_live_state_shows_in_the_engine(tiny, component):
    def run(spoil):
        engine = build_engine(tiny, max_sequence_length=1024)
        finished: dict = {}
        engine.add_request(0, random_tokens(256, seed=9), greedy(3))
        run_to_end(engine, finished, steps=1)
        if spoil:
            getattr(engine.context, component).zero_()
        run_to_end(engine, finished)
        return finished[0].generated_log_probs

    right, spoiled = run(False), run(True)
    assert right[0] == spoiled[0]
    assert abs(right[1] - spoiled[1]) >= 1e-3


def test_tiny_is_small_and_depends_only_on_the_seed(platform):
    first = build_hybrid_model("tiny", seed=5, platform=platform)
    assert sum(value.numel() for value in first.parameters()) < 250_000
    again, other = build_hybrid_model("tiny", seed=5), build_hybrid_model("tiny", seed=6)
    for (name, a), (_, b), (_, c) in zip(
        first.named_parameters(), again.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert a.isfinite().all(), name
        constant = a.unique().numel() == 1
        assert constant or not torch.equal(a, c), name


def test_presets_have_the_published_dimensions():
    nemotron = PRESETS["nemotron-h-8b"]
    assert (nemotron.num_layers, nemotron.count("M"), nemotron.count("*"), nemotron.count("-")) == (52, 24, 4, 24)
    four = PRESETS["hybrid-4b"]
    assert (four.count("M"), four.count("*"), four.count("-")) == (13, 3, 13)
    assert PRESETS["tiny"].vocab_size >= 256
    assert PRESETS["tiny"].max_sequence_length >= 16384


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_pattern": "MX*"}, "use the symbols"),
        ({"dtype": "float16"}, "dtype="),
        ({"activation": "tanh"}, "activation="),
        ({"chunk_size": 100}, "power of two"),
        ({"d_conv": 5}, "d_conv=5"),
        ({"mamba_num_groups": 3}, "not a multiple"),
        ({"mtp_num_layers": 2}, "give both"),
        ({"mtp_num_layers": 1, "mtp_layer_pattern": "*X"}, "mtp_layer_pattern='\\*X'"),
        ({"layer_pattern": "M*E"}, "moe_router_topk=2 from 1 to num_moe_experts=0"),
    ],
)
def test_bad_dimensions_are_one_clear_line(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        get_preset("tiny", **changes)
    assert "\n" not in str(error.value)


def test_unknown_presets_name_the_known_ones():
    with pytest.raises(ValueError, match="tiny, tiny-mtp, tiny-moe, small"):
        get_preset("huge")


@given(st.text(alphabet="M*-", min_size=1, max_size=40), st.integers(1, 6))
def test_stages_keep_the_layers_and_each_has_attention(pattern, pp):
    possible = pattern.count("*") >= pp
    if not possible:
        with pytest.raises(ValueError, match="every pipeline stage needs an attention layer"):
            split_into_stages(pattern, pp)
        return
    stages = split_into_stages(pattern, pp).split("|")
    assert len(stages) == pp
    assert "".join(stages) == pattern
    assert all("*" in stage for stage in stages)


@pytest.mark.parametrize(("tp", "pp", "message"), [(3, 1, "tp=3 does not divide"), (1, 3, "pp=3 is impossible")])
def test_impossible_layouts_are_refused(tp, pp, message):
    with pytest.raises(ValueError, match=message):
        get_preset("tiny").check_parallel(tp=tp, pp=pp)


@pytest.mark.parametrize(
    ("layout", "message"), [({"tp": 1, "ep": 3}, "ep=3 does not divide"), ({"tp": 2}, "needs sequence parallelism")]
)
def test_impossible_layouts_of_experts_are_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        get_preset("tiny-moe").check_parallel(**({"pp": 1} | layout))
