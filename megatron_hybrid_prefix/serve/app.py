"""The HTTP routes: authentication, limits, responses, and errors in the format of the OpenAI API.

Long, because all routes share the limits, the counts and the end of one server.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from anyio import from_thread, to_thread
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.serve.backend import Backend
from megatron_hybrid_prefix.serve.bodies import DetokenizeBody, ExplainBody, TokenizeBody, read_fields, read_json
from megatron_hybrid_prefix.serve.engine_loop import EngineLoop
from megatron_hybrid_prefix.serve.errors import ApiError, bad, model_not_found, short, stopping
from megatron_hybrid_prefix.serve.event_stream import EventStream, to_json, unless_gone
from megatron_hybrid_prefix.serve.front import ServerApp
from megatron_hybrid_prefix.serve.generation import Generation
from megatron_hybrid_prefix.serve.metrics import ServerMetrics
from megatron_hybrid_prefix.serve.protocol import ServedModel, chat_tokens, read_request, text_tokens
from megatron_hybrid_prefix.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# nginx's status code for a closed connection. Nobody reads this response.
_CLIENT_GONE = 499
# Read up to this multiple of the size limit before refusing: most clients read a response only after they sent all.
_READ_ON = 8
_SNAPSHOT_S = 1.0  # wait for new figures this long, then show the last ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits and credentials of clients.

    Attributes:
        sequences: Answers that run or wait at a time; further requests get 429.
        max_per_tenant: The same for each API key's name; None: no limit.
        body_bytes: Largest request body.
        read_s: Seconds that a request's body may take to arrive.
        step_s: Seconds that a step may take. After them ``/health`` says that the engine is stuck.
        keys: Tenant names by API key; empty: no key is needed.
        is_private: Whether it listens on this machine only; without keys it is then called only by names of this machine.
        admin_token: Token for ``/admin``; None: ``/admin`` is off.
    """

    sequences: int
    max_per_tenant: int | None = None
    body_bytes: int = 16 << 20
    read_s: float = 60.0
    step_s: float = 300.0
    keys: dict[str, str] = field(default_factory=dict)
    is_private: bool = False
    admin_token: str | None = None


def make_app(
    engine: Any,
    tokenizer: Tokenizer,
    *,
    max_waiting: int = 256,
    on_start: Callable[[], None] = lambda: None,
    make_backend: Callable[[Callable[[float, bool], None]], Backend] | None = None,
    replicas: int = 1,
    **options: Any,
) -> Starlette:
    """Builds the ASGI application around an engine of ``build_engine``.

    The application owns the engine from its start to its end.

    Args:
        engine: Says what fits into its context. Generates, too, unless ``make_backend`` is given.
        tokenizer: The model's tokenizer.
        max_waiting: Answers that may wait, in addition to those that run.
        on_start: Called when the server listens.
        make_backend: Makes a `Backend`. Its argument is the function to call at each first token.
        replicas: Number of engines behind the backend.
        **options: The other fields of `Limits`, and those of `ServedModel` that the engine does not decide.
    """
    from megatron_hybrid_prefix.mcore.runner import check_fits
    from megatron_hybrid_prefix.upstream.blocks import block_counts  # imports megatron

    context = engine.context
    kv_tokens = block_counts(context.kv_block_allocator).active * context.block_size_tokens
    names = {field.name for field in fields(Limits)} & options.keys()
    sequences = replicas * context.max_requests + max_waiting
    limits = Limits(sequences=sequences, **{name: options.pop(name) for name in names})
    served = ServedModel(
        tokenizer=tokenizer,
        check_fits=partial(check_fits, engine),
        limit_tokens=min(context.max_sequence_length, kv_tokens),
        gives_routes=context.moe_enable_routing_replay,
        gives_prompt_log_probs=not context.config.materialize_only_last_token_logits,
        has_drafts=engine.num_speculative_tokens > 0,
        **options,
    )
    metrics = ServerMetrics(replicas)
    backend = (make_backend or partial(EngineLoop, engine))(metrics.first_token)
    return Api(backend, served, limits, metrics).app(on_start)


class Api:
    """The HTTP routes around a `Backend`."""

    def __init__(self, engine: Backend, served: ServedModel, limits: Limits, metrics: ServerMetrics) -> None:
        self._engine, self._served, self._limits, self._metrics = engine, served, limits, metrics
        self._started_s = int(time.time())
        self._open_of_tenant: Counter[str] = Counter()
        self._tokenizing: Counter[str | None] = Counter()  # answers, by tenant
        self._reading: set[asyncio.Timeout] = set()  # of bodies
        self._stopping = False
        self._refreshing: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None

    def app(self, on_start: Callable[[], None] = lambda: None) -> Starlette:
        """The application. Its lifespan starts and stops the backend. ``on_start``: as of `make_app`."""
        self.on_start = on_start

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self._engine.start()
            yield
            await self._engine.stop()

        get, post = partial(Route, methods=["GET"]), partial(Route, methods=["POST"])
        routes = [
            post("/v1/completions", partial(self._generate, kind="completions")),
            post("/v1/chat/completions", partial(self._generate, kind="chat")),
            post("/inference/v1/generate", partial(self._generate, kind="generate")),
            get("/v1/models", self._models),
            get("/v1/models/{name:path}", self._model),
            post("/tokenize", self._tokenize),
            post("/detokenize", self._detokenize),
            get("/tokenizer_info", self._tokenizer_info),
            get("/version", self._version),
            get("/health", self._health),
            get("/health_generate", self._health_generate),
            get("/metrics", self._show_metrics),
            post("/admin/explain", self._explain),
            post("/admin/reset_cache", self._reset_cache),
        ]
        handlers: Any = {ApiError: _api_error, HTTPException: _http_error, Exception: _server_error}
        paths = frozenset(route.path for route in routes)
        is_private = self._limits.is_private and not self._limits.keys
        options: Any = {"routes": routes, "lifespan": lifespan, "exception_handlers": handlers}
        app = ServerApp(paths, self._metrics, is_private=is_private, **options)
        app.state.backend, app.state.api = self._engine, self
        return app

    def refuse_more(self) -> None:
        """The server is told to stop: further requests get 503, open ones may go on."""
        self._stopping = True

    def end_all(self) -> None:
        """Ends all requests with an error: the server stops now."""
        self._stopping = True
        self._engine.end_all()
        for reading in self._reading:
            reading.reschedule(asyncio.get_running_loop().time())

    # -- generate ------------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request, kind: str) -> Response:
        arrived_s = time.perf_counter()
        tenant = self._tenant(request)
        self._check_room(tenant, 1)
        try:
            data = await self._body(request)
            with self._places(tenant) as take:
                read = partial(read_request, kind=kind, served=self._served, tenant=tenant, take_places=take)
                asked = await self._read(request, lambda check: read(read_json(data), check=check))
        except ClientDisconnect:
            self._metrics.cancelled.inc()
            return Response(status_code=_CLIENT_GONE)
        self._check_room(tenant, len(asked.prompts) * asked.body.n)
        generation = Generation(asked, self._engine, self._served, arrived_s, self._metrics.between_tokens)
        return await self._answer(request, generation)

    @contextmanager
    def _places(self, tenant: str | None) -> Iterator[Callable[[int], None]]:
        """Gives a function that takes places while prompts are tokenized, for the thread that does it: else all would be at once."""
        taken, is_open = 0, True

        def take(sequences: int) -> None:
            nonlocal taken
            if is_open:  # else the client is gone
                self._check_room(tenant, sequences)
                taken = sequences
                self._tokenizing[tenant] += sequences

        try:
            yield lambda sequences: from_thread.run_sync(take, sequences)
        finally:
            self._tokenizing[tenant] -= taken
            is_open = False

    async def _read(self, request: Request, read: Callable[[Callable[[], None]], Any]) -> Any:
        """Parses a body off the event loop, since long prompts take time. Ends early if the client disconnects.

        Raises:
            ClientDisconnect: The client disconnected.
        """
        is_gone = threading.Event()

        def check() -> None:
            if is_gone.is_set():
                raise ClientDisconnect

        try:
            return await unless_gone(request.receive, to_thread.run_sync(read, check, abandon_on_cancel=True))
        finally:
            is_gone.set()

    async def _answer(self, request: Request, generation: Generation) -> Response:
        tenant, sequences = generation.request.tenant, len(generation.choices)

        def on_end(generation: Generation, gone: bool) -> None:
            if tenant is not None:
                self._open_of_tenant[tenant] -= sequences
            self._count(request, generation, gone)

        streamed = generation.request.body.stream
        chunks = generation.chunks()
        gone, ends_here = False, True
        if tenant is not None:
            self._open_of_tenant[tenant] += sequences
        try:
            generation.__enter__()
            answer = await unless_gone(request.receive, anext(chunks) if streamed else generation.response())
            ends_here = not streamed
        except ClientDisconnect:
            gone = True
            return Response(status_code=_CLIENT_GONE)
        finally:
            if ends_here:
                generation.close()
                on_end(generation, gone)
        if streamed:
            return EventStream(generation, chunks, answer, on_end)
        return Response(to_json(answer), media_type="application/json")

    def _count(self, request: Request, generation: Generation, gone: bool) -> None:
        usage = generation.usage()
        reasons = {choice.finish_reason for choice in generation.choices}
        status = "cancelled" if gone else "failed" if None in reasons else "finished"
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self._metrics.generated.labels(status).inc(usage["completion_tokens"])
        for choice in generation.choices:
            if choice.parts is not None:
                self._metrics.unparsed_calls.inc(choice.parts.unparsed)
            if choice.cached_tokens:
                self._metrics.hit_depth.observe(choice.cached_tokens)
        request.state.facts = f" prompt={usage['prompt_tokens']} cached={cached} generated={usage['completion_tokens']}"
        if gone:
            self._metrics.cancelled.inc()

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another site can send any other one without asking this server
            raise ApiError(415, "The content type must be application/json.", code="unsupported_media_type")
        most = self._limits.body_bytes
        data, size = bytearray(), 0
        try:
            async with asyncio.timeout(self._limits.read_s) as reading:
                self._reading.add(reading)
                async for part in request.stream():
                    size += len(part)
                    if size <= most:
                        data += part
                    elif size > _READ_ON * most:
                        break
        except TimeoutError:
            self._check_stopping()
            message = f"The body of the request did not arrive within {self._limits.read_s:g} s."
            raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None
        finally:
            self._reading.discard(reading)
        if size > most:
            message = f"The request is larger than {most} bytes."
            raise ApiError(413, message, code="request_too_large", headers={"connection": "close"})
        return bytes(data)

    def _check_stopping(self) -> None:
        if self._stopping:
            raise stopping()

    def _check_room(self, tenant: str | None, sequences: int) -> None:
        self._check_stopping()
        self._check_engine()
        limits = [(self._limits.sequences, self._engine.open_sequences + self._tokenizing.total(), "")]
        if self._limits.max_per_tenant is not None and tenant is not None:
            used = self._open_of_tenant[tenant] + self._tokenizing[tenant]
            limits.append((self._limits.max_per_tenant, used, " of this API key"))
        for limit, used, whose in limits:
            if sequences > limit:
                message = f"The request asks for {sequences} answers at once; the limit{whose} is {limit}."
                raise ApiError(400, message, param="n", code="invalid_value")
            if used + sequences > limit:
                raise ApiError(
                    429,
                    f"{used} of at most {limit} answers{whose} are running or waiting. Try again later.",
                    code="rate_limit_exceeded",
                    headers={"retry-after": "1"},
                )

    def _check_engine(self) -> None:
        if self._engine.problem is not None:
            logger.error("refused: %s", self._engine.problem)
            raise ApiError(503, "The engine has stopped.", code="engine_stopped")

    # -- authentication ------------------------------------------------------------------------------------------------

    def _tenant(self, request: Request) -> str | None:
        if not self._limits.keys:
            return None
        given = _bearer(request)
        found = [name for key, name in self._limits.keys.items() if hmac.compare_digest(key.encode(), given)]
        if not found:
            raise _unauthorized("Incorrect API key provided." if given else "You didn't provide an API key.")
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

    async def _tokenize(self, request: Request) -> Response:
        body = await self._read_small(request, TokenizeBody)
        if body.messages is not None:
            messages, more = [message.as_dict() for message in body.messages], dict[str, Any](variables=body.variables)
            more |= {"begin_answer": body.begins_answer, "add_special_tokens": body.add_special_tokens}
            _, tokens, _ = await to_thread.run_sync(partial(chat_tokens, messages, self._served, **more))
        else:
            text = partial(text_tokens, add_special_tokens=body.add_special_tokens)
            tokens = await to_thread.run_sync(text, body.prompt, self._served)
        limit = self._served.limit_tokens
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    async def _detokenize(self, request: Request) -> Response:
        body = await self._read_small(request, DetokenizeBody)
        if any(not 0 <= token < self._served.vocab_size for token in body.tokens):
            raise bad(f"'tokens' has ids outside the vocabulary of {self._served.vocab_size} tokens.", "tokens")
        return JSONResponse({"prompt": await to_thread.run_sync(self._served.tokenizer.detokenize, body.tokens)})

    async def _tokenizer_info(self, request: Request) -> Response:
        self._tenant(request)
        return JSONResponse(self._served.tokenizer_info())

    async def _read_small[Kind: (TokenizeBody, DetokenizeBody)](self, request: Request, kind: type[Kind]) -> Kind:
        self._tenant(request)
        data = await self._body(request)
        body = await to_thread.run_sync(lambda: read_fields(read_json(data), kind))
        if body.model not in (None, self._served.model):
            raise model_not_found(body.model or "")
        return body

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _health(self, request: Request) -> Response:
        replicas = self._check_step()
        health: dict[str, Any] = {
            "status": "ok" if set(replicas.values()) == {"ok"} else "degraded",
            "open_sequences": self._engine.open_sequences,
            "engine_failures": self._engine.failures,
        }
        return JSONResponse(health if len(replicas) == 1 else health | {"replicas": replicas})

    def _check_step(self) -> dict[str, str]:
        """The state of each replica: ok, stuck in a step, or lost. Raises ApiError if none is ok."""
        self._check_engine()
        steps_s = self._engine.replica_steps_s.items()
        states = {name: "stuck" if step_s > self._limits.step_s else "ok" for name, step_s in steps_s}
        states |= dict.fromkeys(self._engine.lost_replicas, "lost")
        if "ok" not in states.values():
            message = f"The engine's current step takes longer than {self._limits.step_s:g} s."
            raise ApiError(503, message, code="engine_stuck")
        return dict(sorted(states.items(), key=lambda state: int(state[0])))

    async def _health_generate(self, request: Request) -> Response:
        """Generates one token. Anybody may ask, so one such request runs at a time."""
        self._check_step()
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._generate_one())
            # asyncio complains if nobody asks for its error, and all clients may have left
            self._probing.add_done_callback(lambda probing: probing.cancelled() or probing.exception())
        try:
            await asyncio.shield(self._probing)
        except TimeoutError:
            message = f"No token within {self._limits.step_s:g} s."
            raise ApiError(503, message, code="engine_stuck") from None
        return JSONResponse({"status": "ok"})

    async def _generate_one(self) -> None:
        """Generates one token, then or after a time limit is done with it: the next probe may go to another replica.

        Raises:
            TimeoutError: There was no token in time.
            ApiError: The engine failed.
        """
        body = {"model": self._served.model, "prompt": [0], "max_tokens": 1, "temperature": 0}
        asked = read_request(body | {"cache_read": False, "cache_write": False}, "completions", self._served, None)
        with Generation(asked, self._engine, self._served, time.perf_counter()) as generation:
            async with asyncio.timeout(self._limits.step_s):
                await generation.response()

    async def _show_metrics(self, request: Request) -> Response:
        if self._engine.problem is None:  # with a problem, the last snapshots are shown
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = asyncio.create_task(self._refresh())
            await asyncio.wait([self._refreshing], timeout=_SNAPSHOT_S)
        self._metrics.gauges = {
            "open_sequences": self._engine.open_sequences,
            "engine_failures": self._engine.failures,
            "step_seconds": max(self._engine.replica_steps_s.values(), default=0.0),
        }
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._metrics.registry), headers={"content-type": content_type})

    async def _refresh(self) -> None:
        try:
            self._metrics.snapshots = await self._engine.snapshots()
        except RuntimeError:
            logger.exception("no snapshot of the engine")

    async def _explain(self, request: Request) -> Response:
        self._check_admin(request)
        data = await self._body(request)
        body = await to_thread.run_sync(lambda: read_fields(read_json(data), ExplainBody))
        if body.tenant not in (list[str | None](self._limits.keys.values()) or [None]):
            raise bad("'tenant' must be the name of the request's API key, and missing without API keys.", "tenant")
        values = {"model": self._served.model} | body.request
        kind = "chat" if "messages" in values else "completions"
        asked = await to_thread.run_sync(lambda: read_request(values, kind, self._served, body.tenant))
        if len(asked.prompts) != 1:
            raise bad("'request' must have one prompt.", "request")
        self._check_engine()
        return JSONResponse({"replicas": await self._engine.explain(asked.prompts[0].tokens, asked.sampling_of(0))})

    async def _reset_cache(self, request: Request) -> Response:
        self._check_admin(request)
        self._check_engine()
        await self._engine.reset_cache()
        logger.warning("the prefix cache was reset by /admin/reset_cache")
        return JSONResponse({"status": "ok"})

    def _check_admin(self, request: Request) -> None:
        token = self._limits.admin_token
        if token is None:
            raise ApiError(404, "This server was started without an admin token.", code="not_found")
        if not hmac.compare_digest(token.encode(), _bearer(request)):
            raise _unauthorized("Incorrect admin token.")


def _bearer(request: Request) -> bytes:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    return value.strip().encode("latin-1") if scheme.lower() == "bearer" else b""  # the bytes that were sent


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail} ({request.method} {short(request.url.path)})"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return JSONResponse(ApiError(error.status_code, message, code=code).body, error.status_code, error.headers)


async def _server_error(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "The server had an error.").body, 500)
