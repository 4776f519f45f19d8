"""Replacing names of upstream: every replacement is checked, listed and reversible.

A `Rebinding` holds a name, its replacement and the reason. `apply` checks that the name exists and that the replacement takes
the same parameters. So a new upstream release fails here, with the name of the symbol, and not inside a forward pass.
`Applied` records replacements; its `undo` restores the originals.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from megatron_hybrid_prefix.errors import UpstreamDriftError
from megatron_hybrid_prefix.upstream.late_package import run_later

_MISSING = object()
_Execute = Callable[[types.ModuleType, Callable[[types.ModuleType], None]], None]


@dataclass(frozen=True, slots=True)
class Rebinding:
    """One replaced name.

    Attributes:
        owner: A module path, or ``module:Class`` for a class attribute.
        name: The attribute of ``owner`` that is replaced.
        make: Called once with the original value; returns the replacement.
        why: The reason, in one line.
        same_signature: Require the replacement to take the parameters of the original, by name and order.
        may_be_absent: The name exists only if an optional package is installed; if absent, nothing is compared.
        on_import: Replaced once the owner's module is imported, by whoever needs it: it is not imported for this.
    """

    owner: str
    name: str
    make: Callable[[Any], Any]
    why: str
    _: KW_ONLY
    same_signature: bool = False
    may_be_absent: bool = False
    on_import: bool = False

    @property
    def symbol(self) -> str:
        """The replaced name, dotted."""
        return f"{self.owner.replace(':', '.')}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """An empty module in place of one that upstream imports, that is not installed, and that is never called.

    Attributes:
        name: The module.
        package: The package that imports it.
        why: The reason, in one line.
    """

    name: str
    package: str
    why: str


class Applied:
    """Applied replacements, newest last; `undo` restores the originals."""

    def __init__(self) -> None:
        self.rebindings: list[Rebinding] = []
        self.placeholders: list[Placeholder] = []
        self._undo: list[Callable[[], object]] = []

    def add_placeholder(self, placeholder: Placeholder) -> None:
        """Insert an empty module under ``placeholder.name`` unless it is already imported."""
        if placeholder.name in sys.modules:
            return
        module = types.ModuleType(placeholder.name, f"Placeholder: {placeholder.why}")
        sys.modules[placeholder.name] = module
        self.placeholders.append(placeholder)
        self._undo.append(lambda: sys.modules.pop(placeholder.name, None))

    def rebind(self, rebinding: Rebinding) -> None:
        """Check and apply one rebinding. One ``on_import`` waits for its module; then the import may raise.

        Raises:
            UpstreamDriftError: The owner or the name does not exist, or the signature differs.
        """
        module = rebinding.owner.partition(":")[0]
        if rebinding.on_import and module not in sys.modules:

            def then_rebind(imported: types.ModuleType, run: Callable[[types.ModuleType], None]) -> None:
                run(imported)
                self.rebind(rebinding)

            self._on_import(module, then_rebind)
            return
        try:
            owner = resolve(rebinding.owner)
        except (ImportError, AttributeError) as error:
            raise UpstreamDriftError(f"cannot rebind {rebinding.symbol}: {error}") from error
        original = inspect.getattr_static(owner, rebinding.name, _MISSING)
        if original is _MISSING and not rebinding.may_be_absent:
            raise UpstreamDriftError(f"cannot rebind {rebinding.symbol}: it does not exist in the installed version")
        current = getattr(owner, rebinding.name, None)
        replacement = rebinding.make(current)
        if rebinding.same_signature and original is not _MISSING:
            _check_signature(rebinding.symbol, owner, current, replacement)
        own = rebinding.name in vars(owner)
        setattr(owner, rebinding.name, replacement)

        def restore() -> None:
            if own:
                setattr(owner, rebinding.name, original)
            else:
                delattr(owner, rebinding.name)

        self.rebindings.append(rebinding)
        self._undo.append(restore)

    def put_off(self, package: str) -> None:
        """If the package is imported from now on, its ``__init__`` runs when somebody asks for what it makes."""
        if package not in sys.modules:
            self._on_import(package, run_later)

    def _on_import(self, module: str, execute: _Execute) -> None:
        finder = _OnImport(module, execute)
        sys.meta_path.insert(0, finder)
        self._undo.append(lambda: sys.meta_path.remove(finder))

    def take(self, other: Applied) -> None:
        """Take over the replacements of ``other``, which were applied after these."""
        self.rebindings += other.rebindings
        self.placeholders += other.placeholders
        self._undo += other._undo

    def undo(self) -> None:
        """Restore every replaced name, newest first. Safe to call twice."""
        while self._undo:
            self._undo.pop()()
        self.rebindings.clear()
        self.placeholders.clear()


class _OnImport(MetaPathFinder):
    """Has a function execute a module: it gets the module, and what executes it. Finds the module where Python does."""

    def __init__(self, module: str, execute: _Execute) -> None:
        self._module, self._execute = module, execute

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in later)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                # A zip file has one loader for several modules.
                self._execute(module, run) if module.__name__ == fullname else run(module)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010  (mypy allows no assignment to a method)
        return spec


def apply(rebindings: Iterable[Rebinding], applied: Applied) -> None:
    """Apply ``rebindings`` in order; if some fail, undo everything in ``applied`` and raise.

    Raises:
        UpstreamDriftError: Names that do not exist or whose signature differs: all of them.
    """
    problems: list[str] = []
    try:
        for rebinding in rebindings:
            try:
                applied.rebind(rebinding)
            except UpstreamDriftError as error:
                problems.append(str(error))
        if problems:
            raise UpstreamDriftError("; ".join(problems))
    except BaseException:
        applied.undo()
        raise


def resolve(owner: str) -> Any:
    """The module or class that ``module`` or ``module:Class`` names.

    Raises:
        ImportError, AttributeError: It does not exist.
    """
    module_name, _, attribute = owner.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in filter(None, attribute.split(".")):
        found = getattr(found, part)
    return found


def _check_signature(symbol: str, owner: Any, original: Any, replacement: Any) -> None:
    if isinstance(replacement, classmethod):
        replacement = replacement.__get__(None, owner)
    expected = list(inspect.signature(original).parameters)
    got = list(inspect.signature(replacement).parameters)
    if expected != got:
        raise UpstreamDriftError(
            f"cannot rebind {symbol}: the installed version takes ({', '.join(expected)}), "
            f"the replacement ({', '.join(got)})"
        )
