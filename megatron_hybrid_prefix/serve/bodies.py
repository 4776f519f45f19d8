"""Bodies of requests: a strict pydantic model per route, which checks everything that does not depend on the served model.

A field that is null counts as absent. Fields of other servers that would change the answer are refused (`UNSUPPORTED`); any other
unknown field is ignored, and named once in the log. The cache has the fields ``cache_salt``, ``cache_breakpoints``, ``cache_read``,
``cache_write``, ``cache_session``, ``cache_uses`` and ``cache_pin``. ``docs/server.md`` describes the fields.
"""

from __future__ import annotations

import json
import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Self, TypedDict

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from megatron_hybrid_prefix.sampling import GREEDY_TEMPERATURE
from megatron_hybrid_prefix.serve.errors import ApiError, bad, short

logger = logging.getLogger(__name__)

MOST_SEQUENCES = 128  # answers per request: prompts times n
MOST_STOPS = 16
MOST_BREAKPOINTS = 128  # each one of a chat renders the conversation, or its last messages
_MOST_NAMES = 100  # of ignored fields in the log
_named: set[str] = set()

# What would change the answer, and the values that do not; null never does.
_UNSUPPORTED = """
    suffix echo allowed_token_ids bad_words logits_processors custom_logit_processor no_repeat_ngram_size use_beam_search
    structural_tag guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf grammar
    stop_regex no_stop_trim include_stop_str_in_output prompt_embeds input_ids truncate truncate_prompt_tokens lora_path functions
    tools chat_template chat_template_kwargs documents continue_final_message prefix audio images prediction web_search_options
    return_hidden_states flat_logprobs watermark return_token_strs mm_processor_kwargs session_params adapter_id extra_key
    repetition_detection return_full_text logprob_token_ids guideline features content_parts
"""
_NOTHING: tuple[Any, ...] = (False, 0, "", [], {})
UNSUPPORTED: dict[str, tuple[Any, ...]] = dict.fromkeys(_UNSUPPORTED.split(), _NOTHING) | {
    "num_beams": (*_NOTHING, 1),
    "typical_p": (*_NOTHING, 1),
    "modalities": (*_NOTHING, ["text"]),
    "verbosity": (*_NOTHING, "medium"),
    **dict.fromkeys(("tool_choice", "function_call"), (*_NOTHING, "none", "auto")),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (-1,),
}

# What a chat template gets from the server, not from ``chat_template_kwargs``.
_RESERVED = "messages conversations chat_template tools documents return_assistant_tokens_mask " + (
    "add_generation_prompt continue_final_message"
)
Stop = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]
MostTokens = Annotated[int, Field(ge=0, le=2**31)]
TopCount = Annotated[int, Field(ge=0, le=20)]
Integers = Annotated[list[int], Field(fail_fast=True)]
Prompts = Annotated[list[str | Integers], Field(fail_fast=True, min_length=1, max_length=MOST_SEQUENCES)]
Breakpoints = Annotated[
    Integers, Field(max_length=MOST_BREAKPOINTS), WrapValidator(lambda value, check: sorted(set(check(value))))
]
TokenId = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,18})$")]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]


class Fields(BaseModel):
    """A JSON object. Types are not converted: "3" is not a number.

    Attributes:
        without_effect: Fields of `UNSUPPORTED` that change nothing here.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    without_effect: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise PydanticCustomError("object_type", "Input should be an object")
        found = {name: value for name, value in values.items() if value is not None}
        for name, value in found.items():
            if name in cls.model_fields or name in cls.without_effect:
                continue
            harmless = UNSUPPORTED.get(name)
            if harmless is not None and value not in harmless:
                raise bad(f"'{name}' is not supported by this server.", name, "unsupported_parameter")
            if harmless is None and name not in _named and len(_named) < _MOST_NAMES:
                _named.add(name)
                logger.warning("fields named %r are ignored in requests", short(name))
        return found


class StreamOptions(Fields):
    """Options of a streamed response: a last chunk with usage, or usage in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CacheControl(Fields):
    """The mark of a cache breakpoint, as in Anthropic's API. With a time to live it is pinned for so long."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> int:
        """Its time to live; 0: as long as any other state."""
        return {None: 0, "5m": 300, "1h": 3600}[self.ttl]


class TextPart(Fields):
    """A part of a message's content."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class Message(Fields):
    """One message of a chat. Role "developer" means "system". A mark on it, or on a part, is a cache breakpoint."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart],
        Field(fail_fast=True),
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
    ] = []
    cache_control: CacheControl | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] = []
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # what others call the same

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise PydanticCustomError("no_content", "Input should have 'content'")
        return self

    @property
    def marks(self) -> list[tuple[int, int]]:
        """Up to where each marked part reaches, and a marked message, in characters; and its time to live in seconds."""
        ends, length = [], 0
        for part in self.content:
            length += len(part.text)
            if part.cache_control is not None:
                ends.append((length, part.cache_control.seconds))
        return ends if self.cache_control is None else [*ends, (length, self.cache_control.seconds)]

    def as_dict(self, characters: int | None = None) -> dict[str, Any]:
        """The message in the form of a chat template, with at most this many characters of its content."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = "".join(part.text for part in self.content)[:characters]
        if characters is None and self.tool_calls:
            message["tool_calls"] = [_arguments(call) for call in self.tool_calls]
        message |= {name: value for name in ("tool_call_id", "name") if (value := getattr(self, name)) is not None}
        if reasoning := self.reasoning_content or self.reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return message


# What is checked of a tool, and of the schema of its arguments. Templates get what was sent, with its order and further keys.
class _Schema(TypedDict, total=False):
    type: Literal["object"]
    properties: dict[str, dict[str, Any] | bool]
    required: list[str]


class _Function(TypedDict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]
    parameters: NotRequired[_Schema | None]
    strict: NotRequired[bool | None]


class _Tool(TypedDict):
    type: Literal["function"]
    function: _Function


Tool = Annotated[_Tool, WrapValidator(lambda value, check: check(value) and value)]


def _arguments(call: Any) -> Any:
    """A tool call with its arguments as an object, which is what chat templates expect."""
    match call:
        case {"function": {"arguments": str(text)} as function}:
            try:
                return call | {"function": function | {"arguments": json.loads(text or "{}")}}
            except (ValueError, RecursionError):
                return call
    return call


class CacheSession(Fields):
    """The session that a request belongs to, and whether that is over with it."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    end: bool = False


class CachePin(Fields):
    """For how many requests, or how long, the prompt is kept, or its first tokens."""

    requests: Annotated[int, Field(ge=1, le=2**20)] | None = None
    seconds: Annotated[float, Field(ge=1e-3, le=2**31)] | None = None
    tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.requests is None) == (self.seconds is None):
            raise bad("'cache_pin' must have either 'requests' or 'seconds'.", "cache_pin")
        return self


class Body(Fields, ABC):
    """Fields of all routes that generate."""

    model: str
    n: Count = 1  # answers per prompt
    best_of: Count | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] = []
    stop_token_ids: Annotated[Integers, Field(max_length=64)] = []
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Share = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0  # 0, -1: all
    min_p: Share = 0.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    logit_bias: Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] = {}
    max_tokens: MostTokens | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    min_tokens: MostTokens = 0
    ignore_eos: bool = False
    response_format: dict[str, Any] = {"type": "text"}
    structured_outputs: dict[str, Any] | None = None  # as vLLM's: `SamplingOptions` have it
    prompt_logprobs: TopCount | None = None
    return_token_ids: bool = False
    return_routed_experts: bool | None = None  # None: if the server records them
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] = 0
    return_tokens_as_token_ids: bool = False
    return_cache_reuse: bool = False
    add_special_tokens: bool | None = None  # None: to a text, but not to what a chat template made
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cache_breakpoints: Breakpoints | None = None  # positions in tokens; in a chat, message numbers (None: all)
    cache_read: bool | None = None
    cache_write: bool | None = None
    cache_session: CacheSession | None = None
    cache_uses: Annotated[int, Field(ge=0, le=2**20)] | None = None
    cache_pin: CachePin | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether temperature or top_p select only the likeliest token."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_p == 0

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def most_tokens(self) -> int | None:
        """Most tokens to generate; None: up to the end of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def grammar(self) -> dict[str, Any] | None:
        """What the answer must match, in the form of `SamplingOptions`."""
        match self.response_format:
            case {"type": "json_object"}:
                return {"json_object": True}
            case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
                return {"json": schema}
        return self.structured_outputs

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
        has_both = self.structured_outputs is not None
        if self.response_format != {"type": "text"} and (has_both or self.grammar is None):
            kinds = "'text', 'json_object' or 'json_schema' with a schema, and without 'structured_outputs'"
            raise bad(f"'response_format' must be {kinds}.", "response_format")
        if self.best_of not in (None, self.n):
            raise bad("'best_of' is not supported unless it equals 'n'.", "best_of", "unsupported_parameter")
        if self.most_tokens == 0 and not self.echoes and self.prompt_logprobs is None:
            raise bad("'max_tokens' must be at least 1 unless 'echo' or 'prompt_logprobs' is set.", "max_tokens")
        if self.most_tokens is not None and self.min_tokens > self.most_tokens:
            raise bad(f"'min_tokens' must be at most {self.most_tokens}, the most tokens to generate.", "min_tokens")
        return self


class CompletionBody(Body):
    """Body of ``/v1/completions``."""

    prompt: str | Integers | Prompts
    max_tokens: MostTokens | None = 16
    logprobs: TopCount | None = None
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts, or token ids."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or not given or isinstance(given[0], int) else given

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def top_tokens(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.cache_breakpoints and len(self.prompts) > 1:
            raise bad("'cache_breakpoints' needs a single prompt.", "cache_breakpoints")
        return self


class ChatFields(Fields):
    """What makes the prompt of a chat."""

    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None  # None: to a text, but not to what a chat template made
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None  # a variable for the chat template
    continue_final_message: bool = False
    tools: Annotated[list[Tool], Field(fail_fast=True)] = []

    @property
    def variables(self) -> dict[str, Any]:
        """Variables for the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        own = {"tools": self.tools, "continue_final_message": self.continue_final_message}
        return effort | self.chat_template_kwargs | {name: value for name, value in own.items() if value}

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt ends with the start of the answer's turn."""
        return self.add_generation_prompt and not self.continue_final_message

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if reserved := sorted(self.chat_template_kwargs.keys() & _RESERVED.split()):
            raise bad(f"'chat_template_kwargs' must not set {', '.join(reserved)}.", "chat_template_kwargs")
        begins = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and (begins or not self.messages or self.messages[-1].role != "assistant"):
            problem = "needs a last message of the assistant, and no 'add_generation_prompt'"
            raise bad(f"'continue_final_message' {problem}.", "continue_final_message")
        return self


class ChatBody(ChatFields, Body):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    logprobs: bool = False
    top_logprobs: TopCount | None = None
    tool_choice: Literal["none", "auto", "required"] | _Tool = "auto"
    parallel_tool_calls: bool = True

    @property
    def top_tokens(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def called_tools(self) -> list[Any]:
        """Tools that answers may call. The others are rendered, too, so that the cached prefix is the same."""
        if isinstance(self.tool_choice, str):
            return [] if self.tool_choice == "none" else [*self.tools]
        name = self.tool_choice["function"]["name"]
        return [tool for tool in self.tools if tool["function"]["name"] == name]

    @property
    def forced(self) -> dict[str, bool]:
        """How a grammar makes answers call tools, as of `answer_grammar`; empty: none does."""
        how = {
            "must_call": self.tool_choice not in ("none", "auto"),
            "at_most_one": not self.parallel_tool_calls or not isinstance(self.tool_choice, str),
        }
        is_strict = any(tool["function"].get("strict") for tool in self.called_tools)
        is_needed = any(how.values()) or is_strict or self.grammar is not None
        return how if is_needed and self.called_tools else {}

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise bad("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
        if self.tool_choice not in ("none", "auto") and (not self.called_tools or self.grammar is not None):
            raise bad("'tool_choice' must be of the 'tools', and does not go with a structured answer.", "tool_choice")
        if sum(len(message.marks) for message in self.messages) > MOST_BREAKPOINTS:
            raise bad(f"A request may have at most {MOST_BREAKPOINTS} 'cache_control'.", "messages")
        for number in self.cache_breakpoints or ():
            if not 0 <= number < len(self.messages):
                raise bad(f"'cache_breakpoints': there is no message {short(number)}.", "cache_breakpoints")
        return self


class GenerateBody(Body):
    """Body of ``/inference/v1/generate``: token ids in, token ids out, as vLLM's. ``sampling_params`` may have its other fields."""

    without_effect = frozenset(
        ["skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"]
    )  # on ids

    token_ids: Integers
    sampling_params: dict[str, Any] = {}
    logprobs: TopCount | None = None

    @property
    def top_tokens(self) -> int | None:
        return self.logprobs


class TokenizeBody(ChatFields):
    """Body of ``/tokenize``: a text or a chat."""

    model: str | None = None
    prompt: str = ""


class DetokenizeBody(Fields):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: Integers


class ExplainBody(Fields):
    """Body of ``/admin/explain``: a completion or, with ``messages``, a chat, whose reuse is to be explained; and its API key's name."""

    request: dict[str, Any]
    tenant: str | None = None


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
        if re.search(rb"\\u[dD]", data):  # perhaps half of a surrogate pair, which is no text
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # errors of encodings and of JSON are ValueErrors
        raise bad(f"We could not parse the JSON body of your request: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad("The body of your request must be a JSON object.", code="invalid_json")
    return body


def read_fields[Kind: Fields](values: dict[str, Any], kind: type[Kind]) -> Kind:
    """Parses and checks the fields of any body. Raises ApiError if one is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _api_error(error.errors(include_url=False, include_context=False, include_input=False)) from None


def _api_error(problems: list[ErrorDetails]) -> ApiError:
    """Status 400 for the first wrong field. If it may have several types, the problem of the type that was given says most."""
    field = problems[0]["loc"][:1]
    found = [problem for problem in problems if problem["loc"][:1] == field]
    problem = max(found, key=lambda each: (not each["type"].endswith("_type"), len(each["loc"])))
    parts: dict[Any, int | None] = {("messages",): None, ("stream_options",): None, ("tools",): 4}
    place = problem["loc"][: parts.get(field, 1)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    if problem["type"] == "missing":
        return bad(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    code = "invalid_type" if problem["type"].endswith("_type") else "invalid_value"
    return bad(f"Invalid '{param}': {problem['msg']}.", param, code)
