"""Benchmark caching engines side by side: caching off, megatron-core's own cache, this cache.

examples:
    hybrid-prefix bench shared_prefix                        # time to first token of a prefix's 1st, 2nd, ... sighting
    hybrid-prefix bench first_sighting                       # the same, if requests name the end of the prefix
    hybrid-prefix bench multi_turn --sessions 50 --turns 60  # chats; each turn sends the whole history
    hybrid-prefix bench herd                                 # cold requests with a shared prefix, all at once
    hybrid-prefix bench samples                              # several answers to one prompt, all at once
    hybrid-prefix bench no_reuse --json no_reuse.json        # throughput when nothing can be reused
    hybrid-prefix bench decode --engine ours --engine off --versus state-dtype=float32   # decode steps; off in two settings
    hybrid-prefix bench host_tier                            # prompts come back after they were evicted
    hybrid-prefix bench pressure --engine off --engine ours  # the cache is smaller than the working set
    hybrid-prefix bench index                                # the control plane; needs no GPU
    torchrun --nproc-per-node 2 -m megatron_hybrid_prefix bench no_reuse --preset small --tp 2

All engines run in one process and take turns. In each repeat every engine gets the same new random prompts, so no cache
helps from one repeat to the next. The order of the engines rotates. A warm-up round is not counted. Figures are medians
over the repeats; ratios are quotients of medians. --json has the samples of each repeat. Garbage is collected before
each timed round and not during it.

The memory of the engines follows from what is free: all of them have theirs at the same time. An engine that raises is
reported as crashed, and the others continue; but a lack of memory ends the benchmark.

--versus runs the last engine once more, as "versus", with other options: --versus async-scheduling --versus state-dtype=float32.

exit code: 0; 1 if an engine other than "upstream" crashed; 2 for bad input; 130 after Ctrl-C or SIGTERM: --json then has the
rounds that were complete.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any

from megatron_hybrid_prefix.bench.engines import Contestant
from megatron_hybrid_prefix.bench.runner import Bench, as_json, draw, print_report
from megatron_hybrid_prefix.bench.scenario import Scenario
from megatron_hybrid_prefix.bench.scenarios import SCENARIOS
from megatron_hybrid_prefix.console import engine_options as options
from megatron_hybrid_prefix.console import running, terminal
from megatron_hybrid_prefix.console.terminal import ArgumentParser, InputError, Interrupt, Stopped, as_main
from megatron_hybrid_prefix.support.arithmetic import ceil_div

EXIT_CRASHED = 1
DEFAULT_PRESET = {"cpu": "tiny", "cuda": "hybrid-4b"}
DEFAULT_CUDA_GRAPHS = {"cpu": 0, "cuda": -1}  # -1: sizes as this package chooses them
MEGATRONS_CUDA_GRAPHS = 8
# What may differ between engines of a run.
VERSUS = {"cache_gb", "mamba_gb", "host_gb", "shared", "state_dtype", "exact", "max_tokens", "chunked_prefill"}
VERSUS |= {"async_scheduling", "graph_scope", "checkpoint_dtype"}


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
        shown = str(cpu) if cpu == cuda else f"{cpu} on CPU, {cuda} on GPU"
        add = command.add_argument_group("measuring").add_argument
        add("--repeats", type=options.positive_int, metavar="N", help=f"timed rounds per engine (default: {shown})")
        model = {"help": "model (default: tiny on CPU, hybrid-4b on GPU)"}
        options.add_options(command, *options.MODEL_OPTIONS, title="model", preset=model)
        most = "most running requests (default: as many as the scenario needs, at least 16)"
        group = options.add_several_engines(
            command, "--engine", kind.engines, max_requests={"default": None, "help": most}
        )
        options.add_options(group, "--checkpoint-dtype")
        text = "what a CUDA graph captures (default: ours: block, the whole forward; others: layer, megatron's default)"
        group.add_argument("--graph-scope", choices=("layer", "block"), help=text)
        text = (
            "the last engine runs once more, as engine versus, with this option changed; repeatable: they go together"
        )
        group.add_argument("--versus", action="append", default=[], metavar="OPTION[=VALUE]", help=text)
        samples = {"help": "write all results as JSON, with the samples of each repeat"}
        plot = {"help": "draw the medians that make the scenario's point, as PNG or SVG"}
        options.add_options(command, "--json", "--plot", title="output", json=samples, plot=plot)
    return parser


def contestants_of(args: argparse.Namespace, argv: Sequence[str]) -> list[Contestant]:
    """The engines. Raises InputError if one is named twice, or cannot have its option."""
    names = options.engine_names(args.engine, SCENARIOS[args.scenario].engines, "--engine")
    contestants = [Contestant(name, name, _as_of(name, args)) for name in names]
    if args.versus:
        other = make_parser().parse_args([*argv, *(f"--{option}" for option in args.versus)])
        complete(other)
        changed = {name for name, value in vars(other).items() if value != getattr(args, name)}
        if not changed or changed - VERSUS:
            known = ", ".join(sorted(name.replace("_", "-") for name in VERSUS))
            raise InputError(f"--versus {' '.join(args.versus)}: give what differs between engines, of: {known}")
        contestants.append(Contestant("versus", names[-1], _as_of(names[-1], other)))
    return contestants


def _as_of(name: str, args: argparse.Namespace) -> argparse.Namespace:
    """The options of an engine: what is left open is megatron's default for its engines, and the fastest for ours."""
    if name == "ours":
        return args
    megatrons = {"graph_scope": args.graph_scope or "layer", "async_scheduling": bool(args.async_scheduling)}
    megatrons["cuda_graphs"] = MEGATRONS_CUDA_GRAPHS if args.cuda_graphs < 0 else args.cuda_graphs
    return argparse.Namespace(**vars(args) | megatrons)


def complete(args: argparse.Namespace) -> tuple[Scenario, Any]:
    """Fills in the defaults that depend on the device, and checks everything before anything runs.

    Returns:
        The scenario with its sizes, the model's configuration.

    Raises:
        InputError: An option is wrong, or the sizes cannot run.
    """
    kind = SCENARIOS[args.scenario]
    device_type = args.device or running.default_device()
    if args.hf is None:
        args.preset = args.preset or DEFAULT_PRESET[device_type]
    args.cuda_graphs = DEFAULT_CUDA_GRAPHS[device_type] if args.cuda_graphs is None else args.cuda_graphs
    if args.graph_scope is not None and not args.cuda_graphs:
        raise InputError(f"--graph-scope {args.graph_scope}: needs --cuda-graphs, which needs a GPU")
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
    return scenario, config


# --- Command -------------------------------------------------------------------------------------------------------


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> int:
    """Runs the command."""
    argv = sys.argv[1:] if argv is None else argv
    args = make_parser().parse_args(argv)
    scenario, config = complete(args)
    contestants = contestants_of(args, argv)
    interrupt.listen(signal.SIGTERM)
    with running.started_platform(args) as platform:
        console = terminal.output_console()
        console.print(platform.describe(), markup=False, soft_wrap=True)
        bench = Bench(args, contestants, scenario, config, platform, interrupt)
        bench.run()
        stopped = bench.should_stop()
        measured = any(bench.samples.values()) or bench.plain_samples
        if terminal.is_main_rank() and (measured or not stopped):
            report = as_json(bench, terminal.command_line(argv))
            print_report(console, bench, report)
            terminal.save_json(console, args.json, report)
            if args.plot is not None:
                terminal.write_whole(args.plot, lambda path: draw(path, bench, report))
                console.print(f"wrote {args.plot}", markup=False, soft_wrap=True)
        if stopped:
            raise Stopped(f"what was measured is in {args.json}" if measured and args.json else "")
    return EXIT_CRASHED if any(one.crash and one.kind != options.UPSTREAM for one in contestants) else 0


main = as_main(run)
