#!/usr/bin/env python3
"""Draw the plots of the documents from the measured figures in docs/data.

    scripts/plot_docs.py                        # draws all of them again
    scripts/plot_docs.py --take out/bench.json  # first takes over a new measurement of `hybrid-prefix bench all`
    scripts/plot_docs.py --take out/demo.json   # the same of `hybrid-prefix demo --json out/demo.json`

Each file in docs/data names the source of its figures. A whole run's JSON is too large for the repository: `--take`
keeps what the plots show.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_hybrid_prefix.bench.charts import chart_of, draw_chart  # noqa: E402
from megatron_hybrid_prefix.console.demo_report import save_demo_plot  # noqa: E402
from megatron_hybrid_prefix.console.plots import (  # noqa: E402
    ENGINE_STYLES,
    GRID,
    OTHER_COLOURS,
    bar_inches,
    draw_bars,
    page,
)

DOCS = ROOT / "docs"
BENCH = Path("data/bench_h200.json")
HOST_TIER = Path("data/host_tier_h200.json")
FIRST_TOKEN = Path("data/first_token_h200.json")
DEMO = Path("data/demo_cpu.json")
POLICIES = Path("data/policy_reuse.json")
DIGITS = 5  # that are kept of a sample


def take(source: Path, folder: Path) -> None:
    """Write what the plots need of the JSON of `bench all`, or of `demo`.

    Args:
        source: That JSON.
        folder: Of the documents.
    """
    data = json.loads(source.read_text(encoding="utf-8"))
    if "parts" in data:
        told = "taken by scripts/plot_docs.py from the JSON of: hybrid-prefix demo"
        kept = {key: data[key] for key in ("workload", "versions", "platform", "parts")}
        (folder / DEMO).write_text(json.dumps({"source": told} | kept, indent=1) + "\n", encoding="utf-8")
        return
    scenarios = {name: small(name, found["result"]) for name, found in data["scenarios"].items()}
    kept = {"source": f"taken by scripts/plot_docs.py from the JSON of: {data['command']}", "scenarios": scenarios}
    write(folder / BENCH, kept)


def small(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """What the plot of a scenario needs of its result."""
    chart = chart_of(name, result)
    shown = [key for panel in chart.panels for key in panel.bars] if chart is not None else []
    return {
        "workload": result["workload"],
        "options": {key: result["options"][key] for key in ("preset", "cuda_graphs", "repeats")},
        "hardware": {"gpu": result["hardware"].get("gpu"), "processor": result["hardware"]["processor"]},
        "versions": result["versions"],
        "engines": {engine: {"status": one["status"]} for engine, one in result["engines"].items()},
        "metrics": {key: rounded(result["metrics"][key]) for key in shown},
    }


def rounded(metric: dict[str, Any]) -> dict[str, Any]:
    """A metric's label, medians and samples, with `DIGITS` digits."""
    return {
        "label": metric["label"],
        "median": {engine: digits(value) for engine, value in metric["median"].items()},
        "samples": {engine: [digits(value) for value in values] for engine, values in metric["samples"].items()},
    }


def digits(value: float | None) -> float | None:
    """``value`` with `DIGITS` digits."""
    return None if value is None else float(f"{value:.{DIGITS}g}")


def write(path: Path, data: Any) -> None:
    """Save JSON with each innermost list and object on one line."""
    path.write_text(compact(data) + "\n", encoding="utf-8")


def compact(data: Any, indent: str = "") -> str:
    """JSON text; what holds only plain values stands on one line."""
    if not isinstance(data, dict) or not any(isinstance(value, (dict, list)) for value in data.values()):
        return json.dumps(data)
    inner = indent + " "
    lines = [f"{inner}{json.dumps(key)}: {compact(value, inner)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def draw(folder: Path) -> list[Path]:
    """Draw all plots.

    Args:
        folder: Of the documents.

    Returns:
        The files.
    """
    drawn = [folder / "images" / "first_token.png", folder / "policy_reuse.png", folder / "images" / "demo.png"]
    bench = json.loads((folder / BENCH).read_text(encoding="utf-8"))["scenarios"]
    bench |= json.loads((folder / HOST_TIER).read_text(encoding="utf-8"))["scenarios"]
    draw_first_token(drawn[0], json.loads((folder / FIRST_TOKEN).read_text(encoding="utf-8")))
    draw_policies(drawn[1], json.loads((folder / POLICIES).read_text(encoding="utf-8")))
    demo = json.loads((folder / DEMO).read_text(encoding="utf-8"))
    save_demo_plot(drawn[2], demo["parts"], demo["workload"])
    for name, result in bench.items():
        chart = chart_of(name, result)
        if chart is not None:
            drawn.append(folder / "bench-h200" / f"{name}.png")
            draw_chart(drawn[-1], chart, result)
    return drawn


def draw_first_token(path: Path, measured: dict[str, Any]) -> None:
    """The plot of the README: the first three requests with the same beginning."""
    groups = ["1st prompt", "2nd prompt", "3rd prompt"]
    values = measured["first_token_ms"]
    with page(
        path,
        title="Time to first token: shorter is better",
        subtitle=measured["workload"],
        heights=[bar_inches(len(groups), len(values))],
        engines=list(values),
    ) as (axis,):
        draw_bars(axis, groups, values, figure_of=lambda value: f"{value:.1f} ms")


# Lines of the plot of policies, bottom to top: name in the data -> label; colour, dashes, marker; state slots where the label points to the line;
# its place, in points from there.
POLICIES_DRAWN: dict[str, tuple[str, str, Any, str, int, tuple[int, int]]] = {
    "no rule reuses more": ("no rule can reuse more", OTHER_COLOURS[0], (0, (5, 2)), "^", 256, (-10, 14)),
    "recompute_cost": ("this cache", ENGINE_STYLES["ours"].colour, (0, (4, 2)), "o", 128, (-34, 14)),
    "upstream 0.19": ("megatron-core's rule", ENGINE_STYLES["upstream"].colour, "-", "D", 1024, (22, -24)),
    "lru": ("LRU", OTHER_COLOURS[1], (0, (1, 1)), "v", 256, (26, -16)),
}


def draw_policies(path: Path, replayed: dict[str, Any]) -> None:
    """What each policy reuses at each number of state slots, each line with its name."""
    slots = replayed["state_slots"]
    title = "Prompt tokens reused, by the memory for states"
    with page(path, title=title, subtitle=replayed["workload"], heights=(3.1,)) as (axis,):
        for name, (label, colour, dashes, marker, at, offset) in POLICIES_DRAWN.items():
            shares = replayed["reused_share"][name]
            points = {"marker": marker, "markerfacecolor": "white", "markersize": 6}
            axis.plot(slots, shares, color=colour, linestyle=dashes, linewidth=2, **points)
            axis.annotate(
                label,
                (at, shares[slots.index(at)]),
                xytext=offset,
                textcoords="offset points",
                color=colour,
                fontweight="bold",
                arrowprops={"arrowstyle": "-", "color": colour},
            )
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.set_xscale("log", base=2)
        axis.set_xticks(slots, [f"{number:,}" for number in slots])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.set_xlabel("state slots (checkpoints that fit)")


def main() -> int:
    """Draw, after taking over new figures where there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--take", type=Path, metavar="JSON", help="of `hybrid-prefix bench all` or `demo`")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="FOLDER", help="default: docs")
    args = parser.parse_args()
    if args.take is not None:
        take(args.take, args.docs)
    for path in draw(args.docs):
        print(f"drew {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
