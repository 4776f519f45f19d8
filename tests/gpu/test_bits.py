"""On GPUs: with ``exact="bits"`` a request has the same bits alone and in random schedules, and each kernel shows why."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.gpu.launch import run_script


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("kernels are compared on Hopper GPUs only")


@pytest.mark.gpu(gib=9, seconds=60)
def test_rows_of_each_kernel_do_not_depend_on_each_other():
    print(run_script("bits_kernels.py"))  # its exit code says so


EXPERTS = ["small-qwen3-next", "small-nemotron-3", "tiny-qwen3-next"]  # the last in float32: expert by expert


@pytest.mark.gpu(gib=12, seconds=120)
@pytest.mark.parametrize(
    "preset",
    ["small", "small-gdn", "small-mtp", "small-mixed", "small-granite-dense", "small-olmo-hybrid", "tiny", *EXPERTS],
)
def test_a_request_has_the_same_bits_alone_and_in_random_schedules(preset, tmp_path):
    print(run_script("bits.py", preset, "--out", tmp_path))
    check(json.loads((tmp_path / f"bits_{preset}_tp1.json").read_text()))


@pytest.mark.gpu(gib=6, seconds=80)
def test_likewise_in_one_memory_with_blocks_as_long_as_the_attentions_tile(tmp_path):
    """FlashAttention 4 loads such blocks whole."""
    print(run_script("bits.py", "small", "--engines", "tight", "--block-tokens", 128, "--out", tmp_path))
    found = json.loads((tmp_path / "bits_small_tp1.json").read_text())["tight"]
    assert found["hits"] and found["evictions"] and not any(found["different"].values()), found


@pytest.mark.gpu(gib=6, seconds=50)
def test_likewise_whichever_configuration_of_a_kernel_is_the_fastest(tmp_path):
    """In processes that begin with empty folders of kernels. Without the mode bits depend on it."""

    def run(fastest):
        said = run_script("tuning.py", "small-mixed", fastest, TRITON_CACHE_DIR=str(tmp_path / fastest))
        return json.loads(said.splitlines()[-1])

    with ThreadPoolExecutor(2) as processes:
        exact, other, kernels = zip(*processes.map(run, ("first", "last")), strict=True)
    assert exact[0] == exact[1] and other[0] != other[1]
    assert kernels == (["_layer_norm_fwd_1pass_kernel"],) * 2, "no other is launched"


@pytest.mark.gpu(gib=8, gpus=2, seconds=150)
@pytest.mark.parametrize("preset", ["small", "small-gdn", "small-qwen3-next"])
def test_likewise_on_two_gpus(preset, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    print(run_script("bits.py", preset, "--tp", 2, "--out", tmp_path, ranks=2))
    check(json.loads((tmp_path / f"bits_{preset}_tp2.json").read_text()))


def check(report):
    """Same bits in every engine but the control, in one prefill of prompt and answer, and in a trainer's forward; and requests were reused, evicted and run in batches, or it would say nothing."""
    assert report["scores"] == 0
    if trainer := report.get("trainer"):
        assert trainer["without gradients"] == trainer["with gradients"] == 0 < trainer["by default"], trainer
        assert trainer["between the gradients"] < 0.1, "rounding in 16 bits turns them by less"
    some = {"drafts", "drafts in graphs"} & report.keys()
    graphs = () if report["preset"] == "tiny-qwen3-next" else ("graphs",)  # refused with experts in float32
    for engine in ("eager", "async", "tight", *graphs, *some):
        found = report[engine]
        assert not any(found["different"].values()), found
        assert found["hits"] and (engine == "tight" or found["steps"] < report["requests"])
    assert report["tight"]["evictions"]
    assert report["control"]["different"]["log-probs"]
