"""The command `bench all`: every scenario, each in a process of its own, into one JSON; `report`: tables and plots of it.

A process each, so that one that fails, or leaves its device in a bad way, does not end the others; with ``--gpus`` so many at
a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megatron_hybrid_prefix.bench.report import write_report
from megatron_hybrid_prefix.bench.scenarios import SCENARIOS
from megatron_hybrid_prefix.console import terminal
from megatron_hybrid_prefix.console.engine_options import positive_int
from megatron_hybrid_prefix.console.terminal import InputError, Interrupt

# Runs one scenario.
BENCH = (sys.executable, "-m", "megatron_hybrid_prefix", "bench")
KIND = "megatron_hybrid_prefix benchmarks"  # what the JSON says it is
EXIT_FAILED = 1
# Sizes of --quick: enough to see each scenario's effect, not to measure it.
QUICK: dict[str, dict[str, float]] = {
    name: {field.name: value for field in kind.sizes() if (value := field.metadata["quick"]) is not None}
    for name, kind in SCENARIOS.items()
}
QUICK_REPEATS = 2
# Options of its own; all others are handed on to each scenario.
OWN = ("scenario", "scenarios", "quick", "gpus", "json", "report")
# Those that say how figures were had, one by one, and are said once for all.
COMMON = ("versions", "platform", "hardware")


# --- Options ---------------------------------------------------------------------------------------------------------


def add_commands(commands: Any, add_common: Callable[..., None]) -> None:
    """The commands ``all`` and ``report``.

    Args:
        commands: argparse's subparsers.
        add_common: Adds ``--engine``, ``--repeats``, and the options of the model and the engines to a parser.
    """
    doc = "every scenario with its defaults, one JSON; with --report tables and plots, too"
    command = commands.add_parser("all", help=doc, description=doc, allow_abbrev=False)
    add = command.add_argument
    add("--scenarios", default=",".join(SCENARIOS), metavar="NAMES", help="by comma (default: %(default)s)")
    add("--quick", action="store_true", help=f"small sizes and {QUICK_REPEATS} rounds: to see that it works")
    text = "scenarios at a time, each on a GPU of its own (default: 1)"
    add("--gpus", type=positive_int, default=1, metavar="N", help=text)
    add("--json", type=Path, default=Path("bench.json"), metavar="PATH", help="what is measured (default: %(default)s)")
    add("--report", type=Path, metavar="FOLDER", help="write tables and plots there")
    add_common(command)
    doc = "tables (report.md) and plots of a JSON that `all` wrote"
    command = commands.add_parser("report", help=doc, description=doc, allow_abbrev=False)
    command.add_argument("input", type=Path, metavar="JSON")
    command.add_argument("folder", type=Path, metavar="FOLDER")


def gpu_count() -> int:
    """GPUs that this process sees."""
    import torch

    count: int = torch.cuda.device_count()
    return count


# --- Running ---------------------------------------------------------------------------------------------------------


def run_all(args: argparse.Namespace, command: str, interrupt: Interrupt) -> int:
    """Run them one after another; what there is gets written after each, so that little is lost.

    Returns:
        0; `EXIT_FAILED` if a scenario failed or an engine other than upstream's crashed in it; 130 after Ctrl-C.
    """
    names = terminal.split_names(args.scenarios, SCENARIOS, "a scenario", "--scenarios")
    terminal.check_writable(args.json)
    if args.report is not None:
        terminal.check_can_plot("--report")
        terminal.check_folder(args.report, "--report")
    if terminal.has_other_ranks():
        raise InputError("all starts a process for each scenario: run scenarios one by one under torchrun")
    if args.gpus > 1 and args.gpus > (gpus := gpu_count()):
        raise InputError(f"--gpus {args.gpus}: there are {gpus}")
    data: dict[str, Any] = {"kind": KIND, "command": command, "quick": args.quick, "scenarios": {}}
    if args.gpus > 1:
        data["gpus"] = args.gpus
    stopped = False
    for name, found in run_scenarios(names, args, interrupt):
        stopped = stopped or found["status"] == "interrupted" or interrupt.requested
        if found["status"] == "interrupted" and not found.get("result"):
            continue
        data["scenarios"][name] = found
        data["scenarios"] = {known: data["scenarios"][known] for known in names if known in data["scenarios"]}
        for key in COMMON:
            if key in found["result"]:
                data.setdefault(key, found["result"][key])
        terminal.write_json(args.json, data)
    if stopped:
        print(f"interrupted: {len(data['scenarios'])} of {len(names)} scenarios are in {args.json}", file=sys.stderr)
        return 130
    print(f"wrote {args.json}")
    if args.report is not None:
        print(f"wrote {write_report(data, args.report)}")
    failed = [name for name, found in data["scenarios"].items() if found["status"] != "completed"]
    for name in failed:
        print(terminal.printable(f"{name} {data['scenarios'][name]['status']}: {data['scenarios'][name]['error']}"))
    return EXIT_FAILED if failed else 0


def run_scenarios(
    names: Sequence[str], args: argparse.Namespace, interrupt: Interrupt
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What `run_one` says of each, as they end."""
    if args.gpus == 1:
        for number, name in enumerate(names, 1):
            print(f"--- {number} of {len(names)}: {name}", flush=True)
            found = run_one(name, args)
            yield name, found
            if found["status"] == "interrupted" or interrupt.requested:
                return
        return
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    free: SimpleQueue[str] = SimpleQueue()
    for gpu in given.split(",")[: args.gpus] if given else map(str, range(args.gpus)):
        free.put(gpu)

    def on_a_gpu(name: str) -> dict[str, Any]:
        if interrupt.requested:
            return {"status": "interrupted"}
        gpu = free.get()
        try:
            return run_one(name, args, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(args.gpus) as pool:
        running = {pool.submit(on_a_gpu, name): name for name in names}
        for number, ended in enumerate(as_completed(running), 1):
            print(f"--- {number} of {len(names)}: {running[ended]}", flush=True)
            found = ended.result()
            print(found.pop("output", ""), flush=True)
            yield running[ended], found


def run_one(name: str, args: argparse.Namespace, gpu: str | None = None) -> dict[str, Any]:
    """One scenario in a process of its own.

    Args:
        name: Which.
        args: Options.
        gpu: Which one it sees, beside others; None: it is alone, and shows what it does as it does it.

    Returns:
        ``status`` (completed; crashed: an engine did; failed: there are no figures; interrupted), ``error``, ``exit_code``, and
        ``result``: what ``--json`` of the scenario wrote; ``output``, what it would have shown.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "result.json"
        argv = [name, *options_of(name, args)]
        process = subprocess.Popen(
            [*BENCH, *argv, "--json", str(path)],
            env=None if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
            stdout=None if gpu is None else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        output, errors = process.communicate()
        result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if result:  # what to type for it; the file is gone
        result["command"], result["options"]["json"] = terminal.command_line(argv), None
    code = process.returncode
    if code:
        sys.stderr.write(errors)
    crashed = {engine: one["error"] for engine, one in result.get("engines", {}).items() if one["status"] == "crashed"}
    if code == 130:
        status, error = "interrupted", None
    elif code == 0 and result:
        status, error = "completed", None
    elif result and crashed:
        status, error = "crashed", "; ".join(f"engine {engine}: {text}" for engine, text in crashed.items())
    else:
        lines = [line for line in errors.splitlines() if line.strip()]
        status, error = "failed", lines[-1].strip() if lines else f"ended with {code}"
    return {"status": status, "error": error, "exit_code": code, "result": result} | (
        {"output": output} if output is not None else {}
    )


def options_of(name: str, args: argparse.Namespace) -> list[str]:
    """Options that the scenario's own command is given."""
    options = {key: value for key, value in vars(args).items() if key not in OWN}
    if args.quick:
        options |= QUICK[name] | {"repeats": args.repeats or QUICK_REPEATS}
    argv: list[str] = []
    for key, value in options.items():
        if value is True:
            argv.append(_option(key))
        elif value is not None and value is not False:
            argv += [_option(key), str(value)]
    return argv


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def run_report(args: argparse.Namespace) -> int:
    """Tables and plots of a file, again. Raises InputError if it is not what `run_all` writes."""
    terminal.check_can_plot("report")
    terminal.check_folder(args.folder, "FOLDER")
    try:
        data = json.loads(terminal.read_text(args.input))
    except json.JSONDecodeError as error:
        raise InputError(f"{args.input}: no JSON: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InputError(f"{args.input} was not written by `bench.py all`")
    print(f"wrote {write_report(data, args.folder)}")
    return 0
