"""`tests/harness/defects.py`: each defect has a test, and the documents have the list as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_hybrid_prefix.upstream import version
from tests.engine.test_prompt_log_probs import CASES
from tests.harness import defects
from tests.harness.defects import DEFECTS, RUN, Defect, Mending, columns, expected, stands, table

ROOT = Path(__file__).parents[2]


def test_each_defect_has_a_test_and_each_test_a_defect():
    tested = {
        int(number)
        for path in (ROOT / "tests").rglob("test_*.py")
        for number in re.findall(r"^@defect\((\d+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    } | CASES.keys()
    assert tested == set(DEFECTS)
    assert list(DEFECTS) == sorted(DEFECTS)


def test_the_documents_have_the_list():
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert table() in text, "write it again: python -m tests.harness.defects"
    oldest, newest = (sum(stands(found, run) for found in DEFECTS.values()) for run in (RUN[0], RUN[-1]))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{oldest} defects in {RUN[0]}, and {newest} in main {RUN[-1]}" in readme


def test_the_documents_name_what_was_run():
    text = (ROOT / "docs" / "which-megatron.md").read_text(encoding="utf-8")
    rows = [
        f"| main {run.replace(' of ', ' | ')} |" if " of " in run else f"| {run} | a release |" for run in version.RUN
    ]
    assert [row for row in rows if row not in text] == []


def test_the_list_is_right_about_the_installed_megatron():
    found = version.find_megatron()
    if not found.was_run:
        pytest.skip(f"the list says nothing of {found}")
    run = (found.version.local or str(found.version))[:8]
    assert [number for number, one in DEFECTS.items() if one.is_mended() == stands(one, run)] == []


def test_only_a_mended_defect_may_pass(monkeypatch):
    mending = Mending(1, "abc", "2026-01-01", RUN[2], "megatron.core.inference.config:InferenceConfig")
    absent = Mending(1, "abc", "2026-01-01", RUN[2], "megatron.core.inference.config:NoSuchName")
    made_up = {1: Defect("", ""), 2: Defect("", "", mending), 3: Defect("", "", absent)}
    monkeypatch.setattr(defects, "DEFECTS", made_up)
    assert [len(expected(number, AssertionError)) for number in made_up] == [1, 0, 1]
    (mark,) = expected(3, ValueError)
    assert mark.kwargs["strict"] and mark.kwargs["raises"] is ValueError
    assert [part[0] for part in columns()] == [RUN[0], RUN[2]]
    assert [stands(made_up[2], run) for run in RUN[:3]] == [True, True, False]
