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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.arithmetic import ceil_div

# Endings of plots, and what each would say of the version or the date.
FORMATS = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}
WIDTH_INCHES = 6.0
DOTS_PER_INCH = 200
INK = "#222222"
FAINT = "#5c5c5c"
_LINE_INCHES = 0.165  # of a line of the subtitle
_TITLE_INCHES = 0.24
_LEGEND_INCHES = 0.12  # and of each row of the legend:
_ROW_INCHES = 0.21
_ROW_CHARACTERS = 75
_TITLE_CHARACTERS = 56
_SUBTITLE_CHARACTERS = 88


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
            found[name] = Style(
                label=name, colour=style.colour, marker=style.marker, dashes=style.dashes, width=style.width
            )
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
        titles = textwrap.wrap(title, _TITLE_CHARACTERS)
        under = textwrap.wrap(subtitle, _SUBTITLE_CHARACTERS)
        header = 0.08 + _TITLE_INCHES * len(titles) + _LINE_INCHES * len(under)
        header += _LEGEND_INCHES + _ROW_INCHES * ceil_div(len(legend), _columns(legend)) if legend else 0.08
        height = sum(heights) + header
        figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH)
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - header / height))
        axes = figure.subplots(len(heights), 1, height_ratios=list(heights), squeeze=False)[:, 0]
        top = 0.08
        for line in titles:
            figure.text(0.013, 1 - top / height, line, va="top", fontsize=11.5, fontweight="bold")
            top += _TITLE_INCHES
        for line in under:
            figure.text(0.013, 1 - top / height, line, va="top", fontsize=8.5, color=FAINT)
            top += _LINE_INCHES
        if legend:
            _draw_legend(figure, legend, lines, 1 - (top + 0.02) / height)
        yield list(axes)
        # Without a version and a date in it, the same figures give the same file.
        figure.savefig(path, metadata={FORMATS[path.suffix.lower()]: None})


def _columns(styles: Mapping[str, Style]) -> int:
    """Columns of a legend: one row where it has room."""
    characters = sum(len(style.label or name) + 6 for name, style in styles.items())
    return len(styles) if characters <= _ROW_CHARACTERS else min(3, len(styles))


def _draw_legend(figure: Any, styles: Mapping[str, Style], lines: bool, at: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for name, style in styles.items():
        label = style.label or name
        if lines:
            handles.append(Line2D([], [], label=label, **line_options(style)))
        else:
            handles.append(Patch(label=label, color=style.colour))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, at),
        ncols=_columns(styles),
        frameon=False,
        fontsize=9.5,
        columnspacing=1.4,
        handlelength=2.6 if lines else 1.2,
        handletextpad=0.5,
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
    ranges: Mapping[str, Sequence[tuple[float, float] | None]] | None = None,
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
        ranges: Engine -> least and largest sample in each group, drawn as a whisker.
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
                if span is not None and span[1] - span[0] > 0.01 * highest:
                    axis.plot(span, [place, place], color=INK, linewidth=0.9, solid_capstyle="butt")
                    end = max(end, span[1])
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


def number_text(value: float) -> str:
    """Three digits that say something, with thousands marked: 126, 12, 4.58, 17,760."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    rounded = round(value, digits)
    if abs(rounded) >= 10 or rounded == int(rounded):
        return f"{value:,.0f}"
    return f"{value:,.{digits}f}"
