"""The fields of `HybridPrefixConfig` as options of a command line, made from the field and its help."""

from __future__ import annotations

import argparse
import types
from dataclasses import MISSING, Field
from typing import Any, Literal, Union, get_args, get_origin

NONE = "auto"  # stands for None on the command line


def add_option(group: argparse._ActionsContainer, field: Field[Any], kind: Any, flag: str, dest: str) -> None:
    """Adds the option of a field of type ``kind``. None: it is not given; else `value_of` makes the field's value of it."""
    text = f"{field.metadata.get('help', field.name).rstrip('.')} (default: {_shown(field.default)})"
    group.add_argument(flag, dest=dest, default=None, help=text.replace("%", "%%"), **_argument(field, kind))


def value_of(given: Any) -> Any:
    """The value of the field for that of its option, which was given."""
    return None if given == NONE else given


def _argument(field: Field[Any], kind: Any) -> dict[str, Any]:
    """Arguments of ``add_argument`` for a field's type."""
    optional = False
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [item for item in get_args(kind) if item is not type(None)]
        optional, kind = len(kinds) < len(get_args(kind)), kinds[0] if len(kinds) == 1 else None
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": [*get_args(kind), *([NONE] if optional else [])]}
    if "choices" in field.metadata:
        return {"choices": [*field.metadata["choices"](), *([NONE] if optional else [])]}
    if kind in (int, float, str):
        return {"type": _or_none(kind) if optional else kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}
    raise TypeError(f"HybridPrefixConfig.{field.name}: a field of this type cannot have a flag")


def _or_none(kind: type) -> Any:
    def parse(text: str) -> Any:
        return NONE if text == NONE else kind(text)

    parse.__name__ = f"{kind.__name__} or {NONE!r}"  # argparse shows it in its error
    return parse


def _shown(default: Any) -> str:
    if default is MISSING:
        return "none, required"
    if default is None:
        return NONE
    return ("on" if default else "off") if isinstance(default, bool) else str(default)
