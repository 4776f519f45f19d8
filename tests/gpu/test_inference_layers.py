"""On GPUs with Transformer Engine: ``transformer_impl="inference_optimized"`` with the cache agrees within bf16 noise.

The model has Nemotron 3's layers: latent experts, a shared one, a head that drafts. The noise is how far prompts in two chunks, and by this
package's scan, are from megatron's whole ones. (States are float32, so chunks alone may have the same bits.) Hits are compared with the
same prompts cold; both engines with float32, as Transformer Engine's other layers with this package's experts and the same weights are.
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
    assert report["computed_tokens_alone"] == report["computed_tokens_cold"] == report["prompt_tokens"]
    assert report["computed_tokens_ours"] < 0.5 * report["prompt_tokens"]
    exact = reference["float32"]
    noise = max(error(rows[name], rows["alone"]) for name in ("chunked", "cold"))
    batched, hits = error(rows["batched"], rows["alone"]), error(rows["ours"], rows["cold"])
    off = {name: error(rows[name], exact) for name in ("alone", "cold", "ours")}
    of_reference = error(reference["alone"], exact)
    wrong = error(rows["alone"].roll(1, 0), rows["alone"])
    print(
        f"tp={tp} ep={ep} {options}: noise {noise:.5f}, batched {batched:.5f}, hits off the same prompts cold {hits:.5f}; "
        f"off float32 {of_reference:.5f} in transformer_engine, here {off}; another prompt {wrong:.5f}"
    )
    assert max(batched, hits) <= 1.5 * noise
    assert max(off.values()) <= 1.5 * of_reference
    assert wrong > 10 * max(off.values())
