"""Samples of a benchmark, their medians and ratios, as JSON and as a table. Needs no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rich.table import Table

from megatron_hybrid_prefix.console.terminal import table_of

# One repeat of one engine: metric -> value. None or missing: the engine does not have this metric.
Sample = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of the report.

    Attributes:
        name: Key in samples and JSON. Ends with the unit.
        label: Row label in the table.
        goal: Goal of this package's engine, as text.
        ratios: Whether to show ratios between engines.
    """

    name: str
    label: str
    goal: str = ""
    ratios: bool = True


def rotated[T](items: Sequence[T], shift: int) -> list[T]:
    """``items``, rotated left by ``shift``."""
    at = shift % len(items) if items else 0
    return [*items[at:], *items[:at]]


def median(values: Sequence[float | None]) -> float | None:
    """The median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least a ``share`` of ``values`` does not exceed; None if there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def ratio(value: float | None, to: float | None) -> float | None:
    """``value / to``; None if one is missing or ``to`` is 0."""
    return None if value is None or not to else value / to


def summarise(
    metrics: Sequence[Metric], samples: Mapping[str, Sequence[Sample]], crashed: Sequence[str] = ()
) -> dict[str, Any]:
    """Samples, medians and ratios of medians, by metric.

    Args:
        metrics: The metrics to report.
        samples: One sample per repeat, by engine.
        crashed: Engines that crashed. Their samples are kept, but they get no median.
    """
    report: dict[str, Any] = {}
    for metric in metrics:
        values = {engine: [sample.get(metric.name) for sample in rounds] for engine, rounds in samples.items()}
        medians = {engine: None if engine in crashed else median(row) for engine, row in values.items()}
        pairs = [(a, b) for b, a in combinations(medians, 2) if metric.ratios]
        report[metric.name] = {
            "label": metric.label,
            "goal": metric.goal or None,
            "samples": values,
            "median": medians,
            "ratio": {f"{a}/{b}": ratio(medians[a], medians[b]) for a, b in pairs},
        }
    return report


def side_by_side(title: str, report: Mapping[str, Any]) -> Table:
    """A `summarise` for the terminal: a row per metric that any engine has; columns for engines, ratios and the goal."""
    rows = [row for row in report.values() if any(value is not None for value in row["median"].values())]
    engines = list(dict.fromkeys(engine for row in rows for engine in row["median"]))
    pairs = list(dict.fromkeys(pair for row in rows for pair in row["ratio"]))
    table = table_of(title, "median", *engines, *pairs, "goal")
    for row in rows:
        medians = [number_text(row["median"].get(engine)) for engine in engines]
        ratios = [number_text(row["ratio"].get(pair)) for pair in pairs]
        table.add_row(row["label"], *medians, *ratios, row["goal"] or "")
    return table


def number_text(value: float | None, digits: int = 4) -> str:
    """Whole numbers whole, others with so many digits that say something: 17,760, 126.3, 4.578."""
    if value is None:
        return "-"
    is_whole = value == int(value) or abs(value) >= 10 ** (digits - 1)
    return f"{value:,.0f}" if is_whole else f"{value:.{digits}g}"
