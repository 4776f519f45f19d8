"""A replay at budgets in bytes: the shared memory beside fixed splits of as many bytes (``hybrid-prefix replay --cache-gb``)."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_hybrid_prefix.console.engine_options import positive_float
from megatron_hybrid_prefix.console.terminal import InputError, as_input_errors, printable
from megatron_hybrid_prefix.lab.capacity import Sizes
from megatron_hybrid_prefix.lab.memory import GIB, Memory, bytes_of
from megatron_hybrid_prefix.lab.replay import Replayed
from megatron_hybrid_prefix.lab.traces import Trace
from megatron_hybrid_prefix.pool.pages import PageLayout

MOST_SPLITS = 19  # 95 % for states


def memories(budgets_gib: str, splits: int, *, block_bytes: int, state_bytes: int) -> list[Memory]:
    """The memories of ``--cache-gb``, ascending: for each budget the shared one, then its fixed splits.

    Args:
        budgets_gib: GiB, comma-separated.
        splits: Number of fixed splits: 5 % for states, 10 %, and so on.
        block_bytes: Bytes of a KV block.
        state_bytes: Bytes of a state.

    Raises:
        InputError: A number is malformed or given twice, or a memory is too small.
    """
    if splits > MOST_SPLITS:
        raise InputError(f"--splits {splits}: at most {MOST_SPLITS}")
    with as_input_errors(argparse.ArgumentTypeError, prefix="--cache-gb: "):
        budgets = [positive_float(item) for item in budgets_gib.split(",")]
    if len(set(budgets)) < len(budgets):
        raise InputError(f"--cache-gb: {budgets_gib} has a number twice")
    found = []
    for budget in sorted(budgets):
        whole = Memory(
            cache_bytes=bytes_of(budget, GIB, "--cache-gb"), block_bytes=block_bytes, state_bytes=state_bytes
        )
        least_bytes = PageLayout.least_bytes(block_bytes=block_bytes, state_bytes=state_bytes)
        if whole.cache_bytes < least_bytes:
            least = f"{least_bytes / GIB:.4f} GiB"
            raise InputError(f"--cache-gb {budget:g}: too small: a state and a KV block take {least}")
        found.append(whole)
        found += [dataclasses.replace(whole, state_share=n / 20) for n in range(1, splits + 1)]
    return found


def best_split(runs: Sequence[Replayed]) -> Replayed:
    """The fixed split with the most reuse; of equal ones that with the fewest states."""
    return max(runs, key=lambda run: run.reused_token_fraction)


def is_split(run: Replayed) -> bool:
    """Whether the run had a fixed split."""
    return run.memory is not None and run.memory.state_share is not None


def print_memories(console: Console, trace: Trace, runs: Sequence[Replayed], ceiling: float, sizes: Sizes) -> None:
    """Prints the reuse in each memory: a row per policy, and one for its best fixed split."""
    budgets = list(dict.fromkeys(run.memory.cache_bytes for run in runs if run.memory is not None))
    layout = PageLayout.within(
        budgets[0], block_bytes=sizes.kv_block_bytes(trace.block_tokens), state_bytes=sizes.state_bytes
    )
    console.print(
        f"{len(trace.requests):,} requests ({trace.format}), {trace.prompt_tokens:,} prompt tokens; "
        f"{printable(sizes.name)}: KV blocks of {trace.block_tokens} tokens {layout.block_bytes:,} bytes, a state "
        f"{layout.state_bytes:,} bytes, in {layout.page_blocks} blocks ({layout.padding_bytes / layout.page_bytes:.1%} of "
        "them unused)",
        soft_wrap=True,
    )
    table = Table(title="share of prompt tokens reused", title_justify="left", show_footer=True)
    table.add_column("GiB for KV and states", footer="no limits", no_wrap=True)
    for number, budget in enumerate(budgets):
        table.add_column(f"{budget / GIB:g}", footer=f"{ceiling:.4f}" if number == 0 else "", justify="right")
    for policy in dict.fromkeys(run.policy.name for run in runs):
        cells: dict[int, list[Replayed]] = {}
        for run in runs:
            if run.policy.name == policy and run.memory is not None:
                cells.setdefault(run.memory.cache_bytes, []).append(run)
        table.add_row(policy, *(f"{of_one[0].reused_token_fraction:.4f}" for of_one in cells.values()))
        splits = len(next(iter(cells.values()))) - 1
        if splits:
            best = [best_split(of_one[1:]) for of_one in cells.values()]
            name = f"  best of {splits} fixed splits (states)"
            table.add_row(name, *(f"{run.reused_token_fraction:.4f} ({_state_share(run):.0%})" for run in best))
    console.print(table)
    refused = max(run.refused_requests for run in runs)
    if refused:
        console.print(f"up to {refused:,} requests did not fit: they were skipped")


def _state_share(run: Replayed) -> float:
    assert run.memory is not None and run.memory.state_share is not None
    return run.memory.state_share
