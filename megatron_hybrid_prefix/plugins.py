"""Plugins: modules of the user that register eviction policies, layer kinds, storage tiers and families of models.

A plugin is a Python module that calls a register function, such as `register_eviction_policy`, when it is imported. The
environment variable ``HYBRID_PREFIX_PLUGINS`` lists plugins, separated by commas. They must be on the import path. A
registry imports them when its names are first needed, in every process, so that servers and ranks see the same names.

    PYTHONPATH=rules HYBRID_PREFIX_PLUGINS=newest_first hybrid-prefix replay trace.jsonl --eviction newest_first
"""

from __future__ import annotations

import os
from importlib import import_module

from megatron_hybrid_prefix.errors import PluginError

PLUGINS_VARIABLE = "HYBRID_PREFIX_PLUGINS"


_FAILED: dict[str, str] = {}  # reason by plugin that could not be imported


def load_plugins() -> None:
    """Imports the modules in ``HYBRID_PREFIX_PLUGINS``. Modules that are imported already are skipped.

    Raises:
        PluginError: A module cannot be imported. The message names the module and the reason.
    """
    for name in filter(None, (part.strip() for part in os.environ.get(PLUGINS_VARIABLE, "").split(","))):
        if name in _FAILED:  # raise again: a second import would fail on names it has registered
            raise PluginError(_FAILED[name])
        try:
            import_module(name)
        except Exception as error:  # a plugin may raise anything
            reason = " ".join(str(error).split())
            _FAILED[name] = f"{PLUGINS_VARIABLE}: cannot import {name!r}: {type(error).__name__}: {reason}"
            raise PluginError(_FAILED[name]) from error


class Registry[T]:
    """Objects by name, in the order of registration. Plugins may add to it.

    Args:
        what: The setting that selects one of them, for error messages: "eviction_policy".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._by_name: dict[str, T] = {}

    def register(self, name: str, thing: T) -> None:
        """Adds ``thing`` under ``name``.

        Args:
            name: A name that is not registered yet.
            thing: The object.

        Raises:
            ValueError: The name is empty or taken.
        """
        if not name:
            raise ValueError(f"{self._what}: a registered name must not be empty")
        if self._by_name.get(name, thing) is not thing:
            raise ValueError(f"{self._what}={name!r}: registered already")
        self._by_name[name] = thing

    def names(self) -> tuple[str, ...]:
        """All names, including those of plugins. Raises PluginError if one cannot be imported."""
        load_plugins()
        return tuple(self._by_name)

    def __getitem__(self, name: str) -> T:
        """The object registered under ``name``.

        Raises:
            ValueError: There is none. The message lists the names.
            PluginError: A plugin cannot be imported.
        """
        self.check(name)
        return self._by_name[name]

    def check(self, name: str) -> None:
        """Checks that ``name`` is registered.

        Raises:
            ValueError: It is not. The message lists the names.
            PluginError: A plugin cannot be imported.
        """
        names = self.names()
        if name not in names:
            raise ValueError(
                f"{self._what}={name!r}: must be {' or '.join(map(repr, names)) or 'left out: none is registered'}"
            )
