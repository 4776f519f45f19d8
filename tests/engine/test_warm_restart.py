"""Processes that are killed while they serve and write: the next one answers as if nothing had happened, from the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.lifecycle_helpers import BLOCK
from tests.harness.workers.launch import WORKERS, run_prepared

KILLS = 24


@pytest.mark.slow
def test_killed_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "a secret for the tests")
    out, folder = tmp_path / "found.json", tmp_path / "cache"
    (ended,) = run_prepared(WORKERS / "shared_restart.py", out, folder, KILLS)
    assert ended.returncode == 0, ended.stderr[-6000:]
    found = json.loads(out.read_text())
    right = {line["turn"]: line for line in found["off"]}
    answers = [line for run in (*found["killed"], found["complete"], found["last"]) for line in run if "turn" in line]
    assert len(found["killed"]) == KILLS and len(answers) > 2 * KILLS
    for line in answers:
        assert line["tokens"] == right[line["turn"]]["tokens"]
        assert line["log_probs"] == pytest.approx(right[line["turn"]]["log_probs"], rel=0, abs=1e-5)
        # An entry may be gone by the time that it is read, or find no room. None was half there, and none was wrong.
        assert set(line["faults"]) <= {"gone", "no_room"}
        assert set(line["fallbacks"]) <= {"tier_load_missing", "host_load_given_up"}
    assert found["half_written"] > KILLS / 4, "too few were killed in the middle of a write"
    first_turns = [run[0] for run in found["killed"] if run]
    assert sum(line["cached"] > 0 for line in first_turns) > len(first_turns) / 2, "conversations hit at once"
    for line in found["last"][:-1]:
        length = found["lengths"][line["turn"]]
        assert line["cached"] == (length - 1) // BLOCK * BLOCK
    accounted = found["accounted"]
    assert accounted["bytes"] == sum(accounted["found"].values())
    assert accounted["named"] == {Path(path).name: size for path, size in accounted["found"].items()}
