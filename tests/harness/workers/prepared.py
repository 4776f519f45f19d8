"""Forks processes that have torch and megatron imported already, because importing takes longer than most tests.

This file is the process that forks them; `launch` asks it to. Usage: ``prepared.py``. It answers two questions, each a line
of JSON on stdin, with a line of JSON on stdout. Question and answer have the same "number".

- "script", "argv", "environments" (one per process), "outputs" and "errors" (files for stdout and stderr) and "cwd" (or
  null): forks these processes. Answer: "pids".
- "pids" and "timeout_s": waits for them. Answer: "codes" (exit codes, negative for signals) and "hung". If one process
  fails, the others are ended, as torchrun does.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

GRACE_S = 10.0  # from SIGTERM to SIGKILL


def import_everything() -> None:
    """Imports what every rank needs, with the CPU replacements. They are undone, because each process makes them again.

    Our overrides are compared with megatron's methods, too, which every process does before its first engine.
    """
    from megatron_hybrid_prefix.platform import start

    start.patch_platform("cpu")
    for name in (
        "mcore.engine.engine",
        "mcore.engine.controller",
        "mcore.context.context",
        "models.build",
        "layers.kinds",
    ):
        importlib.import_module(f"megatron_hybrid_prefix.{name}")
    from megatron_hybrid_prefix.upstream.check import check_overrides

    check_overrides()
    for number in (signal.SIGINT, signal.SIGTERM):  # megatron's engine registers dumps of the stack when it is imported
        faulthandler.unregister(number)
    start.undo_platform()
    gc.freeze()  # a collection in a forked process would look at, and so copy, all of this


def become(
    script: str, argv: Sequence[str], cwd: str | None, environment: dict[str, str], output: str, errors: str
) -> NoReturn:
    """Turns a new process into ``python SCRIPT ARGV...``."""
    code = 1
    os.setpgid(0, 0)  # so that what the script starts can be ended with it
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream, path in ((0, os.devnull), (1, output), (2, errors)):
            file = os.open(path, os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, stream)
            os.close(file)
        os.environ.update(environment)
        if cwd is not None:
            os.chdir(cwd)
        sys.argv = [script, *argv]
        sys.path.insert(0, os.path.dirname(script))
        try:
            runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(job: dict[str, Any]) -> list[int]:
    """Forks the job's processes."""
    pids = []
    for own in zip(job["environments"], job["outputs"], job["errors"], strict=True):
        if (pid := os.fork()) == 0:
            become(job["script"], job["argv"], job["cwd"], *own)
        with suppress(OSError):  # the child did it already, or has ended
            os.setpgid(pid, pid)
        pids.append(pid)
    return pids


def kill(pids: Iterable[int]) -> None:
    """Ends whatever is left of each one's group."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def wait_for(pids: list[int], timeout_s: float) -> dict[str, Any]:
    """Waits for processes. Ends all of them if one fails, or if they do not end in time."""
    codes: dict[int, int] = {}
    end_s, told, hung = time.monotonic() + timeout_s, False, False
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
        late = time.monotonic() > end_s
        if late or (not told and any(codes.values())):
            hung = hung or (late and not told)
            for pid in pids:
                if pid not in codes:
                    os.killpg(pid, signal.SIGKILL if told else signal.SIGTERM)
            told, end_s = True, time.monotonic() + GRACE_S
        time.sleep(0.01)
    return {"codes": [codes[pid] for pid in pids], "hung": hung}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints during imports must not go to stdout
    import_everything()
    sys.stdout.flush()  # not in every child again
    running: set[int] = set()
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            if "script" in asked:
                pids = start(asked)
                running.update(pids)
                answer: dict[str, Any] = {"pids": pids}
            else:
                answer = wait_for(asked["pids"], asked["timeout_s"])
                kill(asked["pids"])
                running.difference_update(asked["pids"])
            print(json.dumps(answer | {"number": asked["number"]}), file=answers, flush=True)
    finally:
        kill(running)


if __name__ == "__main__":
    main()
