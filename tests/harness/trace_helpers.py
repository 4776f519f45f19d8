"""Synthetic requests of several kinds, as tokens or as block keys."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from megatron_hybrid_prefix.index.keys import KeyMaker
from megatron_hybrid_prefix.lab.traces import Trace, TraceRequest

BLOCK = 512  # tokens of a block where only keys matter


def token_prompts(
    count: int, *, block_tokens: int, most_blocks: int, seed: int, vocabulary: int = 512
) -> list[list[int]]:
    """Prompts that start like earlier ones: repeats, turns of chats, shared prefixes, and new ones, in all lengths."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    while len(prompts) < count:
        earlier = rng.choice(prompts) if prompts and rng.random() < 0.8 else []
        cut = rng.choice([len(earlier), rng.randrange(len(earlier) + 1), len(earlier) // block_tokens * block_tokens])
        own = rng.choice([0, 1, 2, rng.randrange(3 * block_tokens), rng.randrange(1, 4) * block_tokens])
        prompt = earlier[:cut] + rng.choices(range(vocabulary), k=own)
        if 2 <= len(prompt) <= most_blocks * block_tokens:
            prompts.append(prompt)
    return prompts


def as_trace(prompts: list[list[int]], block_tokens: int) -> Trace:
    """The same prompts as a recorded trace."""
    keys = KeyMaker(block_tokens, secret=b"test")
    requests = [
        TraceRequest(keys=keys.chain(prompt).keys, prompt_tokens=len(prompt), timestamp=number)
        for number, prompt in enumerate(prompts)
    ]
    return Trace(format="text", block_tokens=block_tokens, requests=tuple(requests))


class _Keys:
    """One key per path to a block."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}

    def __call__(self, *name: object) -> bytes:
        return self._numbers.setdefault(name, len(self._numbers)).to_bytes(16, "big")


def _chat(rng: random.Random, count: int, sessions: int) -> Iterator[list[bytes]]:
    """Conversations that continue after a while. Each turn has the whole history; all share a system prompt."""
    key, live, started = _Keys(), [], 0
    for _ in range(count):
        while len(live) < sessions:
            started += 1
            system = rng.randrange(3)
            live.append((started, [key("system", system, number) for number in range(3)]))
        session = rng.randrange(len(live))
        name, keys = live[session]
        keys = keys + [key(name, len(keys) + number) for number in range(rng.randint(1, 5))]
        live[session] = (name, keys)
        yield keys
        if rng.random() < 0.15:
            live.pop(session)


def _scan(rng: random.Random, count: int, documents: int) -> Iterator[list[bytes]]:
    """The same documents over and over, each time with another question."""
    key = _Keys()
    for number in range(count):
        document = number % documents
        yield [*(key(document, block) for block in range(12)), key("question", number)]


def _popular(rng: random.Random, count: int, documents: int) -> Iterator[list[bytes]]:
    """Documents of different lengths with questions of different lengths. Some documents are far more popular."""
    key = _Keys()
    lengths = [rng.randint(1, 40) for _ in range(documents)]
    weights = [1 / (rank + 1) for rank in range(documents)]
    for number in range(count):
        (document,) = rng.choices(range(documents), weights)
        keys = [key(document, block) for block in range(lengths[document])]
        yield keys + [key("question", number, block) for block in range(rng.randrange(6))]


def _agents(rng: random.Random, count: int, agents: int) -> Iterator[list[bytes]]:
    """Agents that add a little to a long history at every step. They take turns, and end."""
    key, live, started = _Keys(), [], 0
    for _ in range(count):
        while len(live) < agents:
            started += 1
            live.append([started, [key("tools", number) for number in range(5)], rng.randint(5, 40)])
        agent = rng.choice(live)
        agent[1] = agent[1] + [key(agent[0], len(agent[1]) + number) for number in range(rng.randint(1, 3))]
        agent[2] -= 1
        yield agent[1]
        if not agent[2]:
            live.remove(agent)


def _shifting(rng: random.Random, count: int, times: int) -> Iterator[list[bytes]]:
    """Each of the other kinds in turn, twice, with ``times`` its size, and each time with new text."""
    parts = list(STEADY_KINDS.values()) * 2
    for part, (generate, size) in enumerate(parts):
        for keys in generate(rng, (count + part) // len(parts), times * size):
            yield [bytes([part + 1]) + key[1:] for key in keys]


STEADY_KINDS = {"chat": (_chat, 60), "scan": (_scan, 60), "popular": (_popular, 200), "agents": (_agents, 20)}
KINDS = STEADY_KINDS | {"shifting": (_shifting, 1)}


def made_up(kind: str, count: int, seed: int = 0, times: int = 1) -> Trace:
    """A trace of one of `KINDS`, with so many times its usual size: chats at a time, documents, agents."""
    generate, size = KINDS[kind]
    rng = random.Random(f"{kind} {seed}")
    requests = [
        TraceRequest(keys=keys, prompt_tokens=len(keys) * BLOCK + rng.randrange(1, BLOCK), timestamp=number)
        for number, keys in enumerate(generate(rng, count, times * size))
    ]
    return Trace(format="mooncake", block_tokens=BLOCK, requests=tuple(requests))


def write_trace(path: Path, trace: Trace) -> Path:
    """Writes a trace as a file in the Mooncake format."""
    lines = [
        {
            "timestamp": request.timestamp,
            "input_length": request.prompt_tokens,
            "output_length": 1,
            "hash_ids": [int.from_bytes(key) for key in request.keys],
        }
        for request in trace.requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
