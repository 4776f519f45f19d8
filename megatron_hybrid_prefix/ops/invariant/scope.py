"""Whether the running forward computes with invariant operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ON: ContextVar[bool] = ContextVar("invariant operations", default=False)


def is_on() -> bool:
    """Whether the caller is inside of `invariant`."""
    return _ON.get()


@contextmanager
def invariant(enabled: bool = True) -> Iterator[None]:
    """The layers of `use_invariant_layers` compute with invariant operations inside, if ``enabled``."""
    token = _ON.set(enabled)
    try:
        yield
    finally:
        _ON.reset(token)
