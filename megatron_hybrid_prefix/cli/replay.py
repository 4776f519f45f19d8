"""Replay recorded requests through the cache's index and policies, without a model: how much is reused at which budget?

examples:
    hybrid-prefix replay trace.jsonl                                # each policy at several budgets
    hybrid-prefix replay trace.jsonl --state-slots 64 256 1024 --json reuse.json
    hybrid-prefix replay trace.jsonl --eviction lru --interval 0
    hybrid-prefix replay trace.jsonl --interval 4096                # interval states every 4096 tokens
    hybrid-prefix replay trace.jsonl --preset nemotron-h-8b --cache-gb 10 20 40
    hybrid-prefix replay trace.jsonl --hints 0 60                   # and with sessions whose ends the cache is told
    hybrid-prefix replay *.json --at-once 64 --block-tokens 256 --preset qwen3.5-35b-a3b --cache-gb 50

TRACE is a file with one JSON object per line, in one of three formats:
    Mooncake   "timestamp", "input_length", "output_length", and "hash_ids" of 512-token blocks
    sessions   "hash_ids" that are valid within a session, and "block_size"
    text       "timestamp" and "input", the whole prompt as text

With --cache-gb, KV, checkpoints and the state of the running request share one memory of so many GiB, with the bytes of
the model of --preset or --hf. --mamba-gb limits the bytes of the checkpoints in it, --checkpoint-dtype keeps them in fewer,
and --host-gb adds a host tier. With --state-slots the number of checkpoints is limited, and KV is not.

With --hints each policy runs again with sessions, and is told that one is over so many seconds after its last request (0: at once, what an RL
loop knows; else a client's time-out). If a trace names no sessions, a request continues the latest one whose whole blocks, two or
more, begin its prompt.

With --at-once so many sessions run side by side, and the next one begins when one ends, in an order by --seed. The clock counts tokens: a
request holds its KV while it computes, 10,000 tokens a second, and answers, 50 a second. The session's next one is sent as long after it as
recorded, but not before the answer. One without room waits. With --cache-gb a line says how much memory these sessions need, and the row
"states of no bytes" is the same memory and policy with a state of no bytes at every block: what states cost.

Else requests run one after another, by time. Answers are not replayed. The replay uses the same cache classes as the engine.
The last row, "no limits", is a cache with unlimited memory and a state after every block.

exit code: 0; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.console import engine_options as options
from megatron_hybrid_prefix.console import terminal
from megatron_hybrid_prefix.console.terminal import ArgumentParser, InputError, Interrupt, as_main
from megatron_hybrid_prefix.lab.capacity import Sizes, sizes_from
from megatron_hybrid_prefix.lab.memory import GIB, Memory, bytes_of
from megatron_hybrid_prefix.lab.replay import (
    Replayed,
    TooLargeError,
    ceiling_tokens,
    kv_alone,
    replay,
    running_bytes,
    unlimited_kv,
)
from megatron_hybrid_prefix.lab.traces import Trace, read_trace, sessions_of
from megatron_hybrid_prefix.policy.registry import eviction_policy_names

DEFAULT_SLOTS = (64, 256, 1024, 4096)
DEFAULT_POLICIES = ("recompute_cost", "lru")


def make_parser() -> ArgumentParser:
    """The command's parser."""
    parser = terminal.command_parser(__doc__)
    add = parser.add_argument
    add("traces", nargs="+", type=Path, metavar="TRACE", help="files of recorded requests, all in one format")
    add("--limit", type=options.positive_int, metavar="N", help="only the first N requests by time")
    add("--at-once", type=options.positive_int, metavar="N", help="sessions that run side by side")
    add("--seed", type=int, default=0, metavar="N", help="of the order of sessions (default: %(default)s)")
    text = "tokens per block (default: 256 for text; else as in the trace, of sessions also a multiple)"
    add("--block-tokens", type=options.positive_int, metavar="N", help=text)
    group = parser.add_argument_group("budget")
    budgets = group.add_mutually_exclusive_group()
    default = " ".join(map(str, DEFAULT_SLOTS))
    text = f"most checkpoints, beside unlimited KV; several are replayed in turn (default: {default})"
    number = options.whole_number
    budgets.add_argument("--state-slots", nargs="+", type=number, default=DEFAULT_SLOTS, metavar="N", help=text)
    text = "GiB that KV and states share; several are replayed in turn; needs --preset or --hf"
    budgets.add_argument("--cache-gb", nargs="+", type=options.positive_float, metavar="X", help=text)
    hosts = group.add_mutually_exclusive_group()
    text = "KV blocks and states in the host tier (default: 0)"
    hosts.add_argument("--host-pages", type=options.whole_number, default=0, metavar="N", help=text)
    options.add_options(hosts, "--host-gb", host_gb={"help": "the host tier beside --cache-gb, in GiB"})
    model = {"help": "the model whose bytes count: this preset, Megatron arguments or Hugging Face config.json"}
    options.add_options(group, "--mamba-gb", "--checkpoint-dtype", "--preset", "--hf", preset=model)
    add = parser.add_argument_group("policy").add_argument
    text = f"policies that pick the state to evict (default: {' '.join(DEFAULT_POLICIES)})"
    names = eviction_policy_names()
    add("--eviction", nargs="+", choices=names, default=DEFAULT_POLICIES, metavar="NAME", help=text)
    text = "distance of interval states, a multiple of the block; 0: none (default: by the prompt's length)"
    add("--interval", type=options.whole_number, metavar="TOKENS", help=text)
    text = "tell the cache that a session is over, this many seconds after its last request"
    add("--hints", nargs="+", type=options.seconds, default=[], metavar="SECONDS", help=text)
    options.add_options(parser, "--json")
    return parser


def budgets_of(args: argparse.Namespace, trace: Trace, sizes: Sizes | None) -> dict[str, dict[str, Any]]:
    """Fields of `CacheSettings` by budget. Raises InputError if one is too small."""
    if args.cache_gb is None:
        if (args.mamba_gb, args.host_gb, args.checkpoint_dtype) != (None,) * 3:
            text = "--mamba-gb, --host-gb and --checkpoint-dtype go with --cache-gb"
            raise InputError(f"{text}; with --state-slots use --host-pages")
        host = {"host_pages": args.host_pages}
        return {f"{count:,}": unlimited_kv(trace, count) | host for count in args.state_slots}
    if sizes is None:
        raise InputError("--cache-gb: needs the bytes of a model: give --preset or --hf")
    sizes = dataclasses.replace(sizes, checkpoint_dtype=args.checkpoint_dtype)
    block_bytes, state_bytes = sizes.kv_block_bytes(trace.block_tokens), sizes.checkpoint_bytes
    mamba_bytes = None if args.mamba_gb is None else bytes_of(args.mamba_gb, GIB, "--mamba-gb")
    found = {}
    for gib in args.cache_gb:
        options.check_cap(args.mamba_gb, gib)
        cache_bytes = bytes_of(gib, GIB, "--cache-gb")
        with terminal.as_input_errors(ValueError, prefix=f"--cache-gb {gib:g}: "):
            memory = Memory(cache_bytes, block_bytes, state_bytes, mamba_bytes, sizes.live_bytes)
            host = memory.host_options(bytes_of(args.host_gb or 0, GIB, "--host-gb")) or {"host_pages": args.host_pages}
            found[f"{gib:g}"] = memory.cache_sizes() | host
    return found


def run_all(
    trace: Trace, args: argparse.Namespace, budgets: dict[str, dict[str, Any]], interrupt: Interrupt
) -> dict[str, dict[str, Replayed]]:
    """Replays the trace with every policy, without hints and with each of them, at every budget: results by both.

    Raises:
        InputError: The interval is no multiple of the block, or a budget is too large.
        Stopped: Ctrl-C was pressed.
    """
    if (args.interval or 0) % trace.block_tokens:
        text = f"--interval: {args.interval} is not a multiple of the block of {trace.block_tokens} tokens"
        raise InputError(text)
    rule = {"retention_interval_tokens": args.interval}
    ways: dict[str, tuple[str, dict[str, Any]]] = {policy: (policy, {}) for policy in args.eviction}
    if args.hints:
        if args.at_once and any(args.hints):
            raise InputError("--hints: with --at-once only 0, as its clock counts tokens")
        sessions = sessions_of(trace)
        for policy in args.eviction:
            for seconds in args.hints:
                hints = {"sessions": sessions, "ends_after_s": seconds}
                ways[f"{policy}, ends told after {seconds:g} s"] = policy, hints
    alone = "states of no bytes"
    if args.at_once and args.cache_gb:
        ways[alone] = args.eviction[0], {}
    side_by_side = {"at_once": args.at_once, "seed": args.seed}
    runs: dict[str, dict[str, Replayed]] = {name: {} for name in ways}
    total = len(trace.requests) * len(budgets)
    with terminal.progress(list(runs), total) as done, terminal.as_input_errors(TooLargeError):
        for name, found in runs.items():
            policy, hints = ways[name]
            for budget, sizes in budgets.items():

                def on_request(count: int, name: str = name, before: int = len(found)) -> None:
                    interrupt.check()
                    done(name, before * len(trace.requests) + count)

                own = kv_alone(sizes) if name == alone else sizes | rule
                more = hints | side_by_side | {"eviction_policy": policy}
                found[budget] = replay(trace, on_request=on_request, **more, **own)
    return runs


def as_json(
    args: argparse.Namespace, trace: Trace, runs: dict[str, dict[str, Replayed]], ceiling: float, command: str
) -> dict[str, Any]:
    """All results as JSON values. ``reused_token_fraction`` is the first policy's, at the last budget."""
    shares = {
        policy: {budget: run.reused_token_fraction for budget, run in found.items()} for policy, found in runs.items()
    }
    summary = {"format": trace.format, "block_tokens": trace.block_tokens, "requests": len(trace.requests)}
    return {
        "version": __version__,
        "command": command,
        "options": json.loads(json.dumps(vars(args), default=str)),
        "trace": summary | {"prompt_tokens": trace.prompt_tokens},
        "reused_token_fraction": list(shares[args.eviction[0]].values())[-1],
        "ceiling_fraction": ceiling,
        "reused_token_fractions": shares,
        "runs": [
            {"budget": budget} | dataclasses.asdict(run) | {"reused_tokens": sum(run.reused_tokens)}
            for found in runs.values()
            for budget, run in found.items()
        ],
    }


def print_report(
    console: Console, trace: Trace, runs: dict[str, dict[str, Replayed]], ceiling: float, what: str
) -> None:
    """Prints the reuse, one row per policy and one column per budget."""
    text = f"{len(trace.requests):,} requests ({trace.format}), {trace.prompt_tokens:,} prompt tokens in blocks of "
    console.print(f"{text}{trace.block_tokens}", soft_wrap=True)
    table = terminal.table_of("share of prompt tokens reused", what, *next(iter(runs.values())))
    for policy, found in runs.items():
        table.add_row(policy, *(f"{run.reused_token_fraction:.4f}" for run in found.values()))
    table.add_row("no limits", f"{ceiling:.4f}")
    console.print(table)
    refused = max(run.refused_requests for found in runs.values() for run in found.values())
    if refused:
        console.print(f"up to {refused:,} requests did not fit: they were skipped")


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> int:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    options.check_output(args)
    sizes = sizes_from(args.preset, args)
    trace = read_trace(args.traces, block_tokens=args.block_tokens, limit=args.limit)
    budgets = budgets_of(args, trace, sizes)
    ceiling = sum(ceiling_tokens(trace)) / trace.prompt_tokens
    runs = run_all(trace, args, budgets, interrupt)
    console = terminal.output_console()
    kept_in = "" if args.checkpoint_dtype is None else f", checkpoints in {args.checkpoint_dtype}"
    what = "state slots" if args.cache_gb is None else f"GiB for KV and states{kept_in}"
    print_report(console, trace, runs, ceiling, what)
    if args.at_once and sizes is not None:
        block_bytes = sizes.kv_block_bytes(trace.block_tokens)
        needed = running_bytes(trace, args.at_once, block_bytes, sizes.state_bytes) / GIB
        text = (
            f"{args.at_once} running sessions need {needed:.1f} GiB: the KV of their largest prompts, and a state each"
        )
        console.print(text, soft_wrap=True)
    terminal.save_json(console, args.json, as_json(args, trace, runs, ceiling, terminal.command_line(argv)))
    return 0


main = as_main(run)
