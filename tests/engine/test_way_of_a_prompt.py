"""How much of the package a reader has to open to follow one cold prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

import megatron_hybrid_prefix
from tests.harness.engine_helpers import random_tokens
from tests.harness.lifecycle_helpers import EngineHarness

_TOOL = 3  # of sys.monitoring: none that Python names
_ROOT = Path(megatron_hybrid_prefix.__file__).parent
MOST_FILES = 40


def test_a_cold_prompt_passes_few_files(model):
    """Files in which a function starts; without ``platform/``, which stands in for a GPU."""
    served = EngineHarness(model)
    served.send(random_tokens(200, 1), count=2)  # what is made once
    files: set[str] = set()

    def started(code: CodeType, _: int) -> None:
        path = Path(code.co_filename)
        if path.is_relative_to(_ROOT):
            files.add(str(path.relative_to(_ROOT)))

    monitoring = sys.monitoring
    monitoring.use_tool_id(_TOOL, "files")
    try:
        monitoring.register_callback(_TOOL, monitoring.events.PY_START, started)
        monitoring.set_events(_TOOL, monitoring.events.PY_START)
        served.add(random_tokens(300, 2), count=2, params={"return_log_probs": False})
        served.engine.step_modern()
    finally:
        monitoring.set_events(_TOOL, 0)
        monitoring.free_tool_id(_TOOL)
    found = sorted(file for file in files if not file.startswith("platform"))
    assert {"cache.py", "mcore/context/context.py", "index/store.py"} <= set(found)
    assert len(found) <= MOST_FILES, "\n".join(found)
    assert served.context.prefix_stats().checkpoints_published >= 2
