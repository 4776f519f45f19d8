"""`upstream/version.py`: which megatron-core is found, supported and refused, and with which words."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
import types
from pathlib import Path

import pytest

from megatron_hybrid_prefix.errors import PlatformError, UpstreamDriftError
from megatron_hybrid_prefix.upstream import contract
from megatron_hybrid_prefix.upstream import version as megatron_version

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh(platform):
    """A function that clears the results of earlier checks; also called before and after each test."""

    def forget() -> None:
        for function in (contract.check_contract, contract.installed_contract, megatron_version.check_version):
            function.cache_clear()

    forget()
    yield forget
    forget()


def package(folder: Path, version: str | None, metadata: str | None) -> Path:
    """An empty megatron-core. ``version`` is that of its sources, ``metadata`` that of pip."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    if version is not None:
        major, minor, patch, pre = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(.*)", version).groups()
        (core / "package_info.py").write_text(
            f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = '{pre}'\n"
        )
    if metadata is not None:
        (folder / "megatron_core-x.dist-info").mkdir()
        (folder / "megatron_core-x.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {metadata}\n"
        )
    return folder


@pytest.fixture
def only_this(monkeypatch, fresh):
    """Makes Python find only the megatron in this folder."""

    def use(folder: Path) -> None:
        monkeypatch.setitem(sys.modules, "megatron", types.SimpleNamespace(__path__=[str(folder / "megatron")]))
        monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
        monkeypatch.setattr(sys, "path", [str(folder)])
        fresh()

    return use


@pytest.mark.parametrize("version", ["0.19.2", "0.19.3", "0.19.2+abc", "0.19.3rc1", "0.19.3.dev20260101+g1"])
def test_supported_versions(version, tmp_path, only_this):
    only_this(package(tmp_path, "0.19." + version[5], version))
    assert str(megatron_version.check_version()) == f"megatron-core {version}"


@pytest.mark.parametrize(
    "version", ["0.18.0", "0.19.1", "0.19.2rc1", "0.21.0", "0.21.0rc0", "0.21.0.dev20260101", "0.21.1", "1.0.0"]
)
def test_unsupported_versions(version, tmp_path, only_this):
    only_this(package(tmp_path, ".".join(re.findall(r"\d+", version)[:3]), version))
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
        contract.check_contract.cache_clear()
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


def test_the_installed_version_is_found():
    import megatron.core

    found = megatron_version.find_megatron()
    assert found.source == ""
    assert megatron.core.__version__.partition("+")[0] == str(found.version)


def test_an_editable_installation_is_found(monkeypatch):
    """Its namespace package has a hook instead of a folder."""
    installed = megatron_version.find_megatron()
    spec = importlib.util.find_spec("megatron.core")
    hook = types.SimpleNamespace(find_spec=lambda name, *_: spec if name == "megatron.core" else None)
    monkeypatch.setitem(sys.modules, "megatron", types.SimpleNamespace(__path__=["__editable__.finder.__path_hook__"]))
    monkeypatch.delitem(sys.modules, "megatron.core")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, hook])
    assert megatron_version.find_megatron() == installed
