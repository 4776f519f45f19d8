"""The plot of a replay: what each policy reuses at each budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_hybrid_prefix.console.plots import INK, draw_lines, page, styles_of


def save_plot(
    path: Path,
    budgets: Sequence[int],
    policies: Sequence[tuple[str, Sequence[float | None]]],
    ceiling: float,
    workload: str,
) -> None:
    """Share of prompt tokens reused at each budget, a line a policy.

    Args:
        path: PNG or SVG, by its ending.
        budgets: State slots, ascending.
        policies: Name and shares at the budgets; the first is this cache's. None: not replayed at this budget.
        ceiling: Share that a cache without limits would reuse.
        workload: Which trace, and what else there is to know.
    """
    names = [name for name, _ in policies]
    styles = styles_of(names, ours=names[0])
    places = [max(1, slots) for slots in budgets]  # 0 has no place on this axis
    title = "Prompt tokens reused, by the memory for states"
    with page(path, title=title, subtitle=workload, heights=(3.1,), legend=styles, lines=True) as (axis,):
        draw_lines(axis, places, dict(policies), styles)
        axis.axhline(ceiling, color=INK, linewidth=1.0, linestyle=":")
        axis.annotate(
            f"no limits: {ceiling:.1%}", (places[0], ceiling), xytext=(0, 3), textcoords="offset points", fontsize=9
        )
        axis.set_xscale("log", base=2)
        axis.set_xticks(places, [f"{slots:,}" for slots in budgets])
        axis.minorticks_off()
        axis.set_ylim(0, 1.12 * max(ceiling, 0.01))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.set_xlabel("state slots (kept states)")
