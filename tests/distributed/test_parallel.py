"""Two ranks give the answers of one: tensor parallel and pipeline parallel; and ranks that fail."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from tests.engine.test_prompt_log_probs import Reference, wrong
from tests.harness.engine_helpers import LOG_PROB_NOISE, assert_same, greedy
from tests.harness.limits import HANG_S, wait_until
from tests.harness.selection import mostly_slow
from tests.harness.workers import parallel_engine
from tests.harness.workers.launch import run_ranks


@pytest.fixture(scope="module")
def one_rank(platform):
    return parallel_engine.layout_answers(tp=1, pp=1)


@pytest.fixture(scope="module", params=mostly_slow([(2, 1), (1, 2)], (2, 1)), ids=["tp2", "pp2"])
def two_ranks(request, tmp_path_factory):
    """The layout, and each rank's findings."""
    tp, pp = request.param
    out = tmp_path_factory.mktemp("ranks") / "answers.json"
    return (tp, pp), run_ranks("parallel_engine.py", out, tp, pp)


@pytest.mark.multi
def test_each_rank_holds_a_part(one_rank, two_ranks):
    (tp, pp), ranks = two_ranks
    for rank in ranks:
        assert f"tp={tp} pp={pp}" in rank["platform"]
        assert rank["parameters"] < 0.6 * one_rank["parameters"]


@pytest.mark.multi
def test_tokens_and_log_probs_of_mixed_batches(one_rank, two_ranks):
    for rank in two_ranks[1]:
        assert len(rank["mixed"]) == len(parallel_engine.LENGTHS)
        assert_same(rank["mixed"], one_rank["mixed"])


@pytest.mark.multi
def test_log_probs_of_prompts_in_chunks(one_rank, two_ranks):
    for rank in two_ranks[1]:
        for found, right in zip(rank["chunked"], one_rank["chunked"], strict=True):
            assert len(found) == 150 + 4 - 1
            assert found == pytest.approx(right, rel=0, abs=LOG_PROB_NOISE)


@pytest.mark.multi
@pytest.mark.parametrize("mode", ["legacy", "async"])
def test_log_probs_of_prompts_that_skip_tokens(tiny, two_ranks, mode):
    reference = Reference(tiny)
    params = greedy(1, skip_prompt_log_probs=False, top_n_logprobs=2)
    for rank in two_ranks[1]:
        found = rank["endings"][mode]
        assert [each["cached_tokens"] for each in found] == [0, 64, 128, 128]
        for each in found:
            request = SimpleNamespace(**each, prompt_tokens=each["prompt"])
            for entry in (request.prompt_top_n_logprobs, request.generated_top_n_logprobs):
                entry[:] = [{name.removeprefix("token_id:"): value for name, value in top.items()} for top in entry]
            assert wrong(reference, request, params) == []


@pytest.mark.multi
@pytest.mark.parametrize(
    ("program", "timeout_s", "message"),
    [
        (f"import os, time; os.environ['RANK'] == '1' and 1 / 0; time.sleep({HANG_S})", HANG_S, "ZeroDivisionError"),
        # The first one that ends makes the other end.
        ("import os, sys; sys.exit('no ' + os.environ['RANK'])", HANG_S, r"rank (\d) ended with 1:\nno \1\n"),
        ("import os; os.kill(os.getpid(), 9)", HANG_S, "ended with -9"),
        (f"import time; time.sleep({HANG_S})", 0.5, "hung"),
        ("pass", HANG_S, "No such file"),
    ],
)
def test_ranks_that_fail_are_an_error(tmp_path, program, timeout_s, message):
    script = tmp_path / "worker.py"
    script.write_text(program)
    with pytest.raises((AssertionError, FileNotFoundError), match=message):
        run_ranks(script, tmp_path / "out.json", timeout_s=timeout_s)


@pytest.mark.multi
def test_processes_of_a_rank_end_with_it(tmp_path):
    script, told = tmp_path / "worker.py", tmp_path / "child"
    script.write_text(
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep({HANG_S})'])\n"
        f"open({str(told)!r}, 'w').write(str(child.pid))\n"
        "1 / 0\n"
    )
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_ranks(script, tmp_path / "out.json", ranks=1)
    pid = int(told.read_text())

    def has_ended() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(has_ended, "the child's end")
