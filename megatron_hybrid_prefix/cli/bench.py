"""Benchmark caching engines side by side: caching off, megatron-core's own cache, this cache.

examples:
    hybrid-prefix bench shared_prefix                        # time to first token of a prefix's 1st, 2nd, ... sighting
    hybrid-prefix bench first_sighting                       # the same, if requests name the end of the prefix
    hybrid-prefix bench multi_turn --sessions 50 --turns 60  # chats; each turn sends the whole history
    hybrid-prefix bench herd                                 # cold requests with a shared prefix, all at once
    hybrid-prefix bench samples                              # several answers to one prompt, all at once
    hybrid-prefix bench no_reuse --json no_reuse.json        # throughput when nothing can be reused
    hybrid-prefix bench host_tier                            # prompts come back after they were evicted
    hybrid-prefix bench pressure --engine off,ours           # the cache is smaller than the working set
    hybrid-prefix bench index                                # the control plane; needs no GPU
    hybrid-prefix bench all --json b.json --report out       # all scenarios, with tables and plots (--quick: small)
    hybrid-prefix bench report b.json out                    # tables and plots of an earlier run
    torchrun --nproc-per-node 2 -m megatron_hybrid_prefix bench no_reuse --preset small --tp 2

engines:
    off         megatron-core without prefix caching
    upstream    megatron-core with its own prefix caching
    ours        megatron-core with this package's cache: KV and states share one memory (--cache-gb)

By default `ours` gets --buffer-gb and --mamba-gb together, so all engines with a cache have the same memory.

All engines run in one process and take turns. In each repeat every engine gets the same new random prompts, so no cache
helps from one repeat to the next. The order of the engines rotates. A warm-up round is not counted. Figures are medians
over the repeats; ratios are quotients of medians. --json has the samples of each repeat. Garbage is collected before
each timed round and not during it.

An engine that raises is reported as crashed, and the others continue.

exit code: 0; 1 if an engine other than "upstream" crashed; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.bench.runner import Bench, as_json, crashed_engines, print_report
from megatron_hybrid_prefix.bench.scenario import Scenario
from megatron_hybrid_prefix.bench.scenarios import SCENARIOS
from megatron_hybrid_prefix.bench.suite import add_commands, run_all, run_report
from megatron_hybrid_prefix.console.engine_options import (
    ENGINES,
    add_engine_options,
    add_model_options,
    check_engine_options,
    engine_names,
    positive_float,
    positive_int,
    started_platform,
)
from megatron_hybrid_prefix.console.terminal import (
    ArgumentParser,
    InputError,
    Interrupt,
    Stopped,
    check_writable,
    command_line,
    is_main_rank,
    output_console,
    run_command,
    write_json,
)

EXIT_CRASHED = 1
DEFAULT_PRESET = {"cpu": "tiny", "cuda": "hybrid-4b"}
DEFAULT_CUDA_GRAPHS = {"cpu": 0, "cuda": 8}


# --- Options ---------------------------------------------------------------------------------------------------------


def make_parser() -> ArgumentParser:
    """The command's parser: one subcommand per scenario."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(description=summary, epilog=rest, formatter_class=raw, allow_abbrev=False)
    commands = parser.add_subparsers(dest="scenario", metavar="SCENARIO", required=True)
    for name, kind in SCENARIOS.items():
        doc = kind.__doc__ or ""
        command = commands.add_parser(name, help=doc.partition("\n")[0], description=doc, allow_abbrev=False)
        add = command.add_argument_group("sizes").add_argument
        for field in kind.sizes():
            cpu, cuda = field.metadata["cpu"], field.metadata["cuda"]
            shown = f"{cpu:,}" if cpu == cuda else f"{cpu:,} on CPU, {cuda:,} on GPU"
            convert = positive_int if isinstance(cpu, int) else positive_float
            metavar = "N" if isinstance(cpu, int) else "X"
            text = f"{field.metadata['help']} (default: {shown})"
            add(f"--{field.name.replace('_', '-')}", type=convert, metavar=metavar, help=text)
        cpu, cuda = kind.repeats["cpu"], kind.repeats["cuda"]
        shown_repeats = str(cpu) if cpu == cuda else f"{cpu} on CPU, {cuda} on GPU"
        _add_common(command, shown_repeats, ",".join(kind.engines))
        add = command.add_argument_group("output").add_argument
        add("--json", type=Path, metavar="PATH", help="write all results as JSON, with the samples of each repeat")
    add_commands(commands, SCENARIOS, _add_common)
    return parser


def _add_common(
    parser: ArgumentParser, shown_repeats: str = "each scenario's", shown_engines: str = "each scenario's"
) -> None:
    add = parser.add_argument_group("measuring").add_argument
    text = f"engines to run, comma-separated: {', '.join(ENGINES)} (default: {shown_engines})"
    add("--engine", metavar="NAMES", help=text)
    add("--repeats", type=positive_int, metavar="N", help=f"timed rounds per engine (default: {shown_repeats})")
    add_model_options(parser.add_argument_group("model").add_argument, shown="tiny on CPU, hybrid-4b on GPU")
    add_engine_options(
        parser.add_argument_group("engine").add_argument,
        max_requests=None,
        max_requests_text="default: as many as the scenario needs, at least 16",
        cuda_graphs_text="default: 8; 0: none",
    )


def complete(args: argparse.Namespace) -> tuple[list[str], Scenario, Any]:
    """Fills in the defaults that depend on the device, and checks everything before anything runs.

    Returns:
        Engine names, the scenario with its sizes, the model's configuration.

    Raises:
        InputError: An option is wrong, or the sizes cannot run.
    """
    kind = SCENARIOS[args.scenario]
    names = list(kind.engines) if args.engine is None else engine_names(args.engine, "--engine")
    if args.json is not None:
        check_writable(args.json)
    device_type = args.device or default_device()
    if args.hf is None:
        args.preset = args.preset or DEFAULT_PRESET[device_type]
    args.cuda_graphs = DEFAULT_CUDA_GRAPHS[device_type] if args.cuda_graphs is None else args.cuda_graphs
    args.repeats = args.repeats or kind.repeats[device_type]
    for field in kind.sizes():
        if getattr(args, field.name) is None:
            setattr(args, field.name, field.metadata[device_type])
    sizes = {field.name: getattr(args, field.name) for field in kind.sizes()}
    scenario = kind(block_tokens=args.block_size_tokens, **sizes)
    args.max_requests = args.max_requests or ceil_div(scenario.max_requests, args.tp) * args.tp
    args.max_tokens = args.max_tokens or scenario.max_tokens
    config = check_engine_options(args)
    problem = scenario.problem(args.block_size_tokens, args.max_requests)
    if problem is not None:
        raise InputError(problem)
    if scenario.longest_tokens + scenario.generated_tokens > config.max_sequence_length:
        raise InputError(
            f"{scenario.longest_tokens} prompt + {scenario.generated_tokens} generated tokens exceed the "
            f"{config.max_sequence_length} of {args.preset}"
        )
    if args.max_tokens is not None and scenario.longest_tokens > args.max_tokens and not args.chunked_prefill:
        raise InputError(
            f"prompts of {scenario.longest_tokens} tokens are more than --max-tokens {args.max_tokens}: raise it "
            "or add --chunked-prefill"
        )
    return names, scenario, config


def default_device() -> str:
    """The running platform's device type; without one, CUDA if there is a GPU."""
    import torch

    from megatron_hybrid_prefix.platform import running_platform

    running = running_platform()
    if running is not None:
        return str(running.device.type)
    return "cuda" if torch.cuda.is_available() else "cpu"


# --- Command -------------------------------------------------------------------------------------------------------


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> int:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    command = command_line(sys.argv[1:] if argv is None else argv)
    if args.scenario == "all":
        return run_all(args, SCENARIOS, command, interrupt)
    if args.scenario == "report":
        return run_report(args)
    names, scenario, config = complete(args)
    with started_platform(args) as platform:
        console = output_console() if is_main_rank() else Console(quiet=True)
        console.print(platform.describe(), markup=False, soft_wrap=True)
        bench = Bench(args, names, scenario, config, platform, interrupt)
        bench.run()
        if bench.should_stop():
            raise Stopped
        if is_main_rank():
            report = as_json(bench, command)
            print_report(console, bench, report)
            if args.json is not None:
                write_json(args.json, report)
                console.print(f"wrote {args.json}", markup=False, soft_wrap=True)
    return EXIT_CRASHED if set(crashed_engines(bench)) - {"upstream"} else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code."""
    return run_command(lambda interrupt: run(argv, interrupt))
