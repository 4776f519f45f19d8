"""Which log-probs of a step each request gets, and under which names.

If one request of a step asks for log-probs, megatron computes them for all requests, and gives them to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_hybrid_prefix.mcore.context.scored_prompt import ScoredPrompt
from megatron_hybrid_prefix.text.tokenizer import Tokenizer
from megatron_hybrid_prefix.upstream.names import DynamicInferenceRequest, DynamicInferenceRequestRecord

TopN = dict[int, list[tuple[torch.Tensor, torch.Tensor]]]


class StepLogProbs:
    """A step's log-probs, without those that no request asked for.

    Args:
        requests: Requests of the step, in the order of its rows.
        selected: By row: for each computed token the log-prob of the next token.
        top_n: By row: for each computed token the values and ids of the most likely next tokens. Rows may be missing.
        chunked_id: Id of the request whose prompt continues after this step; -1: none.

    Attributes:
        selected: As given, with None for rows that get no log-probs.
        top_n: As given, without rows that get no log-probs.
    """

    def __init__(
        self,
        requests: Sequence[DynamicInferenceRequest],
        selected: Sequence[list[float] | None],
        top_n: TopN | None,
        chunked_id: int,
    ) -> None:
        self.selected: list[list[float] | None] = list(selected)
        self.top_n = None if top_n is None else dict(top_n)
        for row, request in enumerate(requests):
            params = request.sampling_params
            # Log-probs of the prompt are skipped, and this step computes no token of the answer.
            no_answer = request.request_id == chunked_id or params.num_tokens_to_generate == 0
            if not params.return_log_probs or (params.skip_prompt_log_probs and no_answer):
                self.selected[row] = None
                if self.top_n is not None:
                    self.top_n.pop(row, None)
        # Megatron appends a row's entries to the request's lists, first those of the prompt. It may omit the last entries.
        self._rows = []
        for row, tokens in (self.top_n or {}).items():
            of_prompt, of_answer = requests[row].prompt_top_n_logprobs, requests[row].generated_top_n_logprobs
            self._rows.append((requests[row], len(of_prompt or ()), len(of_answer or ()), tokens))

    def name_all_tokens(self, tokenizer: Tokenizer) -> None:
        """Repair entries in which several tokens have the same text: megatron keeps the least likely of them.

        The most likely token is named by its text, the others ``token_id:5``. If the request's sampling parameters have
        ``top_n_by_id``, all tokens are named so. Call it after megatron has distributed the rows.
        """
        for request, prompt_count, generated_count, tokens in self._rows:
            entries = (request.prompt_top_n_logprobs or [])[prompt_count:]
            entries += (request.generated_top_n_logprobs or [])[generated_count:]
            by_id = getattr(request.sampling_params, "top_n_by_id", False)
            for entry, (values, ids) in zip(entries, tokens, strict=False):
                if len(entry) == len(ids) and not by_id:
                    continue
                entry.clear()
                entry.update(_named(values.tolist(), ids.tolist(), tokenizer, by_id=by_id))


def add_cached(
    requests: Sequence[DynamicInferenceRequest], prompts: Mapping[int, ScoredPrompt], tokenizer: Tokenizer
) -> None:
    """Give requests of a step the log-probs of prompt tokens that they skipped. Call it before megatron adds the step's."""
    for request in requests:
        prompt = prompts.get(request.request_id)
        if prompt is None or prompt.waits_for_promises:  # these start over
            continue
        log_probs, tops = prompt.take()
        if log_probs:
            request.prompt_log_probs = log_probs
            by_id = getattr(request.sampling_params, "top_n_by_id", False)
            if tops:
                request.prompt_top_n_logprobs = [_named(*top, tokenizer, by_id=by_id) for top in tops]


def _named(values: Sequence[float], ids: Sequence[int], tokenizer: Tokenizer, *, by_id: bool) -> dict[str, float]:
    """Log-probs by token, the most likely first. A text that is there already, or each one with ``by_id``: ``token_id:5``."""
    entry: dict[str, float] = {}
    for value, token in zip(values, ids, strict=True):
        text = "" if by_id else tokenizer.detokenize([token])
        entry[f"token_id:{token}" if by_id or text in entry else text] = value
    return entry


def cut_to_tokens(record: DynamicInferenceRequestRecord) -> None:
    """Drop log-probs of generated tokens that were cut off with a stop word."""
    for part in record.requests:
        for log_probs in (part.generated_log_probs, part.generated_top_n_logprobs):
            if log_probs:
                del log_probs[len(part.generated_tokens) :]
