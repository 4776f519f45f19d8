"""The one palette of all plots, and what they share: a page with a title, bars with figures on them, lines.

Caching off is grey, megatron-core's cache orange, this cache blue. The three differ in lightness too, so that a reader
who is colour-blind and a grey print keep them apart. Each engine also has a marker, a dash pattern and a width: where
two lines coincide, the narrow dashed one shows on top of the wide one.

A page is 6 inches wide at 200 dots per inch, with text of 8.5 points or more: readable at 600 pixels. Nothing here
imports matplotlib before a plot is drawn.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Endings of plots, and what each would say of the version or the date.
FORMATS = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}
WIDTH_INCHES = 6.0
DOTS_PER_INCH = 200
INK = "#222222"
FAINT = "#5c5c5c"
_HEADER_INCHES = 1.0  # about what title, legend and subtitle take
_TITLE_CHARACTERS = 56
_SUBTITLE_CHARACTERS = 88
_LEGEND_CHARACTERS = 75  # of one row


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How an engine, or a policy that is compared with it, is drawn.

    Attributes:
        label: What a legend calls it.
        colour: Of bars and lines.
        marker: Of the points of a line.
        dashes: Of a line.
        width: Of a line, in points; the line drawn on top is narrower.
    """

    label: str
    colour: str
    marker: str = "o"
    dashes: str | tuple[int, tuple[int, ...]] = "-"
    width: float = 2.0


# By the engines' names; colours of Okabe and Ito's palette, which was made for colour-blind readers.
ENGINE_STYLES = {
    "off": Style(label="caching off", colour="#8C8C8C", marker="s", width=5.0),
    "upstream": Style(label="megatron-core's cache", colour="#E69F00", marker="D", width=3.4),
    "ours": Style(label="this cache", colour="#0072B2", marker="o", dashes=(0, (4, 2)), width=1.9),
}
# For what is none of the three: policies and baselines.
OTHER_STYLES = (
    Style(label="", colour="#CC79A7", marker="^", dashes=(0, (5, 2)), width=1.6),
    Style(label="", colour="#009E73", marker="v", dashes=(0, (1, 1)), width=2.2),
    Style(label="", colour="#56B4E9", marker="P", dashes=(0, (7, 2, 1, 2)), width=1.2),
    Style(label="", colour="#000000", marker="x", dashes=(0, (1, 3)), width=1.2),
)
# Other names of the three.
_SAME_AS = {"cache": "ours", "upstream 0.19": "upstream"}


def styles_of(names: Sequence[str], *, ours: str | None = None) -> dict[str, Style]:
    """A style for each name: the engines' own, and `OTHER_STYLES` in turn for the rest.

    Args:
        names: Of engines or policies.
        ours: The name that stands for this cache, where it is none of the engines' names.
    """
    found: dict[str, Style] = {}
    others = 0
    for name in names:
        key = "ours" if name == ours else _SAME_AS.get(name, name)
        if key in ENGINE_STYLES:
            found[name] = ENGINE_STYLES[key]
        else:
            style = OTHER_STYLES[others % len(OTHER_STYLES)]
            found[name] = replace(style, label=name)
            others += 1
    return found


@contextmanager
def page(
    path: Path,
    *,
    title: str,
    subtitle: str,
    heights: Sequence[float],
    legend: Mapping[str, Style] | None = None,
    lines: bool = False,
) -> Iterator[list[Any]]:
    """Open a figure with one axis per height, and save it at the end.

    Args:
        path: A file with an ending of `FORMATS`.
        title: What the plot says, in a few words.
        subtitle: Model, machine and workload.
        heights: Of each axis, in inches.
        legend: Styles to explain above the axes; the name of a style without a label is its label.
        lines: Whether the legend shows lines, not bars.

    Yields:
        The axes, top to bottom.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rc: Any = {"font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}
    rc |= {"axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "svg.hashsalt": "plots"}
    with matplotlib.rc_context(rc):
        figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + _HEADER_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
        axes = figure.subplots(len(heights), 1, height_ratios=list(heights), squeeze=False)[:, 0]
        under = textwrap.fill(subtitle, _SUBTITLE_CHARACTERS)
        figure.supxlabel(under, x=0.013, ha="left", fontsize=8.5, color=FAINT)
        _draw_legend(figure, textwrap.fill(title, _TITLE_CHARACTERS), legend or {}, lines)
        yield list(axes)
        # Without a version and a date in it, the same figures give the same file.
        figure.savefig(path, metadata={FORMATS[path.suffix.lower()]: None})


def _draw_legend(figure: Any, title: str, styles: Mapping[str, Style], lines: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    named = {style.label or name: style for name, style in styles.items()}
    handles = [
        Line2D([], [], label=label, **line_options(style)) if lines else Patch(label=label, color=style.colour)
        for label, style in named.items()
    ]
    in_a_row = sum(len(label) + 6 for label in named) <= _LEGEND_CHARACTERS
    figure.legend(
        handles=handles,
        title=title,
        title_fontproperties={"size": 11.5, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        ncols=max(1, len(named) if in_a_row else min(3, len(named))),
        frameon=False,
        columnspacing=1.4,
        handlelength=2.6 if lines else 1.2,
    )


def line_options(style: Style) -> dict[str, Any]:
    """Arguments of matplotlib for a line: its markers are hollow, so that the one under them shows."""
    return {
        "color": style.colour,
        "linestyle": style.dashes,
        "linewidth": style.width,
        "marker": style.marker,
        "markersize": 4.0 + style.width,
        "markerfacecolor": "white",
        "markeredgewidth": 1.4,
    }


def draw_lines(
    axis: Any, places: Sequence[float], values: Mapping[str, Sequence[float | None]], styles: Mapping[str, Style]
) -> None:
    """A line a name from 0 up, the widest first; a value that is None is a gap.

    Args:
        axis: Of `page`.
        places: Of the points on the horizontal axis.
        values: Name -> a value a point.
        styles: Of each name.
    """
    for name in sorted(values, key=lambda name: -styles[name].width):
        points = [math.nan if value is None else value for value in values[name]]
        options = line_options(styles[name])
        if len(points) > 40:  # markers would hide the line
            options |= {"marker": "", "linewidth": max(1.0, options["linewidth"] / 2)}
        axis.plot(places, points, **options)
    known = [value for row in values.values() for value in row if value is not None]
    axis.set_ylim(0, 1.12 * max(known, default=0.0) or 1.0)
    axis.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)


def bar_inches(groups: int, bars: int) -> float:
    """Height of an axis with so many groups of so many bars each."""
    return 0.12 + groups * (0.14 + 0.185 * bars)


def draw_bars(
    axis: Any,
    groups: Sequence[str],
    values: Mapping[str, Sequence[float | None]],
    *,
    figure_of: Callable[[float], str],
    ranges: Mapping[str, Sequence[Sequence[float] | None]] | None = None,
    notes: Mapping[tuple[str, int], str] | None = None,
    heading: str = "",
    label_characters: int = 26,
) -> None:
    """Horizontal bars in groups, each bar with its figure at its end.

    Args:
        axis: Of `page`.
        groups: What each group of bars is about; an empty text where the titles say it.
        values: Engine -> its value in each group; None: no bar, its note only.
        figure_of: A value as it is written on its bar.
        ranges: Engine -> the samples of each group; a whisker is drawn from the least to the largest.
        notes: (engine, number of the group) -> text after the figure, or in place of it.
        heading: Above the axis.
        label_characters: Width of a group's label before it is wrapped.
    """
    styles = styles_of(list(values))
    height = 0.8 / max(1, len(values))
    known = [value for row in values.values() for value in row if value is not None]
    highest = max(known, default=0.0) or 1.0
    for number, (engine, row) in enumerate(values.items()):
        for group, value in enumerate(row):
            place = group + (number - (len(values) - 1) / 2) * height
            note = (notes or {}).get((engine, group), "")
            end = value or 0.0
            if value is not None:
                axis.barh(place, value, height * 0.9, color=styles[engine].colour)
                span = ranges[engine][group] if ranges else None
                if span and max(span) - min(span) > 0.01 * highest:
                    most = min(max(span), 1.1 * highest)  # one that is far off would leave no room for the bars
                    axis.plot((min(span), most), [place, place], color=INK, linewidth=0.9, solid_capstyle="butt")
                    end = max(end, most)
            text = "  ".join(part for part in ("" if value is None else figure_of(value), note) if part)
            if text:
                axis.annotate(
                    text,
                    (end, place),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center_baseline",
                    fontsize=9,
                    fontweight="bold" if note else "normal",
                )
    labels = [textwrap.fill(group, label_characters) for group in groups]
    axis.set_yticks([number for number, label in enumerate(labels) if label], [label for label in labels if label])
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(groups) - 0.5, -0.5)
    axis.set_xlim(0, highest * (1.42 if notes else 1.16))
    axis.set_xticks([])
    axis.spines["bottom"].set_visible(False)
    if heading:
        axis.set_title(heading, loc="left", fontsize=9.5, fontweight="bold")
