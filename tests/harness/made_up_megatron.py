"""A megatron-core that is empty but for its version, in a folder."""

from __future__ import annotations

import re
from pathlib import Path


def package(folder: Path, version: str | None, metadata: str | None = None) -> Path:
    """Makes the package. Returns the folder.

    Args:
        folder: For ``sys.path``. Made if it is not there.
        version: That of the sources; None: they have none.
        metadata: The version that pip shows; None: pip did not install it.
    """
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
