"""Every field of transformers' config classes: it is honoured, or refused unless neutral, or has no effect on an answer.

The lists of `tests.harness.hf_families` are complete: a release of transformers with another field fails. Defaults are those of
the classes.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import transformers

from megatron_hybrid_prefix.lab.capacity import sizes_of
from megatron_hybrid_prefix.models import get_preset
from megatron_hybrid_prefix.models.hf.dimensions import config_json_of, dimensions_of, family_of
from tests.harness.hf_families import FIELDS, MODELS
from tests.harness.hf_helpers import CONFIGS, config_json

SHAPE_OF_AN_ANSWER = "what a call returns"
TRAINING = "training only"
IDS = "names of tokens: generation_config.json and the tokenizer have those that count"
SPEED = "how it is computed, not what"
NO_EFFECT = {
    "use_cache": SPEED, "pad_token_id": IDS, "bos_token_id": IDS, "eos_token_id": IDS, "attention_dropout": TRAINING,
    "hidden_dropout": TRAINING, "initializer_range": TRAINING, "num_logits_to_keep": SHAPE_OF_AN_ANSWER,
    "output_router_logits": SHAPE_OF_AN_ANSWER, "router_aux_loss_coef": TRAINING, "z_loss_coefficient": TRAINING,
    "use_mamba_kernels": SPEED, "chunk_size": SPEED, "mamba_chunk_size": SPEED,
}  # fmt: skip
# Fields without effect that transformers' modules read nevertheless.
READ = {
    *("pad_token_id", "attention_dropout", "initializer_range", "num_logits_to_keep", "output_router_logits"),
    *("router_aux_loss_coef", "z_loss_coefficient", "use_mamba_kernels", "chunk_size", "mamba_chunk_size"),
}
# Absent is the layer kind's choice here; transformers does not read it either.
ANOTHER_DEFAULT = {"mamba_ssm_cache_dtype"}


def fields_of(family):
    """Of the family's config class, without those of every model: names and defaults."""
    common = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    found = dataclasses.fields(getattr(transformers, family.config_class))
    return {field.name: field.default for field in found if field.name not in common}


def no_effect(family):
    return (NO_EFFECT.keys() & fields_of(family).keys()) | family.no_effect.keys()


def given(family, **changes):
    data = {**family.given, "model_type": family.model_type, "max_position_embeddings": 1024, **changes}
    return {name: value for name, value in data.items() if value is not ...}


def dimensions(family, **changes):
    return dimensions_of(given(family, **changes), "DIR/config.json")


def each(what):
    """A case for each entry of a list of every config class."""
    return [
        pytest.param(family, entry, id=f"{name}-{number if isinstance(entry, tuple) else entry}")
        for name, family in FIELDS.items()
        for number, entry in enumerate(getattr(family, what))
    ]


@pytest.fixture(params=FIELDS)
def family(request):
    return FIELDS[request.param]


def test_the_lists_are_complete(family):
    fields = fields_of(family)
    assert fields.keys() == family.honoured.keys() | family.refused.keys() | no_effect(family)
    assert not family.honoured.keys() & (family.refused.keys() | no_effect(family))
    assert family.among_others <= family.honoured.keys()


@pytest.mark.parametrize(("family", "name"), each("honoured"))
def test_a_field_that_is_honoured(family, name):
    value, ours = family.honoured[name]
    before, after = dimensions(family), dimensions(family, **family.together.get(name, {}), **{name: value})
    assert getattr(after, ours) != getattr(before, ours)
    assert value in (getattr(after, ours), {"rope_theta": getattr(after, ours)}) or name in family.among_others


@pytest.mark.parametrize(("family", "name"), each("refused"))
def test_a_field_that_is_refused(family, name):
    with pytest.raises(ValueError, match=rf"^DIR/config\.json: .*{name}") as error:
        dimensions(family, **{name: family.refused[name]})
    assert "\n" not in str(error.value)


def test_what_is_huge_is_one_line(family):
    huge = {"num_hidden_layers": 10**9, "hidden_size": 2**54, "vocab_size": 10**18}
    for name, value in ((name, huge[name]) for name in huge.keys() & family.given.keys()):
        with pytest.raises(ValueError, match=rf"^DIR/config\.json: [^\n]*{name}[^\n]*{value}[^\n]*$"):
            dimensions(family, **{name: value})


def test_fields_without_effect(family):
    module = Path(transformers.__file__).parent / "models" / family.modeling / f"modeling_{family.modeling}.py"
    source = module.read_text()
    for name in no_effect(family):
        for value in (0, 7, True, [0.1], "x"):
            assert dimensions(family, **{name: value}) == dimensions(family), name
        assert name in READ | family.read or f"config.{name}" not in source, name


def test_what_a_file_does_not_say_is_what_the_class_says(family):
    """A missing field is the class's default, or an error that names it."""
    required = set()
    for name, default in fields_of(family).items():
        others = family.absent_with.get(name, {})
        if name in ANOTHER_DEFAULT or default is dataclasses.MISSING:
            continue
        others = others | ({"num_attention_heads": 8} if name == "num_key_value_heads" else {})
        try:
            missing = dimensions(family, **others, **{name: ...})
        except ValueError as error:
            if name not in family.among_others:
                required.add(name)
                assert str(error) == f"DIR/config.json: {name} is missing"
            continue
        if default is not None or name not in family.among_others:
            assert dimensions(family, **others, **{name: default}) == missing, name
    assert {"hidden_size", "vocab_size", "num_attention_heads"} <= required


def test_a_rotary_base_that_the_file_does_not_say_is_that_of_the_class(family):
    if "rope_parameters" in family.honoured:
        theirs = getattr(transformers, family.config_class)().rope_parameters
        ours = dimensions(family, rope_parameters=...)
        assert (ours.rotary_base, ours.rotary_fraction) == (
            theirs["rope_theta"],
            theirs.get("partial_rotary_factor", 1.0),
        )


def test_the_defaults_of_olmo_hybrid_are_its_preset():
    """But for rotary embeddings, which a published file says are none."""
    data = transformers.OlmoHybridConfig(rope_parameters={"rope_theta": None}).to_dict()
    assert dimensions_of(data, "c") == get_preset("olmo-hybrid-7b")


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": ..., "head_dim": ...}, {"num_key_value_heads": None}])
def test_the_plan_reads_the_same(family, changes, tmp_path):
    data = given(family, num_attention_heads=8, **changes)
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert sizes_of(str(tmp_path)).config == dimensions_of(data, "c")


@pytest.mark.parametrize("heads", [{}, {"num_key_value_heads": None}])
def test_a_null_of_bamba_is_what_its_class_makes_of_it(heads):
    """The other classes take no null."""
    ours = dimensions(FIELDS["BambaConfig"], num_attention_heads=16, **{"num_key_value_heads": ..., **heads})
    assert ours.num_query_groups == transformers.BambaConfig(num_attention_heads=16, **heads).num_key_value_heads


@pytest.mark.parametrize(("family", "case"), each("old"))
def test_an_old_name(family, case):
    changes, name, value = case
    assert getattr(dimensions(family, **changes), name) == value


@pytest.mark.parametrize(("family", "case"), each("old_refused"))
def test_an_old_name_that_is_refused(family, case):
    changes, message = case
    with pytest.raises(ValueError, match=message):
        dimensions(family, **changes)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_saved_file_of_qwen3_5_has_no_names_of_qwen3_next(kind):
    saved = config_json_of(family_of(CONFIGS[kind], MODELS[kind].model_type), CONFIGS[kind])
    assert saved.keys() <= fields_of(MODELS[kind]).keys() | {"model_type", "architectures", "dtype"}


@pytest.mark.parametrize("kind", ["qwen3_5_images", "qwen3_5_moe_images"])
def test_fields_of_a_model_with_images(kind):
    """Its language model is the one of its text_config; what is beside that is of images."""
    data, of_images = config_json(kind), {"vision_config", "vision_start_token_id", "vision_end_token_id"}
    of_images |= {"image_token_id", "video_token_id"}
    assert fields_of(MODELS[kind]).keys() == {"text_config", "tie_word_embeddings"} | of_images
    text = {"max_position_embeddings": 2048, "dtype": "float32", **data["text_config"]}
    found = dimensions_of(data, "c")
    assert found == dimensions_of(text | {"model_type": f"{MODELS[kind].model_type}_text"}, "c")
    for name in of_images:
        assert dimensions_of(data | {name: 7}, "c") == found
    for changed in ({"tie_word_embeddings": True}, {"text_config": text | {"tie_word_embeddings": True}}):
        assert dimensions_of(data | changed, "c") == dataclasses.replace(found, tie_embeddings=True)
    for outer in ({"rope_theta": 77.0}, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"head_dim": 8}):
        inner = {"text_config": {name: text[name] for name in text.keys() - {"rope_parameters", "head_dim"}}}
        assert dimensions_of(data | inner | outer, "c") == dimensions_of(data | inner, "c")
    null = {"text_config": text | {"dtype": None}}  # the outer one counts
    assert dimensions_of(data | null | {"dtype": "float32"}, "c").dtype == "float32"
    for changed, message in (
        ({"text_config": None}, r"num_\w+ is missing"),
        ({"text_config": text | {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
    ):
        with pytest.raises(ValueError, match=f"^c: {message}"):
            dimensions_of(data | changed, "c")
