"""How much of the package a reader has to open to follow a cold prompt, a load from the host, and a hit from a folder."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import megatron_hybrid_prefix

_TOOL = 3  # of sys.monitoring: none that Python names
_ROOT = Path(megatron_hybrid_prefix.__file__).parent
LOOK_AT_WEIGHTS = {"mcore/state/weights.py", "ops/samples.py"}  # once after idle time, whatever the prompt
MOST_FILES = {"cold": 40, "host": 30, "folder": 40}
PASSED = {
    "cold": {"cache.py", "mcore/context/context.py", "index/store.py"},
    "host": {"index/loads.py", "mcore/state/moves.py", "tiers/loads.py"},
    "folder": {"index/loads.py", "mcore/state/moves.py", "tiers/loads.py", "tiers/jobs.py", "tiers/file.py"},
}


def files_of(work: Callable[[], Any], counts: Callable[[], bool]) -> list[str]:
    """Files of the package in which a function starts while it counts; without ``platform/``, which stands in for a GPU."""
    files: set[str] = set()

    def started(code: CodeType, _: int) -> None:
        path = Path(code.co_filename)
        if path.is_relative_to(_ROOT) and counts():
            files.add(str(path.relative_to(_ROOT)))

    monitoring = sys.monitoring
    monitoring.use_tool_id(_TOOL, "files")
    monitoring.register_callback(_TOOL, monitoring.events.PY_START, started)
    monitoring.set_events(_TOOL, monitoring.events.PY_START)
    work()
    monitoring.set_events(_TOOL, 0)
    monitoring.free_tool_id(_TOOL)
    return sorted(file for file in files if not file.startswith("platform"))


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
    found = files_of(served.engine.step_modern, lambda: True)
    assert served.context.prefix_stats().checkpoints_published > before
    assert set(found) >= LOOK_AT_WEIGHTS
    return [file for file in found if file not in LOOK_AT_WEIGHTS]


def files_of_a_load(served: Any, prompt: list[int]) -> list[str]:
    """Of the load alone: what the calls for it start, on the engine's thread and on those that read."""
    from megatron_hybrid_prefix.index.loads import Loads
    from megatron_hybrid_prefix.mcore.context.request import RequestLoads
    from megatron_hybrid_prefix.mcore.state.moves import HostMoves, Moves

    inside = threading.local()

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(*arguments: Any, **options: Any) -> Any:
            inside.calls = getattr(inside, "calls", 0) + 1
            try:
                return method(*arguments, **options)
            finally:
                inside.calls -= 1

        return counted

    for owner in (Loads, RequestLoads, HostMoves, Moves):
        for name, method in list(vars(owner).items()):
            if callable(method) and not name.startswith("__"):
                setattr(owner, name, counting(method))

    def steps() -> None:
        served.add(prompt, count=2, params={"return_log_probs": False})
        for _ in range(2):
            served.engine.step_modern()

    def counts() -> bool:
        return getattr(inside, "calls", 0) > 0 or threading.current_thread().name == "tier-read"

    before = served.context.prefix_stats()
    found = files_of(steps, counts)
    after = served.context.prefix_stats()
    assert after.reused_tokens_host > before.reused_tokens_host and after.fallbacks == before.fallbacks
    return found


def files_of_a_load_from_the_host() -> list[str]:
    """Both memories are full: something is evicted for the load."""
    from tests.harness.engine_helpers import random_tokens

    served = engine_of(slots=3, blocks=12, host_gb=0.05)
    prompts = [random_tokens(200, seed) for seed in range(8)]
    for _ in range(2):
        served.send(*prompts, count=2)
    return files_of_a_load(served, prompts[0])


def files_of_a_hit_from_a_folder() -> list[str]:
    from tests.harness.engine_helpers import random_tokens
    from tests.harness.limits import HANG_S

    os.environ["HYBRID_PREFIX_SECRET"] = "a secret for the tests"
    fields = {"host_gb": 0.05, "shared": f"file://{tempfile.mkdtemp()}?gb=1&min_tokens=0&wait_s={HANG_S}"}
    prompt = random_tokens(300, 1)
    first = engine_of(**fields)
    first.send(prompt, count=2)
    assert first.context.host_moves.drain(HANG_S)
    served = engine_of(**fields)
    served.send(random_tokens(200, 3), count=2)
    return files_of_a_load(served, prompt)


@pytest.fixture(scope="module")
def files() -> dict[str, list[str]]:
    """Files of each way. In a process of its own: other tests leave wrappers."""
    command = [sys.executable, "-m", "tests.engine.test_way_of_a_prompt"]
    done = subprocess.run(command, cwd=_ROOT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", MOST_FILES)
def test_a_prompt_passes_few_files(files, way):
    assert PASSED[way] <= set(files[way])
    assert len(files[way]) <= MOST_FILES[way], "\n".join(files[way])


if __name__ == "__main__":
    ways = {
        "cold": files_of_a_cold_prompt,
        "host": files_of_a_load_from_the_host,
        "folder": files_of_a_hit_from_a_folder,
    }
    print(json.dumps({way: find() for way, find in ways.items()}))
