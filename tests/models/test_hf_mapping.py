"""Rules that make parameters of Hugging Face's tensors: parts are parts of the whole, and every row has its place."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state

from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.models.hf.dimensions import family_of
from megatron_hybrid_prefix.models.hf.family import FAMILIES
from megatron_hybrid_prefix.models.hf.mapping import Finish, Rule, Source
from megatron_hybrid_prefix.models.hf_weights import _belongs_here
from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from tests.harness.hf_families import MODELS
from tests.harness.hf_helpers import CONFIGS, NEMOTRON_H, NEMOTRON_H_EXPERTS, QWEN3_NEXT
from tests.harness.hf_state_dict import copy_hf_weights, hf_shapes, read


def rules_of(kind):
    return list(family_of(CONFIGS[kind], MODELS[kind].model_type).rules(CONFIGS[kind]))


def random_weights(kind):
    return {name: torch.rand(shape) for name, shape in hf_shapes(CONFIGS[kind], MODELS[kind].model_type).items()}


@st.composite
def rules(draw):
    """A rule, the tensors that it reads, and the whole parameter."""
    columns = draw(st.integers(1, 3))
    weights, sources, parts = {}, [], []
    for number, rows in enumerate(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))):
        stack = draw(st.sampled_from([(), (2,)]))
        value = torch.rand(*stack, rows, columns)
        at = draw(st.integers(0, 1)) if stack else None
        weights[str(number)] = value
        sources.append(Source(name=str(number), shape=tuple(value.shape), at=at))
        parts.append(value if at is None else value[at])
    whole, order = torch.cat(parts), None
    if draw(st.booleans()):
        order = np.array(draw(st.permutations(range(len(whole)))))
        whole = whole[order]
    finish = draw(st.sampled_from([None, Finish(apply=torch.neg, undo=torch.neg)]))
    rule = Rule(target="t", sources=tuple(sources), order=order, finish=finish)
    return rule, weights, whole if finish is None else finish.apply(whole)


class Noted:
    """A tensor that notes how many of its values are read."""

    def __init__(self, value):
        self.value, self.read = value, 0

    def __getitem__(self, where):
        found = self.value[where]
        self.read += found.numel()
        return found


@given(rules(), st.data())
def test_a_part_is_a_part_of_the_whole_and_nothing_else_is_read(case, data):
    rule, weights, whole = case
    assert rule.shape == tuple(whole.shape)
    assert torch.equal(read(rule, weights), whole)
    bounds = st.lists(st.integers(0, len(whole)), min_size=4, max_size=4).map(sorted)
    a, b, c, d = data.draw(bounds.filter(lambda found: found[0] < found[1]))
    noted = {name: Noted(value) for name, value in weights.items()}
    part = read(rule, noted, rows=[(a, b), (c, d)])
    assert torch.equal(part, torch.cat([whole[a:b], whole[c:d]]))
    assert sum(value.read for value in noted.values()) == part.numel()
    assert torch.equal(read(rule, weights, columns=(0, 1)), whole[:, :1])


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_row_of_every_tensor_has_one_place(kind):
    """A norm has two names, one of which a model has."""
    uses = dict[tuple[str, int | None], set[str]]()
    for rule in rules_of(kind):
        rows = sum(source.part_shape[0] for source in rule.sources)
        assert rule.order is None or sorted(rule.order.tolist()) == list(range(rows)), rule.target
        for source in rule.sources:
            uses.setdefault((source.name, source.at), set()).add(rule.target)
    for source, targets in uses.items():
        assert len(targets) == 1 or all("norm" in target for target in targets), (source, targets)
    assert {name for name, _ in uses} == set(random_weights(kind))


@pytest.mark.parametrize(
    ("preset", "model_type", "parameters", "name", "shape"),
    [
        ("qwen3-next-80b-a3b", "qwen3_next", 79_674_391_296, "47.mlp.experts.511.down_proj", (2048, 512)),
        ("qwen3.5-27b", "qwen3_5_text", 26_895_998_464, "62.linear_attn.in_proj_z", (48 * 128, 5120)),
        ("qwen3.5-35b-a3b", "qwen3_5_moe_text", 34_660_610_688, "39.mlp.experts.255.down_proj", (2048, 512)),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(preset, model_type, parameters, name, shape):
    """Without images and drafts: that of transformers' class with the published config.json."""
    shapes = hf_shapes(get_preset(preset), model_type)
    assert sum(map(math.prod, shapes.values())) == parameters
    assert shapes[f"model.layers.{name}.weight"] == shape


def test_granite_4_small_has_the_published_number_of_parameters():
    """Its files take 59.99 GiB, and its embedding is its output layer."""
    shapes = hf_shapes(get_preset("granite-4.0-h-small"), "granitemoehybrid")
    del shapes["lm_head.weight"]
    assert round(sum(map(math.prod, shapes.values())) * 2 / 2**30, 2) == 59.99
    assert shapes["model.layers.39.block_sparse_moe.output_linear.weight"] == (72, 4096, 768)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_model_gets_every_weight_of_either_spelling(platform, stacked):
    config = get_preset("tiny-qwen3-next")
    rules, generator = family_of(config, "qwen3_next").rules(config), torch.Generator().manual_seed(1)
    shapes = hf_shapes(config, "qwen3_next")
    weights = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    right = {rule.target: read(rule, weights) for rule in rules}
    if stacked:
        for layer in range(4):
            experts = f"model.layers.{layer}.mlp.experts."
            parts = [
                [weights.pop(f"{experts}{number}.{part}_proj.weight") for number in range(config.num_moe_experts)]
                for part in ("gate", "up", "down")
            ]
            gate, up, down = map(torch.stack, parts)
            weights |= {f"{experts}gate_up_proj": torch.cat([gate, up], dim=1), f"{experts}down_proj": down}
    model = build_hybrid_model(config, seed=0, platform=platform)
    copy_hf_weights(model, weights, config, "qwen3_next")
    for name, parameter in parameters_by_global_name(model):
        assert torch.equal(parameter, right[name]), name
    norm = dict(parameters_by_global_name(model))["decoder.final_norm.weight"]
    assert torch.equal(norm, weights["model.norm.weight"] + 1)


@pytest.mark.parametrize(
    ("config", "model_type", "message"),
    [
        (get_preset("tiny-gdn"), None, r"the nearest: olmo_hybrid has layers\[1\]="),
        (get_preset("tiny-gdn"), "nemotron_h", "nemotron_h: hybrid_override_pattern has 'G', none of M"),
        (get_preset("tiny-moe"), "nemotron_h", "nemotron_h: moe_shared_expert_intermediate_size is 0"),
        (
            replace(NEMOTRON_H, activation="gelu", rotary_base=10_000),
            "nemotron_h",
            r"nemotron_h has activation='relu2' \(not 'gelu'\), rotary_base=None \(not 10000\)$",
        ),
        (replace(NEMOTRON_H_EXPERTS, moe_router_score="softmax"), "nemotron_h", "has moe_router_score='sigmoid' .not"),
        (replace(QWEN3_NEXT, mtp_num_layers=1, mtp_layer_pattern="*"), "qwen3_next", "has mtp_num_layers=0 .not 1.*'."),
        (replace(QWEN3_NEXT, qk_norm=False), "qwen3_next", r"qwen3_next has qk_norm=True \(not False\)$"),
        (replace(QWEN3_NEXT, moe_shared_expert_gate=False), "qwen3_next", "qwen3_next has moe_shared_expert_gate=True"),
        (replace(QWEN3_NEXT, rotary_base=None, rotary_fraction=1.0), "qwen3_next", "has rotary_base=10000 .not None"),
        (QWEN3_NEXT, "bert", "model_type='bert': must be 'bamba' or .*'nemotron_h'"),
    ],
)
def test_models_of_no_family_are_one_clear_line(config, model_type, message):
    with pytest.raises(ValueError, match=message) as error:
        family_of(config, model_type)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_near_a_family_is_told_what_the_family_has(kind):
    """Of two families that are as near, the first. One may also refuse it."""
    config = CONFIGS[kind]
    family = "qwen3_next" if config.attention_output_gate else MODELS[kind].model_type
    gated, normed = config.attention_output_gate, config.qk_norm
    near = [
        ({"attention_output_gate": not gated}, f" has attention_output_gate={gated} (not {not gated})"),
        (
            {"qk_norm": not normed, "attention_output_gate": not gated},
            f" has attention_output_gate={gated} (not {not gated}), qk_norm={normed} (not {not normed})",
        ),
    ]
    if "M" in config.symbols:
        field = "layer_norm_epsilon" if family == "nemotron_h" else "rms_norm_eps"
        near += [({"layernorm_epsilon": 1e-6}, f": {field} is 1e-06: the norm in megatron's mixer has 1e-05")]
    if family in ("bamba", "granitemoehybrid"):
        near += [({"layer_pattern": config.layers + "**"}, f" has layers[9]={config.layers[1]!r} (not '*')")]
    for changes, what in near:
        with pytest.raises(ValueError) as error:
            family_of(replace(config, **changes))
        assert str(error.value) == f"no family has these dimensions; the nearest: {family}{what}"


def test_a_model_far_from_all_families_is_one_short_line():
    far = replace(
        QWEN3_NEXT,
        layer_pattern="*-MGE" * 50,
        **{name: getattr(NEMOTRON_H, name) for name in ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim")},
        **{"mamba_num_groups": 1, "mtp_num_layers": 2, "mtp_layer_pattern": 500 * "*", "moe_latent_size": 12},
        **{"attention_multiplier": 0.123456789, "embedding_multiplier": 9.87654321, "logits_scaling": 1 / 3},
    )
    drafting = replace(QWEN3_NEXT, mtp_num_layers=2, mtp_layer_pattern=500 * "*")
    for config, model_type in product((far, drafting), (None, *FAMILIES.names())):
        with pytest.raises(ValueError) as error:
            family_of(config, model_type)
        assert len(str(error.value)) <= 300 and "\n" not in str(error.value)


def test_a_model_of_other_dimensions_is_one_clear_line_and_keeps_its_weights(platform):
    config = get_preset("tiny-qwen3-next")
    weights = {name: torch.rand(shape) for name, shape in hf_shapes(config, "qwen3_next").items()}
    for changes, message in (
        ({"num_query_groups": 4}, "linear_qkv.weight of the model has shape"),
        ({"layer_pattern": "GEGEGE*EG-"}, "has a weight that qwen3_next lacks: decoder.layers.8"),
    ):
        model = build_hybrid_model(replace(config, **changes), seed=0, platform=platform)
        before = [value.clone() for value in model.parameters()]
        with pytest.raises(ValueError, match=message):
            copy_hf_weights(model, weights, config, "qwen3_next")
        assert all(map(torch.equal, model.parameters(), before))


# Of each kind of layer: the name of a layer that has it, the module, and what it would take.
TAKEN = [
    ("nemotron_h", "M", "norm", "model.layers.0.norm.weight"),
    ("nemotron_h", "M", "mixer.out_proj", "model.layers.0.mixer.out_proj.weight"),
    ("nemotron_h", "*", "input_layernorm", "model.layers.1.norm.weight"),
    ("nemotron_h", "-", "mlp.linear_fc2", "model.layers.2.mixer.down_proj.weight"),
    ("qwen3_next", "*", "self_attention.q_layernorm", "model.layers.1.self_attn.q_norm.weight"),
    ("qwen3_next", "G", "self_attention.out_norm", "model.layers.0.linear_attn.norm.weight"),
    ("qwen3_next", "E", "mlp.shared_experts", "model.layers.0.mlp.shared_expert.*"),
    ("qwen3_next", "E", "mlp.experts", "model.layers.0.mlp.experts.0.gate_proj.weight"),
    ("qwen3_5", "G", "self_attention.in_proj", "model.layers.0.linear_attn.in_proj_qkv.weight"),
    ("olmo_hybrid", "*", "output_norm", "model.layers.1.post_attention_layernorm.weight"),
    ("olmo_hybrid", "*", "self_attention.k_layernorm", "model.layers.1.self_attn.k_norm.weight"),
]


@pytest.mark.parametrize(("kind", "symbol", "path", "source"), TAKEN)
def test_a_tensor_that_no_parameter_takes_is_one_clear_line(platform, kind, symbol, path, source):
    config = CONFIGS[kind]
    model = build_hybrid_model(config, seed=0, platform=platform)
    weights = random_weights(kind)
    copy_hf_weights(model, weights, config, MODELS[kind].model_type)
    *modules, last = path.split(".")
    owner = model.decoder.layers[config.layer_pattern.index(symbol)]
    for name in modules:
        owner = getattr(owner, name)
    setattr(owner, last, None)
    before = [value.clone() for value in model.parameters()]
    with pytest.raises(ValueError, match=f"^no parameter of the model takes {source}.*: it has no decoder") as error:
        copy_hf_weights(model, {name: value + 1 for name, value in weights.items()}, config, MODELS[kind].model_type)
    assert "\n" not in str(error.value)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_with_fewer_layers_is_noticed(platform, kind):
    config = CONFIGS[kind]
    fewer = config.layer_pattern[: config.layer_pattern.index("*") + 2]  # whole layers of Hugging Face
    assert len(fewer) < len(config.layer_pattern)
    model = build_hybrid_model(replace(config, layer_pattern=fewer), seed=0, platform=platform)
    weights = random_weights(kind)
    with pytest.raises(
        ValueError, match=rf"^no parameter of the model takes model\.layers\..* no decoder\.layers\.{len(fewer)}\."
    ):
        copy_hf_weights(model, weights, config, MODELS[kind].model_type)


@pytest.mark.parametrize(("kind", "pp", "ep"), [("nemotron_h", 2, 1), ("qwen3_next", 1, 2), ("qwen3_next", 1, 4)])
def test_every_parameter_belongs_to_one_stage_and_experts_to_one_rank(monkeypatch, kind, pp, ep):
    config, places = CONFIGS[kind], dict[str, list[tuple[int, int]]]()
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: ep)
    first = 1
    for stage, symbols in enumerate(config.check_parallel(tp=1, pp=pp, ep=ep).split("|")):
        layers = [SimpleNamespace(layer_number=first + number) for number in range(len(symbols))]
        first += len(symbols)
        decoder = SimpleNamespace(layers=layers)
        model = SimpleNamespace(decoder=decoder, pre_process=stage == 0, post_process=stage == pp - 1)
        for rank in range(ep):
            monkeypatch.setattr(parallel_state, "get_expert_model_parallel_rank", lambda rank=rank: rank)
            belongs_here = _belongs_here(model, config)
            for rule in rules_of(kind):
                if belongs_here(rule.target):
                    places.setdefault(rule.target, []).append((stage, rank))
    for rule in rules_of(kind):
        ranks = 1 if ".local_experts." in rule.target else ep
        assert len(places[rule.target]) == ranks, rule.target
        assert len({stage for stage, _ in places[rule.target]}) == 1, rule.target


def test_a_tied_output_layer_is_the_embedding(platform):
    config = replace(NEMOTRON_H, tie_embeddings=True)
    model = build_hybrid_model(config, seed=0, platform=platform)
    weights = random_weights("nemotron_h")
    with pytest.raises(ValueError, match=r"^tie_embeddings=True, but the state dict has an lm_head\.weight: use tie"):
        copy_hf_weights(model, weights, config)
    del weights["lm_head.weight"]
    copy_hf_weights(model, weights, config)
    own = dict(parameters_by_global_name(model))["embedding.word_embeddings.weight"]
    assert torch.equal(own, weights["model.embeddings.weight"])


@pytest.mark.parametrize(
    ("kind", "name", "canonical"),
    [
        ("nemotron_h", "backbone.embeddings.weight", "model.embeddings.weight"),
        ("nemotron_h", "model.embeddings.weight", "model.embeddings.weight"),
        ("nemotron_h", "model.layers.0.backbone.weight", "model.layers.0.backbone.weight"),
        ("nemotron_h", "backbone.layers.0.backbone.weight", "model.layers.0.backbone.weight"),
        ("nemotron_h", "mtp.layers.0.norm.weight", "mtp.layers.0.norm.weight"),
        ("qwen3_5", "model.norm.weight", "model.norm.weight"),
        ("qwen3_5_moe", "model.language_model.norm.weight", "model.norm.weight"),
        ("qwen3_5_moe", "model.visual.patch_embed.proj.weight", None),
        ("qwen3_5", "mtp.layers.0.mlp.up_proj.weight", None),
        ("olmo_hybrid", "model.layers.0.attention_layer_norm.weight", "model.layers.0.input_layernorm.weight"),
        (
            "olmo_hybrid",
            "model.layers.0.feedforward_layer_norm.weight",
            "model.layers.0.post_attention_layernorm.weight",
        ),
    ],
)
def test_names_on_the_hub(kind, name, canonical):
    assert family_of(CONFIGS[kind], MODELS[kind].model_type).canonical(name) == canonical


def test_the_usual_attention_multiplier_needs_no_name():
    usual = replace(CONFIGS["granite"], attention_multiplier=None)
    assert family_of(usual, "granitemoehybrid").name == "granitemoehybrid"
