"""Tables and plots of what `bench all` measured, made from its JSON alone. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.bench.charts import chart_of, draw_chart
from megatron_hybrid_prefix.bench.stats import cells
from megatron_hybrid_prefix.console.terminal import write_whole


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
        chart = chart_of(name, found["result"])
        if chart is not None:
            plots[name] = f"{name}.png"
            write_whole(folder / plots[name], partial(draw_chart, chart=chart, result=found["result"]))
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
        heads, *rows = cells(report)
        if rows:
            lines += [_row(heads), f"|---|{'---:|' * (len(heads) - 2)}---|", *map(_row, rows), ""]
    for engine, one in result["engines"].items():
        if one["status"] != "completed":
            lines += [f"Engine {engine} {one['status']}: {_cell(one['error'])}", ""]
    return lines[:-1]


def _row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, texts))} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
