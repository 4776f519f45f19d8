"""`Fields`: what all request bodies are, and fields of other servers that are accepted with the value that changes nothing.

Clients of vLLM, SGLang and TGI send their servers' defaults along. A field that this server does not support is listed here with
these values (null always is one); any other value is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from megatron_hybrid_prefix.serve.errors import encodable

Ignored = Annotated[Any, Field(description="accepted, without effect")]


class Unless:
    """The values with which a field changes nothing; without values: an empty text, list or object."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    @property
    def text(self) -> str:
        """The values, in words."""
        return " or ".join(json.dumps(value) for value in self.values) or "empty"

    def allows(self, value: Any) -> bool:
        """Whether this value changes nothing."""
        if not self.values:
            return value in ("", [], {})
        # True is no 1 in JSON.
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values)


def unless(names: str, *values: Any) -> dict[str, Unless]:
    """The rule of fields that are refused unless they have one of these values."""
    return dict.fromkeys(names.split(), Unless(*values))


class Fields(BaseModel):
    """An object that refuses unknown fields. Types are not converted: "3" is not a number. A field that is null is absent.

    Attributes:
        neutral: Fields that are refused unless they change nothing, by name.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    neutral: ClassVar[Mapping[str, Unless]] = {}

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        for name, value in values.items():
            rule = cls.neutral.get(name)
            if rule is not None and value is not None and not rule.allows(value):
                raise PydanticCustomError(
                    "unsupported_parameter", "is not supported", {"name": name, "unless": rule.text}
                )
            if rule is None and name not in cls.model_fields:
                raise PydanticCustomError("unknown_parameter", "is unknown", {"name": encodable(name)})
        return {name: value for name, value in values.items() if name in cls.model_fields and value is not None}


OF_ALL = {
    **unless(
        """
        allowed_token_ids bad_words logits_processors custom_logit_processor custom_params
        structured_outputs structural_tag guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
        guided_whitespace_pattern json_schema regex ebnf grammar guideline stop_regex repetition_detection
        prompt_embeds input_ids truncate truncate_prompt_tokens mm_processor_kwargs media_io_kwargs images_config
        logprob_token_ids lora_path adapter_id extra_key ngram_corpus_id session_params kv_transfer_params ec_transfer_params
        vllm_xargs extra_args bootstrap_host bootstrap_port bootstrap_room data_parallel_rank routed_dp_rank disagg_prefill_dp_rank
        """
    ),
    **unless(
        """
        use_beam_search early_stopping watermark watermarking no_stop_trim include_stop_str_in_output return_full_text
        return_prompt_token_ids return_prompt_text return_token_offsets
        return_hidden_states return_routed_experts return_cached_tokens_details return_meta_info store
        """,
        False,
    ),
    **unless("skip_special_tokens spaces_between_special_tokens return_mm_kwargs", True),
    **unless("no_repeat_ngram_size routed_experts_prompt_start routed_experts_start_len priority", 0),
    **unless("num_beams length_penalty typical_p stream_interval", 1),
    **unless("response_format", {"type": "text"}),
    **unless("thinking_token_budget", -1),
    **unless("truncation_side", "left", "right"),
}
"""Of completions and chats."""

OF_COMPLETIONS = unless("suffix")

OF_CHATS = {
    **unless("functions tool_prompt audio prediction web_search_options chat_template documents task"),
    **unless("max_dynamic_patch min_dynamic_patch"),
    **unless("echo continue_final_message use_audio_in_video", False),
    **unless("include_reasoning separate_reasoning stream_reasoning", True),
    **unless("tool_choice function_call", "none", "auto"),
    **unless("parallel_tool_calls", True, False),
    **unless("modalities", ["text"]),
    **unless("verbosity", "medium"),
}

OF_GENERATE = {
    **unless("features content_parts reasoning_parser_kwargs token_offsets reasoning_ended"),
    **unless("output_mode", "tokens"),
    **unless("flat_logprobs", False),
    **unless("skip_reading_prefix_cache", True, False),  # what vLLM sets with prompt_logprobs
}

OF_TOKENIZE = {
    **unless("chat_template chat_template_kwargs tools mm_processor_kwargs"),
    **unless("return_token_strs continue_final_message", False),
}
