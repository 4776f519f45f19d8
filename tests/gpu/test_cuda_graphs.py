"""CUDA graphs in decode and mixed prefill: with the cache on, answers equal those without graphs."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.gpu.graphs import end_of
from tests.gpu.launch import run_script


def run(tmp_path, preset, script="graphs.py"):
    if not any(importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn_interface")):
        pytest.skip("needs flash-attention: the attention that stands in for it cannot be captured")
    out = tmp_path / "found.json"
    print(run_script(script, preset, out, TRITON_F32_DEFAULT="ieee").strip().splitlines()[-1])
    return json.loads(out.read_text())


def check_counts(found):
    """Checks that graphs were replayed in decode and in steps with prefills, that prefixes were reused and drafts accepted."""
    for name, run in found.items():
        counts = run["counts"]
        if "graphs" in name:
            assert counts["graph_decode"] > 0.9 * counts["decode"] > 0, (name, counts)
            assert counts["graph_prefill"] > 0, (name, counts)
        else:
            assert counts["graph_decode"] == counts["graph_prefill"] == 0
        least = 4 if name.endswith("tight") else 8
        reused = sum(cached >= 512 for cached in run["cached_tokens"])
        assert reused == 0 if name.startswith("uncached") else reused >= least, (name, run["cached_tokens"])
        assert (counts["accepted"] > 0) == ("drafts" in name), (name, counts)


def error(found, name, of="eager"):
    """Mean |log-prob difference| to the run ``of``, up to the first token that differs, and over how many tokens."""
    gaps = []
    both = (found[run][key] for key in ("log_probs", "tokens") for run in (name, of))
    for own, other, tokens, right in zip(*both, strict=True):
        for a, b, token, expected in zip(own, other, tokens, right, strict="ends" not in name):
            if token != expected:
                break  # what follows has another context
            gaps.append(abs(a - b))
    return sum(gaps) / len(gaps), len(gaps)


@pytest.mark.gpu(gib=3, seconds=100)
@pytest.mark.parametrize(
    "preset",
    ["tiny", "tiny-gdn", "gpt:tiny-gdn-pairs", "tiny-mtp", "tiny-gdn-mtp", "tiny-mamba-mtp", "tiny-granite-dense"],
)
def test_float32_says_the_same_tokens(tmp_path, preset):
    """Also with drafts, which a layer of attention or of Mamba2 predicts, with the cache on and off."""
    found = run(tmp_path, preset)
    check_counts(found)
    for name in found.keys() - {"int8"}:  # `test_agreement` has what int8 changes
        eager = found["int8" if name == "graphs_int8" else "eager"]
        right = eager["tokens"]
        if "ends" in name:
            ends = [end_of(number, answer) for number, answer in enumerate(right)]
            right = [answer[: answer.index(end) + 1] for answer, end in zip(right, ends, strict=True)]
            assert len({len(answer) for answer in right}) > 4
        assert found[name]["tokens"] == right, name
        off = 1e-3 if name == "graphs_int8" else 1e-4  # codes may flip
        for own, other in zip(found[name]["log_probs"], eager["log_probs"], strict=True):
            assert own == pytest.approx(other[: len(own)], abs=off)


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param("small", marks=pytest.mark.gpu(gib=6, seconds=90)),
        pytest.param("small-mixed", marks=pytest.mark.gpu(gib=6, seconds=100)),
        pytest.param("small-qwen3-next", marks=pytest.mark.gpu(gib=12, seconds=120)),
        pytest.param("small-granite", marks=pytest.mark.gpu(gib=8, seconds=120)),
    ],
)
def test_bfloat16_is_within_the_noise_of_two_runs_that_batch_differently(tmp_path, preset):
    found = run(tmp_path, preset)
    check_counts(found)
    check_noise(found, preset, "alone", "uncached_graphs")


@pytest.mark.gpu(gib=8, seconds=120)
@pytest.mark.parametrize("preset", ["small-mtp", "small-mamba-mtp", "small-nemotron-3"])
def test_bfloat16_drafts_are_within_the_noise_of_drafts_without_the_cache(tmp_path, preset):
    """On an H200 drafts changed more than batching did, with the cache off, too."""
    found = run(tmp_path, preset)
    check_counts(found)
    check_noise(found, preset, "uncached_drafts")


@pytest.mark.gpu(gib=6, seconds=90)
def test_a_gpt_model_is_within_the_noise_of_the_hybrid_model(tmp_path):
    """In bfloat16, with Transformer Engine's layers and zero-centred norms where it is installed."""
    found = run(tmp_path, "small-gdn-pairs", "gpt_model.py")
    check_counts(found)
    check_noise(found, "small-gdn-pairs", "alone", "uncached_graphs")


def check_noise(found, preset, *references):
    """Checks that no run is further from ``eager`` than those of ``references``, whose tokens are mostly those of ``eager``."""
    noises = {name: error(found, name) for name in references}
    noise = max(noise for noise, _ in noises.values())
    print(f"{preset}: mean |log-prob difference|, tokens: {noises}; the largest is the noise")
    assert min(count for _, count in noises.values()) > sum(map(len, found["eager"]["tokens"])) / 2
    for name in found.keys() - {"eager", "alone", "int8", *references}:
        own, count = error(found, name, "int8" if name == "graphs_int8" else "eager")
        print(f"{preset}: mean |log-prob difference|: {name} {own:.5f} over {count} tokens; noise {noise:.5f}")
        assert own <= 1.5 * noise


@pytest.mark.gpu(gib=2, seconds=60)
@pytest.mark.parametrize("preset", ["tiny", "tiny-gdn"])
def test_graphs_read_what_layers_derive_from_new_weights(tmp_path, preset):
    """Weights change in place, under graphs that go on. A replay runs no Python that could notice."""
    found = run(tmp_path, preset, "new_weights.py")
    fresh = found.pop("fresh")
    assert any(name.endswith("stale") for name in found) == (preset == "tiny")
    for name, own in found.items():
        right = all(a == pytest.approx(b, abs=1e-4) for a, b in zip(own["log_probs"], fresh["log_probs"], strict=True))
        same = right and own["tokens"] == fresh["tokens"]
        assert same == name.endswith(("new", "resumed")), name
        assert own["counts"]["graph_decode"] > 0.9 * own["counts"]["decode"] > 0, name
        assert not any(own["cached_tokens"]), name
