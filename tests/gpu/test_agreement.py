"""On GPUs: caching off, megatron-core's caching and this package's, and TP=1 and TP=2, agree within bf16 noise.

The noise is measured in the same run: the same prompts with caching off, computed whole and in two chunks. Several GPUs round
partial sums that one GPU does not have, so theirs and one GPU's are compared with float32.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.agreement import error
from tests.gpu.launch import run_script

# Memory of a model and two engines; in float32, which two GPUs are compared with, as much again.
NEEDS = {
    "small": {"gib": 4, "seconds": 60},
    "small-gdn": {"gib": 4, "seconds": 60},
    "small-mixed": {"gib": 4, "seconds": 70},
    "small-qwen3-next": {"gib": 8, "seconds": 80},
    "small-granite": {"gib": 5, "seconds": 80},
    "nemotron-h-8b": {"gib": 26, "seconds": 120},
}


def case(preset: str, gpus: int = 1, *values: int, id: str | None = None):
    """A parameter, and what it needs."""
    need = dict(NEEDS[preset])
    if gpus > 1:
        need |= {"gpus": gpus, "gib": 1.5 * need["gib"], "seconds": 2 * need["seconds"]}
    return pytest.param(preset, *values, id=id or preset, marks=pytest.mark.gpu(**need))


def run(folder, preset: str, *options: str, tp: int = 1, pp: int = 1):
    """The worker's saved results for this preset and layout."""
    out = folder / f"{preset}-{tp}-{pp}.pt"
    arguments = ["--preset", preset, "--tp", tp, "--pp", pp, "--out", out, *options]
    printed = run_script("agreement.py", *arguments, ranks=tp * pp, TRITON_F32_DEFAULT="ieee")
    print(printed.strip().splitlines()[-1])
    return torch.load(out)


@pytest.mark.parametrize("preset", map(case, NEEDS))
def test_generates_and_caching_agrees_within_noise(preset, tmp_path):
    found = run(tmp_path, preset)
    rows, report = found["rows"], found["report"]
    assert all(len(tokens) == 8 for tokens in report["tokens_alone"])
    assert report["computed_tokens_alone"] == report["prompt_tokens"]
    noise = error(rows["chunked"], rows["alone"])
    cached = {}
    for engine in rows.keys() & {"upstream", "ours"}:  # megatron's engine does not run every layer
        assert report[f"computed_tokens_{engine}"] < 0.5 * report["prompt_tokens"]
        cached[engine] = error(rows[engine], rows["alone"])
    batched, int8 = (error(rows[name], rows["alone"]) for name in ("batched", "int8"))
    wrong = error(rows["alone"].roll(1, 0), rows["alone"])
    print(
        f"{report['preset']}: in chunks {noise:.5f}, batched {batched:.5f}, caches "
        f"{', '.join(f'{name} {value:.5f}' for name, value in (cached | {'int8': int8}).items())}, another prompt {wrong:.5f}"
    )
    assert batched <= 1.5 * noise
    assert max(cached.values()) <= 1.5 * noise
    assert wrong > 10 * max(noise, int8, 1e-3)
    assert report["computed_tokens_int8"] == report["computed_tokens_ours"]


@pytest.mark.parametrize(
    ("preset", "tp", "pp"),
    [
        case(preset, tp * pp, tp, pp, id=f"{preset}-tp{tp}" if tp > 1 else f"{preset}-pp{pp}")
        for preset, tp, pp in (
            *(("small", 2, 1), ("small", 4, 1), ("small", 1, 2)),
            *(("small-gdn", 2, 1), ("small-gdn", 1, 2), ("small-mixed", 2, 1)),
            *(("small-qwen3-next", 2, 1), ("small-qwen3-next", 1, 2)),
            ("nemotron-h-8b", 2, 1),
        )
    ],
)
def test_several_gpus_agree_with_one(preset, tmp_path, tp, pp):
    if torch.cuda.device_count() < tp * pp:
        pytest.skip(f"needs {tp * pp} GPUs")
    one, several = run(tmp_path, preset, "--float32"), run(tmp_path, preset, tp=tp, pp=pp)
    assert several["report"]["computed_tokens_ours"] == one["report"]["computed_tokens_ours"]
    exact = one["rows"]["float32"]
    alone = error(one["rows"]["alone"], exact)
    off = {name: error(several["rows"][name], exact) for name in ("alone", "ours")}
    print(f"{preset}: off float32 by {alone:.5f} on one GPU, tp={tp} pp={pp} {off}")
    assert max(off.values()) <= 1.5 * alone
