"""On GPUs: caching off, megatron-core's caching and this package's, and TP=1 and TP=2, agree within bf16 noise.

The noise is measured in the same run: the same prompts with caching off, computed whole and in two chunks. Several GPUs round
partial sums that one GPU does not have, so theirs and one GPU's are compared with float32.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.agreement import error
from tests.gpu.launch import run_script

pytestmark = pytest.mark.gpu
NEMOTRON_BYTES = 72 << 30


def run(tmp_path_factory, preset: str, *options: str, tp: int = 1, pp: int = 1):
    """The worker's saved results for this preset and layout."""
    out = tmp_path_factory.mktemp("agreement") / f"{preset}-{tp}-{pp}.pt"
    arguments = ["--preset", preset, "--tp", tp, "--pp", pp, "--out", out, *options]
    printed = run_script("agreement.py", *arguments, ranks=tp * pp, TRITON_F32_DEFAULT="ieee")
    print(printed.strip().splitlines()[-1])
    return torch.load(out)


@pytest.fixture(scope="module", params=["small", "small-gdn", "small-mixed", "small-qwen3-next", "nemotron-h-8b"])
def one(request, tmp_path_factory):
    if request.param == "nemotron-h-8b" and torch.cuda.get_device_properties(0).total_memory < NEMOTRON_BYTES:
        pytest.skip("needs 72 GiB of GPU memory")
    return run(tmp_path_factory, request.param, "--float32")


def test_generates_and_caching_agrees_within_noise(one):
    rows, report = one["rows"], one["report"]
    assert all(len(tokens) == 8 for tokens in report["tokens_alone"])
    assert report["computed_tokens_alone"] == report["prompt_tokens"]
    noise = error(rows["chunked"], rows["alone"])
    cached = {}
    for engine in [
        name for name in ("upstream", "ours", "one memory") if name in rows
    ]:  # megatron's engine does not run every layer
        assert report[f"computed_tokens_{engine}"] < 0.5 * report["prompt_tokens"]
        cached[engine] = error(rows[engine], rows["alone"])
    batched = error(rows["batched"], rows["alone"])
    wrong = error(rows["alone"].roll(1, 0), rows["alone"])
    print(
        f"{report['preset']}: in chunks {noise:.5f}, batched {batched:.5f}, caches "
        f"{', '.join(f'{name} {value:.5f}' for name, value in cached.items())}, another prompt {wrong:.5f}"
    )
    assert batched <= 1.5 * noise
    assert max(cached.values()) <= 1.5 * noise
    assert wrong > 10 * max(noise, 1e-3)


@pytest.mark.parametrize(
    ("one", "tp", "pp"),
    [
        pytest.param(preset, tp, pp, id=f"{preset}-tp{tp}" if tp > 1 else f"{preset}-pp{pp}")
        for preset, tp, pp in (
            *(("small", 2, 1), ("small", 4, 1), ("small", 1, 2)),
            *(("small-gdn", 2, 1), ("small-gdn", 1, 2), ("small-mixed", 2, 1)),
            *(("small-qwen3-next", 2, 1), ("small-qwen3-next", 1, 2)),
            ("nemotron-h-8b", 2, 1),
        )
    ],
    indirect=["one"],
)
def test_several_gpus_agree_with_one(one, tmp_path_factory, tp, pp):
    if torch.cuda.device_count() < tp * pp:
        pytest.skip(f"needs {tp * pp} GPUs")
    several = run(tmp_path_factory, one["report"]["preset"], tp=tp, pp=pp)
    caches = ("ours", "one memory")
    for name in caches:
        assert several["report"][f"computed_tokens_{name}"] == one["report"][f"computed_tokens_{name}"]
    exact = one["rows"]["float32"]
    alone = error(one["rows"]["alone"], exact)
    off = {name: error(several["rows"][name], exact) for name in ("alone", *caches)}
    print(f"{one['report']['preset']}: off float32 by {alone:.5f} on one GPU, tp={tp} pp={pp} {off}")
    assert max(off.values()) <= 1.5 * alone
