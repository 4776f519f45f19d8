"""Presets, layouts, and the long memory of ``tiny``, which the exactness tests need to notice a wrong state."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TENorm
from megatron.core.transformer.mlp import MLP

from megatron_hybrid_prefix.lab.budget import parameter_count
from megatron_hybrid_prefix.models import PRESETS, build_hybrid_model, get_preset
from megatron_hybrid_prefix.models.build import _layer_specs, _transformer_impl
from megatron_hybrid_prefix.models.config import split_into_stages
from megatron_hybrid_prefix.ops.elementwise import SwiGLU
from tests.harness.engine_helpers import LOG_PROB_NOISE, NOISES, assert_matches, random_tokens
from tests.harness.naive_model import NaiveHybridModel, local_weights


@pytest.mark.parametrize("model_name", ["tiny", "tiny_mixed", "tiny_qwen3_next"])
def test_no_later_token_changes_what_the_reference_says(request, model_name):
    """`NaiveHybridModel.log_probs` takes what it knows of a longer sequence."""
    model = request.getfixturevalue(model_name)
    reference, tokens = NaiveHybridModel(model, model.hybrid_config), random_tokens(100, seed=5)
    whole = reference.logits(tokens)
    torch.testing.assert_close(reference.logits(tokens[:70]), whole[:70], rtol=0, atol=1e-10)
    known = reference.log_probs(tokens)
    assert reference.log_probs(tokens[:70]).equal(known[:70])
    assert not reference.log_probs([*tokens[:69], 511 - tokens[69]]).equal(known[:70])


@pytest.mark.parametrize(("preset", "boundary"), [("tiny", 128), ("tiny", 256), ("tiny_gdn", 64), ("tiny_gdn", 256)])
def test_both_state_components_have_long_memory(request, preset, boundary):
    model = request.getfixturevalue(preset)
    reference = NaiveHybridModel(model, model.hybrid_config)
    for seed in range(1 if preset == "tiny" else 3):
        tokens = random_tokens(boundary + 304, seed=boundary + seed)
        right = reference.log_probs(tokens)
        without_state = (reference.log_probs(tokens, zero_ssm_at=boundary) - right).abs()
        without_conv = (reference.log_probs(tokens, zero_conv_at=boundary) - right).abs()
        # The log-prob of the best token, as a test compares it, at each of the next positions.
        best = right.argmax(-1, keepdim=True)
        assert without_state.gather(1, best)[boundary : boundary + 8].min() >= 1e-3
        assert without_conv.gather(1, best)[boundary : boundary + 3].min() >= 1e-3
        assert without_state[boundary + 300].max() >= 1e-3


def test_the_first_boundary_of_a_prompt_matters_to_its_last_token_in_tiny_gdn(tiny_gdn):
    reference = NaiveHybridModel(tiny_gdn, tiny_gdn.hybrid_config)
    for seed in range(6):
        tokens = random_tokens(600, seed=seed)
        right, wrong = reference.log_probs(tokens)[-1], reference.log_probs(tokens, zero_ssm_at=64)[-1]
        assert (right - wrong)[right.argmax()].abs() >= 0.01


@pytest.mark.parametrize("preset", ["tiny", "tiny-gdn", pytest.param("tiny-moe", marks=pytest.mark.slow)])
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


def test_what_follows_a_tie_of_experts_may_differ_and_nothing_else(tiny_mixed):
    """One token is made to have two experts of the same score: rounding chooses, so what follows is not compared."""
    reference, tokens, tie = NaiveHybridModel(tiny_mixed, tiny_mixed.hybrid_config), random_tokens(150, seed=3), 120
    assert reference.router_margins(tokens).min() > NOISES
    tied, routed = NaiveHybridModel(tiny_mixed, tiny_mixed.hybrid_config), []
    experts = tied._experts
    tied._experts = lambda x, prefix: routed.append((x, prefix)) or experts(x, prefix)
    tied.logits(tokens)
    ((x, prefix),) = routed
    last, following = tied.router_scores[0][tie].topk(tiny_mixed.hybrid_config.moe_router_topk + 1).indices[-2:]
    router = tied.weights[f"{prefix}router.weight"]
    router[following] += (router[last] - router[following]) @ x[tie] * x[tie] / x[tie].square().sum()
    assert (tied.router_margins(tokens) <= NOISES).nonzero().flatten().tolist() == [tie]

    def check(model, prompt_tokens, error):
        row = model.log_probs(tokens[:prompt_tokens])[-1]
        answer = {"generated_tokens": [int(row.argmax())], "generated_log_probs": [float(row.max()) + error]}
        assert_matches(model, SimpleNamespace(prompt_tokens=tokens[:prompt_tokens], **answer))

    for model, prompt_tokens in ((reference, 150), (reference, tie), (tied, tie), (tied, tie + 1)):
        check(model, prompt_tokens, 0.0)
        if (model, prompt_tokens) == (tied, tie + 1):
            check(model, prompt_tokens, 0.1)
        else:
            with pytest.raises(AssertionError, match="a log-prob is off by"):
                check(model, prompt_tokens, 0.1)


@pytest.mark.parametrize(("model_name", "gated"), [("tiny_gdn", True), ("tiny", False)])
def test_gated_mlps_have_one_operation_for_their_activation(request, model_name, gated):
    model = request.getfixturevalue(model_name)
    activations = [module.activation_func for module in model.modules() if isinstance(module, MLP)]
    assert activations and all(isinstance(each, SwiGLU) is gated for each in activations)


@pytest.mark.parametrize(
    "overrides",
    [
        {"activation_func_clamp_value": 0.01},
        {"activation_func": torch.nn.functional.gelu},
        {"gated_linear_unit": False},
        {"bias_activation_fusion": True},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_another_activation_of_the_caller_is_not_replaced(platform, overrides):
    model = build_hybrid_model("tiny-gdn", seed=0, platform=platform, **overrides)
    activations = [module.activation_func for module in model.modules() if isinstance(module, MLP)]
    assert activations and not any(isinstance(each, SwiGLU) for each in activations)
    if model.config.activation_func_clamp_value is not None or not model.config.gated_linear_unit:
        with pytest.raises(ValueError, match=r"^use_te_activation_func=True: these layers have SwiGLU only"):
            SwiGLU(model.config)


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
    qwen = PRESETS["qwen3-next-80b-a3b"]
    assert (qwen.num_layers, qwen.count("G"), qwen.count("*"), qwen.count("E")) == (96, 36, 12, 48)
    assert set(PRESETS["tiny-qwen3-next"].layer_pattern) == set(qwen.layer_pattern)
    for name, layers, billions in (
        ("nemotron-3-nano-30b-a3b", (52, 23, 6, 23), 31.6),
        ("nemotron-3-super-120b-a12b", (88, 40, 8, 40), 123.6),  # 120.7 and the head that drafts
    ):
        config = PRESETS[name]
        assert (config.num_layers, *map(config.count, "M*E")) == layers
        assert round(parameter_count(config) / 1e9, 1) == billions
        assert set(PRESETS["tiny-nemotron-3"].layer_pattern) == set(config.layer_pattern)
    granite = PRESETS["granite-4.0-h-small"]
    assert (granite.num_layers, granite.count("M"), granite.count("*"), granite.count("E")) == (80, 36, 4, 40)
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
        ({"layer_pattern": "M*E"}, "moe_router_topk=2 from 2 to num_moe_experts=0"),
        ({"layer_pattern": "M*E", "num_moe_experts": 4, "moe_router_topk": 1}, "E layers need moe_router_topk=1"),
        ({"moe_ffn_hidden_size": -1}, "must not be negative"),
        *(
            ({name: value}, f"^{name}={value}: must be above 0")
            for name in (
                *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
                "gdn_beta_scale",
            )
            for value in (0.0, -1.0, float("inf"), float("nan"))
        ),
        ({"num_moe_experts": -1}, "^num_moe_experts=-1: must not be negative"),
        ({"moe_latent_size": -1}, "^moe_latent_size=-1: must not be negative"),
        ({"mtp_use_repeated_layer": True}, "^mtp_use_repeated_layer=True needs mtp_num_layers$"),
        ({"mtp_num_layers": -1}, "^mtp_num_layers=-1: must not be negative"),
        *(
            ({name: 0}, f"^{name}=0: must be at least 1$")
            for name in (
                *("hidden_size", "vocab_size", "max_sequence_length", "ffn_hidden_size"),
                *("num_attention_heads", "num_query_groups", "kv_channels"),
            )
        ),
        (
            {"layer_pattern": "M*", "mtp_num_layers": 1, "mtp_layer_pattern": "-", "ffn_hidden_size": 0},
            "^ffn_hidden_size=0",
        ),
        ({"layer_pattern": "M*E", "num_moe_experts": 4, "ffn_hidden_size": 0}, "^ffn_hidden_size=0"),
        ({"layernorm_epsilon": 0.0}, "^layernorm_epsilon=0.0: must be above 0"),
        ({"layernorm_epsilon": float("nan")}, "^layernorm_epsilon=nan: must be above 0"),
        ({"rotary_base": 0}, "^rotary_base=0: must be at least 1, or None"),
        (
            {"layer_pattern": "*", "mtp_num_layers": 1, "mtp_layer_pattern": "M*", "mamba_num_groups": 3},
            "mamba_num_heads=8 is not a multiple of mamba_num_groups=3",
        ),
        ({"rotary_fraction": 0.5}, "rotary_fraction=0.5 needs rotary_base"),
        ({"rotary_base": 10_000, "rotary_fraction": 0.2}, "rotary_fraction=0.2 of kv_channels=16: must be an even"),
        ({"rotary_base": 10_000, "rotary_fraction": 1.5}, "must be an even number of channels, from 2 to all"),
        ({"moe_shared_expert_gate": True}, "needs moe_shared_expert_intermediate_size"),
        ({"layer_pattern": "MG*"}, "G layers need gdn_num_key_heads=0 to be at least 1"),
        ({"mamba_state_dim": 0}, "M layers need mamba_state_dim=0 to be at least 1"),
    ],
)
def test_bad_dimensions_are_one_clear_line(changes, message):
    check_refusal("tiny", changes, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "relu2"}, "activation='relu2': with G layers use 'swiglu'"),
        ({"gdn_num_value_heads": 6}, "gdn_num_value_heads=6 is not a multiple of gdn_num_key_heads=4"),
        ({"gdn_value_head_dim": 0}, "G layers need gdn_value_head_dim=0 to be at least 1"),
        ({"mtp_num_layers": 1, "mtp_layer_pattern": "G*"}, "mtp_layer_pattern='G\\*': G layers cannot predict drafts"),
        ({"d_conv": 5}, "d_conv=5"),
        ({"gdn_beta_scale": 0.5}, "G layers need gdn_beta_scale=0.5 to be at least 1"),
        ({"gated_norm_epsilon": 0.0}, "gated_norm_epsilon=0.0: must be above 0"),
        (
            {"attention_post_norm": True, "layer_pattern": "GM*-"},
            r"attention_post_norm=True: only with G, \* and - layers",
        ),
    ],
)
def test_bad_dimensions_of_gated_delta_net_are_one_clear_line(changes, message):
    check_refusal("tiny-gdn", changes, message)


def check_refusal(preset, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        get_preset(preset, **changes)
    assert "\n" not in str(error.value)


def test_dimensions_of_layers_that_are_not_there_are_not_needed(platform):
    mamba = dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups"), 0)
    config = get_preset("tiny-gdn", layer_pattern="G*", **mamba)
    build_hybrid_model(config, seed=0, platform=platform)
    with pytest.raises(ValueError, match="tp=3 does not divide gdn_num_key_heads=4"):
        config.check_parallel(tp=3, pp=1)
    replace(config, mamba_num_groups=3, ffn_hidden_size=3, moe_ffn_hidden_size=3).check_parallel(tp=4, pp=1)
    get_preset("tiny-moe", ffn_hidden_size=0, moe_ffn_hidden_size=32).check_parallel(tp=4, pp=1)


def test_recurrent_layers_of_the_drafts_have_the_dimensions_that_were_asked_for(platform):
    config = get_preset("tiny", layer_pattern="*", mtp_num_layers=1, mtp_layer_pattern="M*")
    model = build_hybrid_model(config, seed=0, platform=platform)
    assert model.config.mamba_state_dim == config.mamba_state_dim


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("transformer_engine", "^transformer_impl='transformer_engine' needs a GPU"),
        (
            "inference_optimized",
            "^transformer_impl='inference_optimized' needs a GPU and an installed Transformer Engine",
        ),
        ("fast", "^transformer_impl='fast': use 'transformer_engine', 'local' or 'inference_optimized'$"),
    ],
)
def test_layers_that_this_machine_does_not_have_are_one_clear_line(platform, layers, message):
    with pytest.raises(ValueError, match=message):
        build_hybrid_model("tiny", platform=platform, transformer_impl=layers)


@pytest.mark.parametrize("layers", ["transformer_engine", "inference_optimized"])
def test_layers_without_norms_behind_them_are_not_chosen_and_refused(layers):
    platform, config = SimpleNamespace(has_transformer_engine=True), get_preset("olmo-hybrid-7b")
    assert _transformer_impl(None, platform, config) == "local"
    with pytest.raises(ValueError, match=f"^transformer_impl='{layers}' has no norms behind layers .*; use 'local'$"):
        _transformer_impl(layers, platform, config)


def test_layers_of_transformer_engine_normalise_queries_and_keys_where_the_model_does():
    """Megatron's spec of hybrid models has no such norms, and builds attention without them where a model asks for them."""
    for preset, wanted in (("tiny", (None, None)), ("tiny-qwen3-next", (TENorm, TENorm))):
        layers = _layer_specs(get_preset(preset), "transformer_engine").submodules
        attention = layers.attention_layer.submodules.self_attention.submodules
        assert (attention.q_layernorm, attention.k_layernorm) == wanted
        assert layers.mamba_layer.submodules.mixer.submodules.in_proj is TELayerNormColumnParallelLinear


def test_the_recompute_knows_the_names_of_fused_norms(tiny):
    class Fused(torch.nn.Module):
        def state_dict(self):
            return {new.get(name, name): value for name, value in right.items()}

    new = {
        "decoder.layers.0.norm.weight": "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        "decoder.layers.1.input_layernorm.weight": "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.2.pre_mlp_layernorm.weight": "decoder.layers.2.mlp.linear_fc1.layer_norm_weight",
    }
    right = local_weights(tiny)
    found = local_weights(Fused())
    assert not set(new) - set(right) and not set(new.values()) & set(found)
    assert found.keys() == right.keys() and all(found[name] is right[name] for name in right)


def test_unknown_presets_name_the_known_ones():
    with pytest.raises(ValueError, match="tiny, tiny-mtp, tiny-moe, tiny-gdn, tiny-qwen3-next, tiny-nemotron-3, small"):
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


@pytest.mark.parametrize(
    ("preset", "changes", "layout", "message"),
    [
        ("tiny", {}, {"tp": 3}, "^tp=3 does not divide mamba_num_groups=4"),
        ("tiny", {"vocab_size": 511}, {"tp": 2}, "^tp=2 does not divide vocab_size=511"),
        ("tiny", {"ffn_hidden_size": 129}, {"tp": 2}, "^tp=2 does not divide ffn_hidden_size=129"),
        ("tiny-gdn", {}, {"tp": 8}, "^tp=8 does not divide gdn_num_key_heads=4"),
        ("tiny-moe", {}, {"tp": 256}, "^tp=256 does not divide mamba_num_groups=4"),
        ("tiny-moe", {}, {"ep": 3}, "ep=3 does not divide num_moe_experts=4"),
        ("tiny-moe", {"moe_ffn_hidden_size": 31}, {"tp": 2}, "tp=2 does not divide moe_ffn_hidden_size=31"),
        ("tiny-moe", {"moe_ffn_hidden_size": 30}, {"tp": 4, "etp": 4}, "^tp=4 does not divide moe_ffn_hidden_size=30"),
        ("tiny-moe", {"moe_shared_expert_intermediate_size": 33}, {"tp": 2}, "divide moe_shared_expert_inter"),
        ("tiny-moe", {"num_query_groups": 6, "num_attention_heads": 12}, {"tp": 4}, "tp=4 is neither a divisor nor"),
        ("olmo-hybrid-7b", {"num_query_groups": 3}, {"tp": 2}, "^tp=2 is neither a divisor nor"),
        (
            "olmo-hybrid-7b",
            {"num_query_groups": 1},
            {"tp": 2},
            r"^tp=2 does not divide num_query_groups=1 \(attention_p",
        ),
        ("tiny", {}, {"pp": 3}, "^pp=3 is impossible: .*the model has 2"),
        ("tiny", {"layer_pattern": "M*-M*-|M-M-M-"}, {"pp": 2}, "every pipeline stage needs an attention layer"),
        ("tiny", {"layer_pattern": "M-M*-M-M-M-"}, {"pp": 2}, "^pp=2 is impossible"),
        ("tiny", {"tie_embeddings": True}, {"pp": 2}, "tied embeddings"),
        ("tiny", {}, {"tp": 0}, "^tp=0: must be at least 1"),
        ("tiny", {}, {"pp": 0}, "^pp=0: must be at least 1"),
        ("tiny-moe", {}, {"ep": 0}, "^ep=0: must be at least 1"),
        ("tiny", {}, {"ep": 2}, "^ep=2 needs E layers; layer_pattern='M\\*-M\\*-' has none"),
    ],
)
def test_impossible_layouts_are_refused(preset, changes, layout, message):
    with pytest.raises(ValueError, match=message) as error:
        get_preset(preset, **changes).check_parallel(**({"tp": 1, "pp": 1} | layout))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 4}])
def test_experts_at_any_tensor_parallel_size_and_fewer_heads_than_ranks(layout):
    get_preset("tiny-moe", num_query_groups=1).check_parallel(pp=1, **layout)


def test_whole_experts_have_any_width():
    get_preset("tiny-moe", moe_ffn_hidden_size=31).check_parallel(tp=2, pp=1, ep=2, etp=1)
