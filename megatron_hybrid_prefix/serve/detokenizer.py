"""`TextStream`: turns tokens into text as they arrive, and ends at stop strings.

The text depends on the tokens alone, not on how many arrive at a time. So a streamed answer equals the unstreamed one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from megatron_hybrid_prefix.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNote:
    """One token of ``logprobs``.

    Attributes:
        token: Its id.
        text: Its text; ``bytes:\\xe2\\x82`` for a part of a character.
        data: Its bytes.
        log_prob: Its natural-log probability; None: the first token of a prompt has none.
        top: Notes of the likeliest tokens at its place, likeliest first.
        offset: Position of its text in the answer, in characters.
    """

    token: int
    text: str
    data: bytes
    log_prob: float | None
    top: tuple[TokenNote, ...] = ()
    offset: int = 0

    def named_by_id(self) -> TokenNote:
        """The note with ids in place of texts: ``token_id:5``."""
        return replace(self, text=f"token_id:{self.token}", top=tuple(other.named_by_id() for other in self.top))


def note_of(
    tokenizer: Tokenizer,
    token: int,
    log_prob: float | None,
    top: Mapping[int, float] | None = None,
    *,
    before: int | None,
) -> TokenNote:
    """The note of a token. ``top`` has the log-probs of the likeliest tokens by id, likeliest first.

    ``before`` is the token before it, None if it begins a text.
    """
    data = tokenizer.token_bytes(token, before)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    likeliest = tuple(note_of(tokenizer, *item, before=before) for item in (top or {}).items())
    return TokenNote(token=token, text=text, data=data, log_prob=log_prob, top=likeliest)


def prompt_notes(
    tokenizer: Tokenizer, tokens: Sequence[int], log_probs: Sequence[float], tops: Sequence[Mapping[int, float]]
) -> list[TokenNote]:
    """The notes of a prompt's tokens. The first token has no log-prob.

    Args:
        tokenizer: Decodes the tokens.
        tokens: The prompt.
        log_probs: Of each token after the first.
        tops: For each token after the first the log-probs of the likeliest tokens by id. May be empty.
    """
    decoder, notes = tokenizer.decoder(), []
    for number, token in enumerate(tokens):
        log_prob = log_probs[number - 1] if number else None
        top = tops[number - 1] if number and tops else None
        note = note_of(tokenizer, token, log_prob, top, before=decoder.last)
        decoder.step(token)
        notes.append(replace(note, offset=decoder.position))
    return notes


class TextStream:
    """The text of one answer.

    Args:
        tokenizer: Decodes the tokens.
        stop: Stop strings. The answer ends before the first one that is complete. Special tokens count there, too, by their names.
        min_tokens: Stop strings are looked for in the text after this many tokens.
        all_notes: Every token has a note, also without a log-prob, or if its text belongs to a stop string.
        before: The prompt's tokens, on which the text of the first ones depends.
        kept: Special tokens whose texts are in it are text, too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        all_notes: bool = False,
        before: Sequence[int] = (),
        kept: str = "",
    ) -> None:
        self._tokenizer, self._stop, self._kept = tokenizer, stop, kept
        self._to_come, self._all_notes = min_tokens, all_notes
        self._decoder = tokenizer.decoder(before, kept)
        self._held = ""  # decoded, but may be the start of a stop string
        self._shown: list[bool] = []  # which of these characters are the answer's, not a special token's
        self._length = 0  # characters decoded in all
        self._given = 0  # characters returned
        self._notes: list[TokenNote] = []
        self.stopped = False

    def feed(
        self, token: int, log_prob: float | None = None, top: Mapping[int, float] | None = None, *, silent: bool = False
    ) -> str:
        """Adds a token. Returns the text that is final by now.

        Args:
            token: Its id.
            log_prob: Its natural-log probability; None: the answer has no ``logprobs``.
            top: Log-probs of the likeliest tokens by id.
            silent: The token adds no text to the answer.
        """
        assert not self.stopped
        self._to_come -= 1
        before = self._decoder.last
        text = "" if silent else self._decoder.step(token)
        if log_prob is not None or self._all_notes:
            note = note_of(self._tokenizer, token, log_prob, top, before=before)
            self._notes.append(replace(note, offset=self._length if silent else self._decoder.position))
        name = self._tokenizer.special.get(token, "")
        is_hidden = name not in self._kept and any(name in word for word in self._stop)
        return "" if silent else self._take(text, name if is_hidden else "")

    def finish(self) -> str:
        """Ends the answer. Returns the rest of its text."""
        if self.stopped:
            return ""
        rest = self._take(self._decoder.finish())
        if not self.stopped:
            rest, self._held = rest + "".join(compress(self._held, self._shown)), ""
            self._given = self._length
        return rest

    def notes(self, *, last: bool = False) -> list[TokenNote]:
        """Tokens whose text has been returned; with ``last`` also trailing tokens without text."""
        count = len(self._notes)
        if not last or (self.stopped and not self._all_notes):
            count = next((i for i, note in enumerate(self._notes) if note.offset >= self._given), count)
        found, self._notes = self._notes[:count], self._notes[count:]
        return found

    def _take(self, new: str, special: str = "") -> str:
        self._length += len(new)
        text = self._held + new + special
        shown = self._shown + [True] * len(new) + [False] * len(special)
        words = self._stop if self._to_come < 0 else ()
        found = [(at + len(word), at) for word in words if (at := text.find(word)) >= 0]
        if found:
            self.stopped = True
            end = min(found)[1]
        else:
            end = len(text) - max((_overlap(text, word) for word in words), default=0)
        self._held, self._shown = "" if found else text[end:], shown[end:]
        out = "".join(compress(text[:end], shown))
        self._given += len(out)
        return out


def completion_logprobs(notes: Sequence[TokenNote]) -> dict[str, Any]:
    """``logprobs`` in the format of ``/v1/completions``."""
    return {
        "tokens": [note.text for note in notes],
        "token_logprobs": [note.log_prob for note in notes],
        "top_logprobs": [_by_text(note) for note in notes] if any(note.top for note in notes) else None,
        "text_offset": [note.offset for note in notes],
    }


def vllm_prompt_logprobs(
    text_of: Callable[[int], str],
    tokens: Sequence[int],
    log_probs: Sequence[float],
    tops: Sequence[Mapping[int, float]],
) -> list[dict[str, dict[str, Any]] | None]:
    """``prompt_logprobs`` in the format of vLLM: for each token of the prompt, itself and the likeliest ones, by id.

    Args:
        text_of: Text of a token.
        tokens: The prompt.
        log_probs: Of each token after the first.
        tops: Log-probs of the likeliest tokens by id, the likeliest first; the same positions. Empty: none are wanted.

    Returns:
        An entry per token; None for the first. ``rank`` is null if the token is not among the likeliest.
    """
    found: list[dict[str, dict[str, Any]] | None] = [None]
    texts: dict[int, str] = {}
    for at, (token, log_prob) in enumerate(zip(tokens[1:], log_probs, strict=True)):
        ranked = list(tops[at]) if tops else []
        entry = {token: (log_prob, ranked.index(token) + 1 if token in ranked else None)}
        for rank, other in enumerate(ranked, 1):
            entry.setdefault(other, (tops[at][other], rank))
        for each in entry:
            if each not in texts:
                texts[each] = text_of(each)
        found.append(
            {
                str(each): {"logprob": value, "rank": rank, "decoded_token": texts[each]}
                for each, (value, rank) in entry.items()
            }
        )
    return found


def _by_text(note: TokenNote) -> dict[str, float | None] | None:
    """The likeliest tokens and the chosen one by text; of several with the same text all but one by ``token_id:5``.

    The chosen token always has its own text, so ``top_logprobs[i][tokens[i]]`` is ``token_logprobs[i]``.
    """
    if note.log_prob is None:
        return None
    found: dict[str, float | None] = {}
    named = {note.text}
    for other in note.top:
        if other.token == note.token:
            found[note.text] = note.log_prob
        elif other.text in named:
            found[f"token_id:{other.token}"] = other.log_prob
        else:
            found[other.text] = other.log_prob
            named.add(other.text)
    return found | {note.text: note.log_prob}


def chat_logprobs(notes: Sequence[TokenNote]) -> dict[str, Any]:
    """``logprobs`` in the format of ``/v1/chat/completions``."""

    def entry(note: TokenNote) -> dict[str, Any]:
        return {"token": note.text, "logprob": note.log_prob, "bytes": list(note.data)}

    content = [entry(note) | {"top_logprobs": [entry(other) for other in note.top]} for note in notes]
    return {"content": content, "refusal": None}


def _overlap(text: str, word: str) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of ``word``."""
    return next((size for size in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-size:])), 0)
