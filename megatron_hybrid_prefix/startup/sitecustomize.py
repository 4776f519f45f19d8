"""Python runs this file at the start of each process that has its folder on ``PYTHONPATH`` (``hybrid-prefix env``).

With ``HYBRID_PREFIX_INSTALL`` the cache is installed once a script imports megatron; see `environment`. This file imports nothing
of the package until then: most processes of a trainer never import megatron, and some run in other environments. An error
here would only be printed by Python, so what is wrong is raised where megatron is imported.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:  # not from typing, which takes milliseconds
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _MegatronFinder:
    """Finds ``megatron.core`` where Python does. Its import includes the dynamic context, and megatron.training imports it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "megatron.core" or not _is_on():
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in later)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                if module.__name__ != name:  # a zip file has one loader for several modules
                    run(module)
                    return
                _import_with_cache(lambda: run(module))
                sys.meta_path.remove(self)  # after an error it stays, and raises again

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010  (mypy allows no assignment to a method)
        return spec


class _PackageFinder:
    """Finds this package in its clone. On ``PYTHONPATH`` the clone would also give its ``examples`` and ``tests`` to others."""

    clone = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [cls.clone]) if name == "megatron_hybrid_prefix" else None


def _is_on() -> bool:
    return os.environ.get("HYBRID_PREFIX_INSTALL", "") not in ("", "0")


def _import_with_cache(run: Callable[[], None]) -> None:
    try:
        from megatron_hybrid_prefix.mcore.entrypoints.startup import import_megatron
    except (ImportError, SyntaxError) as error:  # SyntaxError: an older Python
        problem = f"HYBRID_PREFIX_INSTALL: cannot import megatron_hybrid_prefix here, install it or unset the variable: {error}"
        if os.environ["HYBRID_PREFIX_INSTALL"] != "optional":
            raise RuntimeError(problem) from None  # not an ImportError: many scripts take that for "no megatron"
        print(problem, file=sys.stderr, flush=True)
        run()
    else:
        import_megatron(run)


def _run_next() -> None:
    """Runs the ``sitecustomize`` that Python would have run without this one."""
    here = os.path.dirname(__file__)
    later = sys.path[sys.path.index(here) + 1 :] if here in sys.path else []
    spec = PathFinder.find_spec("sitecustomize", later)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if os.path.isfile(os.path.join(_PackageFinder.clone, "pyproject.toml")):
    sys.meta_path.insert(0, _PackageFinder)
if _is_on():
    sys.meta_path.insert(0, _MegatronFinder())
_run_next()
