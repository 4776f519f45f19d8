"""A family from outside of the package: the one file that `docs/models.md` shows, and a folder of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_hybrid_prefix.cli import plan
from megatron_hybrid_prefix.models import build_hybrid_model, open_folder, register_family, save_hf_folder
from megatron_hybrid_prefix.models.hf.family import FAMILIES
from megatron_hybrid_prefix.plugins import PLUGINS_VARIABLE
from tests.harness.engine_helpers import unequal
from tests.harness.hf_helpers import NEMOTRON_H, config_json, make_folder
from tests.harness.limits import HANG_S
from tests.packaging.documents import DOCS, ROOT, fences

(SOURCE,) = (
    text for language, text in fences((DOCS / "models.md").read_text(encoding="utf-8")) if language == "python"
)
NAME = "tandem"
RENAMED = {
    "hybrid_override_pattern": "layers",
    "mamba_num_heads": "ssm_heads",
    "mamba_head_dim": "ssm_head_dim",
    "ssm_state_size": "ssm_state",
    "n_groups": "ssm_groups",
    "layer_norm_epsilon": "norm_eps",
}


@pytest.fixture
def plugged(tmp_path, monkeypatch):
    assert SOURCE.startswith(f"# {NAME}.py\n")
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(PLUGINS_VARIABLE, NAME)
    monkeypatch.setattr(FAMILIES, "_by_name", dict(FAMILIES._by_name))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield
    sys.modules.pop(NAME, None)


@pytest.fixture
def folder(tmp_path):
    """Tandem is Nemotron-H under other names. Returns a folder of it; that of Nemotron-H is beside it."""
    weights = make_folder(tmp_path / "nemotron_h")
    path = tmp_path / "Tandem-1B"
    path.mkdir()
    data = {RENAMED.get(name, name): value for name, value in config_json("nemotron_h").items()}
    (path / "config.json").write_text(json.dumps(data | {"model_type": NAME}))
    save_file({f"tandem.{renamed(name)}": weight for name, weight in weights.items()}, path / "model.safetensors")
    return path


def renamed(name):
    name = {"model.embeddings.weight": "embed.weight", "model.norm_f.weight": "norm.weight"}.get(name, name)
    name = re.sub(r"^model\.layers\.(\d+)\.", r"blocks.\1.", name)
    return re.sub(r"(up|down)_proj", r"\1", name)


def test_one_file_adds_a_family(plugged, folder, platform, tmp_path, capsys):
    assert open_folder(folder).config == NEMOTRON_H
    model = build_hybrid_model(hf=folder, platform=platform)
    right = build_hybrid_model(hf=folder.parent / "nemotron_h", platform=platform)
    assert unequal(model, right) == []
    assert plan.main(["--hf", str(folder), "--gpu-gb", "80"]) == 0
    assert "Tandem-1B" in capsys.readouterr().out


def test_its_dimensions_are_read_without_torch(plugged, folder):
    code = (
        "import sys; sys.modules.update(torch=None, megatron=None); from megatron_hybrid_prefix.models import open_folder; "
        "print(open_folder(sys.argv[1]).config.layer_pattern)"
    )
    path = os.pathsep.join(filter(None, (str(folder.parent), str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{NEMOTRON_H.layer_pattern}\n"), done.stderr[-3000:]


def test_its_models_are_saved_as_its_own(plugged, folder, platform, tmp_path):
    """Although Nemotron-H has such dimensions, too, and comes first."""
    model = build_hybrid_model(hf=folder, platform=platform)
    save_hf_folder(model, tmp_path / "saved", dtype="float32")
    data = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (data["model_type"], data["architectures"]) == (NAME, ["TandemForCausalLM"])
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert {f"tandem.{name}" for name in after} == set(before)
    assert all(torch.equal(before[f"tandem.{name}"], weight) for name, weight in after.items())
    model.hf_model_type = None  # as a model of no folder
    save_hf_folder(model, tmp_path / "other", dtype="float32")
    assert open_folder(tmp_path / "other").model_type == "nemotron_h"


def test_a_text_config_takes_the_place_of_the_outer_fields(plugged, folder):
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": NAME, "vocab_size": 1, "text_config": text}))
    assert open_folder(folder).config == NEMOTRON_H


def test_what_is_wrong_is_one_line(plugged, folder):
    data = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"layers": "MG"}, "layers is 'MG', no text of M"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"ssm_heads": None}, "ssm_heads is missing"),
        ({"model_type": "tandem2"}, "'tandem2' is not supported: it is none of bamba, .*, tandem; register_family"),
    ):
        (folder / "config.json").write_text(json.dumps(data | changes))
        with pytest.raises(ValueError, match=message) as error:
            open_folder(folder)
        assert str(error.value).startswith(f"{folder}/config.json: ") and "\n" not in str(error.value)


def test_a_name_that_is_taken(plugged):
    class Another(type(FAMILIES[NAME])):
        model_types = ("tandem2", "nemotron_h")

    with pytest.raises(ValueError, match="model_type='nemotron_h': registered already"):
        register_family(Another())
