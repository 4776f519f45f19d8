"""Streamed responses, and work that ends with its client. A stream ends at its last token, or when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megatron_hybrid_prefix.serve.errors import ApiError
from megatron_hybrid_prefix.serve.generation import Generation


class EventStream(Response):
    """Server-sent events of a generation. The generation is aborted when the client disconnects.

    Args:
        generation: Entered by the caller; left at the end of the stream.
        chunks: Its chunks. The caller waits for the first, so that an error before it has an HTTP status.
        first: The first chunk.
        on_end: Called at the end with the generation and whether the client disconnected.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        chunks: AsyncIterator[dict[str, Any]],
        first: dict[str, Any],
        on_end: Callable[[Generation, bool], None],
    ) -> None:
        self._generation, self._chunks, self._first, self._on_end = generation, chunks, first, on_end
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    def init_headers(self, headers: Any = None) -> None:
        """Sets the headers, without a content length."""
        self.body = b""
        super().init_headers(headers)
        self.raw_headers = [item for item in self.raw_headers if item[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        gone = False
        try:
            gone = await unless_gone(receive, self._send_all(send))
        finally:
            self._generation.close()
            self._on_end(self._generation, gone)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._send_event(send, json.dumps(self._first))
            async for chunk in self._chunks:
                await self._send_event(send, json.dumps(chunk))
        except ApiError as error:  # the status has been sent already
            await self._send_event(send, json.dumps(error.body))
        await self._send_event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _send_event(send: Send, data: str) -> None:
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> bool:
    """Waits for ``work``, or until the client disconnects. Returns whether it did. Raises what ``work`` raises."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(disconnected())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] not in done:
            return True
        tasks[0].result()
        return False
    except OSError:  # starlette and uvicorn raise it when the client disconnects during a send
        return True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
