"""Records of requests: the parts of a preempted request, and how a request starts over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_hybrid_prefix.sampling import SamplingOptions
from megatron_hybrid_prefix.text.grammar import AnswerGrammar
from megatron_hybrid_prefix.upstream.names import DynamicInferenceRequest, DynamicInferenceRequestRecord


class RequestRecord(DynamicInferenceRequestRecord):
    """A request's record; on preemption it keeps what megatron's record drops.

    Attributes:
        options: Sampling options of the request that megatron does not have, or None.
        ends: Its end tokens; empty: only its length ends it.
        grammar: What its answer must match, or None.
        continued: Called with a request and the one that continues it.
    """

    options: SamplingOptions | None = None
    ends: tuple[int, ...] = ()
    grammar: AnswerGrammar | None = None
    continued: Callable[[Any, Any], None] = staticmethod(lambda old, new: None)

    def checkpoint(self, tokenizer: Any = None) -> None:
        """Keeps attributes of the sampling parameters, stop words and cache settings; merging works."""
        old = self[-1]
        super().checkpoint(tokenizer)
        new = self[-1]
        for name, value in vars(old.sampling_params).items():
            if name not in vars(new.sampling_params):
                setattr(new.sampling_params, name, value)
        new.stop_word_ids = old.stop_word_ids
        # Both needless from ee3864907a (0.20).
        new.block_size_tokens = old.block_size_tokens
        new.enable_prefix_caching = old.enable_prefix_caching
        new.status = old.status
        new.num_cached_tokens = old.num_cached_tokens
        if old.generated_tokens:
            # The old part has the log-probs of the prompt.
            new.sampling_params.skip_prompt_log_probs = True
            new.sampling_params.return_prompt_top_n_logprobs = False
        else:
            # The request starts over. Drop the old part: its half-filled lists would be merged.
            new.prompt = old.prompt
            new.events = old.events + new.events
            del self.requests[-2]
        for name in ("generated_log_probs", "generated_top_n_logprobs"):
            if getattr(old, name) is not None and getattr(new, name) is None:
                setattr(new, name, [])
        self.continued(old, new)

    def merge(self, tokenizer: Any = None) -> DynamicInferenceRequest:
        """Drops the remaining prompt tokens, so that the reply does not carry them; routes are of the tokens that are left."""
        merged = super().merge(tokenizer)
        merged.remaining_prompt_tokens = None
        if merged.routing_indices is not None:
            length = len(merged.prompt_tokens) + len(merged.generated_tokens) - 1
            merged.routing_indices = merged.routing_indices[:length]
        return merged


def compute_again(request: DynamicInferenceRequest) -> None:
    """Reset the request: its prompt is computed from the start. ``num_cached_tokens`` stays that of the first time."""
    request.remaining_prompt_tokens = request.prompt_tokens
    request.finished_chunk_token_count = 0


def forget_chunks(requests: Iterable[DynamicInferenceRequest]) -> None:
    """Reset those of the requests whose prompts are partly computed, their log-probs included."""
    for request in requests:
        if request.finished_chunk_token_count and not request.generated_tokens:
            compute_again(request)
            request.prompt_log_probs = request.generated_log_probs = None
            request.prompt_top_n_logprobs = request.generated_top_n_logprobs = None


@contextmanager
def whole_answer(request: DynamicInferenceRequest, earlier: Sequence[DynamicInferenceRequest]) -> Iterator[None]:
    """Inside the block, ``request.generated_tokens`` is the whole answer. Tokens cut off inside are cut off their parts.

    ``request`` is the latest part; ``earlier`` are the parts before it, oldest first.
    """
    before = [token for part in earlier for token in part.generated_tokens]
    request.generated_tokens = before + request.generated_tokens
    try:
        yield
    finally:
        left = request.generated_tokens
        request.generated_tokens = left[len(before) :]
    surplus = len(before) - len(left)  # tokens to cut off the earlier parts
    for part in reversed(earlier):
        if surplus > 0:
            own = len(part.generated_tokens)
            part.generated_tokens = part.generated_tokens[: max(0, own - surplus)]
            surplus -= own
