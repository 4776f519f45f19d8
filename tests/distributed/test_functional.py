"""`scripts/functional_tests.sh` on two CPU ranks; and that its checks find wrong results."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.functional import run as functional
from tests.distributed.functional.run import CASES, Failure
from tests.harness.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "functional_tests.sh"


def start(*argv):
    """Runs the script with this Python."""
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, argv)],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_on_the_cpu(tmp_path):
    """One case of each kind."""
    names = ("pp2", "tp2-pp2", "ep2", "dp2", "killed")
    result = start(2, "--device", "cpu", "--json", tmp_path / "found.json", "--cases", ",".join(names))
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-6000:]}"
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [
        ["passed" if CASES[name].ranks == 2 else "skipped", name] for name in names
    ]
    assert lines[-1] == "4 passed, 0 failed, 1 skipped (cpu, N=2)"
    report = json.loads((tmp_path / "found.json").read_text())
    assert [case["outcome"] for case in report["cases"]].count("passed") == 4
    assert report["hardware"]["megatron-core"].startswith("0.19.")
    assert "needs 4 ranks, there are 2" in result.stdout


def test_help_needs_no_set_up():
    result = subprocess.run(
        ["bash", str(SCRIPT), "--help"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0 and "functional_tests.sh N" in result.stdout and not result.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "required: N"),
        ((1,), "every case needs 2 ranks"),
        ((2, "--cases", "tp2,other"), "no case 'other'; there are: tp2, pp2"),
        ((2, "--cases", "tp2-pp2"), "none of these cases can run"),
        ((2, "--device", "cpu", "--json", "absent/found.json"), "there is no folder absent"),
    ],
)
def test_bad_input(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        functional.main([str(part) for part in argv])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# --- Judges ----------------------------------------------------------------------------------------------------------


def answer(*, reused, log_prob=-1.0):
    return {"tokens": [3, 4], "log_probs": [log_prob, -2.0], "cached_tokens": reused}


def layout_findings():
    """Findings of two ranks without any mistake."""
    host = {"loads": 2, "bytes_loaded": 5}
    stats = {"reused_tokens": 64, "tiers": {"host": host}, "fallbacks": {"host_load_failed": 1}, "bytes_budget": 5}
    on = {"answers": [answer(reused=64)], "stats": stats, "present": {"waiting": []}, "decisions": [7], "preempted": 0}
    run = {"off": {"answers": [answer(reused=0)]}, "on": on}
    damaged = {"answers": [answer(reused=64, log_prob=-1.5)]}
    rank = {"runs": {"tails, legacy": run, "host, legacy": copy.deepcopy(run)}, "damaged": damaged}
    return [copy.deepcopy(rank) for _ in range(2)]


def test_right_findings_pass():
    text = functional.judge_layout(CASES["tp2"], layout_findings(), 1e-5)
    assert text == "128 tokens reused, 2 loads from the host, log-probs within 0.0e+00, equal decisions"


def test_statistics_of_a_ranks_own_memory_may_differ():
    ranks = layout_findings()
    stats = ranks[1]["runs"]["host, legacy"]["on"]["stats"]
    stats["bytes_budget"] = stats["tiers"]["host"]["bytes_loaded"] = 9
    functional.judge_layout(CASES["tp2"], ranks, 1e-5)


LAYOUT_DEFECTS = {
    "tokens of answer 0 differ": lambda on, rank: on["answers"][0].update(tokens=[3, 5]),
    "log-probs of answer 0 are off by 2.0e-05": lambda on, rank: on["answers"][0].update(log_probs=[-1.00002, -2.0]),
    "an answer lacks log-probs": lambda on, rank: on["answers"][0].update(log_probs=[]),
    "0 answers, 1 with caching off": lambda on, rank: on.update(answers=[]),
    "decisions of ranks 0 and 1 differ": lambda on, rank: on.update(decisions=[8]),
    "present of ranks 0 and 1 differ": lambda on, rank: on.update(present={}),
    "prefix_stats of ranks 0 and 1 differ": lambda on, rank: on["stats"]["tiers"]["host"].update(loads=3),
    "wrong states do not show in answer 0": lambda on, rank: rank["damaged"]["answers"][0].update(log_probs=[-1, -2]),
}


@pytest.mark.parametrize("message", LAYOUT_DEFECTS)
def test_wrong_findings_of_one_rank_fail(message):
    ranks = layout_findings()
    LAYOUT_DEFECTS[message](ranks[1]["runs"]["host, legacy"]["on"], ranks[1])
    with pytest.raises(Failure, match=message):
        functional.judge_layout(CASES["tp2"], ranks, 1e-5)


@pytest.mark.parametrize(
    ("message", "stats"),
    [
        ("host, legacy: nothing was reused", {"reused_tokens": 0}),
        ("nothing came back from the host", {"tiers": {"host": {"loads": 0}}}),
        ("0 failed loads, for one changed bit", {"fallbacks": {}}),
    ],
)
def test_what_did_not_happen_fails(message, stats):
    ranks = layout_findings()
    for rank in ranks:
        rank["runs"]["host, legacy"]["on"]["stats"].update(stats)
    with pytest.raises(Failure, match=message):
        functional.judge_layout(CASES["tp2"], ranks, 1e-5)


def replica_findings():
    """Two replicas and their prefixes: four prompts; the last two find their prefix."""
    answers = [answer(reused=reused) for reused in (0, 0, 0, 0, 64, 64)]
    run = {"off": {"answers": [answer(reused=0) for _ in answers]}, "on": {"answers": answers}}
    idle = {"off": {"answers": []}, "on": {"answers": []}}
    stats = {"prompt_tokens": 300, "reused_tokens": 64}
    return [{"runs": {"coordinator": each}, "own_stats": dict(stats)} for each in (run, idle)]


def test_replicas():
    ranks = replica_findings()
    assert functional.judge_replicas(CASES["dp2"], ranks, 1e-5).startswith("128 tokens reused, [300, 300]")
    ranks[1]["own_stats"]["prompt_tokens"] = 0
    with pytest.raises(Failure, match="a replica got nothing"):
        functional.judge_replicas(CASES["dp2"], ranks, 1e-5)
    ranks = replica_findings()
    ranks[0]["runs"]["coordinator"]["on"]["answers"][5]["cached_tokens"] = 0
    ranks[0]["own_stats"]["reused_tokens"] = 0
    with pytest.raises(Failure, match="later prompts did not find their prefix"):
        functional.judge_replicas(CASES["dp2"], ranks, 1e-5)


def test_experts():
    run = {"off": {"answers": [answer(reused=0)]}, "on": {"answers": [answer(reused=64)], "idle_forwards": 3}}
    ranks = [{"runs": {"legacy": copy.deepcopy(run)}} for _ in range(2)]
    text = functional.judge_experts(CASES["ep2"], ranks, 1e-5)
    assert text == "64 tokens reused by a rank, 6 idle forwards, log-probs within 0.0e+00"
    ranks[1]["runs"]["legacy"]["on"]["answers"][0]["cached_tokens"] = 0
    with pytest.raises(Failure, match="rank 1, legacy: nothing was reused"):
        functional.judge_experts(CASES["ep2"], ranks, 1e-5)


def test_the_error_that_is_shown_is_the_ranks_own():
    text = "[rank1]: ValueError: first\n[rank0]: RuntimeError: Connection closed by peer\nFoo.ChildFailedError: \n"
    assert functional.last_error(text) == "ValueError: first"
    assert functional.last_error("RuntimeError: x closed by peer") == "RuntimeError: x closed by peer"
    assert functional.last_error("") == "nothing on stderr"
    text = "[rank0]:[E1 a.cpp:6] [Rank 0] Watchdog caught collective operation timeout: x\nExtension modules: y\n"
    assert functional.last_error(text) == "Watchdog caught collective operation timeout: x"


RAN = "import os, sys, time; open(f\"{sys.argv[1]}.rank{os.environ['RANK']}\", 'w').write(str(os.getpid())); "
DIE = "os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); "


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Runs this program as each rank of a case. Returns the case's result."""

    def run(name, program, end_timeout_s=HANG_S):
        script = tmp_path / "worker.py"
        script.write_text(program)
        monkeypatch.setattr(functional, "WORKER", script)
        monkeypatch.setitem(functional.END_TIMEOUT_S, "cpu", end_timeout_s)
        return functional.run_case(name, "cpu")

    return run


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (RAN, "the rank to be killed ended with 0"),
        (RAN + DIE, "rank 0 ended as if nothing had happened"),
        ("import os; " + DIE + "1 / 0", "not of the other one's death"),
        (RAN + DIE + "sys.exit(3)", "not of the other one's death"),  # and said nothing
    ],
)
def test_a_rank_that_does_not_end_with_an_error_fails(program, message, worker):
    with pytest.raises(Failure, match=message):
        worker("killed-alone", program)


def test_a_rank_that_does_not_end_fails(worker):
    with pytest.raises(Failure, match="rank 0 still ran 1 s later"):
        worker("killed-alone", RAN + DIE + f"time.sleep({HANG_S})", end_timeout_s=1.0)


def test_a_rank_that_ends_with_an_error_passes(worker):
    text = worker("killed-alone", RAN + DIE + "raise RuntimeError('where is rank 1?')")
    assert text.startswith("rank 1 killed, the others ended") and text.endswith("RuntimeError: where is rank 1?")


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(
    ("program", "message"),
    [
        (RAN + "open(sys.argv[1], 'w').write('[]')", "torchrun ended as if nothing had happened"),
        (RAN + "1 / 0", "not ended by the death of a rank: ZeroDivisionError"),
    ],
)
def test_torchrun_that_survives_a_death_fails(program, message, worker):
    with pytest.raises(Failure, match=message):
        worker("killed", program)
