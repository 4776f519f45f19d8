"""`hybrid-prefix env`: what it prints for a shell. (What that does is in `tests/engine/test_env_install.py`.)"""

from __future__ import annotations

import os
import shlex
import site
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hybrid_prefix import HybridPrefixConfig
from megatron_hybrid_prefix.cli.env import main
from megatron_hybrid_prefix.cli.main import main as command
from megatron_hybrid_prefix.support import environment
from megatron_hybrid_prefix.support.environment import CONFIG_VARIABLE, PACKAGE, config_of
from tests.cli.test_cli import ROOT, run
from tests.harness.limits import HANG_S

STARTUP = str(PACKAGE / "startup")


@pytest.fixture
def exports(monkeypatch, capsys):
    """Calls the verb; returns the variables that it prints."""

    def call(*argv: str, path: str | None = None) -> dict[str, str]:
        monkeypatch.delenv("PYTHONPATH", raising=False)
        if path is not None:
            monkeypatch.setenv("PYTHONPATH", path)
        assert main(argv) == 0
        words = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
        found = dict(word[1].split("=", 1) for word in words if word[0] == "export")
        assert (["unset", CONFIG_VARIABLE] in words) == (CONFIG_VARIABLE not in found)
        assert len(words) == 3 and all(len(word) == 2 for word in words)
        return found

    return call


def test_without_options_there_are_no_settings(exports):
    assert exports() == {"HYBRID_PREFIX_INSTALL": "1", "PYTHONPATH": STARTUP}
    assert exports("--optional")["HYBRID_PREFIX_INSTALL"] == "optional"


def test_present_folders_stay_and_ours_are_around_them_once(exports, monkeypatch, tmp_path):
    """Of a clone the first alone: it has other packages, such as tests."""
    for first, *last in ([STARTUP], [str(tmp_path / "package" / "startup"), str(tmp_path)]):
        monkeypatch.setattr(environment, "PACKAGE", Path(first).parent)
        for path in ("/a:/b c", ":".join(["/a", *last, "/b c"]), ":".join([first, *last, "/a", "/b c"])):
            assert exports(path=path)["PYTHONPATH"] == ":".join([first, "/a", "/b c", *last])
        assert exports(path="")["PYTHONPATH"] == ":".join([first, *last])
        assert exports(path="/a:")["PYTHONPATH"] == ":".join([first, "/a", "", *last]), "the working directory"


def test_the_folder_of_all_installed_packages_is_not_for_other_pythons(exports, monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    assert exports(path="/a")["PYTHONPATH"] == f"{tmp_path / 'package' / 'startup'}:/a"


def test_a_clone_hides_nothing_of_folders_that_come_later(exports, tmp_path):
    """Such as the examples of megatron's clone."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "__init__.py").touch()
    code = "import examples, megatron_hybrid_prefix as it; print(examples.__file__, it.__file__, sep='\\n')"
    variables = {**exports(), "PYTHONPATH": f"{exports()['PYTHONPATH']}:{tmp_path}"}
    command = [sys.executable, "-c", code]
    found = subprocess.check_output(command, env=os.environ | variables, cwd=tmp_path.parent, text=True, timeout=HANG_S)
    assert found.split() == [str(tmp_path / "examples" / "__init__.py"), str(PACKAGE / "__init__.py")]


def test_options_are_the_fields(exports):
    shared = 'file:///tmp/it\'s "here"?gb=1'
    argv = "--cache-gb 50 --mamba-gb 2.5 --no-decode-checkpoints --state-dtype float32 --host-gb 1 "
    argv += "--retention-interval-tokens auto --verify-hits 0.5 --eviction-policy lru --shared"
    sizes = {"cache_gb": 50, "mamba_gb": 2.5, "host_gb": 1, "shared": shared}
    wanted = HybridPrefixConfig(
        **sizes, decode_checkpoints=False, state_dtype="float32", verify_hits=0.5, eviction_policy="lru"
    )
    assert config_of(exports(*argv.split(), shared)) == wanted


def test_a_shell_takes_it(tmp_path):
    """Twice, with names to quote, and without what only other verbs need."""
    code = "import sys; sys.modules.update(rich=None, torch=None, megatron=None); import megatron_hybrid_prefix.cli.main as it; "
    code += "sys.exit(it.main(['env', '--cache-gb', '1']))"
    verb = f'eval "$({shlex.quote(sys.executable)} -c {shlex.quote(code)})"'
    result = subprocess.run(
        ["bash", "-c", f'{verb} && {verb} && echo "$PYTHONPATH" && echo "${CONFIG_VARIABLE}"'],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}/it's here:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [f"{STARTUP}:{tmp_path}/it's here:{ROOT}", '{"cache_gb": 1.0}']


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--cache-gb", "-1"], "cache_gb=-1.0: must be above 0"),
        (["--cache-gb", "much"], "argument --cache-gb: invalid float or 'auto' value: 'much'"),
        (["--colour"], "unrecognized arguments: --colour"),
        (["--shared", "file:///tmp/x?gb=1"], "shared='file:///tmp/x?gb=1': needs a host tier; set host_gb above 0"),
    ],
)
def test_wrong_options_are_one_line(argv, problem):
    result = run("env", *argv)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"error: {problem}\n")


def test_a_verb_never_installs_the_cache(monkeypatch, capsys):
    """It builds its own engines: with the variable a benchmark would compare this cache with itself."""
    monkeypatch.setenv(environment.INSTALL_VARIABLE, "1")
    assert command(["env"]) == 0
    assert environment.INSTALL_VARIABLE not in os.environ
    assert "export HYBRID_PREFIX_INSTALL=1\n" in capsys.readouterr().out


def test_a_path_that_no_list_can_hold_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(environment, "PACKAGE", PACKAGE.parent / "a:b" / "megatron_hybrid_prefix")
    assert main([]) == 2
    assert capsys.readouterr().err.endswith(
        "a:b/megatron_hybrid_prefix/startup: PYTHONPATH cannot hold a path with ':'\n"
    )
