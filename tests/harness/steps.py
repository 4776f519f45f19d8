"""Counts Python steps: a measure of work that does not depend on the machine or its load."""

from __future__ import annotations

import sys
from collections.abc import Callable

_TOOL = 4  # of sys.monitoring: none that Python names


def steps(function: Callable[[], object]) -> int:
    """Returns how many calls and jumps (so loop iterations) Python makes while ``function`` runs.

    A loop inside a C function counts as one call.
    """
    count = 0

    def one(*_: object) -> None:
        nonlocal count
        count += 1

    monitoring = sys.monitoring
    events = monitoring.events.PY_START | monitoring.events.PY_RESUME | monitoring.events.CALL | monitoring.events.JUMP
    monitoring.use_tool_id(_TOOL, "steps")
    try:
        for event in (1 << number for number in range(events.bit_length()) if events >> number & 1):
            monitoring.register_callback(_TOOL, event, one)
        monitoring.set_events(_TOOL, events)
        function()
    finally:
        monitoring.set_events(_TOOL, 0)
        monitoring.free_tool_id(_TOOL)
    return count
