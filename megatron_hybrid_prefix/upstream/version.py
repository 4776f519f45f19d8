"""Finds the installed megatron-core and checks that this package supports it. Reads files only; runs no code of megatron's.

The version is that of the installed package (``importlib.metadata``). ``megatron.core.__version__`` is not used, because megatron
appends the commit of any git repository around it. If there is no installed package, or Python would import other sources
(a checkout on ``PYTHONPATH``), the version is read from those sources.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_hybrid_prefix.errors import PlatformError

# The supported range. pyproject.toml repeats it for pip; a test compares the two.
SUPPORTED = ">=0.19.2,<0.21"
REQUIREMENT = f"megatron-core{SUPPORTED}"
REMEDY = f'install a supported version: pip install "{REQUIREMENT}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronVersion:
    """The megatron-core that Python would import.

    Attributes:
        version: None if it cannot be determined.
        source: Where it comes from if it is not an installed package; else empty.
    """

    version: Version | None
    source: str = ""

    def __str__(self) -> str:
        shown = f"megatron-core {self.version or 'of unknown version'}"
        return f"{shown} ({self.source})" if self.source else shown

    @property
    def is_supported(self) -> bool:
        """Whether the version is in the range: pre-releases of a later 0.19 are, those of 0.20 are not."""
        return self.version is not None and SpecifierSet(SUPPORTED).contains(self.version, prereleases=True)


def megatron_folder() -> Path | None:
    """The folder of the ``megatron.core`` that Python would import, or None."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except (ModuleNotFoundError, ValueError):  # there is no ``megatron``, or sys.modules has one without a spec
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def find_megatron() -> MegatronVersion | None:
    """The megatron-core that Python would import, or None."""
    folder = megatron_folder()
    if folder is None:
        return None
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        installed = None
    own = _version_in(folder / "package_info.py")
    build = f"a source build at {folder.parent.parent}"
    if installed is None:
        return MegatronVersion(version=own, source=f"{build}, without package metadata")
    try:
        version = Version(installed)
    except InvalidVersion:
        return MegatronVersion(version=own, source=f"{build}, whose package metadata says {installed!r}")
    if own is not None and own.release != version.release:
        return MegatronVersion(version=own, source=f"{build}, which hides the installed {version}")
    return MegatronVersion(version=version)


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


def _version_in(package_info: Path) -> Version | None:
    """The version in megatron's sources, from its constants."""
    if not package_info.is_file():
        return None
    text = package_info.read_text(encoding="utf-8")
    values = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *([^#\n]+)", text, re.MULTILINE))
    try:
        major, minor, patch, pre = (ast.literal_eval(values[n]) for n in ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE"))
        return Version(f"{major}.{minor}.{patch}{pre}")
    except (KeyError, SyntaxError, ValueError):  # InvalidVersion is a ValueError
        return None
