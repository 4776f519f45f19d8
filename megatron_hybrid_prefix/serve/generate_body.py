"""Body of ``/inference/v1/generate``: token ids in, token ids out, as vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from megatron_hybrid_prefix.serve.bodies import Body, Integers, TopCount
from megatron_hybrid_prefix.serve.fields import OF_ALL, OF_GENERATE, Ignored, Unless

# On ids, without a text and without routing. Clients of RL send them along with other values than `OF_ALL` has.
_WITHOUT_EFFECT = ("skip_special_tokens", "include_stop_str_in_output", "routed_experts_prompt_start")


class GenerateBody(Body):
    """With the fields of ``sampling_params`` beside it, where they may also come."""

    neutral: ClassVar[Mapping[str, Unless]] = {
        name: rule for name, rule in (OF_ALL | OF_GENERATE).items() if name not in _WITHOUT_EFFECT
    }

    token_ids: Integers = Field(description="the prompt")
    sampling_params: dict[str, Any] = Field({}, description="other fields of this table; none with two values")
    logprobs: TopCount | None = Field(
        None, description="log-probs of the ids, and of this many of the most likely ones"
    )
    return_token_ids: bool = Field(False, description="`prompt_token_ids`, too; in a stream with the first chunk")

    skip_special_tokens: Ignored = None
    detokenize: Ignored = None
    output_kind: Ignored = None
    output_text_buffer_length: Ignored = None
    include_stop_str_in_output: Ignored = None
    routed_experts_prompt_start: Ignored = None

    @property
    def top_tokens(self) -> int | None:
        """See `Body`."""
        return self.logprobs
