"""Recorded sessions: reading them, the least tokens that any cache must compute, and a summary."""

from __future__ import annotations

import json
import math
import statistics
import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_hybrid_prefix.console.terminal import EngineRun, InputError, printable, read_text, totals

# Most failed requests to list.
_SHOW_FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLine:
    """One recorded request: its time, its whole prompt, its line in full (``where``) and in short (``label``)."""

    timestamp: float
    text: str
    where: str
    label: str


def read_sessions(paths: Sequence[Path]) -> list[SessionLine]:
    """All requests of these files, by time. Requests of the same time keep the order of files and lines.

    Raises:
        InputError: A file cannot be read or has no requests, or a line is not a request.
    """
    found: list[SessionLine] = []
    for path in paths:
        before = len(found)
        # Not splitlines: JSON text may contain other line separators.
        for number, line in enumerate(read_text(path).split("\n"), 1):
            if line.strip():
                found.append(_session_line(f"{path}:{number}", f"{path.name}:{number}", line))
        if len(found) == before:
            raise InputError(f"{path}: no requests in it")
    return sorted(found, key=lambda line: line.timestamp)


def _session_line(where: str, label: str, line: str) -> SessionLine:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: cannot read the JSON: {error}") from None
    if not isinstance(data, dict) or not {"timestamp", "input"} <= data.keys():
        raise InputError(f'{where}: expected an object with "timestamp" and "input"')
    timestamp, text = data["timestamp"], data["input"]
    if type(timestamp) not in (int, float) or (type(timestamp) is float and not math.isfinite(timestamp)):
        raise InputError(f'{where}: "timestamp" must be a number')
    if not isinstance(text, str):
        raise InputError(f'{where}: "input" must be text')
    return SessionLine(timestamp=timestamp, text=text, where=where, label=label)


def least_tokens(prompts: Sequence[Sequence[int]]) -> list[int]:
    """For each prompt, the tokens after its longest common prefix with any earlier prompt.

    Args:
        prompts: Token ids, in the order of sending.
    """
    # Big-endian bytes sort like the tokens, so the longest common prefix is with a neighbour in sorted order.
    earlier: list[bytes] = []
    least: list[int] = []
    for tokens in prompts:
        ids = array("I", tokens)
        if sys.byteorder == "little":
            ids.byteswap()
        key = ids.tobytes()
        at = bisect_left(earlier, key)
        shared_bytes = max((_common_bytes(key, near) for near in earlier[max(0, at - 1) : at + 1]), default=0)
        least.append(len(tokens) - shared_bytes // ids.itemsize)
        earlier.insert(at, key)
    return least


def _common_bytes(a: bytes, b: bytes) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # the first `low` bytes are the same
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def against_least(run: EngineRun, least: Sequence[int]) -> dict[str, Any]:
    """The least tokens to compute for all requests, and the computed tokens as a multiple of them."""
    total = sum(least)
    computed = sum(result.computed_tokens for result in run.results)
    return {"least_computed_tokens": total, "computed_over_least": computed / total}


def print_sessions(
    console: Console, runs: Sequence[EngineRun], least: Sequence[int], comparisons: Sequence[dict[str, Any]]
) -> None:
    """Prints totals per engine, failed requests, and how many answers equal those of the first engine."""
    table = Table(title=f"{len(runs[0].requests)} requests in the order of time", title_justify="left")
    heads = ("engine", "prompt tokens", "computed", "reused", "least possible", "computed / least")
    for head in (*heads, "first token ms", "wall s", "failed"):
        table.add_column(head, justify="left" if head == "engine" else "right", no_wrap=True)
    for run in runs:
        total = totals(run) | against_least(run, least)
        firsts = [r.time_to_first_token_s for r in run.results if r.time_to_first_token_s is not None]
        table.add_row(
            run.name,
            *(f"{total[f'{name}_tokens']:,}" for name in ("prompt", "computed", "reused", "least_computed")),
            f"{total['computed_over_least']:.3f}",
            f"{statistics.median(firsts) * 1000:.1f}" if firsts else "-",
            f"{total['wall_s']:.2f}",
            str(total["failed_requests"]),
        )
    console.print(table)
    for run in runs:
        failed = [pair for pair in zip(run.requests, run.results, strict=True) if pair[1].error]
        for request, result in failed[:_SHOW_FAILED]:
            console.print(f"{run.name}: {request.label} failed: {printable(result.error)}", markup=False)
        if len(failed) > _SHOW_FAILED:
            console.print(f"{run.name}: and {len(failed) - _SHOW_FAILED} more", markup=False)
    for comparison in comparisons:
        entries = comparison["requests"]
        equal = sum(entry["tokens_equal"] for entry in entries)
        gaps = [gap for entry in entries if (gap := entry["max_log_prob_difference"]) is not None]
        console.print(
            f"{comparison['engine']} against {comparison['against']}: {equal} of {len(entries)} answers equal"
            + (f", log-probs differ by up to {max(gaps):.2e}" if gaps else ""),
            markup=False,
        )
