"""Processes on a shared folder that are killed at random moments, as JSON. Usage: ``shared_restart.py OUT.json FOLDER KILLS``.

Each process sends the turns of some conversations and is killed, every second one in the middle of a write. The next one starts
where it likes. Their budget is too small for all turns, so that there is always something to write and to delete. Two more at
the end have a larger one, and are not killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from megatron_hybrid_prefix.policy.registry import make_eviction_policy
from megatron_hybrid_prefix.tiers import folder as folders
from tests.harness.engine_helpers import random_tokens
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness
from tests.harness.limits import HANG_S, wait_until

SESSIONS, TURNS = 3, 12


def prompts():
    """Prompts of the turns. Each goes on where the last turn of its conversation ended."""
    history = [random_tokens(2 * BLOCK + 9, seed=50 + session) for session in range(SESSIONS)]
    for turn in range(TURNS):
        history[turn % SESSIONS] = history[turn % SESSIONS] + random_tokens(BLOCK + 7, seed=1000 + turn)
        yield history[turn % SESSIONS]


def serve(out, folder, turns, gb):
    """Sends turns, and writes a line for each. Does not return."""
    from megatron_hybrid_prefix.models import build_hybrid_model
    from megatron_hybrid_prefix.platform import ensure_platform

    ensure_platform(device="cpu")
    fields = {"slots": None}
    if folder is not None:
        url = f"file://{folder}?gb={gb}&min_tokens=0&wait_s={HANG_S}&refresh_s=0.02"
        fields = {"slots": 3, "blocks": 24, "host_gb": 0.001, "shared": url}
        folders.write_all = partial(write_slowly, hold=held(out))
    served = EngineHarness(build_hybrid_model("tiny", seed=0), max_requests=2, **fields)
    sent = list(prompts())
    with open(out, "a", buffering=1) as file:
        print(json.dumps({"started": True}), file=file)
        for number in turns:
            answer = served.send(sent[number])
            line = {"turn": number, "tokens": list(map(int, answer.generated_tokens))}
            line |= {"log_probs": list(answer.generated_log_probs), "cached": answer.num_cached_tokens}
            if folder is not None:
                stats = served.context.prefix_stats()
                line |= {"fallbacks": stats.fallbacks, "faults": stats.tiers["shared"].faults}
            print(json.dumps(line), file=file)
        if folder is not None:
            assert served.context.host_moves.drain(HANG_S)
            print(json.dumps({"written": True}), file=file)
    os._exit(0)


def write_slowly(file, data, hold):
    """Half of the bytes, a pause, the other half. While there is a file ``hold``, the pause does not end."""
    os.write(file, data[: len(data) // 2])
    time.sleep(0.008)
    while hold.exists():
        time.sleep(0.008)
    os.write(file, data[len(data) // 2 :])


def held(out):
    """The file that keeps the process with this output in the middle of a write."""
    return out.with_suffix(".hold")


def start(out, folder, turns, gb=0.01):
    """A process of `serve`; waits until it serves."""
    pid = os.fork()
    if not pid:
        serve(out, folder, turns, gb)
    wait_until(lambda: out.exists() and out.read_text().count("\n"), "the process serves", pause_s=0.002)
    return pid


def lines(out):
    """What a process said. A line that it was killed in is left out."""
    return [json.loads(line) for line in out.read_text().splitlines(keepends=True) if line.endswith("\n")][1:]


def writes(folder):
    """Whether a file is half written."""
    return any(
        entry for each in (folder / "v1" / "writing").iterdir() for entry in each.iterdir() if entry.name != "lock"
    )


def files(folder):
    """Bytes of all files but locks."""
    return {str(path): path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def accounted(folder):
    """What the index of a new process counts, after it has looked."""
    (space,) = {path.name for path in (folder / "v1").iterdir()} - {"writing"}
    opened = folders.SharedFolder(
        folders.FolderSettings(folder=folder, budget_bytes=10**9), lambda: make_eviction_policy("lru")
    )
    opened.wanted = bytes.fromhex(space)
    opened.look()
    named = {name: size for part in opened.space.sizes.values() for name, size in part.items()}
    return {"bytes": opened.bytes_used, "named": named, "found": files(folder)}


def main(out, folder, kills):
    folder, dice, runs, half_written = Path(folder), random.Random(0), [], 0
    with tempfile.TemporaryDirectory() as temporary:
        said = Path(temporary)
        os.waitpid(start(said / "off", None, range(TURNS)), 0)
        for number in range(int(kills)):
            first = dice.randrange(TURNS)
            pid = start(said / str(number), folder, [(first + turn) % TURNS for turn in range(TURNS)], gb=0.0015)
            served = dice.randrange(1, 4)  # turns, and then a moment of the next one
            wait_until(lambda n=number, s=served: len(lines(said / str(n))) >= s, "turns", pause_s=0.002)
            if number % 2:  # when it writes
                held(said / str(number)).touch()
                while not writes(folder) and len(lines(said / str(number))) < TURNS:
                    time.sleep(0.001)
            else:
                time.sleep(dice.random() * 0.05)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            half_written += writes(folder)
            runs.append(lines(said / str(number)))
        for name in ("complete", "last"):
            os.waitpid(start(said / name, folder, range(TURNS)), 0)
        found = {"off": lines(said / "off"), "killed": runs, "half_written": half_written}
        found |= {name: lines(said / name) for name in ("complete", "last")}
        found |= {"lengths": [len(prompt) for prompt in prompts()], "accounted": accounted(folder)}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
