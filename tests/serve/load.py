"""A load with many clients that leave, against the real command: what is lost, does memory grow, does ``/health`` answer?

    python -m tests.serve.load [--rounds 3] [--requests 300] [--json FILE]

64 streams at a time, 300 requests a round; about half of the clients leave: in the middle of their request, before the first
token, or after some. One request in 20 has a prompt of 8,000 tokens. Meanwhile ``/health`` is asked every 20 ms. After
each round nothing may run or wait, all KV blocks must be free or evictable, and after a reset of the cache all slots
must be free. The exit status is 1 if something is lost. Figures: ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.harness.server_process import ADMIN, Endpoint

STREAMS, REQUESTS = 64, 300
LONG_TOKENS, LONG_EVERY = 8_000, 20
PING_S = 0.02
OPTIONS = [
    "--preset",
    "tiny",
    "--port",
    "0",
    "--block-size-tokens",
    "64",
    "--max-requests",
    "64",
    "--cache-gb",
    "0.55",
    "--max-sequence-length",
    "8192",
]


class Command(Endpoint):
    """The server as a process of its own."""

    def __init__(self, *options: str) -> None:
        root = Path(__file__).resolve().parents[2]
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_hybrid_prefix", "serve", *OPTIONS, "--admin-token", ADMIN, *options],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert self.process.stdout is not None
        found = (re.match(r"serving .* on (http://\S+:(\d+))", line) for line in iter(self.process.stdout.readline, ""))
        match = next(filter(None, found))
        self.url, self.port = match[1], int(match[2])

    def resident_mb(self) -> float:
        """Resident memory of the process."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) / 1024  # type: ignore[index]  # Linux has it

    def stop(self) -> int:
        """Ends the process. Returns its exit status."""
        self.process.terminate()
        return self.process.wait(60)


class Round:
    """One round of requests.

    Args:
        server: The server.
        seed: Of what clients ask and do.
        requests: Number of requests.
    """

    def __init__(self, server: Command, seed: int, requests: int) -> None:
        self._server, self._seed, self._requests = server, seed, requests
        self._places = asyncio.Semaphore(STREAMS)
        self._long_open = 0
        self._ended = False
        self.seen: Counter[str] = Counter()
        self.health_ms: list[float] = []
        self.health_beside_long_ms: list[float] = []
        self.first_token_ms: list[float] = []

    async def run(self) -> None:
        """Sends all requests; returns when all have ended."""
        pinging = asyncio.create_task(self._ping())
        await asyncio.gather(*(self._request(number) for number in range(self._requests)))
        self._ended = True
        await pinging

    async def _request(self, number: int) -> None:
        chooser = random.Random(f"{self._seed} {number}")
        is_long = number % LONG_EVERY == 0
        leaves = chooser.choice(["in the request", "before a token", "after tokens"]) if number % 2 else None
        shared = f"{chooser.randrange(20)}: " + "shared words of many prompts " * 20
        prompt = f"{self._seed}/{number} " + "x" * LONG_TOKENS if is_long else shared[: chooser.randrange(100, 600)]
        body = {"model": "tiny", "prompt": prompt[:LONG_TOKENS], "stream": True, "ignore_eos": True}
        body |= {"max_tokens": 8 if is_long else chooser.randrange(10, 60)}
        async with self._places:
            self._long_open += is_long
            try:
                self.seen[await self._stream(json.dumps(body).encode(), leaves, chooser)] += 1
            finally:
                self._long_open -= is_long

    async def _stream(self, body: bytes, leaves: str | None, chooser: random.Random) -> str:
        """Sends a request and reads its stream. Returns how it ended."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            if leaves == "in the request":
                writer.write(head + body[: len(body) // 2])
                await asyncio.sleep(chooser.random() / 10)
                return "left in the request"
            began_s = time.perf_counter()
            writer.write(head + body)
            if leaves == "before a token":
                await asyncio.sleep(chooser.random() / 20)
                return "left before a token"
            status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
            if status != 200:
                return f"status {status}"
            events, rest = chooser.randrange(1, 8) if leaves else -1, b""
            while events:
                rest += await reader.read(1 << 16)
                if rest and began_s:
                    self.first_token_ms.append((time.perf_counter() - began_s) * 1000)
                    began_s = 0.0
                if b"[DONE]" in rest:
                    return "whole" if b'"error"' not in rest else "error event"
                events -= 1
            return "left after tokens"
        finally:
            writer.transport.abort()

    async def _ping(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        while not self._ended:
            beside_long, began_s = self._long_open > 0, time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert b" 200 " in head and length is not None
            await reader.readexactly(int(length[1]))
            (self.health_beside_long_ms if beside_long else self.health_ms).append(
                (time.perf_counter() - began_s) * 1000
            )
            await asyncio.sleep(PING_S)
        writer.transport.abort()


def quantile(values: list[float], part: float) -> float:
    """The smallest value that is at least as large as this part of all."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def lost(server: Command) -> list[str]:
    """What did not come back a minute after the last client left: places, blocks, slots."""
    end_s = time.monotonic() + 60
    while True:
        found = {name: value for (name, labels), value in server.metrics().items() if not labels}
        problems = [
            f"{name}={found[name]:.0f}"
            for name in ("open_sequences", "running_requests", "waiting_requests", "engine_failures")
            if found[name]
        ]
        if found["kv_blocks"] != found["kv_blocks_available"]:
            problems.append(f"{found['kv_blocks'] - found['kv_blocks_available']:.0f} KV blocks")
        if not problems or time.monotonic() > end_s:
            break
        time.sleep(0.1)
    used = found["slots_used"]
    request = urllib.request.Request(f"{server.url}/admin/reset_cache", b"", {"authorization": f"Bearer {ADMIN}"})
    urllib.request.urlopen(request, timeout=60).close()
    found = {name: value for (name, labels), value in server.metrics().items() if not labels}
    if found["slots_used"]:
        problems.append(f"{found['slots_used']:.0f} of {used:.0f} slots after a reset")
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rounds, prints a line each and a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of a round")
    parser.add_argument("--json", type=Path, help="write all figures")
    args = parser.parse_args(argv)
    server = Command("--no-access-log")
    rounds: list[dict[str, Any]] = []
    failed = False
    try:
        start_mb = server.resident_mb()
        print(f"resident memory at the start: {start_mb:.0f} MB", flush=True)
        for number in range(args.rounds):
            began_s, one = time.perf_counter(), Round(server, number, args.requests)
            asyncio.run(one.run())
            seconds = time.perf_counter() - began_s
            problems = lost(server)
            other = {end: count for end, count in one.seen.items() if end.startswith(("status", "error"))}
            failed |= bool(problems or other)
            figures = {
                "seconds": seconds,
                "ends": dict(one.seen),
                "lost": problems,
                "resident_mb": server.resident_mb(),
                "load_average": os.getloadavg()[0],
                "first_token_ms": median(one.first_token_ms),
            }
            for name, values in (("health", one.health_ms), ("health_beside_long", one.health_beside_long_ms)):
                figures |= {f"{name}_{part}_ms": quantile(values, part) for part in (0.5, 0.99, 1.0)}
                figures[f"{name}_count"] = len(values)
            rounds.append(figures)
            print(
                f"round {number}: {seconds:.1f} s, {figures['ends']}, lost: {', '.join(problems) or 'nothing'}; "
                f"resident {figures['resident_mb']:.0f} MB; /health p50 / p99 / max while prompts of {LONG_TOKENS:,} tokens "
                f"are computed: {figures['health_beside_long_0.5_ms']:.1f} / {figures['health_beside_long_0.99_ms']:.1f} / "
                f"{figures['health_beside_long_1.0_ms']:.1f} ms ({figures['health_beside_long_count']} asked); "
                f"load average {figures['load_average']:.1f}",
                flush=True,
            )
    finally:
        status = server.stop()
    p99 = [figures["health_beside_long_0.99_ms"] for figures in rounds]
    print(f"/health p99: best {min(p99):.1f} ms, median {median(p99):.1f} ms; the server's exit status: {status}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"start_mb": start_mb, "rounds": rounds}, indent=1))
    return int(failed or status != 0)


if __name__ == "__main__":
    sys.exit(main())
