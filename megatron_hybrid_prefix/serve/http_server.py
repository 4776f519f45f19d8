"""uvicorn's server with a limit of connections, and an end that tells clients."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn

logger = logging.getLogger(__name__)

_LOOK_S = 0.05  # between two looks whether a request runs
# Clients have this long to read the last error, and close.
_LAST_WORDS_S = 2.0
# Clients such as httpx close idle connections after 5 s. A server that does so at the same moment fails their next request.
_KEEP_ALIVE_S = 30
# The terminal and torchrun both send SIGINT for one Ctrl-C. Signals closer than this count as one.
SAME_SIGNAL_S = 1.0
_DESCRIPTORS = 65_536  # file descriptors for the process, if it may have so many
_SPARE = 256  # of them for files and others than clients; a quarter, if there are few
_TELL_EACH_S = 60.0


class HttpServer(uvicorn.Server):
    """Serves until SIGINT or SIGTERM. Open requests may then go on for a while; a second signal ends them at once.

    Args:
        app: An application of `serve.app.make_app`.
        drain_s: How long open requests may go on.
        options: Of ``uvicorn.Config``.
    """

    def __init__(self, app: Any, *, drain_s: float, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",  # which limits headers
                ws="none",
                lifespan="on",
                timeout_keep_alive=_KEEP_ALIVE_S,
                **options,
            )
        )
        self._api, self._drain_s = app.state.api, drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told_s: float | None = None
        self._signal, self._is_over = 0, False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for listener in sockets or ():
            if isinstance(listener, Listener):
                listener.make_room = self._close_idle
        if self.started:
            self._api.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See upstream. Refuses new requests, but answers probes while the open ones go on, and ends them after a while."""
        began_s = time.monotonic()
        if self._told_s is not None:  # not said by the handler, which may interrupt a log line
            text = "%s: no new requests; open ones (%d) have %g s"
            logging.warning(text, signal.Signals(self._signal).name, self._api.open_requests, self._drain_s)
        self._api.refuse_more()
        ending = asyncio.get_running_loop().call_later(self._drain_s, self._end_all, "the drain time is over")
        try:
            while self._api.open_requests and not self._is_over:
                await asyncio.sleep(_LOOK_S)
            left_s = 0.0 if self._is_over else max(0.0, began_s + self._drain_s - time.monotonic())
            self.config.timeout_graceful_shutdown = int(left_s + _LAST_WORDS_S)
            await super().shutdown(sockets)
        finally:
            ending.cancel()
        if self._told_s is not None:
            logger.info("the server ends after a drain of %.1f s", time.monotonic() - began_s)

    def _end_all(self, why: str) -> None:
        if left := self._api.open_requests:
            logging.warning("%s: open requests (%d) end now", why, left)
        self._api.end_all()
        self._is_over = True

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
            self._told_s, self._signal = now_s, sig
            super().handle_exit(sig, frame)
        elif now_s - self._told_s > SAME_SIGNAL_S and self._loop is not None:
            self._loop.call_soon_threadsafe(self._end_all, f"{signal.Signals(sig).name} again")


class Listener(socket.socket):
    """A listening socket that leaves file descriptors for the rest of the process: asyncio fills the log if none is left.

    Attributes:
        make_room: Ends another connection, if it can. Returns whether it could.
    """

    make_room: Callable[[], bool] = staticmethod(lambda: False)
    _told_s = -math.inf

    def accept(self) -> tuple[socket.socket, Any]:
        """See upstream. Of clients that are too many, an idle one is disconnected, else the new one."""
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
        if not self.make_room():
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
