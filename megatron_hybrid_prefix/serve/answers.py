"""Answers of chats as thoughts, text and calls of tools, by transformers' parser of responses.

The parser gets the answer as it comes, and splits it where the model's response template says; a call is parsed once it is complete.
So a call that does not parse is text, and the answer goes on. Imported only if there is a chat template, as transformers is slow.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

import regex
from transformers.utils.chat_parsing import ResponseParser, parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

# What starts an assistant's turn, by a text of the chat template.
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
        # A value ends before another parameter, so that the time is linear in the text.
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
        },
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    },
    "<tool_call>": {**_MARKS, "content": "json", "transform": {"function": "{content}"}},  # Hermes, Granite 4
}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names in response templates
_EDGES = ("open", "open_pattern", "close", "close_pattern")
_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def known_template(chat_template: str) -> dict[str, Any] | None:
    """The response template of a family with such a chat template; None: of none that is known."""
    anchor = next((turn for text, turn in _TURNS.items() if text in chat_template), None)
    calls = next((form for text, form in _CALLS.items() if text in chat_template), None)
    fields: dict[str, Any] = {"content": {}}
    if "<think>" in chat_template:
        fields["reasoning_content"] = {"open": "<think>", "close": "</think>"}
    if calls is not None:
        fields["tool_calls"] = calls
    return {"start_anchor": anchor, "fields": fields} if anchor is not None and len(fields) > 1 else None


class AnswerForm:
    """How a model writes its answers.

    Args:
        template: A response template of transformers.

    Raises:
        ValueError: It is none.
    """

    def __init__(self, template: dict[str, Any]) -> None:
        load_response_template(template)
        anchor = {name: value for name, value in template.items() if name.startswith("start_anchor")}
        fields: dict[str, dict[str, Any]] = template["fields"]
        call = fields.get("tool_calls")
        self._call = None if call is None else load_response_template(anchor | {"fields": {"tool_calls": call}})
        edges = {}
        for name, field in fields.items():
            edges[name] = {key: field[key] for key in _EDGES if key in field} | {"transform": "{content}"}
            if not {"open", "open_pattern"} & field.keys():
                edges[name] = {}  # the server knows where an answer ends
        if call is _CALLS["<function="]:
            edges["tool_calls"] = _MARKS  # also of a call that does not parse
        if all(edges.values()):
            edges[""] = {}  # what is in no field, which the parser leaves out
        self._edges = [(load_response_template(anchor | {"fields": edges}), str((edges, call)).replace("\\", ""))]
        edges.pop("tool_calls", None)
        self._edges.append((load_response_template(anchor | {"fields": edges}), str(edges).replace("\\", "")))

    @property
    def has_calls(self) -> bool:
        """Whether there is a form of calls."""
        return self._call is not None

    def parts(self, prompt: str, tools: Sequence[dict[str, Any]]) -> AnswerParts | None:
        """The parts of an answer after a prompt, with calls of these tools; None: it has only text."""
        edges, marks = self._edges[not tools]
        return AnswerParts(self, edges, marks, prompt, tools) if len(edges.fields) > 1 else None

    def calls_in(self, text: str, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The calls of a complete text of them, in the form of the API; empty: it does not parse as a whole."""
        assert self._call is not None
        field = self._call.fields["tool_calls"]
        try:
            if tag := field.content_args.get("tag_pattern"):
                left = regex.sub(tag, "", text, flags=regex.DOTALL)
                if not field.close_re.fullmatch(left[field.open_re.match(left).end() :].strip()):
                    return []
            found = parse_response(text, self._call, prefix="", tools=list(tools))["tool_calls"]
            return [_api_call(call) for call in (found if isinstance(found, list) else [found])]
        except _ERRORS:
            return []


def _api_call(call: Any) -> dict[str, Any]:
    name, given = call["function"]["name"], call["function"].get("arguments") or {}
    arguments = json.loads(given) if isinstance(given, str) else given
    rest = call["function"].keys() - {"name", "arguments"}
    if rest or not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError("no name, no arguments by name, or more than these")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + text).encode()  # half of a surrogate pair is no text
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": text}}


class AnswerParts:
    """One answer, as it comes. Blanks between thoughts, text and calls belong to none of them.

    Attributes:
        marks: Texts of special tokens are looked for in it: it has what begins and ends thoughts and calls.
        calls: Number of calls.
        unparsed: Number of calls that came back as text.
    """

    def __init__(self, form: AnswerForm, edges: Any, marks: str, prompt: str, tools: Sequence[dict[str, Any]]) -> None:
        self.marks, self.calls, self.unparsed = marks, 0, 0
        self._form, self._tools, self._fields = form, tools, edges.fields
        self._parser = ResponseParser(edges, prefix=prompt)
        self._text, self._at, self._start = (
            "",
            0,
            0,
        )  # the answer, up to where it is parsed, where the last field begins
        self._held = ""  # blanks that may be between two fields
        self._has_begun = not self._parser.initial_events or self._parser.initial_events[-1]["field"] == "content"
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
        field = self._fields[name]
        if event == "region_chunk":
            self._at += len(text)
            if name != "tool_calls":
                self._say(name, text)
        elif field.open_re is None:
            pass
        elif event == "region_open":
            self._start, self._at = self._at, self._end_of(field.open_re) or self._at
            if name != "tool_calls":
                self._begin()
        else:
            end = self._end_of(field.close_re)
            self._at = end or self._at
            if name != "tool_calls":
                self._begin()
            else:
                self._call(self._text[self._start : self._at], is_whole=end is not None or field.close_re is None)

    def _end_of(self, edge: Any) -> int | None:
        found = edge and edge.match(self._text, self._at)
        return found.end() if found else None

    def _begin(self) -> None:
        self._held, self._has_begun = "", False

    def _call(self, text: str, *, is_whole: bool) -> None:
        calls = self._form.calls_in(text, self._tools) if is_whole else []
        if not calls:
            self.unparsed += 1
            self._say("content", text)
            return
        self._deltas.append({"tool_calls": [{"index": self.calls + at} | call for at, call in enumerate(calls)]})
        self.calls += len(calls)
        self._begin()

    def _say(self, name: str, text: str) -> None:
        key = "reasoning_content" if name in _THOUGHTS else name
        if key not in ("reasoning_content", "content"):
            return
        text = self._held + text if self._has_begun else text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            self._has_begun = True
            self._deltas.append({key: shown})
