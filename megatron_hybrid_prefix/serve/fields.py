"""`Fields`: what all request bodies are, and fields of other servers that are accepted with the value that changes nothing.

Clients of vLLM, SGLang and TGI send their servers' defaults along. A field that this server does not support is listed here with
these values (null always is one); any other value is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from megatron_hybrid_prefix.serve.errors import encodable


class Unless:
    """Metadata of a field that is refused unless it has one of these values; without values: unless it is an empty text or list."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    @property
    def text(self) -> str:
        """The values, in words."""
        return " or ".join(json.dumps(value) for value in self.values) or "empty"

    def check(self, value: Any) -> Any:
        """The value, if it changes nothing. Raises PydanticCustomError."""
        if self.values:
            # True is no 1 in JSON.
            neutral = any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values)
        else:
            neutral = value is None or value in ("", [], {})
        if not neutral:
            raise PydanticCustomError("unsupported_parameter", "is not supported by this server", {"unless": self.text})
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema) | {"description": f"refused unless {self.text}"}


Ignored = Annotated[Any, Field(description="accepted, without effect")]
Empty = Annotated[Any, Unless()]
No = Annotated[Any, Unless(False)]
Yes = Annotated[Any, Unless(True)]
Zero = Annotated[Any, Unless(0)]
One = Annotated[Any, Unless(1)]


class Fields(BaseModel):
    """An object that refuses unknown fields. Types are not converted: "3" is not a number. A field that is null is absent."""

    model_config = ConfigDict(strict=True, frozen=True, json_schema_extra={"additionalProperties": False})

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if (unknown := next((name for name in values if name not in cls.model_fields), None)) is not None:
            raise PydanticCustomError("unknown_parameter", "is unknown", {"name": encodable(unknown)})
        return {name: value for name, value in values.items() if value is not None}


class OtherServersFields(Fields):
    """Fields of completions and chats of other servers."""

    # Sampling.
    use_beam_search: No = None
    num_beams: One = None
    length_penalty: One = None
    early_stopping: No = None
    typical_p: One = None
    no_repeat_ngram_size: Zero = None
    watermark: No = None
    watermarking: No = None
    allowed_token_ids: Empty = None
    bad_words: Empty = None
    logits_processors: Empty = None
    custom_logit_processor: Empty = None
    custom_params: Empty = None
    # Structured answers.
    response_format: Annotated[Any, Unless({"type": "text"})] = None
    structured_outputs: Empty = None
    structural_tag: Empty = None
    guided_json: Empty = None
    guided_regex: Empty = None
    guided_choice: Empty = None
    guided_grammar: Empty = None
    guided_decoding_backend: Empty = None
    guided_whitespace_pattern: Empty = None
    json_schema: Empty = None
    regex: Empty = None
    ebnf: Empty = None
    grammar: Empty = None
    guideline: Empty = None
    # How an answer ends, and its text.
    stop_regex: Empty = None
    no_stop_trim: No = None
    include_stop_str_in_output: No = None
    skip_special_tokens: Yes = None
    spaces_between_special_tokens: Yes = None
    repetition_detection: Empty = None
    thinking_token_budget: Annotated[Any, Unless(-1)] = None
    stream_interval: One = None
    # The prompt.
    prompt_embeds: Empty = None
    input_ids: Empty = None
    truncate: Empty = None
    truncate_prompt_tokens: Empty = None
    truncation_side: Annotated[Any, Unless("left", "right")] = None
    mm_processor_kwargs: Empty = None
    media_io_kwargs: Empty = None
    images_config: Empty = None
    # What is returned.
    logprob_token_ids: Empty = None
    return_full_text: No = None
    return_tokens_as_token_ids: No = None
    return_token_ids: No = None
    return_prompt_token_ids: No = None
    return_prompt_text: No = None
    return_token_offsets: No = None
    return_mm_kwargs: Yes = None
    return_hidden_states: No = None
    return_routed_experts: No = None
    routed_experts_prompt_start: Zero = None
    routed_experts_start_len: Zero = None
    return_cached_tokens_details: No = None
    return_meta_info: No = None
    # Where and when it runs.
    priority: Zero = None
    lora_path: Empty = None
    adapter_id: Empty = None
    extra_key: Empty = None
    ngram_corpus_id: Empty = None
    session_params: Empty = None
    kv_transfer_params: Empty = None
    ec_transfer_params: Empty = None
    vllm_xargs: Empty = None
    bootstrap_host: Empty = None
    bootstrap_port: Empty = None
    bootstrap_room: Empty = None
    data_parallel_rank: Empty = None
    routed_dp_rank: Empty = None
    disagg_prefill_dp_rank: Empty = None
    store: No = None


class OtherServersChatFields(Fields):
    """Further fields of chats of other servers."""

    functions: Empty = None
    function_call: Annotated[Any, Unless("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, Unless(True, False)] = None
    tool_prompt: Empty = None
    modalities: Annotated[Any, Unless(["text"])] = None
    audio: Empty = None
    prediction: Empty = None
    web_search_options: Empty = None
    verbosity: Annotated[Any, Unless("medium")] = None
    echo: No = None
    continue_final_message: No = None
    chat_template: Empty = None
    documents: Empty = None
    task: Empty = None
    include_reasoning: Yes = None
    separate_reasoning: Yes = None
    stream_reasoning: Yes = None
    max_dynamic_patch: Empty = None
    min_dynamic_patch: Empty = None
    use_audio_in_video: No = None


class OtherServersTokenizeFields(Fields):
    """Fields of ``/tokenize`` of other servers."""

    return_token_strs: No = None
    continue_final_message: No = None
    chat_template: Empty = None
    chat_template_kwargs: Empty = None
    tools: Empty = None
    mm_processor_kwargs: Empty = None
