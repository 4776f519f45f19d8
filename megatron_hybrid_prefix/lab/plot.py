"""Plots of a replay: reuse against budget, and occupancy over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_hybrid_prefix.lab.replay import Replayed


def save_plot(path: Path, runs: Sequence[Replayed], ceiling: float, title: str) -> None:
    """Left: share of prompt tokens reused at each budget, a line a policy. Right: the first policy's slots in use.

    Args:
        path: Where the PNG goes.
        runs: Of one or more policies, each at the same budgets.
        ceiling: Share that a cache without limits would reuse.
        title: Above both.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    names = list(dict.fromkeys(run.policy.name for run in runs))
    for name in names:
        own = [run for run in runs if run.policy.name == name]
        slots = [max(1, run.state_slots) for run in own]  # 0 has no place on this axis
        axes[0].plot(slots, [run.reused_token_fraction for run in own], marker="o", markersize=3, label=name)
    axes[0].axhline(ceiling, color="grey", linestyle=":", label="no limits")
    axes[0].set_xscale("log", base=2)
    axes[0].set(xlabel="state slots", ylabel="share of prompt tokens reused", ylim=(0, None))
    axes[0].legend()
    for run in runs:
        if run.policy.name == names[0] and run.state_slots:
            share = [point.state_slots_used / run.state_slots for point in run.series]
            axes[1].plot([point.requests for point in run.series], share, label=f"{run.state_slots:,} slots")
    axes[1].set(xlabel="requests", ylabel=f"share of state slots in use, {names[0]}", ylim=(0, 1.05))
    if axes[1].has_data():
        axes[1].legend()
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=80)
    pyplot.close(figure)
