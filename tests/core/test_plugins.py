"""One file outside the package adds an eviction policy to the settings, the cache, the flags and the tools."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.errors import PluginError
from megatron_hybrid_prefix.lab.replay import CacheServer
from megatron_hybrid_prefix.lab.traces import TraceRequest
from megatron_hybrid_prefix.mcore.entrypoints import arguments
from megatron_hybrid_prefix.plugins import PLUGINS_VARIABLE, Registry
from megatron_hybrid_prefix.policy.registry import eviction_policy_names
from tests.harness.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 4
RULE = '''
"""Most recently used first."""

from megatron_hybrid_prefix.policy.lru import LruEviction
from megatron_hybrid_prefix.policy.registry import register_eviction_policy


class NewestFirst(LruEviction):
    def victim(self, evictable):
        return next((state for state in reversed(list(self)) if evictable(state)), None)


register_eviction_policy("newest_first", NewestFirst)
'''
TRACE = (
    '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'
    '{"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [3, 4]}\n'
    '{"timestamp": 2, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 5]}\n'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "newest_first_rule.py").write_text(RULE)
    (folder / "broken_rule.py").write_text("raise RuntimeError('two\\nlines')")
    (folder / "trace.jsonl").write_text(TRACE)
    return folder


@pytest.fixture
def plugged(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv(PLUGINS_VARIABLE, "newest_first_rule")


def run_verb(folder: Path, verb: str, *argv: str, plugins: str = "newest_first_rule") -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", PLUGINS_VARIABLE: plugins}
    command = [sys.executable, "-m", "megatron_hybrid_prefix", verb, *argv]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)


def resumes(eviction_policy: str) -> list[int | None]:
    """Resume depths, in tokens: two prompts fill two slots, a third one evicts, then the first two come again."""
    sizes = {"block_tokens": BLOCK, "kv_blocks": 100, "state_slots": 2, "retention_interval_tokens": 0}
    server = CacheServer(eviction_policy=eviction_policy, **sizes)
    prompts = [TraceRequest(keys=[bytes([name])], prompt_tokens=BLOCK + 1, timestamp=0) for name in (1, 2, 3, 1, 2)]
    return [server.serve(prompt) for prompt in prompts]


def test_the_cache_evicts_by_the_rule_of_a_plugin(plugged):
    assert resumes("lru") == [0, 0, 0, 0, 0]
    assert resumes("newest_first") == [0, 0, 0, BLOCK, 0], "the second prompt's state went, the first one's stayed"


def test_settings_and_flags_know_the_rule_of_a_plugin(plugged):
    assert eviction_policy_names()[:2] == ("lru", "recompute_cost") and "newest_first" in eviction_policy_names()
    config = HybridPrefixConfig(mamba_gb=1, eviction_policy="newest_first")
    parser = arguments.add_hybrid_prefix_args(argparse.ArgumentParser(exit_on_error=False))
    args = parser.parse_args(
        [arguments.SWITCH, arguments.BUDGET, "1", "--hybrid-prefix-eviction-policy", "newest_first"]
    )
    assert arguments.hybrid_prefix_config_from_args(args) == config
    with pytest.raises(ValueError, match=r"eviction_policy='best': must be 'lru' or .* or 'newest_first'"):
        HybridPrefixConfig(mamba_gb=1, eviction_policy="best")


def test_the_replay_uses_the_rule_of_a_plugin(folder):
    argv = [str(folder / "trace.jsonl"), "--state-slots", "1"]
    done = run_verb(folder, "replay", *argv, "--eviction", "newest_first", "lru")
    assert done.returncode == 0, done.stderr
    assert "newest_first" in done.stdout
    refused = run_verb(folder, "replay", *argv, "--eviction", "newest_first", plugins="")
    assert refused.returncode == 2 and "newest_first" in refused.stderr


def test_a_plugin_that_cannot_be_imported_is_one_line(folder):
    for name, reason in (("broken_rule", "RuntimeError: two lines"), ("no_such_rule", "ModuleNotFoundError: ")):
        done = run_verb(folder, "replay", "tiny", plugins=name)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith(f"error: HYBRID_PREFIX_PLUGINS: cannot import '{name}': {reason}")
        assert done.stderr.count("\n") == 1


def test_settings_say_which_plugin_cannot_be_imported(plugged, monkeypatch):
    monkeypatch.setenv(PLUGINS_VARIABLE, "newest_first_rule, broken_rule")
    with pytest.raises(PluginError, match="cannot import 'broken_rule': RuntimeError: two lines"):
        HybridPrefixConfig(mamba_gb=1)


def test_a_name_is_registered_once():
    registry: Registry[object] = Registry("colour")
    red = object()
    registry.register("red", red)
    registry.register("red", red)
    with pytest.raises(ValueError, match="colour='red': registered already"):
        registry.register("red", object())
    with pytest.raises(ValueError, match="colour: a registered name must not be empty"):
        registry.register("", red)
    with pytest.raises(ValueError, match="colour='blue': must be 'red'"):
        registry["blue"]


def test_a_plugin_that_failed_halfway_says_why_again(tmp_path, monkeypatch):
    (tmp_path / "half_a_plugin.py").write_text(
        RULE.replace("newest_first", "half") + "raise RuntimeError('the reason')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PLUGINS_VARIABLE, "half_a_plugin")
    for _ in range(2):
        with pytest.raises(PluginError, match="cannot import 'half_a_plugin': RuntimeError: the reason"):
            eviction_policy_names()
