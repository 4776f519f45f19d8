"""Benchmark caching engines side by side: caching off, megatron-core's own cache, this cache.

examples:
    hybrid-prefix bench shared_prefix                        # time to first token of a prefix's 1st, 2nd, ... sighting
    hybrid-prefix bench first_sighting                       # the same, if requests name the end of the prefix
    hybrid-prefix bench multi_turn --sessions 50 --turns 60  # chats; each turn sends the whole history
    hybrid-prefix bench herd                                 # cold requests with a shared prefix, all at once
    hybrid-prefix bench samples                              # several answers to one prompt, all at once
    hybrid-prefix bench no_reuse --json no_reuse.json        # throughput when nothing can be reused
    hybrid-prefix bench decode --engine off,off-layer-fp32-async,ours  # decode steps, in megatron's settings
    hybrid-prefix bench host_tier                            # prompts come back after they were evicted
    hybrid-prefix bench pressure --engine off,ours           # the cache is smaller than the working set
    hybrid-prefix bench index                                # the control plane; needs no GPU
    hybrid-prefix bench all --json b.json --report out       # all scenarios, with tables and plots (--quick: small)
    hybrid-prefix bench report b.json out                    # tables and plots of an earlier run
    torchrun --nproc-per-node 2 -m megatron_hybrid_prefix bench no_reuse --preset small --tp 2

All engines run in one process and take turns. In each repeat every engine gets the same new random prompts, so no cache
helps from one repeat to the next. The order of the engines rotates. A warm-up round is not counted. Figures are medians
over the repeats; ratios are quotients of medians. --json has the samples of each repeat. Garbage is collected before
each timed round and not during it.

The memory of the engines follows from what is free: all of them have theirs at the same time. An engine that raises is
reported as crashed, and the others continue; but a lack of memory ends the benchmark.

An engine may have settings of its own: layer or block (what a CUDA graph captures), bf16 or fp32 (states), async.

exit code: 0; 1 if an engine other than "upstream" crashed; 2 for bad input; 130 after Ctrl-C or SIGTERM: --json then has the
rounds that were complete.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from typing import Any

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.bench.runner import Bench, as_json, crashed_engines, print_report
from megatron_hybrid_prefix.bench.scenario import Scenario
from megatron_hybrid_prefix.bench.scenarios import SCENARIOS
from megatron_hybrid_prefix.bench.suite import add_commands, run_all, run_report
from megatron_hybrid_prefix.console import engine_options as options
from megatron_hybrid_prefix.console import running, terminal
from megatron_hybrid_prefix.console.terminal import ArgumentParser, InputError, Interrupt, Stopped, as_main

EXIT_CRASHED = 1
DEFAULT_PRESET = {"cpu": "tiny", "cuda": "hybrid-4b"}
DEFAULT_CUDA_GRAPHS = {"cpu": 0, "cuda": 8}


# --- Options ---------------------------------------------------------------------------------------------------------


def make_parser() -> ArgumentParser:
    """The command's parser: one subcommand per scenario."""
    parser = terminal.command_parser(__doc__)
    commands = parser.add_subparsers(dest="scenario", metavar="SCENARIO", required=True)
    for name, kind in SCENARIOS.items():
        doc = kind.__doc__ or ""
        command = commands.add_parser(name, help=doc.partition("\n")[0], description=doc, allow_abbrev=False)
        add = command.add_argument_group("sizes").add_argument
        for field in kind.sizes():
            cpu, cuda = field.metadata["cpu"], field.metadata["cuda"]
            shown = f"{cpu:,}" if cpu == cuda else f"{cpu:,} on CPU, {cuda:,} on GPU"
            convert = options.positive_int if isinstance(cpu, int) else options.positive_float
            metavar = "N" if isinstance(cpu, int) else "X"
            text = f"{field.metadata['help']} (default: {shown})"
            add(f"--{field.name.replace('_', '-')}", type=convert, metavar=metavar, help=text)
        cpu, cuda = kind.repeats["cpu"], kind.repeats["cuda"]
        shown_repeats = str(cpu) if cpu == cuda else f"{cpu} on CPU, {cuda} on GPU"
        _add_common(command, shown_repeats, ",".join(kind.engines))
        command.set_defaults(engine=",".join(kind.engines))
        samples = {"help": "write all results as JSON, with the samples of each repeat"}
        options.add_options(command, "--json", title="output", json=samples)
    add_commands(commands, _add_common)
    return parser


def _add_common(
    parser: ArgumentParser, shown_repeats: str = "each scenario's", shown_engines: str = "each scenario's"
) -> None:
    add = parser.add_argument_group("measuring").add_argument
    add("--repeats", type=options.positive_int, metavar="N", help=f"timed rounds per engine (default: {shown_repeats})")
    options.add_options(
        parser, *options.MODEL_OPTIONS, title="model", preset={"help": "model (default: tiny on CPU, hybrid-4b on GPU)"}
    )
    most = "most running requests (default: as many as the scenario needs, at least 16)"
    options.add_several_engines(
        parser,
        "--engine",
        shown_engines,
        max_requests={"default": None, "help": most},
        cuda_graphs={"help": "number of CUDA graphs to capture, GPU only (default: 8; 0: none)"},
    )


def complete(args: argparse.Namespace) -> tuple[list[str], Scenario, Any]:
    """Fills in the defaults that depend on the device, and checks everything before anything runs.

    Returns:
        Engine names, the scenario with its sizes, the model's configuration.

    Raises:
        InputError: An option is wrong, or the sizes cannot run.
    """
    kind = SCENARIOS[args.scenario]
    names = options.split_engines(args.engine, "--engine")
    device_type = args.device or running.default_device()
    if args.hf is None:
        args.preset = args.preset or DEFAULT_PRESET[device_type]
    args.cuda_graphs = DEFAULT_CUDA_GRAPHS[device_type] if args.cuda_graphs is None else args.cuda_graphs
    scoped = [name for name in names if hasattr(options.options_of(name, args), "graph_scope")]
    if scoped and not args.cuda_graphs:
        raise InputError(f"--engine {scoped[0]}: a graph scope needs --cuda-graphs, which needs a GPU")
    args.repeats = args.repeats or kind.repeats[device_type]
    for field in kind.sizes():
        if getattr(args, field.name) is None:
            setattr(args, field.name, field.metadata[device_type])
    sizes = {field.name: getattr(args, field.name) for field in kind.sizes()}
    scenario = kind(block_tokens=args.block_size_tokens, **sizes)
    args.max_requests = args.max_requests or ceil_div(scenario.max_requests, args.tp) * args.tp
    args.max_tokens = args.max_tokens or scenario.max_tokens
    config = options.check_engine_options(args)
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


# --- Command -------------------------------------------------------------------------------------------------------


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> int:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    command = terminal.command_line(argv)
    if args.scenario == "all":
        return run_all(args, command, interrupt)
    if args.scenario == "report":
        return run_report(args)
    names, scenario, config = complete(args)
    interrupt.listen(signal.SIGTERM)
    with running.started_platform(args) as platform:
        console = terminal.output_console()
        console.print(platform.describe(), markup=False, soft_wrap=True)
        bench = Bench(args, names, scenario, config, platform, interrupt)
        bench.run()
        stopped = bench.should_stop()
        measured = any(bench.samples.values()) or bench.plain_samples
        if terminal.is_main_rank() and (measured or not stopped):
            report = as_json(bench, command)
            print_report(console, bench, report)
            terminal.save_json(console, args.json, report)
        if stopped:
            raise Stopped(f"what was measured is in {args.json}" if measured and args.json else "")
    return EXIT_CRASHED if {options.kind_of(name) for name in crashed_engines(bench)} - {options.UPSTREAM} else 0


main = as_main(run)
