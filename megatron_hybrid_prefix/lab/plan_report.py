"""Tables of ``hybrid-prefix plan``: what one budget or a fixed split holds, and what fits a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_hybrid_prefix.console.terminal import printable
from megatron_hybrid_prefix.lab.capacity import Sizes
from megatron_hybrid_prefix.lab.fit import Fit
from megatron_hybrid_prefix.lab.fixed_split import Budget, Plan
from megatron_hybrid_prefix.lab.memory import GIB, floor_gib
from megatron_hybrid_prefix.lab.one_budget import ADVISED_STATE_SHARE, OneBudget, split_options

SCORE_BYTES = 12  # of a prompt's token: float32 log-probs of it and of one likeliest token, and the id of that


def two_columns(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("how much", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_one_budget(
    console: Console,
    sizes: Sizes,
    plan: OneBudget,
    *,
    host_bytes: int,
    block_tokens: int,
    conversation_tokens: int,
    max_requests: int,
    drafts: int,
    more_rows: Sequence[tuple[str, str]],
    reuse: dict[str, Any] | None,
    ceiling: float | None,
) -> None:
    """Prints what one budget holds, the advised fixed split, ``more_rows``, and with ``reuse`` what both reuse."""
    layout, padding, share = plan.layout, plan.block_padding_bytes, f"{ADVISED_STATE_SHARE:.0%}"
    kept = f"conversations of {conversation_tokens:,} tokens with a checkpoint each"
    rows = [
        ("one state", f"{layout.state_bytes:,} bytes"),
        (
            f"one KV block of {block_tokens} tokens",
            f"{layout.block_bytes:,} bytes" + (f", {padding:,} of them padding" if padding else ""),
        ),
        ("a state takes", f"{layout.page_blocks} KV blocks, {layout.padding_bytes / layout.page_bytes:.1%} unused"),
        ("KV blocks, if there were no states", f"{layout.total_blocks:,}"),
        ("states, if there were no KV", f"{layout.pages:,}"),
        (kept, f"{plan.conversations:,}"),
    ]
    if host_bytes:
        rows += [
            ("... on the host, beside them", f"{plan.host_conversations:,}"),
            ("states on the host, if it holds no KV", f"{plan.host_states:,}"),
        ]
    if drafts:
        rows.append((f"set aside for {max_requests} requests with {drafts} drafts", f"{plan.own_bytes / GIB:.2f} GiB"))
    rows += [
        (f"with {share} for states, fixed: checkpoints", f"{plan.split_states:,}"),
        (f"... KV blocks beside {max_requests} running requests", f"{plan.split_blocks:,}"),
        ("... conversations", f"{plan.split_conversations:,}"),
        *more_rows,
    ]
    if reuse is not None:
        more = f"{reuse['raised_by_bytes'] / GIB:.1f} GiB more for"
        rows += [
            ("expected reuse of prompt tokens, shared", f"{reuse['shared']:.4f}"),
            (f"... {more} --cache-gb", f"{reuse['shared_raised'] - reuse['shared']:+.4f}"),
            (f"... {more} --host-gb", f"{reuse['host_raised'] - reuse['shared']:+.4f}"),
            ("reuse with unlimited memory", f"{ceiling:.4f}"),
        ]
        rows += [(f"fixed, {share:.0%} for states", f"{found:.4f}") for share, found in reuse["splits"].items()]
    console.print(two_columns(f"{printable(sizes.name)}, tp={sizes.tp}", rows))


def print_fixed_split(
    console: Console,
    sizes: Sizes,
    budget: Budget,
    plan: Plan,
    *,
    block_tokens: int,
    max_requests: int,
    drafts: int,
    more_rows: Sequence[tuple[str, str]],
    reuse: dict[str, Any] | None,
) -> None:
    """Prints sizes, what a fixed split holds, ``more_rows``, and with ``reuse`` what it reuses."""
    block_bytes = sizes.kv_block_bytes(block_tokens)
    of_drafts = f" and {drafts} drafts" if drafts else ""
    rows: list[tuple[str, str]] = [
        ("one checkpoint", f"{sizes.state_bytes:,} bytes"),
        (f"one KV block of {block_tokens} tokens", f"{block_bytes:,} bytes"),
        (f"states of one running request{of_drafts}", f"{sizes.live_bytes(drafts):,} bytes"),
        ("one checkpoint takes as much memory as the KV of", f"{sizes.state_bytes / sizes.kv_token_bytes:,.0f} tokens"),
        ("checkpoints on the device", f"{plan.device_states:,}"),
        ("checkpoints on the host, if it holds no KV", f"{plan.host_states:,}"),
        (f"states of {max_requests} running requests", f"{plan.live_bytes / GIB:.2f} GiB"),
        ("KV blocks", f"{plan.kv_blocks:,}"),
        ("tokens in the KV blocks", f"{plan.history_tokens:,}"),
    ]
    if sizes.next_logits_bytes is not None:
        rows.append(("log-probs of prompts (host), per checkpoint", f"{sizes.next_logits_bytes:,} bytes"))
        rows.append(("... per token, with one likeliest token", f"{SCORE_BYTES} bytes"))
    rows += more_rows
    if reuse is not None:
        rows.append(("expected reuse of prompt tokens", f"{reuse['reused_token_fraction']:.4f}"))
        one = f"... as one budget: --cache-gb {floor_gib(budget.device_bytes)}"
        rows.append((one, f"{reuse['one_budget_fraction']:.4f}"))
        rows.append(("reuse with unlimited memory", f"{reuse['ceiling_fraction']:.4f}"))
        step_gib = reuse["raised_by_bytes"] / GIB
        rows += [(f"{step_gib:.1f} GiB more for {knob}", f"{gain:+.4f}") for knob, gain in reuse["gains"].items()]
    console.print(two_columns(f"{printable(sizes.name)}, tp={sizes.tp}", rows))


def print_fits(console: Console, found: Sequence[Fit], title: str, conversation_tokens: int) -> None:
    """Prints what GPUs hold at each tensor-parallel size: one budget, and the advised fixed split."""
    table = Table(title=title, title_justify="left")
    table.add_column("--tp", justify="right")
    table.add_column("weights", justify="right")
    table.add_column("left", justify="right")
    table.add_column("one budget", no_wrap=True)
    table.add_column("keeps", justify="right")
    table.add_column(f"or {ADVISED_STATE_SHARE:.0%} for states, fixed")
    table.add_column("keeps", justify="right")
    for fit in found:
        cells = [str(fit.tp), f"{fit.weight_bytes / GIB:.1f} GiB", f"{max(0, fit.left_bytes) / GIB:.1f} GiB"]
        if fit.plan is None:
            cells.append("does not fit")
        else:
            cells += [f"--cache-gb {floor_gib(fit.cache_bytes)}", f"{fit.plan.conversations:,}"]
            cells += [split_options(fit.cache_bytes), f"{fit.plan.split_conversations:,}"]
        table.add_row(*cells)
    console.print(table)
    console.print(
        f"of each GPU; keeps: conversations of {conversation_tokens:,} tokens, with a checkpoint each", soft_wrap=True
    )
