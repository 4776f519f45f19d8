"""`Generation`: runs one request's answers, and formats them for the API."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import islice
from typing import Any

from megatron_hybrid_prefix.metrics import NotReused
from megatron_hybrid_prefix.serve.backend import Backend, GenerationTask, Update
from megatron_hybrid_prefix.serve.bodies import ChatBody, CompletionBody, GenerateBody
from megatron_hybrid_prefix.serve.detokenizer import (
    TextStream,
    TokenNote,
    chat_logprobs,
    completion_logprobs,
    prompt_notes,
    vllm_prompt_logprobs,
)
from megatron_hybrid_prefix.serve.errors import ApiError, bad
from megatron_hybrid_prefix.serve.protocol import GenerationRequest, Prompt, ServedModel
from megatron_hybrid_prefix.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Choice:
    """One answer while it is generated."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        task: GenerationTask,
        most_tokens: int,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        parts: Any = None,
    ) -> None:
        self.index, self.prompt, self.task = index, prompt, task
        self.parts = parts  # `AnswerParts`; None: the answer is text
        self._is_ids = isinstance(request.body, GenerateBody)
        all_notes = self._is_ids or request.body.return_token_ids
        kept = "" if parts is None else parts.marks
        options: dict[str, Any] = {"all_notes": all_notes, "before": prompt.tokens, "kept": kept}
        self.text = TextStream(tokenizer, task.stop, min_tokens=request.body.min_tokens, **options)
        self._most_tokens, self._stop_tokens, self._tokenizer = most_tokens, request.stop_tokens, tokenizer
        self._ends = request.stop_tokens | {task.sampling["termination_id"]}
        self._request = request
        self.prompt_logprobs: list[dict[str, dict[str, Any]] | None] = [None]
        self.prompt_notes: list[TokenNote] = []
        if request.body.echoes_log_probs and len(prompt.tokens) == 1:  # the engine has no log-probs for it
            self.prompt_notes = prompt_notes(tokenizer, prompt.tokens, [], [])
        self.last_s: float | None = None  # when its last token arrived
        self.tokens = self.cached_tokens = 0
        self.reuse: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.routes: str | None = None  # as `routed_experts` has them

    def take(self, update: Update) -> tuple[str, list[TokenNote]]:
        """Adds an update. Returns its text and tokens. Sets ``finish_reason`` when the answer ends.

        Raises:
            ApiError: It failed.
        """
        if update.error is not None:
            for field in ("structured_outputs", "cache_pin"):
                _, found, why = update.error.partition(field)
                if found:  # of the request: its grammar does not go on, or its pin has no room
                    raise bad(f"{field}{why}.", field)
            logger.error("an answer failed: %s", update.error)
            message = "The engine failed on this request. The server's log says why."
            raise ApiError(500, message, code="engine_failed")
        if update.reply is not None:
            raise update.reply
        self.cached_tokens, self.reuse = update.cached_tokens, self.reuse or update.reuse
        if self.reuse is not None and self.reuse["reason"] == NotReused.OTHER_SALT:  # a client must not learn of others
            self.reuse = self.reuse | {"reason": NotReused.NO_SUCH_PREFIX}
        if update.prompt_log_probs:
            self._take_prompt(update)
        text, ended = "", False
        for number, token in enumerate(update.tokens[: self._most_tokens - self.tokens]):
            shown = self._request.body.top_tokens
            log_prob = update.log_probs[number] if update.log_probs and shown is not None else None
            top = _by_id(update.top_log_probs[number], shown) if update.top_log_probs and shown else None
            ended = token in self._ends
            text += self.text.feed(token, log_prob, top, silent=token in self._stop_tokens)
            self.tokens += 1
            if self.text.stopped or ended:
                break
        if self.text.stopped or ended or update.finished:
            text += self.text.finish()
            at_end = not self.text.stopped and self.tokens >= self._most_tokens
            self.finish_reason = "length" if at_end and not ended else "stop"
        if update.routes is not None and self._request.has_routes:
            # A request for no tokens has computed one.
            routes = update.routes[: len(self.prompt.tokens) + self.tokens - 1]
            self.routes = _npy(routes[self._request.body.routed_experts_prompt_start :])
        return text, self.text.notes(last=self.finish_reason is not None or self._is_ids)

    def deltas(self, text: str) -> list[dict[str, Any]]:
        """What the text adds to the message of a chat. Sets ``finish_reason`` if the answer ends with calls of tools."""
        if self.parts is None:
            return [{"content": text}] if text else []
        deltas: list[dict[str, Any]] = self.parts.feed(text, last=self.finish_reason is not None)
        if self.finish_reason == "stop" and self.parts.calls:
            self.finish_reason = "tool_calls"
        return deltas

    def message(self, text: str) -> dict[str, Any]:
        """The message of a chat whose answer is this text."""
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        for delta in self.deltas(text):
            for name, part in delta.items():
                message[name] = message.get(name, type(part)()) + part
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{name: call[name] for name in call if name != "index"} for call in calls]
            message["content"] = message["content"] or None
        return message

    def _take_prompt(self, update: Update) -> None:
        body, tokens, log_probs = self._request.body, self.prompt.tokens, update.prompt_log_probs

        def tops(count: int | None) -> list[dict[int, float]]:
            return [_by_id(top, count) for top in update.prompt_top_log_probs] if count else []

        if body.echoes_log_probs:
            self.prompt_notes = prompt_notes(self._tokenizer, tokens, log_probs, tops(body.top_tokens))
        if body.prompt_logprobs is not None:
            self.prompt_logprobs = vllm_prompt_logprobs(
                lambda token: self._tokenizer.token_bytes(token, token).decode(errors="replace"),
                tokens,
                log_probs,
                tops(body.prompt_logprobs),
            )


class Generation:
    """The answers of one request. A context manager: leaving it aborts unfinished answers.

    Args:
        request: The request.
        engine: Generates.
        served: The served model.
        arrived_s: When the request arrived.
        on_gap: Called with the seconds between two tokens of an answer, and the number of such tokens.
    """

    def __init__(
        self,
        request: GenerationRequest,
        engine: Backend,
        served: ServedModel,
        arrived_s: float,
        on_gap: Callable[[float, int], None] | None = None,
    ) -> None:
        self._on_gap = on_gap
        self.request, self._engine = request, engine
        kinds = (CompletionBody, ChatBody, GenerateBody)
        self._is_completion, self._is_chat, self._is_ids = (isinstance(request.body, kind) for kind in kinds)
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._model = served.model
        self._updates: asyncio.Queue[tuple[Choice, Update]] = asyncio.Queue()
        self.choices: list[Choice] = []
        for at, prompt in enumerate(request.prompts):
            for number in range(request.body.n):
                self._add_choice(prompt, request.sampling_of(at), number, served, arrived_s)

    def _add_choice(
        self, prompt: Prompt, sampling: dict[str, Any], number: int, served: ServedModel, arrived_s: float
    ) -> None:
        most_tokens = sampling["num_tokens_to_generate"]
        if not sampling["return_log_probs"]:
            sampling["num_tokens_to_generate"] = max(1, most_tokens)  # the engine has nothing else to do for 0
        options = sampling.get("sampling_options")
        if options is not None and options["seed"] is not None:
            sampling["sampling_options"] = options | {"seed": options["seed"] + number}
        task = GenerationTask(
            prompt=prompt.tokens,
            sampling=sampling,
            arrived_s=arrived_s,
            deliver=lambda update: self._updates.put_nowait((choice, update)),
            stop=self.request.stop,
        )
        body, answers, parts = self.request.body, served.chat.answers, None
        if isinstance(body, ChatBody) and answers is not None:
            parts = answers.parts(prompt.text, body.called_tools)
        choice = Choice(len(self.choices), prompt, task, most_tokens, self.request, served.tokenizer, parts)
        self.choices.append(choice)

    def __enter__(self) -> Generation:
        for choice in self.choices:
            self._engine.submit(choice.task)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts unfinished answers."""
        for choice in self.choices:
            self._engine.abort(choice.task)

    async def pieces(self) -> AsyncIterator[tuple[Choice, str, list[TokenNote]]]:
        """Text and tokens as they arrive, until every answer has a ``finish_reason``.

        Raises:
            ApiError: The engine failed.
        """
        left = set(self.choices)
        while left:
            choice, update = await self._updates.get()
            if choice not in left:
                continue  # it ended at a stop string or token
            # Log-probs of a prompt, and routes, take a while: the loop serves others meanwhile.
            in_thread = bool(update.prompt_log_probs) or update.routes is not None
            text, notes = await asyncio.to_thread(choice.take, update) if in_thread else choice.take(update)
            if update.tokens:
                now_s = time.perf_counter()
                if choice.last_s is not None and self._on_gap is not None:
                    self._on_gap((now_s - choice.last_s) / len(update.tokens), len(update.tokens))
                choice.last_s = now_s
            if choice.finish_reason is not None:
                self._engine.abort(choice.task)
                left.remove(choice)
            if text or notes or choice not in left:
                yield choice, text, notes

    # -- format for the API --------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Tokens so far. Each prompt counts once for any ``n``, with the cached tokens and the `Reuse` of its first answer."""
        prompt = sum(len(item.tokens) for item in self.request.prompts)
        completion = sum(choice.tokens for choice in self.choices)
        first = self.choices[:: self.request.body.n]
        asked = {"cache_reuse": [choice.reuse for choice in first]} if self.request.body.return_cache_reuse else {}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in first)} | asked,
        }

    async def response(self) -> dict[str, Any]:
        """The response of an unstreamed request. Raises ApiError if the engine failed."""
        texts = [self._shown_prompt(choice) for choice in self.choices]
        notes: list[list[TokenNote]] = [[] for _ in self.choices]
        async for choice, text, some in self.pieces():
            texts[choice.index] += text
            notes[choice.index] += some
        choices = []
        for choice in self.choices:
            text = texts[choice.index]
            said = choice.message(text) if self._is_chat else text
            entry = self._entry(choice, said, notes[choice.index], choice.finish_reason, is_first=True)
            if self._is_completion and self.request.body.prompt_logprobs is not None:
                entry["prompt_logprobs"] = choice.prompt_logprobs
            choices.append(entry)
        answer = self._envelope("", choices) | {"usage": self.usage()}
        if not self._is_completion and self.request.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self.choices[0].prompt_logprobs
        return answer | self._prompt_ids(self.choices[0], of_choice=False)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed response. The first one comes with the first token.

        Raises:
            ApiError: The engine failed.
        """
        begun: set[Choice] = set()
        async for choice, text, notes in self.pieces():
            is_first = choice not in begun
            begun.add(choice)
            deltas = choice.deltas(text) if self._is_chat else []
            last = choice.finish_reason
            if self._is_chat:
                if is_first:
                    yield self._chunk(choice, {"role": "assistant", "content": "", "refusal": None}, [], is_first=True)
                for number, delta in enumerate(deltas or [{"content": ""}] * bool(notes)):
                    yield self._chunk(choice, delta, [] if number else notes)
                if last is not None:
                    yield self._chunk(choice, {}, [], last)
            else:
                shown = self._shown_prompt(choice) if is_first else ""
                yield self._chunk(choice, shown + text, notes, last, is_first=is_first)
        if self.request.body.stream_options.include_usage:
            yield self._envelope(".chunk", []) | {"usage": self.usage()}

    def _shown_prompt(self, choice: Choice) -> str:
        return choice.prompt.text if self.request.body.echoes else ""

    def _entry(
        self, choice: Choice, said: Any, notes: list[TokenNote], finish_reason: str | None, *, is_first: bool
    ) -> dict[str, Any]:
        """An entry of ``choices``, with what the answer or the chunk says."""
        name = ("delta" if self.request.body.stream else "message") if self._is_chat else "text"
        entry: dict[str, Any] = {"index": choice.index} | ({} if self._is_ids else {name: said})
        entry |= {"logprobs": self._logprobs(choice, notes, is_first=is_first), "finish_reason": finish_reason}
        if finish_reason is not None and self.request.has_routes:
            entry["routed_experts"] = choice.routes
        return entry | self._ids(notes) | (self._prompt_ids(choice, of_choice=True) if is_first else {})

    def _chunk(
        self,
        choice: Choice,
        said: Any,
        notes: list[TokenNote],
        finish_reason: str | None = None,
        *,
        is_first: bool = False,
    ) -> dict[str, Any]:
        entry = self._entry(choice, said, notes, finish_reason, is_first=is_first)
        chunk = self._envelope(".chunk", [entry]) | (self._prompt_ids(choice, of_choice=False) if is_first else {})
        if self.request.body.stream_options.continuous_usage_stats:
            return chunk | {"usage": self.usage()}
        return chunk | {"usage": None} if self.request.body.stream_options.include_usage else chunk

    def _ids(self, notes: list[TokenNote]) -> dict[str, list[int]]:
        is_asked = self._is_ids or self.request.body.return_token_ids
        return {"token_ids": [note.token for note in notes]} if is_asked else {}

    def _prompt_ids(self, choice: Choice, *, of_choice: bool) -> dict[str, list[int]]:
        """As vLLM has them: of completions, which may have several prompts, they are in the choice."""
        is_here = self.request.body.return_token_ids and of_choice == self._is_completion
        return {"prompt_token_ids": choice.prompt.tokens} if is_here else {}

    def _logprobs(self, choice: Choice, notes: list[TokenNote], *, is_first: bool) -> dict[str, Any] | None:
        before = choice.prompt_notes if is_first else []
        if self.request.body.top_tokens is None or (self.request.body.stream and not notes and not before):
            return None
        if self._is_ids or self.request.body.return_tokens_as_token_ids:
            before, notes = [note.named_by_id() for note in before], [note.named_by_id() for note in notes]
        if not self._is_completion:
            return chat_logprobs(notes)
        moved = [replace(note, offset=note.offset + len(self._shown_prompt(choice))) for note in notes]
        return completion_logprobs([*before, *moved])

    def _envelope(self, suffix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        kind = {"request_id": self.id} if self._is_ids else {"object": name}
        return {"id": self.id, **kind, "created": self.created, "model": self._model, "choices": choices}


def _npy(array: Any) -> str:
    """A numpy file of int32 in base64, as vLLM returns arrays."""
    import numpy as np

    file = io.BytesIO()
    np.save(file, array.astype(np.int32))
    return base64.b64encode(file.getvalue()).decode()


def _by_id(top: dict[str, float], count: int | None) -> dict[int, float]:
    """The first ``count`` tokens by id. The engine names tokens ``token_id:5``, the likeliest first."""
    return {int(name.removeprefix("token_id:")): value for name, value in islice(top.items(), count)}
