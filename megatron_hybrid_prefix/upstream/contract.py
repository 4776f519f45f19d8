"""Everything that this package relies on in megatron-core: every private name, every override, every attribute it reads.

``python -m scripts.contract`` makes the rows in ``contract.json`` of our sources and of the installed megatron-core; run with another
one, it adds what differs there. `check_contract` compares those that apply (`capabilities`) with the installed megatron-core before
the first engine is built. Without it, an override of a renamed method would silently never be called. The rows omit replaced names
(``platform/patches.py``, ``mcore/entrypoints/patches.py``), which are checked when they are replaced, and megatron's documented API to
build models.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from pathlib import Path

from megatron_hybrid_prefix.errors import UpstreamDriftError
from megatron_hybrid_prefix.upstream.capabilities import applies
from megatron_hybrid_prefix.upstream.check import ContractRow, problem_of
from megatron_hybrid_prefix.upstream.version import RUN, check_version

PATH = Path(__file__).with_name("contract.json")
logger = logging.getLogger(__name__)

# Folders that an engine does not need.
WINGS = ("serve/", "bench/", "lab/", "cli/")
_COORDINATOR = ("mcore/ranks/client", "mcore/ranks/coordinator", "upstream/client", "upstream/coordinator")
PARTS = dict.fromkeys(_COORDINATOR, "coordinator") | {"models/experts": "experts"}
"""Modules that not every engine needs: checked when a coordinator starts, or a model with this package's experts is built."""


def rows_in(path: Path) -> tuple[ContractRow, ...]:
    """The rows of a file, sorted by owner and name."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return tuple(
        ContractRow(owner=owner, **(row | {"where": tuple(row["where"]), "others": tuple(row.get("others", ()))}))
        for owner, rows in data.items()
        for row in rows
    )


@functools.cache
def installed_contract() -> tuple[ContractRow, ...]:
    """The rows that apply to the installed megatron-core.

    Raises:
        PlatformError: megatron-core is missing or unsupported.
    """
    check_version()
    return tuple(row for row in rows_in(PATH) if applies(row.symbol))


@functools.cache
def check_contract(part: str = "") -> None:
    """Compare the rows with the installed megatron-core, once per process, before the first engine is built.

    Rows that only `WINGS` use are skipped. The first rank warns of a version or commit that the tests were not run with.

    Args:
        part: One of `PARTS`, for the rows that it alone uses. They are skipped without.

    Raises:
        PlatformError: megatron-core is missing or unsupported.
        UpstreamDriftError: Names are missing or changed. One line lists them, the version, and what to do.
    """
    version = check_version()
    needed = [entry for entry in installed_contract() if _part(entry) == part]
    problems = [f"{entry.symbol} ({_use(entry)}): {problem}" for entry in needed if (problem := problem_of(entry))]
    if problems:
        raise UpstreamDriftError(
            f"{version} differs from what this package expects in {len(problems)} of {len(needed)} names: "
            f"{'; '.join(problems)}. To fix this, use one that the tests were run with: {', '.join(RUN)}"
        )
    if not part and not version.was_run and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s has all %d names that this package needs; the tests were run with: %s",
            version,
            len(needed),
            ", ".join(RUN),
        )


def _part(entry: ContractRow) -> str | None:
    """The one of `PARTS` that alone uses a row; empty: any engine does; None: none does."""
    parts = {PARTS.get(where, "") for where in entry.where if not where.startswith(WINGS)}
    return "" if len(parts) > 1 else next(iter(parts), None)


def _use(entry: ContractRow) -> str:
    return f"{entry.kind}, for {', '.join(entry.where)}"
