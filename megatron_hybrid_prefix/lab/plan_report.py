"""Tables of ``hybrid-prefix plan``: what a budget holds, and what fits a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_hybrid_prefix.console.terminal import printable, table_of
from megatron_hybrid_prefix.lab.budget import Plan, Usage
from megatron_hybrid_prefix.lab.capacity import Sizes
from megatron_hybrid_prefix.lab.fit import Fit
from megatron_hybrid_prefix.lab.memory import GIB, floor_gib, page_words

SCORE_BYTES = 12  # of a prompt's token: float32 log-probs of it and of the most probable token, and the id of that


def print_plan(
    console: Console,
    sizes: Sizes,
    plan: Plan,
    usage: Usage,
    *,
    more_rows: Sequence[tuple[str, str]],
    reuse: dict[str, Any] | None,
) -> None:
    """Prints what a budget holds, ``more_rows``, and with ``reuse`` what it reuses (`expected_reuse`)."""
    layout, padding = plan.layout, plan.block_padding_bytes
    rows = [
        ("one state", f"{sizes.state_bytes:,} bytes"),
        ("... takes as much memory as the KV of", f"{sizes.state_bytes / sizes.kv_token_bytes:,.0f} tokens"),
        (
            f"one KV block of {usage.block_tokens} tokens",
            f"{layout.block_bytes:,} bytes" + (f", {padding:,} of them padding" if padding else ""),
        ),
        (page_words(layout), f"{layout.padding_bytes / layout.page_bytes:.1%} unused"),
        ("KV blocks, if there were no states", f"{layout.total_blocks:,}"),
        ("most cached states", f"{plan.cached_states:,}"),
        (f"conversations of {usage.conversation_tokens:,} tokens with a checkpoint each", f"{plan.conversations:,}"),
    ]
    if usage.host_bytes:
        rows += [
            ("... on the host, beside them", f"{plan.host_conversations:,}"),
            ("states on the host, if it holds no KV", f"{plan.host_states:,}"),
        ]
    if usage.drafts:
        rows.append(
            (
                f"set aside for {usage.max_requests} requests with {usage.drafts} drafts",
                f"{plan.own_bytes / GIB:.2f} GiB",
            )
        )
    if sizes.next_logits_bytes is not None:
        rows += [
            ("log-probs of prompts (host), per checkpoint", f"{sizes.next_logits_bytes:,} bytes"),
            ("... per token, with one token of the highest probability", f"{SCORE_BYTES} bytes"),
        ]
    rows += more_rows
    if reuse is not None:
        more = f"... {reuse['raised_by_bytes'] / GIB:.1f} GiB more for"
        rows += [
            ("expected reuse of prompt tokens", f"{reuse['reused_token_fraction']:.4f}"),
            *((f"{more} {option}", f"{gain:+.4f}") for option, gain in reuse["gains"].items()),
            ("reuse with unlimited memory", f"{reuse['ceiling_fraction']:.4f}"),
        ]
    table = Table(title=f"{printable(sizes.name)}, tp={sizes.tp}", title_justify="left", show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("how much", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_fits(console: Console, found: Sequence[Fit], title: str, usage: Usage) -> None:
    """Prints what GPUs hold at each tensor-parallel size."""
    table = table_of(title, "--tp", "weights", "left", "budget", "keeps")
    for fit in found:
        cells = [str(fit.tp), f"{fit.weight_bytes / GIB:.1f} GiB", f"{max(0, fit.left_bytes) / GIB:.1f} GiB"]
        if fit.plan is None:
            cells.append("does not fit")
        else:
            cells += [f"--cache-gb {floor_gib(fit.cache_bytes)}", f"{fit.plan.conversations:,}"]
        table.add_row(*cells)
    console.print(table)
    console.print(
        f"of each GPU; keeps: conversations of {usage.conversation_tokens:,} tokens, with a checkpoint each; at most "
        f"{usage.max_requests:,} of them run",
        soft_wrap=True,
    )
