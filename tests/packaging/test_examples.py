"""The examples: each one runs on the CPU and shows its feature. The first one has ten lines."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.harness.server_process import started
from tests.harness.workers.launch import environments_of, run_prepared

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEN_LINES = EXAMPLES / "ten_lines.py"
# They have test files of their own.
WITH_TESTS = {"demo.py", "walkthrough.py", "megatron_checkpoint.py"}


def run(name: str, *arguments: str, ranks: int = 1) -> str:
    """What an example prints; it says nothing on stderr, such as a warning of megatron's.

    Args:
        name: File.
        arguments: Of the script.
        ranks: Number of processes, forked from one that has imported torch and megatron.
    """
    environments = environments_of(ranks) if ranks > 1 else ({},)
    done = run_prepared(EXAMPLES / name, *arguments, environments=environments)
    for one in done:
        assert one.returncode == 0, one.stderr[-3000:]
        assert ranks > 1 or "Warning" not in one.stderr, one.stderr[-3000:]
    return "".join(one.stdout for one in done)


def numbers(text: str) -> list[int]:
    """All that stand by themselves."""
    return [int(number) for number in re.findall(r"(?<![\w.=])\d+(?![\w.])", text)]


def test_the_first_has_ten_lines():
    lines = {node.lineno for node in ast.walk(ast.parse(TEN_LINES.read_text())) if isinstance(node, ast.stmt)}
    assert len(lines - {1}) <= 10  # the first is the docstring


def test_the_others_are_short():
    long = {path.name for path in EXAMPLES.glob("[!_]*.py") if len(path.read_text().splitlines()) > 45}
    assert long == {"grpo.py", "train_bytes.py", *WITH_TESTS}  # whole trainings


def test_the_table_has_each_of_them():
    linked = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(linked) == sorted(path.name for path in EXAMPLES.glob("[!_]*.py"))


def test_every_example_is_run():
    """`test_wheel.py` runs the first one."""
    source = Path(__file__).read_text()
    unrun = {path.name for path in EXAMPLES.glob("[!_]*.py") if f'run("{path.name}"' not in source}
    assert unrun == WITH_TESTS | {TEN_LINES.name}
    assert TEN_LINES.name in Path(__file__).with_name("test_wheel.py").read_text()


@pytest.mark.slow
def test_a_breakpoint_is_reused_at_once():
    without, with_breakpoint = map(numbers, run("breakpoints.py").splitlines())
    assert without == [0, 0, 1024] and with_breakpoint == [0, 1024, 1024]


@pytest.mark.slow
def test_states_come_back_from_the_host():
    off, off_moves, on, on_moves = map(numbers, run("host_tier.py").splitlines())
    assert off == [0] and off_moves == [0, 0]
    assert on == [512] and on_moves[0] > 0 and on_moves[1] > 0


@pytest.mark.slow
def test_nothing_of_old_weights_is_reused():
    *reused, same = run("new_weights.py").splitlines()
    assert [number for line in reused for number in numbers(line)] == [0, 512, 0, 512, 0]
    assert same.endswith("True")


def test_a_policy_is_trained_by_the_log_probs_that_it_was_sampled_with():
    """The script compares bits in each step, whose weights are others."""
    found = dict(re.findall(r"^(.+): mean KL ([^,]+),", run("grpo.py", "3"), re.MULTILINE))
    assert float(found["by default"]) > 0 and found["invariant_forward"] == "0.0e+00"


@pytest.mark.slow
def test_a_model_is_trained_and_saved(tmp_path):
    sizes = ["--size", "tiny", "--batch", "2", "--tokens", "128", "--steps", "8", "--held-out-rows", "20"]
    said = run("train_bytes.py", *sizes, "--device", "cpu", "--out", str(tmp_path / "bytes"))
    first = re.search(r"^step     1  ([\d.]+) bits/byte", said, re.MULTILINE)
    last = re.search(r"^held out: ([\d.]+) bits/byte after 2,048 tokens", said, re.MULTILINE)
    assert first and last and float(last[1]) < float(first[1]) - 2
    saved = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "bytes").iterdir()} == saved | {"training.json"}
    assert "class Stack:" in said  # the sample


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_hit():
    platform, *reused = run("tensor_parallel.py", ranks=2).splitlines()
    assert "tp=2" in platform and numbers(" ".join(reused)) == [0, 512]


@pytest.mark.slow
def test_turns_of_a_conversation_are_reused(tmp_path):
    pytest.importorskip("openai")
    with started(tmp_path, "--max-sequence-length", "4096", ranks=1) as server:
        turns = [numbers(line) for line in run("server_client.py", server.url).splitlines()]
    first, *others = turns
    assert len(turns) == 3 and first[0] == 0
    assert all(cached > prompt // 2 for cached, prompt in others)
