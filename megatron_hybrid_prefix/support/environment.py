"""The cache switched on by the environment: variables, and folders for ``PYTHONPATH`` (``hybrid-prefix env`` prints them).

    HYBRID_PREFIX_INSTALL   1: each process that imports megatron installs the cache, as `install` does; if it cannot, that import
                            fails. optional: if it cannot, megatron's own classes go on. 0 or empty: nothing happens
    HYBRID_PREFIX_CONFIG    settings for every context: JSON such as {"cache_gb": 50}, or the absolute path of such a file.
                            Unset: contexts with enable_prefix_caching get a cache, as of ``install()``

``startup/sitecustomize.py`` waits for the import; `mcore.entrypoints.startup` does the rest.
"""

from __future__ import annotations

import json
import logging
import os
import site
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.errors import shown

INSTALL_VARIABLE = "HYBRID_PREFIX_INSTALL"
CONFIG_VARIABLE = "HYBRID_PREFIX_CONFIG"
ON, OPTIONAL = "1", "optional"

PACKAGE = Path(__file__).resolve().parents[1]
_KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", NoneType: "null"}


def is_on() -> bool:
    """Whether ``HYBRID_PREFIX_INSTALL`` switches the cache on in this process."""
    return os.environ.get(INSTALL_VARIABLE, "") not in ("", "0")


def say(logger: logging.Logger, line: str, *, on_each_rank: bool = False) -> None:
    """To the log, or, as most scripts import megatron before they set one up, to stderr; then by the first rank only."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(line)
    elif on_each_rank or os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print(f"megatron_hybrid_prefix: {line}", file=sys.stderr, flush=True)


def python_path(present: str) -> str:
    """``PYTHONPATH`` with the folder of ``sitecustomize.py`` first and that of the package last, each once.

    It is left out where it is one of this Python's own folders for packages: this Python has it already, and another one must not get
    all that is in there. So is a clone, whose ``examples`` and ``tests`` would hide others; ``sitecustomize.py`` finds the package there.

    Args:
        present: The value of the variable now; may be empty.

    Raises:
        ValueError: The path of a folder cannot be in such a list.
    """
    first, last = [str(PACKAGE / "startup")], [str(PACKAGE.parent)]
    clone = (PACKAGE.parent / "pyproject.toml").is_file()
    if clone or last[0] in map(os.path.realpath, [*site.getsitepackages(), site.getusersitepackages()]):
        last = []
    for folder in (*first, *last):
        if os.pathsep in folder:
            raise ValueError(f"{folder}: PYTHONPATH cannot hold a path with {os.pathsep!r}")
    others = [path for path in present.split(os.pathsep) if path not in (*first, *last)] if present else []
    return os.pathsep.join([*first, *others, *last])


def config_of(environment: Mapping[str, str]) -> HybridPrefixConfig | None:
    """The settings in ``HYBRID_PREFIX_CONFIG``; None: it is unset or empty.

    Raises:
        ValueError: They cannot be read, a field is unknown, or a value is wrong. One line says which.
        PluginError: A plugin cannot be imported.
    """
    text = environment.get(CONFIG_VARIABLE, "").strip()
    if not text:
        return None
    try:
        return _config(text if text.startswith("{") else _text_of_file(text))
    except ValueError as error:
        raise ValueError(f"{CONFIG_VARIABLE}: {error}") from None


def _text_of_file(path: str) -> str:
    if not os.path.isabs(path):
        raise ValueError(f'{shown(path)}: give JSON such as {{"cache_gb": 50}}, or the absolute path of its file')
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no text, or no path
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f'cannot read {shown(path)}: {why}; give JSON such as {{"cache_gb": 50}}, or its file'
        ) from None


def _config(text: str) -> HybridPrefixConfig:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f'{shown(values)}: must be an object such as {{"cache_gb": 50}}')
    hints = get_type_hints(HybridPrefixConfig)
    names = [field.name for field in fields(HybridPrefixConfig)]
    for name, value in values.items():
        if name in names:
            kinds = _kinds(hints[name])
            if type(value) not in kinds and not (type(value) is int and float in kinds):
                raise ValueError(f"{name}={shown(value)}: must be {' or '.join(map(_KINDS.__getitem__, kinds))}")
        else:
            raise ValueError(f"there is no setting {shown(name)}; there are: {', '.join(names)}")
    return HybridPrefixConfig(**values)


def _kinds(hint: Any) -> list[type]:
    """The types of JSON values that a field takes."""
    if get_origin(hint) is Literal:
        return [str]
    return [kind for each in get_args(hint) for kind in _kinds(each)] or [hint]
