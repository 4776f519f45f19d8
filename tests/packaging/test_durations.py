"""`harness/durations.py`: seconds of tests by folder."""

from __future__ import annotations

import pytest

from tests.harness.durations import by_folder, table

REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.core.test_index" name="test_a" time="1.5"/>
<testcase classname="tests.core.test_stateful.TestMachine" name="runTest" time="1000"/>
<testcase classname="tests.engine.test_prefix_exact" name="test_b[x]" time="3"/>
<testcase classname="" name="tests.gpu.test_server" time="0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_seconds_are_summed_by_folder(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    found = by_folder(str(path))
    assert found == {"core": 1001.5, "engine": 3.0, "gpu": 0.0}
    assert table([found, found], ["default", "`--all`"]).splitlines() == [
        "| part | default | `--all` |",
        "| --- | --- | --- |",
        "| `tests/core` | 1,002 | 1,002 |",
        "| `tests/engine` | 3 | 3 |",
        "| `tests/gpu` | 0 | 0 |",
        "| all of them | 1,004 | 1,004 |",
    ]


def test_a_test_in_no_folder_is_an_error(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT.replace("tests.core.test_index", "tests.test_index"))
    with pytest.raises(ValueError, match=r"tests\.test_index is in no folder"):
        by_folder(str(path))
