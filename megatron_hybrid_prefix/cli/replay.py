"""Replay recorded requests through the cache's index and policies, without a model: how much is reused at which budget?

examples:
    hybrid-prefix replay trace.jsonl                                # this cache and the baselines, at several budgets
    hybrid-prefix replay trace.jsonl --state-slots 64,256,1024 --json reuse.json --plot reuse.png
    hybrid-prefix replay trace.jsonl --kv-blocks 20000              # with limited KV, too
    hybrid-prefix replay trace.jsonl --eviction lru --admission asked --baselines none
    hybrid-prefix replay trace.jsonl --interval 4096                # interval states every 4096 tokens
    hybrid-prefix replay trace.jsonl --clairvoyant                  # how much is left: no rule reuses more than this
    hybrid-prefix replay trace.jsonl --preset nemotron-h-8b         # shows the slots and blocks in GiB
    hybrid-prefix replay trace.jsonl --preset nemotron-h-8b --cache-gb 10,20,40    # KV and states share one memory

TRACE is a file with one JSON object per line, in one of three formats:
    Mooncake   "timestamp", "input_length", "output_length", and "hash_ids" of 512-token blocks
    sessions   "hash_ids" that are valid within a session, and "block_size"
    text       "timestamp" and "input", the whole prompt as text

With --cache-gb, KV, checkpoints and the state of the running request share one memory of so many GiB, with the bytes of
the model of --preset or --hf. --mamba-gb limits the bytes of the checkpoints in it.

--clairvoyant adds two rows for rules that know all requests beforehand: an offline rule, and a bound that no rule passes.
Both are for unlimited KV. They take a second or more for every 100 slots (6,000 requests).

Requests run one after another, by time. Answers are not replayed. The replay uses the same cache classes as the engine.
The last row, "no limits", is a cache with unlimited memory and a state after every block.

exit code: 0; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.config import add_removed_flags
from megatron_hybrid_prefix.console.engine_options import positive_float, positive_int, whole_number
from megatron_hybrid_prefix.console.hf import add_hf_option, folder_of
from megatron_hybrid_prefix.console.terminal import (
    ArgumentParser,
    InputError,
    Interrupt,
    Stopped,
    as_input_errors,
    check_can_plot,
    check_writable,
    command_line,
    output_console,
    printable,
    progress,
    run_command,
    write_json,
    write_whole,
)
from megatron_hybrid_prefix.lab.capacity import Sizes, sizes_of, sizes_of_config
from megatron_hybrid_prefix.lab.clairvoyant import Clairvoyant, clairvoyant
from megatron_hybrid_prefix.lab.memory import GIB
from megatron_hybrid_prefix.lab.memory_report import memories, print_memories
from megatron_hybrid_prefix.lab.plot import save_plot
from megatron_hybrid_prefix.lab.replay import ADMISSIONS, Policy, Replayed, TooLargeError, ceiling_tokens, replay
from megatron_hybrid_prefix.lab.traces import Trace, read_trace
from megatron_hybrid_prefix.policy.registry import DEFAULT_EVICTION_POLICY, eviction_policy_names

DEFAULT_SLOTS = "64,256,1024,4096"
DEFAULT_BASELINES = "lru,upstream,align"
BASELINES = {
    "lru": Policy(name="lru", eviction="lru"),
    "upstream": Policy(name="upstream 0.19", eviction="upstream"),
    "align": Policy(name="align (tails only)", eviction="lru", admission="tail"),
}


# --- Options ---------------------------------------------------------------------------------------------------------


def make_parser() -> ArgumentParser:
    """The command's parser."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(description=summary, epilog=rest, formatter_class=raw, allow_abbrev=False)
    add = parser.add_argument
    add("traces", nargs="+", type=Path, metavar="TRACE", help="files of recorded requests, all in one format")
    add("--limit", type=positive_int, metavar="N", help="only the first N requests by time")
    add(
        "--block-tokens",
        type=positive_int,
        metavar="N",
        help="tokens per block (default: 256 for text; else as in the trace)",
    )
    add = parser.add_argument_group("budget").add_argument
    add(
        "--state-slots",
        metavar="N[,N...]",
        help=f"state slots; several are replayed in turn (default: {DEFAULT_SLOTS})",
    )
    add("--kv-blocks", metavar="N", help="KV blocks, or 'unlimited' (default)")
    add(
        "--cache-gb",
        metavar="X[,X...]",
        help="GiB that KV and states share, instead of the two counts; several are replayed in turn",
    )
    add(
        "--mamba-gb",
        type=positive_float,
        metavar="X",
        help="with --cache-gb: most GiB of checkpoints in it (default: no limit)",
    )
    add(
        "--host-pages",
        type=whole_number,
        default=0,
        metavar="N",
        help="KV blocks and states in the host tier (default: 0)",
    )
    add("--preset", metavar="MODEL", help="show bytes for this preset, Megatron arguments or Hugging Face config.json")
    add_hf_option(add)
    add = parser.add_argument_group("policy").add_argument
    add(
        "--eviction",
        type=lambda name: "recompute_cost" if name == "replay_cost" else name,  # its name in 0.1
        choices=eviction_policy_names(),
        default=DEFAULT_EVICTION_POLICY,
        help="policy that picks the state to evict (default: %(default)s)",
    )
    add(
        "--admission",
        choices=ADMISSIONS,
        default=ADMISSIONS[0],
        help="which states are kept. adaptive: junctions, ends of prompts, and interval states while there is room "
        "(default); asked: no interval states; tail: ends of prompts only",
    )
    add(
        "--interval",
        metavar="TOKENS",
        help="distance of interval states, a multiple of the block (default: by the prompt's length)",
    )
    add(
        "--baselines",
        metavar="NAMES",
        help="other policies to compare with, comma-separated: lru, upstream (megatron-core 0.19's rule), align (LRU, "
        f"ends of prompts only), interval:TOKENS (LRU with interval states); or none (default: {DEFAULT_BASELINES}; "
        "with --cache-gb: lru)",
    )
    add(
        "--clairvoyant",
        action="store_true",
        help="also show what rules that know all requests beforehand reuse; needs unlimited KV and no host tier",
    )
    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="PATH", help="write all results as JSON, with the occupancy over time")
    add("--plot", type=Path, metavar="PATH", help="plot reuse at each budget, one line per policy, as PNG, SVG or PDF")
    add_removed_flags(
        parser,
        {
            **dict.fromkeys(("--host-state-slots", "--host-kv-blocks"), "use --host-pages"),
            "--splits": "use --mamba-gb, which limits the states in --cache-gb",
        },
    )
    return parser


def state_slots(text: str) -> list[int]:
    """Numbers from a comma-separated list, ascending.

    Raises:
        InputError: One is not a whole number, or is given twice.
    """
    with as_input_errors(argparse.ArgumentTypeError, prefix="--state-slots: "):
        slots = [whole_number(item) for item in text.split(",")]
    if len(set(slots)) < len(slots):
        raise InputError(f"--state-slots: {text} has a number twice")
    return sorted(slots)


def kv_blocks(text: str) -> int | None:
    """A number, or None for "unlimited".

    Raises:
        InputError: It is neither.
    """
    if text == "unlimited":
        return None
    with as_input_errors(argparse.ArgumentTypeError, prefix="--kv-blocks: "):
        return positive_int(text)


def policies(args: argparse.Namespace, block_tokens: int) -> list[Policy]:
    """The policy of the options, then the baselines.

    Raises:
        InputError: A name is unknown, or an interval is not a multiple of the block.
    """
    interval = None if args.interval is None else _interval(args.interval, "--interval", block_tokens)
    if interval is not None and args.admission != "adaptive":
        raise InputError(f"--interval {interval}: --admission {args.admission} keeps no states at intervals")
    host = {"host_pages": args.host_pages} if args.host_pages else {}
    name = args.eviction if args.admission == "adaptive" else f"{args.eviction}, {args.admission}"
    if interval is not None:
        name += f", every {interval}"
    first = Policy(name=name, eviction=args.eviction, admission=args.admission, interval_tokens=interval, options=host)
    found = [first]
    for item in () if args.baselines == "none" else args.baselines.split(","):
        head, _, tokens = item.partition(":")
        if item in BASELINES:
            policy = BASELINES[item]
        elif head == "interval" and tokens:
            distance = _interval(tokens, "--baselines interval", block_tokens)
            policy = Policy(name=f"lru, every {distance}", eviction="lru", interval_tokens=distance)
        else:
            raise InputError(f"--baselines: no {item!r}; there are: {', '.join(BASELINES)}, interval:TOKENS, none")
        if policy.eviction != "upstream":  # upstream's rule has no host tier
            policy = dataclasses.replace(policy, options=host)
        if policy.name not in [other.name for other in found]:
            found.append(policy)
    return found


def _interval(text: str, option: str, block_tokens: int) -> int:
    with as_input_errors(argparse.ArgumentTypeError, prefix=f"{option}: "):
        tokens = whole_number(text)
    if tokens % block_tokens:
        raise InputError(f"{option}: {tokens} is not a multiple of the block of {block_tokens} tokens")
    return tokens


# --- Run -------------------------------------------------------------------------------------------------------------


def run_all(
    trace: Trace, chosen: Sequence[Policy], budgets: Sequence[Mapping[str, Any]], interrupt: Interrupt
) -> list[Replayed]:
    """Replays the trace with every policy at every budget (arguments of `replay`).

    Raises:
        Stopped: Ctrl-C was pressed.
    """
    runs: list[Replayed] = []
    total = len(trace.requests) * len(budgets)
    with progress([policy.name for policy in chosen], total) as done:
        for policy in chosen:
            for number, budget in enumerate(budgets):

                def on_request(count: int, policy: Policy = policy, number: int = number) -> None:
                    if interrupt.requested:
                        raise Stopped
                    done(policy.name, number * len(trace.requests) + count)

                with as_input_errors(TooLargeError):
                    runs.append(replay(trace, policy, on_request=on_request, **budget))
    return runs


def check_clairvoyant(args: argparse.Namespace) -> None:
    """Checks the options that do not go with ``--clairvoyant``.

    Raises:
        InputError: One is given.
    """
    limited = args.kv_blocks not in (None, "unlimited")
    if args.clairvoyant and (limited or args.cache_gb is not None or args.host_pages):
        raise InputError("--clairvoyant: does not go with --kv-blocks, --cache-gb, --host-pages")


def run_clairvoyant(trace: Trace, slots: Sequence[int], interrupt: Interrupt) -> list[Clairvoyant]:
    """The rows of ``--clairvoyant``.

    Raises:
        Stopped: Ctrl-C was pressed.
    """
    with progress(["clairvoyant"], max(slots)) as done:

        def on_slot(count: int) -> None:
            if interrupt.requested:
                raise Stopped
            done("clairvoyant", count)

        return clairvoyant(trace, slots, on_slot)


# --- Report ----------------------------------------------------------------------------------------------------------


def as_json(
    args: argparse.Namespace, trace: Trace, runs: Sequence[Replayed], ceiling: float, command: str
) -> dict[str, Any]:
    """All results as JSON values. ``reused_token_fraction`` is the first policy's, at the largest budget."""
    own = [run for run in runs if run.policy is runs[0].policy]
    shared = [(run.memory.cache_bytes / GIB, run) for run in own if run.memory is not None]
    by_budget = {f"{gib:g}": run.reused_token_fraction for gib, run in shared}
    return {
        "version": __version__,
        "command": command,
        "options": {name: _plain(value) for name, value in vars(args).items()},
        "trace": {
            "format": trace.format,
            "block_tokens": trace.block_tokens,
            "requests": len(trace.requests),
            "prompt_tokens": trace.prompt_tokens,
        },
        "reused_token_fraction": own[-1].reused_token_fraction,
        "ceiling_fraction": ceiling,
        **(
            {"by_cache_gb": by_budget}
            if shared
            else {"by_state_slots": {str(run.state_slots): run.reused_token_fraction for run in own}}
        ),
        "runs": [_run_json(run) for run in runs],
    }


def _run_json(run: Replayed) -> dict[str, Any]:
    return {
        "policy": dataclasses.asdict(run.policy),
        **({} if run.memory is None else {"memory": dataclasses.asdict(run.memory)}),
        "state_slots": run.state_slots,
        "kv_blocks": run.kv_blocks,
        "reused_token_fraction": run.reused_token_fraction,
        "reused_tokens": sum(run.reused_tokens),
        "prompt_tokens": run.prompt_tokens,
        "refused_requests": run.refused_requests,
        "requests_per_second": run.requests_per_second,
        "counters": dict(run.counters),
        "occupancy": [dataclasses.asdict(point) for point in run.series],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def print_report(
    console: Console,
    trace: Trace,
    runs: Sequence[Replayed],
    ceiling: float,
    sizes: Sizes | None,
    blocks: int | None,
    bounds: Sequence[Clairvoyant] = (),
) -> None:
    """Prints the reuse, one row per policy and one column per budget; then speed and notes."""
    slots = sorted({run.state_slots for run in runs})
    kv = "unlimited KV" if blocks is None else f"{blocks:,} KV blocks"
    console.print(
        f"{len(trace.requests):,} requests ({trace.format}), {trace.prompt_tokens:,} prompt tokens in blocks of "
        f"{trace.block_tokens}; {kv}",
        soft_wrap=True,
    )
    table = Table(title="share of prompt tokens reused", title_justify="left", show_footer=True)
    table.add_column("state slots", footer="no limits", no_wrap=True)
    for number, budget in enumerate(slots):
        table.add_column(f"{budget:,}", footer=f"{ceiling:.4f}" if number == 0 else "", justify="right", no_wrap=True)
    table.add_column("requests/s", justify="right", no_wrap=True)
    for policy in dict.fromkeys(run.policy.name for run in runs):
        own = [run for run in runs if run.policy.name == policy]
        speed = min(run.requests_per_second for run in own)
        table.add_row(policy, *(f"{run.reused_token_fraction:.4f}" for run in own), f"{speed:,.0f}")
    if bounds:
        all_tokens = trace.prompt_tokens
        table.add_section()
        table.add_row("a rule that knows all requests", *(f"{bound.rule_tokens / all_tokens:.4f}" for bound in bounds))
        table.add_row("no rule reuses more than", *(f"{bound.bound_tokens / all_tokens:.4f}" for bound in bounds))
    if sizes is not None:
        budgets = (f"{budget * sizes.state_bytes / 2**30:.1f}" for budget in slots)
        table.add_section()
        table.add_row(f"GiB of states, {printable(sizes.name)}", *budgets, "")
    console.print(table)
    if sizes is not None and blocks is not None:
        gib = blocks * sizes.kv_block_bytes(trace.block_tokens) / 2**30
        console.print(f"{blocks:,} KV blocks of {trace.block_tokens} tokens: {gib:.1f} GiB", soft_wrap=True)
    refused = max(run.refused_requests for run in runs)
    if refused:
        console.print(f"{refused:,} requests need more KV blocks than there are: they were skipped")
    raising = [run for run in runs if run.counters.get("would_raise")]
    for run in raising:
        times = run.counters["would_raise"]
        console.print(
            f"{run.policy.name}, {run.state_slots:,} slots: upstream would have raised an error {times:,} times"
        )


def _shares(runs: Sequence[Replayed], slots: Sequence[int]) -> list[tuple[str, list[float | None]]]:
    """Each policy's share of prompt tokens reused at each budget, in the order of the runs."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        found.setdefault(run.policy.name, {})[run.state_slots] = run.reused_token_fraction
    return [(name, [shares.get(budget) for budget in slots]) for name, shares in found.items()]


def model_sizes(args: argparse.Namespace) -> Sizes | None:
    """Sizes of the model of ``--preset`` or ``--hf``; None: neither is given.

    Raises:
        InputError: Both are given, or the model is not understood.
    """
    folder = folder_of(args)
    if folder is None:
        return None if args.preset is None else sizes_of(args.preset)
    if args.preset is not None:
        raise InputError(f"--hf {args.hf} and --preset {args.preset}: give one of them")
    with as_input_errors(ValueError):
        return sizes_of_config(folder.name, folder.config)


def run_shared(
    args: argparse.Namespace,
    sizes: Sizes | None,
    trace_of: Callable[[], Trace],
    argv: Sequence[str],
    interrupt: Interrupt,
) -> int:
    """Runs the command with ``--cache-gb``."""
    if args.cache_gb is None:
        raise InputError("--mamba-gb: limits the states in --cache-gb; give that, too, or --state-slots instead")
    if args.state_slots is not None or args.kv_blocks is not None:
        raise InputError("--cache-gb replaces --state-slots and --kv-blocks: give one or the others")
    if sizes is None:
        raise InputError("--cache-gb: needs the bytes of a model: give --preset or --hf")
    args.baselines = args.baselines or "lru"
    memories_for = functools.partial(memories, args.cache_gb, args.mamba_gb, state_bytes=sizes.state_bytes)
    memories_for(block_bytes=sizes.kv_token_bytes)  # finds wrong options before the trace is read: the smallest blocks
    trace = trace_of()
    budgets = memories_for(block_bytes=sizes.kv_block_bytes(trace.block_tokens))
    chosen = policies(args, trace.block_tokens)
    if any(policy.eviction == "upstream" for policy in chosen):
        raise InputError(
            "--baselines upstream: megatron-core's rule has no shared memory; it does not go with --cache-gb"
        )
    ceiling = sum(ceiling_tokens(trace)) / trace.prompt_tokens
    runs = run_all(trace, chosen, [{"memory": memory} for memory in budgets], interrupt)
    console = output_console()
    print_memories(console, trace, runs, ceiling, sizes)
    if args.json is not None:
        write_json(args.json, as_json(args, trace, runs, ceiling, command_line(argv)))
        console.print(f"wrote {args.json}", markup=False, soft_wrap=True)
    return 0


def run(argv: Sequence[str], interrupt: Interrupt) -> int:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    check_clairvoyant(args)
    if args.json is not None:
        check_writable(args.json)
    if args.plot is not None:
        if args.cache_gb is not None:
            raise InputError("--plot: shows state slots; it does not go with --cache-gb")
        check_can_plot("--plot", args.plot)
    sizes = model_sizes(args)
    trace_of = functools.partial(read_trace, args.traces, block_tokens=args.block_tokens, limit=args.limit)
    if args.cache_gb is not None or args.mamba_gb is not None:
        return run_shared(args, sizes, trace_of, argv, interrupt)
    args.state_slots, args.kv_blocks = args.state_slots or DEFAULT_SLOTS, args.kv_blocks or "unlimited"
    args.baselines = args.baselines or DEFAULT_BASELINES
    slots, blocks = state_slots(args.state_slots), kv_blocks(args.kv_blocks)
    trace = trace_of()
    chosen = policies(args, trace.block_tokens)
    ceiling = sum(ceiling_tokens(trace)) / trace.prompt_tokens
    budgets = [{"state_slots": budget, "kv_blocks": blocks} for budget in slots]
    runs = run_all(trace, chosen, budgets, interrupt)
    bounds = run_clairvoyant(trace, slots, interrupt) if args.clairvoyant else []
    console = output_console()
    print_report(console, trace, runs, ceiling, sizes, blocks, bounds)
    if args.json is not None:
        report = as_json(args, trace, runs, ceiling, command_line(argv))
        if bounds:
            report["clairvoyant"] = [dataclasses.asdict(bound) for bound in bounds]
        write_json(args.json, report)
        console.print(f"wrote {args.json}", markup=False, soft_wrap=True)
    if args.plot is not None:
        names = ", ".join(path.name for path in args.traces)
        workload = f"{printable(names)}: {len(trace.requests):,} requests, {trace.prompt_tokens:,} prompt tokens, "
        workload += "KV unlimited." if blocks is None else f"{blocks:,} KV blocks."
        shares = _shares(runs, slots)
        if bounds:
            shares.append(("no rule reuses more", [bound.bound_tokens / trace.prompt_tokens for bound in bounds]))
        write_whole(args.plot, lambda part: save_plot(part, slots, shares, ceiling, workload))
        console.print(f"wrote {args.plot}", markup=False, soft_wrap=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code."""
    return run_command(lambda interrupt: run(sys.argv[1:] if argv is None else argv, interrupt))
