"""Tables and plots of what `bench all` measured, made from its JSON alone. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.console.terminal import write_whole

# Metrics that one axis can hold, by how their names end: the unit. Others are in the tables only.
UNITS = {"_ms": "milliseconds", "tokens_per_second": "tokens a second", "_tokens": "tokens", "_gb_s": "GB/s"}
COLOURS = {"off": "tab:gray", "upstream": "tab:orange", "ours": "tab:blue", "cache": "tab:blue"}


def write_report(data: Mapping[str, Any], folder: Path) -> Path:
    """Writes ``report.md`` and a PNG a scenario into ``folder``, which is made if need be.

    Args:
        data: The JSON of `bench all`.
        folder: Its parent exists.

    Returns:
        Path of the tables.
    """
    folder.mkdir(exist_ok=True)
    plots = {}
    for name, found in data["scenarios"].items():
        groups = metrics_by_unit(found["result"])
        if groups:
            plots[name] = f"{name}.png"
            write_whole(folder / plots[name], partial(_plot, title=name, groups=groups))
    text = "\n".join(_lines(data, plots)) + "\n"
    path = folder / "report.md"
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
    return path


# --- Tables ----------------------------------------------------------------------------------------------------------


def _lines(data: Mapping[str, Any], plots: Mapping[str, str]) -> list[str]:
    lines = ["# Benchmarks", ""]
    if data["quick"]:
        lines += ["**Small sizes (`--quick`): this shows that the scenarios run, and measures nothing.**", ""]
    for title, key in (("Hardware", "hardware"), ("Versions", "versions")):
        facts = ", ".join(f"{name} {value}" for name, value in data.get(key, {}).items() if value is not None)
        lines.append(f"{title}: {facts or 'unknown: no scenario came to the end'}.")
    lines += ["", f"    {data['command']}", "", "Medians of the rounds; ratios are quotients of medians."]
    if "gpus" in data:
        lines.append(f"{data['gpus']} scenarios ran at a time, each on a GPU of its own.")
    lines += ["", "| scenario | |", "|---|---|"]
    for name, found in data["scenarios"].items():
        lines.append(
            f"| [{name}](#{name}) | {found['status']}{_cell(': ' + found['error']) if found['error'] else ''} |"
        )
    for name, found in data["scenarios"].items():
        lines += ["", f"## {name}", ""]
        lines += _scenario(found) if found["result"] else [f"No figures: {_cell(found['error'])}"]
        if name in plots:
            lines += ["", f"![{name}]({plots[name]})"]
    return lines


def _scenario(found: Mapping[str, Any]) -> list[str]:
    result = found["result"]
    options = result["options"]
    graphs = f"{options['cuda_graphs']} CUDA graphs" if options["cuda_graphs"] else "no CUDA graphs"
    lines = [f"{result['workload']}. {options['preset']}, {graphs}, {options['repeats']} rounds.", ""]
    lines += [f"    {result['command']}", ""]
    for report in (result["control_plane"], result["metrics"]):
        rows = {name: metric for name, metric in report.items() if _has_value(metric)}
        if rows:
            lines += [*_table(rows), ""]
    for engine, one in result["engines"].items():
        if one["status"] != "completed":
            lines += [f"Engine {engine} {one['status']}: {_cell(one['error'])}", ""]
    return lines[:-1]


def _table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    first = next(iter(rows.values()))
    engines = list(first["median"])
    pairs = list(dict.fromkeys(pair for metric in rows.values() for pair in metric["ratio"]))
    heads = ["median", *engines, *pairs, "goal"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 2)}---|"]
    for metric in rows.values():
        cells = [_cell(metric["label"])]
        cells += [_number(metric["median"][engine]) for engine in engines]
        cells += [_number(metric["ratio"].get(pair)) for pair in pairs]
        lines.append(f"| {' | '.join([*cells, _cell(metric['goal'] or '')])} |")
    return lines


def _has_value(metric: Mapping[str, Any]) -> bool:
    return any(value is not None for value in metric["median"].values())


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _number(value: float | None) -> str:
    """Whole numbers whole, others with four digits that say something."""
    if value is None:
        return ""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


# --- Plots -----------------------------------------------------------------------------------------------------------


def metrics_by_unit(result: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Metrics that are drawn, by unit."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for report in (result.get("metrics", {}), result.get("control_plane", {})):
        for name, metric in report.items():
            unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), None)
            numbered = unit is None and "_tokens_" in name  # computed_tokens_1, ...
            if _has_value(metric) and (unit is not None or numbered):
                groups.setdefault(unit or UNITS["_tokens"], []).append(metric)
    return groups


def _plot(path: Path, title: str, groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Bars of medians, a unit an axis, with the least and the largest sample as whiskers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [1.0 + 0.22 * sum(len(metric["median"]) for metric in metrics) for metrics in groups.values()]
    figure, axes = pyplot.subplots(
        len(groups), 1, figsize=(10, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for axis, (unit, metrics) in zip(axes[:, 0], groups.items(), strict=True):
        _bars(axis, metrics)
        axis.set(xlabel=unit, xlim=(0, None))
    shown = {label: bar for axis in axes[:, 0] for bar, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside right upper")
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=110)
    pyplot.close(figure)


def _bars(axis: Any, metrics: Sequence[Mapping[str, Any]]) -> None:
    engines = list(dict.fromkeys(engine for metric in metrics for engine in metric["median"]))
    width = 0.8 / len(engines)
    for number, engine in enumerate(engines):
        places, values, below, above = [], [], [], []
        for at, metric in enumerate(metrics):
            value = metric["median"].get(engine)
            samples = [sample for sample in metric["samples"].get(engine, ()) if sample is not None]
            if value is not None and samples:
                places.append(at + (number - (len(engines) - 1) / 2) * width)
                values.append(value)
                below.append(value - min(samples))
                above.append(max(samples) - value)
        if places:
            axis.barh(
                places, values, width, xerr=(below, above), label=engine, color=COLOURS[engine], error_kw={"lw": 0.8}
            )
    axis.set_yticks(range(len(metrics)), [metric["label"] for metric in metrics])
    axis.invert_yaxis()
