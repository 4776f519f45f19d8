"""The cache switched on by variables alone, as ``hybrid-prefix env`` prints them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from megatron_hybrid_prefix.support.environment import python_path, say
from tests.engine.test_arguments import INFERENCE, MODEL
from tests.engine.test_install import BLOCK, PROMPT
from tests.harness.limits import HANG_S
from tests.harness.workers.launch import WORKERS, environment, torchrun

LINE = "megatron_hybrid_prefix: "
REUSED = f"{LINE}prefix cache: {4 * BLOCK} of {2 * len(PROMPT)} prompt tokens reused (48%)"


def run(*command: object, path: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these variables, and with our folders on its path; ``path``: others after them."""
    own = environment()
    for name in [name for name in own if name.startswith("HYBRID_PREFIX_")]:
        del own[name]
    folders = python_path(own["PYTHONPATH"] if path is None else path)
    return subprocess.run(
        [str(word) for word in command],
        env=own | {"PYTHONPATH": folders, "TORCHDYNAMO_DISABLE": "0"} | variables,  # tests disable it, users do not
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if LINE in line]


START = """
import json, sys
finders = [finder if isinstance(finder, type) else type(finder) for finder in sys.meta_path]
next_one = sys.modules["sitecustomize"]
print(json.dumps([[finder.__name__ for finder in finders], sorted(sys.modules), next_one.__file__, next_one.ran]))
"""


def test_a_start_without_the_variable_and_with_it(tmp_path):
    """The next sitecustomize runs, and nothing else is imported before megatron is."""
    (tmp_path / "sitecustomize.py").write_text("ran = 1\n")
    found = {}
    for value in (None, "", "0", "1", "optional"):
        result = run(
            sys.executable,
            "-c",
            START,
            path=str(tmp_path),
            **({} if value is None else {"HYBRID_PREFIX_INSTALL": value}),
        )
        assert (result.returncode, result.stderr) == (0, "")
        found[value] = json.loads(result.stdout)
        assert found[value][2:] == [str(tmp_path / "sitecustomize.py"), 1]
    finders, modules = found[None][:2]
    assert "_MegatronFinder" not in finders and "torch" not in modules
    assert found[""][:2] == found["0"][:2] == [finders, modules]
    assert found["1"][:2] == found["optional"][:2] == [["_MegatronFinder", *finders], modules]


WITHOUT_PACKAGE = """
import sys
sys.modules["megatron_hybrid_prefix"] = None  # as in another environment
import megatron.core
print(megatron.core.here)
"""


def test_an_environment_without_the_package(tmp_path):
    """That Python swallows what a sitecustomize raises, and scripts an ImportError of megatron, must not switch the cache off."""
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("here = 1\n")
    said = "HYBRID_PREFIX_INSTALL: cannot import megatron_hybrid_prefix here, install it or unset the variable: "
    for value, code, output in (("1", 1, ""), ("optional", 0, "1\n"), ("0", 0, "1\n")):
        result = run(sys.executable, "-c", WITHOUT_PACKAGE, path=str(tmp_path), HYBRID_PREFIX_INSTALL=value)
        assert (result.returncode, result.stdout) == (code, output)
        last = (result.stderr.splitlines() or [""])[-1]
        assert last.startswith({"1": f"RuntimeError: {said}", "optional": said, "0": ""}[value])
        assert value != "optional" or result.stderr.count("\n") == 1


FIELDS = "there are: cache_gb, mamba_gb, "
NO_FILE = 'give JSON such as {"cache_gb": 50}, or its file'
# Variables, megatron's version, and the beginning and the end of the error.
WRONG: list[tuple[dict[str, str], str | None, str, str]] = [
    ({"HYBRID_PREFIX_INSTALL": "yes"}, None, "HYBRID_PREFIX_INSTALL=yes: must be 1, optional, 0 or empty", ""),
    ({}, "0.21.0", "HYBRID_PREFIX_INSTALL=1: megatron-core 0.21.0 is installed, supported is", '"'),
    *(
        ({"HYBRID_PREFIX_CONFIG": text}, None, f"HYBRID_PREFIX_INSTALL=1: HYBRID_PREFIX_CONFIG: {start}", end)
        for text, start, end in (
            ('{"cache_gb": 1', "not JSON: ", ""),
            ('{"colour": 1}', f"there is no setting 'colour'; {FIELDS}", ""),
            ('{"cache_gb": "50"}', "cache_gb='50': must be a number or null", ""),
            ('{"cache_gb": true}', "cache_gb=True: must be a number or null", ""),
            ('{"retention_interval_tokens": 1.5}', "retention_interval_tokens=1.5: must be a whole number or null", ""),
            ('{"exact": 1}', "exact=1: must be a text or null", ""),
            ('{"exact": "nearly"}', "exact='nearly': must be 'bits', or None", ""),
            ('{"check_ranks": 1}', "check_ranks=1: must be true or false", ""),
            ('{"cache_gb": NaN}', "cache_gb=nan: must be above 0", ""),
            ("/no/such.json", "cannot read '/no/such.json': No such file or directory; ", NO_FILE),
            ("50", "'50': give JSON such as ", "or the absolute path of its file"),
        )
    ),
    (
        {"HYBRID_PREFIX_CONFIG": "{}", "HYBRID_PREFIX_PLUGINS": "no_such_plugin"},
        None,
        "HYBRID_PREFIX_INSTALL=1: HYBRID_PREFIX_PLUGINS: cannot import 'no_such_plugin'",
        "",
    ),
]


def test_what_is_wrong_is_one_line_where_megatron_is_imported(tmp_path):
    """Again at each import, and never an ImportError. With ``optional`` megatron's own classes go on."""
    cases = [({"HYBRID_PREFIX_INSTALL": "1"} | variables, version) for variables, version, *_ in WRONG]
    out = tmp_path / "out.json"
    result = run(sys.executable, WORKERS / "env_errors.py", out, json.dumps(cases), HYBRID_PREFIX_INSTALL="1")
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(out.read_text())
    for (*_, start, end), (kind, said) in zip(WRONG, found["errors"], strict=True):
        assert kind == "PlatformError" and said.startswith(start) and said.endswith(end) and "\n" not in said
    assert found["active"] == 0
    assert found["owners"] == ["megatron.core.inference.contexts.dynamic_context", "torch.cuda"]
    (line,) = lines(result.stderr)
    assert line.startswith(f"{LINE}no prefix cache, HYBRID_PREFIX_INSTALL=optional: HYBRID_PREFIX_PLUGINS: ")


@pytest.mark.parametrize(
    ("variables", "speaks"), [({}, True), ({"RANK": "0"}, True), ({"RANK": "1"}, False), ({"LOCAL_RANK": "2"}, False)]
)
def test_one_line_in_the_log_or_by_the_first_rank(variables, speaks, monkeypatch, caplog, capsys):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    logger = logging.getLogger("megatron_hybrid_prefix.a_test")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    say(logger, "done")
    assert capsys.readouterr().err == f"{LINE}done\n" * speaks
    say(logger, "it failed", on_each_rank=True)
    assert capsys.readouterr().err == f"{LINE}it failed\n"
    with caplog.at_level(logging.INFO, logger.name):
        say(logger, "done")
    assert (capsys.readouterr().err, caplog.messages) == ("", ["done"])


def test_a_spawned_actor(tmp_path):
    """It has nothing but variables. Settings are of a file, for all contexts."""
    out, settings = tmp_path / "out.json", tmp_path / "settings.json"
    settings.write_text('{"mamba_gb": 0.01}')
    variables = {"HYBRID_PREFIX_INSTALL": "1", "HYBRID_PREFIX_CONFIG": str(settings)}
    result = run(sys.executable, WORKERS / "env_actor.py", out, **variables)
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(out.read_text())
    assert found["codes"] == [0, 1]
    assert (found["context"], found["skipped"]) == ("HybridPrefixContext", 4 * BLOCK)
    assert found["answers"][0] == found["answers"][1] and len(found["answers"][0]) == 8
    line, end = lines(result.stderr)
    assert end == REUSED
    assert ", for all contexts: mamba_gb=0.01, memory: buffer_size_gb; cpu, attention: " in line
    assert "PlatformError: HYBRID_PREFIX_INSTALL=1: HYBRID_PREFIX_CONFIG: not JSON: Extra data" in result.stderr


def test_a_process_that_is_started_later_does_not_repeat_the_line():
    """Megatron's coordinator is such a process."""
    later = "import subprocess, sys; subprocess.check_call([sys.executable, '-c', 'import megatron.core'])"
    result = run(sys.executable, "-c", f"import megatron.core; {later}", HYBRID_PREFIX_INSTALL="1")
    assert result.returncode == 0, result.stderr[-4000:]
    (line,) = lines(result.stderr)
    assert line.startswith(f"{LINE}prefix cache ")


@pytest.mark.multi
def test_ranks_of_a_training_script(tmp_path):
    """It makes its own groups, of two tensor-parallel ranks, and its flag of prefix caching is enough."""
    out = tmp_path / "out.json"
    flags = [*MODEL, *INFERENCE, "--tensor-model-parallel-size", "2", "--distributed-backend", "gloo"]
    result = run(*torchrun(2), WORKERS / "env_training.py", out, *flags, HYBRID_PREFIX_INSTALL="1")
    assert result.returncode == 0, result.stderr[-6000:]
    ranks = json.loads(out.read_text())
    for rank in ranks:
        assert (rank["tp"], rank["gloo"], rank["platform"]) == (2, 1, None)
        assert (rank["context"], rank["skipped"]) == ("HybridPrefixContext", 4 * BLOCK)
        assert rank["embedding"][0] == 256
        assert rank["answers"] == ranks[0]["answers"] and rank["answers"][0] == rank["answers"][1]
    (line,) = lines(result.stderr)
    assert (result.stdout + result.stderr).count(REUSED.removeprefix(LINE)) == 1, (
        "in the log, which megatron.training sets up"
    )
    assert "for contexts with enable_prefix_caching (for all: set HYBRID_PREFIX_CONFIG)" in line
