"""`ScoredPrompt`: the log-probs of one prompt, those that the cache said and those that its forwards computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.requests.scores import Kept

# Log-probs and ids of the most likely tokens at a position, the most likely first.
TopTokens = tuple[list[float], list[int]]


class Scores(NamedTuple):
    """Log-probs of consecutive tokens.

    Attributes:
        log_probs: (tokens,): of each token.
        top_values: (tokens, top_n): of the most likely tokens at its position.
        top_ids: (tokens, top_n): their ids.
    """

    log_probs: NDArray[np.float32]
    top_values: NDArray[np.float32]
    top_ids: NDArray[np.int32]

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        return sum(values.nbytes for values in self)

    def part(self, start: int, end: int) -> Scores:
        """Tokens [start, end), in memory of their own."""
        tokens = slice(start, end)
        return Scores(self.log_probs[tokens].copy(), self.top_values[tokens].copy(), self.top_ids[tokens].copy())


class ScoredPrompt:
    """One prompt whose log-probs are wanted, from its admission on.

    Args:
        chain: Keys of its blocks.
        tokens: (tokens,) int64 on the host.
        top_n: Most likely tokens wanted per position.
        resume_tokens: Tokens that it skips.
        kept: What the cache says of them (`ScoreTable.take`).
        keeps_log_probs: Whether log-probs are kept in place of next logits.
        lost_tokens: Tokens that it computes only because their log-probs are not kept.

    Attributes:
        lost_tokens: Those that are not counted yet.
        next_logits: Captured ones, or log-probs, by position, (vocabulary,) on the host. Valid once the step's log-probs are.
        promises: What the last step promised.
    """

    def __init__(
        self,
        chain: KeyChain,
        tokens: torch.Tensor,
        top_n: int,
        *,
        resume_tokens: int,
        kept: tuple[Kept, ...],
        keeps_log_probs: bool,
        lost_tokens: int,
    ) -> None:
        self.chain, self.top_n, self._keeps_log_probs = chain, top_n, keeps_log_probs
        self._tokens, self._resume, self._kept, self.lost_tokens = tokens, resume_tokens, kept, lost_tokens
        self.next_logits: dict[int, torch.Tensor] = {}
        self.promises: list[Kept] = []
        self._lost = False  # whether a step's log-probs are missing in `_scores`
        first = int(not resume_tokens)  # nothing says how likely the first token is
        unknown, no_ids = np.full((first, top_n), np.nan, np.float32), np.full((first, top_n), -1, np.int32)
        self._scores = Scores(np.full(first, np.nan, np.float32), unknown, no_ids)  # of tokens from `_resume` on

    def take(self) -> tuple[list[float], list[TopTokens]]:
        """Log-probs of the prompt's tokens after the first that the cache says, up to the first computed one, included.

        Call it once, after the first forward. The list of most likely tokens is empty without ``top_n``.

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
            log_probs += scores.log_probs.tolist()
            values, ids = (of_tokens[:, : self.top_n].tolist() for of_tokens in (scores.top_values, scores.top_ids))
            tops += zip(values, ids, strict=True)
        after = kept[-1].value
        if not self._keeps_log_probs:
            after = after.float().log_softmax(-1)
        best = after.topk(self.top_n)
        own = float(after[int(self._tokens[self._resume])])
        self._append([own], best.values[None], best.indices[None])
        log_probs.append(own)
        tops.append((best.values.tolist(), best.indices.tolist()))
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
        # The last one is of the answer's first token.
        count = min(len(self._tokens) - self._resume - len(self._scores.log_probs), len(log_probs))
        if self.top_n and len(tops) < count:
            self._lost = True
            return False
        if count:
            none = torch.empty(count, 0)
            values, ids = map(torch.stack, zip(*tops[:count], strict=True)) if self.top_n else (none, none)
            self._append(log_probs[:count], values, ids)
        return True

    def _append(self, log_probs: Sequence[float], values: torch.Tensor, ids: torch.Tensor) -> None:
        """Adds tokens: (tokens,), and their most likely ones, (tokens, top_n) each."""
        tops = values.to("cpu", torch.float32).numpy(), ids.to("cpu", torch.int32).numpy()
        more = np.asarray(log_probs, np.float32), *tops
        self._scores = Scores(*map(np.concatenate, zip(self._scores, more, strict=True)))

    def block(self, end_tokens: int, block_tokens: int) -> Scores | None:
        """Scores of the block that ends at a position; None if they are not there."""
        end = end_tokens - self._resume
        if end > len(self._scores.log_probs):
            return None
        return self._scores.part(end - block_tokens, end)
