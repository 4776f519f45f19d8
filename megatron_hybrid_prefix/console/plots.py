"""The one palette of all plots, and what they share: a page with a title, and bars with figures on them.

Caching off is grey, megatron-core's cache orange, this cache blue. The three differ in lightness too, so that a reader
who is colour-blind and a grey print keep them apart.

A page is 6 inches wide at 200 dots per inch, with text of 8.5 points or more: readable at 600 pixels. Nothing here
imports matplotlib before a plot is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

WIDTH_INCHES = 6.0
DOTS_PER_INCH = 200
INK = "#222222"
FAINT = "#5c5c5c"
GRID = "#e4e4e4"
_HEADER_INCHES = 1.0  # about what title, legend and subtitle take
_TITLE_CHARACTERS = 56
_SUBTITLE_CHARACTERS = 88
_LABEL_CHARACTERS = 26
_METADATA = {".png": "Software", ".svg": "Date"}  # what a file would say of the version or the date, by its ending


class Style(NamedTuple):
    """How an engine is drawn: what a legend calls it, and the colour of its bars and lines."""

    label: str
    colour: str


# By the engines' names; colours of Okabe and Ito's palette, which was made for colour-blind readers.
ENGINE_STYLES = {
    "off": Style("caching off", "#8C8C8C"),
    "upstream": Style("megatron-core's cache", "#E69F00"),
    "ours": Style("this cache", "#0072B2"),
}
OTHER_COLOURS = ("#CC79A7", "#009E73")  # of the same palette, for what is none of the three


def style_of(engine: str) -> Style:
    """How an engine is drawn. One that is none of the three keeps its name, in the last colour."""
    return ENGINE_STYLES.get(engine, Style(engine, OTHER_COLOURS[-1]))


@contextmanager
def page(path: Path, *, title: str, subtitle: str, height: float, engines: Sequence[str] = ()) -> Iterator[Any]:
    """Open a figure with one axis, and save it at the end.

    Args:
        path: PNG or SVG, by its ending.
        title: What the plot says, in a few words.
        subtitle: Model, machine and workload.
        height: Of the axis, in inches.
        engines: That a legend above the axis explains.

    Yields:
        The axis.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rc: Any = {"font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}
    rc |= {"axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "svg.hashsalt": "plots"}
    with matplotlib.rc_context(rc):
        figure = Figure(figsize=(WIDTH_INCHES, height + _HEADER_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
        axis = figure.subplots()
        under = textwrap.fill(subtitle, _SUBTITLE_CHARACTERS)
        figure.supxlabel(under, x=0.013, ha="left", fontsize=8.5, color=FAINT)
        figure.legend(
            handles=[Patch(label=label, color=colour) for label, colour in map(style_of, engines)],
            title=textwrap.fill(title, _TITLE_CHARACTERS),
            title_fontproperties={"size": 11.5, "weight": "bold"},
            alignment="left",
            loc="outside upper left",
            ncols=max(1, len(engines)),
            frameon=False,
            columnspacing=1.4,
            handlelength=1.2,
        )
        yield axis
        # Without a version and a date in it, the same figures give the same file.
        figure.savefig(path, metadata={_METADATA[path.suffix]: None})


def draw_bars(
    path: Path,
    groups: Sequence[str],
    values: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    subtitle: str,
    figure_of: Callable[[float], str],
    ranges: Mapping[str, Sequence[Sequence[float | None]]] | None = None,
    notes: Mapping[tuple[str, int], str] | None = None,
) -> None:
    """Save a plot of horizontal bars in groups, each bar with its figure at its end.

    Args:
        path: PNG or SVG, by its ending.
        groups: What each group of bars is about.
        values: Engine -> its value in each group; None: no bar, its note only.
        title: What the plot says, in a few words.
        subtitle: Model, machine and workload.
        figure_of: A value as it is written on its bar.
        ranges: Engine -> the samples of each group; a whisker is drawn from the least to the largest.
        notes: (engine, number of the group) -> text after the figure, or in place of it.
    """
    thickness, inches = 0.8 / max(1, len(values)), 0.12 + len(groups) * (0.14 + 0.185 * len(values))
    highest = max((value for row in values.values() for value in row if value is not None), default=0.0) or 1.0
    with page(path, title=title, subtitle=subtitle, height=inches, engines=list(values)) as axis:
        for number, (engine, row) in enumerate(values.items()):
            for group, value in enumerate(row):
                place = group + (number - (len(values) - 1) / 2) * thickness
                note, end = (notes or {}).get((engine, group), ""), value or 0.0
                if value is not None:
                    axis.barh(place, value, thickness * 0.9, color=style_of(engine).colour)
                    span = [sample for sample in (ranges[engine][group] if ranges else ()) if sample is not None]
                    if span and max(span) - min(span) > 0.01 * highest:
                        most = min(max(span), 1.1 * highest)  # one that is far off would leave no room for the bars
                        axis.plot((min(span), most), [place, place], color=INK, linewidth=0.9, solid_capstyle="butt")
                        end = max(end, most)
                axis.annotate(
                    "  ".join(part for part in ("" if value is None else figure_of(value), note) if part),
                    (end, place),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center_baseline",
                    fontsize=9,
                    fontweight="bold" if note else "normal",
                )
        axis.set_yticks(range(len(groups)), [textwrap.fill(group, _LABEL_CHARACTERS) for group in groups])
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(len(groups) - 0.5, -0.5)
        axis.set_xlim(0, highest * (1.42 if notes else 1.16))
        axis.set_xticks([])
        axis.spines["bottom"].set_visible(False)
