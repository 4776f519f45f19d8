"""Makes the rows of a contract from what our sources use and from the installed megatron-core."""

from __future__ import annotations

import ast
import enum
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any

from megatron_hybrid_prefix.platform import patches
from megatron_hybrid_prefix.upstream.capabilities import applies
from megatron_hybrid_prefix.upstream.check import ContractRow, Kind, accepts, attributes_of, parameters_of, problem_of
from scripts import contract_classes as classes
from scripts import contract_names as names
from scripts import contract_scan as scan
from scripts.contract_scan import Use

_VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
_MISSING = object()
_REFERENCE = re.compile(r"see [^.;:]*[.;:]\s*", re.IGNORECASE)
_END_OF_SENTENCE = re.compile(r"\.\s+(?=[A-Z`])")


def all_uses() -> list[Use]:
    """What our sources use of megatron, overrides included."""
    of_our_class = classes.megatrons_class_of_each()
    return [*(use for source in scan.sources() for use in scan.uses(source, of_our_class)), *_overrides()]


def rows_of(found: Sequence[Use]) -> tuple[list[ContractRow], list[str]]:
    """Rows for the installed megatron-core, sorted; and what is wrong with our sources, a line each."""
    paths = _paths(found)
    problems = [_unknown(use) for use in found if use.how == "unknown" and not _is_known_elsewhere(use)]
    where: dict[tuple[str, str, Kind], set[str]] = defaultdict(set)
    owners: dict[str, Any] = {path: owner for owner, path in paths.items()}
    for use in found:
        if use.how != "unknown" and (kind := _kind(use)) is not None:
            where[paths[use.owner], use.name, kind].add(use.where.partition(":")[0])
    rows = []
    for (path, name, kind), users in sorted(where.items()):
        owner, signature, why = owners[path], None, ""
        if kind in ("overrides", "wraps", "calls"):
            signature = signature_of(getattr(owner, name))
        if kind in ("overrides", "wraps"):
            why = reason_of(owner, name)
        row = ContractRow(owner=path, name=name, kind=kind, where=tuple(sorted(users)), signature=signature, why=why)
        rows.append(row)
        problems += [f"{row.symbol} ({kind}): {problem}" for problem in _problems(row, owner)]
    return rows, problems


def _problems(row: ContractRow, owner: Any) -> Iterator[str]:
    if problem := problem_of(row):
        yield problem
    if row.kind in ("overrides", "wraps"):
        if not row.why:
            yield "say in the first sentence of our method's docstring why we override it"
        if row.name != "__init__":
            yield from (
                f"megatron's takes {row.signature}, that of {cls.__name__} {signature_of(getattr(cls, row.name))}"
                for cls in overriders(owner, row.name)
                if not _fits(row, cls)
            )


def _fits(row: ContractRow, cls: type) -> bool:
    """Whether our method takes what megatron's takes, or passes on what it does not name."""
    assert row.signature is not None
    taken = list(inspect.signature(getattr(cls, row.name)).parameters.values())
    is_open = any(parameter.kind in _VARIADIC for parameter in taken)
    return is_open or accepts(parameters_of(row.signature), taken, strict=True)


def _unknown(use: Use) -> str:
    if use.owner is None:
        return f"{use.where}: {use.name} is private, and the class of the object is unknown: annotate the variable"
    return f"{use.where}: neither our class nor megatron's {use.owner.__name__} has {use.name}"


def _is_known_elsewhere(use: Use) -> bool:
    """Whether a private name is of others than megatron, or of a form that the installed megatron-core does not have."""
    bases = inspect.getmro(use.owner) if isinstance(use.owner, type) else ()
    symbols = (f"{base.__module__}.{base.__qualname__}.{use.name}" for base in bases)
    return use.name in names.NOT_MEGATRONS or not all(map(applies, symbols))


def _overrides() -> list[Use]:
    """What our classes define over megatron's."""
    found = []
    for cls in classes.our_classes():
        for part in classes.our_parts(cls):
            module = part.__module__.removeprefix(f"{classes.PACKAGE}.").replace(".", "/")
            defined = (name for name in classes.overridden(cls) if name in vars(part))
            found += [Use(classes.bases_of(cls)[0], name, module, "name") for name in defined]
    return found


def overriders(owner: type, name: str) -> list[type]:
    """Our classes that define a name of megatron's class, nearest to megatron first."""
    found: dict[type, None] = {}
    for cls in classes.our_classes():
        if owner is classes.bases_of(cls)[0]:
            found |= dict.fromkeys(part for part in reversed(classes.our_parts(cls)) if name in vars(part))
    return list(found)


def takes_all(cls: type, name: str) -> bool:
    """Whether a method takes any other arguments, to pass them on."""
    return {parameter.kind for parameter in inspect.signature(getattr(cls, name)).parameters.values()} >= _VARIADIC


# -- rows --------------------------------------------------------------------------------------------------------------


def _paths(found: Iterable[Use]) -> dict[Any, str]:
    """``module`` or ``module:Class`` of each owner: where our sources import it from, else where megatron defines it."""
    imported = defaultdict(set)
    for use in found:
        if use.how in ("module", "through") and isinstance(value := getattr(use.owner, use.name), type):
            imported[value].add(use.owner.__name__)
    paths = {}
    for owner in {use.owner for use in found if use.owner is not None}:
        if inspect.ismodule(owner):
            paths[owner] = owner.__name__
        else:
            modules = imported[owner]
            module = owner.__module__ if owner.__module__ in modules or not modules else min(modules)
            paths[owner] = f"{module}:{owner.__qualname__}"
    return paths


# Functions of optional packages that megatron imports, None without. Rows do not depend on what the machine has.
_OF_PACKAGES = ("megatron.core.ssm.mamba_mixer.causal_conv1d_fn",)


def _kind(use: Use) -> Kind | None:
    """How we use the name; None if it needs no row."""
    owner, name = use.owner, use.name
    if use.how == "key" or use.how == "mark":
        return use.how
    if use.how in ("module", "through"):
        if f"{owner.__name__}.{name}" in _OF_PACKAGES:
            return "package"
        return None if _is_known(owner.__name__, name) else _kind_in_module(getattr(owner, name))
    if (use.how == "class" or is_dataclass(owner)) and _is_known(owner.__module__, name):
        return None
    found = inspect.getattr_static(owner, name, _MISSING)
    ours = overriders(owner, name)
    if inspect.isroutine(found):
        if ours:
            return "wraps" if all(takes_all(cls, name) for cls in ours) else "overrides"
        return "calls"
    if isinstance(found, property):
        return "property"
    if issubclass(owner, enum.Enum) or (use.how == "class" and found is not _MISSING):
        return "constant"
    return "attribute" if name in attributes_of(owner) else "constant"


def _kind_in_module(value: Any) -> Kind:
    if isinstance(value, type):
        return "class"
    return "calls" if inspect.isroutine(value) else "constant"


def _is_known(module: str, name: str) -> bool:
    """Whether a name of a module is documented, or replaced and checked then."""
    tables = (patches.HOST_MEGATRON, patches.HOST_ATTENTION, patches.FA4)
    is_replaced = any((r.owner, r.name) == (module, name) for table in tables for r in table)
    return is_replaced or (names.is_documented(module) and not names.is_private(name))


def reason_of(owner: type, name: str) -> str:
    """Why we override a name: the first sentence of the docstring of our method, without ``See ...``; "" if there is none.

    The class nearest to megatron that has a reason is asked. Of a constructor it is the docstring of the class.
    """
    for cls in overriders(owner, name):
        text = " ".join(((cls if name == "__init__" else vars(cls)[name]).__doc__ or "").partition("\n\n")[0].split())
        while found := _REFERENCE.match(text):
            text = text[found.end() :]
        if text:
            return _END_OF_SENTENCE.split(text, maxsplit=1)[0].rstrip(".")
    return ""


def signature_of(function: Any) -> str:
    """Parameters of a function as text, with "async" before it for a coroutine. Defaults that are no literals are ``...``."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_literal(parameter.default))
        for parameter in inspect.signature(function).parameters.values()
    ]
    return ("async " if inspect.iscoroutinefunction(function) else "") + str(inspect.Signature(parameters))


class _Ellipsis:
    def __repr__(self) -> str:
        return "..."


def _literal(default: Any) -> Any:
    if default is inspect.Parameter.empty:
        return default
    try:
        return default if ast.literal_eval(repr(default)) == default else _Ellipsis()
    except (ValueError, SyntaxError):
        return _Ellipsis()
