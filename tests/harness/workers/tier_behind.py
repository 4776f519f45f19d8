"""A tier behind the host with different entries on each rank, as JSON. Usage: ``torchrun tier_behind.py OUT.json``."""

from __future__ import annotations

import os
import random
import sys
import time

import torch.distributed as dist

from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.engine_helpers import random_tokens
from tests.harness.limits import COLLECTIVE_HANG_S, HANG_S
from tests.harness.workers.launch import write_findings
from tests.harness.workers.prefix_parallel import BLOCK_TOKENS, Session, build

PATTERN = "M*-M*-"
HOST_GB = 0.0003
LATE_S = 0.2  # of the session with faults
PROMPTS = [random_tokens((2 + number % 3) * BLOCK_TOKENS + 9, seed=70 + number) for number in range(12)]


def forgetful(behind):
    """The last rank's tier refuses every third entry. Returns the refused ones."""
    put, offered, refused = behind.put, iter(range(10**9)), []

    def puts(namespace, entry):
        if next(offered) % 3 == 0:
            refused.append(entry.tag)
            return False
        return put(namespace, entry)

    behind.put = puts
    return refused


def faulty(behind):
    """Each rank's tier loses entries, refuses some, has wrong bytes, raises, or takes too long, of its own."""
    rng, put, get = random.Random(f"faults of rank {dist.get_rank()}"), behind.put, behind.get

    def gets(namespace, tag, buffers):
        fault = rng.random()
        if fault < 0.01:
            time.sleep(2 * LATE_S)
        elif fault < 0.03:
            raise OSError("a cable was pulled")
        elif fault < 0.05:
            return None
        checksum = get(namespace, tag, buffers)
        return checksum if fault < 0.95 or checksum is None else checksum ^ 1

    behind.get = gets
    behind.put = lambda namespace, entry: rng.random() < 0.9 and put(namespace, entry)


def traffic(session, rng):
    """Requests of random prompts begin and end beside each other."""
    for _ in range(60):
        prompt = rng.choice(PROMPTS)
        kept = rng.choice([len(prompt), len(prompt) - 40])
        session.add([*prompt[:kept], rng.randrange(99)], rng.choice([2, 9]))
        session.run(steps=rng.randrange(6))
    session.run()


def main(out):
    platform = ensure_platform(tp=int(os.environ["WORLD_SIZE"]), pp=1, device="cpu", timeout_s=COLLECTIVE_HANG_S["cpu"])
    model = build(PATTERN, platform.world_size, 1, platform)
    found, refused = {}, []
    tier = {"host_gb": HOST_GB, "check_ranks": True}
    for name, fields in {
        "off": {"cached": False},
        "behind": tier | {"shared": f"dictionary://?min_tokens=0&wait_s={HANG_S}"},
        "random, off": {"cached": False},
        "random": tier | {"shared": f"dictionary://?min_tokens=0&wait_s={LATE_S}"},
    }.items():
        session = Session(model, PATTERN, platform.world_size, 1, mode="legacy", slots=2, blocks=9, **fields)
        behind = session.engine.context.prefix_cache._store.host.behind.tier if session.cached else None
        if name == "random":
            faulty(behind)
        elif session.cached and dist.get_rank() == dist.get_world_size() - 1:
            refused = forgetful(behind)
        if name.startswith("random"):
            traffic(session, random.Random(5))
        for _ in range(0 if name.startswith("random") else 3):
            for prompt in PROMPTS:
                session.send(prompt)
                if session.cached:
                    session.engine.context.host_moves.drain(HANG_S)  # what one rank writes later, the other may lose
        found[name] = session.found()
        if name == "behind":
            found["kept"], found["refused"] = len(behind.entries), len(refused)
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1])
