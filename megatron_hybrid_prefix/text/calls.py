"""Grammars of whole answers of chats: thoughts, then text, calls of tools as the model writes them, or what the request asks for.

They are Lark, as llguidance has it. Only texts that the parser of answers would take apart are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from types import NoneType
from typing import Any

from megatron_hybrid_prefix.errors import FieldError
from megatron_hybrid_prefix.text.grammar import parts_of

_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    NoneType: "null",
    dict: "object",
    list: "array",
}
_OPEN, _CLOSE, _END = "<tool_call>", "</tool_call>", "\n</parameter>\n"
_SAYS_NOTHING = {"title", "description", "default", "examples", "deprecated", "nullable"}  # of which texts are right


def answer_grammar(
    wanted: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    *,
    is_xml: bool,
    must_call: bool,
    at_most_one: bool,
    thoughts: tuple[str, str] | None,
    is_thinking: bool,
    special: Collection[str],
) -> dict[str, Any]:
    """The grammar of an answer, in the form of `SamplingOptions.structured_outputs`.

    Args:
        wanted: What text must match, in the same form; None: with tools, any text may come.
        tools: Tools to call. Arguments are of their schemas; of tools that are not strict, without what llguidance lacks.
        is_xml: Whether each argument has a tag; else a call is JSON.
        must_call: Only calls may come.
        at_most_one: One call ends the answer.
        thoughts: What begins and ends thoughts, which may come first; None: none may come.
        is_thinking: The prompt has begun them.
        special: Texts of special tokens.

    Raises:
        FieldError: A strict tool has a schema that this form of calls cannot follow, or any tool a name that it cannot write.
    """
    start, rules = "", [r"BLANKS: /[ \t\r\n]+/"]
    if thoughts is not None:
        begin, end = thoughts
        rules += _up_to("thoughts", end, special)
        start = "thoughts BLANKS?" if is_thinking else f"({_mark(begin, special)} thoughts BLANKS?)?"
    call = f"{_mark(_OPEN, special)} call"
    calls = f"BLANKS? {call}" + f" (BLANKS? {call})*" * (not at_most_one)
    answers = [calls] * bool(tools and (must_call or wanted))
    others: list[dict[str, Any]] = []
    if wanted is not None and not must_call:
        answers.append("BLANKS? @answer")
        first, *others = parts_of(wanted)
        others = [first | {"name": "answer"}, *others]
    elif not must_call:
        rules += [*_up_to("text", _OPEN, special), f"REST: {_without(_OPEN)}"]
        answers = ["text call", "REST?"] if at_most_one else ["(text call)* REST?"]
    if tools:
        rules += [f"VALUE: {_without(_CLOSE, '</parameter>', '<parameter=')} {json.dumps(_END)}"] * is_xml
        rules.append("call: " + " | ".join((_xml if is_xml else _json)(tool["function"], special) for tool in tools))
    lark = "\n".join([f"start: {start} ({' | '.join(answers)})", *rules])
    return {"grammar": json.dumps({"grammars": [{"lark_grammar": lark}, *others]})}


def types_of(schema: Any, root: Any, seen: set[str], depth: int = 16) -> list[str]:
    """The types of a value, also by what its schema refers to in ``root``; empty: it may have any. ``seen`` gets the references."""
    if not isinstance(schema, dict) or not depth:
        return []
    own, values = schema.get("type"), schema.get("enum", [schema["const"]] if "const" in schema else None)
    found = [each for each in (own if isinstance(own, list) else [own]) if isinstance(each, str)]
    if not found and isinstance(values, list):
        found = [_TYPES[type(value)] for value in values]
    if isinstance(target := schema.get("$ref"), str) and target not in seen:
        seen.add(target)
        found += types_of(_at(root, target), root, seen, depth - 1)
    for name in ("anyOf", "oneOf", "allOf"):
        for each in schema[name] if isinstance(schema.get(name), list) else ():
            found += types_of(each, root, seen, depth - 1)
    return found + ["null"] * (schema.get("nullable") is True)


def _at(root: Any, target: str) -> Any:
    for name in target.removeprefix("#").split("/")[1:]:
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _without(*texts: str) -> str:
    """A text with none of these in it."""
    return f"(/(?s:.*)/ & ~/(?s:.*)({'|'.join(re.escape(text) for text in texts)})(?s:.*)/)".replace("</", r"<\/")


def _mark(text: str, special: Collection[str]) -> str:
    if text in special and not re.fullmatch(r"<[^<>\s]+>", text):
        raise FieldError(
            "structured_outputs", f"structured_outputs: the grammar cannot name the special token {text!r}"
        )
    return text if text in special else json.dumps(text)


def _up_to(name: str, mark: str, special: Collection[str]) -> list[str]:
    """A rule: text up to the first such mark, and the mark."""
    text, token = _without(mark), name.upper()
    if mark in special:
        return [f"{name}: {token}? {_mark(mark, special)}", f"{token}: {text}"]
    return [f"{name}: {token}", f"{token}: {text} {json.dumps(mark)}"]


def _schema(schema: Any, root: Any, strict: bool) -> str:
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return f"%json {json.dumps(shared | schema | {'x-guidance': {'lenient': not strict}})}"


def _json(function: Mapping[str, Any], special: Collection[str]) -> str:
    schema = function.get("parameters") or {"type": "object"}
    begin = f'\n{{"name": {json.dumps(function["name"])}, "arguments": '
    made = _schema(schema, {}, function.get("strict") is True)
    return f"{json.dumps(begin)} {made} {json.dumps('}' + chr(10))} {_mark(_CLOSE, special)}"


def _xml(function: Mapping[str, Any], special: Collection[str]) -> str:
    root = function.get("parameters") or {}
    values, strict = root.get("properties") or {}, function.get("strict") is True
    made = [json.dumps(f"\n<function={function['name']}>\n")]
    for name, schema in values.items():
        if not re.fullmatch(r"[^<>\n]+", name):
            raise FieldError("tools", f"tools: {json.dumps(name)} cannot be written as the name of a parameter")
        value = f"{json.dumps(f'<parameter={name}>{chr(10)}')} {_value(schema, root, strict, name)}"
        made.append(value if name in root.get("required", ()) else f"({value})?")
    if not values and not strict:
        made.append(r'("<parameter=" /[^<>\n]+/ ">\n" VALUE)*')
    return f"{' '.join(made)} {json.dumps('</function>' + chr(10))} {_mark(_CLOSE, special)}"


def _value(schema: Any, root: Any, strict: bool, name: str) -> str:
    """A value and the end of its tag. A text is not quoted, so that what constrains texts cannot be followed, but `enum`."""
    seen: set[str] = set()
    types = types_of(schema, root, seen)
    schema = schema if isinstance(schema, dict) else {}
    while set(schema) - _SAYS_NOTHING == {"$ref"} and schema["$ref"] in seen:
        seen.discard(schema["$ref"])
        schema = _at(root, schema["$ref"]) or {}
    texts = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if texts and all(isinstance(text, str) for text in texts):
        return f"({' | '.join(json.dumps(text + _END) for text in texts)})"
    if set(types) == {"boolean"} and set(schema) - _SAYS_NOTHING == {
        "type"
    }:  # Python's and JSON's: templates write either
        return f"/[Tt]rue|[Ff]alse/ {json.dumps(_END)}"
    if types and "string" not in types:
        return f"{_schema(schema, root, strict)} {json.dumps(_END)}"
    kinds = [each for each in schema.get("anyOf", [schema]) if isinstance(each, dict)]
    if strict and (
        any(set(kind) - _SAYS_NOTHING - {"type"} for kind in kinds) or {"object", "array"} & set(types) or not types
    ):
        raise FieldError(
            "tools", f"tools: in this model's calls {json.dumps(name)} cannot follow its schema: leave out 'strict'"
        )
    return "VALUE"
