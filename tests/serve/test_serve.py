"""`hybrid-prefix serve`: the `openai` client, cache statistics, tenants, errors, load, failures. On the CPU with `tiny`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.cli import serve
from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.metrics import PrefixStats
from megatron_hybrid_prefix.serve.app import make_app
from megatron_hybrid_prefix.serve.chat_template import ChatForm
from megatron_hybrid_prefix.serve.detokenizer import TextStream
from megatron_hybrid_prefix.serve.event_stream import to_json
from megatron_hybrid_prefix.serve.http_server import HttpServer
from megatron_hybrid_prefix.serve.metrics import families_of, prefix_samples
from megatron_hybrid_prefix.text.tokenizer import ByteTokenizer
from megatron_hybrid_prefix.upstream.blocks import available_blocks, block_counts
from tests.engine.test_not_finite import embedding
from tests.harness.engine_helpers import LOG_PROB_NOISE, greedy, kv_budget, state_bytes
from tests.harness.limits import HANG_S, wait_until
from tests.harness.server_process import ADMIN, BLOCK, HIT, LIMIT_TOKENS, PROMPT, Endpoint, post

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ByteTokenizer(512)
BODY_BYTES = 64 << 10


class Server(Endpoint):
    """A server in a thread of this process, and its engine."""

    def __init__(
        self,
        model: Any,
        *,
        blocks: int = 256,
        max_requests: int = 4,
        slots: int = 64,
        cache_gb: float | None = None,
        engine_fields: dict[str, Any] | None = None,
        engine: Any = None,
        tokenizer: Any = TOKENIZER,
        **options: Any,
    ) -> None:
        budget = {"mamba_gb": slots * state_bytes(model) / 2**30} if cache_gb is None else {"cache_gb": cache_gb}
        self.engine = engine or build_engine(
            model,
            HybridPrefixConfig(**budget, retention_interval_tokens=0),
            tokenizer=tokenizer,
            **{"max_sequence_length": LIMIT_TOKENS, "max_requests": max_requests, "max_tokens": LIMIT_TOKENS}
            | {"block_size_tokens": BLOCK}
            | kv_budget(model, blocks, block_tokens=BLOCK, max_requests=max_requests)
            | (engine_fields or {}),
        )
        self.app = make_app(
            self.engine,
            tokenizer,
            **{"model": "tiny", "vocab_size": 512, "chat": ChatForm(), "admin_token": ADMIN} | options,
        )
        self.listener = serve.listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = HttpServer(self.app, drain_s=5.0, log_level="error")
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.listener]})

    @property
    def loop(self) -> Any:
        return self.app.state.backend

    def wait_until_idle(self) -> None:
        def is_idle() -> bool:
            found = self.metrics()
            return not any(found[(name, ())] for name in ("running_requests", "waiting_requests", "open_sequences"))

        wait_until(is_idle, "no request runs or waits")

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive(), "the server started")
        assert self._server.started

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(HANG_S)
        self.listener.close()
        self.loop._thread.join(HANG_S)
        assert not self._thread.is_alive() and not self.loop._thread.is_alive()

    def check_drained(self) -> None:
        """Checks that nothing runs and nothing is held. Call it only after the server has stopped."""
        engine, context = self.engine, self.engine.context
        assert not engine.has_unfinished_requests()
        assert not engine.requests and not self.loop._live and self.loop.open_sequences == 0
        assert not engine.stop_word_finished_request_ids and not engine.removals.aborting
        assert context.total_request_count == 0
        assert context.mamba_metadata.mamba_state_free_slot_count == context.max_requests
        allocator = context.kv_block_allocator
        assert available_blocks(allocator) == block_counts(allocator).total - 1
        assert not context.prefix_cache.live
        context.check_integrity()


@contextmanager
def running(model: Any, **options: Any) -> Iterator[Server]:
    server = Server(model, **options)
    server.start()
    try:
        yield server
        server.wait_until_idle()
    finally:
        server.stop()
    server.check_drained()


@contextmanager
def held(server: Server, monkeypatch: pytest.MonkeyPatch, steps: int = 20) -> Iterator[threading.Event]:
    """The engine computes so many steps, then waits until it is told to go on, or until the block ends.

    So what it generates has not ended before. Meanwhile it answers no questions, not those of ``/metrics`` either.
    """
    real, go_on, left = server.engine.step_modern, threading.Event(), iter(range(steps))

    def step() -> Any:
        if next(left, None) is None:
            assert go_on.wait(HANG_S)
        return real()

    with monkeypatch.context() as patched:
        patched.setattr(server.engine, "step_modern", step)
        try:
            yield go_on
        finally:
            go_on.set()


def cached(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def why_not(answer: Any) -> list[str | None]:
    return [found["reason"] for found in answer.usage.prompt_tokens_details.cache_reuse]


def complete(client: Any, prompt: Any = PROMPT, *, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0} | fields
    return client.completions.create(**fields, extra_body=extra or {})


def check_stuck(server: Endpoint) -> None:
    """A grammar gets stuck, whose end token is the only letter that goes on: the request has an error that says so."""
    body = {"model": "tiny", "prompt": "x", "structured_outputs": {"regex": "abc"}, "stop_token_ids": [ord("c")]}
    status, answer = server.send("/v1/completions", body)
    *chunks, last = server.events("/v1/completions", body)
    assert status == 400 and "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
    assert answer["error"] == last["error"] and answer["error"]["param"] == "structured_outputs"
    assert answer["error"]["message"] == "structured_outputs: no token of the vocabulary goes on."


def assert_error(body: Any, *, code: str | None = None) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert isinstance(body["error"]["type"], str)
    if code is not None:
        assert body["error"]["code"] == code


# --- The openai client, and the cache --------------------------------------------------------------------------------


def engines_answer(model: Any) -> tuple[str, list[float]]:
    """Text and log-probs after `PROMPT` of an engine without a cache."""
    from megatron_hybrid_prefix.mcore.runner import run_batch

    engine = build_engine(model, tokenizer=TOKENIZER, max_sequence_length=LIMIT_TOKENS)
    answer = run_batch(engine, [TOKENIZER.tokenize(PROMPT)], greedy(12, termination_id=257))[0]
    return TOKENIZER.detokenize(answer.generated), answer.log_probs


def check_hits(server: Endpoint, model: Any, salt: str) -> None:
    """A miss and a hit are the engine's answer."""
    text, log_probs = engines_answer(model)
    for hit in (0, HIT):
        answer = complete(server.client(), logprobs=0, extra={"cache_salt": salt})
        (choice,) = answer.choices
        assert (cached(answer), choice.text, choice.finish_reason) == (hit, text, "length")
        assert choice.logprobs.token_logprobs == pytest.approx(log_probs, abs=LOG_PROB_NOISE)
        usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
        assert usage == (len(PROMPT), 12, len(PROMPT) + 12)


def test_the_second_call_is_cached_and_says_the_same(server, tiny):
    check_hits(server, tiny, "hits")


def test_drafts_change_no_answer(tiny_nemotron_3, platform):
    """The engine is what the command's options make."""
    args = f"--num-speculative-tokens 3 --max-requests 4 --block-size-tokens {BLOCK} --cache-gb 0.05"
    args = serve.make_parser().parse_args([*args.split(), "--max-sequence-length", str(LIMIT_TOKENS)])
    engine = serve.make_engine(tiny_nemotron_3, TOKENIZER, platform, args)
    assert engine.num_speculative_tokens == 3
    with running(tiny_nemotron_3, engine=engine) as server:
        check_hits(server, tiny_nemotron_3, "hits")


@pytest.mark.parametrize("chat", [False, True])
def test_streamed_text_is_the_unstreamed(server, salt, chat):
    client = server.client()
    extra = salt | {"return_cache_reuse": True}
    fields: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 40, "extra_body": extra, "n": 2}
    if chat:
        create = client.chat.completions.create
        fields |= {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 2}
    else:
        create = client.completions.create
        fields |= {"prompt": [PROMPT, PROMPT[::-1]], "logprobs": 2, "echo": False, "stop": ["A", "="]}
    whole = create(**fields)
    texts, notes = [""] * len(whole.choices), [[] for _ in whole.choices]
    reasons, usages = {}, []
    for chunk in create(**fields, stream=True, stream_options={"include_usage": True}):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            assert choice.index not in reasons
            texts[choice.index] += (choice.delta.content or "") if chat else choice.text
            if choice.logprobs is not None:
                notes[choice.index] += choice.logprobs.content if chat else choice.logprobs.token_logprobs
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content if chat else choice.text for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert any(texts) and len(texts) == (2 if chat else 4)
    for streamed, choice in zip(notes, whole.choices, strict=True):
        values = [note.logprob for note in streamed] if chat else streamed
        at_once = choice.logprobs
        assert values == pytest.approx(
            [note.logprob for note in at_once.content] if chat else at_once.token_logprobs, abs=LOG_PROB_NOISE
        )
    assert not any(usages[:-1])
    assert usages[-1].completion_tokens == whole.usage.completion_tokens
    assert usages[-1].prompt_tokens_details.cached_tokens > 0
    assert why_not(whole)[0] == "no_such_prefix" and why_not(chunk) == [None] * len(why_not(whole))


def test_salts_share_nothing(server):
    client = server.client()
    assert server.send("/admin/reset_cache", b"", ADMIN)[0] == 200
    order = ["x", "y", "x", "y", None, None, "z"]
    found = [cached(complete(client, extra={} if salt is None else {"cache_salt": f"salts {salt}"})) for salt in order]
    assert found == [0, 0, HIT, HIT, 0, HIT, 0]


def test_tenants_share_nothing_whatever_their_salts(tiny):
    with running(tiny, keys={"key-a": "a", "key-b": "b", "key-a2": "a"}) as server:
        found = []
        for key, salt in (("key-a", "s"), ("key-b", "s"), ("key-a2", "s"), ("key-a", None), ("key-b", None)):
            extra = {"return_cache_reuse": True} | ({"cache_salt": salt} if salt else {})
            answer = complete(server.client(key), extra=extra)
            found.append(cached(answer))
            assert why_not(answer) == [None if cached(answer) else "no_such_prefix"], "it says what others have"
        counts = {
            labels[0][1]: count for (name, labels), count in server.metrics().items() if name == "not_reused_total"
        }
        assert counts.get("other_salt") is None and counts["no_such_prefix"] == 4, "anybody may read them"
        # A tenant that knows how the server joins name and salt gains nothing by it.
        found.append(cached(complete(server.client("key-b"), extra={"cache_salt": '["a", "s"]'})))
        assert found == [0, 0, HIT, 0, 0, 0]
        for path, body in (("/v1/completions", {"model": "tiny", "prompt": "x"}), ("/v1/models", None)):
            for token in (None, "wrong", ""):
                status, answer = server.send(path, body, token)
                assert status == 401
                assert_error(answer, code="invalid_api_key")
        with pytest.raises(openai.AuthenticationError):
            complete(server.client("wrong"))


def test_reading_and_writing_can_be_switched_off(server, salt):
    client = server.client()
    asked = [{"cache_write": False}, {}, {"cache_read": False}, {"cache_read": True}]
    answers = [complete(client, extra=salt | {"return_cache_reuse": True} | more) for more in asked]
    assert [*map(cached, answers)] == [0, 0, 0, HIT]
    assert [why_not(answer)[0] for answer in answers] == ["no_such_prefix"] * 2 + ["not_read", None]
    assert "cache_reuse" not in complete(client, extra=salt).usage.prompt_tokens_details.model_dump()


def test_breakpoints_of_a_prompt(server, salt):
    client, shared = server.client(), PROMPT[: 2 * BLOCK]
    complete(client, shared + "one" * BLOCK, extra=salt | {"cache_breakpoints": [2 * BLOCK]})
    assert cached(complete(client, shared + "two" * BLOCK, extra=salt)) == 2 * BLOCK


@pytest.mark.parametrize("breakpoints, expected", [(None, 3 * BLOCK), ([0], 3 * BLOCK), ([], 0)])
def test_a_system_prompt_is_shared_at_first_sight(server, salt, breakpoints, expected):
    system = {"role": "system", "content": "s" * (3 * BLOCK + 10)}
    extra = salt if breakpoints is None else salt | {"cache_breakpoints": breakpoints}

    def ask(question: str) -> int:
        answer = server.client().chat.completions.create(
            model="tiny",
            messages=[system, {"role": "user", "content": question * 100}],
            max_tokens=2,
            temperature=0,
            extra_body=extra,
        )
        return cached(answer)

    assert [ask("a"), ask("b")] == [0, expected]


def test_the_next_turn_finds_the_last_one(server, salt):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
    ]
    client = server.client()

    def ask() -> Any:
        return client.chat.completions.create(
            model="tiny", messages=messages, max_completion_tokens=8, temperature=0, extra_body=salt, seed=1
        )

    first = ask()
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Why?"},
    ]
    assert cached(ask()) >= first.usage.prompt_tokens // BLOCK * BLOCK - BLOCK > 0


def test_echo_ids_and_best_of(server, salt):
    client = server.client()
    plain = complete(client, extra=salt).choices[0].text
    assert complete(client, extra=salt, echo=True).choices[0].text == PROMPT + plain
    assert complete(client, TOKENIZER.tokenize(PROMPT), extra=salt, n=2, best_of=2).choices[1].text == plain
    streamed = "".join(chunk.choices[0].text for chunk in complete(client, extra=salt, echo=True, stream=True))
    assert streamed == PROMPT + plain


def test_a_stop_string_ends_the_answer(server, salt):
    client = server.client()
    whole = complete(client, extra=salt, max_tokens=60, logprobs=1)
    text = whole.choices[0].text
    word = text[len(text) // 2 :][:2]
    cut = complete(client, extra=salt, max_tokens=60, stop=word, logprobs=1)
    assert cut.choices[0].text == text[: text.index(word)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens <= whole.usage.completion_tokens
    notes = cut.choices[0].logprobs
    assert notes.token_logprobs == pytest.approx(
        whole.choices[0].logprobs.token_logprobs[: len(notes.tokens)], abs=LOG_PROB_NOISE
    )
    assert all(offset < len(cut.choices[0].text) for offset in notes.text_offset)


def test_models(server):
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# --- Operators -------------------------------------------------------------------------------------------------------


def test_metrics(server, salt):
    before = server.metrics()
    for _ in range(2):
        complete(server.client(), extra=salt)
    after = server.metrics()

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0)

    assert grown("prompt_tokens_total") == 2 * len(PROMPT)
    assert grown("reused_tokens_total", tier="device") == HIT
    assert grown("time_to_first_token_seconds_count", cache="hit") == 1
    assert grown("time_to_first_token_seconds_count", cache="miss") == 1
    assert grown("generated_tokens_total", status="finished") == 24
    assert grown("http_requests_total", path="/v1/completions", status="200") == 2
    stats = server.engine.context.prefix_stats()
    assert after[("slots", ())] == stats.slots_total == 64
    assert after[("slots_used", ())] == stats.slots_used > 0
    assert after[("bytes_used", ())] == stats.slots_used * server.engine.context.layout.state_bytes
    for name in ("lost_tokens_total", "tier_loads_total", "tier_stores_total", "evictions_total", "kv_evictions_total"):
        assert any(key[0] == name for key in after), name


def test_new_statistics_become_metrics_by_themselves():
    stats = PrefixStats().as_dict() | {
        "disk_bytes_loaded": 7,
        "host_slots_used": 3,
        "lost_tokens_late_load": 5,
        "reused_tokens_disk": 2,
        "loads_by_kind": {"kv": 1, "state": 2},
        "note": "text",
        "tiers": {"shared": {"bytes_used": 9, "faults": {"gone": 4, "write_ENOSPC": 6}}},
    }
    families = families_of(prefix_samples(stats))
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value for family in families for sample in family.samples
    }
    assert samples[("hybrid_prefix_disk_bytes_loaded_total", ())] == 7
    assert samples[("hybrid_prefix_tier_bytes_used", ("shared",))] == 9
    assert samples[("hybrid_prefix_tier_faults_total", ("shared", "write_ENOSPC"))] == 6
    assert samples[("hybrid_prefix_host_slots_used", ())] == 3
    assert samples[("hybrid_prefix_lost_tokens_total", ("late_load",))] == 5
    assert samples[("hybrid_prefix_reused_tokens_total", ("disk",))] == 2
    assert samples[("hybrid_prefix_loads_by_kind_total", ("state",))] == 2
    assert ("hybrid_prefix_fallbacks_total", ()) not in samples


def test_the_cache_can_be_reset_with_the_token(server, salt):
    client = server.client()
    complete(client, extra=salt)
    for token in (None, "wrong"):
        status, answer = server.send("/admin/reset_cache", b"", token)
        assert status == 401
        assert_error(answer)
    assert cached(complete(client, extra=salt)) == HIT
    assert server.send("/admin/reset_cache", b"", ADMIN) == (200, {"status": "ok"})
    asked = salt | {"return_cache_reuse": True}
    assert [why_not(complete(client, extra=asked)) for _ in range(2)] == [["epoch"], [None]]


# --- Errors ----------------------------------------------------------------------------------------------------------

COMPLETION = {"model": "tiny", "prompt": "x"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
# One of each code. test_bad_input.py has every field and type.
BAD = {
    "not JSON": (b"{", 400, "invalid_json", None),
    "other model": (COMPLETION | {"model": "gpt"}, 404, "model_not_found", "model"),
    "long prompt": (COMPLETION | {"prompt": "x" * 5000}, 400, "context_length_exceeded", "prompt"),
    "no tokens": (COMPLETION | {"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    "best_of": (COMPLETION | {"n": 1, "best_of": 2}, 400, "unsupported_parameter", "best_of"),
    "no prompt": ({"model": "tiny"}, 400, "missing_required_parameter", "prompt"),
    "type": (COMPLETION | {"stop": 1}, 400, "invalid_type", "stop"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(server, name):
    body, status, code, param = BAD[name]
    found, answer = server.send("/v1/completions", body)
    assert found == status, answer
    assert_error(answer, code=code)
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_chat_without_a_limit_goes_to_the_end(server, salt):
    answer = server.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x" * (LIMIT_TOKENS - 60)}],
        temperature=0,
        extra_body=salt | {"ignore_eos": True},
    )
    assert answer.usage.total_tokens == LIMIT_TOKENS
    assert answer.choices[0].finish_reason == "length"


def test_too_many_answers_at_once(tiny, monkeypatch):
    with running(tiny, max_waiting=0) as server:
        client = server.client()
        with pytest.raises(openai.BadRequestError):
            complete(client, n=5)
        long = {"max_tokens": 600, "extra": {"ignore_eos": True}, "stream": True}
        with held(server, monkeypatch), complete(client, n=4, **long) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                complete(client)
        assert_error({"error": caught.value.body}, code="rate_limit_exceeded")
        assert caught.value.response.headers["retry-after"]
        server.wait_until_idle()  # the stream was closed, so its answers were given up
        assert complete(client).choices[0].text


def test_a_step_that_fails_fails_its_requests_and_no_others(tiny, monkeypatch, caplog):
    with running(tiny) as server:
        client = server.client()
        expected = complete(client).choices[0].text
        real, fail = server.engine.controller._dynamic_step_forward_logits, threading.Event()

        def forward(*args: Any, **kwargs: Any) -> Any:
            if fail.is_set():
                raise RuntimeError("injected")
            return real(*args, **kwargs)

        monkeypatch.setattr(server.engine.controller, "_dynamic_step_forward_logits", forward)
        fail.set()
        with pytest.raises(openai.InternalServerError) as caught:
            complete(client)
        assert_error({"error": caught.value.body}, code="engine_failed")
        with pytest.raises(openai.InternalServerError, match="The engine failed"):  # why is in the log only
            complete(client, stream=True)  # before the first token it is an HTTP error, too
        fail.clear()
        assert "injected" in caplog.text
        assert complete(client).choices[0].text == expected
        assert server.send("/health")[1]["engine_failures"] == 2


def test_an_engine_that_cannot_go_on_is_unhealthy(tiny, monkeypatch):
    server = Server(tiny)
    server.start()
    try:

        def broken() -> None:
            raise RuntimeError("injected")

        monkeypatch.setattr(server.engine, "step_modern", broken)
        monkeypatch.setattr(server.engine, "reset", broken)
        for status in (500, 503):
            found, answer = server.send("/v1/completions", COMPLETION)
            assert found == status
            assert_error(answer)
        status, answer = server.send("/health")
        assert status == 503
        assert_error(answer)
        # One that was let in just before gets an answer, too.
        monkeypatch.setattr(type(server.loop), "problem", None)
        status, answer = server.send("/v1/completions", COMPLETION)
        assert status == 500
        assert_error(answer, code="engine_failed")
        monkeypatch.undo()
        assert server.metrics()[("engine_failures", ())] == 1
    finally:
        server.stop()


def test_an_abort_that_fails_fails_its_requests_and_no_others(tiny, monkeypatch, caplog):
    """Nobody waits for an engine that nobody steps."""
    with running(tiny) as server:
        client, real = server.client(), server.engine.abort_request
        expected = complete(client).choices[0].text

        def broken_once(request_id: int) -> None:
            monkeypatch.setattr(server.engine, "abort_request", real)
            raise RuntimeError("injected")

        monkeypatch.setattr(server.engine, "abort_request", broken_once)
        long = {"max_tokens": 600, "extra": {"ignore_eos": True}, "stream": True}
        with held(server, monkeypatch) as go_on, complete(client, **long) as stays:
            next(iter(stays))
            with complete(client, **long) as leaves:
                next(iter(leaves))
            wait_until(lambda: server.loop.open_sequences < 2, "the server knows that the client is gone")
            go_on.set()
            with pytest.raises(openai.APIError, match="The engine failed"):
                list(stays)
        assert "injected" in caplog.text
        assert complete(client).choices[0].text == expected
        assert server.send("/health")[1]["engine_failures"] == 1


# --- Clients that go away, and many of them --------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_frees_its_place(server, salt, streamed, monkeypatch):
    async def leave() -> None:
        body = json.dumps(COMPLETION | salt | {"max_tokens": 1000, "ignore_eos": True, "stream": streamed}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post("/v1/completions", body))
        if streamed:
            await reader.readuntil(b"data: ")
        else:
            while not server.engine.context.total_request_count:
                await asyncio.sleep(0.001)
        writer.transport.abort()

    before, steps = server.metrics(), server.engine.context.step_count
    with held(server, monkeypatch):
        asyncio.run(asyncio.wait_for(leave(), HANG_S))
        wait_until(lambda: not server.loop.open_sequences, "the server knows that the client is gone")
    server.wait_until_idle()
    assert 0 < server.engine.context.step_count - steps < 900  # of 1000
    after = server.metrics()
    key = ("cancelled_requests_total", ())
    assert after[key] == before[key] + 1


async def _raw(server: Endpoint, path: str, body: bytes, *, send_bytes: int | None = None) -> tuple[int, bytes]:
    """Status and body of a response; or sends only part of the request and disconnects."""
    reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
    try:
        writer.write(post(path, body, "connection: close")[:send_bytes])
        if send_bytes is not None:
            await writer.drain()
            return 0, b""
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        return int(head.split()[1]), rest
    finally:
        writer.transport.abort()


def many_at_once(server: Endpoint, clients: int = 64, turns: int = 4) -> Counter[str]:
    """What so many clients do at once: streams, whole answers, cancellations, invalid requests. Returns how often which."""
    rng = random.Random(0)
    seen: Counter[str] = Counter()

    async def ask(number: int, turn: int, api: Any, strict: Any) -> None:
        kind = rng.choice(["stream", "whole", "chat", "cancel", "timeout", "bad", "half", "long"])
        fields: dict[str, Any] = {
            "model": "tiny",
            "prompt": PROMPT[: rng.randrange(1, len(PROMPT))] + f"{number} {turn}" * rng.randrange(20),
            "max_tokens": rng.randrange(1, 60),
            "temperature": rng.choice([0, 1]),
            "n": rng.choice([1, 1, 2]),
            "extra_body": {"cache_salt": f"tenant {number % 3}", "ignore_eos": True},
        }
        try:
            if kind == "stream":
                chunks = [c async for c in await api.completions.create(**fields, stream=True)]
                assert sum(bool(c.choices[0].finish_reason) for c in chunks) == fields["n"]
            elif kind == "whole":
                answer = await strict.completions.create(**fields, logprobs=1)
                assert answer.usage.completion_tokens == fields["n"] * fields["max_tokens"]
            elif kind == "chat":
                prompt = fields.pop("prompt")
                messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": prompt}]
                answer = await strict.chat.completions.create(messages=messages, **fields, stop=["e", "xyz"])
                assert len(answer.choices) == fields["n"]
            elif kind == "cancel":
                async with await api.completions.create(**fields | {"max_tokens": 500}, stream=True) as stream:
                    async for _ in stream:
                        break
            elif kind == "timeout":
                call = api.completions.create(**fields | {"max_tokens": 500})
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(call, rng.uniform(0.001, 0.05))
            elif kind == "bad":
                body = BAD[rng.choice(list(BAD))][0]
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                path = rng.choice(["/v1/completions", "/v1/chat/completions"])
                status, text = await _raw(server, path, data)
                assert 400 <= status < 500
                assert_error(json.loads(text))
            elif kind == "half":
                body = json.dumps(COMPLETION).encode()
                await _raw(server, "/v1/completions", body, send_bytes=rng.randrange(20, 100))
            elif kind == "long":
                with pytest.raises((openai.BadRequestError, openai.APIStatusError)) as caught:
                    await api.completions.create(**fields | {"prompt": "x" * rng.choice([2000, 60_000])})
                assert caught.value.status_code in (400, 413, 429)
                assert_error({"error": caught.value.body})
            seen[kind] += 1
        except openai.RateLimitError as error:
            assert_error({"error": error.body}, code="rate_limit_exceeded")
            seen["429"] += 1

    async def client(number: int, *apis: Any) -> None:
        for turn in range(turns):
            await ask(number, turn, *apis)

    async def load() -> None:
        # The client's types say that every streamed chunk has a finish_reason; it is null except in the last one.
        api, strict = (
            server.client(kind=openai.AsyncOpenAI, _strict_response_validation=check) for check in (False, True)
        )
        async with api, strict:
            await asyncio.gather(*(client(number, api, strict) for number in range(clients)))

    asyncio.run(asyncio.wait_for(load(), HANG_S))
    return seen


@pytest.mark.slow
def test_many_clients_at_once(tiny):
    """On a server with room for few. Chunks and asynchronous scheduling; test_serve_replicas.py has neither."""
    from megatron.core.inference.config import AsyncScheduleMode

    fields = {"async_sched_mode": AsyncScheduleMode.ASYNC, "enable_chunked_prefill": True, "max_tokens": 256}
    sizes = {"blocks": 40, "slots": 12, "max_requests": 6, "max_waiting": 30, "body_bytes": 50_000}
    with running(tiny, **sizes, engine_fields=fields) as server:
        seen = many_at_once(server)
        server.wait_until_idle()
        status, health = server.send("/health")
        assert (status, health["engine_failures"]) == (200, 0)
        stats = server.engine.context.prefix_stats()
        assert stats.reused_tokens > 0 and stats.evictions + stats.kv_evictions > 0
        found = server.metrics()
        assert found[("http_requests_total", (("path", "/v1/completions"), ("status", "200")))] > 0
        assert not any(name == "http_requests_total" and dict(labels)["status"] >= "500" for name, labels in found)
        assert complete(server.client(), extra={"cache_salt": "after"}).choices[0].text
    assert all(seen[kind] for kind in ("stream", "whole", "chat", "cancel", "timeout", "bad", "half", "long")), seen


# --- Text, templates, the command ------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@example(list("a€\ufffd".encode()), ["€", "a€\ufffd"])
@given(
    st.lists(st.integers(0, 300), max_size=40) | st.text(max_size=20).map(lambda text: list(text.encode())),
    st.lists(st.text("ab\ufffd€", min_size=1, max_size=3), max_size=2),
)
def test_text_streams_say_what_decoding_at_once_says(tokens, stop):
    stream = TextStream(TOKENIZER, stop)
    pieces = []
    for token in tokens:
        pieces.append(stream.feed(token, 0.0))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    whole = TOKENIZER.detokenize(tokens)
    ends = [(at + len(word), at) for word in stop if (at := whole.find(word)) >= 0]
    assert "".join(pieces) == whole[: min(ends)[1] if ends else None]
    assert stream.stopped == bool(ends)
    notes = stream.notes(last=True)
    assert len(notes) == len(tokens) or ends
    assert all(a.offset <= b.offset for a, b in pairwise(notes))


def test_text_that_may_begin_a_stop_string_is_held_back():
    stream = TextStream(TOKENIZER, ["abc"])
    assert [stream.feed(token) for token in b"xabab"] == ["x", "", "", "ab", ""]
    assert (stream.feed(ord("c")), stream.stopped, stream.finish()) == ("", True, "")
    stream = TextStream(TOKENIZER, ["abc"])
    assert [stream.feed(token) for token in b"ab"] + [stream.finish()] == ["", "", "ab"]


def test_a_chat_template():
    template = (
        "{% if messages[-1].role == 'system' and messages|length > 1 %}{{ raise_exception('no') }}{% endif %}"
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    form = ChatForm(template, {"bos_token": "^"})
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    text = form.render(messages)
    assert text == "^<system>Be.</>\n<user>Hi</>\n<assistant>"
    assert form.ends(text, messages) == [len("^<system>Be.</>\n"), len("^<system>Be.</>\n<user>Hi</>\n")]
    with pytest.raises(ValueError, match="no"):
        form.render(messages[::-1])
    with pytest.raises(InputError, match="chat template"):
        ChatForm("{% if %}")


@pytest.mark.parametrize(
    "template, text",
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<a> & \'b\'"}'),
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "<a> & 'b'"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ strftime_now('%%') }}{{ tools is none }}{{ documents is none }}", "%TrueTrue"),
    ],
)
def test_a_chat_template_may_use_what_transformers_offers(template, text):
    assert ChatForm(template).render([{"role": "user", "content": "<a> & 'b'"}]) == text


@pytest.mark.parametrize(  # options of all commands: tests/cli/test_run_inference.py
    "argv, problem",
    [
        (["--tp", "2"], "tp=2"),
        (["--port", "99999"], "above 65535"),
        (["--enable-return-routed-experts"], "the model has no experts"),
        (["--api-keys", "nowhere"], "cannot read nowhere"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--host", "a" * 300 + ".."], "cannot listen on aaa"),
        (["--num-speculative-tokens", "1", "--port", "0"], "--num-speculative-tokens 1: tiny has no multi-token"),
        (["--drain-time", "-1"], "'-1' is not a number, 0 or above"),
        (["--cache-gb", "1e9", "--port", "0"], "--cache-gb 1e+09: 1e+09 GiB of host memory are needed, "),
        (["--mamba-gb", "1e9", "--port", "0"], "--mamba-gb 1e+09: the most for checkpoints in --cache-gb 0.3, so"),
        (["--chat-template", "nowhere"], "cannot read nowhere"),
        (["--shared", "file:///tmp/x?gb=1", "--host-gb", "1"], "needs a secret: set HYBRID_PREFIX_SECRET"),
        (["--shared", "file:///dev/null/x?gb=1&secret_file=/dev/zero0", "--host-gb", "1"], "cannot read secret_file"),
    ],
)
def test_bad_options_are_one_line(capsys, monkeypatch, argv, problem):
    monkeypatch.delenv("HYBRID_PREFIX_SECRET", raising=False)
    with capsys.disabled():  # megatron uses stderr's file number at import
        import megatron.core.inference.engines  # noqa: F401
    assert serve.main(argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and problem in lines[0]


def test_an_address_of_ipv6_stands_in_brackets():
    assert serve.url_of("::1", 8000) == "http://[::1]:8000" and serve.url_of("127.0.0.1", 80) == "http://127.0.0.1:80"
    args = serve.make_parser().parse_args(["--host", "[::1]"])
    serve.check_options(args)
    assert args.host == "::1", "what a socket takes"


def test_the_command(tmp_path):
    """As a user runs it: on any free port, one request, then Ctrl-C."""
    options = "--port 0 --max-sequence-length 1024 --served-model-name m --drain-time 0"
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_hybrid_prefix", "serve", *options.split()],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        url = next(m.group(1) for line in lines if (m := re.match(r"serving m on (http://\S+)", line)))
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=HANG_S)
        found = [cached(client.completions.create(model="m", prompt="x" * 600, max_tokens=2)) for _ in range(2)]
        assert found == [0, 512]
        fields: dict[str, Any] = {"max_tokens": 1000, "extra_body": {"ignore_eos": True}}
        with client.completions.create(model="m", prompt="x", stream=True, **fields) as stream:
            chunks = iter(stream)
            next(chunks)
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="shutting down"):
                list(chunks)
        _, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, errors
        assert sum(" INFO " in line and " POST " in line for line in errors.splitlines()) == 3, errors
        told, cut = (line for line in errors.splitlines() if " WARNING " in line)
        assert " INFO - the server ends after a drain of 0." in errors
        assert told.endswith(" WARNING - SIGINT: no new requests; open ones (1) have 0 s"), errors
        assert cut.endswith(" WARNING - the drain time is over: open requests (1) end now"), errors
    finally:
        process.kill()
        process.wait()


def test_an_answer_that_is_not_finite_fails_alone(tiny):
    """Also where log-probs are asked for, and in a stream; what is sent is JSON."""
    with running(tiny) as server:
        client, bad = server.client(), ord("~")
        with embedding(tiny, bad, float("nan")):
            for fields in ({}, {"stream": True}, {"logprobs": 2, "temperature": 1.0}):
                with pytest.raises(openai.InternalServerError, match="The engine failed"):
                    complete(client, prompt=f"{PROMPT}~", **fields)
            assert complete(client).choices[0].text
        health = server.send("/health")[1]
        assert health["status"] == "ok" and not health.get("engine_failures")


def test_what_json_has_no_number_for_is_null():
    assert to_json({"logprobs": [-1.5, float("-inf")], "é": (float("nan"), {"a": float("inf")})}) == (
        '{"logprobs":[-1.5,null],"é":[null,{"a":null}]}'
    )
