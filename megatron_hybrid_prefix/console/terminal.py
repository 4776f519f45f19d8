"""Shared by all verbs: parsers, one-line errors, Ctrl-C, atomic output files, JSON lines, progress bars.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_hybrid_prefix.errors import PluginError

EXIT_INPUT = 2
EXIT_INTERRUPTED = 130
# The terminal and torchrun both send SIGINT for one Ctrl-C. Signals closer than this count as one.
_SAME_SIGINT_S = 1.0
# torchrun ends all ranks soon after the first one exits. This gives rank 0 time to print its error.
_LET_RANK_0_SPEAK_S = 3.0
# What PyTorch says if memory is short and it has no class for that.
_NO_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator",
    "Storage size calculation overflowed",
)
MEMORY_ADVICE = "lower --cache-gb, --max-requests or --max-tokens, or run fewer engines"


class InputError(Exception):
    """Bad input. Printed as one line; exit code 2."""


class MemoryShortageError(InputError):
    """A device or the host has too little memory. Not all ranks need have it, so each that has says so."""


class Stopped(Exception):
    """Ctrl-C was pressed. Raised on all ranks at the same step; exit code 130. Its text: what was written, if anything was."""


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


def command_parser(doc: str | None) -> ArgumentParser:
    """The parser of a verb: its module's docstring is the help."""
    summary, _, rest = (doc or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    return ArgumentParser(description=summary, epilog=rest, formatter_class=raw, allow_abbrev=False)


def command_line(argv: Sequence[str] | None) -> str:
    """The command line as it can be typed again."""
    return f"{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:] if argv is None else argv)}"


class Interrupt:
    """A context manager: the first SIGINT sets ``requested``, the second one ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self._since_s = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        self.listen(signal.SIGINT)
        return self

    def __exit__(self, *_: object) -> None:
        # After a Ctrl-C keep the handler: a second one must not raise during the interpreter's shutdown.
        if not self.requested:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def listen(self, number: int) -> None:
        """This signal sets ``requested``, too: for a verb that asks often, and has something to write before it ends."""
        if threading.current_thread() is threading.main_thread():
            self._previous[number] = signal.signal(number, self._handle)

    def check(self) -> None:
        """Raises `Stopped` after Ctrl-C."""
        if self.requested:
            raise Stopped

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.requested:
            self.requested, self._since_s = True, now_s
        elif signum == signal.SIGINT and now_s - self._since_s > _SAME_SIGINT_S:
            os._exit(EXIT_INTERRUPTED)


def as_main(run: Callable[[Sequence[str] | None, Interrupt], int | None]) -> Callable[..., int]:
    """A verb's ``main``: it takes the arguments (None: those of the process), and returns the exit code.

    Args:
        run: The verb. Its `InputError` and the lack of memory are one line on stderr, of rank 0.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        with Interrupt() as interrupt:
            try:
                return run(argv, interrupt) or 0
            except Stopped as stopped:
                if is_main_rank():
                    print(f"interrupted: {str(stopped) or 'nothing was written'}", file=sys.stderr, flush=True)
                return EXIT_INTERRUPTED
            except Exception as error:
                problem = _problem_of(error)
                if problem is None:
                    raise
                if isinstance(problem, MemoryShortageError) or is_main_rank():
                    rank = f"rank {os.environ['RANK']}: " if not is_main_rank() else ""
                    print(f"error: {rank}{one_line(problem)}", file=sys.stderr, flush=True)
                else:
                    time.sleep(_LET_RANK_0_SPEAK_S)
                return EXIT_INPUT

    return main


def _problem_of(error: Exception) -> Exception | None:
    """What to tell the user in a line; None: the error is ours."""
    # Any question about a path may raise it.
    is_long_name = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    return error if isinstance(error, InputError | PluginError) or is_long_name else memory_shortage(error)


def memory_shortage(error: Exception, what: str = "", advice: str = MEMORY_ADVICE) -> MemoryShortageError | None:
    """A lack of memory (for ``what``) in one line, with advice; None: the error is another."""
    if not isinstance(error, MemoryError | RuntimeError):
        return None
    text = one_line(error)
    if isinstance(error, RuntimeError) and not any(said in text for said in _NO_MEMORY):
        return None
    return MemoryShortageError(f"{what}{': ' if what else ''}not enough memory; {advice}: {text.partition('. ')[0]}")


@contextmanager
def as_input_errors(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """A context that turns exceptions of these kinds into `InputError`."""
    try:
        yield
    except kinds as error:
        raise InputError(prefix + one_line(error)) from error


@contextmanager
def as_memory_errors(what: str, advice: str = MEMORY_ADVICE) -> Iterator[None]:
    """A context that turns the lack of memory for ``what`` into `MemoryShortageError`, with advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        problem = memory_shortage(error, what, advice)
        if problem is None:
            raise
        raise problem from error


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


def check_folder(path: Path, option: str) -> None:
    """Checks at the start that a folder can be filled: an empty one, or a new one in a folder that is there.

    Raises:
        InputError: It cannot; names ``option``.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"{option}: cannot write {path}: it is no folder")
    if path.is_dir() and any(path.iterdir()):
        raise InputError(f"{option}: {path} is not empty")
    _check_parent(path / "x" if path.is_dir() else path)


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
    if path is not None:
        check_writable(path)
        if path.suffix not in (".png", ".svg"):
            raise InputError(f"{option}: {path} must end with .png or .svg")


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


def read_json(path: Path) -> Any:
    """Parses a JSON file. Raises InputError if it cannot be read, or is not JSON."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None


def _standard_input() -> str:
    if has_other_ranks():
        raise InputError("standard input (-) goes to one process, and several ranks need it: give a file")
    data = sys.stdin.buffer.read()
    if not data:
        raise InputError("standard input (-) is empty, or was read before")
    return data.decode("utf-8-sig")


def json_lines(paths: Sequence[Path], what: str) -> Iterator[tuple[str, str, Any]]:
    """The values of files with one JSON value per line; lines without one are skipped.

    Yields:
        Where it is: the file and the line, in full and in short; and the value.

    Raises:
        InputError: A file cannot be read or has no lines, or a line is no JSON. ``what``: what lines are, for the message.
    """
    for path in paths:
        # Not splitlines: JSON text may contain other line separators.
        lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
        if not lines:
            raise InputError(f"{path}: no {what} in it")
        for number, line in lines:
            where = f"{path}:{number}"
            try:
                yield where, f"{path.name}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                text = f"{where}: not JSON: {error.msg} at column {error.colno}; each line is a JSON object"
                raise InputError(text) from None
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: cannot read the JSON: {error}") from None


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


def save_json(console: Console, path: Path | None, data: Any) -> None:
    """`write_json`, and says so; nothing without a path."""
    if path is not None:
        write_json(path, data)
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def printable(text: str) -> str:
    """``text`` without control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def excerpt(text: str, width: int) -> str:
    """The start of ``text`` in one line of at most ``width`` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else line[: width - 1] + "…"


def output_console() -> Console:
    """A console on stdout, as wide as the terminal; 140 columns for a file or pipe. Silent on ranks other than 0."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140, quiet=not is_main_rank())


def table_of(title: str, *heads: str) -> Table:
    """A table: the first column of texts, and answers, are on the left, figures on the right."""
    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        left = number == 0 or head in ("answer", "goal", "budget")
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    return table


@contextmanager
def progress(names: Sequence[str], total: int, *more: ProgressColumn) -> Iterator[Callable[..., None]]:
    """Progress bars on stderr, one per name. Silent if stderr is not a terminal, and on ranks other than 0.

    Args:
        names: What is in progress.
        total: Its steps.
        more: Columns in place of the count and the time.

    Yields:
        A function that sets how many of ``total`` are done for a name; a third argument is another total.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *(more or (MofNCompleteColumn(), TimeElapsedColumn())))
    bars = Progress(*columns, console=console, transient=True, disable=not (console.is_terminal and is_main_rank()))
    with bars:
        tasks = {name: bars.add_task(name, total=total, start=False) for name in names}

        def done(name: str, count: int, of: int = total) -> None:
            bars.start_task(tasks[name])
            bars.update(tasks[name], completed=count, total=of)

        yield done


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
