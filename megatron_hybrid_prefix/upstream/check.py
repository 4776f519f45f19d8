"""Whether megatron-core has the methods that this package overrides. Else an override would silently never be called.

The classes of this package say what they override. A method that calls megatron's (``super().NAME``) extends it, one marked
``@override`` takes its place, and `only_in` marks what megatron has in some versions only. ``__needs__`` of a class are the forms
of capabilities that it can use alone. Constructors are left to Python.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Iterator
from inspect import Parameter
from typing import Any

from megatron_hybrid_prefix.errors import UpstreamDriftError
from megatron_hybrid_prefix.upstream.capabilities import form_of, is_there
from megatron_hybrid_prefix.upstream.overrides import calls_super
from megatron_hybrid_prefix.upstream.version import RUN, check_version

logger = logging.getLogger(__name__)

_PACKAGE = __name__.partition(".")[0] + "."
_LATER = tuple(_PACKAGE + part for part in ("mcore.ranks.", "models.", "upstream.client", "upstream.coordinator"))
"""Modules with classes that not every engine needs: each is checked when its first object is made."""
_PASSED_ON: dict[Any, tuple[Any, ...]] = {
    Parameter.VAR_POSITIONAL: (Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL),
    Parameter.VAR_KEYWORD: (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD),
}
_checked: set[type] = set()


def check_overrides(*classes: type) -> None:
    """Compare classes of this package with megatron's, once. The first rank warns of a version that the tests were not run with.

    Args:
        classes: None: all that are imported, but those of `_LATER`.

    Raises:
        PlatformError: megatron-core is missing or unsupported.
        UpstreamDriftError: Methods are missing or changed. One line lists them, the version, and what to do.
    """
    version, run = check_version(), ", ".join(RUN)
    is_first, wanted = not _checked, {*(classes or _imported())} - _checked
    if problems := sorted({problem for cls in wanted for problem in _problems(cls)}):
        raise UpstreamDriftError(
            f"{version} differs from what this package expects in {len(problems)} places: {'; '.join(problems)}. "
            f"To fix this, use one that the tests were run with: {run}"
        )
    _checked.update(wanted)
    if is_first and not version.was_run and os.environ.get("RANK", "0") == "0":
        logger.warning("%s has all methods that this package overrides; the tests were run with: %s", version, run)


def _imported() -> Iterator[type]:
    for name, module in sys.modules.copy().items():
        if name.startswith(_PACKAGE) and not name.startswith(_LATER):
            yield from (cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == name)


def _problems(cls: type) -> Iterator[str]:
    for place, ours in enumerate(cls.__mro__, 1):
        behind = cls.__mro__[place:]
        bases = [base for base in behind if base.__module__.startswith("megatron.")]
        for capability, form in vars(ours).get("__needs__", {}).items():
            if form_of(capability) != form:
                yield f"{bases[0].__name__}, which {ours.__name__} extends: {capability}: expected {form}, found {form_of(capability)}"
        for name, value in vars(ours).items() if bases and ours.__module__.startswith(_PACKAGE) else ():
            function, problem = getattr(value, "fget", value), None
            if not inspect.isfunction(function) or name == "__init__":
                continue
            if any(name in vars(base) for base in behind):
                problem = _difference(value, next((vars(base)[name] for base in bases if name in vars(base)), value))
            elif getattr(function, "__override__", calls_super(value, name)):
                attributes = (f"{base.__module__}:{base.__qualname__}.{name}" for base in bases)
                if not isinstance(value, property) or not any(map(is_there, attributes)):
                    problem = "found nothing"
            if problem:
                yield f"{bases[0].__name__}.{name}, which {ours.__name__} overrides: {problem}"


def _difference(ours: Any, theirs: Any) -> str | None:
    if isinstance(ours, property) or not inspect.isfunction(theirs):
        return None if isinstance(theirs, type(ours)) else f"expected a {type(ours).__name__}, found {theirs!r}"
    written, found = ([*inspect.signature(function).parameters.values()] for function in (ours, theirs))
    stars = {p.kind for p in written} & {*_PASSED_ON}
    passed_on = {kind for star in stars for kind in _PASSED_ON[star]}
    named = [p for p in written if p.kind not in stars]
    first = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
    expected = [p for p in found if p.kind not in passed_on or p.name in {one.name for one in named}]

    def key(p: Parameter) -> tuple[object, ...]:
        """Of a default, only what Python writes down as it is: for an object of megatron's, ours may write None."""
        return p.name, isinstance(p.default, bool | int | float | str | type) and p.default, stars or p.kind

    fits = [p.name for p in found[: len(first)]] == first and [*map(key, named)] == [*map(key, expected)]
    is_async = [inspect.iscoroutinefunction(function) for function in (ours, theirs)]
    bare = (inspect.Signature([p.replace(annotation=p.empty) for p in parameters]) for parameters in (written, found))
    shown = ["async " * is_one + str(signature) for is_one, signature in zip(is_async, bare, strict=True)]
    return None if fits and is_async[0] == is_async[1] else "expected {}, found {}".format(*shown)
