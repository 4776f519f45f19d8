"""Samples of a benchmark, their medians and ratios, as JSON and as a table. Needs no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

# One repeat of one engine: metric -> value. None or missing: the engine does not have this metric.
Sample = dict[str, float | None]
# Pairs of engines whose ratio is shown.
RATIO_PAIRS = (("upstream", "off"), ("ours", "off"), ("ours", "upstream"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A figure of the report.

    Attributes:
        name: Key in samples and JSON. Ends with the unit.
        label: Row label in the table.
        digits: Digits after the decimal point in the table.
        goal: Goal of this package's engine, as text.
        ratios: Whether to show ratios between engines.
    """

    name: str
    label: str
    digits: int = 1
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
        pairs = [(a, b) for a, b in RATIO_PAIRS if metric.ratios and a in medians and b in medians]
        report[metric.name] = {
            "label": metric.label,
            "goal": metric.goal or None,
            "samples": values,
            "median": medians,
            "ratio": {f"{a}/{b}": ratio(medians[a], medians[b]) for a, b in pairs},
        }
    return report


def engine_table(title: str, metrics: Sequence[Metric], report: Mapping[str, Any], engines: Sequence[str]) -> Table:
    """A row per metric, a column per engine and per ratio. Metrics that no engine has are left out."""
    pairs = [f"{a}/{b}" for a, b in RATIO_PAIRS if a in engines and b in engines]
    table = Table(title=title, title_justify="left")
    table.add_column("median of repeats", no_wrap=True)
    for head in (*engines, *pairs):
        table.add_column(head, justify="right", no_wrap=True)
    with_goal = any(metric.goal for metric in metrics)
    if with_goal:
        table.add_column("goal (ours)", no_wrap=True)
    for metric in metrics:
        row = report[metric.name]
        if all(value is None for value in row["median"].values()):
            continue
        cells = [_number(row["median"][engine], metric.digits) for engine in engines]
        cells += [_number(row["ratio"].get(pair), 3) for pair in pairs]
        table.add_row(metric.label, *cells, *([metric.goal] if with_goal else []))
    return table


def plain_table(title: str, metrics: Sequence[Metric], report: Mapping[str, Any], column: str) -> Table:
    """A table of the figures that need no engine."""
    table = Table(title=title, title_justify="left")
    for head in ("median of repeats", "value", "goal"):
        table.add_column(head, justify="right" if head == "value" else "left", no_wrap=True)
    for metric in metrics:
        table.add_row(metric.label, _number(report[metric.name]["median"][column], metric.digits), metric.goal)
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
