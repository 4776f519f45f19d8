#!/usr/bin/env python
"""Measure the engines side by side: caching off, megatron-core's own cache, this cache.

    tools/bench.py shared_prefix                       # time to first token of a prefix's 1st, 2nd, ... sighting
    tools/bench.py first_sighting                      # the same where the request says how far a prefix is shared
    tools/bench.py multi_turn --sessions 50 --turns 60 # conversations whose every turn sends the whole history
    tools/bench.py herd                                # cold requests with a common prefix, at once
    tools/bench.py samples                             # several answers to one prompt, at once
    tools/bench.py no_reuse --json no_reuse.json       # throughput where nothing can be reused
    tools/bench.py host_tier                           # prompts come back after the device let them go
    tools/bench.py pressure --engine off,ours          # less memory than the working set
    tools/bench.py index                               # the control plane; no GPU needed
    tools/bench.py all --json b.json --report out      # every scenario, then tables and plots; --quick: small sizes
    tools/bench.py report b.json out                   # tables and plots again
    torchrun --nproc-per-node 2 tools/bench.py no_reuse --preset small --tp 2

All engines are built in one process and take turns: in every repeat each runs the same new random prompts, so that no
cache helps from one repeat to the next, and the order rotates. A warm-up round is not counted. Figures are medians over
the repeats, ratios quotients of medians; the raw samples are in --json. Garbage is collected before each timed round and
not during it.

An engine that raises is reported as crashed, and the others go on. Exit code: 0; 1 if an engine other than upstream's
crashed; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _bench_all import add_commands, run_all, run_report
from _bench_base import Machine, Scenario
from _bench_engine import Contestant, contestants
from _bench_scenarios import SCENARIOS
from _bench_stats import Metric, Sample, engine_table, plain_table, rotated, summarise
from rich.console import Console

from megatron_hybrid_prefix.console.engine_options import (
    DEFAULT_MAMBA_GB,
    ENGINES,
    add_engine_options,
    add_model_options,
    check_engine_options,
    engine_fields,
    engine_names,
    hardware,
    plain,
    positive_float,
    positive_int,
    started_platform,
    state_dtype_field,
    stop_requested,
    versions,
)
from megatron_hybrid_prefix.console.terminal import (
    ArgumentParser,
    InputError,
    Interrupt,
    Stopped,
    as_input_errors,
    check_writable,
    is_main_rank,
    output_console,
    printable,
    progress,
    run_command,
    write_whole,
)
from megatron_hybrid_prefix.errors import PlatformError

EXIT_CRASHED = 1
DEFAULT_PRESET = {"cpu": "tiny", "cuda": "hybrid-4b"}
DEFAULT_CUDA_GRAPHS = {"cpu": 0, "cuda": 8}


# --- Options ---------------------------------------------------------------------------------------------------------


def make_parser() -> ArgumentParser:
    """A command a scenario: the scenario's own sizes, and what all have."""
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
        _add_common(command, str(cpu) if cpu == cuda else f"{cpu} on CPU, {cuda} on GPU")
        add = command.add_argument_group("output").add_argument
        add("--json", type=Path, metavar="PATH", help="everything, with the samples of each repeat")
    add_commands(commands, SCENARIOS, _add_common)
    return parser


def _add_common(parser: ArgumentParser, shown_repeats: str = "each scenario's") -> None:
    add = parser.add_argument_group("measuring").add_argument
    every = ",".join(ENGINES)
    add("--engine", default=every, metavar="NAMES", help="engines, by comma (default: %(default)s)")
    add("--repeats", type=positive_int, metavar="N", help=f"timed rounds of each engine (default: {shown_repeats})")
    add_model_options(parser.add_argument_group("model").add_argument, default_preset=None)
    add_engine_options(
        parser.add_argument_group("engine").add_argument,
        max_requests=None,
        max_requests_text="default: what the scenario needs, 16 or more",
        cuda_graphs_text="0: none; default: 8",
    )


def complete(args: argparse.Namespace) -> tuple[list[str], Scenario, Any]:
    """Fill in the defaults that depend on the device, and check all that can be checked before anything runs.

    Returns:
        Names of the engines, the scenario with its sizes, the model's dimensions.

    Raises:
        InputError: Something cannot be run.
    """
    names = engine_names(args.engine, "--engine")
    if args.json is not None:
        check_writable(args.json)
    device_type = args.device or default_device()
    args.preset = args.preset or DEFAULT_PRESET[device_type]
    args.cuda_graphs = DEFAULT_CUDA_GRAPHS[device_type] if args.cuda_graphs is None else args.cuda_graphs
    kind = SCENARIOS[args.scenario]
    args.repeats = args.repeats or kind.repeats[device_type]
    for field in kind.sizes():
        if getattr(args, field.name) is None:
            setattr(args, field.name, field.metadata[device_type])
    sizes = {field.name: getattr(args, field.name) for field in kind.sizes()}
    scenario = kind(block_tokens=args.block_size_tokens, **sizes)
    args.max_requests = args.max_requests or -(-scenario.max_requests // args.tp) * args.tp
    args.max_tokens = args.max_tokens or scenario.max_tokens
    config = check_engine_options(args)
    problem = scenario.problem(args.block_size_tokens, args.max_requests)
    if problem is not None:
        raise InputError(problem)
    if scenario.longest_tokens + scenario.generated_tokens > config.max_sequence_length:
        raise InputError(
            f"{scenario.longest_tokens} + {scenario.generated_tokens} tokens are more than {args.preset} takes: "
            f"{config.max_sequence_length}"
        )
    if args.max_tokens is not None and scenario.longest_tokens > args.max_tokens and not args.chunked_prefill:
        raise InputError(
            f"prompts of {scenario.longest_tokens} tokens are more than --max-tokens {args.max_tokens}: raise it, "
            "or give --chunked-prefill"
        )
    return names, scenario, config


def default_device() -> str:
    """That of the running platform, else CUDA where there is a device."""
    import torch

    from megatron_hybrid_prefix.platform import running_platform

    running = running_platform()
    if running is not None:
        return str(running.device.type)
    return "cuda" if torch.cuda.is_available() else "cpu"


# --- Run -------------------------------------------------------------------------------------------------------------


class Bench:
    """One scenario on several engines."""

    def __init__(
        self,
        args: argparse.Namespace,
        names: list[str],
        scenario: Scenario,
        config: Any,
        platform: Any,
        interrupt: Interrupt,
    ) -> None:
        self.args, self.names, self.scenario, self.config, self.platform = args, names, scenario, config, platform
        self._interrupt = interrupt
        self.samples: dict[str, list[Sample]] = {name: [] for name in names}
        self.engines: dict[str, dict[str, Any]] = {}
        self.plain_metrics: Sequence[Metric] = ()
        self.plain_samples: list[Sample] = []

    def should_stop(self) -> bool:
        """Whether any rank got Ctrl-C; see `stop_requested`."""
        return stop_requested(self.platform, self._interrupt)

    def run(self) -> None:
        """Measure, and keep what there is to report."""
        if is_main_rank():
            self.plain_metrics, self.plain_samples = self.scenario.without_engine(self.args.repeats)
        built = contestants(
            self.names,
            self._model,
            self._fields,
            self._cache_gb,
            cuda_graphs=bool(self.args.cuda_graphs),
            crash_when_built=self.scenario.crash_is_a_result,
            should_stop=self.should_stop,
        )
        with built as every:
            self._check_fits(every)
            rooms = {contestant.name: contestant.room() for contestant in every if contestant.engine is not None}
            with progress(["rounds"], 1 + self.args.repeats) as done:
                self._rounds(every, lambda count: done("rounds", count))
            for contestant in every:
                self.engines[contestant.name] = {
                    "status": "completed" if contestant.crash is None else "crashed",
                    "error": contestant.crash,
                    "traceback": contestant.trace,
                    **rooms.get(contestant.name, {}),
                    "prefix_stats": (contestant.counters() or None) if contestant.crash is None else None,
                    "fields": {key: _plain_value(value) for key, value in plain(contestant.fields).items()},
                }

    def _rounds(self, every: Sequence[Contestant], on_round: Callable[[int], None]) -> None:
        for repeat in range(-1, self.args.repeats):  # -1: kernels are compiled; not counted
            running = [contestant for contestant in every if contestant.crash is None]
            if not running:
                return
            workload = self.scenario.workload(random.Random(f"{self.args.seed} {repeat}"), self.config.vocab_size)
            samples = self.scenario.repeat(rotated(running, repeat), workload)
            if repeat >= 0:
                for name, sample in samples.items():
                    self.samples[name].append(sample)
            on_round(repeat + 2)

    def _model(self) -> Any:
        from megatron_hybrid_prefix.models import build_hybrid_model

        overrides = {"cuda_graph_impl": "local"} if self.args.cuda_graphs else {}
        with as_input_errors(ValueError, PlatformError):
            return build_hybrid_model(self.config, seed=self.args.seed, platform=self.platform, **overrides)

    def _fields(self, model: Any) -> dict[str, Any]:
        fields = engine_fields(self.args, self.platform.device.type, self.scenario.longest_tokens)
        budgets = self._budgets(model)
        if "buffer_gb" in budgets:
            fields["buffer_size_gb"] = budgets["buffer_gb"]
        return fields | state_dtype_field(model, self.args.state_dtype)

    def _cache_gb(self, model: Any) -> tuple[float, float]:
        budgets = self._budgets(model)
        return budgets["mamba_gb"], budgets["host_gb"]

    def _budgets(self, model: Any) -> dict[str, float]:
        """GiB on this rank: an option, else the scenario's, else a default."""
        given = {"buffer_gb": self.args.buffer_gb, "mamba_gb": self.args.mamba_gb, "host_gb": self.args.host_gb}
        budgets = {"mamba_gb": DEFAULT_MAMBA_GB[self.platform.device.type], "host_gb": 0.0}
        budgets |= self.scenario.budgets(machine_of(model, self.args))
        return budgets | {name: value for name, value in given.items() if value is not None}

    def _check_fits(self, every: Sequence[Contestant]) -> None:
        from megatron_hybrid_prefix.mcore.runner import check_fits

        for contestant in every:
            if contestant.engine is not None:
                with as_input_errors(ValueError, prefix=f"engine {contestant.name}: "):
                    check_fits(contestant.engine, self.scenario.longest_tokens, self.scenario.generated_tokens)


def machine_of(model: Any, args: argparse.Namespace) -> Machine:
    """Sizes of the model's KV blocks and states on this rank."""
    from megatron_hybrid_prefix.mcore.entrypoints.build import mamba_state_config, state_bytes

    given = state_dtype_field(model, args.state_dtype).get("mamba_inference_state_config")
    states = given or mamba_state_config(model)
    if states is None:
        raise InputError(f"{args.preset} has no recurrent layers: there is nothing to compare")
    config = model.config
    heads = config.num_query_groups // config.tensor_model_parallel_size
    attention_layers = sum(symbol == "*" for symbol in states.layer_type_list)
    token_bytes = 2 * attention_layers * heads * config.kv_channels * config.params_dtype.itemsize
    return Machine(
        block_tokens=args.block_size_tokens,
        block_bytes=args.block_size_tokens * token_bytes,
        state_bytes=state_bytes(states),
        max_requests=args.max_requests,
    )


def _plain_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return str(value)
    return value


# --- Command ---------------------------------------------------------------------------------------------------------


def as_json(bench: Bench, command: Sequence[str]) -> dict[str, Any]:
    """Everything that was measured, and where."""
    args, scenario = bench.args, bench.scenario
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    return {
        "scenario": scenario.name,
        "workload": scenario.describe(),
        "versions": versions(),
        "platform": bench.platform.describe(),
        "hardware": hardware(bench.platform),
        "command": shlex.join(command),
        "options": options,
        "garbage": "collected before each timed round, not during it",
        "engines": bench.engines,
        "metrics": summarise(scenario.metrics(), bench.samples, crashed_engines(bench)),
        "control_plane": summarise(bench.plain_metrics, {"cache": bench.plain_samples}),
    }


def crashed_engines(bench: Bench) -> list[str]:
    """Names of the engines that did not come to the end."""
    return [name for name, engine in bench.engines.items() if engine["status"] == "crashed"]


def print_report(console: Console, bench: Bench, report: dict[str, Any]) -> None:
    """The workload, tables, what each engine had, and who crashed."""
    args, scenario = bench.args, bench.scenario
    graphs = f"{args.cuda_graphs} CUDA graphs" if args.cuda_graphs else "no CUDA graphs"
    console.print(f"{scenario.name}: {scenario.describe()}", markup=False, soft_wrap=True)
    console.print(f"{args.preset}, {graphs}; rounds: 1 to warm up, {args.repeats} timed", markup=False, soft_wrap=True)
    if bench.plain_metrics:
        console.print(plain_table("control plane", bench.plain_metrics, report["control_plane"], "cache"))
    console.print(engine_table("engines side by side", scenario.metrics(), report["metrics"], bench.names))
    for name, engine in bench.engines.items():
        room = (
            f": {engine['kv_blocks']} KV blocks, {engine['state_slots']} state slots" if "kv_blocks" in engine else ""
        )
        crash = f" crashed: {engine['error']}" if engine["status"] == "crashed" else ""
        line = f"engine {name}{room}{';' if room and crash else ''}{crash}"
        console.print(printable(line), markup=False, soft_wrap=True)


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> int:
    """The whole command; see the module's docstring."""
    args = make_parser().parse_args(argv)
    command = [Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)]
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
                text = json.dumps(report, indent=1, allow_nan=False)
                write_whole(args.json, lambda part: part.write_text(text + "\n", encoding="utf-8"))
                console.print(f"wrote {args.json}", markup=False, soft_wrap=True)
    return EXIT_CRASHED if set(crashed_engines(bench)) - {"upstream"} else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command(lambda interrupt: run(argv, interrupt))


if __name__ == "__main__":
    sys.exit(main())
