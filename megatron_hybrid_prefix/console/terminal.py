"""Shared by all commands: one-line errors, Ctrl-C, atomic output files, progress bars, tables, plots.

This module imports neither torch nor megatron, so that bad input is reported at once.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_hybrid_prefix.console.plots import FORMATS, draw_lines, page, styles_of
from megatron_hybrid_prefix.errors import PluginError

EXIT_INPUT = 2
EXIT_INTERRUPTED = 130
# The terminal and torchrun both send SIGINT for one Ctrl-C. Signals closer than this count as one.
_SAME_SIGINT_S = 1.0
# torchrun ends all ranks soon after the first one exits. This gives rank 0 time to print its error.
_LET_RANK_0_SPEAK_S = 3.0
# What PyTorch says if host memory is short; it has no class for it.
_NO_HOST_MEMORY = ("DefaultCPUAllocator", "Storage size calculation overflowed")
# Most requests whose answers are printed in full.
_SHOW_WHOLE_TEXTS = 4


class InputError(Exception):
    """Bad input. Printed as one line; exit code 2."""


class Stopped(Exception):
    """Ctrl-C was pressed. Raised on all ranks at the same step; exit code 130."""


def is_main_rank() -> bool:
    """Whether this is rank 0, which prints and writes. Needs no torch.distributed."""
    return int(os.environ.get("RANK", "0")) == 0


def has_other_ranks() -> bool:
    """Whether torchrun started several processes. Needs no torch.distributed."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser that raises `InputError`."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def command_line(argv: Sequence[str]) -> str:
    """The command line as it can be typed again."""
    return f"{Path(sys.argv[0]).name} {shlex.join(argv)}"


class Interrupt:
    """A context manager: the first SIGINT sets ``requested``, the second one ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self._since_s = 0.0
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        # After a Ctrl-C keep the handler: a second one must not raise during the interpreter's shutdown.
        if self._previous is not None and not self.requested:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.requested:
            self.requested, self._since_s = True, now_s
        elif now_s - self._since_s > _SAME_SIGINT_S:
            os._exit(EXIT_INTERRUPTED)


def run_command(command: Callable[[Interrupt], int | None]) -> int:
    """Runs a command and returns its exit code. Rank 0 prints errors on stderr."""
    with Interrupt() as interrupt:
        try:
            return command(interrupt) or 0
        except (InputError, PluginError, OSError) as error:
            if (
                isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG
            ):  # any question about a path may raise it
                raise
            if is_main_rank():
                print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
            else:
                time.sleep(_LET_RANK_0_SPEAK_S)
            return EXIT_INPUT
        except Stopped:
            if is_main_rank():
                print("interrupted: nothing was written", file=sys.stderr, flush=True)
            return EXIT_INTERRUPTED


@contextmanager
def as_input_errors(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """A context that turns exceptions of these kinds into `InputError`."""
    try:
        yield
    except kinds as error:
        raise InputError(prefix + one_line(error)) from error


@contextmanager
def as_memory_errors(what: str, advice: str) -> Iterator[None]:
    """A context that turns the lack of memory for ``what`` into `InputError`, with advice."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_short = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_short and not any(text in str(error) for text in _NO_HOST_MEMORY):
            raise
        raise InputError(f"{what}: not enough memory; {advice}: {one_line(error)}") from error


def split_names(text: str, known: Iterable[str], what: str, option: str) -> list[str]:
    """Splits a comma-separated list of names.

    Args:
        text: The value of ``option``.
        known: All valid names.
        what: What a name stands for, with an article, for messages: "an engine".
        option: The option, for messages.

    Raises:
        InputError: A name is unknown or given twice.
    """
    names, known = text.split(","), list(known)
    for name in names:
        if name not in known:
            raise InputError(f"{option}: no {what.split()[-1]} {name!r}; there are: {', '.join(known)}")
    if len(set(names)) < len(names):
        raise InputError(f"{option}: {text} names {what} twice")
    return names


def one_line(error: Exception) -> str:
    """The message in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def check_writable(path: Path) -> None:
    """Checks at the start that `write_whole` can write a file.

    Raises:
        InputError: A file cannot be written at ``path``.
    """
    if str(path) == "-":
        raise InputError("cannot write to -: standard output has the report, so name a file")
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    if path.exists() and not path.is_file():
        raise InputError(f"cannot write {path}: it is no regular file")
    _check_parent(path)


def check_folder(path: Path, option: str, *, empty: bool = False) -> None:
    """Checks at the start that a folder can be filled: one that is there, or a new one in a folder that is there.

    Raises:
        InputError: It cannot; names ``option``. ``empty``: also if there is something in it.
    """
    if path.is_dir():
        if empty and any(path.iterdir()):
            raise InputError(f"{option}: {path} is not empty")
        _check_parent(path / "x")
        return
    if path.exists():
        raise InputError(f"{option}: cannot write {path}: it is no folder")
    _check_parent(path)


def _check_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    with _as_write_errors(path):
        _beside(path).cleanup()


def _beside(path: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")


@contextmanager
def _as_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def check_can_plot(option: str, path: Path | None = None) -> None:
    """Checks at the start that plots can be drawn, and written to ``path``.

    Raises:
        InputError: matplotlib is not installed, but ``option`` needs it; or the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise InputError(f"{option} needs matplotlib: pip install 'megatron-hybrid-prefix[bench]'")
    if path is None:
        return
    check_writable(path)
    if path.suffix.lower() not in FORMATS:
        *others, last = FORMATS
        raise InputError(f"{option}: {path} must end with {', '.join(others)} or {last}")


def read_text(path: Path) -> str:
    """The file as UTF-8 text, without a byte order mark. ``-`` is standard input.

    Raises:
        InputError: The file cannot be read, or is not text.
    """
    try:
        return _standard_input() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "; unpack it first" if path.suffix in (".gz", ".zst", ".xz", ".bz2", ".zip") else ""
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}){hint}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def _standard_input() -> str:
    if has_other_ranks():
        raise InputError("standard input (-) goes to one process, and several ranks need it: give a file")
    data = sys.stdin.buffer.read()
    if not data:
        raise InputError("standard input (-) is empty, or was read before")
    return data.decode("utf-8-sig")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file atomically: ``write`` fills a temporary file, which is then moved to ``path``.

    Raises:
        InputError: It cannot be written.
    """
    with _as_write_errors(path), _beside(path) as folder:
        part = Path(folder) / path.name
        write(part)
        os.replace(part, path)


def write_json(path: Path, data: Any) -> None:
    """Writes ``data`` as JSON, atomically. Raises ValueError for NaN and infinity."""
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def printable(text: str) -> str:
    """``text`` without control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def excerpt(text: str, width: int) -> str:
    """The start of ``text`` in one line of at most ``width`` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else line[: width - 1] + "…"


def output_console() -> Console:
    """A console on stdout, as wide as the terminal; 140 columns for a file or pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


@contextmanager
def progress(names: Sequence[str], total: int) -> Iterator[Callable[[str, int], None]]:
    """Progress bars on stderr, one per name. Silent if stderr is not a terminal, and on ranks other than 0.

    Yields:
        A function that sets how many of ``total`` are done for a name.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=console, transient=True, disable=not (console.is_terminal and is_main_rank()))
    with bars:
        tasks = {name: bars.add_task(name, total=total, start=False) for name in names}

        def done(name: str, count: int) -> None:
            bars.start_task(tasks[name])
            bars.update(tasks[name], completed=count)

        yield done


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt. ``sampling`` has fields of megatron's ``SamplingParams``."""

    label: str
    tokens: list[int]
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """Results of one engine, in the order of the requests; total seconds; statistics of this package's cache."""

    name: str
    requests: list[Request]
    results: list[Any]
    wall_s: float
    prefix_stats: dict[str, Any] | None = None


def compare(first: EngineRun, other: EngineRun) -> list[dict[str, Any]]:
    """Compares two runs, one entry per request. Log-probs are compared up to the first different token."""
    entries = []
    for request, a, b in zip(first.requests, first.results, other.results, strict=True):
        equal = a.generated == b.generated
        pairs = zip(a.generated, b.generated, strict=False)
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.generated), len(b.generated)))
        gaps = [abs(x - y) for x, y in zip(a.log_probs[:same], b.log_probs[:same], strict=False)]
        entries.append(
            {
                "label": request.label,
                "tokens_equal": equal,
                "first_difference": None if equal else same,
                "compared_log_probs": len(gaps),
                "max_log_prob_difference": max(gaps, default=None),
            }
        )
    return entries


def totals(run: EngineRun) -> dict[str, Any]:
    """Sums over an engine's requests."""
    keys = ("prompt_tokens", "computed_tokens", "reused_tokens", "recomputed_tokens")
    sums: dict[str, Any] = {key: sum(getattr(result, key) for result in run.results) for key in keys}
    generated = sum(len(result.generated) for result in run.results)
    return sums | {
        "requests": len(run.results),
        "failed_requests": sum(result.status == "failed" for result in run.results),
        "generated_tokens": generated,
        "wall_s": run.wall_s,
        "generated_tokens_per_second": generated / run.wall_s,
    }


def print_report(console: Console, runs: list[EngineRun], comparisons: list[dict[str, Any]]) -> None:
    """Prints a table per engine and per comparison. Prints the answers if there are few."""
    for run in runs:
        console.print(_run_table(run))
        for request, result in zip(run.requests, run.results, strict=True):
            if result.error:
                console.print(f"{request.label} failed: {printable(result.error)}", markup=False)
            elif len(run.results) <= _SHOW_WHOLE_TEXTS and run is runs[0]:
                console.print(f"--- {request.label}\n{printable(result.text)}", markup=False)
    for comparison in comparisons:
        console.print(_comparison_table(comparison))


def _run_table(run: EngineRun) -> Table:
    table = Table(title=f"engine: {run.name}", title_justify="left", show_footer=True)
    total = totals(run)
    footers = (
        f"{total['wall_s']:.2f} s in total",
        str(total["prompt_tokens"]),
        str(total["computed_tokens"]),
        str(total["reused_tokens"]),
        "",
        f"{total['generated_tokens_per_second']:.0f}",
        f"{total['generated_tokens']} tokens generated",
    )
    heads = ("request", "prompt", "computed", "reused", "first token ms", "tokens/s", "answer")
    for number, (head, footer) in enumerate(zip(heads, footers, strict=True)):
        table.add_column(head, footer=footer, justify="right" if 0 < number < 6 else "left", no_wrap=True)
    for request, result in zip(run.requests, run.results, strict=True):
        first_s, rate = result.time_to_first_token_s, result.tokens_per_second
        table.add_row(
            request.label.replace("[", "\\["),
            str(result.prompt_tokens),
            str(result.computed_tokens),
            str(result.reused_tokens),
            "-" if first_s is None else f"{first_s * 1000:.1f}",
            "-" if rate is None else f"{rate:.0f}",
            excerpt(result.text, 28).replace("[", "\\[") if result.status == "completed" else result.status,
        )
    return table


def _comparison_table(comparison: dict[str, Any]) -> Table:
    table = Table(title=f"{comparison['engine']} against {comparison['against']}", title_justify="left")
    for head in ("request", "tokens", "first difference", "max log-prob difference"):
        table.add_column(head, justify="left" if head in ("request", "tokens") else "right", no_wrap=True)
    for entry in comparison["requests"]:
        gap = entry["max_log_prob_difference"]
        table.add_row(
            entry["label"].replace("[", "\\["),
            "equal" if entry["tokens_equal"] else "[bold]DIFFERENT[/bold]",
            "" if entry["first_difference"] is None else f"token {entry['first_difference']}",
            "-" if gap is None else f"{gap:.2e}",
        )
    return table


def save_plot(path: Path, runs: list[EngineRun], title: str) -> None:
    """Plots time to first token and computed prompt tokens of each request, one line per engine.

    Args:
        path: A file with an ending of `FORMATS`.
        runs: One or more engines with the same requests.
        title: Model, machine and workload.
    """
    styles = styles_of([run.name for run in runs])
    numbers = range(1, len(runs[0].results) + 1)
    waits_ms = {
        run.name: [None if (s := r.time_to_first_token_s) is None else 1e3 * s for r in run.results] for run in runs
    }
    computed = {run.name: [r.computed_tokens for r in run.results] for run in runs}
    panels = (("Time to first token, ms", waits_ms), ("Prompt tokens computed", computed))
    heading = "Each request: how long it waited, what it computed"
    with page(path, title=heading, subtitle=title, heights=(2.0, 2.0), legend=styles, lines=True) as axes:
        for axis, (label, values) in zip(axes, panels, strict=True):
            draw_lines(axis, numbers, values, styles)
            axis.set_title(label, loc="left", fontsize=9.5, fontweight="bold")
            axis.xaxis.get_major_locator().set_params(integer=True)
        axes[-1].set_xlabel("request")


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A context in which Python's garbage collector is off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
