"""The wheel in an environment that has PyTorch only; all else is from the index. Nothing is compiled; everything that needs no
GPU runs.

PyTorch, with the CUDA libraries that it brings, is linked: it is on the index as a wheel, which `scripts/bootstrap.sh`
installed at the same version. To unpack these 5 GB again takes longer than all else here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.cli.main import VERBS
from tests.harness.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("torch", "triton", "nvidia-*", "cuda-*")  # PyTorch and what only it needs


def run(*command: object, folder: Path, code: int = 0, path: Path | None = None) -> str:
    """Runs a command outside the repository, without this environment. Returns its output.

    Args:
        command: The words of the command.
        folder: Working directory.
        code: Expected exit code. If it is not 0, stderr is returned.
        path: Additional folder for modules.
    """
    unwanted = ("PYTHONPATH", "PIP_CONSTRAINT", "PIP_USER", "PIP_TARGET", "PIP_NO_BINARY", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted and "MAMBA" not in name}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment
        | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        | ({} if path is None else {"PYTHONPATH": str(path)}),
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == code, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stderr if code else done.stdout


def copy_of_the_sources(folder: Path) -> Path:
    """The sources of the wheel, copied because setuptools leaves its build folder beside them."""
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_hybrid_prefix", folder / "megatron_hybrid_prefix", ignore=ignored)
    return folder


def every_other_verb(command: Path, folder: Path) -> None:
    """All verbs except ``serve``, each with a small task."""
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": at, "input": "the same text " * 60}) + "\n" for at in range(3)))
    run(command, "replay", trace, "--json", folder / "replay.json", folder=folder)
    assert json.loads((folder / "replay.json").read_text())["reused_token_fraction"] > 0.5
    run(command, "plan", "tiny", "--cache-gb", 2, folder=folder)
    words = ["Hello", "--num-tokens-to-generate", "4", "--compare", "off", "--compare", "ours", "--json"]
    run(command, "generate", *words, folder / "answer.json", folder=folder)
    data = json.loads((folder / "answer.json").read_text())
    assert [request["tokens_equal"] for request in data["comparisons"][0]["requests"]] == [True]
    words = ("--requests", 3, "--repeats", 1, "--json", folder / "bench.json", "--plot", folder / "bench.png")
    run(command, "bench", "no_reuse", *words, folder=folder)
    found = json.loads((folder / "bench.json").read_text())
    assert {engine["status"] for engine in found["engines"].values()} == {"completed"}
    assert found["command"].startswith("hybrid-prefix bench no_reuse ") and (folder / "bench.png").is_file()


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel in a separate folder. Its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
    built = ("--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", folder)
    run(*pip, "wheel", *built, copy_of_the_sources(folder / "source"), folder=folder)
    (wheel,) = folder.glob("megatron_hybrid_prefix-*-py3-none-any.whl")
    run(*pip, "install", "--no-deps", "--no-index", "--target", folder / "site", wheel, folder=folder)
    return folder / "site"


def test_the_wheel_runs(installed, tmp_path):
    """Its command, and a prompt; with the packages of this environment."""
    here: dict[str, Path] = {"folder": tmp_path, "path": installed}
    assert run(installed / "bin" / "hybrid-prefix", "--version", **here) == f"hybrid-prefix {__version__}\n"
    folder = installed / "megatron_hybrid_prefix" / "startup"
    assert f"PYTHONPATH={folder}:{installed}\n" in run(installed / "bin" / "hybrid-prefix", "env", **here)
    said = run(sys.executable, "-m", "megatron_hybrid_prefix", "plan", "tiny", "--cache-gb", 2, **here)
    assert "most cached states" in said
    example = (ROOT / "examples" / "ten_lines.py").read_text()
    where = "import megatron_hybrid_prefix as package\nprint(package.__file__)"
    *said, place = run(sys.executable, "-c", f"{example}\n{where}", **here).splitlines()
    assert [int(line.split()[0]) for line in said] == [0, 512] and place.startswith(str(installed))


def test_the_wheel_has_every_file_of_the_package(installed):
    package = ROOT / "megatron_hybrid_prefix"
    found = installed / "megatron_hybrid_prefix"
    sources, files = (
        {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}
        for folder in (package, found)
    )
    assert files == sources


def test_setup_py_answers_old_tools(tmp_path):
    source = copy_of_the_sources(tmp_path / "source")
    assert run(sys.executable, "setup.py", "--version", folder=source).splitlines()[-1] == __version__


@pytest.mark.nightly
def test_the_wheel_needs_no_compiler_and_nothing_but_the_index(tmp_path):
    source, environment = copy_of_the_sources(tmp_path / "source"), tmp_path / "environment"
    make = (sys.executable, ROOT / "scripts" / "variant_env.py", environment)
    run(*make, *(word for name in LINKED for word in ("--only", name)), folder=tmp_path)
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "--no-input")
    try:
        run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, source, folder=tmp_path)
        (wheel,) = tmp_path.glob("megatron_hybrid_prefix-*-py3-none-any.whl")
        # What is linked keeps its version: pip would remove another one through the link.
        linked = tmp_path / "linked.txt"
        linked.write_text(run(*pip, "list", "--format", "freeze", folder=tmp_path))
        names = {line.partition("==")[0] for line in linked.read_text().split()}
        assert all(any(fnmatch(name, pattern) for pattern in LINKED) for name in names), "PyTorch only"
        # The pinned versions: another PyTorch that came out last night is not this test's to find.
        pinned = ("-c", ROOT / "constraints.txt", "-c", linked)
        run(*pip, "install", "--no-compile", "--only-binary", ":all:", *pinned, wheel, folder=tmp_path)
        run(*pip, "check", folder=tmp_path)
        installed = run(*pip, "list", "--format", "freeze", folder=tmp_path).lower()
        assert "megatron-hybrid-prefix==" in installed and "megatron-core==" in installed
        assert "mamba" not in installed and "conv1d" not in installed and "flash" not in installed
        shutil.copy(ROOT / "examples" / "ten_lines.py", tmp_path / "example.py")
        said = run(environment / "bin" / "python", "example.py", folder=tmp_path)
        assert [int(line.split()[0]) for line in said.splitlines()] == [0, 512]
        command = environment / "bin" / "hybrid-prefix"
        for name, verb in VERBS.items():
            said = run(command, name, "--help", folder=tmp_path, code=2 if verb.extra else 0)
            if verb.extra:
                wanted = f"pip install 'megatron-hybrid-prefix[{verb.extra}]'\n"
                assert said.endswith(wanted) and said.count("\n") == 1
        extras = f"{wheel}[bench,serve]"
        run(*pip, "install", "--no-compile", "--only-binary", ":all:", *pinned, extras, folder=tmp_path)
        run(*pip, "check", folder=tmp_path)
        assert run(command, "serve", "--help", folder=tmp_path).startswith("usage: hybrid-prefix serve [-h] ")
        every_other_verb(command, tmp_path)
    finally:
        shutil.rmtree(environment, ignore_errors=True)  # 1 GB


def test_the_extra_mamba_is_all_that_asks_for_packages_without_wheels():
    from importlib.metadata import requires

    wanted = {line for line in requires("megatron-hybrid-prefix") if "mamba" in line or "conv1d" in line}
    assert {line.split(">=")[0] for line in wanted} == {"mamba-ssm", "causal-conv1d"}
    assert all('extra == "mamba"' in line.replace("'", '"') for line in wanted)
