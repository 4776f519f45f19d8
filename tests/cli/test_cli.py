"""The command `hybrid-prefix`: its verbs and its errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.cli.main import VERBS, main
from megatron_hybrid_prefix.console.terminal import MEMORY_ADVICE, InputError, as_main, as_memory_errors
from tests.harness.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]


def run(*argv: object, lacking: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process that cannot import some modules."""
    code = f"import sys; sys.modules.update(dict.fromkeys({lacking!r})); sys.argv = ['x', *{[*map(str, argv)]!r}]\n"
    code += "from megatron_hybrid_prefix.cli.main import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_help_has_a_line_for_each_verb(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, verb in VERBS.items():
        assert [line for line in lines if line.split() == [name, *verb.summary.split()]], name
    assert list(VERBS) == ["serve", "generate", "explain", "bench", "replay", "plan", "env", "convert"]
    assert max(map(len, lines)) <= 100


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hybrid-prefix {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "problem"), [(["sing"], "no verb 'sing'"), ([], "no verb given"), (["--colour"], "no verb '--colour'")]
)
def test_a_wrong_verb_is_one_line(argv, problem, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {problem}; there are: serve, generate, ") and error.count("\n") == 1


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.extra])
def test_a_missing_extra_is_one_line(verb):
    if verb == "serve":
        pytest.importorskip("megatron_hybrid_prefix.cli.serve")
    result = run(verb, lacking=("rich",))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: hybrid-prefix {verb} needs rich: pip install 'megatron-hybrid-prefix[{VERBS[verb].extra}]'\n"
    )


def test_the_extras_that_are_named_are_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert all("rich" in extras[verb.extra] for verb in VERBS.values() if verb.extra)


def test_a_missing_module_of_this_package_is_not_a_missing_extra():
    """A missing module of this package is a broken installation, not a missing extra."""
    result = run("replay", lacking=("megatron_hybrid_prefix.lab.replay",))
    assert result.returncode == 1 and "ModuleNotFoundError" in result.stderr


@pytest.mark.parametrize("verb", ["generate", "bench", "replay", "plan", "env", "convert"])
def test_a_verb_shows_its_options_without_torch(verb):
    result = run(verb, "--help", lacking=("torch", "megatron"))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: hybrid-prefix {verb} [-h] ")


def test_plan_and_replay_need_no_torch(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1, "input": "%s"}\n' % ("x" * 600))
    for argv in (["plan", "tiny", "--cache-gb", 1], ["replay", trace]):
        result = run(*argv, lacking=("torch", "megatron", "numpy"))
        assert (result.returncode, result.stderr) == (0, "")


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_work(tmp_path):
    result = run("bench", "herd", "--plot", tmp_path / "x.png", lacking=("matplotlib",))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: --plot needs matplotlib: pip install 'megatron-hybrid-prefix[bench]'\n"


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 28.00 GiB. GPU 0 has"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("shapes differ"), False),
        (RecursionError("DefaultCPU"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_the_lack_of_memory_is_named_so(error, short, capsys):
    with pytest.raises(InputError if short else type(error)) as raised, as_memory_errors("the model", "buy some"):
        raise error
    assert str(raised.value).startswith("the model: not enough memory; buy some: ") == short

    def anywhere(argv, interrupt):
        raise error

    if not short:
        with pytest.raises(type(error)):
            as_main(anywhere)([])
        return
    assert as_main(anywhere)([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: not enough memory; {MEMORY_ADVICE}: ") and said.count("\n") == 1
    assert "GPU 0 has" not in said


def test_only_the_command_line_imports_what_no_engine_needs():
    package, wrong = ROOT / "megatron_hybrid_prefix", []
    for path in package.rglob("*.py"):
        part = path.relative_to(package).parts[0]
        imported = re.findall(r"^ *(?:from|import) megatron_hybrid_prefix\.(\w+)", path.read_text(), re.MULTILINE)
        wings = {"serve", "bench", "lab", "cli"} & set(imported) - {part}
        if wings and part != "cli" and (part, wings) != ("__main__.py", {"cli"}):
            wrong.append((path.name, wings))
    assert wrong == []


def test_no_test_changes_where_modules_are_found():
    allowed = {ROOT / "tests" / "harness" / "workers" / "prepared.py"}  # which runs a script as python does
    changed = "sys.path" + ".insert"
    assert {path for path in ROOT.glob("tests/**/*.py") if changed in path.read_text()} <= allowed
