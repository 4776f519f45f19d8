"""Recorded sessions of agents, packed: which earlier request of its session each prompt begins like, and for how many blocks.

    python -m tests.harness.agents SESSION.json ...      # packs 50 of them: the first by SHA-256, without those that are held out
    python -m tests.harness.agents 20 > agents.jsonl     # the first 20 again, for `hybrid-prefix replay`

Claude Code sessions of callanjfox/kv-cache-tester, traces/ (Apache-2.0). Their ids of 64-token blocks are joined to 256 tokens.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from itertools import count
from pathlib import Path

from megatron_hybrid_prefix.lab.traces import Trace, TraceRequest, read_trace

PACKED = Path(__file__).parent / "agents.jsonl.gz"
HELD_OUT = Path(__file__).parents[2] / "docs" / "data" / "agents_held_out.txt"
BLOCK_TOKENS = 256
_LEAST_BYTES, _SESSIONS = 50_000, 50


def packed(path: Path) -> list[list[int]]:
    """For each request of a session: the earlier request that it begins like, for how many blocks; tokens of prompt and answer; seconds."""
    first: dict[bytes, int] = {}  # that has the block
    found = []
    for number, request in enumerate(read_trace([path], block_tokens=BLOCK_TOKENS).requests):
        common = next((depth for depth in range(len(request.keys), 0, -1) if request.keys[depth - 1] in first), 0)
        before = first[request.keys[common - 1]] if common else 0
        found.append([before, common, request.prompt_tokens, request.answer_tokens, round(request.timestamp)])
        for key in request.keys[common:]:
            first[key] = number
    return found


def agents(sessions: int) -> Trace:
    """The first of these sessions."""
    requests, unused = [], count()
    for name, line in enumerate(gzip.decompress(PACKED.read_bytes()).splitlines()[1 : sessions + 1]):
        own: list[list[bytes]] = []
        for before, common, tokens, answer, at in json.loads(line)["requests"]:
            new = [next(unused).to_bytes(16, "big") for _ in range(tokens // BLOCK_TOKENS - common)]
            own.append((own[before][:common] if common else []) + new)
            more = {"keys": own[-1], "prompt_tokens": tokens, "answer_tokens": answer}
            requests.append(TraceRequest(timestamp=at, session=name, **more))
    requests.sort(key=lambda request: request.timestamp)
    return Trace(format="session", block_tokens=BLOCK_TOKENS, requests=tuple(requests))


def unpack(sessions: int) -> None:
    """Prints these sessions, a request a line."""
    for request in agents(sessions).requests:
        ids = [int.from_bytes(key, "big") for key in request.keys]
        fields = {"session_id": request.session, "timestamp": request.timestamp, "block_size": BLOCK_TOKENS}
        fields |= {"input_length": request.prompt_tokens, "out": request.answer_tokens, "hash_ids": ids}
        print(json.dumps(fields))


def pack(paths: list[str]) -> None:
    """Packs sessions."""
    held_out, by_hash = set(HELD_OUT.read_text().split()), {}
    for path in map(Path, paths):
        if path.stat().st_size > _LEAST_BYTES:
            by_hash[hashlib.sha256(path.read_bytes()).hexdigest()] = path
    chosen = sorted(by_hash.keys() - held_out)[:_SESSIONS]
    head = {"source": "https://github.com/callanjfox/kv-cache-tester, traces/", "license": "Apache-2.0"}
    head["request"] = "begins like which, for how many blocks; tokens of prompt, answer; seconds"
    lines = [head, *({"sha256": digest, "requests": packed(by_hash[digest])} for digest in chosen)]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    PACKED.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    unpack(int(sys.argv[1])) if sys.argv[1].isdecimal() else pack(sys.argv[1:])
