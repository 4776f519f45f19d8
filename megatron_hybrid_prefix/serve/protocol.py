"""Request bodies of the OpenAI API to `GenerationRequest`s, and errors as its users expect them.

As OpenAI does, unknown fields are refused (400), and so are known ones that ask for something that is not offered here.
Fields of this server: ``cache_salt``, ``cache_breakpoints``, ``cache_read``, ``cache_write``, ``top_k``, ``ignore_eos``.

Longer than 400 lines because every field of two kinds of requests is checked here, each with an error of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_hybrid_prefix.serve.chat_template import ChatForm
from megatron_hybrid_prefix.tokenizer import Tokenizer

MOST_SEQUENCES = 128  # of one request: prompts times n
MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20
# Below this, dividing logits by the temperature is choosing the likeliest token.
_GREEDY_TEMPERATURE = 1e-4


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: its tokens, its text (where ``echo`` wants it), and up to where others share it."""

    tokens: list[int]
    text: str
    breakpoints: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What one HTTP request asks for. ``logprobs``: tokens to name at each position; None: none, not even the chosen."""

    chat: bool
    prompts: list[Prompt]
    n: int
    most_tokens: list[int]
    sampling: dict[str, Any]
    stop: list[str]
    stream: bool
    include_usage: bool
    echo: bool
    logprobs: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What requests are read against.

    Attributes:
        model: Name.
        tokenizer: Of the model.
        vocab_size: Ids are below it.
        chat: Form of conversations.
        add_bos: Whether text begins with the tokenizer's first token.
        check_fits: Raises ValueError if so many prompt tokens and tokens to generate never fit.
        most_tokens: Tokens that can be generated after so many prompt tokens.
        limit_tokens: Longest prompt and answer together.
    """

    model: str
    tokenizer: Tokenizer
    vocab_size: int
    chat: ChatForm
    add_bos: bool
    check_fits: Callable[[int, int], None]
    most_tokens: Callable[[int], int]
    limit_tokens: int


def _nothing(value: Any) -> bool:
    return not value and not isinstance(value, bool)


# Known fields that change nothing here, and what else they may be given as: anything, or only what asks for nothing.
_ANYTHING = dict.fromkeys(
    ("user", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    lambda value: True,
)
_NOTHING: dict[str, Callable[[Any], bool]] = {
    "frequency_penalty": lambda value: value == 0,
    "presence_penalty": lambda value: value == 0,
    "logit_bias": _nothing,
    "store": lambda value: value is False,
}
_NEUTRAL = {
    "completions": _ANYTHING | _NOTHING | {"suffix": _nothing},
    "chat": _ANYTHING
    | _NOTHING
    | {
        "tools": _nothing,
        "functions": _nothing,
        "tool_choice": lambda value: value in ("none", "auto"),
        "function_call": lambda value: value in ("none", "auto"),
        "parallel_tool_calls": lambda value: isinstance(value, bool),
        "response_format": lambda value: value == {"type": "text"},
        "modalities": lambda value: value == ["text"],
    },
}
_SHARED = ("model", "n", "stream", "stream_options", "stop", "temperature", "top_p", "seed", "max_tokens", "logprobs")
_OWN = ("cache_salt", "cache_breakpoints", "cache_read", "cache_write", "top_k", "ignore_eos")
_FIELDS = {
    "completions": {*_SHARED, *_OWN, "prompt", "best_of", "echo"},
    "chat": {*_SHARED, *_OWN, "messages", "max_completion_tokens", "top_logprobs"},
}


def bad(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A request that cannot be met as it is."""
    return ApiError(400, message, param=param, code=code)


def read_json(data: bytes) -> dict[str, Any]:
    """The body.

    Raises:
        ApiError: It is no JSON object.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        body = json.loads(data.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise bad(f"We could not parse the JSON body of your request: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad("The body of your request must be a JSON object.", code="invalid_json")
    return body


@dataclass(slots=True)
class Body:
    """A body's fields, checked as they are taken; null is as good as absent."""

    values: dict[str, Any]
    kind: str
    neutral: dict[str, Callable[[Any], bool]] = field(init=False)

    def __post_init__(self) -> None:
        self.neutral = _NEUTRAL[self.kind]
        for name, value in self.values.items():
            if name not in _FIELDS[self.kind] and name not in self.neutral:
                raise bad(f"Unknown parameter: '{_short(name)}'.", _short(name), "unknown_parameter")
            if value is not None and name in self.neutral and not self.neutral[name](value):
                raise bad(f"'{name}' is not supported by this server.", name, "unsupported_parameter")
        self.values = {name: value for name, value in self.values.items() if value is not None}

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> Any:
        """A whole number."""
        value = self.values.get(name, default)
        if name in self.values and type(value) is not int:
            raise _wrong_type(name, "an integer", value)
        return self._in_range(name, value, low, high)

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """A number."""
        value = self.values.get(name, default)
        if type(value) not in (int, float):
            raise _wrong_type(name, "a number", value)
        return float(self._in_range(name, value, low, high))

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise _wrong_type(name, "a boolean", value)
        return value

    def text(self, name: str, longest: int) -> str | None:
        """A string, or None."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise _wrong_type(name, "a string", value)
        if value is not None and not 1 <= len(value) <= longest:
            raise bad(f"'{name}' must have from 1 to {longest} characters.", name)
        return None if value is None else _checked_text(value, name)

    def stops(self) -> list[str]:
        """``stop``: a string or some."""
        value = self.values.get("stop", [])
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise _wrong_type("stop", "a string or an array of strings", value)
        if len(words) > MOST_STOPS or not all(words):
            raise bad(f"'stop' takes up to {MOST_STOPS} strings that are not empty.", "stop")
        return [_checked_text(word, "stop") for word in words]

    def whole_list(self, name: str) -> list[int] | None:
        """An array of integers, or None."""
        value = self.values.get(name)
        if value is not None and (not isinstance(value, list) or not all(type(item) is int for item in value)):
            raise _wrong_type(name, "an array of integers", value)
        return value

    @staticmethod
    def _in_range(name: str, value: Any, low: float, high: float) -> Any:
        if value is not None and not low <= value <= high:
            raise bad(f"Invalid '{name}': {_short(value)} is not from {low} to {high}.", name)
        return value


def read_request(values: dict[str, Any], kind: str, served: ServedModel, tenant: str | None) -> GenerationRequest:
    """A request body, checked; tokenizes, so call it off the event loop.

    Args:
        values: The body.
        kind: "completions" or "chat".
        served: What is served.
        tenant: Whose key the request came with; it goes into the salt. None where there are no keys.

    Raises:
        ApiError: It cannot be met.
    """
    body = Body(values, kind)
    chat = kind == "chat"
    _check_model(body, served)
    n = body.whole("n", 1, MOST_SEQUENCES, 1)
    if body.whole("best_of", 1, MOST_SEQUENCES, n) != n:
        raise bad("'best_of' is not supported unless it equals 'n'.", "best_of", "unsupported_parameter")
    prompts = _chat_prompt(body, served) if chat else _prompts(body, served)
    if len(prompts) * n > MOST_SEQUENCES:
        raise bad(f"{len(prompts)} prompts with n={n}: there may be {MOST_SEQUENCES} answers at most.", "n")
    stream = body.flag("stream")
    logprobs = _logprobs(body, chat)
    echo = not chat and body.flag("echo")
    if echo and logprobs is not None:
        raise bad("'echo' with 'logprobs' is not supported: log-probs of prompts are not computed.", "logprobs")
    sampling = _sampling(body, served, logprobs)
    salt = body.text("cache_salt", 256)
    if tenant is not None:
        sampling["cache_salt"] = json.dumps([tenant, salt])
    elif salt is not None:
        sampling["cache_salt"] = salt
    return GenerationRequest(
        chat=chat,
        prompts=prompts,
        n=n,
        most_tokens=_most_tokens(body, chat, prompts, served),
        sampling=sampling,
        stop=body.stops() + (served.chat.stop if chat else []),
        stream=stream,
        include_usage=_include_usage(body, stream),
        echo=echo,
        logprobs=logprobs,
    )


def _check_model(body: Body, served: ServedModel) -> None:
    model = body.values.get("model")
    if model is None:
        raise bad("you must provide a model parameter", "model", "missing_required_parameter")
    if not isinstance(model, str):
        raise _wrong_type("model", "a string", model)
    if model != served.model:
        raise model_not_found(model)


def model_not_found(model: str) -> ApiError:
    """No model has this name."""
    message = f"The model '{_short(model)}' does not exist or you do not have access to it."
    return ApiError(404, message, param="model", code="model_not_found")


def _sampling(body: Body, served: ServedModel, logprobs: int | None) -> dict[str, Any]:
    temperature = body.number("temperature", 0, 2, 1)
    top_p = body.number("top_p", 0, 1, 1)
    top_k = body.whole("top_k", 0, served.vocab_size - 1, 0)
    greedy = temperature < _GREEDY_TEMPERATURE or top_p == 0
    if greedy:
        temperature, top_p, top_k = 1.0, 1.0, 1
    if top_k and top_p < 1:
        raise bad("'top_k' and 'top_p' cannot be used together.", "top_k", "unsupported_parameter")
    seed = body.whole("seed", -(2**63), 2**63 - 1)
    if seed is not None and top_k != 1:
        raise bad(
            "'seed' is only supported with temperature 0: the engine has one random generator for all requests.",
            "seed",
            "unsupported_parameter",
        )
    eod = served.tokenizer.eod
    fields: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": 0.0 if top_p == 1 else top_p,
        "termination_id": -1 if eod is None or body.flag("ignore_eos") else eod,
        "return_log_probs": logprobs is not None,
        "skip_prompt_log_probs": True,
        "top_n_logprobs": logprobs or 0,
    }
    switches = {name: body.flag(name) for name in ("cache_read", "cache_write") if name in body.values}
    return fields | switches


def _most_tokens(body: Body, chat: bool, prompts: Sequence[Prompt], served: ServedModel) -> list[int]:
    """Tokens to generate after each prompt."""
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in body.values]
    if len(names) > 1:
        raise bad("'max_tokens' and 'max_completion_tokens' cannot both be set.", "max_tokens")
    asked = body.whole(names[0], 1, 2**31, None) if names else None if chat else 16
    found = []
    for prompt in prompts:
        tokens, wanted = len(prompt.tokens), asked
        if wanted is None:
            wanted = max(1, served.most_tokens(tokens))
        if tokens + wanted > served.limit_tokens:
            raise bad(
                f"This model's maximum context length is {served.limit_tokens} tokens. However, you requested "
                f"{tokens + wanted} tokens ({tokens} in the {'messages' if chat else 'prompt'}, {wanted} in the completion).",
                "messages" if chat else "prompt",
                "context_length_exceeded",
            )
        try:
            served.check_fits(tokens, wanted)
        except ValueError as error:
            raise bad(str(error), "messages" if chat else "prompt", "context_length_exceeded") from None
        found.append(wanted)
    return found


def _logprobs(body: Body, chat: bool) -> int | None:
    if not chat:
        return body.whole("logprobs", 0, MOST_TOP_LOGPROBS, None)
    wanted = body.flag("logprobs")
    top = body.whole("top_logprobs", 0, MOST_TOP_LOGPROBS, None)
    if top is not None and not wanted:
        raise bad("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    return (top or 0) if wanted else None


def _include_usage(body: Body, stream: bool) -> bool:
    options = body.values.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise _wrong_type("stream_options", "an object", options)
    if not stream:
        raise bad("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation"):
            raise bad(f"Unknown parameter: 'stream_options.{_short(name)}'.", "stream_options", "unknown_parameter")
        if not isinstance(value, bool):
            raise _wrong_type(f"stream_options.{name}", "a boolean", value)
    return bool(options.get("include_usage", False))


def _prompts(body: Body, served: ServedModel) -> list[Prompt]:
    given = body.values.get("prompt")
    if given is None:
        raise bad("you must provide a prompt", "prompt", "missing_required_parameter")
    ids = isinstance(given, list) and bool(given) and all(type(item) is int for item in given)
    items = [given] if isinstance(given, str) or ids else given
    if not isinstance(items, list):
        raise _wrong_type("prompt", "a string, or an array of strings, of token ids or of arrays of token ids", given)
    if not 1 <= len(items) <= MOST_SEQUENCES:
        raise bad(f"'prompt' takes from 1 to {MOST_SEQUENCES} prompts.", "prompt")
    breakpoints = body.whole_list("cache_breakpoints") or []
    if breakpoints and len(items) > 1:
        raise bad("'cache_breakpoints' needs a single prompt.", "cache_breakpoints")
    return [_prompt(item, breakpoints, served) for item in items]


def _prompt(item: Any, breakpoints: list[int], served: ServedModel) -> Prompt:
    if isinstance(item, str):
        text, tokens = item, _tokens(_checked_text(item, "prompt"), served)
    elif isinstance(item, list) and all(type(token) is int for token in item):
        tokens = item
        if not all(0 <= token < served.vocab_size for token in tokens):
            raise bad(f"'prompt' holds token ids outside the vocabulary of {served.vocab_size}.", "prompt")
        text = served.tokenizer.detokenize(tokens, skip_special_tokens=True)
    else:
        raise _wrong_type("prompt", "a string, or an array of strings, of token ids or of arrays of token ids", item)
    if not tokens:
        raise bad("'prompt' must not be empty.", "prompt")
    for position in breakpoints:
        if not 0 < position <= len(tokens):
            raise bad(
                f"'cache_breakpoints': {_short(position)} is no length from 1 to {len(tokens)} tokens.",
                "cache_breakpoints",
            )
    return Prompt(tokens=tokens, text=text, breakpoints=breakpoints)


def _chat_prompt(body: Body, served: ServedModel) -> list[Prompt]:
    given = body.values.get("messages")
    if given is None:
        raise bad("you must provide messages", "messages", "missing_required_parameter")
    if not isinstance(given, list) or not given:
        raise _wrong_type("messages", "a non-empty array of objects", given)
    messages = [_message(item, number) for number, item in enumerate(given)]
    wanted = body.whole_list("cache_breakpoints")
    for number in wanted or ():
        if not 0 <= number < len(messages):
            raise bad(f"'cache_breakpoints': there is no message {_short(number)}.", "cache_breakpoints")
    try:
        text = served.chat.render(messages)
    except ValueError as error:
        raise bad(str(error), "messages") from None

    def tokenize(part: str) -> list[int]:
        return _tokens(part, served)

    tokens = tokenize(text)
    if not tokens:
        raise bad("'messages' must not be empty.", "messages")
    # What can never run is not worth finding the ends of its messages.
    ends = [] if len(tokens) > served.limit_tokens else served.chat.ends(messages, tokens, tokenize, wanted)
    return [Prompt(tokens=tokens, text=text, breakpoints=ends)]


def _message(item: Any, number: int) -> dict[str, str]:
    where = f"messages[{number}]"
    if not isinstance(item, dict):
        raise _wrong_type(where, "an object", item)
    for name, value in item.items():
        if name not in ("role", "content") and value not in (None, "", []) and name != "name":
            raise bad(f"'{where}.{_short(name)}' is not supported by this server.", where, "unsupported_parameter")
    role = "system" if item.get("role") == "developer" else item.get("role")
    if role not in ("system", "user", "assistant"):
        raise bad(
            f"Invalid value: '{_short(role)}'. Supported roles: system, developer, user, assistant.", f"{where}.role"
        )
    content = item.get("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list):
        parts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise bad(f"'{where}.content': only parts of type 'text' are supported.", f"{where}.content")
            parts.append(part["text"])
        content = "".join(parts)
    if not isinstance(content, str):
        raise _wrong_type(f"{where}.content", "a string or an array of parts", content)
    return {"role": role, "content": _checked_text(content, f"{where}.content")}


def _tokens(text: str, served: ServedModel) -> list[int]:
    bos = served.tokenizer.bos if served.add_bos else None
    return [*(() if bos is None else (bos,)), *served.tokenizer.tokenize(text)]


def _checked_text(text: str, param: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise bad(f"'{param}' holds half of a surrogate pair, which is no text.", param) from None
    return text


def _wrong_type(name: str, wanted: str, value: Any) -> ApiError:
    kinds = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    got = "null" if value is None else kinds.get(type(value), "an object")
    if isinstance(value, float) and not math.isfinite(value):
        got = "a number out of range"
    return bad(f"Invalid type for '{name}': expected {wanted}, but got {got} instead.", name, "invalid_type")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
