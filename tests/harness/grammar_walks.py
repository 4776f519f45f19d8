"""Answers of a grammar, at random, as a model of random weights would give them; and schemas as those of JSONSchemaBench."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from megatron_hybrid_prefix.text.grammar import AnswerGrammar
from megatron_hybrid_prefix.text.tokenizer import ByteTokenizer

TOKENIZER, END = ByteTokenizer(512), 257
JSON = [b'"', b"@b.b", b"b", b"}", b"]", b":", b"null", b"0", b","]


def walk(wanted: dict[str, Any], dice: random.Random, phrases: list[bytes], most: int = 300) -> str:
    """A whole answer. After ``most`` bytes it is the beginning of one, which then goes on with the first of ``phrases``."""
    grammar, answer = AnswerGrammar(wanted, TOKENIZER, 512, [END]), list[int]()
    while len(answer) < 10 * most:
        may = np.unpackbits(grammar.mask(answer).view(np.uint8), bitorder="little")
        is_late = len(answer) > most
        if may[END] and (grammar.ends_now or is_late or dice.random() < 0.2):
            return bytes(answer).decode()
        assert not grammar.stuck, grammar.stuck
        whole = [phrase for phrase in phrases if grammar._matcher.validate_tokens([*phrase]) == len(phrase)]
        if whole and dice.random() < (0.9 if is_late else 0.3):
            answer += dice.choice(whole[:3] if is_late else whole)
        else:
            answer.append(int(dice.choice(may[:256].nonzero()[0])))
    raise AssertionError(f"no end: {bytes(answer)[-200:]!r}")


def record(properties: dict[str, Any], required: int = 1, **more: Any) -> dict[str, Any]:
    """The schema of an object whose first properties are required."""
    fields = {"type": "object", "properties": properties, "required": [*properties][:required]}
    return fields | {"additionalProperties": False} | more


NODE = record({"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})


def random_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of the bench's keywords. Its references are to `NODE`."""
    low, formats, patterns = (
        dice.randrange(-30, 30),
        ("time", "date-time", "uuid", "ipv4", "email"),
        ("^[a-z]{2,5}$", "b+", r"^\d{3}-\d$"),
    )
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "string"}, {"type": "string", "minLength": 2, "maxLength": 9}, {"type": "string", "format": dice.choice(formats)},
        {"type": "string", "pattern": dice.choice(patterns)}, {"type": "integer", "minimum": low, "maximum": low + dice.randrange(99)},
        {"type": "integer", "multipleOf": 5}, {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 2.5},
        {"type": ["boolean", "null"]}, {"enum": ["a\"ü", 3, None, -1.5, [1], {"x": True}]}, {"$ref": "#/$defs/node"},
    )  # fmt: skip
    if not depth or (depth < 3 and dice.random() < 0.6):
        return dice.choice(kinds)
    a, b, c, d = (random_schema(dice, depth - 1) for _ in range(4))
    names = dice.sample(["id", "a b", "größe", 'q"', "x-y", "$z"], 4)
    made = record(
        dict(zip(names, (a, b, c, d), strict=True)),
        dice.randrange(4),
        additionalProperties=dice.choice((False, True, d)),
    )
    kinds = (
        {"type": "array", "items": a, "minItems": dice.randrange(3), "maxItems": 4}, made, {"anyOf": [a, made]},
        {"type": "array", "prefixItems": [a, b], "items": c, "minItems": 1}, {"allOf": [made, record({"also": a}, 0, additionalProperties=True)]},
        {"oneOf": [record({"kind": {"const": kind}, "of": part}) for kind, part in zip("abc", (a, b, c), strict=True)]},
        record({}, patternProperties={"^n_[0-9]$": {"type": "number"}}, additionalProperties=a),
    )  # fmt: skip
    return dice.choice(kinds) | ({"$defs": {"node": NODE}} if depth == 3 else {})
