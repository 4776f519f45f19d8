"""`Generation`: runs one request's answers, and formats them for the API."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from megatron_hybrid_prefix.serve.backend import Backend, GenerationTask, Update
from megatron_hybrid_prefix.serve.detokenizer import TextStream, TokenNote, chat_logprobs, completion_logprobs
from megatron_hybrid_prefix.serve.errors import ApiError
from megatron_hybrid_prefix.serve.protocol import GenerationRequest, Prompt, ServedModel


class Choice:
    """One answer while it is generated."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        task: GenerationTask,
        text: TextStream,
        most_tokens: int,
        end_tokens: tuple[int, ...] = (),
    ) -> None:
        self.index, self.prompt, self.task, self.text = index, prompt, task, text
        self._ends = {*end_tokens, task.sampling["termination_id"]}
        self._most_tokens = most_tokens
        self.tokens = self.cached_tokens = 0
        self.finish_reason: str | None = None

    def take(self, update: Update) -> tuple[str, list[TokenNote]]:
        """Adds an update. Returns its text and tokens. Sets ``finish_reason`` when the answer ends.

        Raises:
            ApiError: The engine failed.
        """
        if update.error is not None:
            raise ApiError(500, f"The engine failed: {update.error}", type="server_error", code="engine_failed")
        self.cached_tokens = update.cached_tokens
        text, ended = "", False
        for number, token in enumerate(update.tokens):
            log_prob = update.log_probs[number] if update.log_probs else None
            top = update.top_log_probs[number] if update.top_log_probs else None
            text += self.text.feed(token, log_prob, top)
            self.tokens += 1
            ended = token in self._ends
            if self.text.stopped or ended:
                break
        if self.text.stopped or ended or update.finished:
            text += self.text.finish()
            at_end = not self.text.stopped and self.tokens >= self._most_tokens
            self.finish_reason = "length" if at_end and not ended else "stop"
        return text, self.text.notes(last=self.finish_reason is not None)


class Generation:
    """The answers of one request. A context manager: leaving it aborts unfinished answers."""

    def __init__(self, request: GenerationRequest, engine: Backend, served: ServedModel, arrived_s: float) -> None:
        self.request, self._engine = request, engine
        self.id = f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._model = served.model
        self._updates: asyncio.Queue[tuple[Choice, Update]] = asyncio.Queue()
        self.choices: list[Choice] = []
        for prompt, most_tokens in zip(request.prompts, request.most_tokens, strict=True):
            for _ in range(request.n):
                self._add_choice(prompt, most_tokens, served, arrived_s)

    def _add_choice(self, prompt: Prompt, most_tokens: int, served: ServedModel, arrived_s: float) -> None:
        sampling = self.request.sampling | {"num_tokens_to_generate": most_tokens}
        if prompt.breakpoints:
            sampling["cache_breakpoints"] = prompt.breakpoints
        task = GenerationTask(
            prompt=prompt.tokens,
            sampling=sampling,
            arrived_s=arrived_s,
            deliver=lambda update: self._updates.put_nowait((choice, update)),
            stop=[*self.request.stop, *map(served.text_of, self.request.end_tokens)],
        )
        stream = TextStream(served.tokenizer, self.request.stop)
        choice = Choice(len(self.choices), prompt, task, stream, most_tokens, self.request.end_tokens)
        self.choices.append(choice)

    def __enter__(self) -> Generation:
        for choice in self.choices:
            self._engine.submit(choice.task)
        return self

    def __exit__(self, *_: object) -> None:
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
                continue  # it ended at a stop string
            text, notes = choice.take(update)
            if choice.finish_reason is not None:
                self._engine.abort(choice.task)
                left.remove(choice)
            if text or notes or choice not in left:
                yield choice, text, notes

    # -- format for the API --------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Tokens so far. Each prompt counts once for any ``n``, with the cached tokens of its first answer."""
        prompt = sum(len(item.tokens) for item in self.request.prompts)
        completion = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(choice.cached_tokens for choice in self.choices[:: self.request.n])
            },
        }

    async def response(self) -> dict[str, Any]:
        """The response of an unstreamed request.

        Raises:
            ApiError: The engine failed.
        """
        texts = [choice.prompt.text if self.request.echo else "" for choice in self.choices]
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
            if self.request.chat:
                entry["message"] = {"role": "assistant", "content": texts[choice.index], "refusal": None}
            else:
                entry["text"] = texts[choice.index]
            choices.append(entry)
        return self._envelope("", choices) | {"usage": self.usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed response.

        Raises:
            ApiError: The engine failed.
        """
        for choice in self.choices:
            if self.request.chat:
                yield self._chunk(choice, {"role": "assistant", "content": "", "refusal": None}, [], None)
            elif self.request.echo:
                yield self._chunk(choice, choice.prompt.text, [], None)
        async for choice, text, notes in self.pieces():
            last = choice.finish_reason
            if self.request.chat and last is not None:
                if text or notes:
                    yield self._chunk(choice, {"content": text}, notes, None)
                yield self._chunk(choice, {}, [], last)
            else:
                yield self._chunk(choice, {"content": text} if self.request.chat else text, notes, last)
        if self.request.include_usage:
            yield self._envelope(".chunk", []) | {"usage": self.usage()}

    def _chunk(
        self, choice: Choice, delta: dict[str, Any] | str, notes: list[TokenNote], finish_reason: str | None
    ) -> dict[str, Any]:
        name = "delta" if self.request.chat else "text"
        entry = {"index": choice.index, name: delta, "logprobs": None, "finish_reason": finish_reason}
        if notes:
            entry["logprobs"] = self._logprobs(notes)
        chunk = self._envelope(".chunk", [entry])
        return chunk | {"usage": None} if self.request.include_usage else chunk

    def _logprobs(self, notes: list[TokenNote]) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        return chat_logprobs(notes) if self.request.chat else completion_logprobs(notes)

    def _envelope(self, suffix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"chat.completion{suffix}" if self.request.chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self._model, "choices": choices}
