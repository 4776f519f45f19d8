"""What clients that nobody here wrote send, and do: hostile sizes, odd text, log-probs, slow sockets, sampling fields.

Each test is a case in which a public client, or an attacker, once got a wrong answer, a 500 or no answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.requests import ClientDisconnect

from megatron_hybrid_prefix.serve import app
from megatron_hybrid_prefix.serve.bodies import MOST_BREAKPOINTS
from megatron_hybrid_prefix.serve.chat_template import ChatForm
from megatron_hybrid_prefix.serve.detokenizer import TextStream, chat_logprobs, completion_logprobs
from megatron_hybrid_prefix.serve.protocol import ServedModel, chat_tokens, read_request, text_tokens
from tests.harness.engine_helpers import LOG_PROB_NOISE
from tests.harness.limits import HANG_S, wait_until
from tests.harness.server_process import post
from tests.serve.test_serve import (
    CHAT,
    COMPLETION,
    LIMIT_TOKENS,
    PROMPT,
    TOKENIZER,
    Server,
    assert_error,
    complete,
    held,
    running,
)


@pytest.fixture(scope="module")
def server(tiny: Any) -> Iterator[Server]:
    """Computes log-probs of prompts, and prompts in chunks."""
    fields = {"materialize_only_last_token_logits": False, "enable_chunked_prefill": True, "max_tokens": 256}
    with running(tiny, engine_fields=fields) as server:
        yield server


class Renders(ChatForm):
    """The plain format; counts what it renders."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def render(self, *args: Any, **kwargs: Any) -> str:
        self.count += 1
        return super().render(*args, **kwargs)


def served(**changes: Any) -> ServedModel:
    fields = {
        "model": "tiny", "tokenizer": TOKENIZER, "vocab_size": 512, "chat": Renders(), "add_bos": False,
        "check_fits": lambda prompt, wanted: None, "limit_tokens": LIMIT_TOKENS,
    }  # fmt: skip
    return ServedModel(**fields | changes)


# --- H1: bounded work ------------------------------------------------------------------------------------------------


def test_breakpoints_count_once_and_in_order():
    asked = read_request(
        COMPLETION | {"prompt": "x" * 10, "cache_breakpoints": [9, 3, 9, 3]}, "completions", served(), None
    )
    assert asked.prompts[0].breakpoints == [3, 9]
    model = served()
    messages = [{"role": "user", "content": str(number)} for number in range(4)]
    read_request(CHAT | {"messages": messages, "cache_breakpoints": [1] * MOST_BREAKPOINTS}, "chat", model, None)
    assert model.chat.count == 2  # the prompt, and up to one message


@pytest.mark.parametrize("given", [{"id": "a"}, {"id": "a", "end": True}])
def test_a_session_is_passed_on(given):
    asked = read_request(COMPLETION | {"cache_session": given}, "completions", served(), None)
    assert asked.sampling["cache_session"] == {"end": False} | given
    assert "cache_session" not in read_request(COMPLETION, "completions", served(), None).sampling


@pytest.mark.parametrize("given", [{"requests": 3}, {"seconds": 2.5, "tokens": 4}])
def test_what_is_kept_is_passed_on(given):
    asked = read_request(COMPLETION | {"cache_pin": given, "cache_uses": 2}, "completions", served(), "a key")
    assert (asked.sampling["cache_pin"], asked.sampling["cache_uses"]) == (given, 2)
    assert asked.sampling["cache_tenant"] == '["a key"]'
    plain = read_request(COMPLETION, "completions", served(), None).sampling_of(0)
    assert not {"cache_pin", "cache_uses", "cache_tenant", "cache_ttls"} & plain.keys() and plain["cache_now"] > 1e9


def test_a_marked_part_is_kept_for_its_time():
    parts = [{"type": "text", "text": text} for text in ("Be", " kind", ".")]
    parts[0]["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    parts[1]["cache_control"] = {"type": "ephemeral"}  # a breakpoint alone
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": "Hi"}]
    messages.append({"role": "user", "content": "So?", "cache_control": {"type": "ephemeral", "ttl": "5m"}})
    asked = read_request(CHAT | {"messages": messages}, "chat", served(chat=ChatForm()), None)
    text = "Be kind.\n\nUser: Hi\nUser: So?\n"
    ends = [text.index("Be") + 2, len(text)]
    assert asked.sampling_of(0)["cache_ttls"] == [(end, s) for end, s in zip(ends, (3600, 300), strict=True)]
    assert {*ends, text.index(" kind") + 5} <= {*asked.prompts[0].breakpoints}


def test_a_pin_beyond_the_share_is_the_clients_fault(tiny):
    """One prompt that takes more than a quarter of the memory."""
    with running(tiny, blocks=12, max_requests=1, slots=1) as server:
        for pin, status in (({"requests": 5, "tokens": 1}, 200), ({"requests": 5}, 400)):
            body = COMPLETION | {"prompt": [3] * 300, "max_tokens": 1, "cache_pin": pin}
            got, reply = server.send("/v1/completions", body)
            assert got == status
        assert reply["error"]["param"] == "cache_pin" and "nothing is pinned" in reply["error"]["message"]
        assert not server.engine.context.prefix_cache._device.pins.kept


def test_a_long_conversation_renders_a_bounded_number_of_times():
    model = served(limit_tokens=10**9)
    messages = [{"role": "user", "content": ""}] * 5_000
    breakpoints = list(range(0, 5_000, 5_000 // MOST_BREAKPOINTS + 1))
    for given in ({}, {"cache_breakpoints": breakpoints}):
        model.chat.count = 0
        read_request(CHAT | given | {"messages": messages}, "chat", model, None)
        assert model.chat.count <= 1 + MOST_BREAKPOINTS


def test_work_on_a_request_ends_with_its_client():
    model = served()
    messages = [{"role": "user", "content": "x"}] * 20
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 5:
            raise ClientDisconnect

    with pytest.raises(ClientDisconnect):
        read_request(CHAT | {"messages": messages}, "chat", model, None, check)
    assert model.chat.count < len(messages) // 2


def test_a_client_that_leaves_while_its_prompt_is_read_is_given_up(server, monkeypatch):
    """The thread that reads the prompt notices, too."""
    reached, ended = threading.Event(), threading.Event()
    real = type(server.app.state.api._served.chat).ends

    def ends(self: ChatForm, *args: Any, check: Any, **kwargs: Any) -> Any:
        reached.set()
        try:
            wait_until(lambda: check() or False, "the client is gone")
        finally:
            ended.set()

    async def leave() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = json.dumps(CHAT).encode()
        writer.write(post("/v1/chat/completions", body))
        await asyncio.to_thread(reached.wait, HANG_S)
        writer.transport.abort()

    before = server.metrics()[("cancelled_requests_total", ())]
    monkeypatch.setattr(ChatForm, "ends", ends)
    asyncio.run(leave())
    assert ended.wait(HANG_S)
    monkeypatch.setattr(ChatForm, "ends", real)
    wait_until(lambda: server.metrics()[("cancelled_requests_total", ())] == before + 1, "it was counted")


# --- H2: log-probs by token id ---------------------------------------------------------------------------------------


def test_top_logprobs_tell_tokens_of_the_same_text_apart(server, salt):
    """Ids above 257 of this tokenizer have no text."""
    create = server.client().chat.completions.create
    fields: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 30}
    chat = create(**fields, messages=CHAT["messages"], logprobs=True, top_logprobs=10, extra_body=salt)
    for note in chat.choices[0].logprobs.content:
        values = [other.logprob for other in note.top_logprobs]
        assert len(values) == 10 and values == sorted(values, reverse=True)
        assert note.logprob == pytest.approx(values[0], abs=LOG_PROB_NOISE)
        assert note.bytes == note.top_logprobs[0].bytes
    whole = complete(server.client(), extra=salt, max_tokens=30, logprobs=10).choices[0].logprobs
    for text, value, top in zip(whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True):
        assert len(top) == 10
        assert top[text] == value == pytest.approx(max(top.values()), abs=LOG_PROB_NOISE)


def test_a_part_of_a_character_has_its_own_bytes():
    stream = TextStream(TOKENIZER)
    for token in "a€".encode():
        stream.feed(token, -1.0, {0xE2: -0.5, 0x82: -1.0})
    stream.feed(300, -4.0, {301: -0.25, 300: -4.0})
    notes = stream.notes(last=True)
    content = chat_logprobs(notes)["content"]
    assert [entry["bytes"] for entry in content] == [[0x61], [0xE2], [0x82], [0xAC], []]
    assert content[1]["token"] == "bytes:\\xe2"
    tops = completion_logprobs(notes)["top_logprobs"]
    assert tops[0] == {"a": -1.0, "bytes:\\xe2": -0.5, "bytes:\\x82": -1.0}
    assert tops[4] == {"": -4.0, "token_id:301": -0.25}


# --- M1, M4: streams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_usage_in_every_chunk(server, salt, chat):
    path, body = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", COMPLETION)
    options = {"include_usage": True, "continuous_usage_stats": True}
    more = {"stream": True, "stream_options": options, "max_tokens": 5, "ignore_eos": True}
    chunks = server.events(path, body | salt | more)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5 and len(counts) > 1
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


def test_a_stream_begins_with_its_first_token(tiny, monkeypatch):
    """While a request waits for its place, nothing is sent. Errors before the first token have an HTTP status."""
    with running(tiny, max_requests=1, engine_fields={"max_tokens": 1024}) as server:
        client = server.client()
        open_then: list[int] = []

        def second() -> None:
            with client.chat.completions.create(**CHAT, stream=True, max_tokens=2, temperature=0) as stream:
                open_then.append(server.loop.open_sequences)
                assert next(iter(stream)).choices[0].delta.role == "assistant"

        first = {"max_tokens": 400, "extra": {"ignore_eos": True}, "stream": True}
        with held(server, monkeypatch) as go_on, complete(client, **first) as stream:
            chunks = iter(stream)
            next(chunks)
            thread = threading.Thread(target=second)
            thread.start()
            wait_until(lambda: server.loop.open_sequences == 2, "both are there")
            go_on.set()
            list(chunks)
            thread.join(HANG_S)
        assert len(open_then) == 1 and open_then[0] <= 1  # the first has ended


# --- M2: log-probs of prompts ----------------------------------------------------------------------------------------


def test_echo_with_logprobs(server, salt, tiny_reference):
    """Compared with the float64 model; the second time the prompt is cached, and its log-probs with it."""
    tokens = TOKENIZER.tokenize(PROMPT)
    expected = _log_probs(tiny_reference, tokens)
    for cached in (False, True):
        answer = complete(server.client(), extra=salt, echo=True, logprobs=3, max_tokens=2)
        assert (answer.usage.prompt_tokens_details.cached_tokens > 0) == cached
        choice = answer.choices[0]
        notes = choice.logprobs
        assert choice.text.startswith(PROMPT) and len(notes.tokens) == len(tokens) + 2
        assert notes.token_logprobs[0] is None and notes.top_logprobs[0] is None
        assert notes.token_logprobs[1 : len(tokens)] == pytest.approx(expected, abs=LOG_PROB_NOISE)
        assert "".join(notes.tokens[: len(tokens)]) == PROMPT
        assert notes.text_offset[: len(tokens)] == list(range(len(tokens)))
        assert notes.text_offset[len(tokens)] == len(PROMPT)
        for text, value, top in zip(notes.tokens[1:], notes.token_logprobs[1:], notes.top_logprobs[1:], strict=True):
            assert top[text] == value
    assert complete(server.client(), extra=salt, echo=True, logprobs=1, max_tokens=2, stream=True) is not None


def test_only_the_prompts_logprobs(server, salt):
    """As lm-eval asks for the likelihood of an ending."""
    whole = complete(server.client(), extra=salt, echo=True, logprobs=1, max_tokens=1).choices[0]
    alone = complete(server.client(), extra=salt, echo=True, logprobs=1, max_tokens=0)
    assert alone.choices[0].text == PROMPT
    assert alone.usage.completion_tokens == 0
    found = alone.choices[0].logprobs.token_logprobs
    assert len(found) == len(PROMPT)
    assert found[1:] == pytest.approx(whole.logprobs.token_logprobs[1:-1], abs=LOG_PROB_NOISE)
    streamed = server.events(
        "/v1/completions", COMPLETION | salt | {"echo": True, "logprobs": 0, "max_tokens": 0, "stream": True}
    )
    assert streamed[0]["choices"][0]["text"] == "x"


def test_only_the_prompt(server, salt):
    """Without log-probs the engine has nothing to compute, but an answer needs a token."""
    answer = complete(server.client(), extra=salt, echo=True, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (PROMPT, "length")
    assert answer.usage.completion_tokens == 0


def test_echo_with_logprobs_of_one_token(server, salt):
    """The only token of the prompt has no log-prob, but it is there."""
    asked = COMPLETION | salt | {"prompt": "x", "echo": True, "logprobs": 1}
    notes = server.send("/v1/completions", asked | {"max_tokens": 0})[1]["choices"][0]["logprobs"]
    assert (notes["tokens"], notes["token_logprobs"], notes["text_offset"]) == (["x"], [None], [0])
    notes = server.send("/v1/completions", asked | {"max_tokens": 1, "ignore_eos": True})[1]["choices"][0]["logprobs"]
    assert notes["tokens"][0] == "x" and len(notes["tokens"]) == 2 and notes["text_offset"] == [0, 1]
    streamed = server.events("/v1/completions", asked | {"max_tokens": 0, "stream": True})
    assert streamed[0]["choices"][0]["logprobs"]["token_logprobs"] == [None]


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_prompt_logprobs(server, salt, tiny_reference, kind):
    """In vLLM's format; the second time the prompt is cached, and its log-probs with it."""
    body = CHAT | {"messages": [{"role": "user", "content": PROMPT}]} if kind.startswith("chat") else COMPLETION
    asked = {"messages": body["messages"]} if kind.startswith("chat") else {"prompt": PROMPT}
    tokens = server.send("/tokenize", asked)[1]["tokens"]
    body = body | salt | {"prompt_logprobs": 2, "max_tokens": 0} | asked
    for cached in (False, True):
        status, answer = server.send(f"/v1/{kind}", body)
        assert status == 200 and answer["usage"]["completion_tokens"] == 0
        assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == cached
        choice = answer["choices"][0]
        assert choice["logprobs"] is None
        first, *rest = (answer if kind.startswith("chat") else choice)["prompt_logprobs"]
        assert first is None and len(rest) == answer["usage"]["prompt_tokens"] - 1
        for row, token, entry in zip(tiny_reference.log_probs(tokens), tokens[1:], rest, strict=False):
            best = row.topk(2)
            assert list(entry) == [str(token), *(str(int(other)) for other in best.indices if other != token)]
            for name, value in entry.items():
                rank = int((row > row[int(name)]).sum()) + 1
                assert value["logprob"] == pytest.approx(float(row[int(name)]), abs=LOG_PROB_NOISE)
                assert value["rank"] == (rank if rank <= 2 else None)
                assert value["decoded_token"] == TOKENIZER.detokenize([int(name)])


def test_prompt_logprobs_beside_those_of_the_answer(server, salt):
    asked = COMPLETION | salt | {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    both = server.send("/v1/completions", asked | {"prompt_logprobs": 3, "logprobs": 1, "echo": True})[1]["choices"][0]
    assert all(len(entry) in (3, 4) for entry in both["prompt_logprobs"][1:])
    assert all(len(entry) <= 2 for entry in both["logprobs"]["top_logprobs"][1:])
    none = server.send("/v1/completions", asked | {"prompt_logprobs": 0, "logprobs": 2})[1]["choices"][0]
    assert [len(entry) for entry in none["prompt_logprobs"][1:]] == [1] * (len(PROMPT) - 1)
    assert none["text"] == both["text"].removeprefix(PROMPT) and len(none["logprobs"]["tokens"]) == 2
    single = server.send("/v1/completions", asked | {"prompt": [65], "prompt_logprobs": 1})[1]["choices"][0]
    assert single["prompt_logprobs"] == [None]


def _log_probs(reference: Any, tokens: list[int]) -> list[float]:
    found = reference.log_probs(tokens)
    return [float(found[at, token]) for at, token in enumerate(tokens[1:])]


# --- M3 --------------------------------------------------------------------------------------------------------------


def test_what_is_advertised_is_accepted(server, salt):
    """Prompts longer than a step are computed in chunks, as the command does by default."""
    limit = server.send("/v1/models")[1]["data"][0]["max_model_len"]
    assert limit > server.engine.context.max_tokens
    answer = complete(server.client(), "x" * (limit - 1), extra=salt, max_tokens=1)
    assert answer.usage.total_tokens == limit


def test_the_command_computes_prompts_in_chunks():
    from megatron_hybrid_prefix.cli.serve import make_parser

    assert make_parser().parse_args([]).chunked_prefill


# --- M6, M7: sampling fields -----------------------------------------------------------------------------------------


def test_a_seed_decides_the_answer(server, salt):
    client = server.client()

    def ask(seed: int | None, **fields: Any) -> list[str]:
        fields = {"max_tokens": 20, "temperature": 1.5, "extra": salt | {"ignore_eos": True}} | fields
        return [choice.text for choice in complete(client, seed=seed, **fields).choices]

    (first,), (other,) = ask(7), ask(8)
    assert first != other
    assert ask(7) == [first]
    several = ask(7, n=3)
    assert several[0] == first and len(set(several)) == 3
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.extend(ask(7))) for _ in range(3)]
    threads += [threading.Thread(target=lambda: ask(None)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert texts == [first] * 3  # beside others


def test_sampling_fields_reach_the_engine(server, salt):
    client = server.client()
    extra = salt | {"ignore_eos": True}
    greedy = complete(client, extra=extra).choices[0].text

    def ask(more: dict[str, Any], **fields: Any) -> Any:
        return complete(client, extra=extra | more, **fields).choices[0]

    hot: dict[str, Any] = {"temperature": 2, "seed": 3}
    assert ask({"top_k": 1}, top_p=0.5, **hot).text == greedy
    assert ask({"top_k": 50}, top_p=1e-9, **hot).text == greedy
    assert ask({"min_p": 1.0}, **hot).text == greedy
    assert ask({}, temperature=1.0, top_p=0.0).text == ask({}, temperature=1e-9).text == greedy
    assert ask({"min_p": 0, "repetition_penalty": 1.0, "top_k": -1}, logit_bias={}).text == greedy
    assert ask({}, logit_bias={"65": 100}).text == "A" * 12
    assert ask({}, logit_bias={"65": 100}, presence_penalty=2.0).text == "A" * 12
    letters = Counter(ask({}, logit_bias={"65": 50, "66": 49.5, "67": 49}, frequency_penalty=2.0).text)
    assert letters.keys() == set("ABC") and min(letters.values()) >= 2  # each time, not once, as presence_penalty
    repeated = ask({"repetition_penalty": 10.0}, logit_bias={"65": 50, "66": 49.5}).text
    assert repeated[:2] == "AB"  # neither is in the prompt


def test_stop_token_ids(server, salt):
    client, extra = server.client(), salt | {"ignore_eos": True}
    whole = complete(client, extra=extra, max_tokens=30).choices[0].text
    bias = {"logit_bias": {"65": 100}}
    stopped = complete(client, extra=extra | {"stop_token_ids": [65]}, max_tokens=30, **bias)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    assert stopped.usage.completion_tokens == 1
    unmet = complete(client, extra=extra | {"stop_token_ids": [511]}, max_tokens=30)
    assert unmet.choices[0].text == whole or unmet.choices[0].finish_reason == "stop"


def test_conversations_of_other_clients_are_accepted(server, salt):
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "2"},
        {"role": "assistant", "content": "y", "refusal": None},
        {"role": "user", "content": "z"},
    ]
    neutral = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none", "parallel_tool_calls": True, "min_p": 0, "repetition_penalty": 1.0,
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": True, "reasoning_effort": "low", "max_tokens": 1,
    }  # fmt: skip
    status, answer = server.send("/v1/chat/completions", CHAT | salt | neutral | {"messages": messages})
    assert status == 200, answer


def test_variables_of_a_template():
    """And what a template cannot do, such as leave its sandbox."""
    form = ChatForm("{% for m in messages %}{{ m.role }}{{ m.tool_calls }}{% endfor %}{{ enable_thinking }}")
    model = served(chat=form)
    calls = [{"function": {"name": "f", "arguments": '{"a": 1}'}}]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "x"}]
    body = CHAT | {"messages": messages, "chat_template_kwargs": {"enable_thinking": 7}}
    text = bytes(read_request(body, "chat", model, None).prompts[0].tokens).decode()
    assert "'arguments': {'a': 1}" in text and text.endswith("tool7")
    leaves = ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ namespace.__init__.__globals__ }}")
    for template in ("{{ 1 // 0 }}", "{{ range(10**9) }}", "{{ x.y.z }}", "{{ messages + 1 }}", *leaves):
        with pytest.raises(ValueError, match="refuses these messages"):
            ChatForm(template).render([{"role": "user", "content": "x"}])


def test_what_clients_send_back_with_an_answer():
    """Of other servers and libraries; its reasoning is the template's."""
    model = served(chat=ChatForm("{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"))
    noted = {"id": "1", "finish_reason": "stop", "prefix": False, "provider_specific_fields": {"a": 1}, "audio": {}}
    noted |= {"role": "assistant", "content": "hi"}
    for more, text in (({}, "hi"), ({"reasoning_content": "why "}, "why hi"), ({"reasoning": "so "}, "so hi")):
        asked = read_request(CHAT | {"messages": [noted | more]}, "chat", model, None)
        assert bytes(asked.prompts[0].tokens).decode() == text
    for more in ({"prefix": True}, {"reasoning": 1}, {"audio": {"id": "x"}}):
        with pytest.raises(Exception, match=next(iter(more))):
            read_request(CHAT | {"messages": [noted | more]}, "chat", model, None)


def test_cache_hints_are_breakpoints_and_nothing_else():
    """A mark is the end of its part, or of its message; a key for caches only routes."""
    model = served(chat=ChatForm())
    mark = {"cache_control": {"type": "ephemeral"}}
    parts = [
        {"type": "text", "text": "abc", **mark},
        {"type": "text", "text": "def"},
        {"type": "text", "text": "g", **mark},
    ]
    messages = [{"role": "system", "content": "rules", **mark}, {"role": "user", "content": parts}]
    asked = read_request(CHAT | {"messages": messages, "cache_breakpoints": []}, "chat", model, None)
    (prompt,) = asked.prompts
    text = bytes(prompt.tokens).decode()
    ends = [text.index(part) + len(part) for part in ("rules", "abc", "g")]
    # The end of a message is that of what the format writes after it.
    assert [text[:end].rstrip() for end in prompt.breakpoints] == [text[:end] for end in ends]
    plain = [
        {"role": message["role"], "content": text} for message, text in zip(messages, ("rules", "abcdefg"), strict=True)
    ]
    whole = read_request(CHAT | {"messages": plain, "cache_breakpoints": []}, "chat", model, None)
    assert (whole.prompts[0].tokens, whole.prompts[0].breakpoints) == (prompt.tokens, [])
    keyed = read_request(CHAT | {"messages": plain, "prompt_cache_key": "k"}, "chat", model, None)
    assert keyed.prompts[0].tokens == prompt.tokens
    assert {name: value for name, value in keyed.sampling.items() if name != "routing_key"} == whole.sampling


# --- Other routes ----------------------------------------------------------------------------------------------------


def test_tokenize_detokenize_version_and_health_generate(server):
    status, answer = server.send("/tokenize", {"model": "tiny", "prompt": "a€"})
    assert (status, answer["tokens"], answer["count"]) == (200, list("a€".encode()), 4)
    assert server.send("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "a€"})
    chat = server.send("/tokenize", {"messages": CHAT["messages"]})[1]
    assert bytes(chat["tokens"]).decode() == "User: x\nAssistant:"
    chat = server.send("/tokenize", {"messages": CHAT["messages"], "add_generation_prompt": False})[1]
    assert bytes(chat["tokens"]).decode() == "User: x\n"
    assert server.send("/tokenize", {"prompt": "a", "add_special_tokens": False})[1]["tokens"] == [97]
    info = dict.fromkeys(("bos_token", "eos_token", "pad_token", "chat_template"))  # bytes have none
    assert server.send("/tokenizer_info") == (200, info)
    assert server.send("/version")[1]["version"]
    before = server.engine.context.step_count
    assert server.send("/health_generate") == (200, {"status": "ok"})
    assert server.engine.context.step_count > before


def test_the_first_token_can_be_left_out():
    model = served(add_bos=True, chat=ChatForm())
    assert text_tokens("a", model) == [256, 97]
    assert text_tokens("a", model, add_special_tokens=False) == [97]
    assert (
        chat_tokens(CHAT["messages"], model, add_special_tokens=False)[1] == chat_tokens(CHAT["messages"], model)[1][1:]
    )


# --- M9: a step that does not end ------------------------------------------------------------------------------------


def test_a_stuck_step_is_unhealthy_and_metrics_show_the_last_figures(tiny, monkeypatch):
    with running(tiny, step_s=0.05) as server:
        complete(server.client())
        before = server.metrics()
        real, stuck, go_on = server.engine.step_modern, threading.Event(), threading.Event()

        def step() -> Any:
            stuck.set()
            assert go_on.wait(HANG_S)
            return real()

        monkeypatch.setattr(server.engine, "step_modern", step)
        monkeypatch.setattr(app, "_SNAPSHOT_S", 0.05)
        thread = threading.Thread(target=complete, args=(server.client(),))
        thread.start()
        try:
            assert stuck.wait(HANG_S)
            wait_until(lambda: server.send("/health")[0] == 503, "the server is unhealthy")
            assert_error(server.send("/health")[1], code="engine_stuck")
            assert server.send("/health_generate")[0] == 503
            during = server.metrics()
            assert during[("prompt_tokens_total", ())] == before[("prompt_tokens_total", ())]
            assert during[("step_seconds", ())] > 0
        finally:
            go_on.set()
            thread.join(HANG_S)
        assert server.send("/health")[0] == 200


# --- L, M8: sockets, tenants, the end --------------------------------------------------------------------------------


def test_a_slow_body_is_given_up(tiny):
    async def stall() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post("/v1/completions", b"{", length=100))
        head = await reader.readuntil(b"\r\n")
        writer.transport.abort()
        return head

    with running(tiny, read_s=0.05) as server:
        assert b" 408 " in asyncio.run(asyncio.wait_for(stall(), HANG_S))
        assert server.metrics()[("http_requests_total", (("path", "/v1/completions"), ("status", "408")))] == 1


def test_replies_do_not_wait_for_acknowledgements(server):
    """With Nagle's algorithm, each reply of a kept connection and each token of a stream came 40 ms late."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"
        ends = [connection.transport for connection in list(server._server.server_state.connections)]
        ours = [end for end in ends if end.get_extra_info("peername") == client.getsockname()]
        assert ours[0].get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_server_says_that_it_serves_once_it_listens(tiny):
    found = []

    def on_start() -> None:
        with socket.create_connection(("127.0.0.1", server.port)):
            found.append("connected")

    server = Server(tiny, on_start=on_start)
    server.start()
    server.stop()
    assert found == ["connected"]


def test_one_tenant_cannot_take_all_places(tiny, monkeypatch):
    with running(tiny, keys={"a": "a", "b": "b"}, max_per_tenant=2) as server:
        extra = {"ignore_eos": True}
        with pytest.raises(openai.BadRequestError, match="limit of this API key is 2"):
            complete(server.client("a"), n=3)
        long = {"max_tokens": 600, "extra": extra, "stream": True}
        with held(server, monkeypatch) as go_on, complete(server.client("a"), n=2, **long) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError, match="of this API key"):
                complete(server.client("a"))
            go_on.set()
            assert complete(server.client("b")).choices[0].text
        server.wait_until_idle()
        assert complete(server.client("a"), n=2).choices[0].text


def test_ids_are_not_made_text_before_their_length_is_checked():
    class Counting:
        bos, eod, vocab_size = None, None, 512
        decoded = 0

        def detokenize(self, tokens: Any, skip_special_tokens: bool = False) -> str:
            self.decoded += len(tokens)
            return ""

    tokenizer: Any = Counting()
    with pytest.raises(Exception, match="maximum context length"):
        read_request(
            COMPLETION | {"prompt": [1] * 10_000, "echo": True}, "completions", served(tokenizer=tokenizer), None
        )
    read_request(COMPLETION | {"prompt": [1] * 10}, "completions", served(tokenizer=tokenizer), None)
    assert tokenizer.decoded == 0


def test_keys_that_cannot_be_sent_are_refused(tmp_path):
    from megatron_hybrid_prefix.cli.serve import read_keys
    from megatron_hybrid_prefix.console.terminal import InputError

    file = tmp_path / "keys"
    file.write_text("name schlüssel\n")
    with pytest.raises(InputError, match="visible ASCII"):
        read_keys(file)


def test_metrics_have_help_and_types(server):
    import urllib.request

    from prometheus_client.parser import text_string_to_metric_families

    complete(server.client(), max_tokens=4, extra={"ignore_eos": True})
    wait_until(lambda: server.metrics()[("end_to_end_seconds_count", ())] > 0, "it was counted")
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=HANG_S) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    for name, family in families.items():
        plain = name.removeprefix("hybrid_prefix_").replace("_", " ")
        assert family.documentation and family.documentation != plain, f"{name} has no HELP text"
    found = server.metrics()
    assert found[("time_between_tokens_seconds_count", ())] >= 3
    assert found[("generated_tokens_total", (("status", "finished"),))] >= 4
    assert math.isfinite(found[("end_to_end_seconds_sum", ())])
    assert not [name for name in families if name.startswith("hybrid_prefix_host_")], "the tiers have these figures"
