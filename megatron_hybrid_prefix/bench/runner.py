"""Runs one scenario on several engines in turn, and reports the figures."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_hybrid_prefix.bench.engines import Contestant, contestants
from megatron_hybrid_prefix.bench.floor import kv_token_bytes
from megatron_hybrid_prefix.bench.scenario import Scenario
from megatron_hybrid_prefix.bench.stats import Metric, Sample, rotated, side_by_side, summarise
from megatron_hybrid_prefix.console import terminal
from megatron_hybrid_prefix.console.engine_options import (
    Budgets,
    budget_of,
    engine_fields,
    options_of,
    plain,
    state_dtype_field,
)
from megatron_hybrid_prefix.console.hf import build_model
from megatron_hybrid_prefix.console.running import free_for_engines, hardware, stop_requested, versions
from megatron_hybrid_prefix.console.terminal import InputError, Interrupt, Stopped


class Bench:
    """One scenario, run on several engines."""

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
        """Whether Ctrl-C was pressed on any rank; see `stop_requested`."""
        return stop_requested(self.platform, self._interrupt)

    def run(self) -> None:
        """Runs all rounds, and keeps the figures; after Ctrl-C those of the rounds that were complete."""
        if terminal.is_main_rank():
            self.plain_metrics, self.plain_samples = self.scenario.without_engine(self.args.repeats)
        built = contestants(
            self.names,
            self._model,
            self._fields,
            self._budgets,
            cuda_graphs=bool(self.args.cuda_graphs),
            crash_when_built=self.scenario.crash_is_a_result,
            should_stop=self.should_stop,
        )
        with built as every:
            self._check_fits(every)
            rooms = {contestant.name: contestant.room() for contestant in every if contestant.engine is not None}
            status, error = "completed", None
            with terminal.progress(["rounds"], 1 + self.args.repeats) as done:
                try:
                    self._rounds(every, lambda count: done("rounds", count))
                except Stopped:
                    rounds = max(map(len, self.samples.values()))
                    status, error = "interrupted", f"after {rounds} of {self.args.repeats} rounds"
            for contestant in every:
                self.engines[contestant.name] = {
                    "status": status if contestant.crash is None else "crashed",
                    "error": error if contestant.crash is None else contestant.crash,
                    "traceback": contestant.trace,
                    "budget": budget_of(contestant.fields),
                    **rooms.get(contestant.name, {}),
                    "prefix_stats": (contestant.counters() or None) if contestant.crash is None else None,
                    "fields": plain(contestant.fields),
                }

    def _rounds(self, every: Sequence[Contestant], on_round: Callable[[int], None]) -> None:
        for repeat in range(-1, self.args.repeats):  # round -1 warms up (compiles kernels) and is not counted
            running = [contestant for contestant in every if contestant.crash is None]
            if not running:
                return
            workload = self.scenario.workload(random.Random(f"{self.args.seed} {repeat}"), self.config.vocab_size)
            samples = self.scenario.repeat(rotated(running, repeat), workload)
            if repeat >= 0:
                for name, sample in samples.items():
                    self.samples[name].append(sample)
            on_round(repeat + 2)

    def _model(self, name: str) -> Any:
        return build_model(options_of(name, self.args), self.config, self.platform)

    def _fields(self, name: str, model: Any) -> dict[str, Any]:
        args = options_of(name, self.args)
        fields = engine_fields(args, self.platform.device.type, self.scenario.longest_tokens)
        return fields | state_dtype_field(model, args.state_dtype)

    def _budgets(self, model: Any) -> Budgets:
        """From the options, else from the scenario, else from the memory that is free for all engines."""
        free_bytes = free_for_engines(self.platform)
        if self.args.cuda_graphs:  # each of the other engines gets a model of its own
            model_bytes = sum(parameter.nbytes for parameter in model.parameters())
            free_bytes -= (len(self.names) - 1) * model_bytes
        return Budgets.of(
            self.args,
            self.platform.device.type,
            free_bytes=free_bytes,
            engines=len(self.names),
            **self.scenario.budgets(*bytes_of(model, self.args), self.args.max_requests),
        )

    def _check_fits(self, every: Sequence[Contestant]) -> None:
        from megatron_hybrid_prefix.mcore.runner import check_fits

        for contestant in every:
            if contestant.engine is not None:
                with terminal.as_input_errors(ValueError, prefix=f"engine {contestant.name}: "):
                    check_fits(contestant.engine, self.scenario.longest_tokens, self.scenario.generated_tokens)


def bytes_of(model: Any, args: argparse.Namespace) -> tuple[int, int]:
    """Bytes of a KV block and of a state on this rank."""
    from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config, state_bytes

    given = state_dtype_field(model, args.state_dtype).get("mamba_inference_state_config")
    states = given or mamba_state_config(model)
    if states is None:
        raise InputError(f"--preset {args.preset}: the model has no recurrent layers; choose a hybrid model")
    return args.block_size_tokens * kv_token_bytes(model.config, states), state_bytes(states)


# --- Report ----------------------------------------------------------------------------------------------------------


def as_json(bench: Bench, command: str) -> dict[str, Any]:
    """All figures, with versions, hardware and options."""
    args, scenario = bench.args, bench.scenario
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    return {
        "scenario": scenario.name,
        "workload": scenario.describe(),
        "versions": versions(),
        "platform": bench.platform.describe(),
        "hardware": hardware(bench.platform),
        "command": command,
        "options": options,
        "garbage": "collected before each timed round, not during it",
        "engines": bench.engines,
        "metrics": summarise(scenario.metrics(), bench.samples, crashed_engines(bench)),
        "control_plane": summarise(bench.plain_metrics, {"cache": bench.plain_samples}),
    }


def crashed_engines(bench: Bench) -> list[str]:
    """Names of the engines that crashed."""
    return [name for name, engine in bench.engines.items() if engine["status"] == "crashed"]


def print_report(console: Console, bench: Bench, report: dict[str, Any]) -> None:
    """Prints the workload, the tables, each engine's capacity, and the crashes."""
    args, scenario = bench.args, bench.scenario
    graphs = f"{args.cuda_graphs} CUDA graphs" if args.cuda_graphs else "no CUDA graphs"
    console.print(f"{scenario.name}: {scenario.describe()}", markup=False, soft_wrap=True)
    console.print(f"{args.preset}, {graphs}; rounds: 1 warm-up, {args.repeats} timed", markup=False, soft_wrap=True)
    if bench.plain_metrics:
        console.print(side_by_side("control plane", report["control_plane"]))
    console.print(side_by_side("engines side by side", report["metrics"]))
    for name, engine in bench.engines.items():
        room = f": {_room(engine)}" if "kv_blocks" in engine else ""
        crash = f" {engine['status']}: {engine['error']}" if engine["error"] else ""
        line = f"engine {name}{room}{';' if room and crash else ''}{crash}"
        console.print(terminal.printable(line), markup=False, soft_wrap=True)


def _room(engine: dict[str, Any]) -> str:
    """An engine's budget and what fits, in words."""
    budget = ", ".join(f"{name} {value:.4g}" for name, value in engine["budget"].items())
    both = " or " if "cache_gb" in engine["budget"] else ", "
    return f"{engine['kv_blocks']} KV blocks{both}{engine['state_slots']} state slots ({budget})"
