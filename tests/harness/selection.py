"""The marks `slow`, of tests that only ``scripts/test.sh --all`` runs, and `nightly`, of those that only ``scripts/nightly.sh`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Values of a parameter. Only those in ``fast`` are in the default run."""
    return _marked(values, fast, lambda value: (value,))


def mostly_slow_rows(rows: Iterable[tuple[Any, ...]], *fast: tuple[Any, ...]) -> list[Any]:
    """Likewise, values of several parameters at once."""
    return _marked(rows, fast, tuple)


def nightly_rows(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Values of several parameters at once: more of what others show."""
    return [pytest.param(*row, marks=pytest.mark.nightly) for row in rows]


def _marked(values: Iterable[Any], fast: tuple[Any, ...], parts: Callable[[Any], tuple[Any, ...]]) -> list[Any]:
    values = list(values)
    assert fast and all(value in values for value in fast)
    return [value if value in fast else pytest.param(*parts(value), marks=pytest.mark.slow) for value in values]
