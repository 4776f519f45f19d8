"""`RowSampling`: megatron's sampling, and the options of single requests that megatron does not have.

Megatron samples a step before the engine records its tokens, and records them before it samples the next step. That holds
for legacy and asynchronous scheduling. So the requests' own lists have all tokens before the one to sample, but its drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, override

import numpy as np
import torch

from megatron_hybrid_prefix.ops.elementwise import replace_wrong_logits
from megatron_hybrid_prefix.sampling import SamplingOptions
from megatron_hybrid_prefix.upstream.names import Sampling

if TYPE_CHECKING:
    from megatron_hybrid_prefix.mcore.engine.record import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """The request of one row of a step.

    Attributes:
        options: Its options.
        prompt: (tokens,) int64 on the host.
        answer: Tokens generated so far, without drafts.
        drafts_before: Drafts between the answer and the token to sample. Penalties do not see them.
        barred: The request's end tokens, as long as ``min_tokens`` bars them.
    """

    options: SamplingOptions
    prompt: torch.Tensor
    answer: Sequence[int]
    drafts_before: int = 0
    barred: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Position in the sequence of the token to sample."""
        return len(self.prompt) + len(self.answer) + self.drafts_before

    @classmethod
    def of(cls, record: RequestRecord, drafts_before: int = 0) -> RowRequest:
        """The request of a record with options, preempted or not."""
        assert record.options is not None
        answer = _answer_of(record)
        is_barred = len(answer) + drafts_before < record.options.min_tokens
        is_barred &= record.grammar is None or not record.grammar.ends_now
        return cls(
            options=record.options,
            prompt=record.requests[0].prompt_tokens,
            answer=answer,
            drafts_before=drafts_before,
            barred=record.ends if is_barred else (),
        )


def _answer_of(record: RequestRecord) -> Sequence[int]:
    first, *others = record.requests
    if not others:
        return first.generated_tokens
    return [token for part in record.requests for token in part.generated_tokens]


class RowSampling(Sampling):
    """Samples with megatron's backend, then again the rows whose requests have `SamplingOptions`.

    Args:
        backend: Megatron's.
        generator: Noise of requests without a seed. All ranks of a replica draw from it alike.
        source: Knows which requests these are; is told of rows that are not finite.
    """

    def __init__(self, backend: Any, generator: torch.Generator, source: Any) -> None:
        self._backend, self._generator, self._source = backend, generator, source

    @override
    def sample_kernel(
        self,
        logits: torch.Tensor,
        n: int,
        context: Any,
        *args: Any,
        gather_indices: torch.Tensor | None = None,
        token_to_request_index: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Sampling options that megatron does not have; rows that are not finite are replaced, and the source is told."""
        kwargs |= {"gather_indices": gather_indices, "token_to_request_index": token_to_request_index}
        wrong = replace_wrong_logits(logits, gather_indices, n)
        if not context.num_speculative_tokens or token_to_request_index is not None:  # else these become drafts
            self._source.wrong_rows = wrong
        if self._source.records and any(record.grammar for record in self._source.records.values()):  # without drafts
            logits = logits[:n] if gather_indices is None else logits[gather_indices[:n].long()]
            logits, gather_indices = self._masked(logits, [*range(n)]), None
            kwargs["gather_indices"] = None
        tokens: torch.Tensor = self._backend.sample_kernel(logits, n, context, *args, **kwargs)
        drafts, source = context.num_speculative_tokens, self._source
        if (drafts and token_to_request_index is None) or not source.records:
            return tokens  # which become drafts, or which are right
        ids = source.request_ids()
        rows = [(request_id, 0) for request_id in ids]
        if drafts:  # requests that decode come first, and have a row for each draft, too
            decodes = context.num_decode_requests
            rows[:decodes] = [(request_id, ahead) for request_id in ids[:decodes] for ahead in range(drafts + 1)]
        for row, (request_id, drafts_before) in enumerate(rows[:n]):
            record = source.records.get(request_id)
            if record is None:
                continue
            if record.options is not None:
                megatrons, least = record.options.are_megatrons_later, record.options.min_tokens
                if megatrons and not least:
                    continue
                request = RowRequest.of(record, drafts_before)
                if megatrons and not request.barred:
                    continue
                own = logits[row] if gather_indices is None else logits[gather_indices[row : row + 1].long()][0]
                tokens[row] = sample(own, request, self._generator)
        return tokens

    @override
    def log_probs_kernel(
        self, logits: torch.Tensor, context: Any, *, token_to_request_index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sampling options that megatron does not have."""
        source = self._source
        if source.records:
            ids = source.request_ids()
            of_rows = [*range(len(ids))] if token_to_request_index is None else token_to_request_index.tolist()
            logits = self._masked(logits, of_rows)
        raw = context.log_probs_of(logits) if getattr(context, "is_exact", False) else None
        log_probs: torch.Tensor = (
            self._backend.log_probs_kernel(logits, context, token_to_request_index=token_to_request_index)
            if raw is None
            else raw
        )
        if source.records:
            for row, index in enumerate(of_rows):
                record = source.records.get(ids[index])
                if record is not None and record.options is not None:
                    if raw is not None and record.options.are_the_models:
                        continue
                    request = RowRequest.of(record)
                    if of_rows[row + 1 : row + 2] == [index]:  # the next token is one of the prompt
                        request = replace(request, barred=())
                    log_probs[row] = processed_log_probs(logits[row], request)
        return log_probs

    def _masked(self, logits: torch.Tensor, of_rows: Sequence[int]) -> torch.Tensor:
        """The logits, or a copy with -inf where a request's grammar does not go on, if there is one.

        The forward was launched before, so the device runs it while the host makes the masks.

        Args:
            logits: (>= rows, vocabulary).
            of_rows: The active request of each row. The last one of a request is that of the token to sample.
        """
        ids, width, masks = self._source.request_ids(), logits.shape[-1], {}
        for row, index in enumerate(of_rows):
            record = self._source.records.get(ids[index])
            if record is not None and record.grammar is not None and index not in of_rows[row + 1 : row + 2]:
                masks[row] = record.grammar.mask(_answer_of(record))
        if not masks:
            return logits
        # Bytes: a bit takes a byte of memory, not more.
        words = torch.from_numpy(np.stack([*masks.values()]).view(np.uint8)).pin_memory()
        words = words.to(logits.device, non_blocking=True)
        barred = ((words[:, :, None] & _bits(logits.device)) == 0).flatten(1)[:, :width]
        if barred.shape[1] < width:  # a padded vocabulary
            barred = torch.nn.functional.pad(barred, (0, width - barred.shape[1]), value=True)
        if len(masks) == len(logits):
            return logits.masked_fill(barred, float("-inf"))
        rows = torch.tensor([*masks]).to(logits.device, non_blocking=True)
        return logits.index_copy(0, rows, logits[rows].masked_fill(barred, float("-inf")))


@cache
def _bits(device: torch.device) -> torch.Tensor:
    """(8,) uint8, those of a byte. A constant: it is made once."""
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8).to(device)


def sample(logits: torch.Tensor, request: RowRequest, generator: torch.Generator) -> torch.Tensor:
    """Samples one token.

    Args:
        logits: (vocabulary,): the model's.
        request: Options and tokens so far.
        generator: Noise of requests without a seed.

    Returns:
        () int64.
    """
    options = request.options
    scores = adjusted(logits, request)
    if options.is_greedy:
        return scores.argmax()
    scores = filtered(scores, options)
    if options.seed is None:
        return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)[0]
    return (scores + gumbel(options.seed, request.position, len(scores)).to(scores.device)).argmax()


def processed_log_probs(logits: torch.Tensor, request: RowRequest) -> torch.Tensor:
    """Log-probs of the distribution that `sample` draws from: (vocabulary,) float64."""
    scores = adjusted(logits, request)
    if request.options.is_greedy:
        return torch.full_like(scores, float("-inf")).index_fill_(0, scores.argmax(), 0)
    return filtered(scores, request.options).log_softmax(dim=-1)


def adjusted(logits: torch.Tensor, request: RowRequest) -> torch.Tensor:
    """Logits with bias and penalties, and -inf for barred tokens: (vocabulary,) float64."""
    options, scores = request.options, logits.to(torch.float64, copy=True)
    if request.barred:  # nothing that follows makes -inf likely
        barred = [token for token in request.barred if token < len(scores)]
        places = torch.tensor(barred, dtype=torch.int64).to(scores.device, non_blocking=True)  # so few are read at once
        scores.index_fill_(0, places, float("-inf"))
    if options.logit_bias:
        ids, values = zip(*options.logit_bias, strict=True)
        scores[torch.tensor(ids).to(scores.device)] += torch.tensor(values, dtype=torch.float64).to(scores.device)
    if not options.has_penalties:
        return scores
    if options.repetition_penalty != 1:
        seen = torch.cat([request.prompt, torch.tensor(request.answer, dtype=torch.int64)]).unique()
        seen = seen[seen < len(scores)].to(scores.device)
        old = scores[seen]
        scores[seen] = torch.where(old > 0, old / options.repetition_penalty, old * options.repetition_penalty)
    if request.answer:
        ids, counts = torch.tensor(request.answer, dtype=torch.int64).unique(return_counts=True)
        penalties = options.frequency_penalty * counts.to(torch.float64) + options.presence_penalty
        scores[ids.to(scores.device)] -= penalties.to(scores.device)
    return scores


def filtered(scores: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """Logits after temperature and filters; dropped tokens have -inf. The most likely token always stays."""
    scores = scores / options.temperature
    if options.min_p > 0:
        least = scores.max() + torch.tensor(options.min_p, dtype=scores.dtype).log().to(scores.device)
        scores = scores.masked_fill(scores < least, float("-inf"))
    if 0 < options.top_k < len(scores):
        least = scores.topk(options.top_k).values[-1]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if options.top_p < 1:
        ordered, ids = scores.sort(descending=True, stable=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        dropped = before > options.top_p
        dropped[0] = False
        scores = scores.masked_fill(torch.zeros_like(dropped).scatter(0, ids, dropped), float("-inf"))
    return scores


def gumbel(seed: int, position: int, size: int) -> torch.Tensor:
    """Gumbel noise, which depends on the arguments alone: (size,) float64 on the host.

    The argmax of logits plus this noise is a sample of their softmax.
    """
    digest = blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    uniform = torch.rand(size, dtype=torch.float64, generator=generator).clamp_min(torch.finfo(torch.float64).tiny)
    return -(-uniform.log()).log()


def end_tokens_of(params: Any) -> tuple[int, ...]:
    """All end tokens of a request, without repetition; empty: only its length ends it.

    Megatron knows one for each request. More are an attribute of the sampling parameters:
    ``sampling_params.add_attributes({"stop_token_ids": [7, 9]})``. As ``termination_id``, such a token is the answer's last one.

    Args:
        params: Megatron's ``SamplingParams``, with its ``termination_id`` set.
    """
    first = params.termination_id
    more = getattr(params, "stop_token_ids", None) or ()
    return tuple(dict.fromkeys(token for token in (first, *more) if token is not None and token >= 0))


def reject_ends(drafts: torch.Tensor, ends: Sequence[tuple[int, ...]]) -> None:
    """Set drafts that are an end token to -1, so that they and all drafts after them are rejected. Does not wait for the device.

    Megatron ends an answer if its newest token is ``termination_id``. It does not look at the drafts that a step accepted before
    that token.

    If the draft was right, the step samples the same token in its place, and the answer ends there. KV, states and log-probs of the drafts
    after it go as those of any rejected draft.

    Args:
        drafts: (rows, drafts) integer, on the device. Is changed.
        ends: For each row: the request's end tokens.
    """
    most = max(map(len, ends), default=0)
    if most:
        padded = torch.tensor([[*row, *[-1] * (most - len(row))] for row in ends], dtype=torch.int64)
        tokens = padded.to(drafts.device, non_blocking=True)  # so few bytes the driver reads at once
        drafts.masked_fill_((drafts[:, :, None] == tokens[:, None, :]).any(dim=-1), -1)
