"""`hybrid-prefix serve` on two ranks behind megatron's coordinator: two replicas, and one replica of two ranks."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from megatron_hybrid_prefix.serve.http_server import SAME_SIGNAL_S
from tests.harness.engine_helpers import LOG_PROB_NOISE
from tests.harness.limits import HANG_S
from tests.harness.server_process import ADMIN, BLOCK, HIT, PROMPT, Endpoint, Server, children, post, started
from tests.serve.test_serve import TOKENIZER, cached, check_hits, check_stuck, complete, many_at_once, running, why_not

pytestmark = [pytest.mark.multi, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("replicas"), "--prompt-log-probs") as server:
        yield server


def test_the_second_call_is_cached_and_says_the_same(server, tiny):
    before = server.metric("time_to_first_token_seconds_count", cache="hit")
    check_hits(server, tiny, "hits")
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
    assert all(now > then for then, now in zip(before, server.metric("prompt_tokens_total"), strict=True))


def test_idle_traffic_goes_to_all_replicas(server):
    """One request at a time: equal prompts with different salts take turns, too. The replicas' figures add up."""
    before = server.metric("prompt_tokens_total")
    found = [
        complete(server.client(), max_tokens=1, extra={"cache_salt": f"idle {number}"}).usage for number in range(4)
    ]
    grown = [now - then for then, now in zip(before, server.metric("prompt_tokens_total"), strict=True)]
    assert min(grown) > 0 and sum(grown) == sum(usage.prompt_tokens for usage in found)
    status, health = server.send("/health")
    assert status == 200 and health["replicas"] == {"0": "ok", "1": "ok"}


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


def events(server: Endpoint, **fields: Any) -> list[Any]:
    """The events of a stream, without what differs between two equal requests."""
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "logprobs": 3}
    body |= {"stream_options": {"continuous_usage_stats": True}} | fields
    return [event | {"id": "", "created": 0} for event in server.events("/v1/completions", body)]


def without_log_probs(found: list[Any]) -> tuple[list[Any], list[float]]:
    """Events without their log-probs, and these."""
    log_probs = []
    for event in found:
        for choice in event["choices"]:
            given = choice["logprobs"]
            if given is not None:
                log_probs += given.pop("token_logprobs")
                given["top_logprobs"] = [sorted(top) for top in given["top_logprobs"]]
    return found, log_probs


def test_streams_are_those_of_one_process(server, tiny):
    """Event by event: greedy, with a seed, with other options of the sampling, and with log-probs."""
    salt = {"cache_salt": "one process"}
    kinds: list[dict[str, Any]] = [
        salt | {"temperature": 0},
        salt | {"temperature": 0.9, "seed": 7, "n": 2},
        salt | {"temperature": 1.2, "seed": 8, "top_k": 20, "min_p": 0.01, "presence_penalty": 0.5},
        salt | {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {"66": 2.0}},
        salt | {"temperature": 0, "stop": ["A", "="], "n": 2},
        salt | {"seed": 9, "n": 2, "return_token_ids": True, "stop_token_ids": [*range(64)], "min_tokens": 20},
    ]
    with running(tiny) as alone:
        expected = [without_log_probs(events(alone, **fields)) for fields in kinds]
    found = [without_log_probs(events(server, **fields)) for fields in kinds]
    for (here, here_log_probs), (there, there_log_probs) in zip(expected, found, strict=True):
        by_choice = [sorted(stream, key=lambda event: event["choices"][0]["index"]) for stream in (here, there)]
        for stream in by_choice:
            for event in stream:
                event.pop("usage")  # counts both answers, whose order may differ
        assert by_choice[0] == by_choice[1]
        assert len(here) > 5  # text of bytes that are no characters waits for the next that is
        assert sorted(here_log_probs) == pytest.approx(sorted(there_log_probs), abs=LOG_PROB_NOISE)


def test_ids_of_drafts_are_those_without(tmp_path, tiny_mtp):
    """Two replicas that draft, against one process that does not: the ids of each answer, and a log-prob for each."""
    fields = {"seed": 9, "n": 2, "return_token_ids": True, "stop_token_ids": [*range(64)], "min_tokens": 20}
    options = ("--preset", "tiny-mtp", "--served-model-name", "tiny", "--num-speculative-tokens", "2")
    with running(tiny_mtp) as alone, started(tmp_path, *options) as server:
        ids: list[dict[int, list[int]]] = [{0: [], 1: []}, {0: [], 1: []}]
        for found, endpoint in zip(ids, (alone, server), strict=True):
            for event in events(endpoint, **fields):
                (choice,) = event["choices"]
                found[choice["index"]] += choice["token_ids"]
                assert len(choice["token_ids"]) == len((choice["logprobs"] or {"tokens": []})["tokens"])
    assert ids[0] == ids[1]
    assert all(len(tokens) > 20 for tokens in ids[0].values())


def decoded_blocks(server: Server) -> float:
    """Blocks that the engines decoded to their end: each has a state."""
    return sum(server.metric("checkpoints_total", reason="decode"))


def test_an_engine_ends_at_a_stop_string(server):
    extra = {"ignore_eos": True}
    text = complete(server.client(), max_tokens=60, extra=extra).choices[0].text
    word = next(char for at, char in enumerate(text) if at >= 4 and char.isascii() and char not in text[:at])
    kept = []
    for stop in ([word], ["not to be found"]):
        states = decoded_blocks(server)
        answer = complete(server.client(), max_tokens=300, stop=stop, extra=extra | {"cache_salt": f"stop {stop}"})
        assert answer.choices[0].finish_reason == ("stop" if stop == [word] else "length")
        server.wait_until_drained()
        kept.append(decoded_blocks(server) - states)
    assert kept[0] < kept[1] and kept[1] >= 300 // BLOCK - 1


def test_clients_that_leave_free_their_memory(server):
    """A few are answered, the others wait. All are gone before their last token.

    A client of openai may take as long to send all requests, on a busy machine, as the engines take to answer the first
    ones. Here it is nothing but calls of sockets.
    """
    clients, most_tokens = 32, 700
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": most_tokens, "stream": True, "ignore_eos": True}
    bodies = [json.dumps(fields | {"cache_salt": f"leaves {number}"}) for number in range(clients)]
    before = decoded_blocks(server), server.metrics()[("cancelled_requests_total", ())]
    with ExitStack() as leaving:
        connections = [http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=HANG_S) for _ in bodies]
        for connection, body in zip(connections, bodies, strict=True):
            leaving.callback(connection.close)
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = leaving.enter_context(connections[0].getresponse())
        assert answer.readline().startswith(b"data: ")
    server.wait_until_drained()
    cancelled = server.metrics()[("cancelled_requests_total", ())] - before[1]
    assert 0 < cancelled <= clients
    assert decoded_blocks(server) - before[0] < clients * (most_tokens // BLOCK), "all were answered to the end"


def test_one_key_goes_to_one_replica(server):
    """Different prompts and salts, so nothing but the key holds them together."""
    for key in ("first", "second"):
        before = server.metric("prompt_tokens_total")
        for number in range(4):
            extra = {"prompt_cache_key": key, "cache_salt": f"{key} {number}"}
            complete(server.client(), f"{number} {key} {PROMPT}", max_tokens=1, extra=extra)
        grown = [now > then for then, now in zip(before, server.metric("prompt_tokens_total"), strict=True)]
        assert sorted(grown) == [False, True]


def test_the_cache_can_be_reset(server):
    extra = {"cache_salt": "reset", "return_cache_reuse": True}
    found = []
    for reset in (False, False, True, False):
        if reset:
            assert server.send("/admin/reset_cache", b"", ADMIN)[0] == 200
        found += why_not(complete(server.client(), extra=extra))
    assert found == ["no_such_prefix", None, "epoch", None]


def test_each_replica_explains_its_own_cache(server):
    extra = {"cache_salt": "explain"}
    complete(server.client(), extra=extra)
    body = {"request": {"prompt": PROMPT} | extra}
    with ThreadPoolExecutor() as pool:  # each gets the answers to its own question
        bodies = [body, {"request": body["request"] | {"prompt": PROMPT[:-9]}}] * 2
        answers = list(pool.map(lambda each: server.send("/admin/explain", each, ADMIN), bodies))
    for (status, answer), asked in zip(answers, bodies, strict=True):
        assert status == 200 and list(answer["replicas"]) == ["0", "1"]
        found = answer["replicas"].values()
        assert {each["prompt_tokens"] for each in found} == {len(asked["request"]["prompt"])}
        assert sorted(each["resume_tokens"] for each in found) == [0, HIT]


def test_many_clients_at_once(server):
    seen = many_at_once(server, turns=2)
    server.wait_until_drained()
    status, health = server.send("/health")
    assert (status, health["engine_failures"]) == (200, 0)
    assert all(seen[kind] for kind in ("stream", "whole", "cancel", "timeout", "bad", "long")), seen


def test_the_end_lets_answers_end(server):
    """The last test of this server: it is told to stop while it answers."""
    fields = {"max_tokens": 40, "extra": {"ignore_eos": True}, "stream_options": {"include_usage": True}}
    with complete(server.client(), stream=True, **fields) as stream:
        chunks = iter(stream)
        assert next(chunks).choices
        server.process.send_signal(signal.SIGTERM)
        *_, last = chunks
    assert last.usage.completion_tokens == 40
    server.wait_until_gone()
    assert "an engine ended" not in server.errors() and "SystemExit" not in server.errors()


@pytest.mark.parametrize("victim", ["rank 1", "coordinator"])
def test_one_replica_of_two_ranks_until_a_process_is_killed(tmp_path, tiny, victim):
    """Torchrun then ends the others, and says so."""
    with started(tmp_path, "--tp", "2", with_torchrun=True) as server:
        check_hits(server, tiny, "before")
        assert len(server.metric("slots")) == 1
        if find_spec("llguidance"):
            answer = complete(server.client(), extra={"structured_outputs": {"regex": "abc"}})
            assert answer.choices[0].text == "abc"
            check_stuck(server)
        with complete(server.client(), max_tokens=700, stream=True, extra={"ignore_eos": True}) as stream:
            next(iter(stream))
        server.wait_until_drained()  # all ranks aborted it at the same step
        assert decoded_blocks(server) < 700 // BLOCK / 2
        check_hits(server, tiny, "after")
        coordinator = next(
            pid for pid in children(server.ranks[0]) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(server.ranks[1] if victim == "rank 1" else coordinator, signal.SIGKILL)
        server.wait_until_gone()
        assert server.process.wait(HANG_S) != 0
        assert ("SIGKILL" if victim == "rank 1" else "the coordinator ended") in server.errors()


def test_routes_of_experts_come_through_the_coordinator(tmp_path):
    body = {"model": "tiny-moe", "token_ids": [5, 6, 7] * BLOCK, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    with started(tmp_path, "--preset", "tiny-moe", "--enable-return-routed-experts") as server:
        (_, cold), (_, hit) = [server.send("/inference/v1/generate", body) for _ in range(2)]
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert cold["choices"] == hit["choices"] and len(hit["choices"][0]["routed_experts"]) > 3 * BLOCK * 4 * 4


async def lines_of(server: Server, number: int, begun: list[int], **fields: Any) -> list[str]:
    """Lines of a streamed answer with its status; its number is in ``begun`` once it has begun."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = {"model": "tiny", "prompt": f"{number} {PROMPT}", "max_tokens": 400, "stream": True, "ignore_eos": True}
    writer.write(post("/v1/completions", json.dumps(body | fields).encode(), "connection: close"))
    lines = []
    while line := await reader.readline():
        lines.append(line.decode().strip())
        if line.startswith(b"data:") and number not in begun:
            begun.append(number)
    writer.close()
    return [line for line in lines if line.startswith(("HTTP", "data:"))]


def test_a_lost_replica_is_named_and_the_others_go_on(tmp_path):
    """One of three is killed with streams open, later one is stopped. The end comes with two signals."""

    async def streams(number: int, then: Callable[[], None]) -> list[list[str]]:
        begun: list[int] = []
        asking = [asyncio.create_task(lines_of(server, stream, begun)) for stream in range(number)]
        while len(begun) < number:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(then)
        return await asyncio.gather(*asking)

    def is_cut(lines: list[str], code: str) -> bool:
        assert "HTTP/1.1 200" in lines[0] and lines[-1] == "data: [DONE]"
        return f'"{code}"' in lines[-2]

    def end() -> None:
        os.kill(server.ranks[1], signal.SIGSTOP)
        for pause_s in (
            0,
            2 * SAME_SIGNAL_S,
            2 * SAME_SIGNAL_S,
        ):  # closer signals count as one; one may be handled late
            time.sleep(pause_s)
            server.process.send_signal(signal.SIGTERM)

    with started(tmp_path, "--drain-time", str(HANG_S), ranks=3) as server:
        found = asyncio.run(asyncio.wait_for(streams(9, lambda: os.kill(server.ranks[2], signal.SIGKILL)), HANG_S))
        cut = [is_cut(lines, "replica_lost") for lines in found]
        assert 0 < sum(cut) < len(cut)
        assert all('"length"' in lines[-2] for lines, is_lost in zip(found, cut, strict=True) if not is_lost)
        status, health = server.send("/health")
        assert (status, health["status"]) == (200, "degraded")
        assert health["replicas"] == {"0": "ok", "1": "ok", "2": "lost"}
        assert server.metric("replica_up") == [1, 1, 0] and len(server.metric("kv_blocks")) == 2
        for number in range(6):
            assert complete(server.client(), f"{number} {PROMPT}", max_tokens=1).choices
        server.wait_until_drained()
        assert "replica 2 is lost: the coordinator cannot reach it" in server.errors()
        found = asyncio.run(asyncio.wait_for(streams(6, end), HANG_S))
        assert any([is_cut(lines, "server_stopping") for lines in found])
        os.kill(server.ranks[1], signal.SIGKILL)  # as torchrun does, later
        server.wait_until_gone()
