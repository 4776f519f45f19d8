#!/usr/bin/env python3
"""Draw the plots of the documents from the measured figures in docs/data.

    scripts/plot_docs.py                        # draws all of them again
    scripts/plot_docs.py --take out/demo.json   # first takes over a new measurement of `scripts/demo.sh --json out/demo.json`

Each file in docs/data names the source of its figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples.demo import draw as draw_demo  # noqa: E402
from megatron_hybrid_prefix.console.plots import (  # noqa: E402
    ENGINE_STYLES,
    GRID,
    OTHER_COLOURS,
    draw_bars,
    page,
)

DOCS = ROOT / "docs"
FIRST_TOKEN = Path("data/first_token_h200.json")
DEMO = Path("data/demo_cpu.json")
POLICIES = Path("data/policy_reuse.json")
EPISODES = Path("data/long_episodes.json")  # `tail.json` of tests/gpu/long_episodes.py
STATES = Path("data/state_error.json")  # what scripts/state_error.py writes


def take(source: Path, folder: Path) -> None:
    """Write what the plot needs of the demo's JSON.

    Args:
        source: That JSON.
        folder: Of the documents.
    """
    data = json.loads(source.read_text(encoding="utf-8"))
    told = "taken by scripts/plot_docs.py from the JSON of: scripts/demo.sh"
    kept = {"source": told} | {key: data[key] for key in ("workload", "versions", "parts")}
    (folder / DEMO).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def draw(folder: Path) -> list[Path]:
    """Draw all plots.

    Args:
        folder: Of the documents.

    Returns:
        The files.
    """
    drawn = [folder / "images" / "first_token.png", folder / "policy_reuse.png", folder / "images" / "demo.png"]
    draw_first_token(drawn[0], json.loads((folder / FIRST_TOKEN).read_text(encoding="utf-8")))
    drawn.append(folder / "images" / "long_episodes.png")
    draw_episodes(drawn[-1], json.loads((folder / EPISODES).read_text(encoding="utf-8")))
    drawn.append(folder / "images" / "state_error.png")
    draw_states(drawn[-1], json.loads((folder / STATES).read_text(encoding="utf-8")))
    draw_policies(drawn[1], json.loads((folder / POLICIES).read_text(encoding="utf-8")))
    demo = json.loads((folder / DEMO).read_text(encoding="utf-8"))
    draw_demo(drawn[2], demo["parts"], demo["workload"])
    return drawn


def draw_first_token(path: Path, measured: dict[str, Any]) -> None:
    """The plot of the README: the first three requests with the same beginning."""
    draw_bars(
        path,
        ["1st prompt", "2nd prompt", "3rd prompt"],
        measured["first_token_ms"],
        title="Time to first token: shorter is better",
        subtitle=measured["workload"],
        figure_of=lambda value: f"{value:.1f} ms",
    )


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
    with page(path, title=title, subtitle=replayed["workload"], height=3.1) as axis:
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


def draw_episodes(path: Path, measured: dict[str, Any]) -> None:
    """Of each engine, the share of sampled tokens whose log-prob is off by more than 1 nat, by position."""
    form, above = measured["form"], measured["above"].index(1.0)
    told = f"{measured['model']}, {form['longest']:,} tokens in chunks of {form['chunk']:,}, blocks of {form['block']}; 8 agents share a start and branch; "
    told += "beside one plain forward"
    engines = {"off": "off", "upstream": "megatron", "ours": "ours"}
    with page(
        path,
        title="Sampled tokens whose log-prob is off by more than 1 nat",
        subtitle=told,
        height=2.1,
        engines=list(engines),
    ) as axis:
        for engine, name in engines.items():
            bins = measured["tails"][name]["position"]
            places = [(number + 0.5) * form["longest"] / len(bins) for number, one in enumerate(bins) if one["tokens"]]
            shares = [one["above"][above] / one["tokens"] for one in bins if one["tokens"]]
            width = 5 if engine == "off" else 2  # two lines lie on each other
            axis.plot(
                places, shares, color=ENGINE_STYLES[engine].colour, linewidth=width, marker="o", markersize=width + 2
            )
        axis.grid(axis="y", color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.set_ylim(bottom=-0.01)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.set_xlabel("position in the episode, tokens")


# Models of the plot of states: name, colour and marker.
STATES_DRAWN: dict[str, tuple[str, str, str]] = {
    "small, random": ("Mamba2, random weights", ENGINE_STYLES["off"].colour, "^"),
    "small, trained": ("Mamba2, trained", ENGINE_STYLES["ours"].colour, "o"),
    "small, trained, no attention": ("the same without attention", OTHER_COLOURS[0], "s"),
    "small-gdn, trained": ("Gated DeltaNet, trained", ENGINE_STYLES["upstream"].colour, "D"),
}


def draw_states(path: Path, measured: dict[str, Any]) -> None:
    """The mean error of log-probs of each scheme after 50 resumes, a marker a model, and what bfloat16 shows without any."""
    title, subtitle = (
        "Error of log-probs after 50 resumes",
        "mean of the 256 tokens after the last, by what a checkpoint keeps",
    )
    with page(path, title=title, subtitle=subtitle, height=3.4) as axis:
        for name, (label, colour, marker) in STATES_DRAWN.items():
            errors = measured[name]["errors"]
            schemes = ["bf16 model, two batches", *measured[name]["bits"]]
            means = [errors.get(f"{scheme}; 50", errors[scheme])["mean"] for scheme in schemes]
            axis.plot(means, range(len(schemes)), marker, color=colour, markersize=6, label=label)
        axis.set_yticks(range(len(schemes)), ["bf16 everywhere, two batch sizes", *schemes[1:]])
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlabel("nats")
        axis.grid(axis="x", color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.legend(frameon=False, fontsize=8.5, ncols=2, loc="lower center", bbox_to_anchor=(0.25, 1.0))


def main() -> int:
    """Draw, after taking over new figures where there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--take", type=Path, metavar="JSON", help="of `scripts/demo.sh --json`")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="FOLDER", help="default: docs")
    args = parser.parse_args()
    if args.take is not None:
        take(args.take, args.docs)
    for path in draw(args.docs):
        print(f"drew {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
