"""The whole state of an object: all that can be reached from it, in order, so that any change shows."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any

_PLAIN = (int, float, str, bytes, bytearray, type(None), type)


def whole_state(*roots: Any) -> list[Any]:
    """What the objects of this package that are reached from ``roots`` have, by attribute and item; others by identity.

    Two calls give equal lists if nothing changed between them: no value, no order of a dictionary or queue.
    """
    found: list[Any] = []
    waiting = deque(roots)
    kept: dict[int, Any] = {}  # by id(), so that no id is used twice

    def note(value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return bytes(value) if isinstance(value, bytearray) else value
        if isinstance(value, array):
            return value.tobytes()
        if id(value) not in kept:
            kept[id(value)] = value
            waiting.append(value)
        return id(value)

    def notes(values: Iterable[Any]) -> None:
        found.extend(map(note, values))

    for root in roots:
        kept[id(root)] = root
    while waiting:
        value = waiting.popleft()
        found.append(id(value))
        if isinstance(value, dict):
            notes(part for item in value.items() for part in item)
        elif isinstance(value, list | tuple | set | frozenset | deque):
            notes(value)
        elif type(value).__module__.startswith(("megatron_hybrid_prefix.", "tests.")):
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            fields = getattr(value, "__dict__", {}) | {name: getattr(value, name, None) for name in slots}
            notes(part for field in fields.items() for part in field)
    return found
