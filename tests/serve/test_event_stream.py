"""A stream that fails while it is sent."""

from __future__ import annotations

import asyncio

import pytest

from megatron_hybrid_prefix.serve.event_stream import EventStream


class Closed:
    """A generation that only notes that it was closed."""

    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


def test_the_end_of_a_stream_is_told_when_sending_raises():
    """Otherwise the places of its tenant would never be free again."""
    generation, ends = Closed(), []

    async def no_chunks():
        return
        yield

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        raise RuntimeError("no such connection")

    stream = EventStream(generation, no_chunks(), {}, lambda *end: ends.append(end))
    with pytest.raises(RuntimeError, match="no such connection"):
        asyncio.run(stream({}, receive, send))
    assert ends == [(generation, False)] and generation.closed == 1
