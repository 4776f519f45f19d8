"""What the README and the guides show runs: their Python as it stands there, commands at least as far as their options."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import pytest

from megatron_hybrid_prefix.cli.main import VERBS
from megatron_hybrid_prefix.console.terminal import InputError
from tests.harness.hf_helpers import make_folder, save_tokenizer
from tests.harness.workers.launch import run_prepared
from tests.packaging.documents import DOCS, DOCUMENTS, ROOT, commands, fences, relative

README = ROOT / "README.md"
# The guides, in the order in which they are read: a later page uses names of an earlier one.
GUIDES = [
    DOCS / f"{name}.md"
    for name in ("getting-started", "hugging-face", "sizing", "server", "tiers", "scripts-and-rl", "troubleshooting")
]
MODULE = "megatron_hybrid_prefix"
# Verbs whose commands are short on a CPU.
SHORT = ("generate", "plan", "replay")
SESSION = {"system": "You answer.", "context": "A long text. " * 20, "turns": ["Who wrote it?", "When?"]}


def run(code: str, folder: Path) -> list[str]:
    """The lines that a script prints, on the CPU and with this checkout."""
    script = folder / "shown.py"
    script.write_text(code)
    (done,) = run_prepared(script, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def text_of(documents: Iterable[Path]) -> str:
    return "\n".join(document.read_text(encoding="utf-8") for document in documents)


def python_of(*documents: Path) -> str:
    """The documents' Python: their blocks are one script."""
    return "\n".join(body for language, body in fences(text_of(documents)) if language == "python")


# -- Python ------------------------------------------------------------------------------------------------------------


def test_the_readme_s_python_is_the_example_and_hits(tmp_path):
    printed = run(python_of(README), tmp_path)
    assert printed == ["0 prompt tokens were not computed", "512 prompt tokens were not computed"]
    # The comment beside the last line says so.
    assert "# 0, then 512" in python_of(README).splitlines()[-1]


@pytest.mark.slow
def test_the_guides_python_prints_what_it_says(tmp_path):
    printed = run(python_of(*GUIDES), tmp_path)
    for line in (
        "0 prompt tokens were not computed",
        "512 prompt tokens were not computed",
        "1 hits verified, 0 wrong",
    ):
        assert line in printed and line in text_of(GUIDES)
    assert any(re.fullmatch(r"0\.\d\d of the prompt tokens were reused", line) for line in printed)


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_python_can_be_parsed(document):
    for language, body in fences(document.read_text(encoding="utf-8")):
        if language == "python":
            compile(body, str(document), "exec")


# -- commands ----------------------------------------------------------------------------------------------------------


def problem_of(command: str) -> str | None:
    """What is wrong with a command that a document shows, as far as can be told without running it."""
    words = shlex.split(command, comments=True)
    if words[0] == "torchrun" and "-m" in words:
        words = words[words.index("-m") + 1 :]
        words = ["hybrid-prefix", *(words[0].split(".")[2:3]), *words[1:]]
    if words[0] == "hybrid-prefix":
        return problem_of_verb(words[1], words[2:])
    files = [word for word in words if re.fullmatch(r"(scripts|tools|tests|examples)/[\w./]+", word)]
    missing = [file for file in files if not (ROOT / file).exists()]
    return f"there is no {', '.join(missing)}" if missing else None


def problem_of_verb(verb: str, words: list[str]) -> str | None:
    if verb == "megatron_checkpoint":  # its options are megatron's: tests/engine/test_arguments.py
        return None
    if verb not in VERBS:
        return f"there is no verb {verb}"
    module = import_module(f"{MODULE}.cli.{VERBS[verb].module}")
    try:
        module.make_parser().parse_args(words)
    except (InputError, SystemExit, ValueError) as error:
        return str(error)
    return None


# `docs/extending.md` has plugins: test_docs.py runs its commands.
@pytest.mark.parametrize("document", sorted({*DOCUMENTS} - {DOCS / "extending.md"}), ids=relative)
def test_commands_exist_and_take_these_options(document):
    found = commands(document.read_text(encoding="utf-8"))
    assert {command: problem for command in found if (problem := problem_of(command))} == {}


def test_commands_are_found_and_judged():
    assert len(commands(README.read_text(encoding="utf-8"))) >= 6
    text = "```bash\nhybrid-prefix serve \\\n    --prot 1   # wrong\nscripts/none.sh\n```\n\n    hybrid-prefix serv\n\n    torchrun --nproc-per-node 2 -m megatron_hybrid_prefix generate X --tp 2\n"
    *wrong, right = commands(text)
    assert [bool(problem_of(command)) for command in (*wrong, right)] == [True, True, True, False]


@pytest.mark.slow
def test_short_commands_of_the_guides_run(tmp_path):
    (tmp_path / "session.json").write_text(json.dumps(SESSION))
    lines = [{"timestamp": n, "input": "A long text. " * 40 + f"Question {n}"} for n in range(3)]
    (tmp_path / "agents.jsonl").write_text("\n".join(map(json.dumps, lines)))
    trace = [{"timestamp": n, "input_length": 1024, "output_length": 1, "hash_ids": [n % 3, n]} for n in range(9)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, trace)))
    make_folder(tmp_path / "Nemotron-H-8B")
    save_tokenizer(tmp_path / "Nemotron-H-8B")
    shown = [shlex.split(line, comments=True) for line in commands(text_of(GUIDES))]
    shown = [words for words in shown if words[0] == "hybrid-prefix" and words[1] in SHORT]
    assert {words[1] for words in shown} == set(SHORT) and len(shown) >= 6
    command = tmp_path / "command.py"  # as the installed command
    command.write_text("import sys\nfrom megatron_hybrid_prefix.cli.main import main\nsys.exit(main())\n")
    for words in shown:
        (done,) = run_prepared(command, *words[1:], cwd=tmp_path)
        assert done.returncode == 0 and done.stdout, done.stderr[-3000:]
