"""Text to token ids and back, with the methods megatron's text generation controller calls."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.decoders import DecodeStream


class Decoder(Protocol):
    """Token ids to text, one after another; special tokens are no text.

    What was given out does not change any more. Where the bytes of the tokens are UTF-8, it is the text of all of them.
    """

    def step(self, token: int) -> str:
        """One more token; returns the text that is certain by now: nothing in the middle of a character."""
        ...

    def finish(self) -> str:
        """No more tokens come; returns the rest of the text."""
        ...


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    vocab_size: int
    bos: int | None
    eod: int | None

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def decoder(self) -> Decoder: ...

    def offsets(self, tokens: Sequence[int], text: str) -> list[int]: ...


class ByteTokenizer:
    """UTF-8 bytes as token ids 0..255, then ``bos`` and ``eod``; ids above decode to nothing.

    Args:
        vocab_size: The model's vocabulary, at least 258.
    """

    bos: int | None = 256
    eod: int | None = 257

    def __init__(self, vocab_size: int = 258) -> None:
        if vocab_size < 258:
            raise ValueError(f"vocab_size={vocab_size}: bytes and two special tokens need at least 258")
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        """Bytes of ``text``; a lone surrogate becomes '?'."""
        return list(text.encode("utf-8", errors="replace"))

    def detokenize(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode; bytes that are no UTF-8 become the replacement character, ids above 255 nothing."""
        return bytes(token for token in tokens if 0 <= token < 256).decode("utf-8", errors="replace")

    def decoder(self) -> Decoder:
        """For one text."""
        return _ByteDecoder()

    def offsets(self, tokens: Sequence[int], text: str) -> list[int]:
        """Character position in ``text`` at which each token begins."""
        return _offsets_by_decoding(self, tokens)


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer folder (``tokenizer.json``) or file.

    Args:
        path: Folder with ``tokenizer.json``, or the file.
        vocab_size: The model's vocabulary; the tokenizer's must fit into it.

    Raises:
        ValueError: There is no tokenizer at ``path``, or it has more ids than the model.
    """

    def __init__(self, path: str | Path, vocab_size: int | None = None) -> None:
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
            raise ValueError(f"the tokenizer has {ids} ids, the model's vocabulary only {vocab_size}")
        self.vocab_size = vocab_size or ids
        self.bos = self._special("<s>", "<|begin_of_text|>", "[CLS]", "<bos>")
        self.eod = self._special("</s>", "<|end_of_text|>", "<|endoftext|>", "<SPECIAL_11>", "[SEP]", "<eos>")

    def _special(self, *names: str) -> int | None:
        found = (self._tokenizer.token_to_id(name) for name in names)
        return next((token for token in found if token is not None), None)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text`` without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def detokenize(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ``tokens``."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def decoder(self) -> Decoder:
        """For one text."""
        return _HuggingFaceDecoder(self._tokenizer)

    def offsets(self, tokens: Sequence[int], text: str) -> list[int]:
        """Character position in ``text`` at which each token begins."""
        return _offsets_by_decoding(self, tokens)


class _ByteDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if 0 <= token < 256 else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _HuggingFaceDecoder:
    """The library's ``DecodeStream``, and what that lacks: the end of a text, and tokens that are no text at all."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # tokens of the last text that was given out
        self._held: list[int] = []  # tokens since
        self._stream = self._new_stream()

    def step(self, token: int) -> str:
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # a bare one: bytes that are no UTF-8 have changed how those before them read
            text, self._stream = self._text_of_held(), self._new_stream()
        if text is None:
            return ""
        self._context, self._held = self._held, []
        return str(text)

    def finish(self) -> str:
        return self._text_of_held()

    def _text_of_held(self) -> str:
        """How a token reads can depend on the one before it, such as its space; of bytes that are no UTF-8 all do."""
        before, whole = self._decode(self._context), self._decode(self._context + self._held)
        return whole.removeprefix(before) if whole.startswith(before) else self._decode(self._held)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    @staticmethod
    def _new_stream() -> DecodeStream:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(skip_special_tokens=True)


def load_tokenizer(path: str | Path | None, vocab_size: int) -> Tokenizer:
    """A Hugging Face tokenizer where ``path`` names one, else bytes."""
    return ByteTokenizer(vocab_size) if path is None else HuggingFaceTokenizer(path, vocab_size)


def common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    pairs = zip(a, b, strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _offsets_by_decoding(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    return [len(tokenizer.detokenize(tokens[:count])) for count in range(len(tokens))]
