"""What one client may take from others: the event loop, places, file descriptors; and what a web page may send."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid_prefix.serve.app import Api, Limits
from megatron_hybrid_prefix.serve.errors import ApiError
from megatron_hybrid_prefix.serve.front import is_loopback
from megatron_hybrid_prefix.serve.http_server import HttpServer, bound_socket
from megatron_hybrid_prefix.serve.metrics import ServerMetrics
from megatron_hybrid_prefix.serve.protocol import read_request, text_tokens
from megatron_hybrid_prefix.text.tokenizer import HuggingFaceTokenizer
from tests.harness.limits import HANG_S, wait_until
from tests.harness.tokenizer_folder import TEXT, make_folder
from tests.serve.test_app import Fake
from tests.serve.test_clients import CHAT, COMPLETION, Renders, served
from tests.serve.test_serve import TOKENIZER


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(make_folder(tmp_path_factory.mktemp("tokenizer")))


async def request(
    app: Any, path: str, body: Any = b"", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a request to an ASGI application."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent: list[Any] = []
    events: list[Any] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        return events.pop() if events else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"content-type": "application/json", "host": "localhost:1"} | (headers or {})
    scope = {"type": "http", "method": "POST" if data else "GET", "path": path, "query_string": b"", "app": app}
    pairs = [(name.encode(), value.encode()) for name, value in given.items()]
    await app(scope | {"headers": pairs, "root_path": ""}, receive, send)
    answer = json.loads(b"".join(message.get("body", b"") for message in sent))
    return sent[0]["status"], answer | {"headers": dict(sent[0]["headers"])}


# --- Long texts ------------------------------------------------------------------------------------------------------


def test_the_loop_runs_while_chats_are_tokenized(tokenizer, monkeypatch):
    """At least once in each of 8 chats: counted by the loop, between the begin and the end of the library's call."""
    backend, words = Fake(), TEXT * 100
    model = served(tokenizer=tokenizer, limit_tokens=10**6)
    api = Api(backend, model, Limits(sequences=100), ServerMetrics(1))
    ran, during = 0, []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def encode_batch(self, *args: Any, **options: Any) -> Any:
            before = ran
            found = inner.encode_batch(*args, **options)
            during.append(ran - before)
            return found

    inner = tokenizer._tokenizer
    monkeypatch.setattr(tokenizer, "_tokenizer", Counted())

    async def count() -> None:
        nonlocal ran
        while True:
            ran += 1
            await asyncio.sleep(0)

    async def ask() -> list[Any]:
        app, counting = api.app(), asyncio.create_task(count())
        messages = [{"role": "user", "content": words}] * 2
        body = CHAT | {"messages": messages, "n": 1}
        found = await asyncio.gather(*(request(app, "/v1/chat/completions", body) for _ in range(8)))
        counting.cancel()
        return found

    assert [status for status, _ in asyncio.run(ask())] == [200] * 8
    assert len(backend.submitted[0].prompt) > 30_000
    assert len(during) == 8 and min(during) >= 1


@pytest.mark.parametrize("kind", ["completions", "chat", "tokenize"])
def test_a_text_that_is_far_too_long_is_not_tokenized_whole(monkeypatch, kind):
    model, seen = served(limit_tokens=100), []
    real = type(TOKENIZER).tokenize
    monkeypatch.setattr(type(TOKENIZER), "tokenize", lambda self, text: seen.append(len(text)) or real(self, text))
    text = "x" * 10**6
    bodies = {
        "completions": COMPLETION | {"prompt": text},
        "chat": CHAT | {"messages": [{"role": "user", "content": text}]},
    }
    with pytest.raises(ApiError, match="the first 800 of 10000") as error:
        text_tokens(text, model) if kind == "tokenize" else read_request(bodies[kind], kind, model, None)
    assert (error.value.status, error.value.body["error"]["code"]) == (400, "context_length_exceeded")
    assert seen == [800]


def test_a_text_of_long_tokens_is_a_prompt(tokenizer):
    """Blanks: many characters, few tokens."""
    text = "The oldest one that no request uses. " * 100
    tokens = tokenizer.tokenize(text)
    model = served(tokenizer=tokenizer, limit_tokens=len(text) // 8 - 1)
    assert len(text) > 8 * model.limit_tokens and text_tokens(text, model) == tokens


# --- Places ----------------------------------------------------------------------------------------------------------


class Slow(Renders):
    """Chats are rendered when they may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()

    def render(self, *args: Any, **options: Any) -> str:
        self.may.wait(HANG_S)
        return super().render(*args, **options)


def test_prompts_that_are_tokenized_have_places():
    """And a full server reads no body."""
    form = Slow()
    api = Api(Fake(silent=9), served(chat=form), Limits(sequences=2), ServerMetrics(1))

    async def ask() -> None:
        app = api.app()
        first = asyncio.create_task(request(app, "/v1/chat/completions", CHAT | {"n": 2}))
        while not api._tokenizing.total():
            await asyncio.sleep(0.001)
        assert (await request(app, "/v1/chat/completions", CHAT))[0] == 429
        assert (await request(app, "/v1/completions", b"no JSON"))[0] == 429
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert api._tokenizing.total() == 0
        form.may.set()
        assert (await request(app, "/v1/completions", b"no JSON"))[0] == 400

    asyncio.run(ask())


# --- File descriptors ------------------------------------------------------------------------------------------------

SERVER = """
import sys
from types import SimpleNamespace
from megatron_hybrid_prefix.serve.http_server import HttpServer, bound_socket

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind.endswith("shutdown"):
                return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})

listener = bound_socket("127.0.0.1", 0)
start = lambda: print(listener.getsockname()[1], flush=True)
quiet = lambda *_: None
app.state = SimpleNamespace(api=SimpleNamespace(on_start=start, refuse_more=quiet, end_all=quiet, open_requests=0))
HttpServer(app, drain_s=0.0, log_level="warning").run(sockets=[listener])
"""


@pytest.mark.parametrize("limits", [(64, 64), (64, 128)], ids=["of both kinds", "soft"])
def test_idle_connections_leave_descriptors_for_others(tmp_path: Path, limits: tuple[int, int]) -> None:
    import resource

    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
        )
    assert process.stdout is not None
    idle: list[socket.socket] = []
    try:
        port = int(process.stdout.readline())
        for _ in range(4):
            idle += [socket.create_connection(("127.0.0.1", port), HANG_S) for _ in range(50)]
            for _ in range(3):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=HANG_S) as answer:
                    assert answer.status == 200
        used = len(os.listdir(f"/proc/{process.pid}/fd"))
        assert limits[0] * 3 // 8 < used < limits[1] and (used > limits[0]) == (limits[0] < limits[1])
    finally:
        for connection in idle:
            connection.close()
        process.send_signal(signal.SIGTERM)
        process.wait(HANG_S)
    lines = (tmp_path / "errors").read_text().splitlines()
    assert 1 <= len(lines) <= 2, lines[:5]


# --- Web pages and proxies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [(name + port, True) for name in ("localhost", "LocalHost", "127.0.0.1", "127.8.0.1", "[::1]") for port in ("", ":80")]
    + [(name, False) for name in ("evil.example", "localhost.evil.example:8000", "10.0.0.1", "[::2]:80", "", "127.0.0.1.nip.io")],
)  # fmt: skip
def test_a_private_server_has_only_names_of_this_machine(host: str, is_ours: bool) -> None:
    assert is_loopback(host) == is_ours
    for changes, refused in (({"is_private": True}, not is_ours), ({}, False)):
        app = Api(Fake(), served(), Limits(sequences=1, **changes), ServerMetrics(1)).app()
        assert asyncio.run(request(app, "/version", headers={"host": host}))[0] == (403 if refused else 200)
    keyed = Limits(sequences=1, is_private=True, keys={"key": "name"})
    app = Api(Fake(), served(), keyed, ServerMetrics(1)).app()
    assert asyncio.run(request(app, "/version", headers={"host": host}))[0] == 200, "a page does not know the key"


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize", "/detokenize"]
)
def test_only_json_is_read(path: str) -> None:
    app = Api(Fake(), served(), Limits(sequences=1), ServerMetrics(1)).app()
    forms = ("application/x-www-form-urlencoded", "multipart/form-data; boundary=application/json")
    for kind in ("text/plain", *forms, ""):
        status, answer = asyncio.run(request(app, path, {"model": "no"}, {"content-type": kind}))
        assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert asyncio.run(request(app, path, {"model": "no"}, {"content-type": kind}))[0] in (400, 404)


def test_a_request_with_two_lengths_closes_the_connection() -> None:
    app = Api(Fake(), served(), Limits(sequences=1), ServerMetrics(1)).app()
    server = HttpServer(app, drain_s=0.0, log_level="error")
    with bound_socket("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_until(lambda: server.started, "the server started")
        with socket.create_connection(listener.getsockname(), HANG_S) as client:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
            client.sendall(f"{head}0\r\n\r\nGET /version HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            found = b"".join(iter(lambda: client.recv(4096), b""))
        server.should_exit = True
        thread.join(HANG_S)
    assert found.startswith(b"HTTP/1.1 400") and found.count(b"HTTP/1.1") == 1
