"""Reads recorded requests for a replay. Three formats; each line is checked.

- *mooncake*: one line per request, with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``: one
  id per block of 512 tokens. An id means the same text in every request.
- *session*: ids are valid within a session, and there is a ``block_size``. Either one line per session, with
  ``block_size`` and ``requests``, each with ``t`` (s), ``in`` and ``hash_ids`` (a request of ``type`` "subagent" has
  ``requests`` itself, whose times count from its own). Or one line per request, with ``session_id``, ``timestamp``, ``input_length``, ``hash_ids`` and
  ``block_size``.
- *text*: one line per request, with ``timestamp`` (us) and ``input``: the whole prompt as text. A token is a byte.

Requests are sorted by time. Most traces have an id for the last block of a prompt even if it is not full. A cache
cannot keep such a block, so it is left out. A key depends on all ids before it, so equal keys mean equal prompts up to
there, even if a trace repeats an id at another place.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.console.terminal import InputError, json_lines
from megatron_hybrid_prefix.index.keys import KEY_BYTES, KeyMaker
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from megatron_hybrid_prefix.text.tokenizer import ByteTokenizer

MOONCAKE_BLOCK_TOKENS = 512
TEXT_BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        keys: One key per full block of the prompt, front first.
        prompt_tokens: Length of the prompt.
        timestamp: Arrival time, in the unit of the trace (`Trace.ticks`).
        session: Its session, by whatever name; None: the trace names none.
        answer_tokens: Length of its answer; 0: not recorded.
    """

    keys: list[bytes]
    prompt_tokens: int
    timestamp: float
    session: Any = None
    answer_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Recorded requests, by time.

    Attributes:
        format: "mooncake", "session" or "text".
        block_tokens: Tokens per block.
        ticks: Units of time of its timestamps in a second.
        requests: The requests.
    """

    format: str
    block_tokens: int
    ticks: float = 1.0
    requests: tuple[TraceRequest, ...]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.prompt_tokens for request in self.requests)


class _Malformed(Exception):
    """A malformed line. The message has no file name and line number."""


def read_trace(paths: Sequence[Path], *, block_tokens: int | None = None, limit: int | None = None) -> Trace:
    """Reads all requests of these files. The first line decides the format of all lines.

    Args:
        paths: Files with one JSON object per line.
        block_tokens: Tokens per block, for text (default: 256). Sessions may have a multiple of their own: blocks are joined.
        limit: Keep only this many requests, the first by time.

    Raises:
        InputError: A file cannot be read, a line is malformed, or there are no requests.
    """
    reader: _Reader | None = None
    found: list[TraceRequest] = []
    for where, _, data in json_lines(paths, "requests"):
        try:
            if not isinstance(data, dict):
                raise _Malformed("expected a JSON object")
            if reader is None:
                reader = _READERS[_format_of(data)](block_tokens)
            found.extend(reader.requests(data))
        except _Malformed as error:
            raise InputError(f"{where}: {error}") from None
    if reader is None or not found:
        raise InputError(f"{', '.join(map(str, paths))}: no requests in it")
    found.sort(key=lambda request: request.timestamp)
    return Trace(
        format=reader.format, block_tokens=reader.block_tokens, ticks=reader.ticks, requests=tuple(found[:limit])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSessions:
    """Who would know which requests of a trace belong together, and when no more come.

    Attributes:
        numbers: The session of each request.
        last: With which request each session ends, by its number; one that is missing never ends.
    """

    numbers: list[int]
    last: dict[int, int]

    def hint(self, number: int) -> tuple[str, bool]:
        """What a request says: its session, and whether that ends with it."""
        session = self.numbers[number]
        return str(session), self.last.get(session) == number


def sessions_of(trace: Trace, *, early: float = 0.0, never: float = 0.0, seed: int = 0) -> TraceSessions:
    """The sessions of a trace. If it names none, a request continues the latest one whose whole blocks, two or more, begin its prompt.

    Args:
        trace: The trace.
        early: Share of the sessions that are said to end with their first request.
        never: Share that are never said to end.
        seed: Which these are.
    """
    newest: dict[bytes, int] = {}  # the latest request with exactly these whole blocks, by the last of their keys
    named: dict[Any, int] = {}  # the latest request of each
    numbers: list[int] = []
    unused = count()
    for number, request in enumerate(trace.requests):
        if request.session is None:
            before = max((newest.get(key, -1) for key in request.keys[1:]), default=-1)
        else:
            before = named.get(request.session, -1)
            named[request.session] = number
        numbers.append(next(unused) if before < 0 else numbers[before])
        if len(request.keys) > 1:
            newest[request.keys[-1]] = number
    last = {session: number for number, session in enumerate(numbers)}
    dice, first = random.Random(seed), {session: number for number, session in reversed(list(enumerate(numbers)))}
    for session in list(last):
        drawn = dice.random()
        if drawn < early:
            last[session] = first[session]
        elif drawn < early + never:
            del last[session]
    return TraceSessions(numbers=numbers, last=last)


def _format_of(data: dict[str, Any]) -> str:
    if "block_size" in data:
        return "session"
    if "hash_ids" in data:
        return "mooncake"
    if "input" in data:
        return "text"
    raise _Malformed('unknown format: expected "hash_ids", "hash_ids" and "block_size", or "input"')


# --- Fields ----------------------------------------------------------------------------------------------------------


def _field(data: dict[str, Any], name: str) -> Any:
    if name not in data:
        raise _Malformed(f'"{name}" is missing')
    return data[name]


def _time(data: dict[str, Any], name: str) -> float:
    value = _field(data, name)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _Malformed(f'"{name}" must be a number')
    return value  # type: ignore[no-any-return]


def _count(data: dict[str, Any], name: str, least: int = 1) -> int:
    value = _field(data, name)
    if type(value) is not int or value < least:
        raise _Malformed(f'"{name}" must be a whole number, {least} or more')
    return value


def _hash_ids(data: dict[str, Any], prompt_tokens: int, block_tokens: int) -> list[int]:
    """The ids of the full blocks."""
    ids = _field(data, "hash_ids")
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise _Malformed('"hash_ids" must be a list of whole numbers')
    full_blocks = prompt_tokens // block_tokens
    if len(ids) not in (full_blocks, ceil_div(prompt_tokens, block_tokens)):
        raise _Malformed(f'"hash_ids" has {len(ids)} ids for {prompt_tokens} tokens in blocks of {block_tokens}')
    return ids[:full_blocks]


# --- Formats ---------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads the lines of one format.

    Attributes:
        format: Its name.
        block_tokens: Tokens per block; 0: not known yet, the lines say it.
        ticks: See `Trace`.
    """

    format: str
    ticks = 1.0
    block_tokens = 0

    def __init__(self, block_tokens: int | None) -> None:
        self.block_tokens = block_tokens or self.block_tokens

    def requests(self, data: dict[str, Any]) -> Iterator[TraceRequest]:
        """The requests of one line."""
        raise NotImplementedError


class _IdReader(_Reader):
    """Formats with block ids. A key is a number for (previous key, scope of the ids, ids). Equal keys are one object."""

    def __init__(self, block_tokens: int | None) -> None:
        super().__init__(block_tokens)
        self._keys: dict[tuple[Any, ...], bytes] = {}
        # Scope, ids and keys of the latest prompt: most begin like the one before.
        self._last: tuple[Any, list[int], list[bytes]] = (None, [], [])

    def keys(self, scope: Any, ids: list[int], joined: int = 1) -> list[bytes]:
        """Keys of the blocks with these ids; of each ``joined`` of them that make a block."""
        last_scope, last, keys = self._last
        alike = next((at for at, pair in enumerate(zip(ids, last, strict=False)) if pair[0] != pair[1]), len(last))
        keys = keys[: min(alike, len(ids)) // joined if scope == last_scope else 0]
        known, key = self._keys, keys[-1] if keys else b""
        for at in range((len(keys) + 1) * joined, len(ids) + 1, joined):
            part = (key, scope, *ids[at - joined : at])
            key = known.get(part) or known.setdefault(part, (len(known) + 1).to_bytes(KEY_BYTES, "big"))
            keys.append(key)
        self._last = scope, ids, keys
        return keys


class _MooncakeReader(_IdReader):
    format = "mooncake"
    ticks = 1e3
    block_tokens = MOONCAKE_BLOCK_TOKENS

    def requests(self, data: dict[str, Any]) -> Iterator[TraceRequest]:
        tokens, answer = _count(data, "input_length"), _count(data, "output_length", 0)
        keys = self.keys(None, _hash_ids(data, tokens, self.block_tokens))
        at = _time(data, "timestamp")
        yield TraceRequest(keys=keys, prompt_tokens=tokens, timestamp=at, answer_tokens=answer)


class _SessionReader(_IdReader):
    format = "session"

    def __init__(self, block_tokens: int | None) -> None:
        super().__init__(block_tokens)
        self._sessions = self._own_tokens = 0

    def requests(self, data: dict[str, Any]) -> Iterator[TraceRequest]:
        found = _count(data, "block_size")
        self._own_tokens = self._own_tokens or found
        self.block_tokens = self.block_tokens or found
        if found != self._own_tokens:
            raise _Malformed(f"blocks of {found} tokens; expected {self._own_tokens}")
        if self.block_tokens % found:
            raise _Malformed(f"blocks of {found} tokens; expected {self.block_tokens}")
        if "requests" in data:
            self._sessions += 1
            yield from self._of_session(data, None if data.get("hash_id_scope") == "global" else self._sessions)
            return
        session = _field(data, "session_id")
        if type(session) not in (int, str):
            raise _Malformed('"session_id" must be text or a whole number')
        yield self._request(data, (session,), "timestamp", "input_length")

    def _of_session(self, data: dict[str, Any], scope: int | None, start: float = 0.0) -> Iterator[TraceRequest]:
        requests = data["requests"]
        if not isinstance(requests, list) or not all(isinstance(item, dict) for item in requests):
            raise _Malformed('"requests" must be a list of objects')
        for number, item in enumerate(requests, 1):
            try:
                if "requests" in item:
                    yield from self._of_session(item, scope, start + (_time(item, "t") if "t" in item else 0.0))
                else:
                    yield self._request(item, scope, "t", "in", start)
            except _Malformed as error:
                raise _Malformed(f"request {number}: {error}") from None

    def _request(
        self, data: dict[str, Any], scope: Any, time_name: str, length_name: str, start: float = 0.0
    ) -> TraceRequest:
        tokens, at = _count(data, length_name), start + _time(data, time_name)
        ids = _hash_ids(data, tokens, self._own_tokens)
        return TraceRequest(
            keys=self.keys(scope, ids, self.block_tokens // self._own_tokens),
            prompt_tokens=tokens,
            timestamp=at,
            session=self._sessions if scope is None else scope,
            answer_tokens=_count(data, "out", 0) if "out" in data else 0,
        )


class _TextReader(_Reader):
    format = "text"
    ticks = 1e6
    block_tokens = TEXT_BLOCK_TOKENS

    def __init__(self, block_tokens: int | None) -> None:
        super().__init__(block_tokens)
        self._tokenizer = ByteTokenizer()
        self._keys = KeyMaker(self.block_tokens, secret=b"replay")

    def requests(self, data: dict[str, Any]) -> Iterator[TraceRequest]:
        text = _field(data, "input")
        if not isinstance(text, str) or not text:
            raise _Malformed('"input" must be text, and not empty')
        chain = self._keys.chain(self._tokenizer.tokenize(text))
        yield TraceRequest(keys=chain.keys, prompt_tokens=chain.tokens, timestamp=_time(data, "timestamp"))


_READERS = {reader.format: reader for reader in (_MooncakeReader, _SessionReader, _TextReader)}
