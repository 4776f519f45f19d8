"""A Hugging Face folder that only one of two ranks cannot read: both ranks end with one line, and none waits."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.hf_helpers import make_folder
from tests.harness.workers import hf_faults as worker
from tests.harness.workers.launch import WORKERS, environments_of, run_prepared, run_ranks

FILE = "model.safetensors"


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
    worker.LATE: (
        lambda folder: None,
        rf"rank1/{worker.LATE}/{FILE} is truncated: it ends before the end of model\.embeddings\.weight$",
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
    for rank in run_ranks("hf_faults.py", tmp_path / "found.json", root):
        assert rank.keys() == FAULTS.keys()
        for name, (_, message) in FAULTS.items():
            assert "\n" not in rank[name]
            assert re.search(message, rank[name]), rank[name]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("name", ["truncated", "no folder"])
def test_a_command_says_it_in_one_line(root, name):
    first, second = run_prepared(WORKERS / "hf_faults.py", "CLI", root, name, environments=environments_of(2))
    assert first.returncode == 2
    assert first.stderr.startswith("error: ") and first.stderr.count("\n") == 1, first.stderr
    assert name in first.stderr and second.stderr == ""
