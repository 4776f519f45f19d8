"""Tools, thoughts and calls over HTTP, with forced answers: the `openai` client, plain and streamed, and the cache."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.mcore.engine import sampling
from megatron_hybrid_prefix.serve.chat_template import ChatForm, load_chat_form
from megatron_hybrid_prefix.serve.detokenizer import TextStream
from megatron_hybrid_prefix.serve.errors import ApiError
from megatron_hybrid_prefix.serve.protocol import read_request
from megatron_hybrid_prefix.text.answers import AnswerForm, AnswerParts, known_template
from megatron_hybrid_prefix.text.calls import types_of, visits
from megatron_hybrid_prefix.text.tokenizer import HuggingFaceTokenizer
from tests.harness.tokenizer_folder import make_folder
from tests.serve.test_clients import CHAT, served
from tests.serve.test_serve import BLOCK, Server, cached, running

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "code": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"strict": False, "name": "run", "parameters": SCHEMA}}]
ARGUMENTS = {"n": 3, "code": " if x:\n  ü"}


def template(turn: str, end: str, call: str, thinks: bool = False) -> str:
    """A chat template as those of a family."""
    begin = turn.format("assistant") + "<think>\n" * thinks
    thought = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    return (
        "{% if tools %}" + turn.format("system") + "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}" + end
        + "\n{% endif %}{% for m in messages %}" + turn.format("{{ m.role }}") + thought * thinks + "{{ m.content }}"
        + "{% for call in m.tool_calls or [] %}{% set f = call.function %}{{ '\n' }}" + call + "{% endfor %}" + end + "\n{% endfor %}"
        + "{% if add_generation_prompt %}" + begin + "{% endif %}"
    )  # fmt: skip


XML = (
    "<tool_call>\n<function={{ f.name }}>\n{% for name, value in f.arguments.items() %}<parameter={{ name }}>\n{{ value }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>"
)
JSON = "<tool_call>\n{{ {'name': f.name, 'arguments': f.arguments} | tojson }}\n</tool_call>"
FAMILIES = {  # their chat templates, and whether they think
    "qwen3.5": (template("<|im_start|>{}\n", "<|im_end|>", XML, thinks=True), True),
    "qwen3-coder": (template("<|im_start|>{}\n", "<|im_end|>", XML), False),
    "hermes": (template("<|im_start|>{}\n", "<|im_end|>", JSON), False),
    "granite 4": (template("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>", JSON), False),
}
CALL_XML = "<tool_call>\n<function=run>\n<parameter=n>\n3\n</parameter>\n<parameter=code>\n{}\n</parameter>\n</function>\n</tool_call>"
CALL_XML = CALL_XML.format(ARGUMENTS["code"])
CALL_JSON = f"<tool_call>\n{json.dumps({'name': 'run', 'arguments': ARGUMENTS}, ensure_ascii=False)}\n</tool_call>"
CALLS = {family: CALL_XML if XML in source else CALL_JSON for family, (source, _) in FAMILIES.items()}


@pytest.fixture(scope="module")
def tools_server(tiny: Any) -> Iterator[Server]:
    fields = {"max_sequence_length": 4096, "max_tokens": 4096}
    with running(tiny, engine_fields=fields, chat=ChatForm(FAMILIES["qwen3.5"][0])) as server:
        yield server


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that the engine samples, by the seed of the request."""
    texts: list[str] = []

    def forced(logits: torch.Tensor, request: Any, generator: Any) -> torch.Tensor:
        tokens = [*texts[request.options.seed].encode(), 257]
        return torch.tensor(tokens[len(request.answer)])

    monkeypatch.setattr(sampling, "sample", forced)
    return texts


def ask(server: Server, seed: int, **fields: Any) -> Any:
    return server.client().chat.completions.create(**CHAT | {"tools": TOOLS, "seed": seed, "max_tokens": 500} | fields)


def streamed(server: Server, seed: int, **fields: Any) -> tuple[Any, list[Any]]:
    """The answer as the `openai` client puts it together, and the deltas."""
    fields = CHAT | {"tools": TOOLS, "seed": seed, "max_tokens": 500} | fields
    with server.client().chat.completions.stream(**fields) as stream:
        deltas = [event.chunk.choices[0].delta for event in stream if event.type == "chunk"]
        return stream.get_final_completion().choices[0], deltas


def thoughts_of(message: Any) -> str | None:
    return getattr(message, "reasoning_content", None)


def said(choice: Any) -> tuple[Any, ...]:
    message = choice.message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    return message.content, calls, choice.finish_reason


RUN = ("run", ARGUMENTS)
BAD = CALL_XML.replace("</function>", "x</function>")
FORCED = [  # what is generated; thoughts, text, calls, why it ends
    ("\nI see.\n\nSo\n</think>\n\n Yes. \n", "I see.\n\nSo", "Yes. \n", [], "stop"),
    (f"Run.</think>\n\n{CALL_XML}", "Run.", None, [RUN], "tool_calls"),
    (f"</think>\n\nTwo: \n{CALL_XML}\n{CALL_XML}\n", None, "Two:", [RUN] * 2, "tool_calls"),
    (f"</think>A\n{BAD}\n{CALL_XML} B", None, f"A\n{BAD}B", [RUN], "tool_calls"),
    (f"</think>{CALL_JSON}\n", None, f"{CALL_JSON}\n", [], "stop"),
    (f"</think>A {CALL_XML[:40]}", None, f"A {CALL_XML[:40]}", [], "stop"),
    ("So <tool_call>", "So <tool_call>", "", [], "stop"),
]


def test_thoughts_text_and_calls_plain_and_streamed(tools_server, answers):
    unparsed = tools_server.metrics()["unparsed_tool_calls_total", ()]
    for seed, (text, thoughts, content, calls, reason) in enumerate(FORCED):
        answers.append(text)
        whole = ask(tools_server, seed, logprobs=True).choices[0]
        assert (thoughts_of(whole.message), *said(whole)) == (thoughts, content, calls, reason)
        choice, deltas = streamed(tools_server, seed, logprobs=True)
        assert len(whole.logprobs.content) == len(choice.logprobs.content) == len(text.encode()) + 1, "of all tokens"
        assert "".join(thoughts_of(delta) or "" for delta in deltas) == (thoughts or "")
        assert ((choice.message.content or None), *said(choice)[1:]) == (content or None, calls, reason)
        parts = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [part.index for part in parts] == list(range(len(calls))), "one delta for each call"
        assert all(part.id and json.loads(part.function.arguments) == ARGUMENTS for part in parts)
        texts = [delta for delta in deltas if delta.content or thoughts_of(delta)]
        assert len(texts) > 3 or "<tool_call>" in text, "thoughts and text are streamed as they come"
    assert tools_server.metrics()["unparsed_tool_calls_total", ()] - unparsed == 2 * 3
    content, calls, reason = said(ask(tools_server, 1, max_tokens=40).choices[0])
    assert (content[:11], calls, reason) == ("<tool_call>", [], "length")


@pytest.mark.parametrize("thoughts", ["kept", "stripped"])
def test_a_loop_of_ten_turns_resumes_at_the_last_block_that_did_not_change(tools_server, answers, salt, thoughts):
    """Also where a turn must not call. Where the client leaves thoughts out, that is the last one before them."""
    messages, before = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": "Run it."}], 0
    call = "<tool_call>\n<function=run>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    for turn in range(10):
        answers.append(f"{turn}\n</think>\n\nGo:\n{call}")
        fields = {"extra_body": salt, "tool_choice": "none" if turn == 3 else "auto"}
        answer = ask(tools_server, turn, messages=messages, **fields)
        assert cached(answer) == before // BLOCK * BLOCK, turn
        message = answer.choices[0].message
        assert bool(message.tool_calls) == (turn != 3)
        kept = {"reasoning_content"} if thoughts == "stripped" else set()
        begun = len("<think>\n") if kept else 1 - answer.usage.completion_tokens
        before = answer.usage.prompt_tokens - begun
        messages.append(message.model_dump(exclude_unset=True, exclude=kept))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls or ()]
    assert before > 25 * BLOCK


# --- Without a server ------------------------------------------------------------------------------------------------


def pieces(parts: AnswerParts, text: str, dice: random.Random) -> dict[str, Any]:
    """What the deltas say together, of a text in pieces."""
    message: dict[str, Any] = {}
    while text:
        size = dice.choice((1, 2, 9, 40, 999))
        for delta in parts.feed(text[:size], last=len(text) <= size):
            for name, value in delta.items():
                message[name] = message.get(name, type(value)()) + value
        text = text[size:]
    for call in message.get("tool_calls", ()):
        del call["id"]
    return message


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_families_do_not_depend_on_their_pieces(family):
    source, thinks = FAMILIES[family]
    form, dice = ChatForm(source), random.Random(family)
    prompt = form.render([{"role": "user", "content": "x"}], variables={"tools": TOOLS})
    assert form.calls_tools and '{"strict": false, "name": "run"' in prompt
    call = CALLS[family]
    cut, nameless, empty = call[:-1], call.replace("run", "", 1), "<tool_call> </tool_call>"
    for text in ("a \n b\n", f"a\n{call} \n\n{call}\n b ", cut, nameless, empty, "<to"):
        text = "so\n</think>\n" * thinks + text
        made = [form.answers.parts(prompt, TOOLS) for _ in range(20)]
        whole = pieces(made[0], text, random.Random(5))
        assert all(pieces(parts, text, dice) == whole for parts in made[1:])
        right = text.count(call)
        assert {(parts.calls, parts.unparsed) for parts in made} == {(right, text.count("<tool_call>") - right)}
        arguments = [json.loads(found["function"]["arguments"]) for found in whole.get("tool_calls", ())]
        assert arguments == [ARGUMENTS] * right and whole.get("reasoning_content") == ("so" if thinks else None)
    assert (form.answers.parts(prompt, []) is not None) == thinks, "without calls and thoughts there is only text"
    history = [
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "run", "arguments": ARGUMENTS}}]}
    ]
    assert f"a\n{call}" in form.render(history), "a call goes back into a prompt as it was generated"


def test_what_is_no_call():
    form, wrong = (
        AnswerForm(known_template(FAMILIES["hermes"][0])),
        ['{"name": "\\ud800"}', '{"name": 3}', '{"arguments": {}}'],
    )
    wrong += ['{"name": "run", "n": 3}', "[" * 99_999, "{", "", "null"]
    wrong += [
        f'{{"name": "run", "arguments": {given}}}' for given in ('{"n": NaN}', '"x"', "[1]", '{"code": "\\ud800"}')
    ]
    for each in wrong:
        parts, text = form.parts("", TOOLS), f"<tool_call>{each}</tool_call>"
        assert parts.feed(text, last=True) == [{"content": text}] and parts.unparsed == 1


def test_types_of_arguments_are_looked_for_so_far():
    """However many arguments refer to one large schema."""
    large = {"$defs": {"large": {"anyOf": [{"const": at} for at in range(99)]}}}
    assert {*types_of({"$ref": "#/$defs/large"}, large, set(), visits())} == {"integer"}
    left = iter(range(50))
    assert len(types_of({"$ref": "#/$defs/large"}, large, set(), left)) < 50 and next(left, None) is None
    assert types_of({"type": "string"}, large, set(), left) == []


def test_a_folder_says_how_its_answers_are(tmp_path):
    """Its special tokens are what the parser looks for, and nothing else of them is text."""
    folder = make_folder(tmp_path / "tokenizer")
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in ("call", "done", "other", "final")])
    made.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"chat_template": "{{ tools }}{{ messages }}<|go|>"}
    call = {"open_pattern": r"<\|call\|>(?P<name>\w+)", "close": "<|done|>", "content": "json"}
    call |= {"transform": {"function": {"name": "{name}", "arguments": "{content}"}}}
    fields = {"content": {"open": "<|final|>", "close": "<|other|>"}, "tool_calls": call}
    file.write_text(json.dumps(config | {"response_template": {"start_anchor": "<|go|>", "fields": fields}}))
    form, tokenizer = load_chat_form(None, folder), HuggingFaceTokenizer(folder)
    tokens = tokenizer.tokenize('no <|final|>Yes<pad><|other|>no <|call|>run{"n": 3}<|done|>')
    for tools in (TOOLS, []):
        parts = form.answers.parts("<|go|>", tools)
        text = "".join(map(TextStream(tokenizer, kept=parts.marks).feed, tokens))
        assert pieces(parts, text, random.Random(1))["content"] == "Yes" and parts.calls == len(tools)
    file.write_text(json.dumps(config | {"response_template": {"fields": {}}}))
    with pytest.raises(InputError, match="response_template"):
        load_chat_form(None, folder)


def test_what_a_template_gets():
    model = served(chat=ChatForm(FAMILIES["qwen3.5"][0]))

    def prompt(**fields: Any) -> tuple[str, list[int]]:
        found = read_request(CHAT | fields, "chat", model, None).prompts[0]
        return bytes(found.tokens).decode(), found.breakpoints

    with_tools = prompt(tools=TOOLS)
    assert prompt(tools=TOOLS, tool_choice="none") == with_tools != prompt()
    calls = [{"function": {"name": "run", "arguments": '{"n": 3}'}}, {"function": {"name": "f", "arguments": ""}}]
    turn = {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "So."}
    text, _ = prompt(messages=[*CHAT["messages"], turn, {"role": "tool", "tool_call_id": "1", "content": "ok"}])
    assert "<think>\nSo.\n</think>\n\n\n<tool_call>\n<function=run>\n<parameter=n>\n3\n" in text
    assert "<function=f>\n</function>" in text
    begun = [*CHAT["messages"], {"role": "assistant", "content": "Well, "}]
    for form in (model.chat, ChatForm()):
        model = served(chat=form)
        text, ends = prompt(messages=begun, continue_final_message=True)
        assert text.endswith("Well, ") and ends == prompt(messages=begun)[1][:1]


def test_tools_that_cannot_be_called_are_refused_in_one_line():
    for form in (ChatForm(), ChatForm("{{ tools }}"), ChatForm("<|im_start|><tool_call>")):
        read_request(CHAT | {"tools": TOOLS, "tool_choice": "none"}, "chat", served(chat=form), None)
        with pytest.raises(ApiError) as refused:
            read_request(CHAT | {"tools": TOOLS}, "chat", served(chat=form), None)
        assert (refused.value.status, refused.value.body["error"]["param"]) == (400, "tools")
        assert "\n" not in refused.value.body["error"]["message"]
