"""Our classes that derive from megatron's, and which names of megatron's they define again."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import pkgutil
from dataclasses import is_dataclass

import megatron_hybrid_prefix
from megatron_hybrid_prefix.upstream.check import attributes_of

PACKAGE = "megatron_hybrid_prefix"
# Made by Python for every class.
OF_EVERY_CLASS = {
    *("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__", "__class__"),
    *("__static_attributes__", "__abstractmethods__", "_abc_impl", "__slots__"),
    *("__dataclass_fields__", "__dataclass_params__", "__eq__", "__hash__", "__match_args__", "__repr__"),
}


def is_upstream(cls: type) -> bool:
    """Whether megatron defines the class."""
    return cls.__module__.startswith("megatron.")


def is_ours(cls: type) -> bool:
    """Whether this package defines the class."""
    return cls.__module__.partition(".")[0] == PACKAGE


def bases_of(cls: type) -> list[type]:
    """Megatron's classes that the class derives from."""
    return [base for base in inspect.getmro(cls) if is_upstream(base)]


def our_parts(cls: type) -> list[type]:
    """Our classes before the first of megatron's in the method resolution order."""
    return list(itertools.takewhile(lambda base: not is_upstream(base), inspect.getmro(cls)))


@functools.cache
def our_classes() -> list[type]:
    """Classes of the package that derive from one of megatron's."""
    found: set[type] = set()
    for module_info in pkgutil.walk_packages(megatron_hybrid_prefix.__path__, f"{PACKAGE}."):
        for value in vars(importlib.import_module(module_info.name)).values():
            if isinstance(value, type) and not is_upstream(value) and bases_of(value):
                found.add(value)
    return sorted(found, key=lambda cls: cls.__qualname__)


@functools.cache
def has(base: type, name: str) -> bool:
    """Whether megatron's class, or its objects, have this name."""
    return any(name in vars(cls) for cls in bases_of(base)) or name in attributes_of(base)


def overridden(cls: type) -> list[str]:
    """Names of megatron's class that our class defines again."""
    names = set().union(*(vars(part) for part in our_parts(cls))) - OF_EVERY_CLASS
    if is_dataclass(cls):
        names.discard("__init__")  # made of the fields, which have rows
    return sorted(name for name in names if has(bases_of(cls)[0], name))


def megatrons_class_of_each() -> dict[str, type]:
    """By name of our class: the class of megatron that its objects are of."""
    return {part.__name__: bases_of(cls)[0] for cls in our_classes() for part in our_parts(cls) if is_ours(part)}
