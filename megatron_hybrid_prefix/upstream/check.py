"""Rows of a contract, and how a row is compared with the installed megatron-core.

Classes, methods, functions and constants are looked up. Attributes of objects are searched in the source of their class:
``self.NAME = ...`` in any method, or an annotation. No object is constructed.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_hybrid_prefix.upstream.rebinding import resolve

Kind = Literal["overrides", "wraps", "calls", "attribute", "mark", "key", "property", "class", "constant", "package"]

_MISSING = object()
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractRow:
    """One name of megatron that this package depends on.

    Attributes:
        owner: A module path, or ``module:Class``.
        name: The name in it.
        kind: How this package uses it:
            "overrides": a method that we override; it may not gain a parameter;
            "wraps": a method that we override and that passes on ``*args, **kwargs``; it may gain parameters with a default;
            "calls": a function, method or class that we call; it may gain parameters with a default;
            "attribute": an attribute of its objects; "property"; "class";
            "constant": a module constant, a class attribute, or a member of an enum;
            "package": a function of an optional package, None where the package is missing;
            "mark": an attribute that the owner's code sets on other objects;
            "key": a key of a dictionary that the module's code fills.
        where: Modules of this package that use it, as ``folder/module``.
        signature: Parameters of a callable, with their defaults (``...``: any default); "async" before it for a coroutine.
        others: Signatures that it has in other versions of megatron.
        why: Why we override it; else empty.
    """

    owner: str
    name: str
    kind: Kind
    where: tuple[str, ...]
    signature: str | None = None
    others: tuple[str, ...] = ()
    why: str = ""

    @property
    def symbol(self) -> str:
        """The name, dotted."""
        return f"{self.owner.replace(':', '.')}.{self.name}"


def problem_of(entry: ContractRow) -> str | None:
    """What was expected and what was found, if the entry does not match; else None."""
    try:
        owner = resolve(entry.owner)
    except (ImportError, AttributeError) as error:
        return f"expected in {entry.owner.replace(':', '.')}, found that {error}"
    found = inspect.getattr_static(owner, entry.name, _MISSING)
    # A method or property cannot be used like an attribute.
    is_plain = not (inspect.isroutine(found) or isinstance(found, property))
    if entry.kind == "attribute" and is_plain and entry.name in attributes_of(owner):
        return None
    if entry.kind == "mark":
        return None if entry.name in marks_of(owner) else "expected to be set by its methods, found nothing"
    if entry.kind == "key":
        source = read_source(entry.owner.partition(":")[0])
        is_there = re.search(rf"""(['"]){entry.name}\1""", source) is not None
        return None if is_there else "expected as a key in its source, found nothing"
    expected = entry.signature or f"{'an' if entry.kind == 'attribute' else 'a'} {entry.kind}"
    if found is _MISSING:
        return f"expected {expected}, found nothing"
    if entry.signature is not None:
        known = (entry.signature, *entry.others)
        said = [_signature_problem(one, getattr(owner, entry.name), strict=entry.kind == "overrides") for one in known]
        return None if None in said else said[0]
    is_as_expected = {
        "property": isinstance(found, property),
        "class": isinstance(found, type),
        "constant": is_plain,
        "package": found is None or callable(found),
    }.get(entry.kind, False)
    return None if is_as_expected else f"expected {expected}, found a {type(found).__name__}"


# -- signatures --------------------------------------------------------------------------------------------------------


def _signature_problem(expected: str, function: Any, *, strict: bool) -> str | None:
    if not callable(function):
        return f"expected {expected}, found a {type(function).__name__}"
    is_async = inspect.iscoroutinefunction(function)
    found = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    is_same = is_async == expected.startswith("async ")
    if is_same and accepts(parameters_of(expected), found, strict=strict):
        return None
    return f"expected {expected}, found {'async ' if is_async else ''}{inspect.Signature(found)}"


def parameters_of(signature: str) -> list[inspect.Parameter]:
    """Parameters of a signature in text form, with or without "async"."""
    defined: dict[str, Any] = {}
    exec(f"def function{signature.removeprefix('async ')}: ...", defined)
    return list(inspect.signature(defined["function"]).parameters.values())


def accepts(expected: Sequence[inspect.Parameter], found: Sequence[inspect.Parameter], *, strict: bool) -> bool:
    """Whether code written for the expected parameters works with the found ones.

    Names, order, kinds and defaults must be the same. If not ``strict``, optional parameters may follow.
    """
    if strict:
        return len(expected) == len(found) and all(map(_same, expected, found))
    leading = [p for p in expected if p.kind in _POSITIONAL]
    if not all(map(_same, leading, found)) or len(found) < len(leading):
        return False
    rest, more = {p.name: p for p in expected[len(leading) :]}, found[len(leading) :]
    if not rest.keys() <= {p.name for p in more}:
        return False
    takes_any = any(p.kind == inspect.Parameter.VAR_POSITIONAL for p in expected)
    for parameter in more:
        if parameter.name in rest:
            if not _same(rest[parameter.name], parameter):
                return False
        # A required parameter, or one that would take a positional argument meant for *args.
        elif (parameter.kind not in _VARIADIC and parameter.default is parameter.empty) or (
            takes_any and parameter.kind in _POSITIONAL
        ):
            return False
    return True


def _same(expected: inspect.Parameter, found: inspect.Parameter) -> bool:
    if (expected.name, expected.kind) != (found.name, found.kind):
        return False
    if expected.default is ...:
        return found.default is not found.empty
    return expected.default is found.default or bool(expected.default == found.default)


# -- attributes of objects ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Assigned:
    own: frozenset[str]  # on self, or in the class
    marks: frozenset[str]  # on anything else


def attributes_of(cls: Any) -> frozenset[str]:
    """Names that the class, or a base of megatron's, assigns to itself or ``self``, or annotates."""
    bases = [base for base in inspect.getmro(cls) if base.__module__.startswith("megatron.")]
    return frozenset().union(*(_assigned(base).own for base in bases))


def marks_of(cls: type) -> frozenset[str]:
    """Names that the methods of the class assign to other objects."""
    return _assigned(cls).marks


def _assigned(cls: type) -> _Assigned:
    return _assigned_in(cls.__module__).get(cls.__name__, _Assigned(frozenset(), frozenset()))


@functools.cache
def _assigned_in(module: str) -> dict[str, _Assigned]:
    """By class of the module. Syntax trees are not cached, as they are large."""
    collects = gc.isenabled()
    gc.disable()  # else it scans the whole heap repeatedly while a tree is built
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # escapes in megatron's docstrings
            tree = ast.parse(read_source(module))
        return {node.name: _assigned_by(node) for node in _statements(tree.body) if isinstance(node, ast.ClassDef)}
    finally:
        if collects:
            gc.enable()


def _assigned_by(definition: ast.ClassDef) -> _Assigned:
    own: set[str] = set()
    other: set[str] = set()
    for node in _statements(definition.body):
        for target in _targets(node):
            match target:
                case ast.Attribute(ast.Name("self"), name):
                    own.add(name)
                case ast.Attribute(_, name) | ast.Expr(ast.Call(ast.Name("setattr"), [_, ast.Constant(str(name)), *_])):
                    other.add(name)
    for node in definition.body:
        own.update(target.id for target in _targets(node) if isinstance(target, ast.Name))
    return _Assigned(frozenset(own), frozenset(other))


def read_source(module: str) -> str:
    """The text of an importable module."""
    return inspect.getsource(importlib.import_module(module))


def _statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """All statements in ``body``, at any depth. Expressions, most of a tree, are skipped."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            if inner := getattr(node, field, None):
                yield from _statements(inner)


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    """What a statement assigns to, without tuples and lists around it."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.Tuple | ast.List):
        targets = node.elts
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    else:
        yield node
        return
    for target in targets:
        yield from _targets(target)
