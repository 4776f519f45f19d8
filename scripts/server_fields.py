"""The table of request fields in ``docs/server-fields.md``, made from the models that check them.

To write it again: ``python -m scripts.server_fields > docs/server-fields.md``. A test compares both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from megatron_hybrid_prefix.serve.bodies import ChatBody, CompletionBody
from megatron_hybrid_prefix.serve.fields import OF_ALL, OF_CHATS, OF_COMPLETIONS, OF_TOKENIZE, Fields, Unless
from megatron_hybrid_prefix.serve.openapi import BODIES, limits_of, type_of

_HEAD = """# Fields of the server's requests

Made from the models that check the requests: `python -m scripts.server_fields > docs/server-fields.md`.
A field of another type, out of range or not in a table is refused with status 400 and `error.param`. Fields that are null count
as absent. `curl` examples, other status codes, and what an answer says of the cache are in [Server](server.md#requests).
"""
_OTHERS: dict[str, dict[str, Unless]] = {
    "completions and chats": OF_ALL,
    "completions": OF_COMPLETIONS,
    "chats": OF_CHATS,
    "route `/tokenize`": OF_TOKENIZE,
}


def document() -> str:
    """The whole document."""
    lines = [line for route, model in BODIES.items() for line in _section(route, model)]
    return "\n".join([_HEAD, *lines, *_others()])


def _section(route: str, model: type[Fields]) -> Iterator[str]:
    schema = model.model_json_schema()
    shared = set(CompletionBody.model_fields) & set(ChatBody.model_fields) if model is ChatBody else set()
    yield f"## `POST {route}`\n"
    if shared:
        others = ", ".join(f"`{name}`" for name in CompletionBody.model_fields if name not in shared)
        yield f"The fields of completions except {others}, and:\n"
    yield "| field | type | range | default | |"
    yield "|---|---|---|---|---|"
    for name, field in schema["properties"].items():
        if name in model.neutral and name not in model.model_fields:
            continue
        if name in shared and field == CompletionBody.model_json_schema()["properties"][name]:
            continue
        default = "required" if name in schema.get("required", ()) else f"`{json.dumps(field.get('default'))}`"
        limits = ", ".join(limits_of(field))
        yield f"| `{name}` | {type_of(field)} | {limits} | {default} | {field.get('description', '')} |"
    yield ""


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
