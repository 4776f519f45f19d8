"""Replay recorded requests through the cache's index and policies, without a model: how much is reused at which budget?

examples:
    hybrid-prefix replay trace.jsonl                                # this cache and others, at several budgets
    hybrid-prefix replay trace.jsonl --state-slots 64,256,1024 --json reuse.json
    hybrid-prefix replay trace.jsonl --kv-blocks 20000              # with limited KV, too
    hybrid-prefix replay trace.jsonl --eviction lru --interval 0 --baselines none
    hybrid-prefix replay trace.jsonl --interval 4096                # interval states every 4096 tokens
    hybrid-prefix replay trace.jsonl --preset nemotron-h-8b         # shows the slots and blocks in GiB
    hybrid-prefix replay trace.jsonl --preset nemotron-h-8b --cache-gb 10,20,40    # KV and states share one memory

TRACE is a file with one JSON object per line, in one of three formats:
    Mooncake   "timestamp", "input_length", "output_length", and "hash_ids" of 512-token blocks
    sessions   "hash_ids" that are valid within a session, and "block_size"
    text       "timestamp" and "input", the whole prompt as text

With --cache-gb, KV, checkpoints and the state of the running request share one memory of so many GiB, with the bytes of
the model of --preset or --hf. --mamba-gb limits the bytes of the checkpoints in it.

Requests run one after another, by time. Answers are not replayed. The replay uses the same cache classes as the engine.
The last row, "no limits", is a cache with unlimited memory and a state after every block.

exit code: 0; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.console import engine_options as options
from megatron_hybrid_prefix.console import terminal
from megatron_hybrid_prefix.console.terminal import ArgumentParser, InputError, Interrupt, as_main
from megatron_hybrid_prefix.lab.capacity import Sizes, sizes_from
from megatron_hybrid_prefix.lab.memory import GIB, memory_of, page_words
from megatron_hybrid_prefix.lab.replay import ADMISSIONS, Policy, Replayed, TooLargeError, ceiling_tokens, replay
from megatron_hybrid_prefix.lab.traces import Trace, read_trace
from megatron_hybrid_prefix.policy.registry import DEFAULT_EVICTION_POLICY, eviction_policy_names

DEFAULT_SLOTS = "64,256,1024,4096"
DEFAULT_BASELINES = "lru,upstream,align"
BASELINES = {
    "upstream": Policy(name="upstream 0.19", eviction="upstream"),
    "align": Policy(name="align (tails only)", eviction="lru", admission="tail"),
}


# --- Options ---------------------------------------------------------------------------------------------------------


def make_parser() -> ArgumentParser:
    """The command's parser."""
    parser = terminal.command_parser(__doc__)
    add = parser.add_argument
    add("traces", nargs="+", type=Path, metavar="TRACE", help="files of recorded requests, all in one format")
    add("--limit", type=options.positive_int, metavar="N", help="only the first N requests by time")
    text = "tokens per block (default: 256 for text; else as in the trace)"
    add("--block-tokens", type=options.positive_int, metavar="N", help=text)
    group = parser.add_argument_group("budget")
    add = group.add_argument
    text = f"state slots; several are replayed in turn (default: {DEFAULT_SLOTS})"
    add("--state-slots", metavar="N[,N...]", help=text)
    add("--kv-blocks", metavar="N", help="KV blocks, or 'unlimited' (default)")
    text = "GiB that KV and states share, instead of the two counts; several are replayed in turn"
    add("--cache-gb", metavar="X[,X...]", help=text)
    text = "KV blocks and states in the host tier (default: 0)"
    add("--host-pages", type=options.whole_number, default=0, metavar="N", help=text)
    model = {"help": "show bytes for this preset, Megatron arguments or Hugging Face config.json"}
    options.add_options(group, "--mamba-gb", "--preset", "--hf", preset=model)
    add = parser.add_argument_group("policy").add_argument
    text = "policy that picks the state to evict (default: %(default)s)"
    add("--eviction", choices=eviction_policy_names(), default=DEFAULT_EVICTION_POLICY, help=text)
    text = "which states are kept. adaptive: junctions, ends of prompts, and interval states while there is room "
    text += "(default); tail: ends of prompts only"
    add("--admission", choices=ADMISSIONS, default=ADMISSIONS[0], help=text)
    text = "distance of interval states, a multiple of the block; 0: none (default: by the prompt's length)"
    add("--interval", metavar="TOKENS", help=text)
    text = "others to compare with, comma-separated: names of --eviction, upstream (megatron-core 0.19's rule), align "
    text += f"(LRU, ends of prompts only); or none (default: {DEFAULT_BASELINES}; with --cache-gb: lru)"
    add("--baselines", metavar="NAMES", help=text)
    options.add_options(parser, "--json")
    return parser


def check_options(args: argparse.Namespace) -> None:
    """Checks which options go together. Raises InputError if some do not."""
    options.check_output(args)
    if args.cache_gb is None:
        if args.mamba_gb is not None:
            raise InputError("--mamba-gb: limits the states in --cache-gb; give that, too, or --state-slots instead")
        return
    if args.state_slots is not None or args.kv_blocks is not None:
        raise InputError("--cache-gb replaces --state-slots and --kv-blocks: give one or the others")


def numbers[T: (int, float)](text: str, option: str, number: Callable[[str], T]) -> list[T]:
    """Numbers from a comma-separated list, ascending. Raises InputError if one is malformed, or is given twice."""
    with terminal.as_input_errors(argparse.ArgumentTypeError, prefix=f"{option}: "):
        found = [number(item) for item in text.split(",")]
    if len(set(found)) < len(found):
        raise InputError(f"{option}: {text} has a number twice")
    return sorted(found)


def budgets_of(args: argparse.Namespace, trace: Trace, sizes: Sizes | None) -> list[dict[str, Any]]:
    """Arguments of `replay` for each budget. Raises InputError if one is malformed or too small."""
    if args.cache_gb is None:
        blocks = None
        if args.kv_blocks not in (None, "unlimited"):
            (blocks,) = numbers(args.kv_blocks, "--kv-blocks", options.positive_int)
        slots = numbers(args.state_slots or DEFAULT_SLOTS, "--state-slots", options.whole_number)
        return [{"state_slots": count, "kv_blocks": blocks} for count in slots]
    if sizes is None:
        raise InputError("--cache-gb: needs the bytes of a model: give --preset or --hf")
    block_bytes, state_bytes = sizes.kv_block_bytes(trace.block_tokens), sizes.state_bytes
    found = []
    for gib in numbers(args.cache_gb, "--cache-gb", options.positive_float):
        memory = memory_of(gib, args.mamba_gb, block_bytes=block_bytes, state_bytes=state_bytes)
        found.append({"memory": memory})
    return found


def policies(args: argparse.Namespace, block_tokens: int) -> list[Policy]:
    """The policy of the options, then the baselines.

    Raises:
        InputError: A name is unknown, or an interval is not a multiple of the block.
    """
    interval = None
    if args.interval is not None:
        with terminal.as_input_errors(argparse.ArgumentTypeError, prefix="--interval: "):
            interval = options.whole_number(args.interval)
        if interval % block_tokens:
            raise InputError(f"--interval: {interval} is not a multiple of the block of {block_tokens} tokens")
    if interval is not None and args.admission != "adaptive":
        raise InputError(f"--interval {interval}: --admission {args.admission} keeps no states at intervals")
    host = {"host_pages": args.host_pages} if args.host_pages else {}
    name = args.eviction if args.admission == "adaptive" else f"{args.eviction}, {args.admission}"
    name += "" if interval is None else f", every {interval}"
    found = [
        Policy(name=name, eviction=args.eviction, admission=args.admission, interval_tokens=interval, options=host)
    ]
    known = {name: Policy(name=name, eviction=name) for name in eviction_policy_names()} | BASELINES
    baselines = args.baselines or (DEFAULT_BASELINES if args.cache_gb is None else "lru")
    for item in () if baselines == "none" else baselines.split(","):
        if item not in known:
            raise InputError(f"--baselines: no {item!r}; there are: {', '.join((*known, 'none'))}")
        policy = known[item]
        if policy.eviction == "upstream" and args.cache_gb is not None:
            raise InputError(
                "--baselines upstream: megatron-core's rule has no shared memory; it does not go with --cache-gb"
            )
        if policy.eviction != "upstream":  # upstream's rule has no host tier
            policy = dataclasses.replace(policy, options=host)
        if policy.name not in [other.name for other in found]:
            found.append(policy)
    return found


# --- Run -------------------------------------------------------------------------------------------------------------


def run_all(
    trace: Trace, chosen: Sequence[Policy], budgets: Sequence[dict[str, Any]], interrupt: Interrupt
) -> list[Replayed]:
    """Replays the trace with every policy at every budget (arguments of `replay`).

    Raises:
        Stopped: Ctrl-C was pressed.
    """
    runs: list[Replayed] = []
    total = len(trace.requests) * len(budgets)
    with terminal.progress([policy.name for policy in chosen], total) as done:
        for policy in chosen:
            for number, budget in enumerate(budgets):

                def on_request(count: int, policy: Policy = policy, number: int = number) -> None:
                    interrupt.check()
                    done(policy.name, number * len(trace.requests) + count)

                with terminal.as_input_errors(TooLargeError):
                    runs.append(replay(trace, policy, on_request=on_request, **budget))
    return runs


# --- Report ----------------------------------------------------------------------------------------------------------


def as_json(
    args: argparse.Namespace, trace: Trace, runs: Sequence[Replayed], ceiling: float, command: str
) -> dict[str, Any]:
    """All results as JSON values. ``reused_token_fraction`` is the first policy's, at the largest budget."""
    own = [run for run in runs if run.policy is runs[0].policy]
    names = [str(run.state_slots) if run.memory is None else f"{run.memory.cache_bytes / GIB:g}" for run in own]
    shares = [run.reused_token_fraction for run in own]
    summary = {"format": trace.format, "block_tokens": trace.block_tokens}
    return {
        "version": __version__,
        "command": command,
        "options": json.loads(json.dumps(vars(args), default=str)),
        "trace": summary | {"requests": len(trace.requests), "prompt_tokens": trace.prompt_tokens},
        "reused_token_fraction": shares[-1],
        "ceiling_fraction": ceiling,
        "by_state_slots" if args.cache_gb is None else "by_cache_gb": dict(zip(names, shares, strict=True)),
        "runs": [
            dataclasses.asdict(run)
            | {
                "reused_tokens": sum(run.reused_tokens),
                "reused_token_fraction": run.reused_token_fraction,
                "requests_per_second": run.requests_per_second,
            }
            for run in runs
        ],
    }


def print_report(console: Console, trace: Trace, runs: Sequence[Replayed], ceiling: float, sizes: Sizes | None) -> None:
    """Prints the reuse, one row per policy and one column per budget; then notes."""
    own = [run for run in runs if run.policy is runs[0].policy]
    memory, blocks = own[0].memory, own[0].kv_blocks
    text = f"{len(trace.requests):,} requests ({trace.format}), {trace.prompt_tokens:,} prompt tokens in blocks of "
    text += f"{trace.block_tokens}"
    if memory is None:
        text += "; unlimited KV" if blocks is None else f"; {blocks:,} KV blocks"
        if sizes is not None and blocks is not None:
            text += f", {blocks * sizes.kv_block_bytes(trace.block_tokens) / GIB:.1f} GiB"
    elif sizes is not None:
        layout = memory.layout
        text += f"; {terminal.printable(sizes.name)}: a block {layout.block_bytes:,} bytes, a state {layout.state_bytes:,} bytes; "
        text += f"{page_words(layout)} ({layout.padding_bytes / layout.page_bytes:.1%} unused)"
    console.print(text, soft_wrap=True)
    table = Table(title="share of prompt tokens reused", title_justify="left", show_footer=True)
    table.add_column("state slots" if memory is None else "GiB for KV and states", footer="no limits", no_wrap=True)
    for number, run in enumerate(own):
        head = f"{run.state_slots:,}" if run.memory is None else f"{run.memory.cache_bytes / GIB:g}"
        table.add_column(head, footer=f"{ceiling:.4f}" if number == 0 else "", justify="right", no_wrap=True)
    for policy in dict.fromkeys(run.policy.name for run in runs):
        shares = (f"{run.reused_token_fraction:.4f}" for run in runs if run.policy.name == policy)
        table.add_row(policy, *shares)
    if sizes is not None and memory is None:
        table.add_section()
        gib = (f"{run.state_slots * sizes.state_bytes / GIB:.1f}" for run in own)
        table.add_row(f"GiB of states, {terminal.printable(sizes.name)}", *gib)
    console.print(table)
    refused = max(run.refused_requests for run in runs)
    if refused:
        console.print(f"up to {refused:,} requests did not fit: they were skipped")
    for run in runs:
        if times := run.counters.get("would_raise"):
            text = f"{run.policy.name}, {run.state_slots:,} slots: upstream would have raised an error {times:,} times"
            console.print(text)


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> int:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    check_options(args)
    sizes = sizes_from(args.preset, args)
    trace = read_trace(args.traces, block_tokens=args.block_tokens, limit=args.limit)
    budgets = budgets_of(args, trace, sizes)
    chosen = policies(args, trace.block_tokens)
    ceiling = sum(ceiling_tokens(trace)) / trace.prompt_tokens
    runs = run_all(trace, chosen, budgets, interrupt)
    console = terminal.output_console()
    print_report(console, trace, runs, ceiling, sizes)
    terminal.save_json(console, args.json, as_json(args, trace, runs, ceiling, terminal.command_line(argv)))
    return 0


main = as_main(run)
