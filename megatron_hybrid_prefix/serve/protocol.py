"""Request bodies to `GenerationRequest`: the checks that depend on the served model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_hybrid_prefix.serve.bodies import MOST_SEQUENCES, Body, ChatBody, read_body
from megatron_hybrid_prefix.serve.chat_template import ChatForm
from megatron_hybrid_prefix.serve.errors import bad, model_not_found, short
from megatron_hybrid_prefix.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: its tokens, its text (for ``echo``), and its cache breakpoints."""

    tokens: list[int]
    text: str
    breakpoints: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A parsed HTTP request. ``logprobs``: likeliest tokens to return per position; None: no log-probs.

    ``end_tokens`` end an answer as the token of ``sampling["termination_id"]`` does.
    """

    chat: bool
    prompts: list[Prompt]
    n: int
    most_tokens: list[int]
    sampling: dict[str, Any]
    stop: list[str]
    end_tokens: tuple[int, ...]
    stream: bool
    include_usage: bool
    echo: bool
    logprobs: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model, as requests are checked against it.

    Attributes:
        model: Model name in the API.
        tokenizer: The model's tokenizer.
        vocab_size: Vocabulary size.
        chat: Turns messages into a prompt.
        add_bos: Whether text prompts start with the tokenizer's first token.
        check_fits: Raises ValueError if this many prompt tokens and generated tokens never fit.
        most_tokens: Most tokens that can be generated after this many prompt tokens.
        limit_tokens: Longest prompt and answer together.
        end_tokens: Tokens that end an answer, beside the tokenizer's ``eod``.
        default_sampling: ``temperature``, ``top_k`` or ``top_p`` of requests that do not say how to sample.
    """

    model: str
    tokenizer: Tokenizer
    vocab_size: int
    chat: ChatForm
    add_bos: bool
    check_fits: Callable[[int, int], None]
    most_tokens: Callable[[int], int]
    limit_tokens: int
    end_tokens: tuple[int, ...] = ()
    default_sampling: Mapping[str, Any] = field(default_factory=dict)

    def text_of(self, token: int) -> str:
        """A token as text, a special one, too."""
        return self.tokenizer.detokenize([token])


def read_request(values: dict[str, Any], kind: str, served: ServedModel, tenant: str | None) -> GenerationRequest:
    """Checks a request body and tokenizes its prompts. Slow, so call it off the event loop.

    Args:
        values: The JSON object.
        kind: "completions" or "chat".
        served: The served model.
        tenant: Tenant of the request's API key, which becomes part of the salt. None: the server has no keys.

    Raises:
        ApiError: The request is invalid.
    """
    if all(values.get(name) is None for name in ("temperature", "top_k", "top_p", "seed")):
        values = {name: value for name, value in values.items() if value is not None} | dict(served.default_sampling)
    body = read_body(values, kind)
    if body.model != served.model:
        raise model_not_found(body.model)
    if isinstance(body, ChatBody):
        chat, echo, param = True, False, "messages"
        prompts = [_chat_prompt(body, served)]
    else:
        chat, echo, param = False, body.echo, "prompt"
        prompts = [_prompt(item, body.cache_breakpoints or [], served) for item in body.prompt]
    if len(prompts) * body.n > MOST_SEQUENCES:
        raise bad(f"{len(prompts)} prompts with n={body.n}: a request may have at most {MOST_SEQUENCES} answers.", "n")
    return GenerationRequest(
        chat=chat,
        prompts=prompts,
        n=body.n,
        most_tokens=[_most_tokens(body.most_tokens, prompt, param, served) for prompt in prompts],
        sampling=_sampling(body, served, tenant),
        stop=body.stop + (served.chat.stop if chat else []),
        end_tokens=() if body.ignore_eos else served.end_tokens,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        echo=echo,
        logprobs=body.top_tokens,
    )


def _sampling(body: Body, served: ServedModel, tenant: str | None) -> dict[str, Any]:
    if body.top_k >= served.vocab_size:
        raise bad(f"'top_k' must be at most {served.vocab_size - 1}, not {short(body.top_k)}.", "top_k")
    eod = served.tokenizer.eod
    fields: dict[str, Any] = {
        "temperature": 1.0 if body.is_greedy else body.temperature,
        "top_k": 1 if body.is_greedy else body.top_k,
        "top_p": 0.0 if body.is_greedy or body.top_p == 1 else body.top_p,
        "termination_id": -1 if eod is None or body.ignore_eos else eod,
        "return_log_probs": body.top_tokens is not None,
        "skip_prompt_log_probs": True,
        "top_n_logprobs": body.top_tokens or 0,
        "cache_salt": body.cache_salt if tenant is None else json.dumps([tenant, body.cache_salt]),
        "cache_read": body.cache_read,
        "cache_write": body.cache_write,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _most_tokens(asked: int | None, prompt: Prompt, param: str, served: ServedModel) -> int:
    """Most tokens to generate after a prompt."""
    tokens = len(prompt.tokens)
    wanted = max(1, served.most_tokens(tokens)) if asked is None else asked
    if tokens + wanted > served.limit_tokens:
        raise bad(
            f"This model's maximum context length is {served.limit_tokens} tokens. However, you requested "
            f"{tokens + wanted} tokens ({tokens} in the {param}, {wanted} in the completion).",
            param,
            "context_length_exceeded",
        )
    try:
        served.check_fits(tokens, wanted)
    except ValueError as error:
        raise bad(str(error), param, "context_length_exceeded") from None
    return wanted


def _prompt(item: str | list[int], breakpoints: list[int], served: ServedModel) -> Prompt:
    if isinstance(item, str):
        text, tokens = item, _tokens(item, served)
    elif all(0 <= token < served.vocab_size for token in item):
        text, tokens = served.tokenizer.detokenize(item, skip_special_tokens=True), item
    else:
        raise bad(f"'prompt' has token ids outside the vocabulary of {served.vocab_size} tokens.", "prompt")
    if not tokens:
        raise bad("'prompt' must not be empty.", "prompt")
    for position in breakpoints:
        if not 0 < position <= len(tokens):
            raise bad(
                f"'cache_breakpoints': {short(position)} is not between 1 and the prompt's {len(tokens)} tokens.",
                "cache_breakpoints",
            )
    return Prompt(tokens=tokens, text=text, breakpoints=breakpoints)


def _chat_prompt(body: ChatBody, served: ServedModel) -> Prompt:
    messages = [message.as_dict() for message in body.messages]
    try:
        text = served.chat.render(messages)
    except ValueError as error:
        raise bad(str(error), "messages") from None

    def tokenize(part: str) -> list[int]:
        return _tokens(part, served)

    tokens = tokenize(text)
    if not tokens:
        raise bad("'messages' must not be empty.", "messages")
    # A prompt that is too long is refused later, so skip the search for message ends.
    is_too_long = len(tokens) > served.limit_tokens
    ends = [] if is_too_long else served.chat.ends(messages, tokens, tokenize, body.cache_breakpoints)
    return Prompt(tokens=tokens, text=text, breakpoints=ends)


def _tokens(text: str, served: ServedModel) -> list[int]:
    bos = served.tokenizer.bos if served.add_bos else None
    return [*(() if bos is None else (bos,)), *served.tokenizer.tokenize(text)]
