"""Code of users that adds to the package from outside: eviction rules, layer kinds, tiers.

A plugin is a Python module that calls a register function (such as `register_eviction_policy`) when it is imported. The
environment variable ``HYBRID_PREFIX_PLUGINS`` names such modules, by comma; they must be on the import path. A registry
imports them when it is first asked for its names, in every process, so servers and ranks see the same names.

    PYTHONPATH=rules HYBRID_PREFIX_PLUGINS=newest_first hybrid-prefix replay trace.jsonl --eviction newest_first
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from importlib import import_module

from megatron_hybrid_prefix.errors import PluginError

PLUGINS_VARIABLE = "HYBRID_PREFIX_PLUGINS"


_FAILED: dict[str, str] = {}  # plugins that could not be imported, and why


def load_plugins() -> None:
    """Import the modules that ``HYBRID_PREFIX_PLUGINS`` names; those that are imported already are left alone.

    Raises:
        PluginError: A module cannot be imported; one line that names the module and the reason.
    """
    for name in filter(None, (part.strip() for part in os.environ.get(PLUGINS_VARIABLE, "").split(","))):
        if name in _FAILED:  # what it registered is there already, and would hide why it failed
            raise PluginError(_FAILED[name])
        try:
            import_module(name)
        except Exception as error:  # a plugin may raise anything
            reason = " ".join(str(error).split())
            _FAILED[name] = f"{PLUGINS_VARIABLE}: cannot import {name!r}: {type(error).__name__}: {reason}"
            raise PluginError(_FAILED[name]) from error


class Registry[T]:
    """Things of one sort by name, in order of registration; plugins may add to it.

    Args:
        what: Names the sort in error messages, as the setting that chooses one does: "eviction_policy".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._by_name: dict[str, T] = {}
        self._former_names: dict[str, str] = {}

    def register(self, name: str, thing: T, *, former_names: Iterable[str] = ()) -> None:
        """Add ``thing`` under ``name``.

        Args:
            name: New.
            thing: What the name stands for.
            former_names: Names that still work, with a warning (`present_name`); `names` does not list them.

        Raises:
            ValueError: The name is empty or taken.
        """
        if not name:
            raise ValueError(f"{self._what}: a registered name must not be empty")
        if self._by_name.get(name, thing) is not thing:
            raise ValueError(f"{self._what}={name!r}: registered already")
        self._by_name[name] = thing
        self._former_names.update(dict.fromkeys(former_names, name))

    def present_name(self, name: str) -> str:
        """The name in use today: ``name``, or what replaced it, with a FutureWarning."""
        present = name if name in self._by_name else self._former_names.get(name, name)
        if present != name:
            warnings.warn(f"{self._what}={name!r} is now called {present!r}", FutureWarning, stacklevel=3)
        return present

    def names(self) -> tuple[str, ...]:
        """All names, those of plugins included.

        Raises:
            PluginError: As `load_plugins`.
        """
        load_plugins()
        return tuple(self._by_name)

    def __getitem__(self, name: str) -> T:
        """What is registered under ``name``.

        Raises:
            ValueError: Nothing is; the message lists the names.
            PluginError: As `load_plugins`.
        """
        name = self.present_name(name)
        self.check(name)
        return self._by_name[name]

    def check(self, name: str) -> None:
        """Raises ValueError, listing the names, if nothing is registered under ``name``; PluginError as `load_plugins`."""
        names = self.names()
        if name not in names:
            raise ValueError(
                f"{self._what}={name!r}: must be {' or '.join(map(repr, names)) or 'left out: none is registered'}"
            )
