"""Bodies of completion and chat requests as pydantic models. They check everything that does not depend on the model.

Unknown fields are refused (400), as OpenAI does. Known fields are refused if they ask for something that this server
does not support. This server adds the fields ``cache_salt``, ``cache_breakpoints``, ``cache_read``, ``cache_write``,
``top_k`` and ``ignore_eos``. A field that is null counts as absent.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticKnownError

from megatron_hybrid_prefix.serve.errors import ApiError, bad, short, wrong_type

MOST_SEQUENCES = 128  # answers per request: prompts times n
MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20
# A lower temperature counts as greedy.
_GREEDY_TEMPERATURE = 1e-4


def _only(changes_nothing: Callable[[Any], bool]) -> AfterValidator:
    """Accepts an OpenAI field only with values that change nothing; this server does not support it."""

    def check(value: Any) -> Any:
        if not changes_nothing(value):
            raise PydanticCustomError("unsupported_parameter", "is not supported by this server")
        return value

    return AfterValidator(check)


def _encodable(value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair
        raise PydanticKnownError("string_unicode") from None
    return value


def _list_of_one(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _list_of_prompts(value: Any) -> Any:
    is_tokens = isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
    return [value] if isinstance(value, str) or is_tokens else value


def _not_empty(value: list[Message]) -> list[Message]:
    if not value:
        raise PydanticKnownError("list_type")
    return value


Text = Annotated[str, AfterValidator(_encodable)]
Stop = Annotated[Text, Field(min_length=1)]
Zero = Annotated[Any, _only(lambda value: value == 0)]
Nothing = Annotated[Any, _only(lambda value: not value and not isinstance(value, bool))]
NoChoice = Annotated[Any, _only(lambda value: value in ("none", "auto"))]
Count = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]
TokenCount = Annotated[int, Field(ge=1, le=2**31)]
TopCount = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)]
Integers = Annotated[list[int], Field(fail_fast=True)]


class Fields(BaseModel):
    """An object that refuses unknown fields. Types are not converted: "3" is not a number."""

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: Any) -> Any:
        names = values if isinstance(values, dict) else ()
        if (unknown := next((name for name in names if name not in cls.model_fields), None)) is not None:
            raise PydanticCustomError("unknown_parameter", "is unknown", {"name": unknown})
        return values


class StreamOptions(Fields):
    """Options of a streamed response."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Message(BaseModel):
    """One message of a chat. Role "developer" means "system". Text parts are joined."""

    model_config = ConfigDict(strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Text

    @model_validator(mode="before")
    @classmethod
    def _refuse_more(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            if name not in ("role", "content", "name") and value not in (None, "", []):
                raise PydanticCustomError("unsupported_parameter", "is not supported", {"name": name})
        return {"role": None, "content": None} | values

    @field_validator("content", mode="before")
    @classmethod
    def _join(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") == "assistant":
            return ""
        if not isinstance(content, list):
            return content
        texts = []
        for part in content:
            match part:
                case {"type": "text", "text": str(text)}:
                    texts.append(text)
                case _:
                    raise PydanticCustomError("invalid_value", "only parts of type 'text' are supported")
        return "".join(texts)

    def as_dict(self) -> dict[str, str]:
        """The message in the form of a chat template."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class Body(Fields, ABC):
    """Fields of both completions and chats."""

    model: str
    n: Count = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[list[Stop], FailFast(), BeforeValidator(_list_of_one), Field(max_length=MOST_STOPS)] = []
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: TokenCount | None = None

    cache_salt: Annotated[Text, Field(min_length=1, max_length=256)] | None = None
    cache_breakpoints: Integers | None = None
    cache_read: bool | None = None
    cache_write: bool | None = None
    ignore_eos: bool = False

    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0
    logit_bias: Nothing = None
    store: Annotated[Any, _only(lambda value: value is False)] = False

    @property
    def is_greedy(self) -> bool:
        """Whether temperature or top_p select only the likeliest token."""
        return self.temperature < _GREEDY_TEMPERATURE or self.top_p == 0

    @property
    def most_tokens(self) -> int | None:
        """Most tokens to generate; None: up to the end of the context."""
        return self.max_tokens

    @property
    @abstractmethod
    def top_tokens(self) -> int | None:
        """Number of likeliest tokens to return per position; None: no log-probs at all."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None or name not in cls.model_fields}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise bad("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        if self.top_k and self.top_p < 1 and not self.is_greedy:
            raise bad("'top_k' and 'top_p' cannot be used together.", "top_k", "unsupported_parameter")
        if self.seed is not None and not self.is_greedy and self.top_k != 1:
            raise bad(
                "'seed' is only supported with temperature 0: the engine has one random generator for all requests.",
                "seed",
                "unsupported_parameter",
            )
        return self


class CompletionBody(Body):
    """Body of ``/v1/completions``."""

    prompt: Annotated[
        list[Text | Integers],
        FailFast(),
        BeforeValidator(_list_of_prompts),
        Field(min_length=1, max_length=MOST_SEQUENCES),
    ]
    max_tokens: TokenCount | None = 16
    logprobs: TopCount | None = None
    best_of: Count | None = None
    echo: bool = False
    suffix: Nothing = None

    @property
    def top_tokens(self) -> int | None:
        """See `Body`."""
        return self.logprobs

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of not in (None, self.n):
            raise bad("'best_of' is not supported unless it equals 'n'.", "best_of", "unsupported_parameter")
        if self.cache_breakpoints and len(self.prompt) > 1:
            raise bad("'cache_breakpoints' needs a single prompt.", "cache_breakpoints")
        if self.echo and self.logprobs is not None:
            raise bad("'echo' with 'logprobs' is not supported: log-probs of prompts are not computed.", "logprobs")
        return self


class ChatBody(Body):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], FailFast(), AfterValidator(_not_empty)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: TopCount | None = None

    tools: Nothing = None
    functions: Nothing = None
    tool_choice: NoChoice = "none"
    function_call: NoChoice = "none"
    parallel_tool_calls: Annotated[Any, _only(lambda value: isinstance(value, bool))] = False
    response_format: Annotated[Any, _only(lambda value: value == {"type": "text"})] = None
    modalities: Annotated[Any, _only(lambda value: value == ["text"])] = None

    @property
    def most_tokens(self) -> int | None:
        """See `Body`."""
        return self.max_tokens or self.max_completion_tokens

    @property
    def top_tokens(self) -> int | None:
        """See `Body`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise bad("'max_tokens' and 'max_completion_tokens' cannot both be set.", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
        for number in self.cache_breakpoints or ():
            if not 0 <= number < len(self.messages):
                raise bad(f"'cache_breakpoints': there is no message {short(number)}.", "cache_breakpoints")
        return self


def read_json(data: bytes) -> dict[str, Any]:
    """Parses the body.

    Raises:
        ApiError: The body is not a JSON object.
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


def read_body(values: dict[str, Any], kind: str) -> CompletionBody | ChatBody:
    """Parses and checks the fields of a request.

    Args:
        values: The JSON object.
        kind: "completions" or "chat".

    Raises:
        ApiError: A field is wrong.
    """
    try:
        return ChatBody.model_validate(values) if kind == "chat" else CompletionBody.model_validate(values)
    except ValidationError as error:
        raise _api_error(error.errors(include_url=False)) from None


# -- pydantic's errors in the format of the API ------------------------------------------------------------------------

_TYPES = {
    "bool_type": "a boolean",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "an array",
    "model_type": "an object",
    "string_type": "a string",
}
# Fields that accept more than one type.
_EXPECTED = {
    "cache_breakpoints": "an array of integers",
    "content": "a string or an array of parts",
    "messages": "a non-empty array of objects",
    "prompt": "a string, or an array of strings, of token ids or of arrays of token ids",
    "stop": "a string or an array of strings",
}
_LIMITS = {
    "greater_than_equal": "must be at least {ge}, not {}",
    "less_than_equal": "must be at most {le}, not {}",
    "string_unicode": "is not valid text: it has half of a surrogate pair",
    "too_long": "must have a length of at most {max_length}",
    "too_short": "must have a length of at least {min_length}",
}


def _api_error(problems: list[ErrorDetails]) -> ApiError:
    # Report unsupported fields first. If a field accepts several types, report the error of the type that was given.
    first = next((problem for problem in problems if problem["type"] == "unsupported_parameter"), problems[0])
    of_field = [problem for problem in problems if problem["loc"][:1] == first["loc"][:1]]
    problem = next((problem for problem in of_field if problem["type"] not in _TYPES), first)
    kind, context, param = problem["type"], problem.get("ctx", {}), _param(problem["loc"])
    if "name" in context:
        name = short(context["name"])
        param, name = (param, f"{param}.{name}") if param else (name, name)
    else:
        name = param
    if kind == "missing":
        return bad(f"Missing required parameter: '{name}'.", param, "missing_required_parameter")
    if kind == "unknown_parameter":
        return bad(f"Unknown parameter: '{name}'.", param, kind)
    if kind == "unsupported_parameter":
        return bad(f"'{name}' is not supported by this server.", param, kind)
    if kind in _TYPES:
        return wrong_type(param, _EXPECTED.get(param.rpartition(".")[2], _TYPES[kind]), problem["input"])
    if kind in _LIMITS:
        return bad(f"'{name}' {_LIMITS[kind].format(short(problem['input']), **context)}.", param)
    return bad(f"Invalid '{name}': {problem['msg']}.", param)


def _param(location: tuple[int | str, ...]) -> str:
    """The field's path for messages and stream options (messages[0].role), for other fields its name."""
    whole = location if location[:1] in (("messages",), ("stream_options",)) else location[:1]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in whole).removeprefix(".")
