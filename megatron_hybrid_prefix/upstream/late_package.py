"""A package whose ``__init__`` runs when somebody asks for what it makes, not when a submodule is imported."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

_OF_AN_IMPORT = {"__name__", "__spec__", "__loader__", "__package__", "__path__", "__file__", "__cached__", "__class__"}


def run_later(package: ModuleType, run: Callable[[ModuleType], None]) -> None:
    """Let ``run``, which executes the package's ``__init__``, wait for the first look at, or change of, an attribute.

    Python's own imports of submodules do neither (``importlib.util.LazyLoader`` takes their look at ``__path__`` for one), nor does a
    look at a ``__version__`` that is written down there. What ``run`` raises, that first look raises; the package is then no longer
    imported, as after any import that failed. A package of a class of its loader's own runs at once.
    """
    if type(package) is not ModuleType:  # or it is late already: two finders of ours found it
        return run(package)
    lock, waits = threading.RLock(), True

    class LatePackage(ModuleType):
        # No super(): the class may be another by then.
        def __getattribute__(self, name: str) -> Any:
            if name not in _OF_AN_IMPORT and name not in written:
                run_once()
            return ModuleType.__getattribute__(self, name)

        def __setattr__(self, name: str, value: Any) -> None:
            # An import of a submodule sets that, too.
            if name not in _OF_AN_IMPORT and sys.modules.get(f"{self.__name__}.{name}") is not value:
                run_once()
            ModuleType.__setattr__(self, name, value)

    def run_once() -> None:
        nonlocal waits
        with lock:  # other threads wait; this one may look at the package while it runs
            if not waits:
                return
            waits = False
            try:
                run(package)
            except BaseException:
                waits = True
                if sys.modules.get(package.__name__) is package:
                    del sys.modules[package.__name__]
                raise
            package.__class__ = ModuleType

    written: set[str] = set()
    source = getattr(package.__loader__, "get_source", lambda name: None)(package.__name__)
    for node in ast.parse(source or "").body:
        match node:
            case ast.Assign(targets=[ast.Name("__version__" as name)], value=ast.Constant(version)):
                vars(package)[name] = version
                written.add(name)
    package.__class__ = LatePackage
