"""Text to token ids and back: bytes, and a Hugging Face folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from megatron_hybrid_prefix.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer, prompt_tokens

SPECIAL = ["<s>", "</s>"]
SENTENCE = "the cache keeps what the model has read, and the model reads what the cache lacks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-pair tokenizer trained on one sentence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([SENTENCE] * 8, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.tokenize(text)
    assert tokens == list(text.encode())
    assert tokenizer.detokenize(tokens) == text


@given(st.lists(st.integers(0, 1000)))
def test_bytes_decode_anything_and_skip_ids_that_are_no_bytes(tokens: list[int]) -> None:
    tokenizer = ByteTokenizer(1001)
    only_bytes = [token for token in tokens if token < 256]
    assert tokenizer.detokenize(tokens) == bytes(only_bytes).decode(errors="replace")


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_offsets_of_bytes_are_positions_of_whole_characters(text: str) -> None:
    tokenizer = ByteTokenizer()
    offsets = tokenizer.offsets(tokenizer.tokenize(text), text)
    starts = [position for position, character in enumerate(text) for _ in character.encode()]
    firsts = [i for i, position in enumerate(starts) if i == 0 or starts[i - 1] != position]
    assert len(offsets) == len(starts)
    assert [offsets[i] for i in firsts] == [starts[i] for i in firsts]


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    assert ByteTokenizer().tokenize("a\ud800b") == list(b"a?b")


def test_bytes_need_room_for_the_special_tokens() -> None:
    assert (ByteTokenizer().bos, ByteTokenizer().eod) == (256, 257)
    with pytest.raises(ValueError, match="vocab_size=257"):
        ByteTokenizer(257)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_hugging_face_round_trip(folder: Path, text: str) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_hugging_face_merges_and_special_tokens(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder, vocab_size=512)
    tokens = tokenizer.tokenize(SENTENCE)
    assert len(tokens) < len(SENTENCE) / 2
    assert tokenizer.vocab_size == 512
    assert (tokenizer.bos, tokenizer.eod) == (0, 1)
    assert tokenizer.detokenize([0, *tokens, 1], skip_special_tokens=True) == SENTENCE
    assert tokenizer.detokenize([0, *tokens, 1]).startswith("<s>")
    offsets = tokenizer.offsets(tokens, SENTENCE)
    assert offsets[0] == 0 and offsets == sorted(offsets)


def test_load_tokenizer_picks_by_path(folder: Path) -> None:
    assert isinstance(load_tokenizer(None, 512), ByteTokenizer)
    assert isinstance(load_tokenizer(folder, 512), HuggingFaceTokenizer)
    assert isinstance(load_tokenizer(folder / "tokenizer.json", 512), HuggingFaceTokenizer)


def test_errors_say_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer at .*: expected a folder with tokenizer\.json"):
        load_tokenizer(tmp_path / "absent", 512)
    with pytest.raises(ValueError, match="no tokenizer at"):
        load_tokenizer(tmp_path, 512)
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ValueError, match="is not a Hugging Face tokenizer"):
        load_tokenizer(tmp_path, 512)
    with pytest.raises(ValueError, match=r"the tokenizer has \d+ ids, but the model's vocabulary has only 260"):
        load_tokenizer(folder, 260)


# -- what the files beside tokenizer.json say ---------------------------------------------------------------------------


def special_folder(path: Path, *, bos: str | None = "<s>", post: bool = True, **files: Any) -> Path:
    """A tokenizer of words with special tokens, as Llama's (``post``: it begins a text with <s>) or Qwen's, and JSON files."""
    names = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|endoftext|>", "<|eot|>", "Hello", "world"]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(names[:6])
    if post:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    files = {"tokenizer_config": {"bos_token": bos}} | files
    for name, data in files.items():
        if data is not None:
            (path / f"{name}.json").write_text(json.dumps(data))
    return path


ADDED = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "special": True}
ENDS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "no file": ({"tokenizer_config": None}, [2]),
    "no file says": ({}, [2]),
    "config.json": ({"config": {"eos_token_id": 4}}, [4]),
    "a list in config.json": ({"config": {"eos_token_id": [5, 4]}}, [5, 4]),
    "nested in config.json": ({"config": {"text_config": {"eos_token_id": [3]}}}, [3]),
    "nested and not": ({"config": {"eos_token_id": 4, "text_config": {"eos_token_id": 3}}}, [4, 3]),
    "null": ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": None}}, [2]),
    "tokenizer_config.json": ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, [3]),
    "an added token": ({"tokenizer_config": {"eos_token": ADDED}}, [3]),
    "special_tokens_map.json": ({"special_tokens_map": {"eos_token": ADDED}}, [3]),
    "generation_config.json": ({"generation_config": {"eos_token_id": [4, 5]}}, [4, 5]),
    "all": (
        {
            "tokenizer_config": {"eos_token": "<|im_end|>"},
            "special_tokens_map": {"eos_token": "<|eot|>"},
            "generation_config": {"eos_token_id": [4, 3]},
            "config": {"eos_token_id": 2},
        },
        [3, 5, 4, 2],
    ),
    "a name that the vocabulary lacks": (
        {"tokenizer_config": {"eos_token": "<end>"}, "config": {"eos_token_id": 4}},
        [4],
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_end_token_that_a_file_names_counts(tmp_path: Path, name: str) -> None:
    files, expected = ENDS[name]
    for path in (special_folder(tmp_path, **files), tmp_path / "tokenizer.json"):
        tokenizer = HuggingFaceTokenizer(path, 8)
        assert [tokenizer.eod, *tokenizer.end_tokens] == expected


def test_generation_config_can_be_left_out_and_tokens_added(tmp_path: Path) -> None:
    path = special_folder(tmp_path, generation_config={"eos_token_id": [4]}, config={"eos_token_id": 3})
    tokenizer = HuggingFaceTokenizer(path, 8, generation_config=False, end_tokens=(5, 3))
    assert [tokenizer.eod, *tokenizer.end_tokens] == [3, 5]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {"eos_token_id": "</s>"}}, "config.json: eos_token_id is '</s>', neither a token id nor a list"),
        ({"config": {"eos_token_id": [1, True]}}, "config.json: eos_token_id is "),
        ({"config": {"text_config": {"eos_token_id": -1}}}, "config.json: eos_token_id is -1"),
        ({"config": {"eos_token_id": 8}}, "eos_token_id 8 is not in the vocabulary of 8"),
        ({"config": [1]}, "config.json is no JSON object"),
        ({"tokenizer_config": {"eos_token": 2}}, "tokenizer_config.json: eos_token is 2, which is no token"),
        ({"special_tokens_map": "x"}, "special_tokens_map.json is no JSON object"),
    ],
    ids=str,
)
def test_a_wrong_end_token_is_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        HuggingFaceTokenizer(special_folder(tmp_path, **files), 8)


@pytest.mark.parametrize("text", ["Hello world", "", "Hello</s> world"])
@pytest.mark.parametrize("post", [True, False], ids=["as Llama", "as Qwen"])
@pytest.mark.parametrize("bos", ["<s>", None])
def test_prompts_begin_as_in_transformers(tmp_path: Path, text: str, post: bool, bos: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    path = special_folder(tmp_path, bos=bos, post=post)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer = HuggingFaceTokenizer(path)
    assert tokenizer.bos == theirs.bos_token_id
    assert tokenizer.encode_prompt(text) == prompt_tokens(tokenizer, text) == theirs(text).input_ids
    assert tokenizer.tokenize(text) == theirs(text, add_special_tokens=False).input_ids
    if bos is not None:
        assert prompt_tokens(tokenizer, text, add_bos=True) == [1, *tokenizer.tokenize(text)], "once"
    else:
        with pytest.raises(ValueError, match="no begin-of-text token"):
            prompt_tokens(tokenizer, text, add_bos=True)


def test_a_text_with_its_own_first_token_gets_no_other(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(special_folder(tmp_path))
    assert tokenizer.encode_prompt("<s>Hello") == [1, 6] == prompt_tokens(tokenizer, "<s>Hello", add_bos=True)


def test_padding_of_saved_batches_does_not_count(tmp_path: Path) -> None:
    path = special_folder(tmp_path)
    saved = Tokenizer.from_file(str(path / "tokenizer.json"))
    saved.enable_padding(length=16)
    saved.enable_truncation(2)
    saved.save(str(path / "tokenizer.json"))
    assert HuggingFaceTokenizer(path).encode_prompt("Hello world Hello") == [1, 6, 7, 6]


# -- token by token ----------------------------------------------------------------------------------------------------


def decoded(tokenizer: Any, tokens: list[int]) -> list[str]:
    """Output of a decoder for each token, and at the end."""
    decoder = tokenizer.decoder()
    return [*(decoder.step(token) for token in tokens), decoder.finish()]


@given(tokens=st.lists(st.integers(0, 330), max_size=30))
def test_a_decoder_says_what_decoding_at_once_says(folder: Path, tokens: list[int]) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    assert "".join(decoded(tokenizer, tokens)) == tokenizer.detokenize(tokens, skip_special_tokens=True)


def test_a_character_comes_with_its_last_token() -> None:
    assert decoded(ByteTokenizer(), list("ü🙂".encode())) == ["", "ü", "", "", "", "🙂", ""]
    assert decoded(ByteTokenizer(), [0xF0, 0x9F, 256, ord("a")]) == ["", "", "", "\ufffda", ""]
