"""Which megatron-core the tests run with, in a line for the report."""

from __future__ import annotations

import shutil
import subprocess

from megatron_hybrid_prefix.upstream.capabilities import CAPABILITIES, form_of
from megatron_hybrid_prefix.upstream.version import find_megatron, megatron_folder


def tested_megatron() -> str:
    """Version, commit, whether a checkout has changes of its own, and the form of each capability."""
    folder = megatron_folder()
    if folder is None:
        return "no megatron-core"
    checkout, changed = folder.resolve().parent.parent, ""
    if (checkout / ".git").exists() and shutil.which("git"):
        command = ["git", "-c", f"safe.directory={checkout}", "-C", checkout, "status", "--porcelain", "--", "megatron"]
        if subprocess.run(command, check=True, capture_output=True).stdout:
            changed = ", with local changes"
    chosen = ", ".join(f"{capability}: {form_of(capability)}" for capability in CAPABILITIES)
    return f"{find_megatron()}{changed}; {chosen}"
