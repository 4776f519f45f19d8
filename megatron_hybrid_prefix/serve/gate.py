"""Refuses requests that a proxy reads differently, and those of web pages to a server that asks for no key."""

from __future__ import annotations

from ipaddress import ip_address

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_hybrid_prefix.serve.errors import ApiError, bad, short


class Gate:
    """ASGI middleware.

    Args:
        app: The application.
        is_private: Whether only names of this machine are taken for it (DNS rebinding gives it another one).
    """

    def __init__(self, app: ASGIApp, is_private: bool) -> None:
        self._app, self._is_private = app, is_private

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        error = self._refusal(scope["headers"]) if scope["type"] == "http" else None
        answer = self._app if error is None else JSONResponse(error.body, error.status, error.headers)
        await answer(scope, receive, send)

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


def is_loopback(host: str) -> bool:
    """Whether a host of a URL, with or without its port, is this machine."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("::1") else host
    try:
        return name.lower() == "localhost" or ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
