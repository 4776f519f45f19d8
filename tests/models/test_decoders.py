"""The text of an answer is what it adds to the text of its prompt, with every decoder that tokenizers have."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_hybrid_prefix.serve.detokenizer import TextStream, prompt_notes
from megatron_hybrid_prefix.text.tokenizer import ByteTokenizer, Decoder, HuggingFaceTokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# Tokens that are whole characters together.
BYTES = [["Ġ"], ["a"], ["Ċ"], [*"âĤ¬"], ["Ġis"], ["ĠPa"], ["Ġâ", *"Ĥ¬"], ["ðŁ", "ĻĤð", *"ŁĻĤ"], [*"ï¿½"]]
SPM = [["▁"], ["▁▁"], ["▁is"], ["▁Pa"], ["ris"], [","], ["€"]]
SPM_BYTES = [*SPM, *([f"<0x{byte:02X}>" for byte in each.encode()] for each in "€🙂\n")]
WORDS = [["is"], ["Pa"], ["##ris"], [","], ["'"], ["s"], ["do"], ["n't"], ["."]]
OF_BYTES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS: dict[str, tuple[list[list[str]], Any]] = {
    "bytes: GPT-2, Llama 3, Qwen, tiktoken": (BYTES, decoders.ByteLevel()),
    "SentencePiece, first": (SPM, decoders.Metaspace(prepend_scheme="first", split=False)),
    "SentencePiece, always: T5": (SPM, decoders.Metaspace(prepend_scheme="always")),
    "SentencePiece, never": (SPM, decoders.Metaspace(prepend_scheme="never")),
    "SentencePiece, bytes: Llama 2": (SPM_BYTES, decoders.Sequence([*OF_BYTES, decoders.Strip(" ", 1, 0)])),
    "SentencePiece, bytes: Gemma": (SPM_BYTES, decoders.Sequence(OF_BYTES)),
    "WordPiece: BERT": (WORDS, decoders.WordPiece()),
    "WordPiece, as it is": (WORDS, decoders.WordPiece(cleanup=False)),
    "ends of words: GPT": ([["is</w>"], ["Pa"], ["ris</w>"], [",</w>"]], decoders.BPEDecoder()),
    "CTC": ([["<pad>"], ["|"], ["a"], ["b"], ["is"]], decoders.CTC()),
    "a mark left out": ([["is_"], ["Pa"], ["_"]], decoders.Strip("_", 0, 1)),
    "fused": ([["is "], ["Pa"]], decoders.Fuse()),
    "none": ([["is"], ["Pa"]], None),
}
SPM_KINDS = [name for name in DECODERS if name.startswith("SentencePiece")]


class Sample:
    """A tokenizer with one of the decoders, and texts of it in tokens."""

    def __init__(self, kind: str, path: Any) -> None:
        pieces, decoder = DECODERS[kind]
        names = list(dict.fromkeys([*SPECIAL, "<unk>", *ALPHABET * (pieces is BYTES), *chain(*pieces)]))
        self.ids = {name: at for at, name in enumerate(names)}
        fast = Tokenizer(models.WordLevel(self.ids, unk_token="<unk>"))
        fast.add_special_tokens(SPECIAL)
        if decoder is not None:
            fast.decoder = decoder
        fast.save(str(path / "tokenizer.json"))
        self.tokenizer = HuggingFaceTokenizer(path, len(names) + 2)  # the last ids have no token
        parts = [self.tokens(*piece) for piece in [*pieces, *([name] for name in SPECIAL)]] + [[len(names)]]
        self.texts = st.lists(st.sampled_from(parts), max_size=24).map(lambda texts: [*chain(*texts)])

    def tokens(self, *names: str) -> list[int]:
        return [self.ids[name] for name in names]

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.detokenize(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(request.param, tmp_path_factory.mktemp("decoder"))


def streamed(tokenizer: Any, prompt: list[int], answer: list[int], *stop: str) -> tuple[str, list[Any], bool]:
    """The text of an answer, its notes, and whether a stop text ended it."""
    stream, text = TextStream(tokenizer, stop, before=prompt), ""
    for token in answer:
        text += "" if stream.stopped else stream.feed(token, -1.0, {token: -1.0})
    return text + stream.finish(), stream.notes(last=True), stream.stopped


@pytest.mark.parametrize("sample", DECODERS, indirect=True)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_answer_is_what_it_adds_to_its_prompt(sample: Sample, data: st.DataObject) -> None:
    prompt, answer = data.draw(sample.texts), data.draw(sample.texts)
    text, notes, _ = streamed(sample.tokenizer, prompt, answer)
    assert sample.text(prompt) + text == sample.text([*prompt, *answer])
    assert all(a.offset <= b.offset <= len(text) for a, b in pairwise(notes))
    if "<pad>" not in sample.ids:  # CTC: a token that is repeated adds nothing
        notes = [note for note in notes if note.token not in sample.tokenizer.special]
        assert b"".join(note.data for note in notes) == text.encode() == b"".join(note.top[0].data for note in notes)
        assert all("bytes:" in note.text or text[note.offset :].startswith(note.text) for note in notes)


@pytest.mark.parametrize("sample", SPM_KINDS, indirect=True)
def test_the_first_space_of_an_answer(sample: Sample) -> None:
    prompt, answer = sample.tokens("<s>", "▁is", "<|im_start|>"), sample.tokens("▁Pa", "ris", "▁Pa")
    text, notes, _ = streamed(sample.tokenizer, prompt, answer)
    assert (text, [(note.text, note.offset) for note in notes]) == (" Paris Pa", [(" Pa", 0), ("ris", 3), (" Pa", 6)])
    assert streamed(sample.tokenizer, prompt, answer, " Pa") == ("", [], True)
    alone, notes, _ = streamed(sample.tokenizer, prompt[:1], answer)
    assert alone == sample.text(answer) == "".join(note.text for note in notes)
    shown = prompt_notes(sample.tokenizer, [*prompt, *answer], [-1.0] * 5, [])
    assert "".join(note.text for note in shown) == f"<s>{sample.text(prompt)}<|im_start|>{text}"
    assert [note.offset - shown[2].offset for note in shown[2:]] == [0, 0, 3, 6]


def test_bytes_that_are_no_text_or_begin_in_the_prompt() -> None:
    tokens = list("x🙂".encode())
    for at in (2, 3, 4):
        assert streamed(ByteTokenizer(), tokens[:at], [*tokens[at:], 97])[0] == "🙂a"
    assert streamed(ByteTokenizer(), [*tokens, 0xF0], [97])[0] == "a"
    text, notes, _ = streamed(ByteTokenizer(), [], [0xF0, 0x9F, 97, 0xC3, 0xA9])
    assert (text, [note.offset for note in notes]) == ("\ufffdaé", [0, 0, 1, 2, 2])
    decoded: list[int] = []
    decoder = Decoder(lambda ids: decoded.append(len(ids)) or ByteTokenizer().detokenize(ids), lambda _: True)
    assert "".join(decoder.step(0x80) for _ in range(2000)) + decoder.finish() == "\ufffd" * 2000
    assert max(decoded) < 600, "not all of them at each step"


@pytest.mark.parametrize("sample", ["SentencePiece, bytes: Llama 2"], indirect=True)
def test_a_special_token_in_a_stop_text(sample: Sample) -> None:
    answer = sample.tokens("▁is", "▁Pa", "<|im_start|>", "ris", "<0xE2>", "▁is")
    whole = " is Paris\ufffd is"
    for stop, text in (
        ("<|im_start|>", " is Pa"),
        (" Pa<|im_start|>", " is"),
        ("<|im_start|>ris", " is Pa"),
        ("Paris", " is "),  # special tokens are not in the text
        ("</s>", whole),
    ):
        assert streamed(sample.tokenizer, answer, answer, stop)[::2] == (text, text != whole)
