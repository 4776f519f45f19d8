"""Made-up requests whose nature changes: chats, then long documents, then agents. Each kind wants another split of memory.

    python -m megatron_hybrid_prefix.lab.traffic OUT.jsonl
    python -m megatron_hybrid_prefix.lab.traffic OUT.jsonl --phases documents,fresh --requests 1000 --block-tokens 512

The kinds:

- ``chats``: short conversations. Many of them go on at the same time, and each turn adds a little. Many states, little KV.
- ``documents``: questions about long documents, some of which are far more popular (Zipf). Few states, much KV.
- ``agents``: long histories that grow in small steps. Each is asked again soon.
- ``fresh``: prompts that nobody repeats.

The same seed gives the same requests on every machine. Needs neither torch nor megatron.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_hybrid_prefix.console.terminal import write_whole
from megatron_hybrid_prefix.index.keys import KEY_BYTES
from megatron_hybrid_prefix.lab.traces import Trace, TraceRequest

type Prompt = list[int]
"""Ids of the blocks of a prompt. Equal ids are equal text."""

CHANGING = ("chats", "documents", "agents")


class _Ids:
    """Ids that were not given out yet."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> Prompt:
        self._next += count
        return list(range(self._next - count + 1, self._next + 1))


def chats(rng: random.Random, ids: _Ids, *, sessions: int = 150, turns: int = 8) -> Iterator[Prompt]:
    """Conversations after one of three system prompts; each turn adds one to three blocks."""
    systems = [ids.take(4) for _ in range(3)]
    live: list[Prompt] = []
    while True:
        while len(live) < sessions:
            live.append(list(rng.choice(systems)))
        session = rng.randrange(len(live))
        live[session] = live[session] + ids.take(rng.randint(1, 3))
        yield live[session]
        if rng.random() < 1 / turns:
            live.pop(session)


def documents(
    rng: random.Random, ids: _Ids, *, count: int = 60, most_blocks: int = 160, skew: float = 1.0
) -> Iterator[Prompt]:
    """Questions of a block or two about documents; the n-th document is asked about in proportion to 1 / n ** skew."""
    texts = [ids.take(rng.randint(most_blocks // 4, most_blocks)) for _ in range(count)]
    weights = [1 / (rank + 1) ** skew for rank in range(count)]
    while True:
        (text,) = rng.choices(texts, weights)
        yield text + ids.take(rng.randint(1, 2))


def agents(rng: random.Random, ids: _Ids, *, agents: int = 12, steps: int = 30) -> Iterator[Prompt]:
    """Histories that begin with the same tools and grow by one to four blocks a step."""
    tools = ids.take(20)
    live: list[tuple[Prompt, int]] = []
    while True:
        while len(live) < agents:
            live.append((tools + ids.take(rng.randint(5, 30)), rng.randint(steps // 2, steps)))
        agent = rng.randrange(len(live))
        history, left = live[agent]
        history = history + ids.take(rng.randint(1, 4))
        yield history
        live[agent] = (history, left - 1)
        if left == 1:
            live.pop(agent)


def fresh(rng: random.Random, ids: _Ids, *, most_blocks: int = 60) -> Iterator[Prompt]:
    """Prompts that share nothing."""
    while True:
        yield ids.take(rng.randint(1, most_blocks))


KINDS: dict[str, Callable[[random.Random, _Ids], Iterator[Prompt]]] = {
    "chats": chats,
    "documents": documents,
    "agents": agents,
    "fresh": fresh,
}


def made_up_prompts(phases: Sequence[str], requests: int, seed: int) -> Iterator[Prompt]:
    """``requests`` prompts of each phase, one phase after the other.

    Raises:
        KeyError: There is no such kind.
    """
    rng, ids = random.Random(f"traffic {seed}"), _Ids()
    for phase in phases:
        source = KINDS[phase](rng, ids)
        for _ in range(requests):
            yield next(source)


def changing_traffic(
    *, phases: Sequence[str] = CHANGING, requests: int = 1500, seed: int = 0, block_tokens: int = 256
) -> Trace:
    """A trace that changes its nature.

    Args:
        phases: Kinds of `KINDS`, one after the other.
        requests: Requests of each phase.
        seed: Another seed gives other requests of the same kinds.
        block_tokens: Tokens per block.
    """
    numbers: dict[tuple[int, int], int] = {}
    found = []
    for time, prompt in enumerate(made_up_prompts(phases, requests, seed)):
        keys, number = [], 0
        for item in prompt:
            number = numbers.setdefault((number, item), len(numbers) + 1)
            keys.append(number.to_bytes(KEY_BYTES, "big"))
        tokens = len(prompt) * block_tokens + block_tokens // 2
        found.append(TraceRequest(keys=keys, prompt_tokens=tokens, timestamp=time))
    return Trace(format="session", block_tokens=block_tokens, requests=tuple(found))


def main(argv: Sequence[str] | None = None) -> int:
    """Writes made-up requests in the "session" format. Returns the exit code."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("--phases", default=",".join(CHANGING), help="kinds, comma-separated (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=1500, help="of each phase (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-tokens", type=int, default=256)
    args = parser.parse_args(argv)
    phases = args.phases.split(",")
    for phase in phases:
        if phase not in KINDS:
            parser.error(f"--phases: no {phase!r}; there are: {', '.join(KINDS)}")
    size = args.block_tokens
    lines = [
        {
            "session_id": 0,
            "timestamp": time,
            "input_length": len(prompt) * size + size // 2,
            "hash_ids": prompt,
            "block_size": size,
        }
        for time, prompt in enumerate(made_up_prompts(phases, args.requests, args.seed))
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_whole(args.out, lambda part: part.write_text(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
