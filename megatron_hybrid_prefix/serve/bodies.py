"""Bodies of completion and chat requests as pydantic models. They check everything that does not depend on the model.

Unknown fields are refused (400), as OpenAI does. Known fields are refused if they ask for something that this server
does not support (`fields`). This server adds the fields ``cache_salt``, ``cache_breakpoints``, ``cache_read`` and ``cache_write``,
and the sampling fields that vLLM and SGLang add. A field that is null counts as absent.

Long, so that a field, its range, its description and the message about it are in one place.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from megatron_hybrid_prefix.sampling import GREEDY_TEMPERATURE
from megatron_hybrid_prefix.serve.body_errors import api_error
from megatron_hybrid_prefix.serve.errors import bad, encodable, short
from megatron_hybrid_prefix.serve.fields import OF_ALL, OF_CHATS, OF_COMPLETIONS, OF_TOKENIZE, Fields, Ignored

MOST_SEQUENCES = 128  # answers per request: prompts times n
MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20
MOST_BREAKPOINTS = 128  # each one of a chat renders the conversation, or its last messages
MOST_STOP_TOKENS = 64
MOST_BIASES = 1024
_OF_ANSWERS = ("finish_reason", "id", "provider_specific_fields")  # clients send them back; without effect


def _encodable(value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair
        raise PydanticKnownError("string_unicode") from None
    return value


def _encodable_json(value: Any) -> Any:
    try:
        _encodable(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise PydanticCustomError("invalid_value", "it is nested too deeply") from None
    return value


def _list_of_one(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _list_of_prompts(value: Any) -> Any:
    is_tokens = isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
    return [value] if isinstance(value, str) or is_tokens else value


def _ascending(value: list[int]) -> list[int]:
    return sorted(set(value))


def _token_biases(value: Any) -> Any:
    """Keys of JSON objects are text; those of ``logit_bias`` are token ids, each in one form."""
    if not isinstance(value, dict):
        return value
    is_id = re.compile("0|[1-9][0-9]{0,18}").fullmatch
    return {int(key) if isinstance(key, str) and is_id(key) else key: value[key] for key in value}


def _arguments(call: Any) -> Any:
    """A tool call with its arguments as an object, which is what chat templates expect."""
    match call:
        case {"function": {"arguments": str(text)} as function}:
            try:
                return call | {"function": function | {"arguments": json.loads(text)}}
            except (ValueError, RecursionError):
                return call
    return call


def _is_mark(control: Any) -> bool:
    """Whether a ``cache_control`` marks a breakpoint."""
    match control:
        case None:
            return False
        case {"type": "ephemeral"}:
            return True
    raise PydanticCustomError("invalid_value", '\'cache_control\' must be {"type": "ephemeral"}')


def _joined(parts: list[Any]) -> tuple[str, list[int]]:
    """The text of all parts, and up to where each marked part reaches, in characters."""
    text, marks = [], []
    length = 0
    for part in parts:
        match part:
            case {"type": "text", "text": str(piece)}:
                text.append(piece)
                length += len(piece)
            case _:
                raise PydanticCustomError(
                    "invalid_value", "only parts of type 'text' are supported", {"name": "content"}
                )
        if _is_mark(part.get("cache_control")):
            marks.append(length)
    return "".join(text), marks


Text = Annotated[str, AfterValidator(_encodable)]
Stop = Annotated[Text, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]
TokenCount = Annotated[int, Field(ge=1, le=2**31)]
MostTokens = Annotated[int, Field(ge=0, le=2**31)]
TopCount = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)]
Integers = Annotated[list[int], Field(fail_fast=True)]
Breakpoints = Annotated[Integers, Field(max_length=MOST_BREAKPOINTS), AfterValidator(_ascending)]
StopTokens = Annotated[Integers, Field(max_length=MOST_STOP_TOKENS)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    dict[int, Bias],
    BeforeValidator(_token_biases),
    Field(max_length=MOST_BIASES),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MOST_BIASES,
        }
    ),
]
# For the documents: what the models read before it becomes a list.
_STOP = {"type": "string", "minLength": 1}
_STOPS = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MOST_STOPS}]}
_IDS = {"type": "array", "items": {"type": "integer"}}
_PROMPTS = {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}, "minItems": 1, "maxItems": MOST_SEQUENCES}
_PROMPT = {"anyOf": [{"type": "string"}, _IDS, _PROMPTS]}
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Fields):
    """Options of a streamed response."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Message(BaseModel):
    """One message of a chat. Role "developer" means "system". Text parts are joined.

    A part (or the message) with ``cache_control: {"type": "ephemeral"}`` is a cache breakpoint, as in Anthropic's API.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text
    tool_calls: Annotated[list[dict[str, Any]], AfterValidator(_encodable_json)] = []
    tool_call_id: Text | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # what others call the same
    marks: list[int] = []

    @model_validator(mode="before")
    @classmethod
    def _refuse_more(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known: tuple[str, ...] = ("role", "content", "name", "cache_control")
        of_role = {"assistant": ("tool_calls", "reasoning_content", "reasoning"), "tool": ("tool_call_id",)}
        known += of_role.get(str(values.get("role")), ())
        for name, value in values.items():
            is_known = name in known or name in _OF_ANSWERS or (name == "prefix" and value is False)
            if not is_known and value not in (None, "", [], {}):
                raise PydanticCustomError("unsupported_parameter", "is not supported", {"name": encodable(name)})
        values = {name: value for name, value in values.items() if name in known and value is not None}
        content = values.get("content")
        if content is None and values.get("role") == "assistant":
            content = ""
        marks: list[int] = []
        if isinstance(content, list):
            content, marks = _joined(content)
        if _is_mark(values.pop("cache_control", None)) and isinstance(content, str):
            marks.append(len(content))
        return values | {"content": content, "marks": marks}

    def as_dict(self, characters: int | None = None) -> dict[str, Any]:
        """The message in the form of a chat template, with at most this many characters of its content."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = self.content[:characters]
        if characters is None and self.tool_calls:
            message["tool_calls"] = [_arguments(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        if reasoning := self.reasoning_content or self.reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return message


class Body(Fields, ABC):
    """Fields of both completions and chats."""

    model: Text = Field(description="name of the served model")
    n: Count = Field(1, description="answers per prompt")
    best_of: Count | None = Field(None, description="refused unless it equals `n`")
    stream: bool = Field(False, description="send the answer as server-sent events")
    stream_options: StreamOptions = Field(
        StreamOptions(),
        description="`include_usage`: a last chunk with usage; `continuous_usage_stats`: usage in every chunk",
    )
    stop: Annotated[
        list[Stop], FailFast(), BeforeValidator(_list_of_one), Field(max_length=MOST_STOPS), WithJsonSchema(_STOPS)
    ] = Field([], description="the answer ends before the first of these texts; one may name a special token")
    stop_token_ids: StopTokens = Field([], description="the answer ends at the first of these tokens")
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(1.0, description="0: the most likely token")
    top_p: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="sample from the most likely tokens, up to this sum of probabilities"
    )
    top_k: Annotated[int, Field(ge=-1)] = Field(
        0, description="sample from this many of the most likely tokens; 0, -1: from all"
    )
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="drop tokens less likely than this part of the probability of the most likely one"
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        None, description="the noise depends on the seed, the answer's index and the position alone"
    )
    frequency_penalty: Penalty = Field(0.0, description="subtracted for each time a token is in the answer")
    presence_penalty: Penalty = Field(0.0, description="subtracted if a token is in the answer")
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = Field(
        1.0, description="divides positive and multiplies negative logits of tokens in prompt or answer"
    )
    logit_bias: Biases = Field({}, description="added to the logits of these token ids")
    max_tokens: MostTokens | None = Field(
        None,
        description="most tokens to generate; by default up to the end of the context; 0 only with `prompt_logprobs`",
    )
    max_completion_tokens: TokenCount | None = Field(
        None, description="another name of `max_tokens`; of both, this one counts"
    )
    min_tokens: MostTokens = Field(
        0,
        description="no end token among so many first tokens of the answer; stop texts count only after them",
    )
    prompt_logprobs: TopCount | None = Field(
        None,
        description="log-probs of the prompt's tokens, and of this many of the most likely ones at each position, as vLLM's; "
        "not with `stream`",
    )
    return_token_ids: bool = Field(
        False,
        description="`token_ids` of each choice and chunk, and `prompt_token_ids`; log-probs then have one entry for each of these ids",
    )
    return_tokens_as_token_ids: bool = Field(False, description="log-probs name tokens `token_id:5`, not by their text")

    cache_salt: Annotated[Text, Field(min_length=1, max_length=256)] | None = Field(
        None, description="requests with different salts share nothing"
    )
    cache_breakpoints: Breakpoints | None = Field(
        None,
        description="up to where other prompts will share this one: positions in tokens; in a chat, message numbers (null: all)",
    )
    cache_read: bool | None = Field(None, description="false: do not reuse cached prefixes")
    cache_write: bool | None = Field(None, description="false: do not cache this request")
    ignore_eos: bool = Field(False, description="generate past the end-of-text token")
    add_special_tokens: bool | None = Field(
        None,
        description="whether the tokenizer adds its special tokens to a text; by default it does, but not to what a chat template "
        "made",
    )

    user: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    prompt_cache_key: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="requests with one key go to one replica; nothing else depends on it"
    )
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    request_id: Ignored = None
    rid: Ignored = None
    session_id: Ignored = None
    custom_labels: Ignored = None

    @property
    def is_greedy(self) -> bool:
        """Whether temperature or top_p select only the likeliest token."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_p == 0

    @property
    def most_tokens(self) -> int | None:
        """Most tokens to generate; None: up to the end of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def echoes_log_probs(self) -> bool:
        """Whether the prompt's tokens are among those of the answer, with log-probs."""
        return self.echoes and self.top_tokens is not None

    @property
    @abstractmethod
    def top_tokens(self) -> int | None:
        """Number of likeliest tokens to return per position; None: no log-probs at all."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise bad("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad("'prompt_logprobs' is not available when 'stream' is true.", "prompt_logprobs")
        if self.best_of not in (None, self.n):
            raise bad("'best_of' is not supported unless it equals 'n'.", "best_of", "unsupported_parameter")
        if self.most_tokens == 0 and not self.echoes and self.prompt_logprobs is None:
            others = "'echo' or " * ("echo" in type(self).model_fields)
            raise bad(f"'max_tokens' must be at least 1 unless {others}'prompt_logprobs' is set.", "max_tokens")
        if self.most_tokens is not None and self.min_tokens > self.most_tokens:
            raise bad(f"'min_tokens' must be at most {self.most_tokens}, the most tokens to generate.", "min_tokens")
        return self


class CompletionBody(Body):
    """Body of ``/v1/completions``."""

    neutral = OF_ALL | OF_COMPLETIONS

    prompt: Annotated[
        list[Text | Integers],
        FailFast(),
        BeforeValidator(_list_of_prompts),
        Field(min_length=1, max_length=MOST_SEQUENCES),
        WithJsonSchema(_PROMPT),
    ] = Field(description="a string or token ids, or an array of these")
    max_tokens: MostTokens | None = Field(
        16, description="most tokens to generate; 0 only with `echo` or `prompt_logprobs`"
    )
    logprobs: TopCount | None = Field(
        None, description="log-probs of the tokens, and of this many of the most likely ones"
    )
    echo: bool = Field(
        False, description="return the prompt before the answer; with `logprobs`, also those of the prompt"
    )

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def top_tokens(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.cache_breakpoints and len(self.prompt) > 1:
            raise bad("'cache_breakpoints' needs a single prompt.", "cache_breakpoints")
        return self


class ChatBody(Body):
    """Body of ``/v1/chat/completions``."""

    neutral = OF_ALL | OF_CHATS

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] = Field(
        description="`role` (system, developer, user, assistant, tool), `content` (a string, or parts of type text, each "
        'with `cache_control: {"type": "ephemeral"}` where other prompts will share this one), `tool_calls`, '
        "`reasoning_content`, `tool_call_id`, `name`"
    )
    logprobs: bool = Field(False, description="log-probs of the answer's tokens")
    top_logprobs: TopCount | None = Field(None, description="and of this many of the most likely ones")

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_encodable_json)] = Field(
        {}, description="variables for the chat template"
    )
    add_generation_prompt: bool = Field(True, description="false: do not begin the answer's turn")
    reasoning_effort: Text | None = Field(None, description="a variable for the chat template")
    tools: Any = Field(None, description='ignored if `tool_choice` is "none", else refused')
    tool_choice: Any = None

    @property
    def top_tokens(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables for the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise bad("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
        if self.tools and self.tool_choice != "none":
            raise bad(
                "'tools' is not supported by this server unless 'tool_choice' is 'none'.",
                "tools",
                "unsupported_parameter",
            )
        if sum(len(message.marks) for message in self.messages) > MOST_BREAKPOINTS:
            raise bad(f"A request may have at most {MOST_BREAKPOINTS} 'cache_control'.", "messages")
        for number in self.cache_breakpoints or ():
            if not 0 <= number < len(self.messages):
                raise bad(f"'cache_breakpoints': there is no message {short(number)}.", "cache_breakpoints")
        return self


class TokenizeBody(Fields):
    """Body of ``/tokenize``: a text or a chat."""

    neutral = OF_TOKENIZE

    model: Text | None = Field(None, description="name of the served model")
    prompt: Text = Field("", description="a text")
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(
        None, description="a chat, in place of `prompt`"
    )
    add_special_tokens: bool | None = Field(
        None, description="false: no special tokens but those of the text; by default as completions and chats get them"
    )
    add_generation_prompt: bool = Field(True, description="of a chat; false: do not begin the answer's turn")


class DetokenizeBody(Fields):
    """Body of ``/detokenize``."""

    model: Text | None = Field(None, description="name of the served model")
    tokens: Integers = Field(description="token ids")


class ExplainBody(Fields):
    """Body of ``/admin/explain``: the request whose reuse is to be explained."""

    request: dict[str, Any] = Field(
        description="body of a completion or, with `messages`, of a chat, with one prompt; `model` may be missing"
    )
    tenant: Text | None = Field(None, description="name of the request's API key; required if the server has keys")


def read_json(data: bytes) -> dict[str, Any]:
    """Parses the body. Raises ApiError if it is not a JSON object."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):  # a proxy in front of the server may have checked the other value
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise ValueError(f"the name '{short(twice)}' appears twice in an object")
        return found

    try:
        body = json.loads(data.decode("utf-8"), parse_constant=refuse, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise bad(f"We could not parse the JSON body of your request: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad("The body of your request must be a JSON object.", code="invalid_json")
    return body


def read_fields[Kind: BaseModel](values: dict[str, Any], kind: type[Kind]) -> Kind:
    """Parses and checks the fields of any body. Raises ApiError if one is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        try:
            raise api_error(error.errors(include_url=False)) from None
        except UnicodeEncodeError:  # pydantic cannot describe it
            raise bad("The request has half of a surrogate pair.") from None
