"""`scripts/variant_env.py` and `scripts/test.sh` with a checkout of Megatron-LM. The checkouts are made up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.limits import HANG_S
from tests.harness.made_up_megatron import package, set_version

ROOT = Path(__file__).resolve().parents[2]
VARIANT_ENV = ROOT / "scripts" / "variant_env.py"
FIND = """
import importlib.metadata, importlib.util, json
from megatron_hybrid_prefix.upstream.version import find_megatron
places = {}
for name in ("megatron.core", "megatron.training", "torch", "gpt_builders"):
    spec = importlib.util.find_spec(name)
    places[name] = spec and list(spec.submodule_search_locations)[0]
installed = [d.version for d in importlib.metadata.distributions(name="megatron-core")]
print(json.dumps([places, installed, str(find_megatron().version)]))
"""


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder."""
    return subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=HANG_S)


def checkout(folder: Path, version: str = "0.19.2") -> Path:
    """A checkout of Megatron-LM. What is outside of ``megatron`` would hide our packages of the same names."""
    for name in ("megatron/training", "gpt_builders"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    return package(folder, version)


def test_of_a_checkout_megatron_is_there_and_nothing_else(tmp_path):
    megatron = checkout(tmp_path / "Megatron-LM")
    (tmp_path / "elsewhere").mkdir()
    made = []
    for version in ("0.19.2", "0.19.7"):  # as after a `git pull`
        set_version(megatron, version)
        answer = run(sys.executable, VARIANT_ENV, tmp_path / "variant", "--megatron", megatron, folder=tmp_path)
        assert answer.returncode == 0, answer.stderr
        made.append((tmp_path / "variant" / ".mhp-variant").stat().st_mtime_ns)
        answer = run(answer.stdout.strip(), "-c", FIND, folder=tmp_path / "elsewhere")
        assert answer.returncode == 0, answer.stderr
        places, installed, found = json.loads(answer.stdout)
        for name in ("megatron.core", "megatron.training"):
            assert Path(places[name]).resolve() == megatron / name.replace(".", "/")
        assert places["torch"] and places["gpt_builders"] is None
        assert installed == [], "the wheel is left out, with its metadata"
        assert found == version
    assert made[0] == made[1], "made once"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, "is no checkout of Megatron-LM: it has no megatron/core/package_info.py"),
        ("0.18.2", "is megatron-core 0.18.2, supported is >="),
    ],
)
def test_other_folders_are_refused_in_one_line(version, words, tmp_path):
    megatron = package(tmp_path / "Megatron-LM", version)
    answer = run(sys.executable, VARIANT_ENV, tmp_path / "variant", "--megatron", megatron, folder=tmp_path)
    assert answer.returncode == 2 and not answer.stdout
    assert answer.stderr.startswith(f"variant_env: {megatron} {words}") and answer.stderr.count("\n") == 1
    assert not (tmp_path / "variant").exists()


def test_checkouts_of_one_name_have_environments_of_their_own(tmp_path):
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    for name in ("scripts/test.sh", "scripts/variant_env.py", "constraints.txt"):
        shutil.copy(ROOT / name, project / name)
    ready = f"MHP_ROOT={project} MHP_VENV={project}/.venv MHP_PYTHON={sys.executable}\n"
    (project / "scripts" / "bootstrap.sh").write_text(ready)
    for owner in ("one", "another"):
        checkout(tmp_path / owner / "Megatron-LM")
        answer = run(project / "scripts" / "test.sh", "--megatron", "Megatron-LM", "--version", folder=tmp_path / owner)
        assert answer.returncode == 0 and f"pytest {pytest.__version__}" in answer.stdout + answer.stderr
    linked = sorted(
        link.resolve() for link in project.glob(".venv-megatron-Megatron-LM-*/lib/*/site-packages/megatron")
    )
    assert linked == [tmp_path / owner / "Megatron-LM" / "megatron" for owner in ("another", "one")]

    answer = run(project / "scripts" / "test.sh", "--megatron", "nowhere", folder=tmp_path)
    assert answer.returncode == 2 and "checkout of Megatron-LM" in answer.stderr and answer.stderr.count("\n") == 1
    answer = run(project / "scripts" / "test.sh", "--transformers", "newest", folder=tmp_path)
    assert answer.returncode == 2 and "not 'newest'" in answer.stderr and answer.stderr.count("\n") == 1
