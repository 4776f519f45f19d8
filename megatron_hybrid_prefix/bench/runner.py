"""Runs one scenario on several engines in turn, and reports the figures."""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_hybrid_prefix.bench.engines import Contestant, GraphRecords
from megatron_hybrid_prefix.bench.floor import kv_token_bytes
from megatron_hybrid_prefix.bench.scenario import Scenario
from megatron_hybrid_prefix.bench.stats import Metric, Sample, number_text, rotated, side_by_side, summarise
from megatron_hybrid_prefix.console import terminal
from megatron_hybrid_prefix.console.engine_options import (
    ENGINES,
    Budgets,
    budget_of,
    check_memory,
    engine_fields,
    plain,
    state_dtype_field,
)
from megatron_hybrid_prefix.console.hf import build_model
from megatron_hybrid_prefix.console.plots import draw_bars
from megatron_hybrid_prefix.console.running import free_for_engines, hardware, stop_requested, versions
from megatron_hybrid_prefix.console.terminal import InputError, Interrupt, Stopped


class Bench:
    """One scenario, run on several engines.

    Args:
        args: Options.
        contestants: The engines, not built yet.
        scenario: With its sizes.
        config: Dimensions of the model.
        platform: It runs.
        interrupt: Ctrl-C.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        contestants: Sequence[Contestant],
        scenario: Scenario,
        config: Any,
        platform: Any,
        interrupt: Interrupt,
    ) -> None:
        self.args, self.scenario, self.config, self.platform = args, scenario, config, platform
        self.contestants, self._interrupt = contestants, interrupt
        self.samples: dict[str, list[Sample]] = {contestant.name: [] for contestant in contestants}
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
        with self._built():
            rooms = {one.name: one.room() for one in self.contestants if one.engine is not None}
            status, error = "completed", None
            with terminal.progress(["rounds"], 1 + self.args.repeats) as done:
                try:
                    self._rounds(lambda count: done("rounds", count))
                except Stopped:
                    rounds = max(map(len, self.samples.values()))
                    status, error = "interrupted", f"after {rounds} of {self.args.repeats} rounds"
            for contestant in self.contestants:
                self.engines[contestant.name] = {
                    "kind": contestant.kind,
                    "status": status if contestant.crash is None else "crashed",
                    "error": error if contestant.crash is None else contestant.crash,
                    "traceback": contestant.trace,
                    "budget": budget_of(contestant.fields),
                    **rooms.get(contestant.name, {}),
                    "prefix_stats": (contestant.counters() or None) if contestant.crash is None else None,
                    "fields": plain(contestant.fields),
                }

    def _rounds(self, on_round: Callable[[int], None]) -> None:
        for repeat in range(-1, self.args.repeats):  # round -1 warms up (compiles kernels) and is not counted
            running = [contestant for contestant in self.contestants if contestant.crash is None]
            if not running:
                return
            workload = self.scenario.workload(random.Random(f"{self.args.seed} {repeat}"), self.config.vocab_size)
            samples = self.scenario.repeat(rotated(running, repeat), workload)
            if repeat >= 0:
                for name, sample in samples.items():
                    self.samples[name].append(sample)
            on_round(repeat + 2)

    @contextmanager
    def _built(self) -> Iterator[None]:
        """Builds all engines. They share a model, or with CUDA graphs, which are tied to its modules, each has its own."""
        from megatron_hybrid_prefix.mcore.runner import check_fits, release_engine

        graphs = GraphRecords() if self.args.cuda_graphs else None
        refusals = () if self.scenario.crash_is_a_result else (ValueError,)
        model, free_bytes = None, 0
        try:
            for one in self.contestants:
                if self.should_stop():
                    raise Stopped
                one.should_stop = self.should_stop
                if graphs is not None:
                    graphs.begin()
                if model is None or graphs is not None:
                    model = build_model(one.args, self.config, self.platform)
                free_bytes = free_bytes or self._free_bytes(model)
                one.fields = self._fields(one, model, free_bytes)
                with one.attempt(), terminal.as_input_errors(*refusals, prefix=f"engine {one.name}: "):
                    one.build(model)
                if graphs is not None:
                    graphs.end()
            for one in self.contestants:
                if one.engine is not None:
                    with terminal.as_input_errors(ValueError, prefix=f"engine {one.name}: "):
                        check_fits(one.engine, self.scenario.longest_tokens, self.scenario.generated_tokens)
            # All objects up to here stay, so the collector need not scan them before each round.
            gc.collect()
            gc.freeze()
            yield
        finally:
            gc.unfreeze()
            if graphs is not None:
                graphs.put_back()
            for one in self.contestants:
                if one.engine is not None:
                    release_engine(one.engine)

    def _free_bytes(self, model: Any) -> int:
        """Memory for all engines, now that the first has its model; with CUDA graphs each of the others gets one."""
        models = len(self.contestants) - 1 if self.args.cuda_graphs else 0
        model_bytes: int = sum(parameter.nbytes for parameter in model.parameters())
        return free_for_engines(self.platform) - models * model_bytes

    def _fields(self, one: Contestant, model: Any, free_bytes: int) -> dict[str, Any]:
        """Arguments of an engine. Memory is that of the options, else of the scenario, else what is free."""
        device = self.platform.device
        block_bytes, state_bytes, ring_bytes = bytes_of(model, self.args)
        of_scenario = self.scenario.budgets(block_bytes, state_bytes, self.args.max_requests)
        if "cache_gb" in of_scenario:
            of_scenario["cache_gb"] += ring_bytes / 2**30
        budgets = Budgets.of(
            one.args,
            device.type,
            free_bytes=free_bytes,
            engines=len(self.contestants),
            **of_scenario,
        )
        check_memory(budgets, device, f"engine {one.name}: ")
        fields = engine_fields(one.args, device.type, self.scenario.longest_tokens)
        return fields | state_dtype_field(model, one.args.state_dtype) | ENGINES[one.kind](budgets)


def bytes_of(model: Any, args: argparse.Namespace) -> tuple[int, int, int]:
    """Bytes of a KV block, of a state, and of the rings of all requests on this rank."""
    from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config, states_of_config

    given = state_dtype_field(model, args.state_dtype).get("mamba_inference_state_config")
    states = given or mamba_state_config(model)
    if states is None:
        raise InputError(f"--preset {args.preset}: the model has no recurrent layers; choose a hybrid model")
    of_model = states_of_config(states)
    of_steps = {"block_tokens": args.block_size_tokens, "drafts": getattr(args, "num_speculative_tokens", 0) or 0}
    rings = of_model.rings(model.config.params_dtype, **of_steps)
    block_bytes = args.block_size_tokens * kv_token_bytes(model.config, states)
    return block_bytes, of_model.slots.slot_bytes, rings.bytes(args.max_requests)


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
    """Names of the engines that crashed, in the report."""
    return [name for name, engine in bench.engines.items() if engine["status"] == "crashed"]


def print_report(console: Console, bench: Bench, report: dict[str, Any]) -> None:
    """Prints the workload, the tables, each engine's capacity, and the crashes."""
    args, scenario = bench.args, bench.scenario
    graphs = _graphs(args)
    console.print(f"{scenario.name}: {scenario.describe()}", markup=False, soft_wrap=True)
    console.print(f"{args.preset}, {graphs}; rounds: 1 warm-up, {args.repeats} timed", markup=False, soft_wrap=True)
    if bench.plain_metrics:
        console.print(side_by_side("control plane", report["control_plane"]))
    console.print(side_by_side("engines side by side", report["metrics"]))
    for name, engine in bench.engines.items():
        room = f": {_room(engine)}" if "kv_blocks" in engine else ""
        crash = f" {engine['status']}: {engine['error']}" if engine["error"] else ""
        settings = f" ({engine['kind']} with {' '.join(args.versus)})" if name == "versus" else ""
        line = f"engine {name}{settings}{room}{';' if room and crash else ''}{crash}"
        console.print(terminal.printable(line), markup=False, soft_wrap=True)


def _graphs(args: argparse.Namespace) -> str:
    count = {0: "no ", -1: ""}.get(args.cuda_graphs, f"{args.cuda_graphs} ")
    return f"{count}CUDA graphs"


def _room(engine: dict[str, Any]) -> str:
    """An engine's budget and what fits, in words."""
    budget = ", ".join(f"{name} {value:.4g}" for name, value in engine["budget"].items())
    both = " or " if "cache_gb" in engine["budget"] else ", "
    return f"{engine['kv_blocks']} KV blocks{both}{engine['state_slots']} state slots ({budget})"


def draw(path: Path, bench: Bench, report: dict[str, Any]) -> None:
    """Bars of the medians of the scenario's `drawn` metrics; a whisker is the least and the largest sample.

    Args:
        path: PNG or SVG, by its ending.
        bench: Its scenario has run.
        report: Of `as_json`.
    """
    args, engines, metrics = bench.args, list(bench.samples), [report["metrics"][name] for name in bench.scenario.drawn]
    machine = report["hardware"].get("gpu") or report["hardware"]["processor"]
    graphs = _graphs(args)
    versus = f" versus: {bench.engines['versus']['kind']} with {' '.join(args.versus)}." if args.versus else ""
    draw_bars(
        path,
        [metric["label"] for metric in metrics],
        {engine: [metric["median"][engine] for metric in metrics] for engine in engines},
        title=bench.scenario.name,
        subtitle=f"{args.preset} on {machine}, {graphs}: {bench.scenario.describe()}. Medians of {args.repeats}.{versus}",
        figure_of=lambda value: number_text(value, 3),
        ranges={engine: [metric["samples"][engine] for metric in metrics] for engine in engines},
        notes={(name, 0): "crashed" for name in crashed_engines(bench)},
    )
