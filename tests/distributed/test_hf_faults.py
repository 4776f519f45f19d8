"""A Hugging Face folder that only one of two ranks cannot read: both ranks end with one line, and none waits."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_hybrid_prefix.models import build_hybrid_model, open_folder
from tests.harness.hf_helpers import make_folder
from tests.harness.workers.launch import environments_of, run_play, run_prepared

FILE, LATE = "model.safetensors", "cut after it was opened"


def outcomes(_, root):
    """On a rank: of each of its folders whether a model of it is built, or the error. Those of rank 1 are damaged."""
    own, found = Path(root) / f"rank{os.environ['RANK']}", {}
    for name in sorted(os.listdir(own.parent / "rank0")):
        given = own / name
        if name == LATE:
            given = open_folder(own / name)
            if own.name == "rank1":
                os.truncate(own / name / FILE, given.weights["lm_head.weight"].offset_bytes + 100)
        try:
            build_hybrid_model(hf=given)
            found[name] = "built"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def other_shape(folder):
    save_file(load_file(folder / FILE) | {"model.norm_f.weight": torch.zeros(3)}, folder / FILE)


# What is done to rank 1's folder, and what both ranks say.
FAULTS = {
    "whole": (lambda folder: None, "^built$"),
    "no folder": (shutil.rmtree, r"^ValueError: there is no folder \S+rank1/no folder$"),
    "no weights": (lambda folder: (folder / FILE).unlink(), r"^ValueError: \S+rank1/no weights has no weights:"),
    "truncated": (
        lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-1]),
        rf"rank1/truncated/{FILE} is truncated: it ends 1 bytes before the end of model\.",
    ),
    "other shape": (other_shape, rf"model\.norm_f\.weight in \S+rank1/other shape/{FILE} has shape \(3,\)"),
    LATE: (
        lambda folder: None,
        rf"rank1/{LATE}/{FILE} is truncated: it ends before the end of model\.embeddings\.weight$",
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    for rank in ("rank0", "rank1"):
        (root / rank).mkdir()
        for name, (damage, _) in FAULTS.items():
            make_folder(root / rank / name)
            if rank == "rank1":
                damage(root / rank / name)
    return root


@pytest.mark.slow
@pytest.mark.multi
def test_both_ranks_raise_the_error_of_one(root, tmp_path):
    parts = {"folders": ["tests.distributed.test_hf_faults:outcomes", str(root)]}
    for rank in (found["folders"] for found in run_play(tmp_path, {"sizes": {"tp": 2}, "parts": parts})):
        assert rank.keys() == FAULTS.keys()
        for name, (_, message) in FAULTS.items():
            assert "\n" not in rank[name]
            assert re.search(message, rank[name]), rank[name]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("name", ["truncated", "no folder"])
def test_a_command_says_it_in_one_line(root, name, tmp_path):
    script = tmp_path / "script.py"
    command = ["x", "--hf", name, "--tp", "2", "--device", "cpu", "--tokenizer", "bytes"]
    script.write_text(
        "import os, sys\nfrom megatron_hybrid_prefix.cli import generate\n"
        f"os.chdir({str(root)!r} + '/rank' + os.environ['RANK'])\nsys.exit(generate.main({command!r}))\n"
    )
    first, second = run_prepared(script, environments=environments_of(2))
    assert first.returncode == 2
    assert first.stderr.startswith("error: ") and first.stderr.count("\n") == 1, first.stderr
    assert name in first.stderr and second.stderr == ""
