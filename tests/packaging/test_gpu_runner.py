"""``python -m tests.gpu.run``: what runs at the same time fits, all runs, ``--quick`` has a case of each test function."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu import run
from tests.gpu.launch import PEAKS
from tests.gpu.packing import CONTEXT_GIB, Case, Job, Packer, jobs_of, quick
from tests.harness.limits import HANG_S
from tests.harness.workers.launch import run_prepared


def job(number: int, gib: float, gpus: int, seconds: float) -> Job:
    return Job(name=str(number), tests=(str(number),), gib=gib, gpus=gpus, seconds=seconds)


@given(
    st.lists(st.tuples(st.integers(1, 100), st.sampled_from((1, 1, 2, 4)), st.integers(1, 9)), max_size=30),
    st.lists(st.integers(10, 80), min_size=1, max_size=4),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_jobs_fit_and_all_run(needs, free_gib, processes, dice):
    jobs = [job(number, *need) for number, need in enumerate(needs)]
    packer, running, started = Packer(jobs, free_gib, processes), {}, []
    fitting = sorted(free_gib)
    for left_out in packer.too_large:
        assert left_out.gpus > len(free_gib) or left_out.gib > fitting[-left_out.gpus]
    while packer.waiting or running:
        for one, gpus in packer.start():
            assert len(set(gpus)) == one.gpus
            running[one] = gpus
            started.append(one)
        assert running, "nothing runs, and something waits"
        for gpu, free in enumerate(free_gib):
            assert sum(one.gib for one, gpus in running.items() if gpu in gpus) <= free
        assert sum(one.gpus for one in running) <= max(processes, len(free_gib))
        ended = dice.choice(list(running))
        del running[ended]
        packer.end(ended)
    assert sorted(job.name for job in [*started, *packer.too_large]) == sorted(job.name for job in jobs)


def test_the_shortest_and_the_longest_take_turns():
    jobs = [job(number, 1, 1, seconds) for number, seconds in enumerate((5, 1, 4, 2, 3))]
    assert [one.seconds for one, _ in Packer(jobs, [80], 8).start()] == [1, 5, 2, 4, 3]


def test_quick_has_the_shortest_case_of_each_function():
    cases = [
        Case(name="tests/gpu/test_a.py::test_x[1]", gib=4, seconds=9),
        Case(name="tests/gpu/test_a.py::test_x[2]", gib=4, seconds=5),
        Case(name="tests/gpu/test_a.py::test_x[3]", gib=2, seconds=5),
        Case(name="tests/gpu/test_a.py::test_y", gib=4, gpus=2),
        Case(name="tests/gpu/test_a.py::test_y", gib=4, seconds=99),
    ]
    assert quick(cases) == [cases[2], cases[4]]


def test_tests_of_one_file_share_a_process_where_they_start_none():
    cases = [
        Case(name=f"tests/{folder}/test_a.py::test_{n}", gib=n, seconds=n) for folder in ("gpu", "core") for n in (1, 2)
    ]
    found = {job.name: (len(job.tests), job.gib - CONTEXT_GIB, job.seconds) for job in jobs_of(cases)}
    assert found == {
        "tests/gpu/test_a.py::test_1": (1, 1, 1),
        "tests/gpu/test_a.py::test_2": (1, 2, 2),
        "tests/core/test_a.py": (2, 2, 3),
    }


def test_every_test_says_what_it_needs():
    """And each of them that needs one GPU fits one of 40 GiB."""
    (listed,) = run_prepared(Path(run.__file__), "--list")
    assert listed.returncode == 0, listed.stdout + listed.stderr[-3000:]
    rows = [line.split() for line in listed.stdout.splitlines() if " GiB, about " in line]
    assert {"tests/kernels/test_one_memory.py", "tests/core/test_host_arena.py"} < {row[7] for row in rows}
    assert len([row for row in rows if row[7].startswith("tests/gpu/")]) > 50
    assert all(float(row[2]) + CONTEXT_GIB <= 40 for row in rows if row[0] == "1")
    (of_parameter,) = (row for row in rows if row[7].endswith("as_near_to_float32_as_a_miss[small-mixed-100]"))
    assert of_parameter[2] == "6.0" and of_parameter[5] == "120"  # the function's marker says 150


def marked(*needs: dict[str, float]) -> Case:
    """A test with these markers; its module's is around them, and the last one is a parameter's."""
    marks = [pytest.mark.slow.mark, *(pytest.mark.gpu(**need).mark for need in needs)]
    module, item = SimpleNamespace(own_markers=[pytest.mark.gpu(seconds=60, gpus=2).mark]), SimpleNamespace()
    item.nodeid, item.own_markers, item.listchain = "test_a.py::test_x", marks, lambda: [module, item]
    return Case.of(item)


def test_the_nearest_marker_counts():
    found = marked({"gib": 3, "seconds": 9}, {"seconds": 2})
    assert found == Case(name="test_a.py::test_x", gib=3, gpus=2, seconds=2)


@pytest.mark.parametrize("needs", [[], [{"seconds": 3}], [{"gib": 1, "memory": 3}]])
def test_a_marker_that_does_not_say_the_memory_is_an_error(needs):
    with pytest.raises(ValueError, match="test_x: mark it gpu"):
        marked(*needs)


def processes(folder: Path, **bodies: str) -> Packer:
    """Jobs of a test file each, whose tests have these bodies, apart by lines; no GPU is asked for."""
    jobs = []
    for name, body in bodies.items():
        path = folder / f"test_{name}.py"
        tests = "".join(f"def test_{number}():\n    {line}\n" for number, line in enumerate(body.splitlines()))
        path.write_text("import time, pytest\n" + tests)
        jobs.append(Job(name=f"tests/gpu/{name}", tests=(str(path),), gib=1, gpus=1, seconds=1))
    return Packer(jobs, [80], 8)


def test_outcomes_of_processes(tmp_path, capsys):
    note = f"import os; open(os.environ['{PEAKS}'], 'a').write('{3 * 2**30}\\n{2**30}\\n')"
    bodies = {"good": "assert True", "bad": f"{note}; assert False", "none": "pytest.skip('not here')"}
    packer = processes(tmp_path, some=f"{bodies['none']}\nassert True", **bodies)
    assert run.run_all(packer, tmp_path, HANG_S) == {"passed": 2, "skipped": 1, "failed": 1, "not begun": 0}
    lines = {line.split("gpu/")[1].split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "passed" in lines["good"] and "(1 passed" in lines["good"]
    assert "failed" in lines["bad"] and "(1 failed" in lines["bad"]
    assert "] skipped" in lines["none"] and "] passed" in lines["some"]
    assert "? of " in lines["good"] and "3.0! of " in lines["bad"]


def test_what_does_not_end_in_time_is_cut(tmp_path, capsys):
    packer = processes(tmp_path, slow=f"time.sleep({HANG_S})")
    assert run.run_all(packer, tmp_path, 0.5) == {"cut": 1, "not begun": 0}
    assert "cut" in capsys.readouterr().out
