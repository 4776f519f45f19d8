"""`ScoredPrompts`: the log-probs of prompts, kept for later prompts and taken by them.

Requests that want the log-probs of their prompt compute them anyway, and megatron brings them to the host at the end of the
step. They are kept in the cache (``index/scores.py``), beside the blocks that the step published. Only the next logits of
boundaries are copied for this, in the stream of the forward, before megatron's own copy. So nothing waits for them, and steps
without such requests copy nothing. Where bits have to be equal, their log-probs are kept instead: the host would round others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.index.prompt_scores import Promise
from megatron_hybrid_prefix.index.requests import Admission, StepPlan

if TYPE_CHECKING:
    from megatron_hybrid_prefix.mcore.context.request import PrefixRequest
    from megatron_hybrid_prefix.upstream.context import ContextSeam

TopTokens = tuple[
    list[float], list[int]
]  # log-probs and ids of the likeliest tokens at a position, the likeliest first


class Scores(NamedTuple):
    """Log-probs of consecutive tokens.

    Attributes:
        log_probs: Of each token: float32.
        top_values: Of the likeliest tokens at its position, ``top_n`` per token: float32.
        top_ids: Their ids: int32.
    """

    log_probs: array[float]
    top_values: array[float]
    top_ids: array[int]

    @classmethod
    def empty(cls) -> Scores:
        """Of no tokens."""
        return cls(array("f"), array("f"), array("i"))

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        return sum(len(values) * values.itemsize for values in self)

    def add(self, log_prob: float, values: Sequence[float], ids: Sequence[int]) -> None:
        """Adds a token."""
        self.log_probs.append(log_prob)
        self.top_values.extend(values)
        self.top_ids.extend(ids)

    def part(self, start: int, end: int, top_n: int) -> Scores:
        """Tokens [start, end) of scores with ``top_n`` likeliest tokens per position."""
        tops = slice(start * top_n, end * top_n)
        return Scores(self.log_probs[start:end], self.top_values[tops], self.top_ids[tops])


class ScoredPrompt:
    """One prompt whose log-probs are wanted, from its admission on.

    Args:
        chain: Keys of its blocks.
        tokens: (tokens,) int64 on the host.
        top_n: Likeliest tokens wanted per position.
        admission: Its admission.
        keeps_log_probs: As of `ScoredPrompts`.

    Attributes:
        chain: See above.
        top_n: See above.
        next_logits: Captured ones, or log-probs, by position, (vocabulary,) on the host. Valid once the step's log-probs are.
        promises: What the last step promised.
    """

    def __init__(
        self, chain: KeyChain, tokens: torch.Tensor, top_n: int, admission: Admission, *, keeps_log_probs: bool
    ) -> None:
        self.chain, self.top_n, self._keeps_log_probs = chain, top_n, keeps_log_probs
        self._tokens, self._resume, self._kept = tokens, admission.resume_tokens, admission.scores
        self.next_logits: dict[int, torch.Tensor] = {}
        self.promises: list[Promise] = []
        self._scores = Scores.empty()  # of tokens from `_resume` on
        self._lost = False  # whether a step's log-probs are missing in them
        if not self._resume:  # nothing says how likely the first token is
            self._scores.add(float("nan"), [float("nan")] * top_n, [-1] * top_n)

    def take(self) -> tuple[list[float], list[TopTokens]]:
        """Log-probs of the prompt's tokens after the first that the cache says, up to the first computed one, included.

        Call it once, after the first forward. The list of likeliest tokens is empty without ``top_n``.

        Raises:
            CacheCorruptionError: They were promised and never filled.
        """
        kept, self._kept = self._kept, ()
        if not kept:
            return [], []
        log_probs: list[float] = []
        tops: list[TopTokens] = []
        for item in kept[:-1]:
            scores: Scores = item.value
            log_probs += scores.log_probs
            if self.top_n:
                width = item.top_n
                starts = range(0, len(scores.top_ids), width)
                tops += (
                    (scores.top_values[at : at + self.top_n].tolist(), scores.top_ids[at : at + self.top_n].tolist())
                    for at in starts
                )
        after = kept[-1].value
        if not self._keeps_log_probs:
            after = after.float().log_softmax(-1)
        best = after.topk(self.top_n)
        values, ids = best.values.tolist(), best.indices.tolist()
        own = float(after[int(self._tokens[self._resume])])
        self._scores.add(own, values, ids)
        log_probs.append(own)
        tops.append((values, ids))
        return log_probs[1:], tops[1:] if self.top_n else []

    @property
    def waits_for_promises(self) -> bool:
        """Whether what the cache says of this prompt was promised by another request's step, and is not there yet."""
        return not all(item.is_filled for item in self._kept)

    def lose_step(self) -> None:
        """A step's log-probs will not come: those of later steps would be taken for them, so this prompt adds no more."""
        self._lost = True

    def add(self, log_probs: Sequence[float], tops: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Adds a step's log-probs: for each computed position those of the next token. Returns whether they are complete."""
        if self._lost:
            return False
        left = (
            len(self._tokens) - self._resume - len(self._scores.log_probs)
        )  # the last one is of the answer's first token
        if self.top_n and len(tops) < min(left, len(log_probs)):
            self._lost = True
            return False
        self._scores.log_probs.extend(log_probs[:left])
        if self.top_n and tops[:left]:
            values, ids = (torch.stack(each).cpu() for each in zip(*tops[:left], strict=True))
            self._scores.top_values.frombytes(values.to(torch.float32).numpy().tobytes())
            self._scores.top_ids.frombytes(ids.to(torch.int32).numpy().tobytes())
        return True

    def block(self, end_tokens: int, block_tokens: int) -> Scores | None:
        """Scores of the block that ends at a position; None if they are not there."""
        end = end_tokens - self._resume
        if end > len(self._scores.log_probs):
            return None
        return self._scores.part(end - block_tokens, end, self.top_n)


class ScoredPrompts:
    """See the module.

    Args:
        context: The context.
        cache: Its cache.
        keeps_log_probs: Whether `ContextSeam.log_probs_of` computes log-probs, which are then kept in place of next logits.
    """

    def __init__(self, context: ContextSeam, cache: HybridPrefixCache, *, keeps_log_probs: bool = False) -> None:
        self._context, self._cache, self._keeps_log_probs = context, cache, keeps_log_probs
        self._published: dict[int, ScoredPrompt] = {}  # prompts of the last forward, by request id

    def begin(self, known: PrefixRequest, tokens: torch.Tensor, admission: Admission) -> None:
        """A request that wants the log-probs of its prompt is admitted."""
        assert known.top_n is not None
        known.scored = ScoredPrompt(known.chain, tokens, known.top_n, admission, keeps_log_probs=self._keeps_log_probs)

    def capture(self, requests: Iterable[PrefixRequest], logits: torch.Tensor) -> None:
        """Begin to copy the next logits that this forward adds. Call it before megatron copies the step's log-probs.

        Args:
            requests: Requests with a plan in this forward.
            logits: (1, tokens, vocabulary) of the forward, on the device. The tokens of rows that decode come first.
        """
        wanted: list[tuple[ScoredPrompt, StepPlan, list[int]]] = []
        for request in requests:
            plan, scored = request.plan, request.scored
            if plan is not None and scored is not None and request.write:
                scored.next_logits.clear()
                positions = self._cache.scores.wanted_logits(scored.chain, plan.start_tokens, plan.end_tokens)
                if positions:
                    wanted.append((scored, plan, positions))
        if not wanted:
            return
        first = self._first_tokens()
        count = sum(len(positions) for _, _, positions in wanted)
        dtype = torch.float32 if self._keeps_log_probs else logits.dtype
        copies = iter(torch.empty((count, logits.shape[-1]), dtype=dtype, pin_memory=logits.is_cuda))
        for scored, plan, positions in wanted:
            for position in positions:
                own = scored.next_logits[position] = next(copies)
                # Views alone: an index made on the host would be copied to the device.
                row = logits[0, first[plan.request_id] + position - 1 - plan.start_tokens]
                log_probs = self._context.log_probs_of(row[None])
                own.copy_(row if log_probs is None else log_probs[0], non_blocking=True)

    def publish(self, known: PrefixRequest, plan: StepPlan, *, cached: bool) -> None:
        """A request's forward succeeded. Promise the log-probs of the blocks that it filled.

        Args:
            known: The request.
            plan: Its plan.
            cached: Whether what the forward computed was published.
        """
        scored = known.scored
        if scored is None:
            return
        self._published[plan.request_id] = scored
        if cached:
            scored.promises = self._cache.scores.promise(
                scored.chain, plan.start_tokens, plan.end_tokens, top_n=scored.top_n, captured=scored.next_logits.keys()
            )

    def without_promised(self, requests: Iterable[PrefixRequest]) -> set[int]:
        """Requests whose first forward is over, and whose kept log-probs were promised by a step that never filled them.

        That step's bookkeeping raised. These requests must start over.
        """
        found = set()
        for request in requests:
            if request.plan is not None and request.scored is not None and request.scored.waits_for_promises:
                request.scored.lose_step()
                found.add(request.plan.request_id)
        return found

    def published(self, request_id: int) -> ScoredPrompt | None:
        """The prompt of a request in the last forward; None if its log-probs are not wanted or its load failed."""
        return self._published.get(request_id)

    def collect(
        self,
        request_id: int,
        log_probs: Sequence[float] | None,
        tops: Sequence[tuple[torch.Tensor, torch.Tensor]] | None,
    ) -> None:
        """Fill what the last forward promised for a request.

        Args:
            request_id: The request.
            log_probs: For each token of the forward the log-prob of the next one.
            tops: The same: values and ids of the likeliest tokens, on the host.
        """
        scored = self._published.pop(request_id, None)
        if scored is None:
            return
        if log_probs is None:
            scored.lose_step()
        complete = log_probs is not None and scored.add(log_probs, tops or ())
        captured = scored.next_logits
        filled: list[tuple[Promise, Any, int]] = []
        for promise in scored.promises:
            if promise.is_logits:
                logits = captured[
                    promise.position_tokens
                ].clone()  # those are pinned, and one tensor for the whole step
                filled.append((promise, logits, logits.nbytes))
            elif complete and (part := scored.block(promise.position_tokens, self._cache.block_tokens)) is not None:
                filled.append((promise, part, part.size_bytes))
        self._cache.scores.fill(scored.chain, filled)
        self._cache.scores.withdraw(scored.promises)  # of those that are left
        scored.promises, scored.next_logits = [], {}

    def forget_step(self) -> None:
        """The last forward's log-probs will not come."""
        for scored in self._published.values():
            scored.lose_step()
            self._cache.scores.withdraw(scored.promises)
            scored.promises, scored.next_logits = [], {}
        self._published.clear()

    def _first_tokens(self) -> dict[int, int]:
        """Index of the first token of each row in the forward, by request id."""
        context = self._context
        rows = slice(context.paused_request_count, context.total_request_count)
        ids, lengths = context.request_ids[rows].tolist(), context.request_query_lengths[rows].tolist()
        found, at = {}, 0
        for request_id, length in zip(ids, lengths, strict=True):
            found[request_id] = at
            at += length
        return found
