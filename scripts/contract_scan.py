"""Finds what our sources use of megatron-core, by reading them. ``contract_rows.py`` makes rows of it.

Found are: names that a class of ours defines over megatron's; imports; names that are read, written or called on an object
of megatron, also by ``getattr`` and by keyword; items of its dictionaries. The class of an object is known

- of ``self`` and ``super()``, where our class derives from megatron's;
- of a parameter or variable with an annotation, or after ``isinstance``, or made by a call of the class;
- of any other variable or attribute by its name (``RECEIVERS`` there).

A private name on an object of unknown class is reported, and so is one that megatron's class does not have.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import itertools
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_hybrid_prefix.upstream.check import attributes_of, marks_of
from megatron_hybrid_prefix.upstream.rebinding import resolve
from scripts.contract_classes import OF_EVERY_CLASS, PACKAGE, bases_of, has, is_upstream
from scripts.contract_names import DICTIONARIES, RECEIVERS, is_private

ROOT = Path(__file__).resolve().parents[1]
# Folders that do not import megatron (CONTRIBUTING.md): no variable there holds an object of it.
_WITHOUT_MEGATRON = ("index/", "policy/", "pool/", "tiers/", "ops/", "lab/")
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


class Use(NamedTuple):
    """One name in our sources.

    Attributes:
        owner: Class or module of megatron that has the name. None: the name is private, and its owner is unknown.
        name: The name.
        where: Module and line.
        how: "name" of an object; of a "class"; imported from a "module", or "through" a module of ours; a "mark", which the
            owner sets on other objects; a "key" of its dictionaries; "unknown" to the owner in the installed version.
    """

    owner: Any
    name: str
    where: str
    how: str


class Source(NamedTuple):
    """A module of ours: its path in the package, its text, and what its names are bound to."""

    name: str
    text: str
    namespace: Mapping[str, Any] = {}


@functools.cache
def sources() -> list[Source]:
    """Modules of the package."""
    found = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        inner = path.relative_to(ROOT).with_suffix("")
        namespace = vars(importlib.import_module(".".join(inner.parts).removesuffix(".__init__")))
        found.append(Source(inner.as_posix().removeprefix(f"{PACKAGE}/"), path.read_text("utf-8"), namespace))
    return found


def nested_classes(source: Source) -> list[str]:
    """Classes derived from megatron's in functions, which `our_classes` does not see."""
    reader = _Reader(source, {})
    top = set(reader.tree.body) if source.namespace else set()
    nodes = [node for node in ast.walk(reader.tree) if isinstance(node, ast.ClassDef) and node not in top]
    values = {node.name: map(reader.value, node.bases) for node in nodes}
    return [name for name, bases in values.items() if any(isinstance(b, type) and bases_of(b) for b in bases)]


# -- uses --------------------------------------------------------------------------------------------------------------


def uses(source: Source, of_our_class: Mapping[str, type]) -> list[Use]:
    """Names of megatron's modules and objects in a source.

    Args:
        source: The module.
        of_our_class: See `megatrons_class_of_each`.
    """
    reader = _Reader(source, of_our_class)
    return [*reader.imports(), *reader.visit(reader.tree, _Scope())]


@dataclass
class _Scope:
    """What is known inside a class or function.

    Attributes:
        of_self: Megatron's class of ``self``.
        own: Names that the class defines.
        classes: Megatron's classes that a variable may be of; none: it is of another class.
        strings: Strings that a variable stands for, one after another; the keys of a dictionary.
    """

    of_self: type | None = None
    own: frozenset[str] = frozenset()
    classes: dict[str, list[type]] = field(default_factory=dict)
    strings: dict[str, list[str]] = field(default_factory=dict)


class _Reader:
    """Reads one module."""

    def __init__(self, source: Source, of_our_class: Mapping[str, type]) -> None:
        self.source, self.of_our_class = source, of_our_class
        self.tree = ast.parse(source.text)
        self.names = dict(source.namespace) | self._imported()
        by_name = not source.name.startswith(_WITHOUT_MEGATRON)
        self.receivers = _receivers() if by_name else {}
        others = [n for n in ast.walk(self.tree) if isinstance(n, ast.ClassDef) and n.name not in of_our_class]
        self.of_this_module = set().union(*map(_defined_in, others))
        self.markers = sorted({*of_our_class.values(), *self.receivers.values()}, key=lambda cls: cls.__qualname__)

    def imports(self) -> Iterator[Use]:
        """Names that the source imports from megatron, or from a module of ours that imports them."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and _is_read(node.module):
                module = _import(node.module or "")
                for alias in node.names if module is not None else ():
                    yield from self._named(module, alias.name, node)

    def visit(self, node: ast.AST, scope: _Scope) -> Iterator[Use]:
        """Names in a node and below."""
        if isinstance(node, ast.ClassDef):
            scope = _Scope(self.of_our_class.get(node.name), frozenset(_defined_in(node)))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            scope = self._function(node, scope)
        for child in ast.iter_child_nodes(node):
            yield from self.visit(child, scope)
        if isinstance(node, ast.Call):
            yield from self._call(node, scope)
        for value, name in self._accesses(node, scope):
            yield from self._access(value, name, node, scope)
        if isinstance(node, ast.Subscript):
            owner = DICTIONARIES.get(_last(node.value) or "") if self.receivers else None
            for key in self._strings(node.slice, scope) if owner is not None else ():
                yield self._use(resolve(owner), key, node, "key")

    def value(self, node: ast.expr) -> Any:
        """What an expression of names is bound to when the module is imported; None if it is not known."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            is_static = inspect.ismodule(owner) or isinstance(owner, type) or is_upstream(type(owner))
            return getattr(owner, node.attr, None) if is_static else None
        return None

    def _use(self, owner: Any, name: str, node: ast.AST, how: str) -> Use:
        return Use(owner, name, f"{self.source.name}:{node.lineno}", how)  # type: ignore[attr-defined]

    def _access(self, value: ast.expr, name: str, node: ast.AST, scope: _Scope) -> Iterator[Use]:
        bound = self.value(value)
        if inspect.ismodule(bound):
            if isinstance(node, ast.Attribute):
                yield from self._named(bound, name, node)
            return
        found = getattr(bound, name, None)
        if isinstance(found, enum.Enum) and is_upstream(type(found)):
            yield self._use(type(found), found.name, node, "class")
            return
        is_class = isinstance(bound, type)
        owners = self._megatrons(bound) if is_class else self._classes_of(value, scope)
        owner = next((cls for cls in owners if has(cls, name) and name not in OF_EVERY_CLASS), None)
        if owner is not None:
            yield self._use(owner, name, node, "class" if is_class else "name")
        elif _is_self(value):
            if owners and is_private(name) and name not in scope.own:
                yield self._use(owners[0], name, node, "unknown")
        elif is_private(name) or (isinstance(node, ast.Call) and not owners):
            marker = next((cls for cls in self.markers if name in marks_of(cls)), None)
            if marker is not None:
                yield self._use(marker, name, node, "mark")
            elif is_private(name) and name not in self.of_this_module:  # else of another object of a class of ours
                yield self._use(next(iter(owners), None), name, node, "unknown")

    def _call(self, node: ast.Call, scope: _Scope) -> Iterator[Use]:
        """Fields of dataclasses that are given by keyword; else the constructor."""
        given = [word.arg for word in node.keywords if word.arg is not None]
        given += [key for word in node.keywords if word.arg is None for key in self._strings(word.value, scope)]
        cls = self.value(node.func)
        if _last(node.func) == "replace" and node.args:
            cls = next(iter(self._classes_of(node.args[0], scope)), None)
        elif not isinstance(cls, type) or not is_upstream(cls) or issubclass(cls, enum.Enum):
            return
        elif node.args or not is_dataclass(cls):
            if has(cls, "__init__"):
                yield self._use(cls, "__init__", node, "class")
            return
        yield from (self._use(cls, name, node, "name") for name in given if cls is not None and has(cls, name))

    def _accesses(self, node: ast.AST, scope: _Scope) -> Iterator[tuple[ast.expr, str]]:
        """Object and name of ``x.name``, ``getattr(x, "name")`` and the like."""
        if isinstance(node, ast.Attribute):
            yield node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
            value, name = node.args[:2]
            names = self._strings(name, scope)
            if not names and isinstance(name, ast.JoinedStr):  # any name of this form
                parts = [re.escape(p.value) if isinstance(p, ast.Constant) else ".+" for p in name.values]
                known = {name for cls in self._classes_of(value, scope) for name in attributes_of(cls)}
                names = [name for name in sorted(known) if re.fullmatch("".join(parts), name)]
            yield from ((value, name) for name in names)

    def _named(self, module: types.ModuleType, name: str, node: ast.AST) -> Iterator[Use]:
        """A name in a module: of megatron's, or of ours that imports it."""
        if module.__name__.startswith("megatron."):
            if not inspect.ismodule(getattr(module, name, None)):
                yield self._use(module, name, node, "module")
        elif (origin := _imported_by_ours().get((module.__name__, name))) is not None:
            yield self._use(*origin, node, "through")

    # -- what is known of a variable -----------------------------------------------------------------------------------

    def _megatrons(self, value: Any) -> list[type]:
        """Megatron's class that a class is, or derives from, or stands for."""
        if not isinstance(value, type):
            return []
        return bases_of(value)[:1] or [cls for name, cls in self.of_our_class.items() if name == value.__name__]

    def _classes_of(self, node: ast.expr, scope: _Scope) -> list[type]:
        """Megatron's classes that an object may be of."""
        if _is_self(node):
            return [] if scope.of_self is None else [scope.of_self]
        if isinstance(node, ast.Call):
            return self._megatrons(self.value(node.func))
        if isinstance(node, ast.Name) and node.id in scope.classes:
            return scope.classes[node.id]
        return [self.receivers[name]] if (name := _last(node)) in self.receivers else []

    def _annotated(self, node: ast.expr | None) -> list[type] | None:
        """Megatron's classes in an annotation; None if it says nothing."""
        if isinstance(node, ast.BinOp):
            sides = [self._annotated(node.left), self._annotated(node.right)]
            return [cls for side in sides for cls in side or ()]
        if isinstance(node, ast.Tuple):
            return [cls for item in node.elts for cls in self._annotated(item) or ()]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self._annotated(ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.Subscript):  # list[...], type[...]
            return []
        value = None if node is None else self.value(node)
        return self._megatrons(value) if isinstance(value, type) and value is not Any else None

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, outer: _Scope) -> _Scope:
        scope = _Scope(outer.of_self, outer.own, dict(outer.classes), dict(outer.strings))
        arguments = node.args
        for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            scope.classes.pop(arg.arg, None)
            if (found := self._annotated(arg.annotation)) is not None:
                scope.classes[arg.arg] = found
        for _ in range(2):  # a loop may stand before what it runs over
            for item in ast.walk(node):
                self._learn(item, scope)
        return scope

    def _learn(self, item: ast.AST, scope: _Scope) -> None:
        """From one statement or expression of a function."""
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found = self._annotated(item.annotation)
            if found is None and isinstance(item.value, ast.Name):  # ``layer: Any = module``
                found = scope.classes.get(item.value.id)
            if found is not None:
                scope.classes[item.target.id] = found
            scope.strings[item.target.id] = self._strings(item.value, scope)
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            name = item.targets[0].id
            scope.strings[name] = self._strings(item.value, scope)
            if isinstance(item.value, ast.Call) and (made := self._megatrons(self.value(item.value.func))):
                scope.classes[name] = made
        elif isinstance(item, ast.AugAssign) and isinstance(item.target, ast.Name):
            more = self._strings(item.value, scope)
            scope.strings[item.target.id] = [*scope.strings.get(item.target.id, []), *more]
        elif isinstance(item, ast.For | ast.comprehension) and isinstance(item.target, ast.Name):
            more = self._strings(item.iter, scope)
            scope.strings[item.target.id] = [*scope.strings.get(item.target.id, []), *more]
        elif isinstance(item, ast.Call) and _last(item.func) == "isinstance" and isinstance(item.args[0], ast.Name):
            known = scope.classes.setdefault(item.args[0].id, [])
            known += [cls for cls in self._annotated(item.args[1]) or () if cls not in known]

    def _strings(self, node: ast.expr | None, scope: _Scope) -> list[str]:
        """Strings that an expression stands for; none if they are not known."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return [text for item in node.elts for text in self._strings(item, scope)]
        if isinstance(node, ast.Dict):
            return [text for key in node.keys for text in self._strings(key, scope)]
        if isinstance(node, ast.Starred):
            return self._strings(node.value, scope)
        if isinstance(node, ast.IfExp):
            return [*self._strings(node.body, scope), *self._strings(node.orelse, scope)]
        if isinstance(node, ast.JoinedStr):
            parts = [self._strings(part, scope) for part in node.values]
            return ["".join(words) for words in itertools.product(*parts)]
        if isinstance(node, ast.FormattedValue):
            return self._strings(node.value, scope)
        if isinstance(node, ast.Name):
            value = scope.strings[node.id] if node.id in scope.strings else self.names.get(node.id)
            is_several = isinstance(value, tuple | list | set | frozenset | dict)
            return [text for text in value if isinstance(text, str)] if is_several else []
        return []

    def _imported(self) -> dict[str, Any]:
        """What names are bound to by imports from megatron and this package, anywhere in the module."""
        found: dict[str, Any] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and _is_read(node.module):
                module = _import(node.module or "")
                for alias in node.names:
                    value = getattr(module, alias.name, None)
                    is_module = value is None and module is not None
                    found[alias.asname or alias.name] = _import(f"{node.module}.{alias.name}") if is_module else value
        return found


@functools.cache
def _receivers() -> dict[str, type]:
    return {name: resolve(owner) for name, owner in RECEIVERS.items()}


def _is_read(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("megatron", PACKAGE)


@functools.cache
def _imported_by_ours() -> dict[tuple[str, str], tuple[types.ModuleType, str]]:
    """(module of ours, name in it): module of megatron that it imports the name from, and the name there."""
    found = {}
    for source in sources():
        for node in ast.parse(source.text).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
                module = _import(node.module or "")
                for alias in node.names:
                    if module is not None and not inspect.ismodule(getattr(module, alias.name, None)):
                        ours = f"{PACKAGE}.{source.name.replace('/', '.')}"
                        found[ours, alias.asname or alias.name] = (module, alias.name)
    return found


def _import(name: str) -> Any:
    # megatron.training sets up what only training needs; its names are its documented entry points.
    if name.startswith("megatron.training"):
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:  # a value of a module that is None
        return None


def _is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return _last(node.func) == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _last(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call):
        return _last(node.func)
    return node.attr if isinstance(node, ast.Attribute) else None


def _defined_in(node: ast.ClassDef) -> Iterable[str]:
    """Methods of a class, and names it assigns on the class or on ``self``."""
    found = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and _is_self(item.value):
            found.add(item.attr)
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            found.add(item.id)
    return found
