"""Finds the installed megatron-core and checks that this package supports it. Reads files only; runs no code of megatron's.

The version is that of the installed package (``importlib.metadata``). ``megatron.core.__version__`` is not used, because megatron
appends the commit of any git repository around it. If there is no installed package, or Python would import other sources
(a checkout on ``PYTHONPATH``), the version is read from those sources. Megatron-LM's main has one version for months, so the commit is
part of the version where it can be found: ``0.20.0+d98e8a64``.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_hybrid_prefix.errors import PlatformError, UpstreamDriftError

# The supported range. pyproject.toml repeats it for pip; a test compares the two.
SUPPORTED = ">=0.19.2,<0.21"
REQUIREMENT = f"megatron-core{SUPPORTED}"
REMEDY = f'install a supported version: pip install "{REQUIREMENT}"'

# What the tests were run with: releases, and commits of Megatron-LM's main. Others of the range are used, too, with a warning.
RUN = (
    "0.19.2",
    "708f0a5e of 2026-08-03",
    "7a76dff7 of 2026-08-11",
    "14346b65 of 2026-08-12",  # NeMo-RL's
    "2a75ac12 of 2026-08-13",  # Megatron-Bridge's
    "51f6a39f of 2026-08-15",
    "e7b92efa of 2026-08-19",
    "d98e8a64 of 2026-08-22",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronVersion:
    """The megatron-core that Python would import.

    Attributes:
        version: None if it cannot be determined. Its local part is the commit, if that is known: the first 8 digits.
        source: Where it comes from if it is not an installed package; else empty.
    """

    version: Version | None
    source: str = ""

    def __str__(self) -> str:
        shown = f"megatron-core {self.version or 'of unknown version'}"
        return f"{shown} ({self.source})" if self.source else shown

    @property
    def is_supported(self) -> bool:
        """Whether the version is in the range: pre-releases of 0.20 are, those of 0.21 are not."""
        return self.version is not None and SpecifierSet(SUPPORTED).contains(self.version, prereleases=True)

    @property
    def was_run(self) -> bool:
        """Whether the tests were run with this release or commit."""
        name = "" if self.version is None else (self.version.local or str(self.version))[:8]
        return len(name) > 5 and any(run.startswith(name) for run in RUN)


def megatron_folder() -> Path | None:
    """The folder of the ``megatron.core`` that Python would import, or None. Imports nothing, not even ``megatron``."""
    places: Any = None
    for name in ("megatron", "megatron.core"):
        loaded = sys.modules.get(name)
        if loaded is not None:
            places = getattr(loaded, "__path__", None)
        else:
            spec = _spec_of(name, places)
            places = spec and spec.submodule_search_locations
        if not places:
            return None
    return Path(next(iter(places)))


def _spec_of(name: str, places: Any) -> ModuleSpec | None:
    """As ``importlib.util.find_spec``, which would import the parent of a module."""
    return next(filter(None, (finder.find_spec(name, places) for finder in sys.meta_path)), None)


def find_megatron() -> MegatronVersion | None:
    """The megatron-core that Python would import, or None."""
    folder = megatron_folder()
    if folder is None:
        return None
    checkout = folder.resolve().parent.parent  # scripts/test.sh links it
    own, commit = version_in(folder), _checked_out(checkout)
    build = f"a source build at {checkout}"
    try:
        installed = importlib.metadata.distribution("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return MegatronVersion(version=_at(own, commit), source=f"{build}, without package metadata")
    try:
        version = Version(installed.version)
    except InvalidVersion:
        return MegatronVersion(
            version=_at(own, commit), source=f"{build}, whose package metadata says {installed.version!r}"
        )
    if own is not None and own.release != version.release:
        return MegatronVersion(version=_at(own, commit), source=f"{build}, which hides the installed {version}")
    built_from = json.loads(installed.read_text("direct_url.json") or "{}").get("vcs_info", {})
    return MegatronVersion(version=_at(version, commit or built_from.get("commit_id", "")))


@functools.cache
def check_version() -> MegatronVersion:
    """The installed megatron-core; looked up once per process.

    Raises:
        PlatformError: It is missing or unsupported. The message says what is installed, what is supported, and how to get it.
    """
    found = find_megatron()
    if found is None:
        raise PlatformError(f"megatron-core is not installed, supported is {SUPPORTED}; {REMEDY}")
    if not found.is_supported:
        raise PlatformError(f"{found} is installed, supported is {SUPPORTED}; {REMEDY}")
    return found


def version_in(core: Path) -> Version | None:
    """The version that the folder ``megatron/core`` names in its ``package_info.py``."""
    package_info = core / "package_info.py"
    if not package_info.is_file():
        return None
    text = package_info.read_text(encoding="utf-8")
    values = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *([^#\n]+)", text, re.MULTILINE))
    try:
        major, minor, patch, pre = (ast.literal_eval(values[n]) for n in ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE"))
        return Version(f"{major}.{minor}.{patch}{pre}")
    except (KeyError, SyntaxError, ValueError):  # InvalidVersion is a ValueError
        return None


def _at(version: Version | None, commit: str) -> Version | None:
    """The version with the commit, if that is known."""
    return Version(f"{version.public}+{commit[:8]}") if version and commit else version


def _checked_out(checkout: Path) -> str:
    """The commit of a checkout, or "". Read from its files: git may be missing, or refuse the folder of another user."""
    git = checkout / ".git"
    try:
        if git.is_file():  # of a worktree or a submodule
            git = checkout / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
        ref = head.removeprefix("ref: ")
        if (shared / ref).is_file():
            return (shared / ref).read_text().strip()
        packed = re.search(rf"^([0-9a-f]+) {re.escape(ref)}$", (shared / "packed-refs").read_text(), re.MULTILINE)
        return packed[1] if packed else ""
    except OSError:  # no .git, or one that this user may not read
        return ""


@contextmanager
def naming_versions() -> Iterator[None]:
    """Around imports of megatron's names: one that is missing is one line, with the versions that the tests were run with.

    Raises:
        UpstreamDriftError: That line.
    """
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith("megatron."):
            raise
        raise UpstreamDriftError(f"{check_version()}: {error}; the tests were run with: {', '.join(RUN)}") from error
