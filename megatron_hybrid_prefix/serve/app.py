"""The HTTP side of the server: routes, streams, errors. One `Generation` is one request, from its body to its last token.

Longer than 400 lines because all that a request meets on its way is here, in order: answer, stream, route.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from megatron_hybrid_prefix.serve.detokenizer import TextStream, TokenNote, chat_logprobs, completion_logprobs
from megatron_hybrid_prefix.serve.engine_loop import Backend, Stream, Update
from megatron_hybrid_prefix.serve.metrics import ServerMetrics
from megatron_hybrid_prefix.serve.protocol import ApiError, Job, Prompt, Served, model_not_found, read_job, read_json

logger = logging.getLogger(__name__)

# What nginx calls it; nobody reads the answer.
_CLIENT_GONE = 499
# What is too large is read on for so many times the limit: most clients look for an answer only when they have sent all.
_READ_ON = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What clients may do.

    Attributes:
        sequences: Answers that run or wait; beyond that requests get 429.
        body_bytes: Of a request.
        keys: Names of tenants by API key; empty: no key is asked for.
        admin_token: Of ``/admin``; None: there is none.
    """

    sequences: int
    body_bytes: int
    keys: dict[str, str] = field(default_factory=dict)
    admin_token: str | None = None


class Choice:
    """One answer while it is generated."""

    def __init__(self, index: int, prompt: Prompt, stream: Stream, text: TextStream, most_tokens: int) -> None:
        self.index, self.prompt, self.stream, self.text = index, prompt, stream, text
        self._most_tokens = most_tokens
        self.tokens = self.cached_tokens = 0
        self.finish_reason: str | None = None

    def take(self, update: Update) -> tuple[str, list[TokenNote]]:
        """Text and tokens to show of an update; sets ``finish_reason`` where the answer ends.

        Raises:
            ApiError: The engine gave it up.
        """
        if update.error is not None:
            raise ApiError(500, f"The engine failed: {update.error}", type="server_error", code="engine_failed")
        self.cached_tokens = update.cached_tokens
        text = ""
        for number, token in enumerate(update.tokens):
            log_prob = update.log_probs[number] if update.log_probs else None
            top = update.top_log_probs[number] if update.top_log_probs else None
            text += self.text.feed(token, log_prob, top)
            self.tokens += 1
            if self.text.stopped:
                break
        if self.text.stopped or update.finished:
            text += self.text.finish()
            at_end = not self.text.stopped and self.tokens >= self._most_tokens
            ended = update.tokens and update.tokens[-1] == self.stream.sampling["termination_id"]
            self.finish_reason = "length" if at_end and not ended else "stop"
        return text, self.text.notes(last=self.finish_reason is not None)


class Generation:
    """A request's answers. Leave it as a context, so that what is unfinished is given up."""

    def __init__(self, job: Job, engine: Backend, served: Served, arrived_s: float) -> None:
        self.job, self._engine = job, engine
        self.id = f"{'chatcmpl' if job.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._model = served.model
        self._updates: asyncio.Queue[tuple[Choice, Update]] = asyncio.Queue()
        self.choices: list[Choice] = []
        for prompt, most_tokens in zip(job.prompts, job.most_tokens, strict=True):
            for _ in range(job.n):
                self._add_choice(prompt, most_tokens, served, arrived_s)

    def _add_choice(self, prompt: Prompt, most_tokens: int, served: Served, arrived_s: float) -> None:
        sampling = self.job.sampling | {"num_tokens_to_generate": most_tokens}
        if prompt.breakpoints:
            sampling["cache_breakpoints"] = prompt.breakpoints
        stream = Stream(
            prompt=prompt.tokens,
            sampling=sampling,
            arrived_s=arrived_s,
            deliver=lambda update: self._updates.put_nowait((choice, update)),
            stop=self.job.stop,
        )
        choice = Choice(len(self.choices), prompt, stream, TextStream(served.tokenizer, self.job.stop), most_tokens)
        self.choices.append(choice)

    def __enter__(self) -> Generation:
        for choice in self.choices:
            self._engine.submit(choice.stream)
        return self

    def __exit__(self, *_: object) -> None:
        for choice in self.choices:
            self._engine.abort(choice.stream)

    async def pieces(self) -> AsyncIterator[tuple[Choice, str, list[TokenNote]]]:
        """Text and tokens as they come, until every answer has its ``finish_reason``.

        Raises:
            ApiError: The engine gave one up.
        """
        left = len(self.choices)
        while left:
            choice, update = await self._updates.get()
            if choice.finish_reason is not None:
                continue  # it ended at a stop string
            text, notes = choice.take(update)
            if choice.finish_reason is not None:
                self._engine.abort(choice.stream)
                left -= 1
            if text or notes or choice.finish_reason is not None:
                yield choice, text, notes

    # -- in the forms of the API ---------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Tokens so far. Prompts count once, whatever ``n`` is, and as the first answer found them."""
        prompt = sum(len(item.tokens) for item in self.job.prompts)
        completion = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(choice.cached_tokens for choice in self.choices[:: self.job.n])
            },
        }

    async def response(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            ApiError: The engine gave it up.
        """
        texts = [choice.prompt.text if self.job.echo else "" for choice in self.choices]
        notes: list[list[TokenNote]] = [[] for _ in self.choices]
        async for choice, text, some in self.pieces():
            texts[choice.index] += text
            notes[choice.index] += some
        choices = []
        for choice in self.choices:
            entry = {
                "index": choice.index,
                "logprobs": self._logprobs(notes[choice.index]),
                "finish_reason": choice.finish_reason,
            }
            if self.job.chat:
                entry["message"] = {"role": "assistant", "content": texts[choice.index], "refusal": None}
            else:
                entry["text"] = texts[choice.index]
            choices.append(entry)
        return self._envelope("", choices) | {"usage": self.usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer piece by piece.

        Raises:
            ApiError: The engine gave it up.
        """
        for choice in self.choices:
            if self.job.chat:
                yield self._chunk(choice, {"role": "assistant", "content": "", "refusal": None}, [], None)
            elif self.job.echo:
                yield self._chunk(choice, choice.prompt.text, [], None)
        async for choice, text, notes in self.pieces():
            last = choice.finish_reason
            if self.job.chat and last is not None:
                if text or notes:
                    yield self._chunk(choice, {"content": text}, notes, None)
                yield self._chunk(choice, {}, [], last)
            else:
                yield self._chunk(choice, {"content": text} if self.job.chat else text, notes, last)
        if self.job.include_usage:
            yield self._envelope(".chunk", []) | {"usage": self.usage()}

    def _chunk(
        self, choice: Choice, delta: dict[str, Any] | str, notes: list[TokenNote], finish_reason: str | None
    ) -> dict[str, Any]:
        name = "delta" if self.job.chat else "text"
        entry = {"index": choice.index, name: delta, "logprobs": None, "finish_reason": finish_reason}
        if notes:
            entry["logprobs"] = self._logprobs(notes)
        chunk = self._envelope(".chunk", [entry])
        return chunk | {"usage": None} if self.job.include_usage else chunk

    def _logprobs(self, notes: list[TokenNote]) -> dict[str, Any] | None:
        if self.job.logprobs is None:
            return None
        return chat_logprobs(notes) if self.job.chat else completion_logprobs(notes)

    def _envelope(self, suffix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"chat.completion{suffix}" if self.job.chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self._model, "choices": choices}


class EventStream(Response):
    """Server-sent events of a generation; it is given up when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, on_end: Callable[[Generation, bool], None]) -> None:
        self._generation, self._on_end = generation, on_end
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    def init_headers(self, headers: Any = None) -> None:
        """Without a content length."""
        self.body = b""
        super().init_headers(headers)
        self.raw_headers = [item for item in self.raw_headers if item[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        with self._generation:
            gone = await _unless_gone(receive, self._send_all(send))
            self._on_end(self._generation, gone)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._generation.chunks():
                await self._send_event(send, json.dumps(chunk))
            await self._send_event(send, "[DONE]")
        except ApiError as error:  # too late for a status
            await self._send_event(send, json.dumps(error.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _send_event(send: Send, data: str) -> None:
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


async def _unless_gone(receive: Receive, work: Awaitable[Any]) -> bool:
    """Waits for ``work`` (and raises what it raises), or until the client goes away; returns whether it did."""

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
    except OSError:  # starlette's and uvicorn's word for a client that went away while being sent to
        return True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Api:
    """The routes."""

    def __init__(self, engine: Backend, served: Served, limits: Limits, metrics: ServerMetrics) -> None:
        self._engine, self._served, self._limits, self._metrics = engine, served, limits, metrics
        self._started_s = int(time.time())

    def app(self, on_start: Callable[[], None] = lambda: None) -> Starlette:
        """The application; it starts and stops what generates."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self._engine.start()
            on_start()
            yield
            await self._engine.stop()

        def route(path: str, method: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
            async def counted(request: Request) -> Response:
                try:
                    response = await handler(request)
                except ApiError as error:
                    response = JSONResponse(error.body, error.status, error.headers)
                except Exception:
                    self._metrics.http.labels(path, 500).inc()
                    raise
                self._metrics.http.labels(path, response.status_code).inc()
                return response

            return Route(path, counted, methods=[method])

        routes = [
            route("/v1/completions", "POST", lambda request: self._generate(request, "completions")),
            route("/v1/chat/completions", "POST", lambda request: self._generate(request, "chat")),
            route("/v1/models", "GET", self._models),
            route("/v1/models/{name:path}", "GET", self._model),
            route("/health", "GET", self._health),
            route("/metrics", "GET", self._show_metrics),
            route("/admin/reset_cache", "POST", self._reset_cache),
        ]
        handlers: Any = {HTTPException: _http_error, Exception: _server_error}
        app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
        app.state.backend = self._engine
        return app

    # -- generating ----------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request, kind: str) -> Response:
        arrived_s = time.perf_counter()
        tenant = self._tenant(request)
        try:
            data = await self._body(request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        # A long prompt takes its time to be read and tokenized.
        job = await run_in_threadpool(lambda: read_job(read_json(data), kind, self._served, tenant))
        self._check_room(len(job.prompts) * job.n)
        generation = Generation(job, self._engine, self._served, arrived_s)
        if job.stream:
            return EventStream(generation, self._count)
        answers: list[dict[str, Any]] = []

        async def answer() -> None:
            answers.append(await generation.response())

        with generation:
            gone = await _unless_gone(request.receive, answer())
            self._count(generation, gone)
        return Response(status_code=_CLIENT_GONE) if gone else JSONResponse(answers[0])

    def _count(self, generation: Generation, gone: bool) -> None:
        self._metrics.generated.inc(sum(choice.tokens for choice in generation.choices))
        if gone:
            self._metrics.cancelled.inc()

    async def _body(self, request: Request) -> bytes:
        most = self._limits.body_bytes
        data, size = bytearray(), 0
        async for part in request.stream():
            size += len(part)
            if size <= most:
                data += part
            elif size > _READ_ON * most:
                break
        if size > most:
            message = f"The request is larger than {most} bytes."
            raise ApiError(413, message, code="request_too_large", headers={"connection": "close"})
        return bytes(data)

    def _check_room(self, sequences: int) -> None:
        if self._engine.problem is not None:
            raise ApiError(503, self._engine.problem, type="server_error", code="engine_stopped")
        limit = self._limits.sequences
        if sequences > limit:
            raise ApiError(
                400, f"{sequences} answers at once; this server gives {limit}.", param="n", code="invalid_value"
            )
        if self._engine.open_sequences + sequences > limit:
            raise ApiError(
                429,
                f"{self._engine.open_sequences} answers are running or waiting, {limit} may: try again later.",
                type="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )

    # -- who asks ------------------------------------------------------------------------------------------------------

    def _tenant(self, request: Request) -> str | None:
        if not self._limits.keys:
            return None
        given = _bearer(request)
        found = [name for key, name in self._limits.keys.items() if hmac.compare_digest(key.encode(), given)]
        if not found:
            message = "Incorrect API key provided." if given else "You didn't provide an API key."
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return found[0]

    # -- the rest ------------------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        self._tenant(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._tenant(request)
        if request.path_params["name"] != self._served.model:
            raise model_not_found(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._served.model,
            "object": "model",
            "created": self._started_s,
            "owned_by": "megatron_hybrid_prefix",
            "max_model_len": self._served.limit_tokens,
        }

    async def _health(self, request: Request) -> Response:
        if self._engine.problem is not None:
            raise ApiError(503, self._engine.problem, type="server_error", code="engine_stopped")
        return JSONResponse(
            {"status": "ok", "open_sequences": self._engine.open_sequences, "engine_failures": self._engine.failures}
        )

    async def _show_metrics(self, request: Request) -> Response:
        if self._engine.problem is None:  # else what it last said
            self._metrics.snapshots = await self._engine.snapshots()
        self._metrics.gauges = {
            "open_sequences": self._engine.open_sequences,
            "engine_failures": self._engine.failures,
        }
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._metrics.registry), headers={"content-type": content_type})

    async def _reset_cache(self, request: Request) -> Response:
        token = self._limits.admin_token
        if token is None:
            raise ApiError(404, "This server was started without an admin token.", code="not_found")
        if not hmac.compare_digest(token.encode(), _bearer(request)):
            raise ApiError(
                401, "Incorrect admin token.", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
            )
        if self._engine.problem is not None:
            raise ApiError(503, self._engine.problem, type="server_error", code="engine_stopped")
        await self._engine.reset_cache()
        logger.warning("the cache was reset")
        return JSONResponse({"status": "ok"})


def _bearer(request: Request) -> bytes:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    return value.strip().encode() if scheme.lower() == "bearer" else b""


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail} ({request.method} {request.url.path})"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return JSONResponse(ApiError(error.status_code, message, code=code).body, error.status_code, error.headers)


async def _server_error(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "The server had an error.", type="server_error").body, 500)
