"""uvicorn's server, with a time limit for slow headers, and an end that tells clients."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from megatron_hybrid_prefix.serve.errors import bad

logger = logging.getLogger(__name__)

# Clients have this long to read the last error, and close.
_LAST_WORDS_S = 2.0
# Clients such as httpx close idle connections after 5 s. A server that does so at the same moment fails their next request.
_KEEP_ALIVE_S = 30
# The terminal and torchrun both send SIGINT for one Ctrl-C. Signals closer than this count as one.
SAME_SIGNAL_S = 1.0
_DESCRIPTORS = 65_536  # file descriptors for the process, if it may have so many
_SPARE = 256  # of them for files and others than clients; a quarter, if there are few
_TELL_EACH_S = 60.0
_PASSES = 8  # of the loop: connections of these are not known yet, and may be idle


class HttpServer(uvicorn.Server):
    """Serves until SIGINT or SIGTERM. Open requests may then go on for a while; a second signal ends them at once.

    Args:
        app: An application of `serve.app.make_app`.
        drain_s: How long open requests may go on.
        read_s: Seconds that a request's headers may take to arrive.
        options: Of ``uvicorn.Config``.
    """

    def __init__(self, app: Any, *, drain_s: float, read_s: float, **options: Any) -> None:
        api = app.state.api
        protocol = type("LimitedProtocol", (_LimitedProtocol,), {"read_s": read_s, "api": api})
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="on",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(drain_s + _LAST_WORDS_S),
                **options,
            )
        )
        self._api, self._drain_s = api, drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told_s: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for listener in sockets or ():
            if isinstance(listener, Listener):
                listener.make_room = self._close_idle
        if self.started:
            self._api.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See upstream. Refuses new requests, and ends the open ones after a while."""
        if self._told_s is not None:  # not said by the handler, which may interrupt a log line
            logging.warning("SIGTERM or Ctrl-C: no new requests; open ones have %g s", self._drain_s)
        self._api.refuse_more(self._drain_s)
        ending = asyncio.get_running_loop().call_later(self._drain_s, self._api.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    def _close_idle(self) -> bool:
        """Closes a connection on which no request runs. Returns whether there was one."""
        connections: Any = self.server_state.connections
        for connection in connections:
            is_idle = connection.cycle is None or connection.cycle.response_complete
            if is_idle and not connection.transport.is_closing():
                connection.shutdown()
                return True
        return False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See upstream. Upstream drops all connections at the second SIGINT."""
        now_s = time.monotonic()
        if self._told_s is None:
            self._told_s = now_s
            super().handle_exit(sig, frame)
        elif now_s - self._told_s > SAME_SIGNAL_S and self._loop is not None:
            self._loop.call_soon_threadsafe(self._api.end_all)


_Protocol: Any = AutoHTTPProtocol  # uvicorn chooses the class when it is imported


class _LimitedProtocol(_Protocol):  # type: ignore[misc]  # so mypy does not know it
    """A connection that is closed if headers take too long."""

    read_s: float
    api: Any
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()  # the headers are here; the application limits the body
        else:
            self._wait_for_headers()

    def send_400_response(self, msg: str) -> None:
        """See upstream: what arrived is not HTTP, so the application does not see it. Upstream sends plain text."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.api.count_malformed()
            body = json.dumps(bad(msg, code="invalid_http").body).encode()
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()  # in the middle of a reply, nothing else can be sent

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.read_s, self._close_unless_busy)

    def _close_unless_busy(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Listener(socket.socket):
    """A listening socket that leaves file descriptors for the rest of the process, with asyncio's loop.

    asyncio writes thousands of lines to the log each time that none is left.

    Attributes:
        make_room: Ends another connection, if it can. Returns whether it could.
    """

    make_room: Callable[[], bool] = staticmethod(lambda: False)
    _told_s, _passes = -math.inf, 0

    def accept(self) -> tuple[socket.socket, Any]:
        """See upstream. Of the clients that are too many, idle ones are disconnected, else new ones."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most -= min(most // 4, _SPARE)
        try:
            os.close(free := os.dup(self.fileno()))  # the number that the connection would get
        except OSError:
            free = most
        if free < most:
            return super().accept()
        if time.monotonic() - self._told_s > _TELL_EACH_S:
            self._told_s = time.monotonic()
            logger.warning("more connections than the limit of file descriptors (ulimit -n): idle ones are closed")
        self._passes = 0 if self.make_room() else self._passes + 1
        if self._passes > _PASSES:
            self._passes = 0
            with suppress(OSError):
                super().accept()[0].close()
        raise BlockingIOError  # asyncio asks again in the next pass of its loop, when there is room


def bound_socket(host: str, port: int) -> Listener:
    """A socket with this address, and as many descriptors as the process may have. Connections are refused until the model is loaded.

    Raises:
        OSError: The address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches off Nagle's algorithm only for sockets that name their protocol. With it, the second part of each
    # reply and each token of a stream waits for the client's delayed acknowledgement (40 ms on Linux).
    most, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, min(limit, _DESCRIPTORS)), limit))
    listener = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener
