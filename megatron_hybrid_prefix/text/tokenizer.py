"""Tokenizers, with the methods that megatron's text generation controller calls."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from megatron_hybrid_prefix.text.hf_tokens import end_token_ids, token_texts

# The number of tokens that end at or before a character of their text.
TokensBefore = Callable[[int], int]


class Tokenizer(Protocol):
    """The tokenizer interface that the engine uses.

    Attributes:
        vocab_size: Number of ids.
        bos: The token that begins a text; None: there is none.
        eod: The token that ends an answer; None: there is none.
        end_tokens: Other tokens that end an answer.
        special: Texts of the tokens that a `Decoder` leaves out, by id.
    """

    vocab_size: int
    bos: int | None
    eod: int | None
    end_tokens: tuple[int, ...]

    @property
    def special(self) -> Mapping[int, str]: ...

    def tokenize(self, text: str) -> list[int]: ...

    def encode_prompt(self, text: str) -> list[int]: ...

    def locate(self, text: str, *, special: bool) -> tuple[list[int], TokensBefore]: ...

    def detokenize(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def token_bytes(self, token: int, before: int | None = None) -> bytes: ...

    def decoder(self, before: Sequence[int] = (), kept: str = "") -> Decoder: ...

    def offsets(self, tokens: Sequence[int], text: str) -> list[int]: ...


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Visible Latin-1 characters stand for themselves, the other bytes for the characters from 256 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
_BROKEN = "\ufffd"  # what bytes decode to that are no character, or not yet
_CONTEXT_TOKENS = 16  # more than one character has
_MOST_HELD = 256  # so many tokens that never end with a character are no text
# Of a tokenizer.json with nothing beside it that says more.
_USUAL_BEGINS = ("<s>", "<|begin_of_text|>", "[CLS]", "<bos>")
_USUAL_ENDS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<SPECIAL_11>", "[SEP]", "<eos>")


class ByteTokenizer:
    """Token ids 0..255 are UTF-8 bytes, then follow ``bos`` and ``eod``. Higher ids decode to nothing.

    Args:
        vocab_size: Vocabulary size of the model, at least 258.

    Raises:
        ValueError: ``vocab_size`` is too small.
    """

    bos: int | None = 256
    eod: int | None = 257
    end_tokens: tuple[int, ...] = ()
    special: Mapping[int, str] = {}

    def __init__(self, vocab_size: int = 258) -> None:
        if vocab_size < 258:
            raise ValueError(f"vocab_size={vocab_size}: must be at least 258 (256 bytes and two special tokens)")
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        """The UTF-8 bytes of ``text``. A lone surrogate becomes '?'."""
        return list(text.encode("utf-8", errors="replace"))

    def encode_prompt(self, text: str) -> list[int]:
        """The same: no special token is added."""
        return self.tokenize(text)

    def locate(self, text: str, *, special: bool) -> tuple[list[int], TokensBefore]:
        """Tokens of ``text``, and where they are in it. ``special`` changes nothing."""
        return self.tokenize(text), lambda character: len(self.tokenize(text[:character]))

    def detokenize(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ``tokens``. Invalid UTF-8 becomes the replacement character; ids above 255 become nothing."""
        return bytes(token for token in tokens if 0 <= token < 256).decode("utf-8", errors="replace")

    def token_bytes(self, token: int, before: int | None = None) -> bytes:
        """The bytes of a token, which may be a part of a character."""
        return bytes([token]) if 0 <= token < 256 else b""

    def decoder(self, before: Sequence[int] = (), kept: str = "") -> Decoder:
        """A new decoder, for the text after these tokens. ``kept`` changes nothing."""
        return Decoder(self.detokenize, lambda token: 0 <= token < 256, before)

    def offsets(self, tokens: Sequence[int], text: str) -> list[int]:
        """Character position in ``text`` at which each token begins."""
        return _offsets_by_decoding(self, tokens)


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer, from ``tokenizer.json``.

    ``eod`` and ``end_tokens`` are all the end tokens that the files beside it name (`hf_tokens`), first the tokenizer's own.
    If no file names one, ``eod`` is the first token of the vocabulary with a usual name; ``bos`` likewise if there are no files.

    Args:
        path: A folder with ``tokenizer.json``, or that file.
        vocab_size: Vocabulary size of the model. The tokenizer must not have more ids.
        end_tokens: More end tokens.
        generation_config: Whether ``generation_config.json`` counts.

    Raises:
        ValueError: There is no valid tokenizer at ``path``, it or an end token has an id that the model lacks, or a file beside
            it cannot be read.
    """

    def __init__(
        self,
        path: str | Path,
        vocab_size: int | None = None,
        *,
        end_tokens: Sequence[int] = (),
        generation_config: bool = True,
    ) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise ValueError(f"no tokenizer at {path}: expected a folder with tokenizer.json")
        try:
            self._tokenizer = FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for malformed files
            raise ValueError(f"{file} is not a Hugging Face tokenizer: {error}") from error
        ids = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if vocab_size is not None and ids > vocab_size:
            raise ValueError(f"the tokenizer has {ids} ids, but the model's vocabulary has only {vocab_size}")
        self.vocab_size = vocab_size or ids
        self._tokenizer.no_padding()  # a file can say how batches were padded and cut when it was saved
        self._tokenizer.no_truncation()
        if (post := self._tokenizer.post_processor) is not None:  # `locate` needs offsets that count blanks, too
            post.__setstate__(post.__getstate__().replace(b'"trim_offsets":true', b'"trim_offsets":false'))
            self._tokenizer.post_processor = post
        folder = file.parent
        begins, own_ends = token_texts(folder, "bos_token"), token_texts(folder, "eos_token") or ()
        self.bos = self._first(_USUAL_BEGINS if begins is None else begins)
        named = (self._tokenizer.token_to_id(text) for text in own_ends)
        ends = [token for token in named if token is not None]
        ends += [*end_token_ids(folder, generation_config=generation_config), *end_tokens]
        if vocab_size is not None and max(ends, default=0) >= vocab_size:
            raise ValueError(f"{folder}: eos_token_id {max(ends)} is not in the vocabulary of {vocab_size}")
        ends = list(dict.fromkeys(ends))
        self.eod: int | None = ends[0] if ends else self._first(_USUAL_ENDS)
        self.end_tokens: tuple[int, ...] = tuple(ends[1:])

    def _first(self, texts: Iterable[str]) -> int | None:
        found = (self._tokenizer.token_to_id(text) for text in texts)
        return next((token for token in found if token is not None), None)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``, without special tokens."""
        return self._ids(text, special=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer's post-processor adds.

        A text that has the begin-of-text token itself does not get it twice.
        """
        tokens = self._ids(text, special=True)
        return tokens[self._bos_twice(tokens) :]

    def locate(self, text: str, *, special: bool) -> tuple[list[int], TokensBefore]:
        """Tokens of ``text``, and where they are in it; a third dearer than tokens alone.

        Args:
            text: The text.
            special: Whether the tokens are those of `encode_prompt`; else of `tokenize`.
        """
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=special)
        tokens = list(encoding.ids)
        twice = self._bos_twice(tokens) if special else 0

        def end(at: int) -> int:
            return (encoding.token_to_chars(at) or (0, 0))[1]  # the post-processor's tokens are nowhere

        return tokens[twice:], lambda before: bisect_right(range(twice, len(tokens)), before, key=end)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        # `encode` would hold the interpreter's lock.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def _bos_twice(self, tokens: list[int]) -> int:
        return int(self.bos is not None and tokens[:2] == [self.bos] * 2)

    def detokenize(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ``tokens``."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    @cached_property
    def special(self) -> Mapping[int, str]:
        """Texts of the special tokens, by id."""
        return {
            id_: added.content for id_, added in self._tokenizer.get_added_tokens_decoder().items() if added.special
        }

    def token_bytes(self, token: int, before: int | None = None) -> bytes:
        """The bytes of a token, which may be a part of a character.

        Args:
            token: Its id.
            before: The token before it; None: it begins a text, where many tokenizers leave out a space.
        """
        if token in self.special:
            return self.special[token].encode("utf-8")
        text, name = self.detokenize([token]), self._tokenizer.id_to_token(token)
        if before is not None:
            first, both = self.detokenize([before]), self.detokenize([before, token])
            text = (both.startswith(first) and both[len(first) :]) or text
        if "\ufffd" not in text or name is None:
            return text.encode("utf-8")
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):  # SentencePiece, for characters that it does not know
            return bytes.fromhex(byte[1])
        values = [_BYTE_OF_CHARACTER.get(character) for character in name]
        known = [value for value in values if value is not None]
        return bytes(known) if len(known) == len(values) else text.encode("utf-8")

    def decoder(self, before: Sequence[int] = (), kept: str = "") -> Decoder:
        """A new decoder, for the text after these tokens; special ones have text if ``kept`` has it."""

        def has_text(token: int) -> bool:
            return self.special.get(token, "") in kept and self._tokenizer.id_to_token(token) is not None

        return Decoder(self.detokenize, has_text, before)

    def offsets(self, tokens: Sequence[int], text: str) -> list[int]:
        """Character position in ``text`` at which each token begins."""
        return _offsets_by_decoding(self, tokens)


class Decoder:
    """Decodes token ids to text, one token at a time. Special tokens decode to nothing.

    What a token adds to a text depends on the tokens around it: the first one may lose a space, several may be one character. So
    some tokens before it are decoded with it, and what those alone decode to is taken off. Text that was returned is final. If the
    tokens are valid UTF-8, all pieces are, together, what they add to the text of the tokens before.

    Args:
        decode: Token ids to text.
        has_text: Whether a token is one for ``decode``, not a special one or none at all.
        before: Tokens before the text, such as the prompt.

    Attributes:
        position: Where the last token's text begins, in characters from the start.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], has_text: Callable[[int], bool], before: Sequence[int] = ()
    ) -> None:
        self._decode, self._has_text = decode, has_text
        self._context = self._last_of(before)
        self._before = decode(self._context)  # its text
        self._held: list[int] = []  # tokens after it,
        self._pending = ""  # and what they add
        self._length = self.position = 0

    @property
    def last(self) -> int | None:
        """The last token that is no special one."""
        return next(reversed(self._held or self._context), None)

    def step(self, token: int) -> str:
        """Adds a token. Returns the text that is complete by now; it never ends inside a character."""
        is_new = self._has_text(token)
        if is_new:
            self._held.append(token)
        before, text = self._pending, self._text_of_held() if is_new else self._pending
        is_open = (not text or text.endswith(_BROKEN)) and len(self._held) < _MOST_HELD
        self.position = self._length + common_tokens(before.rstrip(_BROKEN) if is_open else before, text)
        if is_open or not is_new:
            self._pending = text
            return ""
        self._length += len(text)
        self._context, self._held, self._pending = self._held, [], ""
        self._before = self._decode(self._context)
        return text

    def finish(self) -> str:
        """Ends the text. Returns what is left of it."""
        return self._pending

    def _text_of_held(self) -> str:
        whole = self._decode(self._context + self._held)
        common = common_tokens(self._before, whole)
        # Bytes that are no text can change the text of those before, which is out.
        return whole[common:] if common >= len(self._before.rstrip(_BROKEN)) else self._decode(self._held)

    def _last_of(self, tokens: Sequence[int]) -> list[int]:
        found = list(islice(filter(self._has_text, reversed(tokens)), _CONTEXT_TOKENS))[::-1]
        starts = range(min(4, len(found)))  # the first tokens may be the end of a character
        return next((found[at:] for at in starts if not self._decode(found[at:]).startswith(_BROKEN)), found)


def load_tokenizer(path: str | Path | None, vocab_size: int, **options: Any) -> Tokenizer:
    """The Hugging Face tokenizer at ``path``, with options of its class; None: the byte tokenizer."""
    return ByteTokenizer(vocab_size) if path is None else HuggingFaceTokenizer(path, vocab_size, **options)


def prompt_tokens(tokenizer: Any, text: str, *, add_bos: bool = False) -> list[int]:
    """Tokens of a text prompt, as the tokenizer begins it: a tokenizer without ``encode_prompt`` with ``tokenize``.

    Args:
        tokenizer: A `Tokenizer`, or one of megatron.
        text: The prompt.
        add_bos: Whether it begins with ``bos`` even if the tokenizer does not begin it so; never twice.

    Raises:
        ValueError: ``add_bos``, but the tokenizer has no such token.
    """
    return begun(tokenizer, getattr(tokenizer, "encode_prompt", tokenizer.tokenize)(text), add_bos=add_bos)


def begun(tokenizer: Any, tokens: list[int], *, add_bos: bool) -> list[int]:
    """``tokens``, which with ``add_bos`` begin with ``bos``, once. Raises ValueError as `prompt_tokens`."""
    if not add_bos:
        return tokens
    if tokenizer.bos is None:
        raise ValueError("the tokenizer has no begin-of-text token to add")
    return tokens if tokens[:1] == [tokenizer.bos] else [tokenizer.bos, *tokens]


def other_ends(tokenizer: Any) -> tuple[int, ...]:
    """``end_tokens`` of a `Tokenizer`; of a tokenizer without them, none."""
    return tuple(getattr(tokenizer, "end_tokens", ()))


def common_tokens(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common prefix of two lists of tokens, or of two texts."""
    if a == b[: len(a)]:
        return len(a)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _offsets_by_decoding(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    return [len(tokenizer.detokenize(tokens[:count])) for count in range(len(tokens))]
