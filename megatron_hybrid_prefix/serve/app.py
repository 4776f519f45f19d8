"""The HTTP routes: authentication, limits, responses, and errors in the format of the OpenAI API."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megatron_hybrid_prefix.serve.backend import Backend
from megatron_hybrid_prefix.serve.bodies import read_json
from megatron_hybrid_prefix.serve.chat_template import ChatForm
from megatron_hybrid_prefix.serve.engine_loop import EngineLoop
from megatron_hybrid_prefix.serve.errors import ApiError, model_not_found
from megatron_hybrid_prefix.serve.event_stream import EventStream, unless_gone
from megatron_hybrid_prefix.serve.generation import Generation
from megatron_hybrid_prefix.serve.metrics import ServerMetrics
from megatron_hybrid_prefix.serve.protocol import ServedModel, read_request
from megatron_hybrid_prefix.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# nginx's status code for a closed connection. Nobody reads this response.
_CLIENT_GONE = 499
# Read up to this multiple of the size limit before refusing: most clients read a response only after they sent all.
_READ_ON = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits and credentials of clients.

    Attributes:
        sequences: Answers that run or wait at a time; further requests get 429.
        body_bytes: Largest request body.
        keys: Tenant names by API key; empty: no key is needed.
        admin_token: Token for ``/admin``; None: ``/admin`` is off.
    """

    sequences: int
    body_bytes: int
    keys: dict[str, str] = field(default_factory=dict)
    admin_token: str | None = None


def make_app(
    engine: Any,
    tokenizer: Tokenizer,
    *,
    model: str,
    vocab_size: int,
    chat: ChatForm,
    add_bos: bool = False,
    max_waiting: int = 256,
    body_bytes: int = 16 << 20,
    keys: dict[str, str] | None = None,
    admin_token: str | None = None,
    on_start: Callable[[], None] = lambda: None,
    make_backend: Callable[[Callable[[float, bool], None]], Backend] | None = None,
    replicas: int = 1,
    end_tokens: tuple[int, ...] = (),
    default_sampling: Mapping[str, Any] | None = None,
) -> Starlette:
    """Builds the ASGI application around an engine of ``build_engine``.

    The application owns the engine from its start to its end.

    Args:
        engine: Says what fits into its context. Generates, too, unless ``make_backend`` is given.
        tokenizer: The model's tokenizer.
        model: Model name in the API.
        vocab_size: Vocabulary size of the model.
        chat: Turns messages into a prompt.
        add_bos: Whether text prompts start with the tokenizer's first token.
        max_waiting: Answers that may wait, in addition to those that run.
        body_bytes: Largest request body.
        keys: Tenant names by API key.
        admin_token: Token for ``/admin``; None: ``/admin`` is off.
        on_start: Called when the server is ready.
        make_backend: Makes a `Backend`. Its argument is the function to call at each first token.
        replicas: Number of engines behind the backend.
        end_tokens: As of `ServedModel`.
        default_sampling: As of `ServedModel`.
    """
    from megatron_hybrid_prefix.mcore.runner import check_fits

    context = engine.context
    from megatron_hybrid_prefix.upstream.blocks import block_counts  # imports megatron

    kv_tokens = block_counts(context.kv_block_allocator).active * context.block_size_tokens
    limit_tokens = min(context.max_sequence_length, kv_tokens)
    served = ServedModel(
        model=model,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        chat=chat,
        add_bos=add_bos,
        check_fits=lambda prompt, wanted: check_fits(engine, prompt, wanted),
        most_tokens=lambda prompt: limit_tokens - prompt,
        limit_tokens=limit_tokens,
        end_tokens=end_tokens,
        default_sampling=default_sampling or {},
    )
    limits = Limits(
        sequences=replicas * context.max_requests + max_waiting,
        body_bytes=body_bytes,
        keys=keys or {},
        admin_token=admin_token,
    )
    metrics = ServerMetrics(replicas)
    make_backend = make_backend or partial(EngineLoop, engine)
    return Api(make_backend(metrics.first_token), served, limits, metrics).app(on_start)


class Api:
    """The HTTP routes around a `Backend`."""

    def __init__(self, engine: Backend, served: ServedModel, limits: Limits, metrics: ServerMetrics) -> None:
        self._engine, self._served, self._limits, self._metrics = engine, served, limits, metrics
        self._started_s = int(time.time())

    def app(self, on_start: Callable[[], None] = lambda: None) -> Starlette:
        """The application. Its lifespan starts and stops the backend."""

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

    # -- generate ------------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request, kind: str) -> Response:
        arrived_s = time.perf_counter()
        tenant = self._tenant(request)
        try:
            data = await self._body(request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        # Off the event loop: a long prompt takes time to parse and tokenize.
        asked = await run_in_threadpool(lambda: read_request(read_json(data), kind, self._served, tenant))
        self._check_room(len(asked.prompts) * asked.n)
        generation = Generation(asked, self._engine, self._served, arrived_s)
        if asked.stream:
            return EventStream(generation, self._count)
        answers: list[dict[str, Any]] = []

        async def answer() -> None:
            answers.append(await generation.response())

        with generation:
            gone = await unless_gone(request.receive, answer())
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
                400,
                f"The request asks for {sequences} answers at once; the limit is {limit}.",
                param="n",
                code="invalid_value",
            )
        if self._engine.open_sequences + sequences > limit:
            raise ApiError(
                429,
                f"{self._engine.open_sequences} of at most {limit} answers are running or waiting. Try again later.",
                type="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )

    # -- authentication ------------------------------------------------------------------------------------------------

    def _tenant(self, request: Request) -> str | None:
        if not self._limits.keys:
            return None
        given = _bearer(request)
        found = [name for key, name in self._limits.keys.items() if hmac.compare_digest(key.encode(), given)]
        if not found:
            message = "Incorrect API key provided." if given else "You didn't provide an API key."
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return found[0]

    # -- other routes --------------------------------------------------------------------------------------------------

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
        if self._engine.problem is None:  # with a problem, the last snapshots are shown
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
        logger.warning("the prefix cache was reset by /admin/reset_cache")
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
