"""How much of the package a reader has to open to follow one cold prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import CodeType

import megatron_hybrid_prefix

_TOOL = 3  # of sys.monitoring: none that Python names
_ROOT = Path(megatron_hybrid_prefix.__file__).parent
MOST_FILES = 40


def files_of_a_cold_prompt() -> list[str]:
    """Files of the package in which a function starts; without ``platform/``, which stands in for a GPU."""
    from megatron_hybrid_prefix.models import build_hybrid_model
    from megatron_hybrid_prefix.platform import ensure_platform
    from tests.harness.engine_helpers import random_tokens
    from tests.harness.lifecycle_helpers import EngineHarness

    served = EngineHarness(build_hybrid_model("tiny", seed=0, platform=ensure_platform(device="cpu")))
    served.send(random_tokens(200, 1), count=2)  # what is made once
    before = served.context.prefix_stats().checkpoints_published
    files: set[str] = set()

    def started(code: CodeType, _: int) -> None:
        path = Path(code.co_filename)
        if path.is_relative_to(_ROOT):
            files.add(str(path.relative_to(_ROOT)))

    monitoring = sys.monitoring
    monitoring.use_tool_id(_TOOL, "files")
    monitoring.register_callback(_TOOL, monitoring.events.PY_START, started)
    monitoring.set_events(_TOOL, monitoring.events.PY_START)
    served.add(random_tokens(300, 2), count=2, params={"return_log_probs": False})
    served.engine.step_modern()
    monitoring.set_events(_TOOL, 0)
    assert served.context.prefix_stats().checkpoints_published > before
    return sorted(file for file in files if not file.startswith("platform"))


def test_a_cold_prompt_passes_few_files():
    """In a process of its own: other tests leave wrappers."""
    command = [sys.executable, "-m", "tests.engine.test_way_of_a_prompt"]
    said = subprocess.run(command, cwd=_ROOT.parent, capture_output=True, text=True, check=True).stdout
    found = json.loads(said.splitlines()[-1])
    assert {"cache.py", "mcore/context/context.py", "index/store.py"} <= set(found)
    assert len(found) <= MOST_FILES, "\n".join(found)


if __name__ == "__main__":
    print(json.dumps(files_of_a_cold_prompt()))
