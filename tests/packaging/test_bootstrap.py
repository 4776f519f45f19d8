"""`scripts/bootstrap.sh` in the cases where it answers at once. (Running these tests needs a full set-up already.)"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.limits import HANG_S

ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "scripts" / "bootstrap.sh"
READY = ROOT / ".venv" / ".mhp-ready"


def run(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with exactly this environment."""
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run([bash, str(script)], env=environment, capture_output=True, text=True, timeout=HANG_S)


def copy_of_the_project(folder: Path) -> Path:
    """Copies the files that bootstrap.sh reads, without an environment. Returns the script."""
    (folder / "scripts").mkdir()
    for name in ("scripts/bootstrap.sh", "setup.py", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder / "scripts" / "bootstrap.sh"


def folder_with_tools(folder: Path) -> str:
    """A PATH folder with the usual tools but no Python."""
    folder.mkdir()
    text, files = ("cat", "sed", "sort", "tail", "tr"), ("dirname", "ls", "mkdir", "mv", "rm")
    for name in (*text, *files, "bash", "date", "env", "uname"):
        found = shutil.which(name)
        if found:
            (folder / name).symlink_to(found)
    return str(folder)


@pytest.mark.skipif(
    not READY.is_file() or Path(sys.prefix).resolve() != (ROOT / ".venv").resolve(),
    reason="this environment was not made by scripts/bootstrap.sh",
)
def test_when_set_up_it_installs_nothing():
    before = READY.stat().st_mtime_ns
    result = run(BOOTSTRAP, PATH=os.environ["PATH"], HOME=os.environ.get("HOME", "/"))
    assert result.returncode == 0, result.stderr
    assert READY.stat().st_mtime_ns == before and not result.stderr, result.stderr
    assert Path(result.stdout.strip()).is_file()


@pytest.mark.parametrize("python", ["/nonexistent/python", "true", None])
def test_no_python_that_works_is_one_line(tmp_path, python):
    script, path = copy_of_the_project(tmp_path), os.environ["PATH"]
    if python is None:  # the line says what to install
        result = run(script, PATH=folder_with_tools(tmp_path / "bin"), HOME=str(tmp_path))
    else:
        result = run(script, PATH=path, HOME=str(tmp_path), PYTHON=shutil.which(python) or python)
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1, result.stderr
    words = ["PYTHON"] if python else ["3.12", "nstall"]
    assert all(word in result.stderr for word in words) and not (tmp_path / ".venv").exists()
