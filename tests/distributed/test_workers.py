"""Processes that tests fork with everything imported (`harness/workers/launch.py`) behave like new processes."""

from __future__ import annotations

import pytest

from tests.harness.workers.launch import run_prepared


@pytest.mark.multi
def test_a_process_has_the_environment_of_the_moment(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ['MHP_TEST_MARK'], os.environ.get('RANK'))")
    for mark in ("first", "second"):  # the process of which they are forked starts with the first, or before
        monkeypatch.setenv("MHP_TEST_MARK", mark)
        ended = run_prepared(script, environments=({"RANK": "0"}, {"RANK": "1"}))
        assert [one.stdout for one in ended] == [f"{mark} 0\n", f"{mark} 1\n"], ended[0].stderr
