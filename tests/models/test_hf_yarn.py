"""YaRN: frequencies and the attention factor are those of transformers. test_hf_folder_parity.py compares logits."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from megatron.core.transformer.attention import SelfAttention
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.lab.capacity import sizes_of
from megatron_hybrid_prefix.mcore.state.fingerprint import Fingerprint
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset, open_folder
from megatron_hybrid_prefix.models.build import _yarn_embedding
from megatron_hybrid_prefix.models.hf.dimensions import config_json_of, dimensions_of, family_of
from tests.harness.hf_families import FIELDS
from tests.harness.named_models import YARN

ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}
PUBLISHED = ROPE | {"original_max_position_embeddings": 262144, "rope_theta": 10_000_000}  # on Qwen3-Next's model card
OTHERS = "linear", "dynamic", "longrope", "llama3", "proportional"
NO_YARN = {"yarn_factor": None, "yarn_original_length": 0}
# Names of a file; ROPE is in rope_parameters where they say no other. ``...`` takes a name away.
SPELLINGS = [
    {},
    {"rope_parameters": PUBLISHED},
    {"rope_parameters": ROPE | {"attention_factor": 1.5}},
    {"rope_parameters": ROPE | {"mscale": 0.7, "mscale_all_dim": 1.4, "mrope_section": [4, 2, 2]}},
    {"rope_parameters": ROPE | {"mscale": 0.7, "mscale_all_dim": 0}},
    {"rope_parameters": ROPE | {"beta_fast": 3, "beta_slow": 1.25}},
    *({"rope_parameters": ROPE | {"beta_fast": 3, "truncate": value}} for value in (False, None)),
    {"rope_parameters": ROPE | {"beta_fast": 0, "beta_slow": None}},
    {"rope_parameters": ROPE | {"factor": 1.5, "original_max_position_embeddings": 9}},
    {"rope_parameters": {name: ROPE[name] for name in ("rope_type", "factor", "rope_theta")}},
    {"rope_parameters": ..., "rope_scaling": {"type": "yarn", "factor": 8.0}, "rope_theta": 500},
    {"original_max_position_embeddings": 512},
]


@pytest.mark.parametrize("changes", SPELLINGS, ids=range(len(SPELLINGS)))
@pytest.mark.parametrize("name", ["Qwen3NextConfig", "Qwen3_5MoeTextConfig", "GraniteMoeHybridConfig", "BambaConfig"])
def test_a_file_has_the_frequencies_of_transformers(platform, name, changes):
    family, own = FIELDS[name], {"position_embedding_type": "rope", "max_position_embeddings": 2048}
    data = {**family.given, **own, "head_dim": 64, "rope_parameters": copy.deepcopy(ROPE), **copy.deepcopy(changes)}
    data = {key: value for key, value in data.items() if value is not ...}
    ours = dimensions_of(data | {"model_type": family.model_type}, "c")
    frequencies, attention = ROPE_INIT_FUNCTIONS["yarn"](
        getattr(transformers, name)(**data)
    )  # changes what it is given
    embedding = _yarn_embedding(ours)
    assert not [buffer for buffer in embedding.buffers() if buffer.numel() > 1000], "of all positions"
    found, factor = embedding(2)
    torch.testing.assert_close(found[1, 0, 0], torch.cat([frequencies, frequencies]), rtol=1e-6, atol=0)
    assert factor == pytest.approx(attention, rel=1e-12)
    assert ours.max_sequence_length == max(2048, int(ours.yarn_factor * ours.yarn_original_length))
    saved = config_json_of(family_of(ours, family.model_type), ours)
    assert dimensions_of(saved, "c") == replace(ours, chunk_size=128)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        *(({"rope_type": kind, "factor": 4.0}, f"rope_type '{kind}': only default and yarn") for kind in OTHERS),
        ({**ROPE, "factor": None}, "rope_parameters: factor is missing"),
        ({**ROPE, "factor": "4"}, "rope_parameters: factor is '4', not a number"),
        ({**ROPE, "factor": 1.0}, "yarn_factor=1.0: must be above 1"),
        ({**ROPE, "factor": float("inf")}, "yarn_factor=inf: must be above 1"),
        ({**ROPE, "original_max_position_embeddings": 0}, "yarn_factor=4.0 and yarn_original_length=0: give both"),
        ({**ROPE, "attention_factor": -1}, "yarn_attention_factor=-1.0: must be above 0"),
        ({**ROPE, "beta_slow": 40}, "yarn_beta_slow=40.0 must be above 0, and at most yarn_beta_fast=32.0"),
        ({**ROPE, "truncate": 1}, "rope_parameters: truncate is 1, neither true nor false"),
        ({**ROPE, "rope_theta": 1}, "yarn_factor=4.0 needs rotary_base=1 to be at least 2"),
        ({**ROPE, "long_factor": [1.0]}, "rope_parameters has long_factor, none of attention_factor, beta_fast, "),
        ({"rope_type": "default", "factor": 4.0}, "rope_parameters has factor, none of mrope_interleaved, "),
    ],
)
def test_a_file_that_cannot_be_run_is_one_line(tmp_path, rope, message):
    """Also of `plan`, which reads the file without torch."""
    data = {**FIELDS["Qwen3NextConfig"].given, "model_type": "qwen3_next", "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(data | {"rope_parameters": rope}))
    line = rf"^{tmp_path / 'config.json'}: {re.escape(message)}"
    for read in (open_folder, sizes_of):
        with pytest.raises((ValueError, InputError), match=line) as error:
            read(str(tmp_path))
        assert "\n" not in str(error.value)


def test_a_model_with_other_frequencies_finds_no_entry_of_this_one(platform):
    """Attention and drafting layers multiply by the factor; the name of shared entries says it, and every other field."""
    config = get_preset("tiny-mtp", rotary_base=500, **YARN)
    changes = [{}, NO_YARN, *({name: 2 * value} for name, value in YARN.items()), {"yarn_beta_slow": 2.0}]
    models = [build_hybrid_model(replace(config, **each), platform=platform) for each in changes]
    layers = [[each for each in model.modules() if isinstance(each, SelfAttention)] for model in models[:2]]
    assert [{each._yarn_concentration_factor for each in found} for found in layers] == [{1.3}, {1.0}]
    assert len({Fingerprint(model, "layout")() for model in models}) == len(models)


def test_fused_kernels_are_refused(platform):
    """They leave the factor out."""
    with pytest.raises(ValueError, match=r"^fused_single_qkv_rope=True: .* leave out yarn_attention_factor$"):
        build_hybrid_model(get_preset("tiny", rotary_base=500, **YARN), platform=platform, fused_single_qkv_rope=True)
