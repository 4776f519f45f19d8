"""Folders that are damaged on rank 1 only. Usage: ``torchrun hf_faults.py OUT.json ROOT`` or ``... CLI ROOT NAME``.

ROOT/rank0 and ROOT/rank1 have folders of the same names. The first form builds a model of each; the second one runs
``generate --hf NAME`` in the rank's folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_hybrid_prefix.models import build_hybrid_model, open_folder
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.workers.launch import write_findings

LATE = "cut after it was opened"


def main(out, root):
    platform = ensure_platform(tp=2, device="cpu")
    own = Path(root) / f"rank{platform.rank}"
    found = {}
    for name in sorted(os.listdir(Path(root) / "rank0")):
        given = own / name
        if name == LATE:
            given = open_folder(own / name)
            if platform.rank == 1:
                os.truncate(own / name / "model.safetensors", given.weights["lm_head.weight"].offset_bytes + 100)
        try:
            build_hybrid_model(hf=given, platform=platform)
            found[name] = "built"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    write_findings(out, found)
    shut_down()


def command(root, name):
    from megatron_hybrid_prefix.cli import generate

    os.chdir(Path(root) / f"rank{os.environ['RANK']}")
    sys.exit(generate.main(["x", "--hf", name, "--tp", "2", "--device", "cpu", "--tokenizer", "bytes"]))


if __name__ == "__main__":
    if sys.argv[1] == "CLI":
        command(*sys.argv[2:])
    main(*sys.argv[1:])
