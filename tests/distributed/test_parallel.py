"""Two ranks give the answers of one: tensor parallel and pipeline parallel; and ranks that fail."""

from __future__ import annotations

import re
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_hybrid_prefix.text.calls import answer_grammar
from tests.engine.test_prompt_log_probs import Reference, wrong
from tests.harness.engine_helpers import LOG_PROB_NOISE, assert_same, greedy, random_tokens
from tests.harness.grammar_walks import END, record
from tests.harness.lifecycle_helpers import MODES
from tests.harness.limits import HANG_S, wait_until
from tests.harness.selection import mostly_slow
from tests.harness.workers import scenario
from tests.harness.workers.launch import run_play, run_prepared, run_ranks

LENGTHS = (257, 1, 128, 3, 600, 2, 256, 127, 129, 255)
ENGINE = {"buffer_size_gb": 0.05, "slots": None}  # room for all requests; each engine fills it with zeros
CHUNKS = {"max_sequence_length": 512, "enable_chunked_prefill": True, "materialize_only_last_token_logits": False}
OF_PROMPTS = {"params": {"skip_prompt_log_probs": False}}
WITH_TOP = {"params": {"skip_prompt_log_probs": False, "top_n_logprobs": 2}, "top_n_by_id": True}
# Endings of one context, which part at a boundary, one before it and one after it.
CONTEXT = random_tokens(240, seed=128)
ENDINGS = [CONTEXT[:cut] + random_tokens(40, seed=60 + n) for n, cut in enumerate((127, 128, 129, 128))]
# What answers must match, their end tokens, and how they look. The last one's end token is the only letter that goes on.
SCHEMA = record({"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"enum": [True, None]}}, 2)
OBJECT = r'\s*\{\s*"n"\s*:\s*\d\d?\s*,\s*"ok"\s*:\s*(true|null)\s*\}\s*'
FORCED = {"is_thinking": False, "is_xml": False, "must_call": True, "at_most_one": True}
CALL = answer_grammar(None, [{"function": {"name": "run", "parameters": SCHEMA}}], (), None, **FORCED)
CALLED = rf'\s*<tool_call>\n\{{"name": "run", "arguments": {OBJECT}\}}\n</tool_call>'
MATCHED = [({"json": SCHEMA}, END, OBJECT), (CALL, END, CALLED), ({"regex": "abc"}, ord("c"), None)] * 2
BIAS = [(ord(letter), 9.0) for letter in '"}:,'] + [(ord(blank), -9.0) for blank in " \n\r\t"]


def parts() -> dict[str, Any]:
    """Everything that must be the same in all layouts."""
    mixed = []  # prompts that arrive two at a time while others decode
    for number, length in enumerate(LENGTHS):
        mixed += [["ask", random_tokens(length, seed=number), 16], ["go", 2 * (number % 2)]]
    # Where float32 is close, see test_prompt_log_probs.py.
    chunks = [["ask", random_tokens(150, seed=seed), 4, OF_PROMPTS] for seed in (128, 136)]
    endings = [event for prompt in ENDINGS for event in (["ask", prompt, 1, WITH_TOP], ["run"])]
    del endings[-3]  # the last two come together
    found: dict[str, Any] = {
        "shard": ["shard"],
        "mixed": {"engine": ENGINE | {"async_sched_mode": "async", "max_requests": 16}, "events": [*mixed, ["run"]]},
    }
    for mode in MODES:
        fields = ENGINE | CHUNKS | {"async_sched_mode": mode}
        found[f"chunked {mode}"] = {"engine": fields | {"max_tokens": 64}, "events": [*chunks, ["run"]]}
        fields |= {"slots": 32, "mamba_gb": 0.02, "retention_interval_tokens": None, "max_tokens": 128}
        found[f"endings {mode}"] = {"engine": fields, "events": endings}
    asked = []
    for seed, (wanted, end, _) in enumerate(MATCHED):
        how = {"structured_outputs": wanted, "logit_bias": BIAS, "seed": seed}
        asked.append(["ask", CONTEXT[: 130 + seed], 150, {"params": {"termination_id": end}, "sampling_options": how}])
    if find_spec("llguidance"):
        found["grammars"] = {"engine": ENGINE | {"slots": 32}, "events": [*asked, ["run"]]}
    return found


@pytest.fixture(scope="module")
def one_rank(platform):
    model = scenario.build(platform=platform)
    own = parts()
    shard = scenario.shard(model) if own.pop("shard") else None
    return {name: scenario.play(model, **part) for name, part in own.items()} | {"shard": shard}


@pytest.fixture(scope="module", params=mostly_slow([(2, 1), (1, 2)], (2, 1)), ids=["tp2", "pp2"])
def two_ranks(request, tmp_path_factory):
    """The layout, and each rank's findings."""
    tp, pp = request.param
    play = {"sizes": {"tp": tp, "pp": pp}, "model": {}, "parts": parts()}
    return (tp, pp), run_play(tmp_path_factory.mktemp("ranks"), play)


@pytest.mark.multi
def test_each_rank_holds_a_part(one_rank, two_ranks):
    (tp, pp), ranks = two_ranks
    for rank in ranks:
        assert f"tp={tp} pp={pp}" in rank["platform"]
        assert rank["shard"]["parameters"] < 0.6 * one_rank["shard"]["parameters"]


@pytest.mark.multi
def test_tokens_and_log_probs_of_mixed_batches(one_rank, two_ranks):
    for rank in two_ranks[1]:
        assert len(rank["mixed"]["answers"]) == len(LENGTHS)
        assert_same(rank["mixed"]["answers"], one_rank["mixed"]["answers"])


@pytest.mark.multi
def test_grammars_and_forced_calls(one_rank, two_ranks):
    """Answers are those of one rank, and match; a grammar that gets stuck fails its request alone, on all ranks."""
    pytest.importorskip("llguidance")
    for found in (one_rank, *two_ranks[1]):
        answers = found["grammars"]["answers"]
        assert_same(answers, one_rank["grammars"]["answers"])
        for (_, _, form), answer in zip(MATCHED, answers, strict=True):
            text = bytes(answer["tokens"][:-1]).decode()
            assert answer["failed"] if form is None else re.fullmatch(form, text), text


@pytest.mark.multi
@pytest.mark.parametrize("mode", MODES)
def test_log_probs_of_prompts_in_chunks(one_rank, two_ranks, mode):
    for rank in two_ranks[1]:
        found, right = (each[f"chunked {mode}"]["answers"] for each in (rank, one_rank))
        assert_same(found, right)
        for answer, reference in zip(found, right, strict=True):
            assert len(answer["prompt_log_probs"]) == 150 - 1
            assert answer["prompt_log_probs"] == pytest.approx(reference["prompt_log_probs"], rel=0, abs=LOG_PROB_NOISE)


@pytest.mark.multi
@pytest.mark.parametrize("mode", MODES)
def test_log_probs_of_prompts_that_skip_tokens(tiny, two_ranks, mode):
    reference = Reference(tiny)
    params = greedy(1, skip_prompt_log_probs=False, top_n_logprobs=2)
    for rank in two_ranks[1]:
        found = rank[f"endings {mode}"]["answers"]
        assert [each["cached_tokens"] for each in found] == [0, 64, 128, 128]
        for prompt, each in zip(ENDINGS, found, strict=True):
            names = {
                "prompt_tokens": prompt,
                "generated_tokens": each["tokens"],
                "generated_log_probs": each["log_probs"],
            }
            request = SimpleNamespace(**each, **names)
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


@pytest.mark.multi
def test_a_process_has_the_environment_of_the_moment(tmp_path, monkeypatch):
    """It is forked with everything imported, and behaves like a new one."""
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ['MHP_TEST_MARK'], os.environ.get('RANK'))")
    for mark in ("first", "second"):  # the process of which they are forked starts with the first, or before
        monkeypatch.setenv("MHP_TEST_MARK", mark)
        ended = run_prepared(script, environments=({"RANK": "0"}, {"RANK": "1"}))
        assert [one.stdout for one in ended] == [f"{mark} 0\n", f"{mark} 1\n"], ended[0].stderr
