"""The repository: what a hosted runner and the hooks before a commit run, the form of subjects, no large files."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
LARGEST_BYTES = 200_000
LARGE_IMAGES: set[str] = set()  # tracked images that may be larger


def hooks() -> dict[str, dict[str, Any]]:
    """Hooks of pre-commit by id."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    return {hook["id"]: hook for repository in config["repos"] for hook in repository["hooks"]}


@pytest.mark.parametrize(
    ("name", "script", "when"),
    [("ci", ".ci/run", {"push", "pull_request"}), ("nightly", "scripts/nightly.sh", {"schedule", "workflow_dispatch"})],
)
def test_a_workflow_runs_one_script_may_only_read_and_pins_its_actions(name, script, when):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    assert set(workflow[True]) == when  # YAML reads the key `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert "permissions" not in job and job["timeout-minutes"] == 90
    assert [step["run"] for step in job["steps"] if "run" in step] == [script]
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert len(used) == 2 and all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", action) for action in used)
    (version,) = [step["with"]["python-version"] for step in job["steps"] if "python-version" in step.get("with", {})]
    assert f'requires-python = ">={version}"' in (ROOT / "pyproject.toml").read_text()


def test_hooks_check_all_that_lint_checks():
    lint = (ROOT / "scripts" / "lint.sh").read_text()
    (checks,) = re.findall(r"\|\| set -- (.+)", lint)
    entries = {hook["entry"] for hook in hooks().values() if hook["language"] == "system"}
    assert entries == {f"scripts/lint.sh {check}" for check in checks.split()}
    assert "scripts/lint.sh" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    "message",
    [
        "policy: ties go to the older state",
        "layers, mcore: one NO_SLOT\n\nIt stood in two places.\n",
        "mcore/upstream: a row",
        "scripts/lint.sh: checks by name",
        "Merge branch 'main'",
        'Revert "policy: ties"',
        "fixup! policy: ties",
    ],
)
def test_a_subject_of_the_right_form_passes(message):
    assert re.search(hooks()["subject"]["entry"], message, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "message", ["Fix", "two words: what", "policy:ties", "policy: ", ": what", "Fix it\n\npolicy: in the body"]
)
def test_another_subject_does_not(message):
    assert not re.search(hooks()["subject"]["entry"], message, re.MULTILINE | re.DOTALL)


def test_no_large_file_is_tracked():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    assert len(files) > 100
    large = {str(path.relative_to(ROOT)) for path in files if path.is_file() and path.stat().st_size > LARGEST_BYTES}
    assert large <= LARGE_IMAGES, f"larger than {LARGEST_BYTES} bytes: {sorted(large - LARGE_IMAGES)}"
    assert all(Path(name).suffix in (".png", ".svg", ".gif") for name in LARGE_IMAGES)
