"""Functional tests on several ranks, one line per case. Started by `scripts/functional_tests.sh`.

Each case has its own ranks (`ranks.py`). They run under torchrun. On a CPU, ranks that nobody kills are forked from one
process that has imported torch and megatron. Each case checks three things: answers equal those of caching off on the
same ranks; ranks with the same requests decide alike; with wrong states the answers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.harness.engine_helpers import LOG_PROB_NOISE
from tests.harness.limits import COLLECTIVE_HANG_S, HANG_S
from tests.harness.rank_stats import alike_on_ranks
from tests.harness.workers.launch import environment, environments_of, run_ranks, run_torchrun

WORKER = Path(__file__).with_name("ranks.py")
CASE_TIMEOUT_S = {"cpu": HANG_S, "cuda": HANG_S}
# After a rank died. gloo sees that a connection is closed; NCCL waits for the collective's time limit.
END_TIMEOUT_S = {"cpu": COLLECTIVE_HANG_S["cpu"], "cuda": COLLECTIVE_HANG_S["cuda"] + 90.0}
# Log-probs, float32; on GPUs with the products of Triton's kernels in float32, too (TRITON_F32_DEFAULT=ieee).
TOLERANCE = {"cpu": LOG_PROB_NOISE, "cuda": LOG_PROB_NOISE}
_RAISED = re.compile(r"(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception): .*)|.*(Watchdog caught .*)")
LAYERS = ("mamba2", "gated-delta-net")
WRONG = 1e-3  # a wrong state is farther off than this


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layout.

    Attributes:
        kind: What `ranks.py` runs, and how it is judged.
        ranks: Number of processes.
        torchrun: True: torchrun starts them, unless they are forked. False: each is started alone, with the same environment.
        tp: Tensor-parallel size.
        pp: Pipeline stages, each with an attention layer.
        ep: Expert-parallel size.
    """

    kind: str
    ranks: int
    torchrun: bool = True
    tp: int = 1
    pp: int = 1
    ep: int = 1


CASES = {
    "tp2": Case(kind="layout", ranks=2, tp=2),
    "pp2": Case(kind="layout", ranks=2, pp=2),
    "tp2-pp2": Case(kind="layout", ranks=4, tp=2, pp=2),
    "ep2": Case(kind="experts", ranks=2, ep=2),
    "tp2-ep2": Case(kind="experts", ranks=4, tp=2, ep=2),
    "dp2": Case(kind="replicas", ranks=2),
    "killed": Case(kind="killed", ranks=2, tp=2),
    "killed-alone": Case(kind="killed", ranks=2, tp=2, torchrun=False),
}


class Failure(Exception):
    """A case failed. The message is one line; ``details`` has the rest."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def expect(condition: bool, message: str) -> None:
    """Fails the case unless the condition holds."""
    if not condition:
        raise Failure(message)


# --- Judging ---------------------------------------------------------------------------------------------------------


def log_prob_gap(answer: dict[str, Any], right: dict[str, Any]) -> float:
    """The largest difference between the log-probs of two answers."""
    expect(len(answer["log_probs"]) == len(right["log_probs"]) == len(right["tokens"]) > 0, "an answer lacks log-probs")
    return max(abs(a - b) for a, b in zip(answer["log_probs"], right["log_probs"], strict=True))


def judge_parity(ranks: Sequence[dict[str, Any]], tolerance: float) -> tuple[int, float]:
    """Checks that each rank's answers equal those with caching off.

    Returns:
        Reused prompt tokens of all answers (of one rank, if all ranks have the same requests), and the largest log-prob
        gap.
    """
    reused, most = [], 0.0
    for number, found in enumerate(ranks):
        reused.append(0)
        for name, run in found["runs"].items():
            where = f"rank {number}, {name}"
            answers, right = run["on"]["answers"], run["off"]["answers"]
            expect(len(answers) == len(right), f"{where}: {len(answers)} answers, {len(right)} with caching off")
            for at, (answer, reference) in enumerate(zip(answers, right, strict=True)):
                expect(answer["tokens"] == reference["tokens"], f"{where}: tokens of answer {at} differ")
                most = max(most, gap := log_prob_gap(answer, reference))
                expect(gap <= tolerance, f"{where}: log-probs of answer {at} are off by {gap:.1e} > {tolerance:.0e}")
                reused[-1] += answer["cached_tokens"]
    return max(reused), most


def judge_layout(case: Case, ranks: Sequence[dict[str, Any]], tolerance: float) -> str:
    """Checks parity, equal decisions and loads from the host, and that wrong states show."""
    reused, most = judge_parity(ranks, tolerance)
    expect(reused > 0, "nothing was reused")
    loads = 0
    for name, run in ranks[0]["runs"].items():
        first = run["on"]
        expect(first["stats"]["reused_tokens"] > 0, f"{name}: nothing was reused")
        expect(bool(first["decisions"]), f"{name}: no decisions were noted")
        for number, found in enumerate(ranks[1:], start=1):
            other = found["runs"][name]["on"]
            for key in ("decisions", "present", "preempted"):
                expect(other[key] == first[key], f"{name}: {key} of ranks 0 and {number} differ")
            alike = alike_on_ranks(other["stats"]) == alike_on_ranks(first["stats"])
            expect(alike, f"{name}: prefix_stats of ranks 0 and {number} differ")
        if name.startswith("host"):
            expect(first["stats"]["tiers"]["host"]["loads"] > 0, f"{name}: nothing came back from the host")
            failed = first["stats"]["fallbacks"].get("host_load_failed", 0)
            expect(failed == 1, f"{name}: {failed} failed loads, for one changed bit on the last rank")
            loads += first["stats"]["tiers"]["host"]["loads"]
    # Or else parity would say nothing about the states.
    for number, found in enumerate(ranks):
        right = found["runs"]["tails, legacy"]["off"]["answers"]
        for at, (answer, reference) in enumerate(zip(found["damaged"]["answers"], right, strict=True)):
            if answer["cached_tokens"]:
                gap = log_prob_gap(answer, reference)
                expect(gap > WRONG, f"rank {number}: wrong states do not show in answer {at} ({gap:.1e})")
    return f"{reused} tokens reused, {loads} loads from the host, log-probs within {most:.1e}, equal decisions"


def judge_experts(case: Case, ranks: Sequence[dict[str, Any]], tolerance: float) -> str:
    """Checks parity, that each rank reuses, and that an idle rank takes part in the others' forwards."""
    reused, most = judge_parity(ranks, tolerance)
    for number, found in enumerate(ranks):
        for name, run in found["runs"].items():
            own = sum(answer["cached_tokens"] for answer in run["on"]["answers"])
            expect(own > 0, f"rank {number}, {name}: nothing was reused")
    idle = sum(run["on"]["idle_forwards"] for found in ranks for run in found["runs"].values())
    expect(idle > 0, "no rank was ever idle")
    return f"{reused} tokens reused by a rank, {idle} idle forwards, log-probs within {most:.1e}"


def judge_replicas(case: Case, ranks: Sequence[dict[str, Any]], tolerance: float) -> str:
    """Checks parity, that each replica got work, and that the coordinator sent a known prefix to the replica that has
    it.
    """
    reused, most = judge_parity(ranks, tolerance)
    served = [found["own_stats"]["prompt_tokens"] for found in ranks]
    expect(min(served) > 0, f"a replica got nothing: {served} prompt tokens")
    counted = sum(found["own_stats"]["reused_tokens"] for found in ranks)
    expect(counted == reused, f"the replicas counted {counted} reused tokens, their answers say {reused}")
    answers = ranks[0]["runs"]["coordinator"]["on"]["answers"]
    # Each prefix is computed by one replica, and known when its third prompt comes, at the latest.
    late = [answer["cached_tokens"] for answer in answers[2 * case.ranks :]]
    expect(len(late) > 0 and min(late) > 0, f"later prompts did not find their prefix: {late} tokens reused")
    return f"{reused} tokens reused, {served} prompt tokens by replica, log-probs within {most:.1e}"


JUDGES: dict[str, Callable[[Case, Sequence[dict[str, Any]], float], str]] = {
    "layout": judge_layout,
    "experts": judge_experts,
    "replicas": judge_replicas,
}


# --- Running ---------------------------------------------------------------------------------------------------------


def run_case(name: str, device: str, layers: str = "mamba2") -> str:
    """Runs one case, of models with these recurrent `LAYERS`. Returns a line about it.

    Raises:
        Failure: The case failed.
    """
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="functional-") as folder:
        out = Path(folder) / "found.json"
        if case.kind == "killed":
            return (run_killed if case.torchrun else run_killed_alone)(name, case, device, out, layers)
        timeout_s = CASE_TIMEOUT_S[device]
        try:
            if device == "cpu":
                ranks = run_ranks(WORKER, out, name, device, layers, ranks=case.ranks, timeout_s=timeout_s)
            else:
                ranks = run_torchrun(
                    WORKER, out, name, device, layers, ranks=case.ranks, timeout_s=timeout_s, device=device
                )
        except AssertionError as error:  # says what the ranks wrote
            hung = " hung:" in str(error).partition("\n")[0]
            message = f"hung for {timeout_s:.0f} s" if hung else "a rank failed: " + last_error(str(error))
            raise Failure(message, str(error)) from error
    expect(len(ranks) == case.ranks, f"{len(ranks)} ranks instead of {case.ranks}")
    wanted = "cuda" if device == "cuda" else "cpu"
    for found in ranks:
        expect(f"({wanted}" in found["platform"], f"not on {device}: {found['platform']}")
    return JUDGES[case.kind](case, ranks, TOLERANCE[device])


def run_killed(name: str, case: Case, device: str, out: Path, layers: str) -> str:
    """The last rank is killed. torchrun must end with an error, and no rank may survive."""
    timeout_s = CASE_TIMEOUT_S[device]
    try:
        run_torchrun(WORKER, out, name, device, layers, ranks=case.ranks, timeout_s=timeout_s, device=device)
    except AssertionError as error:  # as it should be, if it is for the right reason
        errors = str(error)
    else:
        raise Failure("torchrun ended as if nothing had happened")
    if " hung:" in errors.partition("\n")[0]:
        raise Failure(f"hung for {timeout_s:.0f} s", errors)
    paths = [Path(f"{out}.rank{rank}") for rank in range(case.ranks)]
    if not all(path.is_file() for path in paths) or "Signal 9 (SIGKILL)" not in errors:
        raise Failure("not ended by the death of a rank: " + last_error(errors), errors)
    left = [path.name for path in paths if is_running(int(path.read_text()))]
    if left:
        raise Failure(f"torchrun ended, and left {', '.join(left)}", errors)
    return f"rank {case.ranks - 1} killed, torchrun ended with an error and left no process"


def is_running(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def run_killed_alone(name: str, case: Case, device: str, out: Path, layers: str) -> str:
    """The last rank is killed. Every other rank must end with an error by itself, without torchrun."""
    folder = out.parent
    errors = [folder / f"rank{rank}.err" for rank in range(case.ranks)]
    processes = []
    try:
        for path, own in zip(errors, environments_of(case.ranks), strict=True):
            with path.open("w") as stderr:
                command = [sys.executable, str(WORKER), str(out), name, device, layers]
                env = environment(device) | own
                processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=stderr))
        *others, victim = processes

        def said() -> str:
            return "\n".join(f"rank {rank}:\n{path.read_text()[-3000:]}" for rank, path in enumerate(errors))

        try:
            code = victim.wait(CASE_TIMEOUT_S[device])
        except subprocess.TimeoutExpired:
            raise Failure("the rank to be killed hung before", said()) from None
        if code != -signal.SIGKILL:
            raise Failure(f"the rank to be killed ended with {code}", said())
        died_s = time.monotonic()
        for rank, process in enumerate(others):
            try:
                code = process.wait(max(0.0, END_TIMEOUT_S[device] - (time.monotonic() - died_s)))
            except subprocess.TimeoutExpired:
                raise Failure(f"rank {rank} still ran {END_TIMEOUT_S[device]:.0f} s later", said()) from None
            if code == 0:
                raise Failure(f"rank {rank} ended as if nothing had happened", said())
            if not Path(f"{out}.rank{rank}").is_file() or not errors[rank].read_text().strip():
                raise Failure(f"rank {rank} ended with {code}, but not of the other one's death", said())
        seconds = time.monotonic() - died_s
    finally:
        for process in processes:
            process.kill()
            process.wait()
    reason = last_error(errors[0].read_text())
    return f"rank {case.ranks - 1} killed, the others ended {seconds:.1f} s later; rank 0: {reason}"


def last_error(text: str) -> str:
    """The last error of a rank, in one line. Errors about another rank's exit count only if there is no other."""
    raised = [found[1] or found[2] for found in map(_RAISED.match, text.splitlines()) if found is not None]
    own = [line for line in raised if "closed by peer" not in line and "ChildFailedError" not in line]
    said = [line.strip() for line in text.splitlines() if line.strip()]
    line = (own or raised or said or ["nothing on stderr"])[-1]
    return line if len(line) <= 160 else line[:159] + "…"


def gpus() -> int:
    """CUDA devices of this host."""
    import torch

    return torch.cuda.device_count()


def hardware(device: str) -> dict[str, Any]:
    """Hardware of this host, and versions of the relevant packages."""
    import torch

    found = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    found |= {name: version(name) for name in ("torch", "megatron-core")}
    if device == "cuda":
        found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return found


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the cases, and prints a line for each. Returns the results."""
    outcomes = []
    for name in args.cases:
        case = CASES[name]
        started_s, details = time.monotonic(), ""
        if case.ranks > args.ranks:
            outcome, text = "skipped", f"needs {case.ranks} ranks, there are {args.ranks}"
        else:
            try:
                outcome, text = "passed", run_case(name, args.device, args.layers)
            except Failure as error:
                outcome, text, details = "failed", str(error), error.details
        seconds = time.monotonic() - started_s
        print(f"{outcome:7} {name:12} {f'{seconds:.1f} s':>7}  {text}", flush=True)
        if details:
            print(details, file=sys.stderr, flush=True)
        outcomes.append({"case": name, "outcome": outcome, "text": text, "seconds": round(seconds, 1)} | asdict(case))
    return outcomes


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options; see `scripts/functional_tests.sh --help`."""
    parser = argparse.ArgumentParser(prog="functional_tests.sh", allow_abbrev=False)
    parser.add_argument("ranks", type=int, metavar="N")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--layers", choices=LAYERS, default="mamba2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.ranks < 2:
        parser.error(f"N={args.ranks}: every case needs 2 ranks or more")
    args.cases = args.cases.split(",")
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are: {', '.join(CASES)}")
    if min(CASES[name].ranks for name in args.cases) > args.ranks:
        parser.error(f"N={args.ranks}: none of these cases can run")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"cannot write {args.json}: there is no folder {args.json.parent}")
    found = gpus() if args.device != "cpu" else 0
    args.device = args.device or ("cuda" if found else "cpu")
    if args.device == "cuda" and found < args.ranks:
        parser.error(f"N={args.ranks}: there are {found} GPUs")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code."""
    args = parse(argv)
    if args.device == "cuda":
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    outcomes = run(args)
    of_layers = "" if args.layers == LAYERS[0] else f", {args.layers}"
    counts = {kind: sum(one["outcome"] == kind for one in outcomes) for kind in ("passed", "failed", "skipped")}
    print(
        f"{', '.join(f'{count} {kind}' for kind, count in counts.items())} ({args.device}, N={args.ranks}{of_layers})"
    )
    if args.json is not None:
        report = {
            "device": args.device,
            "ranks": args.ranks,
            "layers": args.layers,
            "tolerance": TOLERANCE[args.device],
        }
        report |= {"hardware": hardware(args.device), "cases": outcomes}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
