"""Malformed requests: each gets a 4xx with one line of JSON, is counted by its status, and the server goes on.

Fields of a wrong type or out of range are made from the JSON schemas of the models, so a new field is covered as soon as it exists.
The other cases are rows of one table, and what HTTP allows clients to get wrong.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_hybrid_prefix.serve import bodies
from megatron_hybrid_prefix.serve.bodies import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ExplainBody,
    Fields,
    GenerateBody,
    TokenizeBody,
    read_fields,
)
from megatron_hybrid_prefix.serve.errors import ApiError
from tests.harness.limits import HANG_S
from tests.serve.test_serve import ADMIN, BODY_BYTES, Server

HALF = "\ud800"  # of a surrogate pair
DEEP: Any = None
for _ in range(300):
    DEEP = [DEEP]
COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
GOOD: dict[str, tuple[type[Fields], dict[str, Any]]] = {
    COMPLETIONS: (CompletionBody, {"model": "tiny", "prompt": "x", "max_tokens": 1}),
    CHATS: (ChatBody, {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    GENERATE: (GenerateBody, {"model": "tiny", "token_ids": [5], "max_tokens": 1}),
    "/tokenize": (TokenizeBody, {"prompt": "x"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
    "/admin/explain": (ExplainBody, {"request": {"prompt": "x"}}),
}
# A value of each JSON type.
VALUES: dict[str, Any] = {
    "boolean": True, "integer": 3, "number": 2.5, "string": "1", "array": [[True]], "object": {"a": 1},
}  # fmt: skip
REFUSED = {"tool_choice": ["required", {"type": "function"}]}
MARK = {"cache_control": {"type": "ephemeral"}}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} | more]}


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function}]


# Wrong tools, and the place of the error.
TOOLS = [
    (tool(name="f"), ""), ([1], "[0]"), ([{"type": "function"}], "[0].function"), ([{"type": "x", "function": {"name": "f"}}], "[0].type"),
    *((tool(**wrong), "[0].function.name") for wrong in ({}, {"name": None}, {"name": ""}, {"name": "a b"}, {"name": "x" * 257})),
    *((tool(name="f", parameters=wrong), "[0].function.parameters") for wrong in ([], "x", DEEP, {"type": "string"}, {"properties": []})),
    *((tool(name="f", parameters=wrong), "[0].function.parameters") for wrong in ({"properties": {"a\n" * 999: 3}}, {"required": "a"})),
]  # fmt: skip
# What is changed in a good body, and the field of the error.
TABLE: dict[str, list[tuple[dict[str, Any], str]]] = {
    COMPLETIONS: [
        ({"prompt": ["x", 1]}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": ["x", ""]}, "prompt"),
        ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": [512]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [1, True]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"), ({"prompt": ["x"] * 2, "n": 128}, "n"), ({"prompt": "x" * 2000}, "prompt"),
        ({"max_tokens": 2000}, "prompt"), ({"max_tokens": 0}, "max_tokens"), ({"top_k": 512}, "top_k"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"), ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"best_of": 2}, "best_of"), ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"cache_breakpoints": [0]}, "cache_breakpoints"), ({"cache_breakpoints": [2]}, "cache_breakpoints"),
        ({"cache_breakpoints": [10**30]}, "cache_breakpoints"), ({"min_tokens": 2}, "min_tokens"),
        ({"prompt": ["x", "y"], "cache_breakpoints": [1]}, "cache_breakpoints"),
        *(({"cache_session": given}, "cache_session") for given in ("x", {}, {"id": ""}, {"id": 5}, {"id": "x", "end": 1}, {"id": "x" * 257})),
        *(({"cache_pin": given}, "cache_pin") for given in (
            "x", {}, {"tokens": 1}, {"requests": 1, "seconds": 1.0}, {"requests": 0}, {"seconds": 0}, {"requests": 1, "tokens": 0}, {"requests": 1, "tokens": 2**32},
        )),
        ({"cache_uses": -1}, "cache_uses"),
        *(({"logit_bias": {"5": 1, name: 1}}, "logit_bias") for name in ("x", "512", "-1", "9" * 400, "²", "٣", "05", " 6", "+6", "6_0", "-0")),
        ({"logit_bias": {"1": "1"}}, "logit_bias"), ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop_token_ids": [512]}, "stop_token_ids"), ({"stop": ""}, "stop"), ({"stop": ["x", ""]}, "stop"), ({"model": "gpt"}, "model"),
    ],
    GENERATE: [
        ({"token_ids": []}, "token_ids"), ({"token_ids": [512]}, "token_ids"), ({"cache_breakpoints": [2]}, "cache_breakpoints"),
        ({"max_tokens": 0}, "max_tokens"), ({"sampling_params": {"bad_words": ["x"]}}, "bad_words"),
        ({"sampling_params": {"temperature": 3}}, "temperature"), ({"sampling_params": {"model": "other"}}, "model"),
        ({"sampling_params": {"sampling_params": {"seed": 1}}}, "sampling_params"),
        ({"seed": 1, "sampling_params": {"seed": 2}}, "seed"),
    ],
    CHATS: [
        ({"model": ""}, "model"), ({"top_logprobs": 1}, "top_logprobs"), ({"cache_breakpoints": [1]}, "cache_breakpoints"),
        ({"cache_breakpoints": [-1]}, "cache_breakpoints"), *(({"chat_template_kwargs": {name: 1}}, "chat_template_kwargs") for name in ("messages", "tools", "continue_final_message")),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        *(({"tools": wrong}, f"tools{place}") for wrong, place in TOOLS),
        ({"messages": []}, "messages"),
        *(({"messages": [wrong]}, "messages[0]") for wrong in (None, [], "x", {"role": "user"})),
        *(({"messages": [wrong]}, "messages[0].role") for wrong in (
            {}, {"content": "x"}, {"role": "robot", "content": "x"}, {"role": "User", "content": "x"}, {"role": 1}, {"role": []},
        )),
        *((user(wrong), "messages[0].content") for wrong in (1, {"type": "text", "text": "x"})),
        *((user([wrong]), "messages[0].content[0]") for wrong in (None, "x", DEEP)),
        (user([{"type": "text"}]), "messages[0].content[0].text"), (user([{"text": "x"}]), "messages[0].content[0].type"),
        (user([{"type": "input_audio", "text": "x"}]), "messages[0].content[0].type"),
        (user("x", name=1), "messages[0].name"), (user("x", prefix=True), "prefix"),
        (user("x", tool_calls="f"), "messages[0].tool_calls"), (user("x", tool_calls=[1]), "messages[0].tool_calls[0]"),
        (user("x", cache_control={"type": "eternal"}), "messages[0].cache_control.type"),
        (user("x", cache_control={"type": "ephemeral", "ttl": "2h"}), "messages[0].cache_control.ttl"),
        (user([{"type": "text", "text": "x", "cache_control": "ephemeral"}]), "messages[0].content[0].cache_control"),
        (user([{"type": "text", "text": "x", **MARK}] * 129), "messages"),
    ],
    "/tokenize": [({"model": "gpt"}, "model"), ({"messages": [1]}, "messages[0]")],
    "/detokenize": [({"model": "gpt"}, "model"), ({"tokens": [512]}, "tokens")],
    "/admin/explain": [
        ({"request": {"prompt": "x", "n": 0}}, "n"), ({"tenant": "a"}, "tenant"), ({"request": {"prompt": ["a", "b"]}}, "request"),
        ({"request": {"prompt": "x", "model": "other"}}, "model"), ({"request": {"prompt": "x" * 2000}}, "prompt"),
    ],
}  # fmt: skip
# What is no JSON, or none that this server accepts. "{}" is the rest of a good body.
NOT_JSON = {
    "nothing": b"", "a number": b"1", "null": b"null", "a list": b"[]", "half": b'{"model": "ti',
    "NaN": b'{"temperature": NaN, {}', "infinity": b'{"temperature": Infinity, {}',
    "beyond a double": b'{"temperature": 1e999, {}',
    "too many digits": b'{"n": ' + b"1" * 5000 + b", {}",
    "a control character": b'{"user": "\n", {}', "not UTF-8": b'{"user": "\xff", {}',
    "overlong UTF-8": b'{"user": "\xc0\xaf", {}',
    "an encoded surrogate": b'{"user": "\xed\xa0\x80", {}',
    "UTF-16": '{"user": "x"}'.encode("utf-16"), "a byte order mark": b"\xef\xbb\xbf{}", "zero bytes": b"\x00" * 100,
    "too deep a list": b"[" * 50_000, "too deep an object": b'{"a":' * 10_000,
    "too deep a field": b'{"user": ' + b"[" * 20_000 + b"]" * 20_000 + b", {}",
    "a name twice": b'{"user": "a", "user": "b", {}',
    "an inner name twice": b'{"metadata": {"a": 1, "a": 2}, {}',
    "a form": b"model=tiny&prompt=x", "half a pair": b'{"user": "\\uD800", {}', "half a pair as a name": b'{"\\ud800": 1, {}',
}  # fmt: skip


def schema_cases(path: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Bodies in which one field has a wrong type, or is just out of its range. Yields names, bodies, and the field to name."""
    model, good = GOOD[path]
    schema = model.model_json_schema()
    for name, field in schema["properties"].items():
        options = _options(field)
        types = {option["type"] for option in options if "type" in option}
        assert types or name in REFUSED, f"say which values {name!r} refuses"
        for wrong in REFUSED.get(name, ()):
            yield f"{name} {wrong!r}", good | {name: wrong}, name
        for kind, value in VALUES.items():
            fits = kind in types or (kind == "integer" and "number" in types)
            if types and not fits:
                yield f"{name} is {kind}", good | {name: value}, name
        if types - {"boolean"} and name not in ("messages", "tools"):
            yield f"{name} is deep", good | {name: DEEP}, name
        if types & {"integer", "number"}:
            for huge in (10**30, -(10**30), 1e200, -1e200):
                yield f"{name} {huge:.0e}", good | {name: huge}, name
        for option in options:
            for limit, value in option.items():
                if (change := _beyond(limit, value, option)) is not None:
                    yield f"{name} beyond {limit} of {option['type']}", good | {name: change}, name
    for name in schema.get("required", ()):
        rest = {key: value for key, value in good.items() if key != name}
        yield f"{name} is missing", rest, name
        yield f"{name} is null", rest | {name: None}, name
    for name in UNSUPPORTED.keys() - schema["properties"].keys() - model.without_effect:
        yield f"{name} is not supported", good | {name: "other"}, name


def _options(field: dict[str, Any]) -> list[dict[str, Any]]:
    found = [option | ({"type": "object"} if "$ref" in option else {}) for option in field.get("anyOf", [field])]
    return [option for option in found if option.get("type") != "null"]


def _beyond(limit: str, value: Any, option: dict[str, Any]) -> Any:
    """A value just beyond a limit of a JSON schema; None: the entry is no limit."""
    is_float = option.get("type") == "number"
    match limit:
        case "minimum":
            return value - (0.001 if is_float else 1)
        case "maximum":
            return value + (0.001 if is_float else 1)
        case "exclusiveMinimum":
            return value
        case "maxItems":
            return ["x" if "string" in str(option["items"]) else 1] * (value + 1)
        case "minLength":
            return ""
        case "maxLength":
            return {str(at): 0 for at in range(value + 1)} if option.get("type") == "object" else "x" * (value + 1)
        case "maxProperties":
            return {str(at): 0 for at in range(value + 1)}
    return None


def json_cases() -> Iterator[tuple[str, str, bytes, str | None]]:
    """Names, paths, bodies, and the field that the error names; None: any."""
    for path, (_, good) in GOOD.items():
        for name, body, field in schema_cases(path):
            yield name, path, json.dumps(body).encode(), field
        rest = json.dumps(good)[1:].encode()
        for name, data in NOT_JSON.items():
            if name == "beyond a double" and "model" not in good:
                continue  # no temperature
            yield name, path, data[:-2] + rest if data.endswith(b", {}") else data, None
        for number, (changes, field) in enumerate(TABLE[path]):
            yield f"{number}: {str(changes)[:80]}", path, json.dumps(good | changes).encode(), field


STRICT = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "thinking_token_budget": -1}
"""Fields of which false and 0 change the answer, too, and the value that does not."""


def test_harmless_and_unknown_fields_change_nothing(caplog, monkeypatch):
    """An unknown field is named once in the log, and so are at most so many."""
    monkeypatch.setattr(bodies, "_named", set())
    for model, good in GOOD.values():
        plain = read_fields(good, model)
        for name in UNSUPPORTED.keys() - model.model_fields.keys() - STRICT.keys():
            for value in (*UNSUPPORTED[name], None, False, 0, "", [], {}):
                assert read_fields(good | {name: value}, model) == plain
        for name in STRICT.keys() - model.without_effect:
            assert read_fields(good | {name: STRICT[name]}, model) == read_fields(good | {name: None}, model) == plain
            with pytest.raises(ApiError, match=name):
                read_fields(good | {name: False}, model)
        assert read_fields(good | {"colour": "red", "length_penalty": 1.5}, model) == plain
    assert [record.getMessage() for record in caplog.records] == [
        f"fields named {name!r} are ignored in requests" for name in ("colour", "length_penalty")
    ]
    read_fields(GOOD[COMPLETIONS][1] | {f"{number}\n{'x' * 9999}": 1 for number in range(9999)}, CompletionBody)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bodies._MOST_NAMES and not any("\n" in line or len(line) > 120 for line in lines)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(
    ("fields", "most_tokens"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 0, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": None, "max_completion_tokens": 3}, 3),
        # What vLLM's and SGLang's servers take for absent.
        ({"min_tokens": 0, "use_beam_search": False, "spaces_between_special_tokens": True, "top_logprobs": 0}, 1),
        ({"length_penalty": 1.0, "best_of": 1, "top_k": -1, "min_p": 0, "stop": [], "stop_token_ids": []}, 1),
        # A benchmark's answer of a given length.
        ({"max_tokens": 5, "min_tokens": 5, "ignore_eos": True, "stop": None}, 5),
    ],
    ids=str,
)
def test_lengths_and_neutral_values_of_other_clients(path, fields, most_tokens):
    model, good = GOOD[path]
    assert read_fields(good | fields, model).most_tokens == most_tokens


def test_there_are_as_many_cases_as_it_takes():
    cases = list(json_cases())
    assert len({case[:2] for case in cases}) == len(cases) >= 700
    assert len(RAW) >= 30


def replies(server: Server) -> Counter[tuple[str, str]]:
    """Counted replies by path and status."""
    return Counter(
        {
            (dict(labels)["path"], dict(labels)["status"]): int(value)
            for (name, labels), value in server.metrics().items()
            if name == "http_requests_total"
        }
    )


def problem_of(status: int, body: bytes, field: str | None = None) -> str | None:
    """What is wrong with a reply to a bad request with this wrong field; None: nothing."""
    if not 400 <= status < 500:
        return f"status {status}: {body[:200]!r}"
    if status == 400 and not body:  # by uvicorn: text, up to the end of the connection
        return None
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError):
        return f"no JSON error: {body[:200]!r}"
    message = error["message"]
    if field is not None and error["param"] != field:
        return f"names {error['param']}"
    if set(error) != {"message", "type", "param", "code"} or error["type"] != "invalid_request_error":
        return f"another form: {error}"
    if not message or "\n" in message or len(message) > 400:
        return f"not one line: {message[:500]!r}"
    if any(word in message for word in ("Traceback", "pydantic", "NoneType", ".py", "<class")):
        return f"not for clients: {message!r}"
    return None


def assert_goes_on(server: Server) -> None:
    assert server.send(COMPLETIONS, GOOD[COMPLETIONS][1])[0] == 200
    assert server.send("/health")[1]["open_sequences"] == 0


def test_bodies(server, caplog):
    """One connection for all of them: none closes it."""
    before, sent, problems = replies(server), Counter[tuple[str, str]](), {}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
    headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN}"}
    for name, path, body, field in json_cases():
        connection.request("POST", path, body, headers)
        socket = connection.sock
        answer = connection.getresponse()
        if problem := problem_of(answer.status, answer.read(), field):
            problems[f"{path}: {name}"] = problem
        assert connection.sock is socket
        sent[path, str(answer.status)] += 1
    connection.close()
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())
    found = replies(server) - before
    assert {key: found[key] for key in sent} == sent
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert_goes_on(server)


# --- Bytes on the socket ---------------------------------------------------------------------------------------------

_BODY = json.dumps(GOOD[COMPLETIONS][1]).encode()


def _request(
    line: str = "POST /v1/completions HTTP/1.1", headers: str = "", body: bytes = b"", *, length: int | None = None
) -> bytes:
    size = "" if length is None else f"content-length: {length}\r\n"
    return f"{line}\r\nhost: x\r\ncontent-type: application/json\r\n{size}{headers}\r\n".encode("latin-1") + body


def _chunked(data: bytes) -> bytes:
    return _request(headers="transfer-encoding: chunked\r\n", body=data)


_GOOD = _request(body=_BODY, length=len(_BODY))
# What is sent, and the statuses of the replies. Afterwards the server closes the connection, or this client does.
RAW: dict[str, tuple[bytes, list[int]]] = {
    "no HTTP": (b"hello\r\n\r\n", [400]),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", [400]),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\n", [404]),
    "zero bytes": (b"\x00" * 64 + b"\r\n\r\n", [400]),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", [400]),
    "a space before the colon": (_request("GET /health HTTP/1.1", "a : b\r\n"), [400]),
    "a zero byte in a header": (_request("GET /health HTTP/1.1", "a: b\x00c\r\n"), [400]),
    "a space in the path": (_request("GET /hea lth HTTP/1.1"), [400]),
    "endless headers": (_request("GET /health HTTP/1.1", "a: " + "b" * 200_000), [400]),
    "an endless path": (b"GET /" + b"a" * 200_000, [400]),
    "negative length": (_request(headers="content-length: -1\r\n"), [400]),
    "two lengths": (_request(headers="content-length: 3\r\ncontent-length: 4\r\n", body=b"{}"), [400]),
    "no length": (_request(), [400]),
    "length 0": (_request(length=0), [400]),
    "chunks of no size": (_chunked(b"xyz\r\n{}\r\n0\r\n\r\n"), [400]),
    "a negative chunk": (_chunked(b"-2\r\n{}\r\n0\r\n\r\n"), [400]),
    "a huge chunk": (_chunked(b"f" * 40 + b"\r\n{}"), [400]),
    "a chunk without its end": (_chunked(b"2\r\n{}xx0\r\n\r\n"), [400]),
    "empty chunks": (_chunked(b"0\r\n\r\n"), [400]),
    "another encoding": (_request(headers="transfer-encoding: gzip, chunked\r\n", body=b"0\r\n\r\n"), [400, 501]),
    "a compressed body": (_request(headers="content-encoding: gzip\r\n", body=b"\x1f\x8b\x08\x00", length=4), [400]),
    "too large a body": (_request(body=b" " * (BODY_BYTES + 1), length=BODY_BYTES + 1), [413]),
    "too large a body in chunks": (_chunked(b"20000\r\n" + b" " * 0x20000 + b"\r\n0\r\n\r\n"), [413]),
    "another method": (_request("GET /v1/completions HTTP/1.1"), [405]),
    "a method that nobody knows": (_request("BREW /v1/completions HTTP/1.1"), [400, 405]),
    "a path outside": (_request("GET /../../etc/passwd HTTP/1.1"), [404]),
    "a path that is not UTF-8": (_request("GET /%ff%fe HTTP/1.1"), [404]),
    "a model that is half a pair": (_request("GET /v1/models/%ED%A0%80 HTTP/1.1"), [404]),
    "another host's address": (_request("GET http://example.com/v2 HTTP/1.1"), [404]),
    "a token of other letters": (_request("POST /admin/reset_cache HTTP/1.1", "authorization: Bearer \xff\r\n"), [401]),
    "half a token": (
        _request("POST /admin/reset_cache HTTP/1.1", f"authorization: Bearer {ADMIN[:-1]}\r\n", length=0),
        [401],
    ),
    "an upgrade": (_request("GET /v2 HTTP/1.1", "connection: upgrade\r\nupgrade: websocket\r\n"), [404]),
}


async def _exchange(port: int, data: bytes) -> list[tuple[int, bytes]]:
    """Sends bytes and the end of the stream. Returns status and body of each reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = []
    try:
        writer.write(data)
        while head := await reader.readuntil(b"\r\n\r\n"):
            status = int(head.split()[1])
            if status == 100:
                continue
            headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
            length = headers.get(b"content-length")
            found.append((status, b"" if length is None else await reader.readexactly(int(length))))
            if headers.get(b"connection") == b"close" or len(found) == max(1, data.count(b" HTTP/1.1\r\n")):
                break
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return found


def exchange(server: Server, data: bytes) -> list[tuple[int, bytes]]:
    return asyncio.run(asyncio.wait_for(_exchange(server.port, data), HANG_S))


def test_bytes_on_the_socket(server):
    before, sent, problems = replies(server), Counter[str](), {}

    async def send_all() -> None:
        for name, (data, statuses) in RAW.items():
            found = await _exchange(server.port, data)
            if len(found) != 1 or found[0][0] not in statuses:
                problems[name] = f"replies {found}"
            elif problem := problem_of(*found[0]):
                problems[name] = problem
            sent.update(str(status) for status, body in found if body.startswith(b"{"))  # else by uvicorn
            assert (await _exchange(server.port, _GOOD))[0][0] == 200, name

    asyncio.run(asyncio.wait_for(send_all(), HANG_S))
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())
    counted = Counter[str]()
    for (_, status), count in (replies(server) - before).items():
        counted[status] += count
    assert {status: counted[status] for status in sent} == sent
    assert_goes_on(server)


def test_requests_in_a_row_get_their_replies_in_order(server):
    """Sent at once: a bad one does not take the place of another's reply."""
    wrong = _request(body=b"{}", length=2)
    unknown = _request("GET /v2 HTTP/1.1")
    for row in ([_GOOD, wrong, _GOOD], [wrong, wrong, unknown], [unknown, _GOOD, unknown, wrong]):
        expected = [{_GOOD: 200, wrong: 400, unknown: 404}[data] for data in row]
        assert [status for status, _ in exchange(server, b"".join(row))] == expected
    # A body that is longer than its length is the beginning of the next request.
    found = exchange(server, _request(body=b"{}" + b"x" * 10 + b"\r\n\r\n HTTP/1.1\r\n", length=2))
    assert [status for status, _ in found] == [400, 400]
    assert_goes_on(server)


def test_a_client_that_leaves_in_its_body_is_no_reply(server):
    """Headers or half of a body, then nothing: the next request is answered."""

    async def leave(data: bytes) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        await writer.drain()
        writer.transport.abort()

    for cut in (1, 10, len(_GOOD) - len(_BODY), len(_GOOD) - 1):
        asyncio.run(leave(_GOOD[:cut]))
    for data in (_chunked(b"2\r\n{"), _chunked(b"5")):
        asyncio.run(leave(data))
    assert_goes_on(server)
