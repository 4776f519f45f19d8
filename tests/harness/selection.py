"""The mark `slow`: tests that only ``scripts/test.sh --all`` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Values of a parameter. Only those in ``fast`` are in the default run."""
    values = list(values)
    assert fast and all(value in values for value in fast)
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
