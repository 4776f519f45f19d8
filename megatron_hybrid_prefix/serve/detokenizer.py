"""`TextStream`: turns tokens into text as they arrive, and ends at stop strings.

The text depends on the tokens alone, not on how many arrive at a time. So a streamed answer equals the unstreamed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hybrid_prefix.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNote:
    """One token of ``logprobs``. ``offset`` is the position of its text in the answer, in characters."""

    text: str
    log_prob: float
    top: dict[str, float]
    offset: int


class TextStream:
    """The text of one answer.

    Args:
        tokenizer: Decodes the tokens.
        stop: Stop strings. The answer ends before the first one that is complete.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._decoder = tokenizer.decoder()
        self._held = ""  # decoded, but may be the start of a stop string
        self._length = 0  # characters decoded in all
        self._given = 0  # characters returned
        self._notes: list[TokenNote] = []
        self.stopped = False

    def feed(self, token: int, log_prob: float | None = None, top: dict[str, float] | None = None) -> str:
        """Adds a token. Returns the text that is final by now."""
        assert not self.stopped
        if log_prob is not None:
            text = self._tokenizer.detokenize([token])
            self._notes.append(TokenNote(text=text, log_prob=log_prob, top=top or {}, offset=self._length))
        return self._take(self._decoder.step(token))

    def finish(self) -> str:
        """Ends the answer. Returns the rest of its text."""
        if self.stopped:
            return ""
        rest = self._take(self._decoder.finish())
        if not self.stopped:
            rest, self._held = rest + self._held, ""
            self._given = self._length
        return rest

    def notes(self, *, last: bool = False) -> list[TokenNote]:
        """Tokens whose text has been returned; with ``last`` also trailing tokens without text."""
        count = len(self._notes)
        if self.stopped or not last:
            count = next((i for i, note in enumerate(self._notes) if note.offset >= self._given), count)
        found, self._notes = self._notes[:count], self._notes[count:]
        return found

    def _take(self, new: str) -> str:
        self._length += len(new)
        text = self._held + new
        found = [(at + len(word), at) for word in self._stop if (at := text.find(word)) >= 0]
        if found:
            self.stopped = True
            self._held, out = "", text[: min(found)[1]]
        else:
            held = max((_overlap(text, word) for word in self._stop), default=0)
            self._held, out = text[len(text) - held :], text[: len(text) - held]
        self._given += len(out)
        return out


def completion_logprobs(notes: Sequence[TokenNote], base_offset: int = 0) -> dict[str, Any]:
    """``logprobs`` in the format of ``/v1/completions``."""
    return {
        "tokens": [note.text for note in notes],
        "token_logprobs": [note.log_prob for note in notes],
        "top_logprobs": [note.top for note in notes] if any(note.top for note in notes) else None,
        "text_offset": [base_offset + note.offset for note in notes],
    }


def chat_logprobs(notes: Sequence[TokenNote]) -> dict[str, Any]:
    """``logprobs`` in the format of ``/v1/chat/completions``."""

    def entry(text: str, log_prob: float) -> dict[str, Any]:
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode("utf-8"))}

    content = [
        entry(note.text, note.log_prob) | {"top_logprobs": [entry(*item) for item in note.top.items()]}
        for note in notes
    ]
    return {"content": content, "refusal": None}


def _overlap(text: str, word: str) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of ``word``."""
    return next((size for size in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-size:])), 0)
