"""What a Hugging Face folder changes for the server: default sampling, several end tokens, no chats without a template."""

from __future__ import annotations

import json

import pytest

from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.serve.backend import GenerationTask, Update
from megatron_hybrid_prefix.serve.chat_template import ChatForm, load_chat_form
from megatron_hybrid_prefix.serve.errors import ApiError
from megatron_hybrid_prefix.serve.generation import Choice
from megatron_hybrid_prefix.serve.protocol import Prompt, ServedModel, chat_tokens, read_request, text_tokens
from megatron_hybrid_prefix.text.tokenizer import HuggingFaceTokenizer
from tests.harness.hf_helpers import save_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    save_tokenizer(tmp_path, "<eos>", "<|im_end|>")
    return HuggingFaceTokenizer(tmp_path, 272, end_tokens=(256, 257))


def served(tokenizer, **fields):
    fields = {"chat": ChatForm(), "default_sampling": {"temperature": 0.6, "top_p": 0.9}, "add_bos": False} | fields
    return ServedModel(
        model="m",
        tokenizer=tokenizer,
        vocab_size=272,
        check_fits=lambda prompt, wanted: None,
        limit_tokens=1000,
        **fields,
    )


def request(tokenizer, **fields):
    return read_request({"model": "m", "prompt": "a", **fields}, "completions", served(tokenizer), None)


TWO = {"temperature": 0.6, "top_p": 0.9}
ALL = TWO | {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
NOTHING, NOT_SAMPLED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}, {"temperature": 0.0}


@pytest.mark.parametrize(
    ("default", "fields", "expected"),
    [
        (TWO, {}, TWO | {"top_k": 0}),
        (TWO, {"temperature": None}, TWO),
        (TWO, {"temperature": 0}, {"temperature": 1.0, "top_k": 1, "top_p": 0.0}),
        (TWO, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 0, "top_p": 0.0}),
        (TWO, {"top_k": 5}, {"temperature": 1.0, "top_k": 5, "top_p": 0.0}),
        (TWO, {"min_p": 0.0}, {"temperature": 1.0, "top_k": 0, "top_p": 0.0}),
        (TWO, {"seed": 1, "temperature": 0}, {"top_k": 1}),
        (ALL, {}, ALL),
        (ALL, {"seed": 3}, TWO | {"top_k": 20, "seed": 3}),
        (ALL, {"temperature": 0.5}, NOTHING | {"temperature": 0.5, "repetition_penalty": 1.1}),
        (ALL, {"repetition_penalty": 1.2}, ALL | {"repetition_penalty": 1.2}),
        (ALL, {"repetition_penalty": 1.0}, ALL | {"repetition_penalty": 1.0}),
        (NOT_SAMPLED, {}, {"top_k": 1}),
        (NOT_SAMPLED, {"temperature": 0.5}, {"top_k": 0}),
        (NOT_SAMPLED, {"top_p": 0.5}, {"top_k": 0}),
    ],
    ids=str,
)
def test_default_sampling_is_for_requests_that_say_nothing_of_it(tokenizer, default, fields, expected):
    body = {"model": "m", "prompt": "a", **fields}
    sampling = read_request(body, "completions", served(tokenizer, default_sampling=default), None).sampling
    assert (sampling | sampling.get("sampling_options", {})).items() >= expected.items()


# --- The first token: as in transformers -----------------------------------------------------------------------------

BEGUN_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}</s>{% endfor %}"
TEMPLATES = {"begins": BEGUN_TEMPLATE, "does not begin": BEGUN_TEMPLATE.removeprefix("{{ bos_token }}")}


@pytest.fixture(params=[True, False], ids=["post-processor", "none"])
def words(tmp_path, request):
    """Folder of a tokenizer whose post-processor begins a text with <s>, or not."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["<unk>", "<s>", "</s>", "Hello", "world"]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(names[:3])
    if request.param:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("in_map", [False, True], ids=["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_begin_as_in_transformers(words, name, in_map):
    import transformers

    special = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>"}
    (words / "special_tokens_map.json").write_text(json.dumps(special if in_map else {}))
    config = {"chat_template": TEMPLATES[name]} | ({} if in_map else {"bos_token": "<s>", "eos_token": "</s>"})
    (words / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(words)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "world"}]
    texts = {"completions": theirs("Hello world").input_ids}
    texts["chat"] = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    bodies = {"completions": {"prompt": "Hello world"}, "chat": {"messages": messages}}
    for add_bos in (False, True):
        model = served(HuggingFaceTokenizer(words, 272), chat=load_chat_form(None, words), add_bos=add_bos)
        for kind, right in texts.items():

            def asked(kind=kind, model=model, **fields):
                return read_request({"model": "m", **bodies[kind], **fields}, kind, model, None).prompts[0]

            begun = [1, *right] if add_bos and right[0] != 1 else right
            assert asked().tokens == begun
            assert asked(add_special_tokens=False).tokens == [1] * (kind == "chat" and name == "begins") + [
                token for token in right if token != 1
            ]
            if kind == "chat":
                assert asked().breakpoints == [len(begun) - 2], "after the first message"
                assert chat_tokens(messages, model)[1] == begun
            else:
                assert text_tokens("Hello world", model) == begun
                echoed = asked(echo=True, prompt="<s>Hello", max_tokens=0)
                assert (echoed.tokens, echoed.text) == ([1, 3], "<s>Hello"), "not twice"
                assert asked(prompt=[3, 4]).tokens == [3, 4], "token ids are the prompt"


def test_tokenizer_info_names_the_token_that_ends_an_answer(words):
    (words / "config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
    (words / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    model = served(HuggingFaceTokenizer(words, 272))
    assert model.tokenizer_info().items() >= {"bos_token": "<s>", "eos_token": "</s>"}.items()
    body = {"model": "m", "prompt": "Hello", "max_tokens": 5}
    asked = read_request(body, "completions", model, None)
    assert (asked.sampling["termination_id"], asked.sampling["stop_token_ids"]) == (2, [4])


def test_end_tokens_unless_ignored(tokenizer):
    for fields, ends in (({}, {257}), ({"ignore_eos": True}, set()), ({"stop_token_ids": [5]}, {5, 257})):
        asked = request(tokenizer, **fields)
        assert asked.stop_tokens == set(asked.sampling.get("stop_token_ids", ())) == ends


@pytest.mark.parametrize("end", [256, 257])
def test_an_answer_ends_at_each_end_token(tokenizer, end):
    task = GenerationTask(prompt=[1], sampling={"termination_id": 256}, deliver=lambda update: None)
    prompt = Prompt(tokens=[1], text="", breakpoints=[])
    choice = Choice(0, prompt, task, 10, request(tokenizer), tokenizer)
    a = tokenizer.tokenize("a")
    assert choice.take(Update(tokens=a))[0] == "a" and choice.finish_reason is None
    assert choice.take(Update(tokens=[*a, end, *a]))[0] == "a"
    assert (choice.finish_reason, choice.tokens) == ("stop", 3)


@pytest.mark.parametrize("updates", [[[4], [2]], [[4, 2, 3]], [[4], [2, 3]]], ids=str)
def test_an_answer_goes_on_after_its_prompt_up_to_a_special_token(words, updates):
    tokenizer, prompt = HuggingFaceTokenizer(words, 272), Prompt(tokens=[1, 3], text="", breakpoints=[])
    task = GenerationTask(prompt=prompt.tokens, sampling={"termination_id": 9}, deliver=lambda _: None, stop=["</s>"])
    choice = Choice(0, prompt, task, 10, request(tokenizer, logprobs=0), tokenizer)
    taken = [choice.take(Update(tokens=tokens, log_probs=[-1.0] * len(tokens))) for tokens in updates]
    assert "".join(text for text, _ in taken) == taken[0][1][0].text == " world"
    assert (choice.finish_reason, choice.tokens) == ("stop", 2)


def test_a_folder_without_a_template_has_no_chats(tokenizer, tmp_path):
    chat = load_chat_form(None, tmp_path, plain=False)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(
        ApiError, match="no chat template: use /v1/completions, or start the server with --chat-template"
    ):
        read_request(body, "chat", served(tokenizer, chat=chat), None)
    read_request(body, "chat", served(tokenizer, chat=load_chat_form(None, tmp_path)), None)
    text = "{{ messages[0].content }}!"
    for template in (text, {"default": text, "rag": "?"}, [{"name": "default", "template": text}, {"name": "rag"}, 5]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        chat = load_chat_form(None, tmp_path, plain=False)
        prompt = read_request(body, "chat", served(tokenizer, chat=chat), None).prompts[0]
        assert tokenizer.detokenize(prompt.tokens) == "hi!"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": {"default": 5}}))
    with pytest.raises(InputError, match=r"tokenizer_config\.json: chat_template is 5, no text$"):
        load_chat_form(None, tmp_path)
