"""The table of request fields in ``docs/server-fields.md``, made from the models that check them.

To write it again: ``python -m scripts.server_fields > docs/server-fields.md``. A test compares both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_hybrid_prefix.serve.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ExplainBody,
    TokenizeBody,
)
from megatron_hybrid_prefix.serve.fields import (
    OF_ALL,
    OF_CHATS,
    OF_COMPLETIONS,
    OF_GENERATE,
    OF_TOKENIZE,
    Fields,
    Unless,
)
from megatron_hybrid_prefix.serve.generate_body import GenerateBody

_HEAD = """# Fields of the server's requests

Made from the models that check the requests: `python -m scripts.server_fields > docs/server-fields.md`.
A field of another type, out of range or not in a table is refused with status 400 and `error.param`. Fields that are null count
as absent. `curl` examples, other status codes, and what an answer says of the cache are in [Server](server.md#requests).
"""
BODIES: dict[str, type[Fields]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/inference/v1/generate": GenerateBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/admin/explain": ExplainBody,
}
_RANGES = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "to {}",
    "minLength": "length from {}",
    "maxLength": "length to {}",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "maxProperties": "at most {}",
}
_OTHERS: dict[str, dict[str, Unless]] = {
    "completions, chats and `/inference/v1/generate`": OF_ALL,
    "completions": OF_COMPLETIONS,
    "chats": OF_CHATS,
    "route `/inference/v1/generate`": OF_GENERATE,
    "route `/tokenize`": OF_TOKENIZE,
}


def document() -> str:
    """The whole document."""
    lines = [line for route, model in BODIES.items() for line in _section(route, model)]
    return "\n".join([_HEAD, *lines, *_others()])


def _section(route: str, model: type[Fields]) -> Iterator[str]:
    schema = model.model_json_schema()
    is_other = issubclass(model, Body) and model is not CompletionBody
    shared = set(CompletionBody.model_fields) & set(model.model_fields) if is_other else set()
    yield f"## `POST {route}`\n"
    if shared:
        others = ", ".join(f"`{name}`" for name in CompletionBody.model_fields if name not in shared)
        yield f"The fields of completions except {others}, and:\n"
    yield "| field | type | range | default | |"
    yield "|---|---|---|---|---|"
    for name, field in schema["properties"].items():
        if name in shared and field == CompletionBody.model_json_schema()["properties"][name]:
            continue
        default = "required" if name in schema.get("required", ()) else f"`{json.dumps(field.get('default'))}`"
        limits = ", ".join(limits_of(field))
        rule = model.neutral.get(name)
        text = field.get("description", "") if rule is None else f"refused unless {rule.text}"
        yield f"| `{name}` | {type_of(field)} | {limits} | {default} | {text} |"
    yield ""


def type_of(field: dict[str, Any]) -> str:
    """The types of a field of a JSON schema, in words."""
    if "$ref" in field:
        return "object"
    if "anyOf" in field:
        return " or ".join(type_of(option) for option in field["anyOf"] if option.get("type") != "null")
    if field.get("type") == "array":
        inner = type_of(field["items"])
        return f"array of ({inner})" if " or " in inner else f"array of {inner}"
    return str(field.get("type", "any"))


def limits_of(field: dict[str, Any]) -> Iterator[str]:
    """The limits of a field of a JSON schema, in words."""
    for part in (field, *field.get("anyOf", ())):
        for key, text in _RANGES.items():
            if key in part:
                value = part[key]
                yield text.format(int(value) if float(value).is_integer() else value)


def _others() -> Iterator[str]:
    yield "## Fields of other servers\n"
    yield "Clients of vLLM, SGLang and TGI send these along. They are refused unless they change nothing: null, or what is said here.\n"
    yield "| fields of | | unless |"
    yield "|---|---|---|"
    for of, neutral in _OTHERS.items():
        by_rule: dict[str, list[str]] = {}
        for name, rule in neutral.items():
            by_rule.setdefault(rule.text, []).append(f"`{name}`")
        yield from (f"| {of} | {', '.join(names)} | {rule} |" for rule, names in by_rule.items())
    yield ""


if __name__ == "__main__":
    print(document(), end="")
