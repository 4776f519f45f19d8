"""`hybrid-prefix bench all` and `report`: all scenarios into one JSON, and the report of it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid_prefix.bench import charts, suite
from megatron_hybrid_prefix.bench import report as bench_report
from megatron_hybrid_prefix.bench.scenarios import SCENARIOS
from megatron_hybrid_prefix.cli import bench

ROOT = Path(__file__).resolve().parents[2]

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes find this package and use one thread, and the command has a fixed name."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["bench.py"])


def metric(label: str, *, goal: str | None = None, **samples: list[float | None]) -> dict[str, Any]:
    """A metric as in a scenario's JSON. The median is the first sample."""
    median = {engine: values[0] for engine, values in samples.items()}
    pairs = {"ours/off": median["ours"] / median["off"]} if "off" in median and median["ours"] is not None else {}
    return {"label": label, "goal": goal, "samples": samples, "median": median, "ratio": pairs}


@pytest.fixture
def measured() -> dict[str, Any]:
    """Possible output of `all`: a scenario with figures and a crashed engine, and a scenario that failed."""
    result = {
        "workload": "3 requests",
        "command": "bench.py herd --seed 0",
        "options": {"cuda_graphs": 0, "preset": "tiny", "repeats": 2},
        "engines": {
            "off": {"status": "completed", "error": None},
            "ours": {"status": "completed", "error": None},
            "upstream": {"status": "crashed", "error": "KeyError: a | b"},
        },
        "metrics": {
            "first_token_ms": metric("first token, ms", off=[20.0, 22.0], ours=[5.0, 6.0], upstream=[None]),
            "latest_first_token_ms": metric("latest, ms", off=[30.0, 31.0], ours=[7.0, 8.0], upstream=[None]),
            "computed_tokens": metric("tokens computed", goal="<= 9", off=[12345], ours=[9], upstream=[None]),
            "wall_s": metric("wall time, s", off=[0.123456], ours=[0.1], upstream=[None]),
            "unknown_ms": metric("nobody knows", off=[None], ours=[None], upstream=[None]),
        },
        "control_plane": {},
    }
    return {
        "kind": suite.KIND,
        "command": "bench.py all",
        "quick": False,
        "hardware": {"processor": "fast", "cores": 2, "driver": None},
        "versions": {"torch": "2.11.0"},
        "scenarios": {
            "herd": {"status": "completed", "error": None, "exit_code": 0, "result": result},
            "no_reuse": {"status": "failed", "error": "error: no | room", "exit_code": 2, "result": {}},
        },
    }


# --- Report ----------------------------------------------------------------------------------------------------------


def test_a_report_says_what_was_measured(measured: dict[str, Any], tmp_path: Path) -> None:
    path = bench_report.write_report(measured, tmp_path / "report")
    lines = path.read_text().splitlines()
    assert "Hardware: processor fast, cores 2." in lines and "Versions: torch 2.11.0." in lines
    assert "| median | off | ours | upstream | ours/off | goal |" in lines
    assert "| first token, ms | 20 | 5 | - | 0.25 |  |" in lines
    assert "| tokens computed | 12,345 | 9 | - | 0.000729 | <= 9 |" in lines
    assert "| wall time, s | 0.1235 | 0.1 | - | 0.81 |  |" in lines
    assert "Engine upstream crashed: KeyError: a \\| b" in lines
    assert "| [no_reuse](#no_reuse) | failed: error: no \\| room |" in lines
    assert "No figures: error: no \\| room" in lines
    assert "nobody knows" not in path.read_text() and "--quick" not in path.read_text()
    assert sorted(file.name for file in path.parent.iterdir()) == ["herd.png", "report.md"]
    assert (path.parent / "herd.png").read_bytes().startswith(PNG)
    assert "![herd](herd.png)" in lines


def test_what_is_drawn(measured: dict[str, Any]) -> None:
    result = measured["scenarios"]["herd"]["result"]
    (panel,) = charts.chart_of("herd", result).panels
    assert list(panel.bars) == ["latest_first_token_ms"] and panel.unit == "ms"
    del result["metrics"]["latest_first_token_ms"]
    assert charts.chart_of("herd", result) is None  # none of the figures that make its point
    assert charts.chart_of("no_reuse", {}) is None


def test_a_bar_that_is_missing_says_why(measured: dict[str, Any], tmp_path: Path) -> None:
    result = measured["scenarios"]["herd"]["result"]
    path = tmp_path / "herd.svg"
    charts.draw_chart(path, charts.chart_of("herd", result), result)
    drawn = path.read_text()
    for text in (
        "megatron-core's cache crashed",
        "30 ms",
        "7 ms",
        "caching off",
        "this cache",
        "tiny on unknown machine",
    ):
        assert f"<!-- {text}" in drawn, text  # matplotlib writes each text beside its outlines


def test_every_scenario_has_a_chart_of_its_own_figures_and_a_small_size() -> None:
    assert set(SCENARIOS) == set(charts.CHARTS) and all(suite.QUICK.values())
    for name, kind in SCENARIOS.items():
        measured = {one.name: {"label": one.label, "median": {"ours": 1.0}} for one in kind(**_sizes(kind)).metrics()}
        assert charts.chart_of(name, {"metrics": measured}) == charts.CHARTS[name], name


def _sizes(kind: Any) -> dict[str, Any]:
    return {field.name: field.metadata["cpu"] for field in kind.sizes()}


def test_the_report_command(measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "bench.json"
    saved.write_text(json.dumps(measured))
    assert bench.main(["report", str(saved), str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'again' / 'report.md'}\n"
    assert (tmp_path / "again" / "herd.png").is_file()


# --- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["all", "--scenarios", "herd,other"], "no scenario 'other'; there are: shared_prefix, "),
        (["all", "--scenarios", "herd,herd"], "herd,herd names a scenario twice"),
        (["all", "--json", "absent/b.json"], "there is no folder absent"),
        (["all", "--report", "absent/report"], "there is no folder absent"),
        (["all", "--requests", "3"], "unrecognized arguments: --requests 3"),
        (["report", "absent.json", "out"], "cannot read absent.json"),
        (["report", "list.json", "out"], "list.json was not written by `bench.py all`"),
        (["report", "text.json", "out"], "text.json: no JSON"),
        (["report", "list.json", "list.json"], "it is no folder"),
        (["report"], "required: JSON, FOLDER"),
    ],
)
def test_bad_input(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[]")
    Path("text.json").write_text("no")
    assert bench.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["list.json", "text.json"]


def test_not_under_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench.main(["all"]) == 2
    assert "one by one under torchrun" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- All -------------------------------------------------------------------------------------------------------------


def options(*argv: str) -> Any:
    return bench.make_parser().parse_args(["all", *argv])


def test_options_reach_the_scenarios() -> None:
    args = options("--engine", "off,ours", "--mamba-gb", "0.5", "--chunked-prefill")
    argv = " ".join(suite.options_of("herd", args))
    assert "--engine off,ours" in argv and "--mamba-gb 0.5" in argv and argv.endswith("--chunked-prefill")
    assert "--repeats" not in argv and "--requests" not in argv and "--json" not in argv
    argv = " ".join(suite.options_of("herd", options("--quick")))
    assert "--repeats 2" in argv and "--prefix-blocks 2" in argv
    assert "--repeats 7" in " ".join(suite.options_of("herd", options("--quick", "--repeats", "7")))
    for name in SCENARIOS:
        given = bench.make_parser().parse_args([name, *suite.options_of(name, options("--quick"))])
        assert {key: getattr(given, key) for key in suite.QUICK[name]} == suite.QUICK[name]


@pytest.mark.slow
def test_a_scenario_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(suite.QUICK, "samples", {"prompt_tokens": 16890})
    path, folder = tmp_path / "bench.json", tmp_path / "report"
    argv = ["all", "--quick", "--repeats", "1", "--engine", "off,ours", "--device", "cpu"]
    argv += ["--scenarios", "samples,no_reuse", "--json", str(path), "--report", str(folder)]
    assert bench.main(argv) == 1
    data = json.loads(path.read_text())
    assert list(data["scenarios"]) == ["samples", "no_reuse"]
    failed, completed = data["scenarios"]["samples"], data["scenarios"]["no_reuse"]
    assert (failed["status"], failed["exit_code"], failed["result"]) == ("failed", 2, {})
    assert re.search(r"^error: 16890 prompt \+ \d+ generated tokens exceed the 16896", failed["error"])
    assert (completed["status"], completed["error"]) == ("completed", None)
    result = completed["result"]
    assert result["scenario"] == "no_reuse" and result["options"]["requests"] == 4
    assert result["metrics"]["generated_tokens"]["median"] == {"off": 32, "ours": 32}
    assert result["command"].startswith("bench.py no_reuse ") and "--json" not in result["command"]
    assert "--engine off,ours" in result["command"]
    for key in ("versions", "hardware", "platform"):
        assert data[key] == result[key]
    assert data["command"].endswith(str(folder)) and data["quick"] is True
    captured = capsys.readouterr()
    assert f"samples failed: {failed['error']}\n" in captured.out
    assert failed["error"] in captured.err
    report = (folder / "report.md").read_text()
    assert "Small sizes" in report and "## no_reuse" in report
    assert (folder / "no_reuse.png").read_bytes().startswith(PNG)


def fake_run(status: str, error: str | None = None, **result: Any) -> dict[str, Any]:
    return {"status": status, "error": error, "exit_code": 0, "result": result}


@pytest.mark.parametrize("in_part", [True, False])
def test_results_so_far_are_kept_after_ctrl_c(
    in_part: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, part = fake_run("completed", versions={"python": "3.12"}), {"workload": "x"} if in_part else {}
    runs = {"herd": found, "samples": fake_run("interrupted", **part)}
    monkeypatch.setattr(suite, "run_one", lambda name, args: runs[name])
    path = tmp_path / "bench.json"
    assert bench.main(["all", "--scenarios", "herd,samples,no_reuse", "--json", str(path)]) == 130
    data = json.loads(path.read_text())
    kept = ["herd", "samples"][: 1 + in_part]
    assert list(data["scenarios"]) == kept and data["versions"] == {"python": "3.12"}
    assert f"interrupted: {len(kept)} of 3 scenarios are in {path}" in capsys.readouterr().err


def test_several_at_a_time_have_a_gpu_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake scenario writes which GPU it sees, and waits until both scenarios run."""
    script = """import json, os, pathlib, sys, time
gpu, folder = os.environ["CUDA_VISIBLE_DEVICES"], pathlib.Path(os.environ["SEEN"])
(folder / gpu).touch()
while len(list(folder.iterdir())) < 2:
    time.sleep(0.01)
print("on", gpu)
open(sys.argv[-1], "w").write(json.dumps({"options": {}, "engines": {}, "hardware": {"gpu": gpu}}))
"""
    fake, seen, path = tmp_path / "bench.py", tmp_path / "seen", tmp_path / "b.json"
    fake.write_text(script)
    seen.mkdir()
    monkeypatch.setattr(suite, "BENCH", (sys.executable, str(fake)))
    monkeypatch.setattr(suite, "gpu_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setenv("SEEN", str(seen))
    argv = ["all", "--scenarios", "samples,herd,no_reuse", "--json", str(path)]
    assert bench.main([*argv, "--gpus", "2"]) == 0
    data = json.loads(path.read_text())
    assert list(data["scenarios"]) == ["samples", "herd", "no_reuse"] and data["gpus"] == 2
    assert {found["result"]["hardware"]["gpu"] for found in data["scenarios"].values()} == {"5", "7"}
    out = capsys.readouterr().out
    assert "on 5" in out and "on 7" in out and "--- 3 of 3: " in out
    assert bench.main([*argv, "--gpus", "3"]) == 2
    assert "--gpus 3: there are 2" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("crashed", 1), ("failed", 1)])
def test_exit_codes(status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "run_one", lambda name, args: fake_run(status, None if status == "completed" else "x"))
    assert bench.main(["all", "--scenarios", "herd", "--json", str(tmp_path / "b.json")]) == code


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        ("raise SystemExit(130)", "interrupted", None),
        ("import os; os.kill(os.getpid(), 9)", "failed", "ended with -9"),
        ("1 / 0", "failed", "ZeroDivisionError: division by zero"),
        ("pass", "failed", "ended with 0"),  # and wrote nothing
        ("{write}; raise SystemExit(1)", "crashed", "engine ours: ValueError: no"),
        ("{write}", "completed", None),
    ],
)
def test_how_a_process_ended(
    script: str, status: str, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"options": {}, "engines": {"ours": {"status": "crashed", "error": "ValueError: no"}}}
    write = f"import json, sys; open(sys.argv[-1], 'w').write(json.dumps({result!r}))"
    fake = tmp_path / "bench.py"
    fake.write_text(script.replace("{write}", write))
    monkeypatch.setattr(suite, "BENCH", (sys.executable, str(fake)))
    found = suite.run_one("herd", options())
    assert (found["status"], found["error"]) == (status, error)
