"""Hugging Face folders on two tensor-parallel ranks. Usage: ``torchrun hf_folder.py OUT.json FOLDER...``.

Each FOLDER is what `make_reference` left; models are built with its name alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.hf_helpers import gaps, load_reference
from tests.harness.workers.launch import write_findings


def main(out, *folders):
    platform = ensure_platform(tp=2, device="cpu")
    found = {}
    for folder in folders:
        reference = load_reference(Path(folder))
        read = []
        model = build_hybrid_model(hf=folder, platform=platform, on_read=lambda *values, read=read: read.append(values))
        found[Path(folder).name] = gaps(model, reference) | {
            "values_read": read[-1][0],
            "values_held": sum(value.numel() for _, value in parameters_by_global_name(model)),
        }
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
