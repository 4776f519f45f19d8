"""Hugging Face folders on several ranks. Usage: ``torchrun hf_folder.py OUT.json TP PP EP ETP FOLDER...``.

Each FOLDER is what `make_references` left; models are built with its name alone. A checkpoint in FOLDER/mcore must hold the
same weights; this layout's is saved into FOLDER/mcore-again. A part of a model cannot be saved as a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from megatron_hybrid_prefix.models import (
    build_hybrid_model,
    load_checkpoint,
    open_folder,
    save_checkpoint,
    save_hf_folder,
)
from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.hf_helpers import gaps, load_reference
from tests.harness.workers.launch import write_findings


def main(out, tp, pp, ep, etp, *folders):
    platform = ensure_platform(tp=int(tp), pp=int(pp), ep=int(ep), etp=int(etp), device="cpu")
    found = {}
    for folder in map(Path, folders):
        read = []
        model = build_hybrid_model(hf=folder, platform=platform, on_read=lambda *values, read=read: read.append(values))
        of_folder = {
            "values_read": read[-1][0],
            "values_held": sum(value.numel() for _, value in parameters_by_global_name(model)),
        }
        if (folder / "mcore").is_dir():
            save_checkpoint(model, folder / "mcore-again")
            other = build_hybrid_model(open_folder(folder).config, seed=5, platform=platform)
            load_checkpoint(other, folder / "mcore")
            pairs = zip(parameters_by_global_name(model), parameters_by_global_name(other), strict=True)
            of_folder["unequal"] = [name for (name, value), (_, right) in pairs if not torch.equal(value, right)]
        try:
            save_hf_folder(model, folder / "part")
        except ValueError as error:
            of_folder["not_saved"] = str(error)
        found[folder.name] = of_folder | gaps(model, load_reference(folder))
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
