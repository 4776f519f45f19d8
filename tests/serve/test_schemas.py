"""``response_format``, ``structured_outputs``, and calls of tools that a grammar sees to, over HTTP."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import pytest

from megatron_hybrid_prefix.serve.chat_template import ChatForm
from megatron_hybrid_prefix.serve.errors import ApiError
from megatron_hybrid_prefix.serve.protocol import read_request
from megatron_hybrid_prefix.text import grammar
from tests.harness.grammar_walks import JSON, record, walk
from tests.harness.limits import HANG_S
from tests.serve.test_clients import served
from tests.serve.test_serve import PROMPT, check_stuck, complete
from tests.serve.test_tools import FAMILIES, ask, pieces, streamed, tools_server  # noqa: F401

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
SCHEMA = record({"n": {"type": "integer"}, "ok": {"enum": [True, None]}}, 2)
FORMAT = {"type": "json_schema", "json_schema": {"name": "made", "schema": SCHEMA, "strict": True}}
BIAS = {str(ord(letter)): 30 for letter in '"},:'} | {str(ord(blank)): -50 for blank in " \n\r\t"}
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "response_format": FORMAT}


def test_answers_are_of_the_schema_streamed_or_not(server):
    fields = ASKED | {"max_tokens": 60, "logit_bias": BIAS, "seed": 1, "logprobs": True, "n": 2}
    answer = server.client().chat.completions.create(**fields)
    texts = ["", ""]
    for chunk in server.client().chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in answer.choices] == texts
    for choice, text in zip(answer.choices, texts, strict=True):
        assert choice.finish_reason == "stop"
        made = json.loads(text)
        assert list(made) == ["n", "ok"] and type(made["n"]) is int and made["ok"] in (True, None)


PROPERTIES = {
    "n": {"type": "integer", "minimum": 3}, "at": {"$ref": "#/$defs/place"}, "kind": {"$ref": "#/$defs/kind"},
    "code": {"type": "string"}, "ok": {"type": "boolean"}, "who": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}  # fmt: skip
DEFS = {"place": record({"x": {"type": "number", "minimum": 0, "maximum": 9}}), "kind": {"enum": ["left", "right"]}}
ARGUMENTS = record(PROPERTIES, 3) | {"$defs": DEFS}


def tool(name: str, schema: Any = ARGUMENTS, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema} | function}


TOOLS = [tool("run", strict=True), tool("look", SCHEMA)]
RUN = {"type": "function", "function": {"name": "run"}}
HOWS = {  # least and most calls
    "required": ({"tool_choice": "required"}, 1, 99), "named": ({"tool_choice": RUN}, 1, 1), "strict": ({}, 0, 99),
    "one": ({"parallel_tool_calls": False}, 0, 1), "or an answer": ({"response_format": FORMAT}, 0, 99),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", HOWS)
def test_calls_are_what_was_asked_for(family, how):
    """Whatever the grammar lets through parses; thoughts come first, where the model has some."""
    fields, least, most = HOWS[how]
    model, counts = served(chat=ChatForm(FAMILIES[family][0])), set()
    asked = read_request({"model": "tiny", "messages": ASKED["messages"], "tools": TOOLS} | fields, "chat", model, None)
    wanted = asked.sampling["sampling_options"]["structured_outputs"]
    marks = [b"\n</parameter>\n", b"</think>", b"<tool_call>", b"True"]
    for seed in range(20):
        parts = model.chat.answers.parts(asked.prompts[0].text, TOOLS)
        found = pieces(parts, text := walk(wanted, random.Random(seed), marks + JSON), random.Random(seed))
        calls = [call["function"] for call in found.get("tool_calls", ())]
        assert not parts.unparsed and least <= len(calls) <= most, text
        assert how != "named" or calls[0]["name"] == "run"
        for call in calls:
            jsonschema.validate(json.loads(call["arguments"]), {"run": ARGUMENTS, "look": SCHEMA}[call["name"]])
        if how == "or an answer" and not calls:
            jsonschema.validate(json.loads(found["content"]), SCHEMA)
        counts.add(len(calls))
    assert len(counts) > (how == "strict") or how == "named"


def test_a_named_tool_is_called(tools_server):  # noqa: F811
    """After thoughts that the request has ended."""
    messages = [*ASKED["messages"], {"role": "assistant", "content": "<think>\n</think>\n\n"}]
    body = {"messages": messages, "tools": [tool("run", SCHEMA), tool("look", SCHEMA)]}
    more = {"continue_final_message": True}
    fields = body | {"tool_choice": RUN, "logit_bias": {"10": 30}, "extra_body": more}
    answer = ask(tools_server, 1, **fields)
    (whole,), (again,) = (
        each.message.tool_calls for each in (answer.choices[0], streamed(tools_server, 1, **fields)[0])
    )
    assert (again.function.name, again.function.arguments) == (whole.function.name, whole.function.arguments)
    made = json.loads(whole.function.arguments)
    assert whole.function.name == "run" and type(made["n"]) is int and made["ok"] in (True, None)
    assert tools_server.send("/tokenize", body | more)[1]["count"] == answer.usage.prompt_tokens


CALL = {"response_format": None, "tools": TOOLS, "tool_choice": RUN}
TEXT = {"properties": {"text": {"type": "string", "pattern": "a+"}}}
WRONG = {
    "no schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    "no such type": ({"response_format": {"type": "xml"}}, "response_format"),
    "both": ({"structured_outputs": {"regex": "a"}}, "response_format"),
    "no end": ({"ignore_eos": True}, "structured_outputs"),
    "two": ({"response_format": None, "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    "no tools": (CALL | {"tools": []}, "tool_choice"),
    "no such tool": (CALL | {"tools": TOOLS[1:]}, "tool_choice"),
    "calls and a schema": (CALL | {"response_format": FORMAT}, "tool_choice"),
    "a strict pattern": (CALL | {"tools": [tool("run", TEXT, strict=True)]}, "tools"),
    "a schema that is none": (
        CALL | {"tools": [tool("run", {"properties": {"n": {"type": "x"}}})]},
        "structured_outputs",
    ),
    "drafts": ({}, "structured_outputs"),
    "drafts, a call": (CALL, "structured_outputs"),
    "no name of a tag": (CALL | {"tools": [tool("run", {"properties": {"a>": TEXT}})]}, "tools"),
}


@pytest.mark.parametrize("name", WRONG)
def test_400_in_one_line(name):
    fields, param = WRONG[name]
    model = served(chat=ChatForm(FAMILIES["qwen3-coder"][0]), has_drafts=name.startswith("drafts"))
    with pytest.raises(ApiError) as refused:
        read_request(ASKED | fields, "chat", model, None)
    assert (
        refused.value.status == 400 and refused.value.body["error"]["param"] == param and "\n" not in str(refused.value)
    )


def test_a_grammar_that_gets_stuck_is_400(server):
    check_stuck(server)


def test_a_grammar_that_nobody_has_time_for_is_503(monkeypatch):
    """A prompt that is too long is found before."""
    monkeypatch.setattr(grammar, "_SIDE_BY_SIDE", threading.BoundedSemaphore(1))
    monkeypatch.setattr(grammar, "LIMIT_S", 0)
    body = ASKED | {"response_format": None, "structured_outputs": {"regex": "not compiled yet"}}
    with grammar._SIDE_BY_SIDE:
        for more, status, headers in (({}, 503, {"retry-after": "1"}), ({"max_tokens": 10**6}, 400, None)):
            with pytest.raises(ApiError) as refused:
                read_request(body | more, "chat", served(), None)
            assert (refused.value.status, refused.value.headers) == (status, headers)


def test_others_are_answered_while_a_grammar_is_compiled(server, monkeypatch):
    real, begun, go_on = grammar.subprocess.run, threading.Event(), threading.Event()

    def run(*command: Any, **fields: Any) -> Any:
        begun.set()
        assert go_on.wait(HANG_S)
        return real(*command, **fields)

    monkeypatch.setattr(grammar.subprocess, "run", run)
    found: list[str] = []
    slow = {"structured_outputs": {"regex": "slow|er"}}
    thread = threading.Thread(target=lambda: found.append(complete(server.client(), extra=slow).choices[0].text))
    thread.start()
    assert begun.wait(HANG_S)
    assert complete(server.client(), PROMPT).choices[0].finish_reason == "length" and not found
    go_on.set()
    thread.join(HANG_S)
    assert found[0] in ("slow", "er")
