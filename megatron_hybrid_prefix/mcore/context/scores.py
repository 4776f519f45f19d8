"""`ScoredPrompts`: the log-probs of prompts, kept for later prompts and taken by them.

Requests that want the log-probs of their prompt compute them anyway, and megatron brings them to the host at the end of the
step. They are kept (``requests/scores.py``) with the blocks that the step published, by their keys. Only the next logits of
boundaries are copied for this, in the stream of the forward, before megatron's own copy. So nothing waits for them, and steps
without such requests copy nothing. Where bits have to be equal, their log-probs are kept instead: the host would round others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import torch

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.mcore.context.request import PrefixRequest
from megatron_hybrid_prefix.mcore.context.scored_prompt import ScoredPrompt
from megatron_hybrid_prefix.metrics import NotReused, PrefixStats
from megatron_hybrid_prefix.requests.book import StepPlan
from megatron_hybrid_prefix.requests.matcher import Reuse
from megatron_hybrid_prefix.requests.scores import Kept, ScoreTable


class ScoredPrompts:
    """The prompts of a `HybridPrefixContext` whose log-probs are wanted, and the table of those that are kept."""

    def __init__(self, context: Any, cache: HybridPrefixCache, table: ScoreTable) -> None:
        self._context, self._cache, self._table = context, cache, table
        self._lost_tokens = 0
        # Prompts of the last forward, by request id: those whose log-probs are wanted, and whose loads did not fail.
        self.of_step: dict[int, ScoredPrompt] = {}

    def begin(self, known: PrefixRequest, tokens: torch.Tensor, reuse: Reuse) -> None:
        """A request that wants the log-probs of its prompt is admitted."""
        is_lost = not known.counted_tokens and reuse.reason is not NotReused.MEMORY
        assert known.top_n is not None
        known.scored = ScoredPrompt(
            known.chain,
            tokens,
            known.top_n,
            resume_tokens=reuse.resume_tokens,
            kept=self._table.take(known.chain, reuse.resume_tokens, known.top_n),
            keeps_log_probs=self._context.is_exact,
            lost_tokens=reuse.state_tokens - reuse.resume_tokens if is_lost else 0,
        )

    def capture(self, in_step: Collection[tuple[PrefixRequest, StepPlan]], logits: torch.Tensor) -> None:
        """Begin to copy the next logits that this forward adds. Call it before megatron copies the step's log-probs.

        Args:
            in_step: Requests in this forward, and their plans.
            logits: (1, tokens, vocabulary) of the forward, on the device. The tokens of rows that decode come first.
        """
        wanted: list[tuple[ScoredPrompt, StepPlan, list[int]]] = []
        writing = {
            request.chain.keys[checkpoint.position_tokens // self._cache.block_tokens - 1]
            for request, plan in in_step
            for checkpoint in plan.checkpoints
        }
        for request, plan in in_step:
            scored = request.scored
            if scored is not None and request.write:
                scored.next_logits.clear()
                positions = self._table.wanted_logits(scored.chain, plan, self._cache.node, writing)
                if positions:
                    wanted.append((scored, plan, positions))
        if not wanted:
            return
        first = self._first_tokens()
        count = sum(len(positions) for _, _, positions in wanted)
        dtype = torch.float32 if self._context.is_exact else logits.dtype
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
        self.of_step[plan.request_id] = scored
        self._lost_tokens += scored.lost_tokens
        scored.lost_tokens = 0
        if cached:
            scored.promises = self._table.promise(
                scored.chain, plan, self._cache.node, top_n=scored.top_n, captured=scored.next_logits.keys()
            )

    def collect(
        self,
        request_id: int,
        log_probs: Sequence[float] | None,
        tops: Sequence[tuple[torch.Tensor, torch.Tensor]] | None,
    ) -> None:
        """Keep a request's log-probs of the last forward, if they are of its prompt: fill what that forward promised.

        Args:
            request_id: The request.
            log_probs: For each token of the forward the log-prob of the next one; None: they will not come.
            tops: The same: values and ids of the most likely tokens, on the host.
        """
        scored = self.of_step.pop(request_id, None)
        if scored is None:
            return
        if log_probs is None:
            scored.lose_step()
        complete = log_probs is not None and scored.add(log_probs, tops or ())
        captured = scored.next_logits
        filled: list[tuple[Kept, Any, int]] = []
        for promise in scored.promises:
            if promise.is_logits:
                # Those are pinned, and one tensor for the whole step.
                logits = captured[promise.position_tokens].clone()
                filled.append((promise, logits, logits.nbytes))
            elif complete and (part := scored.block(promise.position_tokens, self._cache.block_tokens)) is not None:
                filled.append((promise, part, part.size_bytes))
        self._table.fill(scored.chain, filled)
        self._table.withdraw(scored.promises)  # of those that are left
        scored.promises, scored.next_logits = [], {}

    def forget_step(self) -> None:
        """The last forward's log-probs will not come."""
        for scored in self.of_step.values():
            scored.lose_step()
            self._table.withdraw(scored.promises)
            scored.promises, scored.next_logits = [], {}
        self.of_step.clear()

    def count(self, stats: PrefixStats) -> None:
        """Set what the statistics say of log-probs of prompts."""
        stats.lost_tokens_no_scores, stats.scores_evictions = self._lost_tokens, self._table.evictions
        stats.scores_bytes_used, stats.scores_bytes_budget = self._table.used_bytes, self._table.budget_bytes

    def check(self) -> None:
        """Check what is kept, for tests. Raises CacheCorruptionError."""
        self._table.check({node.key for node in self._cache.nodes()})

    def _first_tokens(self) -> dict[int, int]:
        """Index of the first token of each row in the forward, by request id."""
        context = self._context
        rows = slice(context.paused_request_count, context.total_request_count)
        ids, lengths = context.request_ids[rows].tolist(), context.request_query_lengths[rows].tolist()
        return dict(zip(ids, accumulate(lengths, initial=0), strict=False))
