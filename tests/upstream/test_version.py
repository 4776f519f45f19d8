"""`upstream/version.py`: which megatron-core is found, supported and refused, and with which words."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

from megatron_hybrid_prefix.errors import PlatformError, UpstreamDriftError
from megatron_hybrid_prefix.upstream import check
from megatron_hybrid_prefix.upstream import version as megatron_version
from tests.harness import tested_megatron
from tests.harness.made_up_megatron import package

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def only_this(monkeypatch, fresh):
    """Makes Python find only the megatron in this folder."""

    def use(folder: Path) -> None:
        monkeypatch.setitem(sys.modules, "megatron", types.SimpleNamespace(__path__=[str(folder / "megatron")]))
        monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
        monkeypatch.setattr(sys, "path", [str(folder)])
        fresh()

    return use


def sources_of(version: str) -> str:
    """The version that the sources of an installed version name."""
    return ".".join(re.findall(r"\d+", version)[:3])


@pytest.mark.parametrize(
    "version",
    [
        "0.19.2", "0.19.3", "0.19.2+abc", "0.19.3rc1", "0.19.3.dev20260101+g1", "0.20.0", "0.20.0rc0", "0.20.0.dev1",
        "0.20.1",
    ],
)  # fmt: skip
def test_supported_versions(version, tmp_path, only_this):
    only_this(package(tmp_path, sources_of(version), version))
    assert str(megatron_version.check_version()) == f"megatron-core {version}"


@pytest.mark.parametrize(
    "version", ["0.18.0", "0.19.1", "0.19.2rc1", "0.21.0", "0.21.0rc0", "0.21.0.dev20260101", "0.21.1", "1.0.0"]
)
def test_unsupported_versions(version, tmp_path, only_this):
    only_this(package(tmp_path, sources_of(version), version))
    assert refusal() == (
        f"megatron-core {version} is installed, supported is >=0.19.2,<0.21; "
        'install a supported version: pip install "megatron-core>=0.19.2,<0.21"'
    )


def refusal() -> str:
    """The one-line error of the two functions that start everything."""
    from megatron_hybrid_prefix import build_engine
    from megatron_hybrid_prefix.platform import ensure_platform

    said = []
    for start in (ensure_platform, lambda: build_engine(None)):
        check._checked.clear()
        with pytest.raises(PlatformError) as raised:
            start()
        assert not isinstance(raised.value, UpstreamDriftError)
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert "\n" not in said[0]
    return said[0]


def test_none_is_installed(tmp_path, only_this):
    only_this(tmp_path)
    assert refusal().startswith("megatron-core is not installed, supported is >=0.19.2,<0.21; install")


@pytest.mark.parametrize(
    ("sources", "metadata", "shown"),
    [
        ("0.19.2", None, "megatron-core 0.19.2 (a source build at {}, without package metadata)"),
        ("0.19.2", "main", "megatron-core 0.19.2 (a source build at {}, whose package metadata says 'main')"),
        ("0.19.3", "0.18.0", "megatron-core 0.19.3 (a source build at {}, which hides the installed 0.18.0)"),
        ("0.20.0", "0.19.2", "megatron-core 0.20.0 (a source build at {}, which hides the installed 0.19.2)"),
        ("0.20.0rc0", None, "megatron-core 0.20.0rc0 (a source build at {}, without package metadata)"),
    ],
)
def test_source_builds_in_range_are_left_to_the_table(sources, metadata, shown, tmp_path, only_this):
    only_this(package(tmp_path, sources, metadata))
    assert str(megatron_version.check_version()) == shown.format(tmp_path)


@pytest.mark.parametrize(
    ("sources", "metadata", "shown"),
    [
        ("0.21.0rc0", None, "megatron-core 0.21.0rc0 (a source build at {}, without package metadata)"),
        (None, None, "megatron-core of unknown version (a source build at {}, without package metadata)"),
        (None, "main", "megatron-core of unknown version (a source build at {}, whose package metadata says 'main')"),
        ("0.18.0", "0.19.2", "megatron-core 0.18.0 (a source build at {}, which hides the installed 0.19.2)"),
    ],
)
def test_other_source_builds_are_refused(sources, metadata, shown, tmp_path, only_this):
    only_this(package(tmp_path, sources, metadata))
    assert refusal().startswith(f"{shown.format(tmp_path)} is installed, supported is >=0.19.2,<0.21; install")


def test_pip_is_asked_for_the_supported_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert megatron_version.REQUIREMENT in project["dependencies"]


def test_the_megatron_of_the_tests_is_found():
    import megatron.core

    found = megatron_version.find_megatron()
    assert megatron.core.__version__.partition("+")[0] == found.version.public
    is_installed = next(importlib.metadata.distributions(name="megatron-core"), None) is not None
    assert is_installed or "without package metadata" in found.source


def test_an_editable_installation_is_found(monkeypatch):
    """Its namespace package has a hook instead of a folder."""
    installed = megatron_version.find_megatron()
    spec = importlib.util.find_spec("megatron.core")
    hook = types.SimpleNamespace(find_spec=lambda name, *_: spec if name == "megatron.core" else None)
    monkeypatch.setitem(sys.modules, "megatron", types.SimpleNamespace(__path__=["__editable__.finder.__path_hook__"]))
    monkeypatch.delitem(sys.modules, "megatron.core")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, hook])
    assert megatron_version.find_megatron() == installed


# -- commits -----------------------------------------------------------------------------------------------------------

COMMIT = "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *words: str) -> str:
    """Runs git in a folder. Returns its output."""
    user = ("-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false")
    # Hashes are the same in each run: one of digits only would be read as a number.
    dates = {f"GIT_{who}_DATE": "2026-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}
    return subprocess.run(
        ["git", "-C", folder, *user, *words], check=True, capture_output=True, text=True, env=os.environ | dates
    ).stdout.strip()


def checkout(folder: Path, *options: str) -> str:
    """Makes a repository with one commit, and with options of ``git init``. Returns the commit."""
    package(folder, "0.20.0")
    git(folder, "init", "--quiet", *options)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "x")
    return git(folder, "rev-parse", "HEAD")


@needs_git
@pytest.mark.parametrize("form", ["branch", "packed", "detached", "worktree", "apart", "linked"])
def test_the_commit_of_a_checkout(form, tmp_path, only_this):
    """As git keeps it: for a branch, for a detached head, in a worktree, in a submodule; and as scripts/test.sh links it."""
    folder = source = tmp_path / "checkout"
    commit = checkout(folder, *(["--separate-git-dir", str(tmp_path / "elsewhere")] if form == "apart" else []))
    if form == "packed":
        git(folder, "pack-refs", "--all")
    elif form == "detached":
        git(folder, "checkout", "--quiet", "--detach")
    elif form == "worktree":
        git(folder, "worktree", "add", "--quiet", "-b", "other", "../worktree")
        folder = source = tmp_path / "worktree"
    elif form == "linked":
        folder = tmp_path / "linked"
        folder.mkdir()
        (folder / "megatron").symlink_to(source / "megatron")
    only_this(folder)
    shown = f"megatron-core 0.20.0+{commit[:8]} (a source build at {source}, without package metadata)"
    assert str(megatron_version.check_version()) == shown


@needs_git
def test_the_report_says_what_was_tested(tmp_path, only_this, monkeypatch):
    monkeypatch.setattr(tested_megatron, "CAPABILITIES", ["KV blocks"])
    monkeypatch.setattr(tested_megatron, "form_of", lambda capability: "one pool")
    commit = checkout(tmp_path / "checkout")
    only_this(tmp_path / "checkout")
    (tmp_path / "checkout" / "notes").touch()  # changes nothing that is tested
    shown = f"megatron-core 0.20.0+{commit[:8]} (a source build at {tmp_path / 'checkout'}, without package metadata)"
    assert tested_megatron.tested_megatron() == f"{shown}; KV blocks: one pool"
    (tmp_path / "checkout" / "megatron" / "core" / "change.py").touch()
    assert tested_megatron.tested_megatron() == f"{shown}, with local changes; KV blocks: one pool"


@pytest.mark.parametrize(
    ("metadata", "record", "shown"),
    [
        ("0.20.0", {"url": "x", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}, "0.20.0+0a1b2c3d"),
        ("0.20.0rc0+nv1", {"url": "x", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}, "0.20.0rc0+0a1b2c3d"),
        ("0.20.0+0a1b2c3d4e", {"url": "file:///x", "dir_info": {}}, "0.20.0+0a1b2c3d4e"),
        ("0.20.0", None, "0.20.0"),
    ],
)
def test_the_commit_that_an_installed_package_was_built_from(metadata, record, shown, tmp_path, only_this):
    folder = package(tmp_path, "0.20.0", metadata)
    if record is not None:
        (folder / "megatron_core-x.dist-info" / "direct_url.json").write_text(json.dumps(record))
    only_this(folder)
    assert str(megatron_version.check_version()) == f"megatron-core {shown}"


def test_only_what_the_tests_were_not_run_with_is_worth_a_line(tmp_path, only_this, monkeypatch, caplog):
    monkeypatch.setattr(check, "_problems", lambda cls: ())
    known = ["0.19.2", "0.20.0+d98e8a64dd", *(f"0.20.0+{run.split()[0]}" for run in megatron_version.RUN[1:])]
    for version in (*known, "0.19.3", "0.20.0", "0.20.0+7", f"0.20.0+{COMMIT}", "0.20.0rc0"):
        only_this(package(tmp_path / version, sources_of(version), version))
        check.check_overrides()
        check.check_overrides()
        if version not in known:
            (line,) = caplog.messages
            assert line.startswith(f"megatron-core {version} has all methods ") and "\n" not in line
            assert line.endswith(f"; the tests were run with: {', '.join(megatron_version.RUN)}")
            caplog.clear()
        assert not caplog.messages
    monkeypatch.setenv("RANK", "1")
    only_this(package(tmp_path / "other rank", "0.19.3"))
    check.check_overrides()
    assert not caplog.messages, "said by rank 0"
