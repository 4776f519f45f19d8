"""A replay at budgets in bytes (``hybrid-prefix replay --cache-gb``)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_hybrid_prefix.console.engine_options import check_cap, positive_float
from megatron_hybrid_prefix.console.terminal import InputError, as_input_errors, printable
from megatron_hybrid_prefix.lab.capacity import Sizes
from megatron_hybrid_prefix.lab.memory import GIB, Memory, bytes_of
from megatron_hybrid_prefix.lab.plan_report import page_words
from megatron_hybrid_prefix.lab.replay import Replayed
from megatron_hybrid_prefix.lab.traces import Trace
from megatron_hybrid_prefix.pool.pages import PageLayout


def memories(budgets_gib: str, mamba_gb: float | None, *, block_bytes: int, state_bytes: int) -> list[Memory]:
    """The memories of ``--cache-gb``, ascending.

    Args:
        budgets_gib: GiB, comma-separated.
        mamba_gb: Most GiB of cached states; None: no limit.
        block_bytes: Bytes of a KV block.
        state_bytes: Bytes of a state.

    Raises:
        InputError: A number is malformed or given twice, or a memory is too small.
    """
    with as_input_errors(argparse.ArgumentTypeError, prefix="--cache-gb: "):
        budgets = [positive_float(item) for item in budgets_gib.split(",")]
    if len(set(budgets)) < len(budgets):
        raise InputError(f"--cache-gb: {budgets_gib} has a number twice")
    least_bytes = PageLayout.of(block_bytes=block_bytes, state_bytes=state_bytes).least_bytes
    found = []
    for budget in sorted(budgets):
        check_cap(mamba_gb, budget)
        memory = Memory(
            cache_bytes=bytes_of(budget, GIB, "--cache-gb"),
            block_bytes=block_bytes,
            state_bytes=state_bytes,
            mamba_bytes=None if mamba_gb is None else int(mamba_gb * GIB),
        )
        if memory.cache_bytes < least_bytes:
            least = f"{least_bytes / GIB:.4f} GiB"
            raise InputError(f"--cache-gb {budget:g}: too small: a state and a KV block take {least}")
        found.append(memory)
    return found


def print_memories(console: Console, trace: Trace, runs: Sequence[Replayed], ceiling: float, sizes: Sizes) -> None:
    """Prints the reuse in each memory, a row per policy."""
    memories = list(dict.fromkeys(run.memory for run in runs if run.memory is not None))
    layout = memories[0].layout
    console.print(
        f"{len(trace.requests):,} requests ({trace.format}), {trace.prompt_tokens:,} prompt tokens; "
        f"{printable(sizes.name)}: KV blocks of {trace.block_tokens} tokens {layout.block_bytes:,} bytes, a state "
        f"{layout.state_bytes:,} bytes; {page_words(layout)} ({layout.padding_bytes / layout.page_bytes:.1%} unused)",
        soft_wrap=True,
    )
    table = Table(title="share of prompt tokens reused", title_justify="left", show_footer=True)
    table.add_column("GiB for KV and states", footer="no limits", no_wrap=True)
    for number, memory in enumerate(memories):
        footer = f"{ceiling:.4f}" if number == 0 else ""
        table.add_column(f"{memory.cache_bytes / GIB:g}", footer=footer, justify="right")
    for policy in dict.fromkeys(run.policy.name for run in runs):
        table.add_row(policy, *(f"{run.reused_token_fraction:.4f}" for run in runs if run.policy.name == policy))
    console.print(table)
    refused = max(run.refused_requests for run in runs)
    if refused:
        console.print(f"up to {refused:,} requests did not fit: they were skipped")
