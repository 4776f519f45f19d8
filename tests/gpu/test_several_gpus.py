"""``tiny-qwen3-next`` in float32 over two GPUs, the cache on, says what it says on one: Gated DeltaNet beside experts."""

from __future__ import annotations

import pytest
import torch

from tests.harness.engine_helpers import LOG_PROB_NOISE
from tests.harness.workers import qwen3_next as worker
from tests.harness.workers.launch import run_torchrun

pytestmark = pytest.mark.gpu(gib=2, gpus=2, seconds=60)  # float32 engines of 10 MiB


@pytest.mark.parametrize("layout", worker.LAYOUTS)
def test_two_gpus_say_what_one_says(layout, tmp_path, monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    (one,) = run_torchrun("qwen3_next.py", tmp_path / "one.json", layout, ranks=1, device="cuda")
    several = run_torchrun("qwen3_next.py", tmp_path / "two.json", layout, ranks=2, device="cuda")
    most = 0.0
    for rank in several:
        assert "(cuda" in rank["platform"]
        for answer, right in zip(rank["answers"], one["answers"], strict=True):
            assert answer["tokens"] == right["tokens"] and answer["cached_tokens"] == right["cached_tokens"]
            gaps = [abs(a - b) for a, b in zip(answer["log_probs"], right["log_probs"], strict=True)]
            most = max(most, *gaps)
            assert most <= LOG_PROB_NOISE
    assert sum(answer["cached_tokens"] > 0 for answer in one["answers"]) >= 6
    for answer, right in zip(several[-1]["damaged"], one["answers"], strict=True):
        if answer["cached_tokens"]:  # or else equal answers would say nothing about states
            gaps = [abs(a - b) for a, b in zip(answer["log_probs"], right["log_probs"], strict=True)]
            assert answer["tokens"] != right["tokens"] or max(gaps) > 5 * LOG_PROB_NOISE
    print(f"{layout}: log-probs within {most:.1e} of one GPU's")
