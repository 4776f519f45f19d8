"""CUDA graphs in decode and mixed prefill: with the cache on, answers equal those without graphs."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.gpu.launch import run_script

pytestmark = pytest.mark.gpu
MODES = ("legacy", "async")


def run(tmp_path, preset):
    if not any(importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn_interface")):
        pytest.skip("needs flash-attention: the attention that stands in for it cannot be captured")
    out = tmp_path / "found.json"
    print(run_script("graphs.py", preset, out, TRITON_F32_DEFAULT="ieee").strip().splitlines()[-1])
    return json.loads(out.read_text())


def check_counts(found):
    """Checks that graphs were replayed in decode and in steps with prefills, and that prefixes were reused."""
    for name, run in found.items():
        counts = run["counts"]
        if name.startswith("graphs"):
            assert counts["graph_decode"] > 0.9 * counts["decode"] > 0, (name, counts)
            assert counts["graph_prefill"] > 0, (name, counts)
        else:
            assert counts["graph_decode"] == counts["graph_prefill"] == 0
        least = 4 if name.endswith("one_memory") else 8  # that memory is tight
        assert sum(cached >= 512 for cached in run["cached_tokens"]) >= least, (name, run["cached_tokens"])


@pytest.mark.parametrize("preset", ["tiny", "tiny-gdn"])
def test_float32_says_the_same_tokens(tmp_path, preset):
    found = run(tmp_path, preset)
    check_counts(found)
    for name, against in (
        ("alone", "eager"),
        *((f"graphs_{m}", "eager") for m in MODES),
        ("graphs_one_memory", "eager"),
        ("graphs_drafts", "eager_drafts"),
        ("graphs_drafts_one_memory", "eager_drafts"),
    ):
        assert found[name]["tokens"] == found[against]["tokens"], name
        for own, other in zip(found[name]["log_probs"], found[against]["log_probs"], strict=True):
            assert own == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("preset", ["small", "small-mixed", "small-qwen3-next"])
def test_bfloat16_is_within_the_noise_of_two_runs_that_batch_differently(tmp_path, preset):
    found = run(tmp_path, preset)
    check_counts(found)

    def error(name):
        gaps = []
        for own, other, tokens, right in zip(
            found[name]["log_probs"],
            found["eager"]["log_probs"],
            found[name]["tokens"],
            found["eager"]["tokens"],
            strict=True,
        ):
            for a, b, token, expected in zip(own, other, tokens, right, strict=True):
                if token != expected:
                    break  # what follows has another context
                gaps.append(abs(a - b))
        return sum(gaps) / len(gaps), len(gaps)

    noise, _ = error("alone")
    for name in (*MODES, "one_memory"):
        graphs, count = error(f"graphs_{name}")
        print(
            f"{preset}: mean |log-prob difference|: graphs, {name} {graphs:.5f} over {count} tokens; noise {noise:.5f}"
        )
        assert graphs <= 1.5 * noise
