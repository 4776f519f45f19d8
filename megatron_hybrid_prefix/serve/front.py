"""The application's first layer: counts and logs every reply, and refuses what a proxy reads differently and what web pages send."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from contextvars import ContextVar
from ipaddress import ip_address
from typing import Any

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_hybrid_prefix.serve.errors import ApiError, bad, short
from megatron_hybrid_prefix.serve.metrics import ServerMetrics

# One line per reply: method, path, status, seconds, tokens. Never the prompt, the answer or the key.
access = logging.getLogger("megatron_hybrid_prefix.serve.access")
# Of the request that the current task works on; threads that work for it have it, too.
request_id: ContextVar[str] = ContextVar("request_id", default="-")

LINE = "%(asctime)s %(levelname)s %(request_id)s %(message)s"
_GENERATES = ("/v1/completions", "/v1/chat/completions")
_PROBES = ("/health", "/health_generate", "/metrics")  # asked each few seconds


def start_logging(level: str = "info", *, as_json: bool = False) -> None:
    """Log lines on stderr with time, level and request id.

    Args:
        level: The least level of this package's lines, such as "info"; of others' at least warnings. Replies are "info",
            those to probes "debug".
        as_json: Whether a line is a JSON object.
    """
    logging.basicConfig(format=LINE)
    for handler in logging.getLogger().handlers:
        handler.addFilter(add_request_id)
        if as_json:
            handler.setFormatter(JsonLines())
    least = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(max(least, logging.WARNING))
    logging.getLogger("megatron_hybrid_prefix").setLevel(least)


class JsonLines(logging.Formatter):
    """A record as a line of JSON: what `LINE` has, the fields of a reply, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line = {"time": self.formatTime(record), "level": record.levelname, "request_id": request_id.get()}
        line |= {"logger": record.name, "message": record.getMessage()} | getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def add_request_id(record: logging.LogRecord) -> bool:
    """A filter of `logging` that gives each record its ``request_id``."""
    record.request_id = request_id.get()
    return True


class ServerApp(Starlette):
    """The ASGI application. Counts and logs every reply, whoever made it.

    Args:
        paths: Paths of the routes. All other paths are counted as "other".
        metrics: Counts replies.
        is_private: Whether only names of this machine are taken for it (DNS rebinding gives it another one).
        options: Starlette's.
    """

    def __init__(self, paths: frozenset[str], metrics: ServerMetrics, *, is_private: bool, **options: Any) -> None:
        super().__init__(**options)
        self._paths, self._metrics, self._is_private = paths, metrics, is_private

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        began_s, path, identity = time.perf_counter(), self._label(scope["path"]), _id_of(scope)
        request_id.set(identity)  # uvicorn runs each request in a task
        scope.setdefault("state", {})
        status = 0

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.http.labels(path, status).inc()
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", identity.encode())]
            await send(message)

        error = self._refusal(scope["headers"])
        answer: ASGIApp = super().__call__ if error is None else JSONResponse(error.body, error.status, error.headers)
        try:
            await answer(scope, receive, send_counted)
        finally:
            seconds = time.perf_counter() - began_s
            if path in _GENERATES and status == 200:
                self._metrics.end_to_end.observe(seconds)
            facts = scope["state"].get("facts", {})
            fields = {"method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 3)}
            text = "".join(f" {name}={value}" for name, value in facts.items())
            level = logging.DEBUG if path in _PROBES else logging.INFO
            access.log(level, "%s %s %d %.3f s%s", *fields.values(), text, extra={"fields": fields | facts})

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            error = bad("A request has either Content-Length or Transfer-Encoding.", code="invalid_http")
            error.headers = {"connection": "close"}  # what follows may be the rest of the body, or another request
            return error
        for host in (value.decode("latin-1") for name, value in headers if name == b"host"):
            if self._is_private and not is_loopback(host):
                message = f"This server has no API keys and listens on localhost, which '{short(host)}' does not name."
                return ApiError(403, message, code="forbidden_host")
        return None

    def _label(self, path: str) -> str:
        if path.startswith("/v1/models/"):
            return "/v1/models/{name}"
        return path if path in self._paths else "other"


def _id_of(scope: Scope) -> str:
    """The client's ``x-request-id`` if it is short and plain, else a new one."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if re.fullmatch(rb"[\w.:-]{1,64}", given) and given.isascii() else uuid.uuid4().hex


def is_loopback(host: str) -> bool:
    """Whether a host of a URL, with or without its port, is this machine."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("::1") else host
    try:
        return name.lower() == "localhost" or ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
