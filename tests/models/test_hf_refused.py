"""Each hybrid model of the installed transformers is run, or refused with the layer that is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from transformers import PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.lab.capacity import sizes_of
from megatron_hybrid_prefix.models import open_folder
from megatron_hybrid_prefix.models.hf.dimensions import WHY_REFUSED
from megatron_hybrid_prefix.models.hf.family import FAMILIES

# Layers whose cache is no keys and values alone; and what older modules say of theirs.
RECURRENT = {name for name, cache in DYNAMIC_LAYER_TYPE_MAPPING.items() if "LinearAttention" in cache.__name__}
SAYS_SO = re.compile(r"_is_stateful = True|def causal_conv1d_update")
NO_DEFAULT = {"gemma4_assistant", "nougat"}  # models that draft, and that read images
REASONS = {name: why for names, why in WHY_REFUSED.items() for name in names.split()}


def is_recurrent(config):
    """Whether a default model, or the language model in it, has layers with a recurrent state or a convolution."""
    parts = [each for each in (config, *vars(config).values()) if isinstance(each, PreTrainedConfig)]
    parts = [each for each in parts if each.base_config_key in ("", "text_config")]
    files = [Path(sys.modules[type(each).__module__].__file__) for each in parts]
    modules = [file.with_name(file.name.replace("configuration", "modeling")) for file in files]
    return any(RECURRENT & set(getattr(each, "layer_types", None) or ()) for each in parts) or any(
        module.is_file() and SAYS_SO.search(module.read_text()) for module in modules
    )


@pytest.mark.slow
def test_each_is_run_or_refused_with_the_layer_that_is_missing():
    found = {name for name in set(CONFIG_MAPPING) - NO_DEFAULT if is_recurrent(CONFIG_MAPPING[name]())}
    models = {name.removesuffix("_text") for name in found}
    run = {name.removesuffix("_text") for name in FAMILIES.names()}
    assert models >= {"lfm2", "rwkv", "minimax", "zaya", "inkling", "nemotron_h"}  # each sign
    assert models - run - REASONS.keys() == set(), "neither run nor refused with a reason"
    assert REASONS.keys() - models <= {"lara_mini", "inkling2_loop"}, "not in transformers; these are in 5.24"


def test_a_folder_and_a_plan_say_the_same(tmp_path):
    for name, why in [*REASONS.items(), *((f"{name}_text", why) for name, why in REASONS.items())]:
        (tmp_path / "config.json").write_text(f'{{"model_type": "{name}"}}')
        for read in (open_folder, sizes_of):
            with pytest.raises((ValueError, InputError), match=re.escape(f"'{name}' is not supported: {why}") + "$"):
                read(str(tmp_path))


def test_the_documents_have_the_table():
    rows = [f"| `{names.replace(' ', '`, `')}` | {why} |\n" for names, why in WHY_REFUSED.items()]
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert "".join(["\n| `model_type` | why |\n|---|---|\n", *rows, "\n"]) in text
