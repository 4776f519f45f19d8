"""Answers of a grammar, at random, as a model of random weights would give them; and schemas as those of JSONSchemaBench."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from megatron_hybrid_prefix.text.grammar import AnswerGrammar
from megatron_hybrid_prefix.text.tokenizer import ByteTokenizer

TOKENIZER, END = ByteTokenizer(512), 257
JSON = [b'"', b"@b.b", b"b", b"}", b"]", b":", b"null", b"0", b","]
NODE = {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}


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


def random_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of the bench's keywords. Its references are to `NODE`, which the caller puts into ``$defs``."""
    low, formats = dice.randrange(-30, 30), ("time", "date-time", "uuid", "ipv4", "email")
    kind = dice.randrange(10 * (depth == 3), 17 if depth else 10)
    if kind < 10:
        leaves: tuple[dict[str, Any], ...] = (
            {"type": "string"}, {"type": "string", "minLength": 2, "maxLength": 9}, {"type": "string", "format": dice.choice(formats)},
            {"type": "string", "pattern": dice.choice((r"^[a-z]{2,5}$", "b+", r"^\d{3}-\d{2}$", "^(x|yz)*$"))},
            {"type": "integer", "minimum": low, "maximum": low + dice.randrange(99)}, {"type": "integer", "multipleOf": 5},
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 2.5}, {"type": ["boolean", "null"]},
            {"enum": ["a\"ü", 3, None, -1.5, [1], {"x": True}]}, {"$ref": "#/$defs/node"},
        )  # fmt: skip
        return leaves[kind]
    inner = [random_schema(dice, depth - 1) for _ in range(4)]
    names = dice.sample(["id", "a b", "größe", 'q"', "x-y", "$z"], 4)
    record = {
        "type": "object",
        "properties": dict(zip(names, inner, strict=True)),
        "required": names[: dice.randrange(4)],
    }
    match kind:
        case 10:
            return {"type": "array", "items": inner[0], "minItems": dice.randrange(3), "maxItems": 4}
        case 11:
            return {"type": "array", "prefixItems": inner[:2], "items": inner[2], "minItems": 1}
        case 12:
            return {"anyOf": [inner[0], record]}
        case 13:
            return {"oneOf": [{"type": "object", "properties": {"kind": {"const": kind}, "of": part}, "required": ["kind"], "additionalProperties": False}
                              for kind, part in zip("abc", inner, strict=False)]}  # fmt: skip
        case 14:
            more = {"type": "object", "properties": {"also": inner[0]}, "required": ["also"]}
            return {"allOf": [record, more]}
        case 15:
            return {
                "type": "object",
                "patternProperties": {"^n_[0-9]$": {"type": "number"}},
                "additionalProperties": inner[0],
            }
    return record | {"additionalProperties": dice.choice((False, True, inner[3]))}
