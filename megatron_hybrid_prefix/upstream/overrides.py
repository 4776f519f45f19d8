"""What users' subclasses of megatron's classes override, where methods of this package take the place of those classes' methods.

A class of ours is put on an object that is built (`layers.base.put_before`). It was written for a class of megatron's. What the classes
between that and the object's own define, and the object itself, is looked at before: see "Subclasses" in docs/extending.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch

_TRAINING = (
    "backward_dw",
    "reset_parameters",
    "sharded_state_dict",
    "train",
    "_backward_in_proj",
    "_backward_out_proj",
)
_STATIC = ("_decode", "_get_states_from_cache", "_static_decode", "_static_prefill", "mamba_state_shapes_per_request")
NOT_IN_STEPS = frozenset((*_TRAINING, "_reset_dt_bias", "_resolve_cu_seqlens", "_ssm_training", *_STATIC))
"""Methods of megatron's recurrent layers that no step of a dynamic engine calls, whoever's."""
_OF_ANY_LAYER = ("abc", "builtins", "typing", torch.nn.Module.__module__, "megatron.core.transformer.module")
_PACKAGE = __name__.partition(".")[0] + "."


def written_for(cls: type, ours: type) -> list[type]:
    """The classes that ``ours`` was written for: bases of both, without those of any layer. Empty: it names none."""
    return [base for base in _layers(cls) if base in ours.__mro__]


def lost_override(
    thing: Any, ours: type, *, lost: Iterable[str] = (), keeps: Iterable[str] | None = None, extends: bool = False
) -> str | None:
    """What would be lost if ``ours`` were put on an object, in a few words that name class and method; None: nothing.

    Args:
        thing: The object, as it was built.
        ours: The class to put on it.
        lost: Names that ours does not call, beside those that it defines.
        keeps: In place of ``lost``: all names of the class that ours was written for, but these.
        extends: Whether ours comes after the classes between: what it defines they may define, too, if they call ``super()``.
    """
    cls = type(thing)
    if issubclass(cls, ours):
        return None  # put already, or its author knows ours
    bases = written_for(cls, ours) or [base for base in _layers(cls) if issubclass(base, torch.nn.Module)][-1:]
    own = _names(base for base in ours.__mro__ if base not in cls.__mro__)
    never = own | ({*lost} if keeps is None else _names(bases) - {*keeps})
    extended = own | {"forward"} if extends else frozenset()
    for base in cls.__mro__[: cls.__mro__.index(bases[0])]:
        for name, value in [] if base.__module__.startswith(_PACKAGE) else vars(base).items():
            if name in never - extended:
                return f"{base.__name__}.{name} would never be called"
            if name in extended and not calls_super(value, name):
                return f"{base.__name__}.{name} does not call super().{name}"
    on_it = (name for name, value in vars(thing).items() if name in own | never - {"forward"} and callable(value))
    return next((f"{name} of this {cls.__name__} itself would never be called" for name in on_it), None)


def is_known(thing: Any, name: str) -> bool:
    """Whether a method of a module is PyTorch's or this package's, and nothing hooks its forward."""
    own = vars(thing)
    owner = next(base for base in type(thing).__mro__ if name in vars(base))
    is_hooked = own["_forward_hooks"] or own["_forward_pre_hooks"]
    return not is_hooked and name not in own and owner.__module__.startswith((_PACKAGE, "torch."))


def _layers(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__ not in _OF_ANY_LAYER]


def _names(classes: Iterable[type]) -> frozenset[str]:
    return frozenset(name for cls in classes for name in vars(cls) if not name.startswith(("__", "_abc_")))


def calls_super(value: Any, name: str) -> bool:
    """Whether a method calls the one of this name that it overrides."""
    function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
    codes, names = [getattr(function, "__code__", None)], set[str]()
    while codes:
        if isinstance(code := codes.pop(), CodeType):
            names.update(code.co_names)
            codes.extend(code.co_consts)
    return {"super", name} <= names
