"""Answers of chats as thoughts, text and calls of tools, by transformers' parser of responses.

The parser splits an answer, as it comes, where the model's response template says; a call is parsed once it is complete. So one that
does not parse is text, and the answer goes on. Imported only if there is a chat template, as transformers is slow.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from typing import Any

import regex
from transformers.utils.chat_parsing import ResponseParser, parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from megatron_hybrid_prefix.errors import FieldError
from megatron_hybrid_prefix.text.calls import answer_grammar, types_of, visits

# What starts an answer, by a text of the chat template.
_TURNS = {
    "<|im_start|>": "<|im_start|>assistant\n",  # Qwen, Hermes, Nemotron 3
    "<|start_of_role|>": "<|start_of_role|>assistant<|end_of_role|>",  # Granite 4
}
_MARKS = {"open": "<tool_call>", "close": "</tool_call>"}
# The form of a call, likewise. Of several the first counts.
_CALLS: dict[str, dict[str, Any]] = {
    "<function=": {  # Qwen3-Coder, Qwen3.5, Nemotron 3
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {  # a value ends before another parameter, so that the time is linear in the text
            "tag_pattern": r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
        },
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    },
    "<tool_call>": {**_MARKS, "content": "json", "transform": {"function": "{content}"}},  # Hermes, Granite 4
}
# Names of fields in response templates, and in answers.
_KEYS = {"content": "content"} | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "reasoning_content")
Tools = Sequence[dict[str, Any]]
_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def known_template(chat_template: str) -> dict[str, Any] | None:
    """The response template of a family with such a chat template; None: no family is known."""
    anchor = next((turn for text, turn in _TURNS.items() if text in chat_template), None)
    calls = [{"tool_calls": form} for text, form in _CALLS.items() if text in chat_template]
    thoughts = {"reasoning_content": {"open": "<think>", "close": "</think>"}} if "<think>" in chat_template else {}
    fields = {"content": {}} | thoughts | (calls or [{}])[0]
    return {"start_anchor": anchor, "fields": fields} if anchor is not None and len(fields) > 1 else None


def _is_thought(name: str) -> bool:
    return _KEYS.get(name) == "reasoning_content"


class AnswerForm:
    """How a model writes its answers: a response template of transformers. Raises ValueError if it is none.

    Attributes:
        call: The form of calls; None: there is none.
    """

    def __init__(self, template: dict[str, Any]) -> None:
        load_response_template(template)
        anchor = {name: value for name, value in template.items() if name.startswith("start_anchor")}
        call = template["fields"].get("tool_calls")
        self.call = call and load_response_template(anchor | {"fields": {"tool_calls": call}})
        edges = {}  # of fields, without what is in them; where an answer ends the server knows
        for name, field in template["fields"].items():
            kept = {key: value for key, value in field.items() if key.startswith(("open", "close"))}
            edges[name] = kept | {"transform": "{content}"} if {"open", "open_pattern"} & kept.keys() else {}
        self._is_xml, self._writes = call == _CALLS["<function="], call in _CALLS.values()
        marks: Any = ((field.get("open"), field.get("close")) for name, field in edges.items() if _is_thought(name))
        self._thoughts = next((pair for pair in marks if all(isinstance(mark, str) for mark in pair)), None)
        if self._is_xml:
            edges["tool_calls"] = _MARKS  # also of a call that does not parse
        if all(edges.values()):
            edges[""] = {}  # what is in no field
        without = {name: edge for name, edge in edges.items() if name != "tool_calls"}
        self._kinds = [(load_response_template(anchor | {"fields": fields}), fields) for fields in (edges, without)]

    def begun(self, prompt: str) -> str:
        """What a prompt has of the answer's turn."""
        found = [*self._kinds[0][0].start_anchor_re.finditer(prompt)]
        return prompt[found[-1].end() :] if found else ""

    def grammar(self, begun: str, wanted: Any, tools: Tools, special: Collection[str], **how: bool) -> Any:
        """What a whole answer must match, as of `answer_grammar`; None: nothing. ``begun``: as of `begun`.

        Raises:
            FieldError: There is no grammar for calls in this form, or of a strict tool.
        """
        if tools and not self._writes:
            problem = "'tool_choice', strict 'tools' and 'parallel_tool_calls' do not go with this model's calls"
            raise FieldError("tool_choice", problem)
        last = ResponseParser(self._kinds[0][0], prefix=begun).initial_events[-1:]
        is_thinking = any(_is_thought(event["field"]) and event["type"] != "region_close" for event in last)
        marks = self._thoughts if is_thinking or not last else None
        if not tools and (wanted is None or marks is None):
            return wanted
        return answer_grammar(wanted, tools, special, marks, is_thinking=is_thinking, is_xml=self._is_xml, **how)

    def parts(self, prompt: str, tools: Tools) -> AnswerParts | None:
        """The parts of an answer after a prompt, with calls of these tools; None: it has only text."""
        edges, fields = self._kinds[not tools]
        marks = str((fields, tools and self.call)).replace("\\", "")
        return AnswerParts(self, edges, marks, prompt, tools) if len(fields) > 1 else None

    def calls_in(self, text: str, typed: Any) -> list[dict[str, Any]]:
        """The calls that a text is, in the form of the API; empty: it does not parse as a whole. ``typed``: as of `_typed`."""
        assert self.call is not None
        field = self.call.fields["tool_calls"]
        try:
            if tag := field.content_args.get("tag_pattern"):
                left = regex.sub(tag, "", text, flags=regex.DOTALL)
                if not field.close_re.fullmatch(left[field.open_re.match(left).end() :].strip()):
                    return []
            found = parse_response(text, self.call, prefix="", tools=typed)["tool_calls"]
            return [_api_call(**call["function"]) for call in (found if isinstance(found, list) else [found])]
        except _ERRORS:
            return []


def _typed(tools: Tools) -> list[dict[str, Any]]:
    """Tools with the types of their parameters, which transformers reads where a schema has no references."""
    left, typed = visits(), []
    for function in (tool["function"] for tool in tools):
        root = function.get("parameters") or {}
        kinds = {name: types_of(schema, root, set(), left) for name, schema in root.get("properties", {}).items()}
        properties = {name: {"type": types} for name, types in kinds.items()}
        typed.append({"name": function["name"], "parameters": {"properties": properties}})
    return typed


def _api_call(name: str, arguments: Any = None) -> dict[str, Any]:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments or {}
    if not (isinstance(name, str) and name and isinstance(given, dict)):
        raise ValueError("no name, or no arguments by name")
    text = json.dumps(given, ensure_ascii=False, allow_nan=False)
    (name + text).encode()  # half of a surrogate pair is no text
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": text}}


class AnswerParts:
    """One answer, as it comes. Blanks between thoughts, text and calls belong to none of them.

    Attributes:
        marks: Has the texts of the special tokens that begin and end thoughts and calls.
        calls: Number of calls.
        unparsed: Number of calls that came back as text.
    """

    def __init__(self, form: AnswerForm, edges: Any, marks: str, prompt: str, tools: Tools) -> None:
        self.marks, self.calls, self.unparsed = marks, 0, 0
        self._form, self._tools, self._fields = form, _typed(tools), edges.fields
        self._parser = ResponseParser(edges, prefix=prompt)
        self._text, self._at, self._start = "", 0, 0  # the answer, up to where it is parsed, where a call begins
        self._held = ""  # blanks that may be between two fields
        self._has_begun = all(event["field"] == "content" for event in self._parser.initial_events[-1:])
        self._deltas: list[dict[str, Any]] = []

    def feed(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """Adds text. Returns what is new, as the ``delta`` of chunks."""
        self._text += text
        for event in self._parser.feed(text) + (self._parser.finalize()[1] if last else []):
            self._take(event["type"], event["field"], event.get("text", ""))
        if last and self._has_begun and self._held:
            self._deltas.append({"content": self._held})
        deltas, self._deltas = self._deltas, []
        return deltas

    def _take(self, event: str, name: str, text: str) -> None:
        field, start = self._fields[name], self._at
        self._at += len(text)
        if event == "region_chunk" and name in _KEYS:
            self._say(name, text)
        if event == "region_chunk" or field.open_re is None:
            return
        edge = field.open_re if event == "region_open" else field.close_re
        if edge is not None and (found := edge.match(self._text, start)):  # else it is cut off
            self._at = found.end()
        if name != "tool_calls":
            self._held, self._has_begun = "", False
        elif event == "region_open":
            self._start = start
        else:
            self._take_call(self._text[self._start : self._at], is_whole=edge is None or found is not None)

    def _take_call(self, text: str, *, is_whole: bool) -> None:
        calls = self._form.calls_in(text, self._tools) if is_whole else []
        if calls:
            self._deltas.append({"tool_calls": [{"index": self.calls + at} | call for at, call in enumerate(calls)]})
            self.calls, self._held, self._has_begun = self.calls + len(calls), "", False
        else:
            self.unparsed += 1
            self._say("content", text)

    def _say(self, name: str, text: str) -> None:
        text = self._held + text if self._has_begun else text.lstrip()
        shown = text.rstrip()
        self._held, self._has_begun = text[len(shown) :], self._has_begun or bool(shown)
        if shown:
            self._deltas.append({_KEYS[name]: shown})
