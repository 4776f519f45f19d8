"""On GPUs: caching off, megatron-core's caching and this package's, and TP=1 and TP=2, agree within bf16 noise.

The noise is measured in the same run: the same prompts with caching off, computed whole and in two chunks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
WORKER = Path(__file__).parent / "agreement.py"
NEMOTRON_BYTES = 40 << 30


def run(tmp_path_factory, preset: str, tp: int):
    """What the worker saved for this preset and layout."""
    out = tmp_path_factory.mktemp("agreement") / f"{preset}-{tp}.pt"
    launcher = [sys.executable]
    if tp > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [*launcher, str(WORKER), "--preset", preset, "--tp", str(tp), "--out", str(out)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "4"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    print(result.stdout.strip().splitlines()[-1])
    return torch.load(out)


@pytest.fixture(scope="module", params=["small", "nemotron-h-8b"])
def one(request, tmp_path_factory):
    if request.param != "small" and torch.cuda.get_device_properties(0).total_memory < NEMOTRON_BYTES:
        pytest.skip("needs 40 GiB of GPU memory")
    return run(tmp_path_factory, request.param, 1)


def error(rows: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean absolute log-prob difference over the 50 most likely tokens of the reference."""
    best = reference.topk(50, dim=-1).indices
    return float((rows.gather(1, best) - reference.gather(1, best)).abs().mean())


def test_generates_and_caching_agrees_within_noise(one):
    rows, report = one["rows"], one["report"]
    assert all(len(tokens) == 8 for tokens in report["tokens_alone"])
    assert report["computed_tokens_alone"] == report["prompt_tokens"]
    noise = error(rows["chunked"], rows["alone"])
    cached = {}
    for engine in ("upstream", "ours"):
        assert report[f"computed_tokens_{engine}"] < 0.5 * report["prompt_tokens"]
        cached[engine] = error(rows[engine], rows["alone"])
    batched = error(rows["batched"], rows["alone"])
    wrong = error(rows["alone"].roll(1, 0), rows["alone"])
    print(
        f"{report['preset']}: in chunks {noise:.5f}, batched {batched:.5f}, upstream's cache "
        f"{cached['upstream']:.5f}, ours {cached['ours']:.5f}, another prompt {wrong:.5f}"
    )
    assert batched <= 1.5 * noise
    assert max(cached.values()) <= 1.5 * noise
    assert wrong > 10 * max(noise, 1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tp_2_agrees_with_tp_1(one, tmp_path_factory):
    two = run(tmp_path_factory, one["report"]["preset"], 2)
    noise = error(one["rows"]["chunked"], one["rows"]["alone"])
    split = error(two["rows"]["alone"], one["rows"]["alone"])
    ours = error(two["rows"]["ours"], one["rows"]["alone"])
    print(f"{one['report']['preset']}: noise {noise:.5f}, TP=2 against TP=1 {split:.5f}, with our cache {ours:.5f}")
    assert max(split, ours) <= 2.0 * noise
