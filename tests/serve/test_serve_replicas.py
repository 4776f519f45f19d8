"""`tools/serve.py` on two ranks behind megatron's coordinator: two replicas, and one replica of two ranks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from megatron_hybrid_prefix import build_engine  # noqa: E402
from megatron_hybrid_prefix.tokenizer import ByteTokenizer  # noqa: E402
from tests.harness.engine_helpers import LOG_PROB_NOISE  # noqa: E402
from tests.harness.limits import HANG_S, wait_until  # noqa: E402
from tests.harness.server_process import ADMIN, BLOCK, HIT, LIMIT_TOKENS, PROMPT, Server, children, started  # noqa: E402

pytestmark = [pytest.mark.multi, pytest.mark.slow]

TOKENIZER = ByteTokenizer(512)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("replicas"), "--prompt-log-probs") as server:
        yield server


def cached(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def complete(client: Any, prompt: str = PROMPT, *, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0} | fields
    return client.completions.create(**fields, extra_body=extra or {})


def expected(model: Any) -> tuple[str, list[float]]:
    """Text and log-probs of `PROMPT` without a cache, computed in this process."""
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
        assert answer.choices[0].logprobs.token_logprobs == pytest.approx(log_probs, abs=LOG_PROB_NOISE)
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
        async with server.client(kind=openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(talk(client, number) for number in range(4)))

    before = server.metric("prompt_tokens_total")
    for turns in asyncio.run(talks()):
        for (_, prompt), (hit, _) in pairwise(turns):
            assert hit >= prompt - 2 * BLOCK  # the turn before
    wait_until(
        lambda: all(now > then for then, now in zip(before, server.metric("prompt_tokens_total"), strict=True)),
        "each replica counts prompt tokens",
    )


def test_idle_traffic_goes_to_all_replicas(server):
    """One request at a time, each with another prompt."""
    before = server.metric("prompt_tokens_total")
    for number in range(4):
        complete(server.client(), f"idle {number} {PROMPT}", max_tokens=1)
    wait_until(
        lambda: all(now > then for then, now in zip(before, server.metric("prompt_tokens_total"), strict=True)),
        "each replica counts prompt tokens",
    )


def test_salts_share_nothing(server):
    order = ["x", "y", "x", "y", "z"]
    found = [cached(complete(server.client(), extra={"cache_salt": f"salts {salt}"})) for salt in order]
    assert found == [0, 0, HIT, HIT, 0]


def test_log_probs_of_a_prompt_come_with_a_hit_too(server, tiny_reference):
    tokens = TOKENIZER.tokenize(PROMPT)
    rows = tiny_reference.log_probs(tokens)
    right = [float(row[token]) for row, token in zip(rows, tokens[1:], strict=False)]
    for hit in (0, HIT):
        answer = complete(server.client(), max_tokens=0, extra={"cache_salt": "scores", "prompt_logprobs": 1})
        entries = answer.choices[0].prompt_logprobs
        assert cached(answer) == hit and entries[0] is None
        found = [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], tokens[1:], strict=True)]
        assert found == pytest.approx(right, abs=LOG_PROB_NOISE)


@pytest.mark.parametrize("stop", [None, ["A", "="]])
def test_streams_say_the_same_in_one_piece(server, stop):
    client, fields = server.client(), {"max_tokens": 40, "stop": stop, "n": 2, "extra": {"ignore_eos": True}}
    whole = complete(client, **fields)
    texts, reasons, pieces = ["", ""], {}, [0, 0]
    for chunk in complete(client, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            pieces[choice.index] += 1
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices] and all(texts)
    assert pieces == [1, 1]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    full = complete(client, max_tokens=40, extra={"ignore_eos": True}).choices[0].text
    cut = min((full.index(word) for word in stop or () if word in full), default=len(full))
    assert texts[0] == full[:cut]


def test_an_engine_ends_at_a_stop_string(server):
    """It must stop by itself, because the protocol has no abort."""
    extra = {"ignore_eos": True}
    text = complete(server.client(), max_tokens=60, extra=extra).choices[0].text
    word = next(char for at, char in enumerate(text) if at >= 4 and char.isascii() and char not in text[:at])
    kept = []
    for stop in ([word], ["not to be found"]):
        prompt_tokens = sum(server.metric("prompt_tokens_total"))
        states = sum(server.metric("checkpoints_total", reason="decode"))
        answer = complete(server.client(), max_tokens=600, stop=stop, extra=extra | {"cache_salt": f"stop {stop}"})
        assert answer.choices[0].finish_reason == ("stop" if stop == [word] else "length")
        wait_until(lambda before=prompt_tokens: sum(server.metric("prompt_tokens_total")) > before, "it was counted")
        server.wait_until_drained()
        kept.append(sum(server.metric("checkpoints_total", reason="decode")) - states)
    # A state at the end of each block that an engine decodes.
    assert kept[0] <= 1 and kept[1] >= 600 // BLOCK - 1


def test_the_cache_can_be_reset(server):
    extra = {"cache_salt": "reset"}
    found = []
    for reset in (False, False, True, False):
        if reset:
            assert server.send("/admin/reset_cache", b"", ADMIN)[0] == 200
        found.append(cached(complete(server.client(), extra=extra)))
    assert found == [0, HIT, 0, HIT]


def test_many_clients_at_once(server):
    """64 at a time: whole answers, streams, clients that disconnect, and invalid requests."""
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
                    await asyncio.wait_for(client.completions.create(**fields | {"max_tokens": 60}), 0.02)
            else:
                wrong = {"max_tokens": -1} if kind == "bad" else {"prompt": "x" * 5000}
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.completions.create(**fields | wrong)
                assert {"message", "type", "param", "code"} == set(caught.value.body)

    async def load() -> None:
        async with server.client(kind=openai.AsyncOpenAI) as client:
            await asyncio.gather(*(ask(client, number) for number in range(64)))

    asyncio.run(asyncio.wait_for(load(), HANG_S))
    server.wait_until_drained()
    status, health = server.send("/health")
    assert (status, health["engine_failures"]) == (200, 0)
    status, answer = server.send("/v1/completions", b"{")
    assert status == 400 and set(answer) == {"error"}


def test_the_end_lets_answers_end(server):
    """The last test of this server: it is told to stop while it answers."""
    client = server.client()
    answers: list[Any] = []

    async def ask() -> None:
        async with server.client(kind=openai.AsyncOpenAI) as client:
            fields = {"max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
            task = asyncio.create_task(client.completions.create(model="tiny", prompt=PROMPT, **fields))
            while not server.metric("open_sequences")[0]:
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            answers.append(await task)

    assert complete(client).choices[0].text
    asyncio.run(asyncio.wait_for(ask(), HANG_S))
    assert answers[0].usage.completion_tokens == 40
    server.wait_until_gone()
    assert "an engine ended" not in server.errors() and "SystemExit" not in server.errors()


def test_one_replica_of_two_ranks_until_one_is_killed(tmp_path, tiny):
    with started(tmp_path, "--tp", "2") as server:
        check_hits(server, tiny)
        assert len(server.metric("slots")) == 1
        os.kill(server.ranks[1], signal.SIGKILL)
        server.wait_until_gone()
        assert server.process.returncode != 0 and "Signal 9 (SIGKILL)" in server.errors()


def test_a_coordinator_that_ends_ends_the_server(tmp_path):
    with started(tmp_path) as server:
        coordinator = next(
            pid for pid in children(server.ranks[0]) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(coordinator, signal.SIGKILL)
        server.wait_until_gone()
        assert server.process.returncode != 0 and "the coordinator ended" in server.errors()
