"""On GPUs with Transformer Engine: ``transformer_impl="inference_optimized"`` with the cache agrees within bf16 noise.

The model has Nemotron 3's layers: latent experts, a shared one, a head that drafts. The noise is measured in the same run, as in
`test_agreement.py`; the same weights in Transformer Engine's other layers with this package's experts, and in float32, are the reference.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.gpu.agreement import error
from tests.gpu.launch import run_script

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)


def case(tp: int, ep: int, *options: str):
    """A parameter, and what it needs: a model of 0.5 GB and engines; in float32, as much again."""
    ranks = max(tp, ep)
    name = f"tp{tp}-ep{ep}" + "".join(options).replace("--", "-")
    return pytest.param(tp, ep, options, id=name, marks=pytest.mark.gpu(gib=8, gpus=ranks, seconds=150))


def run(folder, layers: str, *options: str, tp: int = 1, ep: int = 1):
    """The worker's saved results for these layers."""
    out = folder / f"{layers}.pt"
    arguments = ["--preset", "small-nemotron-3", "--layers", layers, "--tp", tp, "--ep", ep, "--out", out, *options]
    printed = run_script("agreement.py", *arguments, ranks=max(tp, ep), TRITON_F32_DEFAULT="ieee")
    print(printed.strip().splitlines()[-1])
    return torch.load(out)


@pytest.mark.parametrize(
    ("tp", "ep", "options"), [case(1, 1), case(1, 1, "--graphs"), case(1, 2), case(2, 1), case(2, 2)]
)
def test_hits_and_layers_agree_within_noise(tp, ep, options, tmp_path):
    if torch.cuda.device_count() < max(tp, ep):
        pytest.skip(f"needs {max(tp, ep)} GPUs")
    reference = run(tmp_path, "transformer_engine", "--float32")["rows"]
    found = run(tmp_path, "inference_optimized", *options, tp=tp, ep=ep)
    rows, report = found["rows"], found["report"]
    assert report["computed_tokens_alone"] == report["prompt_tokens"]
    assert report["computed_tokens_ours"] < 0.5 * report["prompt_tokens"]
    noise = error(rows["chunked"], rows["alone"])
    off = {name: error(rows[name], rows["alone"]) for name in ("batched", "ours")}
    exact = reference["float32"]
    of_layers = {"transformer_engine": error(reference["alone"], exact), "here": error(rows["alone"], exact)}
    wrong = error(rows["alone"].roll(1, 0), rows["alone"])
    print(
        f"tp={tp} ep={ep} {options}: in chunks {noise:.5f}, {off}; off float32 {of_layers}; another prompt {wrong:.5f}"
    )
    assert max(off.values()) <= 1.5 * noise
    assert of_layers["here"] <= 1.5 * of_layers["transformer_engine"]
    assert wrong > 10 * max(noise, 1e-3)
