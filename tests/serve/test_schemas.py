"""``response_format`` and ``structured_outputs`` over HTTP."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from megatron_hybrid_prefix.serve.errors import ApiError
from megatron_hybrid_prefix.serve.protocol import read_request
from megatron_hybrid_prefix.text import grammar
from tests.harness.limits import HANG_S
from tests.serve.test_clients import served
from tests.serve.test_serve import PROMPT, complete

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"enum": [True, None]}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
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


def test_each_kind_in_completions(server):
    kinds = {"choice": ["left", "right"]}, {"regex": "(left|right)"}, {"grammar": 'start: "left" | "right"'}
    for kind in kinds:
        (choice,) = complete(server.client(), extra={"structured_outputs": kind}).choices
        assert choice.text in ("left", "right") and choice.finish_reason == "stop"
    (choice,) = complete(server.client(), extra={"response_format": {"type": "json_object"}}).choices
    assert choice.text.startswith("{")


WRONG = {
    "no schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    "no such type": ({"response_format": {"type": "xml"}}, "response_format"),
    "both": ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    "no end": ({"ignore_eos": True}, "structured_outputs"),
    "no regex": ({"response_format": None, "structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    "two": ({"response_format": None, "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_400_in_one_line(name):
    fields, param = WRONG[name]
    with pytest.raises(ApiError) as refused:
        read_request(ASKED | fields, "chat", served(), None)
    assert (
        refused.value.status == 400 and refused.value.body["error"]["param"] == param and "\n" not in str(refused.value)
    )


def test_400_with_drafts():
    with pytest.raises(ApiError, match="num-speculative-tokens"):
        read_request(ASKED, "chat", served(has_drafts=True), None)


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
