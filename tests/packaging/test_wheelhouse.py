"""`scripts/wheelhouse.sh` without the network: its messages, its splitting, and its install line."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "wheelhouse.sh"
OTHER_HOSTS = ("cp313-cp313-linux_x86_64", "cp312-cp312-macosx_11_0_arm64", "py3-none-linux_aarch64")


def run(*argv: object, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, argv)],
        env=os.environ | {"MHP_PYTHON": python},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def make_wheel(folder: Path, name: str, *, tag: str = "py3-none-any", files: dict[str, bytes] | None = None) -> Path:
    """A wheel with one module and other files."""
    info = f"{name}-1.0.dist-info"
    content = {f"{name}.py": b"VALUE = 7\n"} | (files or {})
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()
    content[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"]).encode()
    path = folder / f"{name}-1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for inner, data in content.items():
            wheel.writestr(inner, data)
    return path


def test_help():
    result = run("--help")
    assert result.returncode == 0 and "--split MB" in result.stdout and not result.stderr


@pytest.mark.parametrize(
    ("argv", "wheel", "problem"),
    [
        ([], None, "name a folder"),
        (["a", "b"], None, "one folder, not two"),
        (["a", "--split"], None, "--split needs a size"),
        (["a", "--split", "0"], None, "--split needs a size"),
        (["a", "--split", "x"], None, "--split needs a size"),
        (["a", "--with"], None, "--with needs te, mamba, or both"),
        (["a", "--with", "flash"], None, "--with needs te, mamba, or both"),
        (["a", "--color"], None, "unknown option --color"),
        ([str(SCRIPT)], None, "is no folder"),
        (["FOLDER", "--no-download"], None, "no wheels"),
        *((["FOLDER", "--no-download"], tag, "wrong_one") for tag in OTHER_HOSTS),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, argv, wheel, problem):
    if wheel is not None:
        make_wheel(tmp_path, "wrong_one", tag=wheel)
    result = run(*(str(tmp_path) if word == "FOLDER" else word for word in argv))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and problem in result.stderr


def test_a_python_without_torch_is_one_line(tmp_path):
    result = run(tmp_path, python="/bin/false")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1 and "MHP_PYTHON" in result.stderr


def test_a_dry_run_names_every_wheel_and_does_nothing(tmp_path):
    folder = tmp_path / "wheels"
    result = run(folder, "--dry-run", "--split", 60)
    assert result.returncode == 0, result.stderr
    assert not folder.exists()
    pins = dict(re.findall(r"^([\w-]+)==([^; \n]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    download, build, own = (line for line in result.stdout.splitlines() if re.search(" -m pip (download|wheel) ", line))
    for name in ("megatron-core", "einops", "pyzmq", "starlette", "pydantic", "pydantic-core"):
        assert f" {name}=={pins[name]} " in download
    for name in ("flash-attn-4==4.0.0b36", "nvidia-cutlass-dsl-libs-cu13==4.8.1", "torch-c-dlpack-ext==0.1.5"):
        assert f" {name} " in download
    assert "--no-deps" in download and "--python-version 3.12" in download and "_x86_64" in download
    assert " torch==" not in download and "triton" not in download
    for name in ("mamba-ssm", "causal-conv1d"):
        assert f" {name}=={pins[name]} " in build
    assert "MAMBA_SKIP_CUDA_BUILD=TRUE" in build and "CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE" in build
    assert " -m pip wheel " in own
    assert "pip install --no-index --no-deps" in result.stdout and "nvidia_cutlass_dsl/dsl_packages" in result.stdout


def test_a_dry_run_with_compiled_kernels_names_the_compiler_and_one_architecture(tmp_path):
    """A wheel without extensions in the folder is no reason to leave out the build."""
    make_wheel(tmp_path, "causal_conv1d")
    result = run(tmp_path, "--dry-run", "--with", "te,mamba")
    assert result.returncode == 0, result.stderr
    download, toolkit, *builds, own = (
        line for line in result.stdout.splitlines() if " -m pip " in line and "TARGET" not in line
    )
    for name in ("transformer-engine", "transformer-engine-cu13"):
        assert f" {name}==2.20.2 " in download
    for name in ("onnxscript", "onnx", "onnx-ir", "ml-dtypes"):  # transformer_engine imports them
        assert f" {name}==" in download
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"):
        assert f" {name}==13.0." in toolkit
    assert [line.split()[-1].partition("==")[0] for line in builds] == [
        "causal-conv1d",
        "mamba-ssm",
        "transformer-engine-torch",
    ]
    for build in builds:
        assert "SKIP_CUDA_BUILD" not in build and "CUDA_HOME=" in build and "PYTORCH_NVCC=" in build
        assert "NVTE_CUDA_ARCHS=90 " in build
    assert "CUDA_HOME=" not in own


def test_only_what_is_asked_for_is_compiled(tmp_path):
    make_wheel(tmp_path, "causal_conv1d", tag="cp312-cp312-linux_x86_64")
    printed = run(tmp_path, "--dry-run", "--with", "mamba").stdout
    assert "transformer" not in printed.replace(" transformers==", "") and " mamba-ssm==" in printed
    assert " causal-conv1d==" not in printed  # it is there
    printed = run(tmp_path, "--dry-run", "--with", "te").stdout
    mamba = next(line for line in printed.splitlines() if " mamba-ssm==" in line)
    assert "MAMBA_SKIP_CUDA_BUILD=TRUE" in mamba and "CUDA_HOME" not in mamba
    assert " transformer-engine-torch==2.20.2" in printed


def test_split_wheels_join_and_the_install_line_works(tmp_path):
    """The parts are moved to another folder, and one package is found only through the second entry of PYTHONPATH."""
    made, carried, target = tmp_path / "made here", tmp_path / "carried there", tmp_path / "target"
    made.mkdir()
    large = make_wheel(made, "large_one", files={"large_one_data.bin": os.urandom(2_500_000)})
    digest = hashlib.sha256(large.read_bytes()).hexdigest()
    small = make_wheel(
        made,
        "small_one",
        tag="cp312-cp312-linux_x86_64",
        files={"nvidia_cutlass_dsl/dsl_packages/inner_one.py": b"VALUE = 8\n"},
    )
    result = run(made, "--no-download", "--split", 1)
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in made.iterdir()) == sorted(
        [f"{large.name}.part-{n:03}" for n in (1, 2, 3)] + [small.name, "INSTALL.txt", "SHA256SUMS", "join.sh"]
    )
    assert all(path.stat().st_size <= 1_000_000 for path in made.glob("*.part-*"))
    assert (made / "INSTALL.txt").read_text() == result.stdout
    made.rename(carried)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    lines = result.stdout.replace("WHEELS", f"'{carried}'").replace("TARGET", str(target))
    lines = lines.replace("python3.12", sys.executable)
    if python != "3.12":
        lines = lines.replace("*.whl", "large*.whl")
    check = f'{sys.executable} -c "import large_one, sys; print(large_one.VALUE, *sys.path)"'
    done = subprocess.run(
        ["sh", "-ec", f"{lines}\n{check}"], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("7 ")
    assert f"{target}/nvidia_cutlass_dsl/dsl_packages" in done.stdout.split()
    assert hashlib.sha256((carried / large.name).read_bytes()).hexdigest() == digest
    assert not list(carried.glob("*.part-*"))
    again = subprocess.run(["sh", str(carried / "join.sh")], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr


def test_a_part_that_is_missing_or_damaged_is_noticed(tmp_path):
    for number, damage in enumerate((lambda path: path.unlink(), lambda path: path.write_bytes(b"x"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        make_wheel(folder, "large_one", files={"large_one_data.bin": os.urandom(2_500_000)})
        assert run(folder, "--no-download", "--split", 1).returncode == 0
        damage(next(folder.glob("*.part-002")))
        done = subprocess.run(["sh", str(folder / "join.sh")], capture_output=True, text=True, check=False)
        assert done.returncode != 0 and "large_one" in done.stdout + done.stderr
