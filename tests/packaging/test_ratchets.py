"""Ratchets: counts of what a reader, a user and a maintainer have to know. They only go down.

Whoever must raise a number of `MOST` takes something away for it, and the commit says what. Whoever lowers a count lowers its number: a
number far above its count is a failure, too. Files are those of a whole prompt.

    python -m tests.packaging.test_ratchets    # the counts as they are
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import megatron_hybrid_prefix

_TOOL = 3  # of sys.monitoring: none that Python names
_ROOT = Path(megatron_hybrid_prefix.__file__).parent
LOOK_AT_WEIGHTS = {"mcore/state/weights.py", "ops/samples.py"}  # once after idle time, whatever the prompt
MOST = {
    "lines: core": 10_294,
    "lines: mcore": 7_219,
    "lines: upstream and platform": 6_127,
    "lines: serve, cli and console": 7_315,
    "lines: package": 48_497,
    "lines: tests": 55_696,
    "files: cold": 42,
    "files: hit": 42,
    "files: host": 50,
    "files: folder": 58,
    "changes of file: hit beside full memories": 385,
    "changes of file: host": 426,
    "functions: cold": 554,
    "functions: hit": 481,
    "names: cache": 46,
    "names: context": 35,
    "names: context seam": 33,
    "names: engine": 25,
    "names: engine seam": 29,
    "settings: HybridPrefixConfig": 15,
    "settings: CacheSettings": 18,
    "flags: serve": 42,
    "flags: generate": 38,
}
ROOMS = {
    "core": ("cache.py", "requests", "index", "tiers", "transfers", "policy", "pool"),
    "mcore": ("mcore",),
    "upstream and platform": ("upstream", "platform"),
    "serve, cli and console": ("serve", "cli", "console"),
    "package": ("",),
    "tests": ("../tests",),
}
SLACK = 0.01  # of lines; other counts are exact
PASSED = {
    "cold": {"cache.py", "mcore/context/context.py", "tiers/device.py"},
    "hit": {"cache.py", "mcore/context/context.py", "requests/matcher.py"},
    "host": {"requests/loads.py", "transfers/mover.py", "transfers/to_device.py"},
    "folder": {
        "requests/loads.py",
        "transfers/mover.py",
        "transfers/to_device.py",
        "transfers/jobs.py",
        "tiers/file.py",
    },
}


def lines_of(names: Iterable[str]) -> int:
    """Lines of Python in these files and folders."""
    paths = [
        path for name in names for path in ([_ROOT / name] if name.endswith(".py") else (_ROOT / name).rglob("*.py"))
    ]
    assert paths
    return sum(len(path.read_bytes().splitlines()) for path in paths)


def public(kind: type, *, inherited: bool = True) -> set[str]:
    """Names of public methods and properties of a class of this package, and of those that it inherits from this package."""
    kinds = [each for each in kind.__mro__ if each.__module__.startswith("megatron_hybrid_prefix.")]
    members = {
        name: value
        for each in (kinds if inherited else kinds[:1])
        for name, value in vars(each).items()
        if not name.startswith("_")
    }
    return {
        f"{kind.__name__}.{name}" for name, value in members.items() if callable(value) or isinstance(value, property)
    }


def exposed(root: Any) -> set[type]:
    """Classes of this package that can be reached by public attributes: through tables and lists, too."""
    found: set[type] = set()
    left = [root]
    while left:
        value = left.pop()
        if isinstance(value, dict | list | tuple | set):
            left += value.values() if isinstance(value, dict) else value
        elif type(value).__module__.startswith("megatron_hybrid_prefix.") and type(value) not in found:
            found.add(type(value))
            names = {*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())}
            left += [getattr(value, name) for name in names if not name.startswith("_")]
    return found


def names_of_the_cache() -> set[str]:
    """What a reader of the cache's callers has to know: public names of all that can be reached from it."""
    from megatron_hybrid_prefix.cache import HybridPrefixCache
    from megatron_hybrid_prefix.index.settings import CacheSettings

    cache = HybridPrefixCache(CacheSettings(block_tokens=4, kv_blocks=12, page_blocks=2, host_pages=20))
    for number in (1, 2):
        admission = cache.admit(number, cache.match(cache.chain([1] * 9)))
        assert admission is not None
        cache.publish(cache.plan(number, admission.resume_tokens, 9))
    names = set[str]().union(*map(public, exposed(cache)))
    assert {"HybridPrefixCache.admit", "BlocksById.allocate", "Loads.source"} <= names
    return names


def names() -> dict[str, set[str]]:
    """Public names of the faces."""
    from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
    from megatron_hybrid_prefix.mcore.engine.engine import HybridPrefixEngine
    from megatron_hybrid_prefix.upstream.context import ContextSeam
    from megatron_hybrid_prefix.upstream.engine import EngineSeam

    own = functools.partial(public, inherited=False)
    return {
        "cache": names_of_the_cache(),
        "context": own(HybridPrefixContext),
        "context seam": own(ContextSeam),
        "engine": own(HybridPrefixEngine),
        "engine seam": own(EngineSeam),
    }


def settings() -> dict[str, int]:
    from megatron_hybrid_prefix.config import HybridPrefixConfig
    from megatron_hybrid_prefix.index.settings import CacheSettings

    return {kind.__name__: len(fields(kind)) for kind in (HybridPrefixConfig, CacheSettings)}


def flags(verb: str) -> int:
    """Options of a command, in its help or not."""
    parser = importlib.import_module(f"megatron_hybrid_prefix.cli.{verb}").make_parser()
    return len([action for action in parser._actions if action.option_strings])


def files_of(work: Callable[[], Any]) -> list[str]:
    """Files of the package in which functions start, in their order; without ``platform/``, which stands in for a GPU.

    On this thread, and on those that read from a tier: the others write what earlier prompts left, whenever they get to it.
    """
    files: list[str] = []

    def started(code: CodeType, _: int) -> None:
        path = Path(code.co_filename)
        reads = threading.current_thread().name in (threading.main_thread().name, "tier-read")
        if reads and path.is_relative_to(_ROOT):
            files.append(str(path.relative_to(_ROOT)))

    monitoring = sys.monitoring
    monitoring.use_tool_id(_TOOL, "files")
    monitoring.register_callback(_TOOL, monitoring.events.PY_START, started)
    monitoring.set_events(_TOOL, monitoring.events.PY_START)
    work()
    monitoring.set_events(_TOOL, 0)
    monitoring.free_tool_id(_TOOL)
    return [file for file in files if not file.startswith("platform") and file not in LOOK_AT_WEIGHTS]


def engine_of(**fields: Any) -> Any:
    from megatron_hybrid_prefix.models import build_hybrid_model
    from megatron_hybrid_prefix.platform import ensure_platform
    from tests.harness.lifecycle_helpers import EngineHarness

    return EngineHarness(build_hybrid_model("tiny", seed=0, platform=ensure_platform(device="cpu")), **fields)


def files_of_a_cold_prompt() -> list[str]:
    from tests.harness.engine_helpers import random_tokens

    served = engine_of()
    served.send(random_tokens(200, 1), count=2)  # what is made once
    before = served.context.prefix_stats().checkpoints_published
    served.add(random_tokens(300, 2), count=2, params={"return_log_probs": False})
    found = files_of(served.engine.step_modern)
    assert served.context.prefix_stats().checkpoints_published > before
    return found


def files_of_a_hit() -> list[str]:
    """From the device."""
    from tests.harness.engine_helpers import random_tokens

    served = engine_of()
    prompt = random_tokens(300, 1)
    served.send(random_tokens(200, 2), prompt, prompt, count=2)
    before = served.context.prefix_stats()
    served.add(prompt, count=2, params={"return_log_probs": False})
    found = files_of(served.engine.step_modern)
    assert served.context.prefix_stats().reused_tokens_device > before.reused_tokens_device
    return found


def files_of_a_prompt(served: Any, prompt: list[int]) -> list[str]:
    served.add(prompt, count=2, params={"return_log_probs": False})
    return files_of(served.engine.step_modern)


def files_of_a_load(served: Any, prompt: list[int]) -> list[str]:
    """Of a prompt that waits for nobody, on the engine's thread and on those that read."""
    before = served.context.prefix_stats()
    found = files_of_a_prompt(served, prompt)
    after = served.context.prefix_stats()
    assert after.reused_tokens_host > before.reused_tokens_host and after.fallbacks == before.fallbacks
    return found


def files_beside_full_memories(*, load: bool) -> list[str]:
    """Of the first of many prompts, which comes from the host, or what goes on from the last one, a hit. Something is evicted for each."""
    from tests.harness.engine_helpers import random_tokens

    served = engine_of(slots=3, blocks=12, host_gb=0.05)
    prompts = [random_tokens(200, seed) for seed in range(8)]
    for _ in range(2):
        served.send(*prompts, count=2)
    before = served.context.prefix_stats()
    hit = prompts[-1] + random_tokens(250, 99)
    found = files_of_a_load(served, prompts[0]) if load else files_of_a_prompt(served, hit)
    after = served.context.prefix_stats()
    assert after.reused_tokens > before.reused_tokens
    assert after.evictions + after.kv_evictions > before.evictions + before.kv_evictions
    return found


def files_of_a_hit_from_a_folder() -> list[str]:
    from tests.harness.engine_helpers import random_tokens
    from tests.harness.limits import HANG_S

    os.environ["HYBRID_PREFIX_SECRET"] = "a secret for the tests"
    fields = {"host_gb": 0.05, "shared": f"file://{tempfile.mkdtemp()}?gb=1&min_tokens=0&wait_s={HANG_S}"}
    once, prompt = random_tokens(300, 1), random_tokens(300, 2)
    first = engine_of(**fields)
    first.send(once, prompt, count=2)
    assert first.context.host_moves.drain(HANG_S)
    served = engine_of(**fields)
    served.send(once, count=2)  # what is made once
    return files_of_a_load(served, prompt)


WAYS = {
    "cold": files_of_a_cold_prompt,
    "hit": files_of_a_hit,
    "hit beside full memories": functools.partial(files_beside_full_memories, load=False),
    "host": functools.partial(files_beside_full_memories, load=True),
    "folder": files_of_a_hit_from_a_folder,
}


@functools.cache
def files() -> dict[str, list[str]]:
    """Files of each way. In a process of its own: other tests leave wrappers."""
    command = [sys.executable, "-m", "tests.packaging.test_ratchets", "files"]
    done = subprocess.run(command, cwd=_ROOT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def count(what: str) -> tuple[int, Iterable[str]]:
    """A count of `MOST`, and what was counted, where it can be named."""
    kind, _, name = what.partition(": ")
    if kind == "files":
        found = set(files()[name])
        assert PASSED[name] <= found
        return len(found), sorted(found)
    if kind == "changes of file":
        return sum(before != after for before, after in pairwise(files()[name])), ()
    if kind == "functions":  # what the host does in the step of a prompt
        return len(files()[name]), ()
    if kind == "names":
        return len(names()[name]), sorted(names()[name])
    return {"lines": lambda: lines_of(ROOMS[name]), "settings": lambda: settings()[name], "flags": lambda: flags(name)}[
        kind
    ](), ()


@pytest.mark.parametrize("what", MOST)
def test_counts_only_go_down(what):
    found, counted = count(what)
    assert found <= MOST[what], "\n".join(["more than before:", *counted])
    assert found >= MOST[what] * (1 - SLACK * what.startswith("lines")), f"lower the number: there are {found}"


def test_a_load_is_nearly_as_easy_to_follow_as_a_hit():
    assert count("changes of file: host")[0] <= 1.3 * count("changes of file: hit beside full memories")[0]


if __name__ == "__main__":
    if sys.argv[1:] == ["files"]:
        print(json.dumps({way: find() for way, find in WAYS.items()}))
    else:
        for what, most in MOST.items():
            print(f"{what:32}{count(what)[0]:>8,} of {most:,}")
