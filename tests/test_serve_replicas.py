"""`tools/serve.py` on two ranks, behind megatron's data-parallel coordinator: replicas, and one replica of two ranks. CPU."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
prometheus_parser = pytest.importorskip("prometheus_client.parser")

from megatron_hybrid_prefix import build_engine  # noqa: E402
from megatron_hybrid_prefix.tokenizer import ByteTokenizer  # noqa: E402

pytestmark = pytest.mark.multi

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 64
LIMIT_TOKENS = 1024
ADMIN = "admin-secret"
TOKENIZER = ByteTokenizer(512)
PROMPT = "Keys and values lie in blocks, and a state at the ends of some of them. " * 4
HIT = len(PROMPT) // BLOCK * BLOCK


class Server:
    """A server under torchrun, and all processes of it."""

    def __init__(self, process: subprocess.Popen[str], url: str, errors: Path) -> None:
        self.process, self.url, self._errors = process, url, errors
        self.ranks = sorted(_children(process.pid), key=_rank)
        self.pids = [pid for rank in self.ranks for pid in (rank, *_children(rank))]

    def client(self, kind: Any = None) -> Any:
        return (kind or openai.OpenAI)(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def send(self, path: str, data: bytes | None = None, token: str = "") -> tuple[int, Any]:
        request = urllib.request.Request(self.url + path, data, {"authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def metric(self, name: str, **labels: str) -> list[float]:
        """Samples with these labels, in the order of the replicas."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            families = prometheus_parser.text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
        found = [
            (sample.labels.get("replica", ""), sample.value)
            for sample in samples
            if sample.name == f"hybrid_prefix_{name}" and labels.items() <= sample.labels.items()
        ]
        return [value for _, value in sorted(found)]

    def wait_until(self, holds: Any, timeout_s: float = 30) -> None:
        end_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < end_s
            time.sleep(0.1)

    def wait_until_drained(self) -> None:
        """Nothing runs, and nothing that ran holds a block."""
        self.wait_until(
            lambda: (
                not any(
                    self.metric("running_requests") + self.metric("waiting_requests") + self.metric("open_sequences")
                )
                and self.metric("kv_blocks") == self.metric("kv_blocks_available")
            )
        )

    def errors(self) -> str:
        return self._errors.read_text()

    def wait_until_gone(self, timeout_s: float = 40) -> None:
        self.process.wait(timeout_s)
        self.wait_until(lambda: not any(map(_is_running, self.pids)), 10)


def _is_running(pid: int) -> bool:
    try:
        return " Z " not in re.sub(r"\(.*\)", "", Path(f"/proc/{pid}/stat").read_text())
    except FileNotFoundError:
        return False


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def _rank(pid: int) -> int:
    found = re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
    return int(found[1]) if found else -1


@contextmanager
def started(folder: Path, *argv: str) -> Iterator[Server]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--port", "0", "--block-size-tokens", str(BLOCK), "--max-sequence-length", str(LIMIT_TOKENS)]
    options += ["--max-requests", "4", "--max-waiting", "200", "--admin-token", ADMIN, *argv]
    errors = folder / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*torchrun, str(ROOT / "tools" / "serve.py"), *options],
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        found = (re.match(r"serving tiny on (http://\S+)", line) for line in lines)
        url = next((match[1] for match in found if match), None)
        assert url is not None, errors.read_text()[-4000:]
        yield Server(process, url, errors)
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("replicas")) as server:
        yield server


def cached(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def complete(client: Any, prompt: str = PROMPT, *, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0} | fields
    return client.completions.create(**fields, extra_body=extra or {})


def expected(model: Any) -> tuple[str, list[float]]:
    """Text and log-probs of `PROMPT` without a cache, in this process."""
    from megatron.core.inference.sampling_params import SamplingParams

    from megatron_hybrid_prefix.mcore.runner import run_batch

    engine = build_engine(model, tokenizer=TOKENIZER, max_sequence_length=LIMIT_TOKENS)
    params = SamplingParams(
        num_tokens_to_generate=12, top_k=1, termination_id=257, return_log_probs=True, skip_prompt_log_probs=True
    )
    answer = run_batch(engine, [TOKENIZER.tokenize(PROMPT)], params)[0]
    return TOKENIZER.detokenize(answer.generated), answer.log_probs


def check_hits(server: Server, model: Any) -> None:
    text, log_probs = expected(model)
    for hit in (0, HIT):
        answer = complete(server.client(), logprobs=0, extra={"cache_salt": "hits"})
        assert (cached(answer), answer.choices[0].text) == (hit, text)
        assert answer.choices[0].logprobs.token_logprobs == pytest.approx(log_probs, abs=1e-5)
        assert answer.choices[0].finish_reason == "length"


def test_the_second_call_is_cached_and_says_the_same(server, tiny):
    before = server.metric("time_to_first_token_seconds_count", cache="hit")
    check_hits(server, tiny)
    assert server.metric("time_to_first_token_seconds_count", cache="hit") == [before[0] + 1]


def test_conversations_spread_and_stay_where_their_prefix_is(server):
    async def talk(client: Any, number: int) -> list[int]:
        messages, found = [{"role": "system", "content": f"{number} {PROMPT}"}], []
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question {turn}? " * 10})
            answer = await client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            found.append((cached(answer), answer.usage.prompt_tokens))
        return found

    async def talks() -> list[Any]:
        async with server.client(openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(talk(client, number) for number in range(4)))

    before = server.metric("prompt_tokens_total")
    for turns in asyncio.run(talks()):
        for (_, prompt), (hit, _) in pairwise(turns):
            assert hit >= prompt - 2 * BLOCK  # the turn before
    server.wait_until(
        lambda: all(now > then for then, now in zip(before, server.metric("prompt_tokens_total"), strict=True))
    )


def test_salts_share_nothing(server):
    order = ["x", "y", "x", "y", "z"]
    found = [cached(complete(server.client(), extra={"cache_salt": f"salts {salt}"})) for salt in order]
    assert found == [0, 0, HIT, HIT, 0]


@pytest.mark.parametrize("stop", [None, ["A", "="]])
def test_streams_say_the_same_in_one_piece(server, stop):
    client, fields = server.client(), {"max_tokens": 40, "stop": stop, "n": 2, "extra": {"ignore_eos": True}}
    whole = complete(client, **fields)
    texts, reasons = ["", ""], {}
    for chunk in complete(client, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices] and all(texts)
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    full = complete(client, max_tokens=40, extra={"ignore_eos": True}).choices[0].text
    cut = min((full.index(word) for word in stop or () if word in full), default=len(full))
    assert texts[0] == full[:cut]


def test_the_cache_can_be_reset(server):
    extra = {"cache_salt": "reset"}
    found = []
    for reset in (False, False, True, False):
        if reset:
            assert server.send("/admin/reset_cache", b"", ADMIN)[0] == 200
        found.append(cached(complete(server.client(), extra=extra)))
    assert found == [0, HIT, 0, HIT]


def test_many_clients_at_once(server):
    """64 at a time: answers, streams, clients that go away, and nonsense."""
    rng = random.Random(0)

    async def ask(client: Any, number: int) -> None:
        for turn in range(2):
            kind = rng.choice(["whole", "stream", "gone", "bad", "long"])
            fields: dict[str, Any] = {
                "model": "tiny",
                "prompt": PROMPT[: rng.randrange(1, len(PROMPT))] + f"{number} {turn}",
                "max_tokens": rng.randrange(1, 30),
                "extra_body": {"cache_salt": f"tenant {number % 3}", "ignore_eos": True},
            }
            if kind == "whole":
                answer = await client.completions.create(**fields)
                assert answer.usage.completion_tokens == fields["max_tokens"]
            elif kind == "stream":
                chunks = [chunk async for chunk in await client.completions.create(**fields, stream=True)]
                assert sum(bool(chunk.choices[0].finish_reason) for chunk in chunks) == 1
            elif kind == "gone":
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(client.completions.create(**fields | {"max_tokens": 200}), 0.02)
            else:
                wrong = {"max_tokens": -1} if kind == "bad" else {"prompt": "x" * 5000}
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.completions.create(**fields | wrong)
                assert {"message", "type", "param", "code"} == set(caught.value.body)

    async def load() -> None:
        async with server.client(openai.AsyncOpenAI) as client:
            await asyncio.gather(*(ask(client, number) for number in range(64)))

    asyncio.run(asyncio.wait_for(load(), 120))
    server.wait_until_drained()
    status, health = server.send("/health")
    assert (status, health["engine_failures"]) == (200, 0)
    status, answer = server.send("/v1/completions", b"{")
    assert status == 400 and set(answer) == {"error"}


def test_the_end_lets_answers_end(server):
    """The last test of this server: told to end while it answers, as torchrun and the terminal tell all its processes."""
    client = server.client()
    answers: list[Any] = []

    async def ask() -> None:
        async with server.client(openai.AsyncOpenAI) as client:
            fields = {"max_tokens": 100, "temperature": 0, "extra_body": {"ignore_eos": True}}
            task = asyncio.create_task(client.completions.create(model="tiny", prompt=PROMPT, **fields))
            while not server.metric("open_sequences")[0]:
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            answers.append(await task)

    assert complete(client).choices[0].text
    asyncio.run(asyncio.wait_for(ask(), 60))
    assert answers[0].usage.completion_tokens == 100
    server.wait_until_gone()
    assert "an engine ended" not in server.errors() and "SystemExit" not in server.errors()


def test_one_replica_of_two_ranks_until_one_is_killed(tmp_path, tiny):
    with started(tmp_path, "--tp", "2") as server:
        check_hits(server, tiny)
        assert len(server.metric("slots")) == 1
        os.kill(server.ranks[1], signal.SIGKILL)
        server.wait_until_gone()
        assert server.process.returncode != 0


def test_a_coordinator_that_ends_ends_the_server(tmp_path):
    with started(tmp_path) as server:
        coordinator = next(
            pid for pid in _children(server.ranks[0]) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(coordinator, signal.SIGKILL)
        server.wait_until_gone()
        assert server.process.returncode != 0 and "the coordinator ended" in server.errors()
