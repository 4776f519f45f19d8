"""Streamed responses, and work that ends with its client. A stream ends at its last token, or when the client disconnects."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from megatron_hybrid_prefix.serve.errors import ApiError
from megatron_hybrid_prefix.serve.generation import Generation

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class EventStream(StreamingResponse):
    """Server-sent events of a generation. The generation is aborted when the client disconnects.

    Args:
        generation: Entered by the caller; left at the end of the stream.
        chunks: Its chunks. The caller waits for the first, so that an error before it has an HTTP status.
        first: The first chunk.
        on_end: Called at the end with the generation and whether the client disconnected.
    """

    def __init__(
        self,
        generation: Generation,
        chunks: AsyncIterator[dict[str, Any]],
        first: dict[str, Any],
        on_end: Callable[[Generation, bool], None],
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_events(first, chunks), headers=headers, media_type="text/event-stream")
        self._generation, self._on_end = generation, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        gone = False
        try:
            await unless_gone(receive, self.stream_response(send))
        except ClientDisconnect:
            gone = True
        finally:
            self._generation.close()
            self._on_end(self._generation, gone)


async def _events(first: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    form = "data: {}\n\n".format
    yield form(to_json(first))
    try:
        async for chunk in chunks:
            yield form(to_json(chunk))
    except ApiError as error:  # the status has been sent already
        yield form(to_json(error.body))
    yield form("[DONE]")


def to_json(data: Any) -> str:
    """JSON, which has no NaN and no infinity: null in their place. A log-prob of a token that cannot be drawn is -inf."""
    try:
        return _encode(data)
    except ValueError:
        return _encode(_without_nan(data))


def _without_nan(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_nan(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


async def unless_gone[T](receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled if the client disconnects.

    Raises:
        ClientDisconnect: It did. Also what ``work`` raises.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    except OSError:  # starlette and uvicorn raise it when the client disconnects during a send
        raise ClientDisconnect from None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
