"""Print what switches the cache on in scripts that stay as they are: variables of the environment, for a shell.

  eval "$(hybrid-prefix env --cache-gb 50)"
  torchrun --nproc-per-node 2 train.py ...

Each process that imports megatron then installs the cache, as by install(), also in actors and workers that get the
variables. Without an option contexts with enable_prefix_caching get it; with one, all contexts do. 'auto' stands for None.
To switch it off: unset HYBRID_PREFIX_INSTALL
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import NoReturn, get_type_hints

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.errors import PluginError
from megatron_hybrid_prefix.support.config_options import add_option, value_of
from megatron_hybrid_prefix.support.environment import CONFIG_VARIABLE, INSTALL_VARIABLE, ON, OPTIONAL, python_path


class _Parser(argparse.ArgumentParser):
    """One line for an error. (`console` has the parser of other verbs, and needs rich, which no trainer has to install.)"""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parser() -> _Parser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(description=summary, epilog=rest, formatter_class=raw, allow_abbrev=False)
    parser.add_argument(
        "--optional",
        action="store_true",
        help="where the cache cannot be installed, go on without it (default: an error)",
    )
    kinds = get_type_hints(HybridPrefixConfig)
    group = parser.add_argument_group("settings")
    for field in fields(HybridPrefixConfig):
        add_option(group, field, kinds[field.name], _flag(field.name), field.name)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the exports. Returns the exit code."""
    try:
        args = vars(_parser().parse_args(argv))
        variables = {INSTALL_VARIABLE: OPTIONAL if args.pop("optional") else ON}
        given = {name: value_of(value) for name, value in args.items() if value is not None}
        if given:
            HybridPrefixConfig(**given)
            variables[CONFIG_VARIABLE] = json.dumps(given)
        variables["PYTHONPATH"] = python_path(os.environ.get("PYTHONPATH", ""))
    except (ValueError, PluginError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    if not given:
        print(f"unset {CONFIG_VARIABLE}")  # of an earlier call
    return 0
