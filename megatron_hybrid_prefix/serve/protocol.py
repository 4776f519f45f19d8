"""Request bodies to `GenerationRequest`: the checks that depend on the served model."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_hybrid_prefix.errors import FieldError
from megatron_hybrid_prefix.sampling import SamplingOptions, check_tokens
from megatron_hybrid_prefix.serve.bodies import (
    MOST_SEQUENCES,
    Body,
    ChatBody,
    CompletionBody,
    GenerateBody,
    read_fields,
)
from megatron_hybrid_prefix.serve.chat_template import ChatForm
from megatron_hybrid_prefix.serve.errors import ApiError, bad, model_not_found, short
from megatron_hybrid_prefix.text.grammar import AnswerGrammar, check_compiles
from megatron_hybrid_prefix.text.tokenizer import Tokenizer, TokensBefore, begun, other_ends

# Per token of a text that is tokenized at once. Ordinary text has 3 to 5, but a token may have any number, so a longer text
# is refused only if these characters are too many tokens.
_MOST_CHARACTERS = 8
# A request that sets one of these says how to sample, so that the model's defaults for them do not count.
_HOW = ("temperature", "top_k", "top_p", "min_p")
KINDS: dict[str, type[CompletionBody | ChatBody | GenerateBody]] = {
    "completions": CompletionBody,
    "chat": ChatBody,
    "generate": GenerateBody,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: its tokens, its text (if ``echo`` needs it; of a chat, what has begun of the answer), its cache breakpoints, and for how long some are kept."""

    tokens: list[int]
    text: str
    breakpoints: list[int]
    ttls: list[tuple[int, int]] = field(default_factory=list)  # positions in tokens, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A parsed HTTP request.

    Attributes:
        body: Its body.
        prompts: Its prompts; a chat has one.
        most_tokens: Most tokens to generate after each of them.
        sampling: Fields of megatron's ``SamplingParams``, but those of `sampling_of`.
        stop: Stop strings.
        stop_tokens: Tokens that end an answer without being part of its text, beside ``sampling["termination_id"]``.
        tenant: Name of the API key.
        has_routes: Whether its choices have the routes of experts.
    """

    body: CompletionBody | ChatBody | GenerateBody
    prompts: list[Prompt]
    most_tokens: list[int]
    sampling: dict[str, Any]
    stop: list[str]
    stop_tokens: frozenset[int]
    tenant: str | None
    has_routes: bool

    def sampling_of(self, number: int) -> dict[str, Any]:
        """The sampling fields for one of the prompts."""
        prompt = self.prompts[number]
        found = {"cache_breakpoints": prompt.breakpoints, "cache_ttls": prompt.ttls}
        return (
            self.sampling
            | {"num_tokens_to_generate": self.most_tokens[number], "cache_now": time.time()}
            | {name: value for name, value in found.items() if value}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model, as requests are checked against it.

    Attributes:
        model: Model name in the API.
        tokenizer: The model's tokenizer.
        vocab_size: Vocabulary size.
        chat: Turns messages into a prompt.
        add_bos: Whether prompts that are not token ids begin with ``bos`` even if neither tokenizer nor template begins them so.
        check_fits: Raises ValueError if this many prompt tokens and generated tokens never fit.
        limit_tokens: Longest prompt and answer together.
        gives_prompt_log_probs: Whether the engine computes log-probs of prompts.
        gives_routes: Whether the engine records the routes of experts.
        default_sampling: ``temperature``, ``top_k``, ``top_p`` and ``min_p`` of requests that set none of these; other fields, such
            as ``repetition_penalty``, of requests that do not set them.
        caches: False: no request reads or writes the cache, whatever it asks for.
        has_drafts: Whether the engine decodes with drafts, and so without penalties.
    """

    model: str
    tokenizer: Tokenizer
    vocab_size: int
    chat: ChatForm
    check_fits: Callable[[int, int], None]
    limit_tokens: int
    add_bos: bool = False
    gives_prompt_log_probs: bool = False
    gives_routes: bool = False
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    caches: bool = True
    has_drafts: bool = False

    def tokenizer_info(self) -> dict[str, str | None]:
        """Special tokens as text, and the chat template; None: there is none, or it has no text."""
        names = {"bos_token": self.tokenizer.bos, "eos_token": self.tokenizer.eod}
        text_of = self.tokenizer.detokenize  # of special tokens, too
        texts = {name: None if token is None else text_of([token]) or None for name, token in names.items()}
        return texts | {"pad_token": texts["eos_token"], "chat_template": self.chat.template}


def read_request(
    values: dict[str, Any],
    kind: str,
    served: ServedModel,
    tenant: str | None,
    check: Callable[[], None] = lambda: None,
    take_places: Callable[[int], None] = lambda sequences: None,
) -> GenerationRequest:
    """Checks a request body and tokenizes its prompts. Slow, so call it off the event loop.

    Args:
        values: The JSON object.
        kind: One of `KINDS`.
        served: The served model.
        tenant: Tenant of the request's API key, which becomes part of the salt. None: the server has no keys.
        check: Called between parts of the work. What it raises ends the work.
        take_places: Called with the number of answers before anything is tokenized. What it raises ends the work.

    Raises:
        ApiError: The request is invalid.
    """
    if kind == "generate" and isinstance(inner := values.get("sampling_params"), dict):
        values, inner = ({name: value for name, value in each.items() if value is not None} for each in (values, inner))
        for name in values.keys() & inner.keys():
            if values[name] != inner[name]:
                raise bad(f"'{short(name)}' has another value in 'sampling_params'.", short(name))
        values = inner | values
    says_how = any(values.get(name) is not None for name in _HOW)
    values = values | {
        name: value
        for name, value in served.default_sampling.items()
        if values.get(name) is None and not (says_how and name in _HOW)
    }
    body = read_fields(values, KINDS[kind])
    check()
    if body.model != served.model:
        raise model_not_found(body.model)
    if isinstance(body, CompletionBody):
        param = "prompt"
        read: list[Callable[[], Prompt]] = [partial(_prompt, param, item, body, served) for item in body.prompts]
    elif isinstance(body, ChatBody):
        param = "messages"
        read = [partial(_chat_prompt, body, served, check)]
    else:
        param = "token_ids"
        read = [partial(_prompt, param, body.token_ids, body, served)]
    if isinstance(body, ChatBody) and body.called_tools and not served.chat.calls_tools:
        problem = "need a chat template with calls that this server knows, or 'tool_choice': \"none\""
        raise bad(f"'tools' {problem}.", "tools")
    if len(read) * body.n > MOST_SEQUENCES:
        raise bad(f"{len(read)} prompts with n={body.n}: a request may have at most {MOST_SEQUENCES} answers.", "n")
    if (body.echoes_log_probs or body.prompt_logprobs is not None) and not served.gives_prompt_log_probs:
        name, param = ("'echo' with 'logprobs'", "logprobs") if body.echoes_log_probs else ("'prompt_logprobs'",) * 2
        raise bad(
            f"{name} needs log-probs of the prompt, for which this server was not started (--prompt-log-probs).",
            param.strip("'"),
        )
    if body.return_routed_experts and not served.gives_routes:  # any server gets `routed_experts_prompt_start`
        name, option = "return_routed_experts", "--enable-return-routed-experts"
        raise bad(f"'{name}': this server does not record the routes of experts ({option}).", name)
    stop_tokens = frozenset([*body.stop_token_ids, *(() if body.ignore_eos else other_ends(served.tokenizer))])
    take_places(len(read) * body.n)
    prompts = []
    for make in read:
        check()
        prompts.append(prompt := make())
        if body.routed_experts_prompt_start > len(prompt.tokens):
            name = "routed_experts_prompt_start"
            raise bad(f"'{name}' is above the prompt's {len(prompt.tokens)} tokens.", name)
    least = int(body.top_tokens is None and body.prompt_logprobs is None)  # else the engine has work without any token
    most_tokens = [_most_tokens(body.most_tokens, prompt, param, served, least) for prompt in prompts]
    sampling = _sampling(body, served, tenant, stop_tokens, prompts[0])  # may compile a grammar
    return GenerationRequest(
        body=body,
        prompts=prompts,
        most_tokens=most_tokens,
        sampling=sampling,
        stop=body.stops + (served.chat.stop if isinstance(body, ChatBody) else []),
        stop_tokens=stop_tokens,
        tenant=tenant,
        has_routes=served.gives_routes and body.return_routed_experts is not False,
    )


def _wanted(body: Body, served: ServedModel, prompt: Prompt) -> Any:
    """What the answer must match, with thoughts and calls of tools."""
    if not isinstance(body, ChatBody) or served.chat.answers is None:
        return body.grammar
    tools, special = body.called_tools if body.forced else [], served.tokenizer.special.values()
    return served.chat.answers.grammar(prompt.text, body.grammar, tools, special, **body.forced)


def _sampling(
    body: Body, served: ServedModel, tenant: str | None, stop_tokens: frozenset[int], prompt: Prompt
) -> dict[str, Any]:
    end = -1 if served.tokenizer.eod is None or body.ignore_eos else served.tokenizer.eod
    asked = {field.name: getattr(body, field.name) for field in dataclasses.fields(SamplingOptions)} | {
        "temperature": 0.0 if body.is_greedy else body.temperature,
        "logit_bias": tuple((int(token), bias) for token, bias in body.logit_bias.items()),
        "structured_outputs": body.grammar,
        "top_k": max(0, body.top_k),
        "top_p": body.top_p or 1.0,
        "min_tokens": body.min_tokens if stop_tokens or end >= 0 else 0,  # else nothing ends an answer early
    }
    try:
        options = SamplingOptions(**asked)
        options = dataclasses.replace(options, structured_outputs=_wanted(body, served, prompt))
        if served.has_drafts:
            options.check_drafts("--num-speculative-tokens, with which this server was started")
        options.check_vocabulary(served.vocab_size)
        check_tokens("stop_token_ids", body.stop_token_ids, served.vocab_size)
        if options.structured_outputs is not None:
            check_compiles(options.structured_outputs, served.tokenizer)
            AnswerGrammar(options.structured_outputs, served.tokenizer, served.vocab_size, {end, *stop_tokens})
    except FieldError as error:
        if error.__cause__ is not None:  # no fault of the request
            retry = {"retry-after": "1"}
            raise ApiError(503, f"{error}.", param=error.field, code="server_busy", headers=retry) from None
        raise bad(f"{error}.", error.field) from None
    fields: dict[str, Any] = options.as_fields() | {
        "termination_id": end,
        "stop_token_ids": sorted(stop_tokens) or None,
        "return_log_probs": body.top_tokens is not None or body.prompt_logprobs is not None,
        "skip_prompt_log_probs": not body.echoes and body.prompt_logprobs is None,
        "top_n_logprobs": max(body.top_tokens or 0, body.prompt_logprobs or 0),
        "top_n_by_id": True,
        "cache_salt": body.cache_salt if tenant is None else json.dumps([tenant, body.cache_salt]),
        "cache_read": body.cache_read if served.caches else False,
        "cache_write": body.cache_write if served.caches else False,
        "cache_session": body.cache_session and body.cache_session.model_dump(),
        "cache_uses": body.cache_uses,
        "cache_pin": body.cache_pin and body.cache_pin.model_dump(exclude_none=True),
        "cache_tenant": tenant and json.dumps([tenant]),
    }
    if body.prompt_cache_key:
        fields["routing_key"] = json.dumps([tenant, body.prompt_cache_key])
    return {name: value for name, value in fields.items() if value is not None}


def _most_tokens(asked: int | None, prompt: Prompt, param: str, served: ServedModel, least: int) -> int:
    """Most tokens to generate after a prompt. There must be room for ``least``."""
    tokens = len(prompt.tokens)
    wanted = max(1, served.limit_tokens - tokens) if asked is None else asked
    if tokens + wanted > served.limit_tokens:
        raise bad(
            f"This model's maximum context length is {served.limit_tokens} tokens. However, you requested "
            f"{tokens + wanted} tokens ({tokens} in the {param}, {wanted} in the completion).",
            param,
            "context_length_exceeded",
        )
    try:
        served.check_fits(tokens, max(wanted, least))
    except ValueError as error:
        raise bad(str(error), param, "context_length_exceeded") from None
    return wanted


def _prompt(param: str, item: str | list[int], body: Body, served: ServedModel) -> Prompt:
    if isinstance(item, str):
        text, tokens = item, text_tokens(item, served, add_special_tokens=body.add_special_tokens)
    elif all(0 <= token < served.vocab_size for token in item):
        is_shown = body.echoes and len(item) <= served.limit_tokens  # longer prompts are refused later
        text, tokens = served.tokenizer.detokenize(item, skip_special_tokens=True) if is_shown else "", item
    else:
        raise bad(f"'{param}' has token ids outside the vocabulary of {served.vocab_size} tokens.", param)
    if not tokens:
        raise bad(f"'{param}' must not be empty.", param)
    breakpoints = body.cache_breakpoints or []
    for position in breakpoints:
        if not 0 < position <= len(tokens):
            name, place = "cache_breakpoints", f"between 1 and the prompt's {len(tokens)} tokens"
            raise bad(f"'{name}': {short(position)} is not {place}.", name)
    return Prompt(tokens=tokens, text=text, breakpoints=breakpoints)


def chat_tokens(
    messages: Sequence[dict[str, Any]],
    served: ServedModel,
    *,
    begin_answer: bool = True,
    add_special_tokens: bool | None = None,
    variables: dict[str, Any] | None = None,
    locates: bool = False,
) -> tuple[str, list[int], TokensBefore]:
    """Text and tokens of a chat's prompt, from messages as of `Message.as_dict`.

    By default a template has all special tokens itself, and the plain format has none. ``locates``: as of `_tokens`.

    Raises:
        ApiError: The template refuses the messages, or the prompt is far too long.
    """
    try:
        text = served.chat.render(messages, begin_answer=begin_answer, variables=variables)
        text.encode()  # arguments of a call are JSON in JSON, which may have half of a surrogate pair
    except ValueError as error:
        raise bad(str(error), "messages") from None
    has_own = add_special_tokens is None and served.chat.template is not None
    return text, *_tokens(text, served, "messages", add_special_tokens, has_own=has_own, locates=locates)


def _chat_prompt(body: ChatBody, served: ServedModel, check: Callable[[], None]) -> Prompt:
    messages = [message.as_dict() for message in body.messages]
    marks = [(number, message, *mark) for number, message in enumerate(body.messages) for mark in message.marks]
    marked = [(number, message.as_dict(characters)) for number, message, characters, _ in marks]
    has_ends = bool(marked) or body.cache_breakpoints != []
    text, tokens, before = chat_tokens(
        messages,
        served,
        begin_answer=body.begins_answer,
        add_special_tokens=body.add_special_tokens,
        variables=body.variables,
        locates=has_ends,
    )
    if not tokens:
        raise bad("'messages' must not be empty.", "messages")
    begun = "" if served.chat.answers is None else served.chat.answers.begun(text)
    # A prompt that is too long is refused later, so skip the search for message ends.
    if not has_ends or len(tokens) > served.limit_tokens:
        return Prompt(tokens=tokens, text=begun, breakpoints=[])
    ends = served.chat.ends(
        text,
        messages,
        body.cache_breakpoints,
        more=marked,
        begin_answer=body.begins_answer,
        variables=body.variables,
        check=check,
    )
    positions = [None if end is None else before(end) for end in ends]
    ttls = [
        (end, seconds)
        for end, (*_, seconds) in zip(positions[len(positions) - len(marks) :], marks, strict=True)
        if seconds and end is not None and 0 < end < len(tokens)
    ]
    found = sorted({end for end in positions if end is not None and 0 < end < len(tokens)})
    return Prompt(tokens=tokens, text=begun, breakpoints=found, ttls=ttls)


def text_tokens(text: str, served: ServedModel, *, add_special_tokens: bool | None = None) -> list[int]:
    """Tokens of a text prompt. ``add_special_tokens``: false leaves out those that the tokenizer or ``add_bos`` adds.

    Raises:
        ApiError: The text is far too long.
    """
    return _tokens(text, served, "prompt", add_special_tokens)[0]


def _tokens(
    text: str, served: ServedModel, param: str, is_special: bool | None, *, has_own: bool = False, locates: bool = False
) -> tuple[list[int], TokensBefore]:
    """Tokens of a text, which may have the tokenizer's special ones itself; with ``locates`` also where they are in it."""
    tokenizer, limit = served.tokenizer, served.limit_tokens
    head = text[: _MOST_CHARACTERS * limit]
    if len(head) < len(text) and len(tokenizer.tokenize(head)) > 2 * limit:
        message = (
            f"This model's maximum context length is {limit} tokens. However, the first {len(head)} of {len(text)} "
        )
        raise bad(f"{message}characters of the {param} are more than {2 * limit}.", param, "context_length_exceeded")
    adds = is_special is not False and not has_own
    if locates:
        tokens, before = tokenizer.locate(text, special=adds)
    else:
        tokens, before = (tokenizer.encode_prompt if adds else tokenizer.tokenize)(text), int
    whole = begun(tokenizer, tokens, add_bos=served.add_bos and is_special is not False)
    return whole, lambda character: before(character) + len(whole) - len(tokens)
