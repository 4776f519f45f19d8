"""The command `hybrid-prefix`, also `python -m megatron_hybrid_prefix`: a verb and its options.

A verb's module is imported only when it is used. So `hybrid-prefix --help` needs nothing but Python, and a verb without
an engine needs no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from megatron_hybrid_prefix._version import __version__

INSTALL_VARIABLE = "HYBRID_PREFIX_INSTALL"  # `environment` has it, and imports more
PACKAGE = "megatron_hybrid_prefix"
EXIT_INPUT = 2


class Verb(NamedTuple):
    """A verb of `hybrid-prefix`.

    Attributes:
        summary: One line for ``--help``.
        module: Module in ``cli`` with ``main(argv) -> exit code``.
        extra: Extra of the package that installs everything the module imports; empty: the package alone does.
    """

    summary: str
    module: str
    extra: str = "bench"


VERBS = {
    "serve": Verb("serve a model over HTTP with the OpenAI API", "serve", extra="serve"),
    "generate": Verb("generate from prompts, conversations or recorded sessions, on one or more engines", "generate"),
    "explain": Verb("ask a running server what a prompt would reuse, and why not more", "explain", extra="serve"),
    "bench": Verb("benchmark caching off, megatron-core's own cache and this cache side by side", "bench"),
    "replay": Verb("replay recorded requests without a model: how much is reused at which budget", "replay"),
    "plan": Verb("plan memory: what a budget holds, and which budget to raise first", "plan"),
    "env": Verb("switch the cache on in scripts that stay as they are: variables for a shell", "env", extra=""),
    "convert": Verb("convert a Hugging Face folder to a Megatron distributed checkpoint", "convert", extra="hf"),
}


def usage() -> str:
    """The text of ``--help``."""
    lines = [
        "usage: hybrid-prefix VERB [OPTION ...]",
        "",
        "Exact prefix caching for hybrid (attention and recurrent) models on Megatron-Core.",
        "",
        "verbs:",
        *(f"  {name:<10}{verb.summary}" for name, verb in VERBS.items()),
        "",
        "options:",
        "  -h, --help  show this help; after a verb, show the verb's help",
        "  --version   show the version of this package",
        "",
        "examples:",
        "  hybrid-prefix serve --preset tiny --port 8000",
        '  hybrid-prefix generate "Hello" --preset tiny',
        '  hybrid-prefix generate "Once upon a time" --hf ./Nemotron-H-8B',
        "  hybrid-prefix plan nemotron-h-8b --cache-gb 40",
        "  hybrid-prefix replay --help",
        '  eval "$(hybrid-prefix env --cache-gb 40)"',
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb. Returns its exit code; 2 if the verb is unknown or cannot be imported."""
    os.environ.pop(INSTALL_VARIABLE, None)  # verbs build their own engines, megatron's for comparison
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"hybrid-prefix {__version__}")
        return 0
    if name not in VERBS:
        problem = f"no verb {name!r}" if name else "no verb given"
        return _refuse(f"{problem}; there are: {', '.join(VERBS)} (see hybrid-prefix --help)")
    verb = VERBS[name]
    try:
        module = import_module(f"{PACKAGE}.cli.{verb.module}")
    except ModuleNotFoundError as error:
        missing = (error.name or PACKAGE).partition(".")[0]
        if missing == PACKAGE or not verb.extra:
            raise
        return _refuse(f"hybrid-prefix {name} needs {missing}: pip install 'megatron-hybrid-prefix[{verb.extra}]'")
    called_by = sys.argv[0]
    sys.argv[0] = f"hybrid-prefix {name}"  # shown in the verb's usage lines and reports
    try:
        exit_code: int = module.main(rest)
    finally:
        sys.argv[0] = called_by
    return exit_code


def _refuse(problem: str) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return EXIT_INPUT
