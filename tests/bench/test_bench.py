"""`hybrid-prefix bench`: its arithmetic, bad input, and that each scenario measures what it claims."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hybrid_prefix.bench import engines, runner
from megatron_hybrid_prefix.bench.floor import floor_bytes
from megatron_hybrid_prefix.bench.forced import forced_answers
from megatron_hybrid_prefix.bench.scenarios import SCENARIOS
from megatron_hybrid_prefix.bench.stats import Metric, median, percentile, ratio, rotated, summarise
from megatron_hybrid_prefix.cli import bench
from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from tests.harness.engine_helpers import LOG_PROB_NOISE, greedy
from tests.harness.workers.launch import COMMAND, environments_of, run_prepared

ROOT = Path(__file__).resolve().parents[2]

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
# Nothing here needs a good figure.
SMALL = {
    "shared_prefix": ("--shared-tokens", 512, "--own-tokens", 300, "--cold-prompts", 2, "--generate", 2),
    "no_reuse": ("--requests", 3, "--prompt-tokens", 300, "--generate", 5),
    "decode": ("--requests", 3, "--prompt-tokens", 40, "--generate", 12),
    "pressure": ("--prefixes", 8, "--shared-tokens", 512, "--requests", 12, "--generate", 3, "--running", 2),
    "multi_turn": ("--turns", 3, "--new-tokens", 150, "--generate", 6),
    "first_sighting": ("--shared-tokens", 512, "--own-tokens", 300, "--generate", 2),
    "herd": ("--requests", 3, "--prefix-blocks", 2, "--own-tokens", 300, "--generate", 2),
    "host_tier": ("--prompts", 8, "--shared-tokens", 512, "--own-tokens", 60, "--generate", 2),
    "samples": ("--samples", 3, "--prompt-tokens", 600, "--generate", 3),
    "index": ("--index-blocks", 4800, "--long-prompt-tokens", 30000, "--steps", 12, "--requests", 3),
}


pytestmark = pytest.mark.usefixtures("engine_imported")


def small(scenario, *argv):
    """Arguments of the command, with small sizes."""
    return [scenario, *map(str, (*SMALL[scenario], *argv))]


@pytest.fixture
def measure(tmp_path):
    """A function that runs the command with small sizes in this process, and returns the JSON it saved.

    ``prompt_tokens`` and ``generated_tokens`` are those of each repeat; None: the scenario counts none.
    """

    def run(scenario, *argv, code=0, prompt_tokens=None, generated_tokens=None):
        path = tmp_path / "result.json"
        assert bench.main(small(scenario, *argv, "--json", path)) == code
        data = json.loads(path.read_text())
        for metric in data["metrics"].values():
            assert_consistent(metric)
        for engine in (name for name, found in data["engines"].items() if found["status"] == "completed"):
            if "failed_requests" in data["metrics"]:
                assert not any(samples(data, "failed_requests", engine))
            if prompt_tokens is not None:
                computed, reused = (samples(data, name, engine) for name in ("computed_tokens", "reused_tokens"))
                assert computed and {c + r for c, r in zip(computed, reused, strict=True)} == {prompt_tokens}
            if generated_tokens is not None:
                assert set(samples(data, "generated_tokens", engine)) == {generated_tokens}
                if "tokens_per_second" in data["metrics"]:
                    rates = [generated_tokens / wall_s for wall_s in samples(data, "wall_s", engine)]
                    assert samples(data, "tokens_per_second", engine) == pytest.approx(rates)
        return data

    return run


@pytest.fixture
def before_send(monkeypatch):
    """A function that has another one called before an engine gets prompts, with its name, the prompts and options."""
    send = engines.Contestant.send

    def use(function):
        def first(self, prompts, generate, **options):
            function(self.name, prompts, **options)
            return send(self, prompts, generate, **options)

        monkeypatch.setattr(engines.Contestant, "send", first)

    return use


def engines_of(names):
    return [word for name in names.split() for word in ("--engine", name)]


def assert_consistent(metric):
    """Checks that medians are those of the samples, and ratios are quotients of the medians."""
    for engine, value in metric["median"].items():
        known = sorted(sample for sample in metric["samples"][engine] if sample is not None)
        if value is not None:
            middle = known[(len(known) - 1) // 2 : len(known) // 2 + 1]
            assert value == pytest.approx(sum(middle) / len(middle))
    for pair, value in metric["ratio"].items():
        engine, to = (metric["median"][name] for name in pair.split("/"))
        if value is None:
            assert engine is None or not to
        else:
            assert value == pytest.approx(engine / to)


def samples(data, name, engine):
    return data["metrics"][name]["samples"][engine]


# --- Arithmetic ------------------------------------------------------------------------------------------------------


def test_arithmetic():
    assert ["".join(rotated("abc", shift)) for shift in (-1, 0, 1, 2, 3)] == ["cab", "abc", "bca", "cab", "abc"]
    assert rotated([], 3) == []
    assert [median(values) for values in ([3.0, 1.0, 2.0], [4.0, None, 1.0], [None], [])] == [2.0, 2.5, None, None]
    assert (ratio(3.0, 2.0), ratio(0.0, 2.0)) == (1.5, 0.0)
    assert ratio(1.0, 0.0) is ratio(None, 1.0) is ratio(1.0, None) is None
    hundred = [float(n) for n in range(100, 0, -1)]
    assert [percentile(hundred, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0 and percentile([], 0.99) is None


def test_a_summary_has_samples_medians_and_ratios_of_medians():
    metrics = [Metric(name="t_ms", label="t"), Metric(name="n", label="n", ratios=False)]
    rounds = {
        "off": [{"t_ms": 10.0, "n": 1}, {"t_ms": 30.0, "n": 1}, {"t_ms": 20.0, "n": 1}],
        "upstream": [{"t_ms": 5.0, "n": 2}],
        "ours": [{"t_ms": 4.0}, {"t_ms": 5.0}, {"t_ms": 60.0}],
    }
    report = summarise(metrics, rounds, crashed=["upstream"])
    assert report["t_ms"]["samples"]["off"] == [10.0, 30.0, 20.0]
    assert report["t_ms"]["samples"]["upstream"] == [5.0]
    assert report["t_ms"]["median"] == {"off": 20.0, "upstream": None, "ours": 5.0}
    assert report["t_ms"]["ratio"] == {"upstream/off": None, "ours/off": 0.25, "ours/upstream": None}
    assert report["n"]["median"] == {"off": 1, "upstream": None, "ours": None}
    assert report["n"]["ratio"] == {}


# --- Bad input: one line, exit code 2, nothing written ---------------------------------------------------------------

# Options of models and engines: tests/cli/test_run_inference.py, whose verb has the same ones.
BAD_OPTIONS = {  # by command line
    "": "required: SCENARIO",
    "everything": "invalid choice: 'everything'",
    "decode --engine off --engine off": "--engine: off and off name an engine twice",
    "decode --graph-scope block": "--graph-scope block: needs --cuda-graphs",
    "decode --versus fast=1": "unrecognized arguments: --fast=1",
    "decode --versus seed=1": "--versus seed=1: give what differs between",
    "decode --versus tp=1": "--versus tp=1: give what differs between engines, of: async",
    "decode --plot x.gif": "--plot: x.gif must end with .png or .svg",
    "decode --generate 5": "--generate 5: no 6 steps in which all 4 rows decode: raise it",
    "no_reuse --shared-tokens 8": "unrecognized arguments: --shared-tokens 8",
    "index --repeats 0": "argument --repeats: '0' is not a whole number above 0",
    "pressure --budget-fraction 1.5": "1.5 must be below 1",
    "pressure --prefixes 4": "4 running requests need as many KV blocks as all prefixes",
    "pressure --shared-tokens 200": "200 is less than a block of 256 tokens",
    "multi_turn --turns 1": "--turns must be at least 2",
    "multi_turn --turns 99": "25680 prompt + 60 generated tokens exceed the",
    "first_sighting --shared-tokens 9": "9 is less than a block of 256 tokens",
    "herd --max-requests 3": "--requests 4 cannot run at once with --max-requests 3",
    "samples --max-requests 3": "--samples 4 cannot run at once with --max-requests 3",
    "samples --prompt-tokens 256": "256 must be longer than a block of 256 tokens",
    "index --index-blocks 9": "--index-blocks 9 must be at least 2000",
    "index --index-blocks 2000 --long-prompt-tokens 600000": "more than --index-blocks",
    "index --requests 5 --max-requests 4": "cannot run at once",
    "no_reuse --prompt-tokens 16890": "16890 prompt + 16 generated tokens exceed",
    "no_reuse --max-tokens 64": "512 tokens are more than --max-tokens 64",
    "shared_prefix --engine off --cache-gb 0.002 --max-requests 4 --own-tokens 600": (
        "engine off: 1624 prompt tokens and 4 to generate need 7 KV blocks of 256 tokens, there are 5"
    ),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = shlex.split(case)
    output = [] if "--json" in argv or len(argv) < 2 else ["--json", "result.json"]
    assert bench.main([*argv, *output]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert BAD_OPTIONS[case] in error
    assert list(tmp_path.iterdir()) == []


# --- Scenarios -------------------------------------------------------------------------------------------------------


def test_shared_prefix(measure, capsys):
    data = measure("shared_prefix", "--repeats", 2)
    for engine in ("off", "upstream", "ours"):
        # New prompts in each repeat: the first sighting finds nothing.
        assert samples(data, "reused_tokens_1", engine) == [0, 0]
        for sighting in range(1, 5):
            computed = samples(data, f"computed_tokens_{sighting}", engine)
            reused = samples(data, f"reused_tokens_{sighting}", engine)
            assert [c + r for c, r in zip(computed, reused, strict=True)] == [812, 812]
            assert min(samples(data, f"first_token_{sighting}_ms", engine)) > 0
    for sighting in range(1, 5):
        assert samples(data, f"reused_tokens_{sighting}", "off") == [0, 0]
    # At the latest the second sighting shows that 512 tokens are shared and keeps their state, and the third uses it.
    ours = [data["metrics"][f"reused_tokens_{n}"]["median"]["ours"] for n in range(1, 5)]
    assert ours in ([0, 0, 512, 512], [0, 512, 512, 512])
    assert data["metrics"]["computed_tokens_3"]["ratio"]["ours/off"] == pytest.approx(300 / 812)
    assert data["metrics"]["cold_tokens"]["median"] == {"off": 300, "upstream": 300, "ours": 300}
    hit, cold = (samples(data, name, "ours") for name in ("hit_first_token_ms", "cold_first_token_ms"))
    assert samples(data, "hit_over_cold", "ours") == pytest.approx([a / b for a, b in zip(hit, cold, strict=True)])
    assert samples(data, "hit_over_cold", "off") == [None, None]
    # Of the two hits in turns with cold prompts, and of the warm-up round, too.
    assert data["engines"]["ours"]["prefix_stats"]["reused_tokens"] == 3 * (sum(ours) + 2 * 512)
    assert data["engines"]["off"]["prefix_stats"] is None

    assert data["versions"]["megatron-core"] and data["hardware"]["cores"] >= 1
    assert data["command"].endswith(f"--json {data['options']['json']}")
    assert (data["options"]["repeats"], data["options"]["preset"], data["options"]["cuda_graphs"]) == (2, "tiny", 0)
    output = capsys.readouterr().out
    assert "sighting 3: tokens reused" in output and "ours/upstream" in output
    assert "rounds: 1 warm-up, 2 timed" in output and "wrote" in output


def test_cold_prompts_are_as_long_as_what_a_hit_computed(measure):
    """A hit reuses one block of the 500 shared tokens. It computes the other 244 and its own 300."""
    data = measure("shared_prefix", "--repeats", 1, "--shared-tokens", 500, *engines_of("off ours"))
    assert samples(data, "computed_tokens_4", "ours") == samples(data, "cold_tokens", "ours") == [544]
    assert samples(data, "cold_tokens", "off") == [300]
    assert list(data["engines"]) == ["off", "ours"]


@pytest.mark.slow
def test_multi_turn(measure):
    """2 conversations with prompts of 150, 306 and 462 tokens. Asynchronous: see `test_forced_answers`."""
    data = measure("multi_turn", "--repeats", 2, prompt_tokens=2 * (150 + 306 + 462), generated_tokens=2 * 3 * 6)
    for engine in ("off", "upstream", "ours"):
        computed = samples(data, "computed_tokens", engine)
        # The first turn is all new, and the mean is that of the others.
        means = samples(data, "mean_turn_computed_tokens", engine)
        assert computed == [2 * 150 + 4 * mean for mean in means]
        most = samples(data, "max_turn_computed_tokens", engine)
        assert all(mean <= value <= 462 for mean, value in zip(means, most, strict=True))
        medians, p99 = (samples(data, f"first_token_{name}_ms", engine) for name in ("median", "p99"))
        assert all(0 < middle <= high for middle, high in zip(medians, p99, strict=True))
    assert samples(data, "max_turn_computed_tokens", "off") == [462, 462]
    assert samples(data, "last_quarter_reused_share", "off") == [0, 0]
    # Upstream keeps the state behind the last full block of a prompt: turn 3 resumes at 256.
    assert samples(data, "last_quarter_reused_share", "upstream") == [256 / 462] * 2
    assert samples(data, "max_turn_computed_tokens", "upstream") == [306, 306]
    assert max(samples(data, "max_turn_computed_tokens", "ours")) <= 306
    assert min(samples(data, "last_quarter_reused_share", "ours")) >= 256 / 462
    assert data["metrics"]["max_turn_computed_tokens"]["goal"] == "<= 406"


def test_first_sighting(measure, before_send):
    sent: list[tuple[str, tuple[int, ...], Any]] = []
    before_send(lambda name, prompts, attributes: sent.append((name, tuple(prompts[0][:512]), attributes)))
    data = measure("first_sighting", "--repeats", 1)
    for variant in ("named", "plain"):
        computed = {
            engine: [samples(data, f"computed_tokens_{n}_{variant}", engine)[0] for n in (1, 2, 3)]
            for engine in ("off", "upstream", "ours")
        }
        assert computed["off"] == [812, 812, 812]
        assert computed["upstream"] == [812, 812, 300]  # it ignores the hint
        assert computed["ours"][0] == 812 and computed["ours"][1] <= 812 and computed["ours"][2] == 300
        for engine in computed:
            second, third = (samples(data, f"first_token_{n}_{variant}_ms", engine)[0] for n in (2, 3))
            assert samples(data, f"second_over_third_{variant}", engine) == pytest.approx([second / third])
    named = [{"cache_breakpoints": [512]}]
    for engine in ("off", "upstream", "ours"):
        own = [(shared, attributes) for name, shared, attributes in sent if name == engine]
        assert [attributes for _, attributes in own] == [named, [{}]] * 3 * 2
        assert len({shared for shared, _ in own}) == 4  # a prefix a variant, and new ones in each round


def test_herd(measure):
    data = measure("herd", "--repeats", 2, "--block-size-tokens", 128, prompt_tokens=3 * 556)
    assert "2 shared blocks (256 tokens) + 300 own tokens" in data["workload"]
    for engine in ("off", "upstream", "ours"):
        times = samples(data, "prefix_computed_times", engine)
        assert times == [(value - 3 * 300) / 256 for value in samples(data, "computed_tokens", engine)]
        assert all(1 <= value <= 3 for value in times)
        earliest, latest, walls = (
            samples(data, name, engine) for name in ("earliest_first_token_ms", "latest_first_token_ms", "wall_s")
        )
        assert all(0 < a <= b <= 1000 * c for a, b, c in zip(earliest, latest, walls, strict=True))
    assert samples(data, "prefix_computed_times", "off") == [3, 3]


def test_samples(measure):
    """A prompt has 2 blocks of 256 tokens and 88 more. The first request computes 600 tokens, the others 88 each."""
    data = measure("samples", "--repeats", 1, prompt_tokens=3 * 600, generated_tokens=9)
    assert samples(data, "reused_tokens", "off") == [0]
    for engine in ("off", "upstream", "ours"):
        (computed,) = samples(data, "computed_tokens", engine)
        assert 600 + 2 * 88 <= computed <= 3 * 600
        assert samples(data, "computed_over_bound", engine) == pytest.approx([computed / 776])
    assert data["metrics"]["computed_tokens"]["goal"] == "<= 776"


def test_no_reuse(measure, tmp_path):
    plot = tmp_path / "plot.svg"
    data = measure("no_reuse", "--repeats", 3, "--plot", plot, prompt_tokens=3 * 300, generated_tokens=3 * 5)
    for engine in ("off", "upstream", "ours"):
        assert samples(data, "reused_tokens", engine) == [0] * 3
    assert set(data["metrics"]["tokens_per_second"]["ratio"]) == {"upstream/off", "ours/off", "ours/upstream"}
    for text in ("generated tokens/s", "caching off", "megatron-core's cache", "this cache", "tiny on "):
        assert f"<!-- {text}" in plot.read_text(), text  # matplotlib writes each text beside its outlines


def test_every_scenario_has_a_plot_of_its_own_figures():
    for kind in SCENARIOS.values():
        scenario = kind(**{field.name: field.metadata["cpu"] for field in kind.sizes()})
        assert {*kind.drawn} <= {metric.name for metric in scenario.metrics()}, kind.name


def test_decode(measure):
    """Settings reach their engine alone; a prompt token is no decode step."""
    options = ("--versus", "state-dtype=bfloat16", "--versus", "async-scheduling")
    data = measure("decode", "--repeats", 2, *engines_of("ours off"), *options)
    settings = {name: (one["fields"].get("async_sched_mode")) for name, one in data["engines"].items()}
    assert settings == {"ours": None, "off": "legacy", "versus": "async"} and data["engines"]["versus"]["kind"] == "off"
    rates = {name: samples(data, "tokens_per_second", name) for name in settings}
    floors = {name: samples(data, "floor_ms", name) for name in settings}
    for name in settings:
        # 12 tokens: a row has its last one after it decoded, the first four steps warm up, and n ends bound n - 1 steps.
        assert samples(data, "steps", name) == [6, 6]
        steps_ms = samples(data, "step_ms", name)
        assert rates[name] == pytest.approx([3e3 / ms for ms in steps_ms])
        assert samples(data, "step_over_floor", name) == pytest.approx(
            [ms / floor for ms, floor in zip(steps_ms, floors[name], strict=True)]
        )
    best = [max(pair) for pair in zip(rates["off"], rates["versus"], strict=True)]
    assert samples(data, "over_best_off", "ours") == pytest.approx(
        [rate / off for rate, off in zip(rates["ours"], best, strict=True)]
    )
    assert floors["off"] == floors["ours"] and floors["versus"][0] < floors["off"][0]


def test_what_a_decode_step_must_move(tiny, platform):
    """Weights without the input embedding; two rows' states twice and keys and values of 40 tokens. Experts that are touched."""
    from megatron_hybrid_prefix.mcore import build_engine
    from tests.harness.engine_helpers import state_bytes

    weights = sum(weight.nbytes for name, weight in tiny.named_parameters() if not name.startswith("embedding."))
    config = tiny.hybrid_config
    token = 2 * config.count("*") * config.num_query_groups * config.kv_channels * 4
    assert floor_bytes(build_engine(tiny), 2, 40) == weights + 2 * (2 * state_bytes(tiny) + 40 * token)
    config = get_preset("tiny-moe")
    engine = build_engine(build_hybrid_model(config, platform=platform))
    idle = 2 * config.count("E") * 2 * config.hidden_size * config.ffn_hidden_size * 4  # two of four in each layer
    assert floor_bytes(engine, 2, 40) - floor_bytes(engine, 2, 40, touched=0.5) == idle


def assert_same_memory(data):
    """Checks that all engines with a cache have the same memory on the device."""
    budgets = {name: engine["budget"] for name, engine in data["engines"].items()}
    if "upstream" in budgets:
        assert sum(budgets["upstream"].values()) == pytest.approx(budgets["ours"]["cache_gb"])
    assert budgets["ours"].keys() & {"cache_gb", "buffer_gb", "mamba_gb"} == {"cache_gb"}


def test_engines_share_the_memory_that_is_free(measure, monkeypatch):
    """With the usual budgets they would not fit together."""
    monkeypatch.setattr(runner, "free_for_engines", lambda platform: int(0.06 * 2**30))
    data = measure("no_reuse", "--repeats", 1)
    assert data["engines"]["ours"]["budget"] == {"cache_gb": 0.016} or data["engines"]["ours"]["budget"] == {
        "cache_gb": 0.017
    }
    assert_same_memory(data)


@pytest.mark.parametrize("engine", ["upstream", "ours"])
def test_a_lack_of_memory_is_one_line(engine, tmp_path, before_send, capsys):
    """Of any engine, also while requests run."""
    import torch

    @before_send
    def raising(name, prompts):
        if name == engine:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 28.00 GiB. GPU 0 has a total of")

    assert bench.main(small("no_reuse", "--json", tmp_path / "result.json")) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: engine {engine}: not enough memory; lower --cache-gb, --max-requests ")
    assert said.count("\n") == 1 and "or run fewer engines" in said and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_pressure(measure, capsys):
    # A state of 24 KiB takes a page of one block of 32 KiB.
    options = (*engines_of("off ours"), "--block-size-tokens", 32)
    data = measure("pressure", "--repeats", 2, *options, prompt_tokens=12 * 612, generated_tokens=12 * 3)
    # Half of 8 prefixes of 16 blocks, half of 8 states, and rings; the same bytes for both.
    blocks = {name: engine["kv_blocks"] for name, engine in data["engines"].items()}
    assert 64 < blocks["ours"] <= 64 + 4 + 2 and blocks["off"] == 65
    assert min(samples(data, "evictions", "ours")) > 0
    assert min(samples(data, "kv_evictions", "ours")) > 0
    assert sum(samples(data, "reused_tokens", "off")) == 0
    for engine in ("off", "ours"):
        assert data["engines"][engine]["status"] == "completed"
    assert 0 < min(samples(data, "reused_share", "ours")) <= max(samples(data, "reused_share", "ours")) <= 1
    assert min(samples(data, "reused_tokens", "ours")) >= 512
    output = capsys.readouterr().out
    assert re.search(r"engine ours: \d+ KV blocks or \d+ state slots \(cache_gb 0.00", output)
    assert re.search(r"engine off: 65 KV blocks, 0 state slots \(buffer_gb 0.00", output)


@pytest.mark.slow
def test_host_tier(measure, monkeypatch):
    """All requests complete, also after capturing CUDA graphs, which resets the engine in inference mode."""
    import torch

    from megatron_hybrid_prefix import mcore

    build_engine = mcore.build_engine

    def captured(*args, **kwargs):
        engine = build_engine(*args, **kwargs)
        with torch.inference_mode():
            engine.context.reset()
        return engine

    monkeypatch.setattr(mcore, "build_engine", captured)
    data = measure("host_tier", "--repeats", 2, *engines_of("off upstream ours"))
    assert {engine["error"] for engine in data["engines"].values()} == {None}
    blocks = {name: engine["kv_blocks"] for name, engine in data["engines"].items()}
    assert 6 < blocks.pop("ours") < 12 and set(blocks.values()) == {7}  # of the 24 that the prompts take
    assert_same_memory(data)
    assert samples(data, "reused_share", "off") == [0.0, 0.0]
    assert max(samples(data, "reused_share", "upstream")) <= 0.5  # nothing comes back to it
    assert samples(data, "reused_share", "ours") == [1.0, 1.0]
    assert min(samples(data, "loaded_mb", "ours")) > 0


def test_engines_run_in_inference_mode(platform, tiny):
    """Also if a scenario steps the engines itself, and if a batch runs without the bench."""
    import torch

    from megatron_hybrid_prefix.mcore import build_engine
    from megatron_hybrid_prefix.mcore.runner import run_batch

    contestant = engines.Contestant("off", "off", None)
    with contestant.attempt():
        assert torch.is_inference_mode_enabled()
    engine, modes = build_engine(tiny), []
    run_batch(
        engine, [[1, 2]], engines.greedy(1), on_step=lambda *counts: modes.append(torch.is_inference_mode_enabled())
    )
    assert modes == [True]
    assert not torch.is_inference_mode_enabled()


def test_a_budget_too_small_for_upstream_is_a_result(measure):
    """Upstream's scratch alone takes 3 slots."""
    data = measure("pressure", "--repeats", 1, "--budget-fraction", 0.3, *engines_of("upstream ours"))
    assert data["engines"]["upstream"]["error"].startswith("ValueError: Mamba prefix cache budget")
    assert "kv_blocks" not in data["engines"]["upstream"]
    assert samples(data, "failed_requests", "ours") == [0]


@pytest.mark.slow
def test_index(measure, capsys):
    data = measure("index", "--repeats", 2)
    plane = {name: metric["samples"]["cache"] for name, metric in data["control_plane"].items()}
    assert all(len(values) == 2 and min(values) > 0 for values in plane.values())
    parts = [plane[f"index_{part}_ms"] for part in ("keys", "match", "admit", "plan")]
    assert [sum(values) for values in zip(*parts, strict=True)] == pytest.approx(plane["index_total_ms"])
    assert plane["index_bytes_per_block"][0] <= 3 * 600
    for metric in data["control_plane"].values():
        assert_consistent(metric)
    for engine in ("off", "upstream", "ours"):
        cpu_ms, wall_ms = (samples(data, name, engine) for name in ("decode_cpu_ms", "decode_wall_ms"))
        assert min(cpu_ms) > 0 and len(cpu_ms) == len(wall_ms)
    difference = data["metrics"]["decode_cpu_over_off_ms"]["samples"]
    assert difference["off"] == [None, None]
    assert all(math.isfinite(value) for value in difference["ours"])
    # 300 tokens and 30 generated: one boundary in the prompt, no admission and no eviction in the measured steps.
    assert data["engines"]["ours"]["prefix_stats"]["prompt_tokens"] == 3 * 3 * 300
    assert "memory of a block, bytes" in capsys.readouterr().out


@pytest.mark.slow
def test_options_reach_every_engine(measure):
    argv = "--chunked-prefill --max-tokens 128 --async-scheduling --block-size-tokens 128 --max-requests 4 "
    argv += "--cache-gb 0.175 --mamba-gb 0.05 --state-dtype bfloat16"
    fields = {"enable_chunked_prefill": True, "async_sched_mode": "async", "block_size_tokens": 128}
    data = measure("no_reuse", "--repeats", 1, *argv.split(), generated_tokens=15)
    for engine, found in data["engines"].items():
        assert found["fields"].items() >= fields.items()
        assert engine == "ours" or found["fields"]["buffer_size_gb"] == pytest.approx(0.125)
    assert_same_memory(data)
    assert data["engines"]["upstream"]["state_slots"] == pytest.approx(3276, rel=0.01)  # of 16 KiB; in float32 24


# --- Forced answers --------------------------------------------------------------------------------------------------

FORCED_FIELDS = {
    "legacy": {},
    "async": {"async_sched_mode": "async"},
    "chunked": {"enable_chunked_prefill": True, "max_tokens": 128},
    "chunked, async": {"enable_chunked_prefill": True, "max_tokens": 128, "async_sched_mode": "async"},
    "preempted": {"buffer_size_gb": 0.0017},
    "preempted, async": {"buffer_size_gb": 0.0017, "async_sched_mode": "async"},
}


@pytest.mark.parametrize(("case", "kind"), [*((case, "ours") for case in FORCED_FIELDS), ("preempted", "off")])
def test_forced_answers(case, kind, tiny):
    """The forced tokens are the answer, and the input of the next forward."""
    from megatron.core.inference.config import AsyncScheduleMode

    from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
    from megatron_hybrid_prefix.mcore.runner import run_batch

    fields = dict(FORCED_FIELDS[case])
    if "async_sched_mode" in fields:
        fields["async_sched_mode"] = AsyncScheduleMode(fields["async_sched_mode"])
    prefix = HybridPrefixConfig(cache_gb=fields.pop("buffer_size_gb", 0.1)) if kind == "ours" else None
    engine = build_engine(tiny, prefix=prefix, max_sequence_length=1024, max_requests=4, **fields)
    prompts = [[17 * n + i % 251 for i in range(249 + n)] for n in range(4)]
    answers = [[(91 * n + 7 * i) % 512 for i in range(20)] for n in range(4)]
    with forced_answers(engine, answers):
        results = run_batch(engine, prompts, greedy(20))
    assert "add_request" not in vars(engine) and "_dynamic_step_sample_logits" not in vars(engine.controller)
    assert [result.generated for result in results] == answers
    assert (engine.evicted_request_count > 0) == case.startswith("preempted")

    plain = build_engine(tiny, max_sequence_length=1024)
    for at in (0, 1, 12):
        with forced_answers(plain, [answer[at:] for answer in answers]):
            longer = [prompt + answer[:at] for prompt, answer in zip(prompts, answers, strict=True)]
            again = run_batch(plain, longer, greedy(1))
        expected = [result.log_probs[at] for result in results]
        assert [result.log_probs[0] for result in again] == pytest.approx(expected, abs=LOG_PROB_NOISE)
    free = run_batch(plain, prompts[:1], greedy(20))
    assert free[0].generated != answers[0]


def test_forced_answers_go_without_drafts():
    engine = SimpleNamespace(controller=SimpleNamespace(num_speculative_tokens=2), context=None)
    with pytest.raises(InputError, match="not supported with speculative tokens"), forced_answers(engine, []):
        raise AssertionError("not reached")


def test_an_answer_that_differs_from_the_forced_one_is_an_error(measure, monkeypatch):
    from contextlib import nullcontext

    monkeypatch.setattr(engines, "forced_answers", lambda engine, answers: nullcontext())
    data = measure("multi_turn", "--engine", "off", "--repeats", 1, code=1)
    assert data["engines"]["off"]["error"] == "RuntimeError: an answer differs from the forced one"
    assert samples(data, "wall_s", "off") == []


# --- Honesty ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_engines_take_turns_with_the_same_new_prompts(measure, before_send):
    sent: list[tuple[str, list[list[int]]]] = []

    @before_send
    def record(name, prompts):
        assert not gc.isenabled()
        sent.append((name, prompts))

    measure("no_reuse", "--repeats", 3, "--seed", 5)
    names = [name for name, _ in sent]
    assert names[3:] == ["off", "upstream", "ours", "upstream", "ours", "off", "ours", "off", "upstream"]
    assert sorted(names[:3]) == ["off", "ours", "upstream"]  # the warm-up round
    rounds = [[prompts for _, prompts in sent[at : at + 3]] for at in range(0, 12, 3)]
    assert all(same[0] == same[1] == same[2] for same in rounds)
    beginnings = [tuple(prompt[:32]) for same in rounds for prompt in same[0]]
    assert len(set(beginnings)) == 4 * 3
    sent_before = list(sent)
    sent.clear()
    measure("no_reuse", "--repeats", 1, "--seed", 5)
    assert [prompts for _, prompts in sent] == [prompts for _, prompts in sent_before[:6]]


@pytest.mark.parametrize(("engine", "code"), [("upstream", 0), ("ours", 1)])
def test_an_engine_that_raises_does_not_end_the_others(engine, code, measure, tmp_path, before_send, capsys):
    count = 0

    @before_send
    def raising(name, prompts):
        nonlocal count
        count += name == engine
        if name == engine and count == 3:  # in the second repeat
            raise RuntimeError("no room\nleft")

    plot = tmp_path / "plot.svg"
    data = measure("no_reuse", "--repeats", 3, "--plot", plot, code=code)
    assert data["engines"][engine]["error"] == "RuntimeError: no room left"
    assert "crashed: RuntimeError: no room left\n" in capsys.readouterr().out
    assert "<!-- crashed -->" in plot.read_text()
    walls = data["metrics"]["wall_s"]
    assert {name: len(values) for name, values in walls["samples"].items()} == {
        name: 1 if name == engine else 3 for name in ("off", "upstream", "ours")
    }
    assert walls["median"][engine] is None and walls["ratio"][f"{engine}/off"] is None
    assert count == 3


def test_each_engine_captures_graphs_as_if_alone(platform):
    """The graphs of one engine are hidden from the next one. At the end all graphs are known again."""
    from megatron.core.transformer.cuda_graphs import CudaGraphManager, _CudagraphGlobalRecord

    before = _CudagraphGlobalRecord.cudagraph_inference_record, CudaGraphManager.global_mempool
    try:
        records = engines.GraphRecords()
        for name in ("one", "two"):
            records.begin()
            assert _CudagraphGlobalRecord.cudagraph_inference_record == []
            assert CudaGraphManager.global_mempool is None
            _CudagraphGlobalRecord.cudagraph_inference_record.append(name)
            CudaGraphManager.global_mempool = name
            records.end()
        records.put_back()
        assert _CudagraphGlobalRecord.cudagraph_inference_record == ["one", "two"]
    finally:
        _CudagraphGlobalRecord.cudagraph_inference_record, CudaGraphManager.global_mempool = before


def test_ctrl_c_writes_nothing(tmp_path, monkeypatch, capsys):
    asked = iter(range(1000))
    monkeypatch.setattr(runner, "stop_requested", lambda platform, interrupt: next(asked) >= 15)  # in the warm-up
    assert bench.main(small("no_reuse", "--json", tmp_path / "result.json")) == 130
    assert capsys.readouterr().err == "interrupted: nothing was written\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_was_measured(number, tmp_path, monkeypatch, capsys):
    """In the last of three rounds: the two before it are written."""
    repeat, path = SCENARIOS["no_reuse"].repeat, tmp_path / "result.json"
    before, rounds = signal.getsignal(number), iter(range(9))

    def stopped(self, *args):
        if next(rounds) == 3:  # after the warm-up
            os.kill(os.getpid(), number)
        return repeat(self, *args)

    monkeypatch.setattr(SCENARIOS["no_reuse"], "repeat", stopped)
    code = bench.main(small("no_reuse", "--repeats", 3, "--json", path))
    signal.signal(number, before)
    assert code == 130
    assert capsys.readouterr().err == f"interrupted: what was measured is in {path}\n"
    data = json.loads(path.read_text())
    ends = {(engine["status"], engine["error"]) for engine in data["engines"].values()}
    assert ends == {("interrupted", "after 2 of 3 rounds")}
    assert {len(values) for values in data["metrics"]["wall_s"]["samples"].values()} == {2}


# --- Processes -------------------------------------------------------------------------------------------------------


def test_help_shows_sizes_and_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')\n")
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, str(COMMAND), "bench"]
    shown = subprocess.run([*command, "shared_prefix", "--help"], capture_output=True, text=True, env=environment)
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert "--shared-tokens N tokens of the shared prefix (default: 1,024 on CPU, 8,192 on GPU)" in text
    wrong = subprocess.run([*command, "no_reuse", "--engine", "x"], capture_output=True, text=True, env=environment)
    assert (wrong.returncode, wrong.stderr) == (
        *(2, "error: argument --engine: invalid choice: 'x' (choose from 'off', 'upstream', 'ours')\n"),
    )


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_report_once(tmp_path):
    path = tmp_path / "two.json"
    argv = small("shared_prefix", "--repeats", 1, "--tp", 2, "--json", path)
    ranks = run_prepared(COMMAND, "bench", *argv, environments=environments_of(2))
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    said = "".join(rank.stdout for rank in ranks)
    assert said.count("platform: ") == said.count("engine ours: ") == 1 and "tp=2" in said
    data = json.loads(path.read_text())
    assert data["hardware"]["ranks"] == 2
    assert samples(data, "reused_tokens_3", "ours") == [512]


def test_a_model_that_megatron_cannot_run(measure, capsys):
    """Caching off is then this package's engine without its cache."""
    data = measure("shared_prefix", "--preset", "tiny-gdn", *engines_of("off ours"), "--repeats", 1)
    reused = {engine: samples(data, "reused_tokens_3", engine) for engine in ("off", "ours")}
    assert reused == {"off": [0], "ours": [512]}
    assert bench.main(small("shared_prefix", "--preset", "tiny-gdn", "--engine", "upstream")) == 2
    said = "error: engine upstream: megatron's own engine cannot run a model with layers of kind gated_delta_net"
    assert capsys.readouterr().err.splitlines()[-1] == said
