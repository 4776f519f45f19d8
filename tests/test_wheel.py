"""The wheel, in an empty environment, from the index alone: nothing is compiled, and what needs no GPU runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[1]


def run(*command: object, folder: Path) -> str:
    """What a command prints; outside the repository, with nothing of this environment."""
    unwanted = ("PYTHONPATH", "PIP_CONSTRAINT", "PIP_USER", "PIP_TARGET", "PIP_NO_BINARY", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted and "MAMBA" not in name}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def reaches_an_index(pip: tuple[object, ...], folder: Path) -> bool:
    """Whether pip finds megatron-core."""
    command = (
        *pip,
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-c",
        ROOT / "constraints.txt",
        "megatron-core",
    )
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, timeout=HANG_S, check=False)
    return done.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)  # downloads and unpacks PyTorch
def test_the_wheel_needs_no_compiler_and_nothing_but_the_index(tmp_path):
    source, environment = tmp_path / "source", tmp_path / "environment"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "megatron_hybrid_prefix", source / "megatron_hybrid_prefix")
    if shutil.disk_usage(tmp_path).free < 10 * 2**30:
        pytest.skip("PyTorch and what it needs take 6 GB")
    venv.create(environment, with_pip=True)
    pip = (environment / "bin" / "python", "-m", "pip", "--no-input", "--disable-pip-version-check")
    if "CI" not in os.environ and not reaches_an_index(pip, tmp_path):
        pytest.skip("no package index can be reached")
    try:
        run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, source, folder=tmp_path)
        (wheel,) = tmp_path.glob("megatron_hybrid_prefix-*-py3-none-any.whl")
        # The pinned versions: another PyTorch that came out last night is not this test's to find.
        pinned = ("-c", ROOT / "constraints.txt")
        run(*pip, "install", "--no-compile", "--only-binary", ":all:", *pinned, wheel, folder=tmp_path)
        run(*pip, "check", folder=tmp_path)
        installed = run(*pip, "list", "--format", "freeze", folder=tmp_path).lower()
        assert "megatron-hybrid-prefix==" in installed and "megatron-core==" in installed
        assert "mamba" not in installed and "conv1d" not in installed and "flash" not in installed
        shutil.copy(ROOT / "examples" / "ten_lines.py", tmp_path / "example.py")
        said = run(environment / "bin" / "python", "example.py", folder=tmp_path)
        assert [int(line.split()[0]) for line in said.splitlines()] == [0, 512]
    finally:
        shutil.rmtree(environment, ignore_errors=True)  # 5 GB


def test_the_extra_mamba_is_all_that_asks_for_packages_without_wheels():
    from importlib.metadata import requires

    wanted = {line for line in requires("megatron-hybrid-prefix") if "mamba" in line or "conv1d" in line}
    assert {line.split(">=")[0] for line in wanted} == {"mamba-ssm", "causal-conv1d"}
    assert all('extra == "mamba"' in line.replace("'", '"') for line in wanted)
