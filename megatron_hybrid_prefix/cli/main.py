"""The command `hybrid-prefix`, also `python -m megatron_hybrid_prefix`: a verb, then the verb's own options.

A verb's module is imported when it is asked for, so that `hybrid-prefix --help` needs nothing but Python, and a verb
without an engine needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from megatron_hybrid_prefix._version import __version__

PACKAGE = "megatron_hybrid_prefix"
EXIT_INPUT = 2


class Verb(NamedTuple):
    """What `hybrid-prefix` can do.

    Attributes:
        summary: One line for ``--help``.
        module: Of ``cli``; has ``main(argv) -> exit code``.
        extra: Of the package: with it, everything that the module imports is installed.
    """

    summary: str
    module: str
    extra: str = "bench"


VERBS = {
    "serve": Verb("serve a model over HTTP, in the OpenAI API", "serve", extra="serve"),
    "generate": Verb("answer prompts, conversations or recorded sessions, with one or more engines", "generate"),
    "bench": Verb("measure caching off, megatron-core's own cache and this one side by side", "bench"),
    "replay": Verb("replay recorded requests through the cache's policies, without a model", "replay"),
    "plan": Verb("what a memory budget holds, and what to raise first", "plan"),
    "demo": Verb("where megatron-core's own cache is wrong or reuses less, in a minute on a CPU", "demo", extra="demo"),
}


def usage() -> str:
    """What ``--help`` prints."""
    lines = [
        "usage: hybrid-prefix VERB [OPTION ...]",
        "",
        "Exact prefix caching for hybrid (attention and recurrent) models on Megatron-Core.",
        "",
        "verbs:",
        *(f"  {name:<10}{verb.summary}" for name, verb in VERBS.items()),
        "",
        "options:",
        "  -h, --help  this text; after a verb, the verb's own",
        "  --version   the version of this package",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns its exit code, which is 2 where the verb is unknown or cannot be imported."""
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
        if missing == PACKAGE:
            raise
        return _refuse(f"hybrid-prefix {name} needs {missing}: pip install 'megatron-hybrid-prefix[{verb.extra}]'")
    called_by = sys.argv[0]
    sys.argv[0] = f"hybrid-prefix {name}"  # the verb's usage lines and reports say how it was called
    try:
        exit_code: int = module.main(rest)
    finally:
        sys.argv[0] = called_by
    return exit_code


def _refuse(problem: str) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return EXIT_INPUT
