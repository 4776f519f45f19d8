"""The examples: each one runs on the CPU and shows its feature. The first one has ten lines."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.limits import HANG_S
from tests.harness.workers.launch import environment, run_prepared, torchrun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEN_LINES = EXAMPLES / "ten_lines.py"
# They have test files of their own.
WITH_TESTS = {"walkthrough.py", "megatron_checkpoint.py"}


def run(name: str, *arguments: str, ranks: int = 1, forked: bool = True) -> str:
    """What an example prints; it says nothing on stderr, such as a warning of megatron's.

    Args:
        name: File.
        arguments: Of the script.
        ranks: Number of processes.
        forked: One process is forked from one that has imported torch and megatron.
    """
    if ranks == 1 and forked:
        (done,) = run_prepared(EXAMPLES / name, *arguments)
    else:
        command = [sys.executable] if ranks == 1 else torchrun(ranks)
        done = subprocess.run(
            [*command, str(EXAMPLES / name), *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ranks > 1 or "Warning" not in done.stderr, done.stderr[-3000:]
    return done.stdout


def numbers(text: str) -> list[int]:
    """All that stand by themselves."""
    return [int(number) for number in re.findall(r"(?<![\w.=])\d+(?![\w.])", text)]


@contextmanager
def server() -> Iterator[str]:
    """The address of a server of `tiny`, while the block runs."""
    command = [sys.executable, "-m", "megatron_hybrid_prefix", "serve", "--preset", "tiny", "--port", "0"]
    with subprocess.Popen(
        command, env=environment() | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = next((match for line in process.stdout if (match := re.search(r"http://\S+", line))), None)
            assert found is not None, "the server ended"
            yield found[0]
        finally:
            process.terminate()


def test_the_first_has_ten_lines():
    lines = {node.lineno for node in ast.walk(ast.parse(TEN_LINES.read_text())) if isinstance(node, ast.stmt)}
    assert len(lines - {1}) <= 10  # the first is the docstring


def test_the_others_are_short():
    long = {path.name for path in EXAMPLES.glob("*.py") if len(path.read_text().splitlines()) > 45}
    assert long == {"train_bytes.py", *WITH_TESTS}  # a whole training


def test_the_table_has_each_of_them():
    linked = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(linked) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_every_example_is_run():
    source = Path(__file__).read_text()
    assert {path.name for path in EXAMPLES.glob("*.py") if f'run("{path.name}"' not in source} == WITH_TESTS


@pytest.mark.slow
def test_the_second_prompt_hits():
    assert numbers(run("ten_lines.py", forked=False)) == [0, 512]


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
def test_turns_of_a_conversation_are_reused():
    pytest.importorskip("openai")
    with server() as url:
        turns = [numbers(line) for line in run("server_client.py", url).splitlines()]
    first, *others = turns
    assert len(turns) == 3 and first[0] == 0
    assert all(cached > prompt // 2 for cached, prompt in others)
