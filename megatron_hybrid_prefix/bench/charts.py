"""The plot of each scenario: the few figures that make its point, from the JSON of `bench all` alone. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_hybrid_prefix.bench.stats import number_text
from megatron_hybrid_prefix.console.plots import bar_inches, draw_bars, page, style_of

_TITLE_INCHES = 0.22  # of a panel's heading


class Panel(NamedTuple):
    """One axis of bars.

    Attributes:
        bars: Metric -> what its group of bars is called; nothing where the titles say it.
        unit: Written after each figure.
        heading: Above the axis, where a chart has more than one.
    """

    bars: Mapping[str, str]
    unit: str
    heading: str = ""


class Chart(NamedTuple):
    """The plot of a scenario.

    Attributes:
        title: Its point, in a few words.
        panels: Its axes, top to bottom.
    """

    title: str
    panels: Sequence[Panel]


_FIRST = "Time to first token"
_SECOND = {
    "first_token_2_plain_ms": "no hint",
    "first_token_2_named_ms": "request 1 says where the shared part ends",
}
_TURNS = {"first_token_median_ms": "median", "first_token_p99_ms": "p99"}
_COMPUTED = {"mean_turn_computed_tokens": "mean", "max_turn_computed_tokens": "most"}
_RETURNS = {"cold_ms": "first time", "back_ms": "back from the host", "again_ms": "again, on the device"}
_RATE = [Panel({"tokens_per_second": ""}, "tokens/s")]
_LATEST = {"latest_first_token_ms": ""}
CHARTS: dict[str, Chart] = {
    "shared_prefix": Chart(
        f"{_FIRST} of requests with the same beginning",
        [Panel({f"first_token_{n}_ms": f"request {n}" for n in (1, 2, 3)}, "ms")],
    ),
    "first_sighting": Chart(f"{_FIRST} of the second request with the same beginning", [Panel(_SECOND, "ms")]),
    "multi_turn": Chart(
        "A later turn of a conversation whose answers are longer than a block",
        [Panel(_TURNS, "ms", _FIRST), Panel(_COMPUTED, "tokens", "Prompt tokens computed")],
    ),
    "herd": Chart(
        "A herd: cold requests with one prefix, at once",
        [
            Panel(_LATEST, "ms", f"{_FIRST} of the last request"),
            Panel({"prefix_computed_times": ""}, "", "Times that the prefix was computed"),
        ],
    ),
    "samples": Chart(
        "Several answers to one prompt, at once",
        [
            Panel(_LATEST, "ms", f"{_FIRST} of the last answer"),
            Panel({"computed_tokens": ""}, "tokens", "Prompt tokens computed"),
        ],
    ),
    "no_reuse": Chart("Throughput where nothing can be reused", _RATE),
    "decode": Chart("Steps in which all rows decode", _RATE),
    "pressure": Chart("Throughput with memory for half of the prefixes", _RATE),
    "host_tier": Chart(f"{_FIRST} of a prompt that comes back from host memory", [Panel(_RETURNS, "ms")]),
    "index": Chart("CPU time of a decode step, nothing to admit", [Panel({"decode_cpu_ms": ""}, "ms")]),
}


def chart_of(name: str, result: Mapping[str, Any]) -> Chart | None:
    """What to draw of a scenario's result; None: it has no figure to draw.

    Args:
        name: Of the scenario.
        result: Its JSON.
    """
    metrics = result.get("metrics", {})
    chart = CHARTS[name]
    panels = []
    for panel in chart.panels:
        bars = {key: label for key, label in panel.bars.items() if key in metrics and has_value(metrics[key])}
        if bars:
            panels.append(panel._replace(bars=bars))
    return Chart(chart.title, panels) if panels else None


def has_value(metric: Mapping[str, Any]) -> bool:
    """Whether any engine has this figure."""
    return any(value is not None for value in metric["median"].values())


def draw_chart(path: Path, chart: Chart, result: Mapping[str, Any]) -> None:
    """Bars of the medians with the figure on each; a whisker is the least and the largest sample.

    Args:
        path: PNG or SVG, by its ending.
        chart: Of `chart_of`.
        result: The scenario's JSON.
    """
    engines = list(result["engines"])
    heights = [
        bar_inches(len(panel.bars), len(engines)) + (_TITLE_INCHES if panel.heading else 0) for panel in chart.panels
    ]
    with page(path, title=chart.title, subtitle=_subtitle(result), heights=heights, engines=engines) as axes:
        for axis, panel in zip(axes, chart.panels, strict=True):
            _draw_panel(axis, panel, result, engines)


def _draw_panel(axis: Any, panel: Panel, result: Mapping[str, Any], engines: Sequence[str]) -> None:
    metrics = [result["metrics"][key] for key in panel.bars]
    notes = {
        (engine, number): f"{style_of(engine).label} {result['engines'][engine]['status']}"
        for engine in engines
        for number, metric in enumerate(metrics)
        if metric["median"].get(engine) is None and result["engines"][engine]["status"] != "completed"
    }
    draw_bars(
        axis,
        list(panel.bars.values()),
        {engine: [metric["median"].get(engine) for metric in metrics] for engine in engines},
        figure_of=lambda value: f"{number_text(value, 3)} {panel.unit}".rstrip(),
        ranges={engine: [_samples(metric, engine) for metric in metrics] for engine in engines},
        notes=notes,
        heading=panel.heading,
    )


def _samples(metric: Mapping[str, Any], engine: str) -> list[float]:
    return [sample for sample in metric["samples"].get(engine, ()) if sample is not None]


def _subtitle(result: Mapping[str, Any]) -> str:
    options, hardware = result["options"], result.get("hardware", {})
    machine = hardware.get("gpu") or hardware.get("processor") or "unknown machine"
    graphs = f"{options['cuda_graphs']} CUDA graphs" if options.get("cuda_graphs") else "no CUDA graphs"
    workload = result["workload"].rstrip(".")
    return f"{options['preset']} on {machine}, {graphs}. {workload[0].upper()}{workload[1:]}. Medians of {options['repeats']}."
