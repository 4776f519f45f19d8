"""A megatron-core that is empty but for its version, in a folder."""

from __future__ import annotations

import re
from pathlib import Path


def package(folder: Path, version: str | None, metadata: str | None = None) -> Path:
    """Makes the package, with the version of its sources, and that which pip shows, if it installed it. Returns the folder."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    if version is not None:
        set_version(folder, version)
    if metadata is not None:
        (folder / "megatron_core-x.dist-info").mkdir()
        (folder / "megatron_core-x.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {metadata}\n"
        )
    return folder


def set_version(folder: Path, version: str) -> None:
    """Changes the version of the sources."""
    major, minor, patch, pre = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(.*)", version).groups()
    (folder / "megatron" / "core" / "package_info.py").write_text(
        f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = '{pre}'\n"
    )
