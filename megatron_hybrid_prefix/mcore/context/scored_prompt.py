"""`ScoredPrompt`: the log-probs of one prompt, those that the cache said and those that its forwards computed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_hybrid_prefix.index.keys import KeyChain
from megatron_hybrid_prefix.requests.scores import Kept

# Log-probs and ids of the most likely tokens at a position, the most likely first.
TopTokens = tuple[list[float], list[int]]


class Scores(NamedTuple):
    """Log-probs of consecutive tokens.

    Attributes:
        log_probs: Of each token: float32.
        top_values: Of the most likely tokens at its position, ``top_n`` per token: float32.
        top_ids: Their ids: int32.
    """

    log_probs: array[float]
    top_values: array[float]
    top_ids: array[int]

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
        """Tokens [start, end) of scores with ``top_n`` most likely tokens per position."""
        tops = slice(start * top_n, end * top_n)
        return Scores(self.log_probs[start:end], self.top_values[tops], self.top_ids[tops])


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
        self._scores = Scores(array("f"), array("f"), array("i"))  # of tokens from `_resume` on
        self._lost = False  # whether a step's log-probs are missing in them
        if not self._resume:  # nothing says how likely the first token is
            self._scores.add(float("nan"), [float("nan")] * top_n, [-1] * top_n)

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
        # The last one is of the answer's first token.
        left = len(self._tokens) - self._resume - len(self._scores.log_probs)
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
