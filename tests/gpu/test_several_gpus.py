"""``tiny-qwen3-next`` in float32 over two GPUs, the cache on, says what it says on one: Gated DeltaNet beside experts."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_gpt_model import session
from tests.harness.engine_helpers import LOG_PROB_NOISE, assert_same
from tests.harness.workers.launch import run_play, run_torchrun

pytestmark = pytest.mark.gpu(gib=2, gpus=2, seconds=60)  # float32 engines of 10 MiB

# Sizes of the layout, and changes of the preset: two ranks share one key/value head; each stage has attention.
LAYOUTS = {
    "tp2": ({"tp": 2}, {"num_query_groups": 1}),
    "pp2": ({"pp": 2}, {"layer_pattern": "GE*EGE*E"}),
    "ep2": ({"ep": 2}, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_say_what_one_says(layout, tmp_path, monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    sizes, changes = LAYOUTS[layout]
    play = {"device": "cuda", "model": {"name": "tiny-qwen3-next", **changes}}
    play["parts"] = {"on": session(), "damaged": session(["last: damage"])}
    (one,), several = (
        run_play(tmp_path, play | {"sizes": of}, ranks, by=run_torchrun, device="cuda")
        for ranks, of in ((1, {}), (2, sizes))
    )
    right = one["on"]["answers"]
    for rank in several:
        assert "(cuda" in rank["platform"]
        print(f"{layout}: log-probs within {assert_same(rank['on']['answers'], right):.1e} of one GPU's")
        assert [answer["cached_tokens"] for answer in rank["on"]["answers"]] == [
            each["cached_tokens"] for each in right
        ]
    assert sum(answer["cached_tokens"] > 0 for answer in right) >= 6
    for answer, reference in zip(several[-1]["damaged"]["answers"], right, strict=True):
        if answer["cached_tokens"]:  # or else equal answers would say nothing about states
            gaps = [abs(a - b) for a, b in zip(answer["log_probs"], reference["log_probs"], strict=True)]
            assert answer["tokens"] != reference["tokens"] or max(gaps) > 5 * LOG_PROB_NOISE
