"""What a Hugging Face folder changes for the server: default sampling, several end tokens, no chats without a template."""

from __future__ import annotations

import json

import pytest

from megatron_hybrid_prefix.serve.backend import GenerationTask, Update
from megatron_hybrid_prefix.serve.chat_template import ChatForm, load_chat_form
from megatron_hybrid_prefix.serve.detokenizer import TextStream
from megatron_hybrid_prefix.serve.errors import ApiError
from megatron_hybrid_prefix.serve.generation import Choice
from megatron_hybrid_prefix.serve.protocol import Prompt, ServedModel, read_request
from megatron_hybrid_prefix.tokenizer import HuggingFaceTokenizer
from tests.harness.hf_helpers import save_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    save_tokenizer(tmp_path, "<eos>", "<|im_end|>")
    return HuggingFaceTokenizer(tmp_path, 272)


def served(tokenizer, **fields):
    fields = {"chat": ChatForm(), "default_sampling": {"temperature": 0.6, "top_p": 0.9}} | fields
    return ServedModel(
        model="m",
        tokenizer=tokenizer,
        vocab_size=272,
        add_bos=False,
        check_fits=lambda prompt, wanted: None,
        most_tokens=lambda prompt: 100,
        limit_tokens=1000,
        end_tokens=(257,),
        **fields,
    )


def request(tokenizer, **fields):
    return read_request({"model": "m", "prompt": "a", **fields}, "completions", served(tokenizer), None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"temperature": 0.6, "top_p": 0.9, "top_k": 0}),
        ({"temperature": None}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0}, {"temperature": 1.0, "top_k": 1, "top_p": 0.0}),
        ({"temperature": 1.0}, {"temperature": 1.0, "top_k": 0, "top_p": 0.0}),
        ({"top_k": 5}, {"temperature": 1.0, "top_k": 5, "top_p": 0.0}),
        ({"seed": 1, "temperature": 0}, {"top_k": 1}),
    ],
    ids=str,
)
def test_default_sampling_is_for_requests_that_say_nothing_of_it(tokenizer, fields, expected):
    assert request(tokenizer, **fields).sampling.items() >= expected.items()


def test_end_tokens_unless_ignored(tokenizer):
    assert request(tokenizer).end_tokens == (257,) and request(tokenizer).stop_tokens == {257}
    assert (
        request(tokenizer, ignore_eos=True).end_tokens == () == tuple(request(tokenizer, ignore_eos=True).stop_tokens)
    )
    assert request(tokenizer, stop_token_ids=[5]).stop_tokens == {5, 257}


@pytest.mark.parametrize("end", [256, 257])
def test_an_answer_ends_at_each_end_token(tokenizer, end):
    task = GenerationTask(prompt=[1], sampling={"termination_id": 256}, deliver=lambda update: None)
    prompt = Prompt(tokens=[1], text="", breakpoints=[])
    choice = Choice(0, prompt, task, TextStream(tokenizer, []), 10, request(tokenizer), tokenizer)
    a = tokenizer.tokenize("a")
    assert choice.take(Update(tokens=a))[0] == "a" and choice.finish_reason is None
    assert choice.take(Update(tokens=[*a, end, *a]))[0] == "a"
    assert (choice.finish_reason, choice.tokens) == ("stop", 3)


def test_a_folder_without_a_template_has_no_chats(tokenizer, tmp_path):
    chat = load_chat_form(None, tmp_path, plain=False)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(
        ApiError, match="no chat template: use /v1/completions, or start the server with --chat-template"
    ):
        read_request(body, "chat", served(tokenizer, chat=chat), None)
    read_request(body, "chat", served(tokenizer, chat=load_chat_form(None, tmp_path)), None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    chat = load_chat_form(None, tmp_path, plain=False)
    assert read_request(body, "chat", served(tokenizer, chat=chat), None).prompts[0].text == "hi!"


def test_an_unknown_field_is_refused_when_it_is_null(tokenizer):
    with pytest.raises(ApiError, match="foo"):
        request(tokenizer, foo=None)
