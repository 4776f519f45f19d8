"""Sizes of the platform and of a script, over two ranks: those that differ are an error that names both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.harness.workers.launch import run_ranks

pytestmark = [pytest.mark.multi, pytest.mark.slow]

TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))
OWN_GROUPS = "make the process groups with those sizes, before ensure_platform(), which keeps them"
# Arguments of `ensure_platform`, flags, and the error.
DIFFER: list[tuple[dict[str, int], list[str], str]] = [
    ({}, [TP, "2"], "tp=2 dp=1, but this process runs with tp=1 dp=2; call ensure_platform(tp=2, pp=1, ep=1) first"),
    ({}, [PP, "2"], "pp=2 dp=1, but this process runs with pp=1 dp=2; call ensure_platform(tp=1, pp=2, ep=1) first"),
    ({"tp": 2}, [], "tp=1 dp=2, but this process runs with tp=2 dp=1; call ensure_platform(tp=1, pp=1, ep=1) first"),
    (
        {"tp": 2},
        [PP, "2"],
        "tp=1 pp=2, but this process runs with tp=2 pp=1; call ensure_platform(tp=1, pp=2, ep=1) first",
    ),
    ({}, [CP, "2"], f"cp=2 dp=1, but this process runs with cp=1 dp=2; {OWN_GROUPS}"),
]
SAME: list[tuple[dict[str, int] | None, list[str]]] = [({"tp": 2}, [TP, "2"]), ({}, []), (None, [TP, "2"])]


def test_sizes_of_flags_and_of_the_platform(tmp_path):
    """Megatron keeps the groups that run and ignores its flags: each rank would hold the whole model."""
    cases: list[Any] = [*((sizes, flags) for sizes, flags, _ in DIFFER), *SAME]
    for found in run_ranks("platform_sizes.py", tmp_path / "found.json", json.dumps(cases)):
        for (sizes, flags, error), said in zip(DIFFER, found, strict=False):
            assert said == f"flags of megatron.training: {error}", (sizes, flags)
        sharded, whole, patched = found[len(DIFFER) :]
        assert (sharded["gloo"], sharded["dp"]) == ([1, 1, 1], 1)
        assert (whole["gloo"], whole["dp"]) == ([2, 2, 2], 2)
        assert sharded["parameters"] < whole["parameters"]
        assert patched == sharded, "megatron made the groups"
