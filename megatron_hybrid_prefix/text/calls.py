"""Grammars of whole answers of chats: thoughts, then text, calls of tools as the model writes them, or what the request asks for.

They are Lark, as llguidance has it. Only texts that the parser of answers would take apart are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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
_text = json.dumps  # a text in Lark


def answer_grammar(
    wanted: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    special: Collection[str],
    thoughts: tuple[str, str] | None,
    *,
    is_thinking: bool,
    is_xml: bool,
    must_call: bool = False,
    at_most_one: bool = False,
) -> dict[str, Any]:
    """The grammar of an answer, in the form of `SamplingOptions.structured_outputs`.

    Args:
        wanted: What text must match, in the same form; None: with tools, any text may come.
        tools: Tools to call. Arguments are of their schemas; of tools that are not strict, without what llguidance lacks.
        special: Texts of special tokens.
        thoughts: What begins and ends thoughts, which may come first; None: none may come.
        is_thinking: The prompt has begun them.
        is_xml: Whether each argument has a tag; else a call is JSON.
        must_call: Only calls may come.
        at_most_one: One call ends the answer.

    Raises:
        FieldError: A strict tool has a schema that this form of calls cannot follow, or any tool a name that it cannot write.
    """
    call = f"{_mark(_OPEN, special)} call"
    calls = f"BLANKS? {call}" + f" (BLANKS? {call})*" * (not at_most_one)
    start, body, others, rules = "", calls, list[dict[str, Any]](), [r"BLANKS: /[ \t\r\n]{1,8}/"]
    if thoughts is not None:
        rules += _up_to("thoughts", thoughts[1], special)
        start = "thoughts BLANKS?" if is_thinking else f"({_mark(thoughts[0], special)} thoughts BLANKS?)?"
    if not must_call and wanted is not None:
        body = f"{calls} | BLANKS? @answer" if tools else "BLANKS? @answer"
        first, *others = parts_of(wanted)
        others = [first | {"name": "answer"}, *others]
    elif not must_call:
        rules += [*_up_to("text", _OPEN, special), f"REST: {_without(_OPEN)}"]
        body = "text call | REST?" if at_most_one else "(text call)* REST?"
    if tools:
        rules += [f"VALUE: {_without(_CLOSE, '</parameter>', '<parameter=')} {_text(_END)}"] * is_xml
        left = visits()
        made = (_xml(tool["function"], left) if is_xml else _json(tool["function"]) for tool in tools)
        rules.append(f"call: ({' | '.join(made)}) {_mark(_CLOSE, special)}")
    lark = {"lark_grammar": "\n".join([f"start: {start} ({body})", *rules])}
    return {"grammar": json.dumps({"grammars": [lark, *others]})}


def visits() -> Iterator[int]:
    """How many parts of schemas `types_of` looks at for all tools of a request: many arguments may refer to one large schema."""
    return iter(range(50_000))


def types_of(schema: Any, root: Any, seen: set[str], left: Iterator[int], depth: int = 16) -> list[str]:
    """The types of a value, also by what its schema refers to in ``root``; empty: it may have any.

    ``seen`` gets the references. ``left``: `visits`; behind the last one a value may have any type.
    """
    if not isinstance(schema, dict) or not depth or next(left, None) is None:
        return []
    own, values = schema.get("type"), _values(schema)
    found = [each for each in (own if isinstance(own, list) else [own]) if isinstance(each, str)]
    found = found or [_TYPES[type(value)] for value in values]
    parts = [
        each for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list) for each in schema[name]
    ]
    if isinstance(target := schema.get("$ref"), str) and target not in seen:
        seen.add(target)
        parts.append(_at(root, target))
    for part in parts:
        found += types_of(part, root, seen, left, depth - 1)
    return found + ["null"] * (schema.get("nullable") is True)


def _values(schema: Mapping[str, Any]) -> list[Any]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def _at(root: Any, target: str) -> Any:
    for name in target.split("/")[1:]:
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _without(*texts: str) -> str:
    """A text with none of these in it."""
    return f"(/(?s:.*)/ & ~/(?s:.*)({'|'.join(map(re.escape, texts))})(?s:.*)/)".replace("</", r"<\/")


def _mark(text: str, special: Collection[str]) -> str:
    if text in special and not re.fullmatch(r"<[^<>\s]+>", text):
        raise FieldError("structured_outputs", f"structured_outputs: a grammar cannot name the special token {text!r}")
    return text if text in special else _text(text)


def _up_to(name: str, mark: str, special: Collection[str]) -> list[str]:
    """A rule: text up to the first such mark, and the mark."""
    text, token = _without(mark), name.upper()
    if mark in special:
        return [f"{name}: {token}? {_mark(mark, special)}", f"{token}: {text}"]
    return [f"{name}: {token}", f"{token}: {text} {_text(mark)}"]


def _schema(schema: Any, root: Any, strict: bool) -> str:
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return f"%json {json.dumps(shared | schema | {'x-guidance': {'lenient': not strict}})}"


def _json(function: Mapping[str, Any]) -> str:
    schema = _schema(function.get("parameters") or {"type": "object"}, {}, function.get("strict") is True)
    begin = f'\n{{"name": {json.dumps(function["name"])}, "arguments": '
    return f"{_text(begin)} {schema} {_text(chr(125) + chr(10))}"


def _xml(function: Mapping[str, Any], left: Iterator[int]) -> str:
    root, strict = function.get("parameters") or {}, function.get("strict") is True
    made, values = [_text(f"\n<function={function['name']}>\n")], root.get("properties") or {}
    for name, schema in values.items():
        if not re.fullmatch(r"[^<>\n]+", name):
            raise FieldError("tools", f"tools: {json.dumps(name)} cannot be written as the name of a parameter")
        value = f"{_text(f'<parameter={name}>{chr(10)}')} {_value(schema, root, strict, name, left)}"
        made.append(value if name in root.get("required", ()) else f"({value})?")
    made += [r'("<parameter=" /[^<>\n]+/ ">\n" VALUE)*'] * (not values and not strict)
    return f"{' '.join(made)} {_text('</function>' + chr(10))}"


def _value(schema: Any, root: Any, strict: bool, name: str, left: Iterator[int]) -> str:
    """A value and the end of its tag. Texts have no quotes, so that of what constrains them only a list of values can be followed."""
    types = types_of(schema, root, seen := set[str](), left)
    while isinstance(schema, dict) and schema.keys() - _SAYS_NOTHING == {"$ref"} and str(schema["$ref"]) in seen:
        seen.discard(schema["$ref"])
        schema = _at(root, schema["$ref"])
    schema = schema if isinstance(schema, dict) else {}
    values, says = _values(schema), schema.keys() - _SAYS_NOTHING
    if values and all(isinstance(value, str) for value in values):
        return f"({' | '.join(_text(value + _END) for value in values)})"
    if {*types} == {"boolean"} and says == {"type"}:  # JSON's and Python's: templates write either
        return f"/[Tt]rue|[Ff]alse/ {_text(_END)}"
    if types and "string" not in types:
        return f"{_schema(schema, root, strict)} {_text(_END)}"
    kinds = schema["anyOf"] if isinstance(schema.get("anyOf"), list) and says == {"anyOf"} else [schema]
    plain = [isinstance(kind, dict) and kind.keys() - _SAYS_NOTHING == {"type"} for kind in kinds]
    if strict and ({"object", "array"} & {*types} or not all(plain)):
        text = f"tools: in this model's calls {json.dumps(name)} cannot follow its schema: leave out 'strict'"
        raise FieldError("tools", text)
    return "VALUE"
