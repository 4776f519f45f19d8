"""Where messages end in a prompt: by one tokenization, as by a tokenization of each conversation that ends earlier."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from megatron_hybrid_prefix.serve.chat_template import ChatForm
from megatron_hybrid_prefix.serve.protocol import chat_tokens, read_request
from megatron_hybrid_prefix.text.tokenizer import HuggingFaceTokenizer, common_tokens
from tests.harness.tokenizer_folder import make_folder
from tests.serve.test_clients import CHAT, served

# As those of these families do it: whose turn is framed how, what follows thoughts, and where tool results go.
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
TEMPLATES = {
    "plain": None,
    # Thoughts before the last question are stripped; results of tools share a turn.
    "qwen3.5": "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{%- set text = m.content %}{%- set thought = '' %}{%- if '</think>' in text %}"
    "{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}{{ text }}"
    "{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{%- endfor %}"
    "{{ '<|im_end|>\n' }}{%- elif m.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- else %}" + TURN + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif %}",
    # A turn ends where the next begins.
    "nemotron": "{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "<|im_start|>System\n{{ system | trim }}\n{% for m in messages %}{% if m.role == 'user' %}"
    "<|im_end|>User\n{{ m.content | trim }}\n{% elif m.role == 'tool' %}<|im_end|>User\n<TOOL_RESPONSE>[{{ m.content }}]\n"
    "{% elif m.role == 'assistant' %}<|im_end|>Assistant\n{{ m.content.split('</think>')[-1] | trim }}"
    "{% if m.tool_calls %}<TOOLCALL>{{ m.tool_calls | tojson }}</TOOLCALL>{% endif %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|>Assistant\n<think>\n{% endif %}",
    "granite": "{% if messages[0].role != 'system' %}<|im_start|>system<|im_end|>You are helpful.\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<|tool_call|>{{ call | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>{% endif %}",
    # Contents are trimmed; all roles of tools are one.
    "llama": "{{ bos_token }}{% for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|im_end|>\n\n"
    "{{ m.content | trim }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}",
    # The system's text is in the first question, and roles must take turns, as of Mistral and Gemma.
    "in turns": "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "{% if m.role == 'user' %}[INST]{% if loop.first %}{{ first }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
    "counts": "{% for m in messages %}{{ loop.index }} of {{ messages | length }}: {{ m.content }}\n{% endfor %}",
}
WORDS = [
    "the", "cache", "keeps", "blocks", "Grüße", "東京", "€5", "x\n", "-", "a\n\n", "", "b", "'tis", "12,000",
    "<|im_end|>", '{"a":', "1}",
]  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["as it is", "begins, trims offsets"])
def tokenizer(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> HuggingFaceTokenizer:
    folder = make_folder(tmp_path_factory.mktemp("tokenizer"))
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<|end|>")])
    made.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", ">\n", "</tool_response>")])
    if request.param:
        begins = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
        made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begins])
    made.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(folder)


def conversation(dice: random.Random, turns: int, tools: int) -> list[dict[str, Any]]:
    """A chat with thoughts, and up to this many calls of tools in a turn."""

    def text() -> str:
        return " ".join(dice.choices(WORDS, k=dice.randint(0, 12)))

    messages = [{"role": "system", "content": text()}] if dice.random() < 0.7 else []
    for _ in range(turns):
        messages.append({"role": "user", "content": text()})
        for _ in range(dice.randint(0, tools)):
            calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": text()}}}] * dice.randint(1, 2)
            thought = f"<think>\n{text()}\n</think>\n\n" if dice.random() < 0.7 else ""
            messages.append({"role": "assistant", "content": thought + text(), "tool_calls": calls})
            messages += [{"role": "tool", "content": text()} for _ in calls]
        messages.append({"role": "assistant", "content": f"<think>\n{text()}\n</think>\n\n{text()}"})
    return messages[: max(1, len(messages) - dice.randint(0, 2))]


def slow_ends(model: Any, messages: Sequence[Any]) -> Callable[..., int]:
    """The oracle: each conversation that ends earlier is rendered and tokenized, once. Where it is refused it ends at 0."""
    tokens, has_own = chat_tokens(messages, model)[1], model.chat.template is not None

    @functools.cache
    def end(at: int, text: str | None = None) -> int:
        last = messages[at] if text is None else {"role": messages[at]["role"], "content": text}
        try:
            text = model.chat.render([*messages[:at], last], begin_answer=False)
        except ValueError:
            return 0
        found = (model.tokenizer.tokenize if has_own else model.tokenizer.encode_prompt)(text)
        return common_tokens(tokens, found) % len(tokens)

    return end


@pytest.mark.parametrize("name", TEMPLATES)
def test_ends_are_those_of_a_tokenization_each(tokenizer: HuggingFaceTokenizer, name: str) -> None:
    dice = random.Random(name)
    model = served(tokenizer=tokenizer, chat=ChatForm(TEMPLATES[name], {"bos_token": "<s>"}), limit_tokens=10**6)
    for turns, tools in ((1, 0), (1, 12), (3, 2), (3, 12), (20, 0), (20, 2)):
        messages = conversation(dice, turns, 0 if name == "in turns" else tools)
        last = len(messages) - 1
        wanted = range(last + 1) if last < 32 else [0, *range(last - 30, last + 1)]
        picked = sorted(dice.sample(range(last + 1), min(4, last + 1)))
        at = picked[-1]
        texts = [messages[at]["content"], " ".join(WORDS)]
        parts = [{"type": "text", "text": text} for text in texts]
        marked = [parts[0] | {"cache_control": {"type": "ephemeral"}}, parts[1]]
        whole = [*messages[:at], messages[at] | {"content": "".join(texts)}, *messages[at + 1 :]]
        end, mark = slow_ends(model, whole), (at, texts[0])
        for asked, right in ((None, wanted), ([], [mark]), (picked, picked), ([last], [last, mark])):
            marks = mark in right
            sent = [*whole[:at], whole[at] | {"content": marked}, *whole[at + 1 :]] if marks else whole
            body = CHAT | {"messages": sent, "cache_breakpoints": asked}
            found = read_request(body, "chat", model, None).prompts[0].breakpoints
            ends = sorted({end(*each) if each is mark else end(each) for each in right} - {0})
            # In the middle of a text its begin may be tokenized otherwise than the text: a run of blanks, a word.
            assert len(found) == len(ends) and all(0 <= a - b <= 2 * marks for a, b in zip(found, ends, strict=True))


def test_blanks_of_a_token_count(tokenizer: HuggingFaceTokenizer) -> None:
    """Some tokenizers leave them out of their offsets."""
    tokens, before = tokenizer.locate("x>\nx", special=False)
    assert [before(character) for character in range(5)] == [0, 1, 1, 2, 3] and len(tokens) == 3


@pytest.mark.parametrize("tools", [0, 100])
def test_what_is_rendered_and_tokenized_does_not_grow_with_the_conversation(tokenizer, monkeypatch, tools):
    model = served(tokenizer=tokenizer, limit_tokens=10**6)
    form = ChatForm(TEMPLATES["qwen3.5"])
    rendered, tokenized = [], []
    monkeypatch.setattr(form, "_render", lambda *args, real=form._render: rendered.append(len(args[1])) or real(*args))
    for name in ("locate", "tokenize"):
        real = getattr(tokenizer, name)
        counted = lambda text, real=real, **kind: tokenized.append(text) or real(text, **kind)  # noqa: E731
        monkeypatch.setattr(tokenizer, name, counted)
    object.__setattr__(model, "chat", form)
    for turns in (50, 100):
        messages = conversation(random.Random(0), 1 if tools else turns, 2 * turns if tools else 0)
        rendered.clear(), tokenized.clear()
        read_request(CHAT | {"messages": messages}, "chat", model, None)
        assert len(tokenized) == 1
        assert rendered[0] == len(messages) and sum(rendered[1:]) < 33 * 40
