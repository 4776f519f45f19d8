"""Writes the contract: what this package relies on in megatron-core, one row per name.

    .venv/bin/python -m scripts.contract            writes megatron_hybrid_prefix/upstream/contract.json
    .venv/bin/python -m scripts.contract --check    only names the rows that are out of date; then the exit code is 1

The rows come from our sources (``contract_scan.py``) and from the installed megatron-core (``contract_rows.py``). Written by
hand is only why we override a method: the first sentence of the docstring of ours. Run with another megatron-core, it keeps
the rows that do not apply to that one (``upstream/capabilities.py``), and adds signatures that differ. So a change of our
sources is written with each megatron-core: first with the one of ``.venv``. Nothing is written if an override has no reason
or other parameters than megatron's, or if a source uses a name that megatron does not have.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby

from megatron_hybrid_prefix.platform import ensure_platform
from megatron_hybrid_prefix.upstream import contract
from megatron_hybrid_prefix.upstream.capabilities import applies
from megatron_hybrid_prefix.upstream.check import ContractRow, accepts, parameters_of, problem_of
from megatron_hybrid_prefix.upstream.contract import rows_in


def text_of(rows: Sequence[ContractRow]) -> str:
    """A contract as JSON: a list of rows for each owner, one line per row."""
    owners = []
    for owner, of_owner in groupby(rows, key=lambda row: row.owner):
        lines = [json.dumps({k: v for k, v in asdict(row).items() if v and k != "owner"}) for row in of_owner]
        owners.append(f"{json.dumps(owner)}: [\n  " + ",\n  ".join(lines) + "\n ]")
    return "{\n " + ",\n ".join(owners) + "\n}\n"


def merged(written: Sequence[ContractRow], made: Sequence[ContractRow]) -> list[ContractRow]:
    """Rows of the file that do not apply to the installed megatron-core, and rows made with it, which keep other signatures."""
    old = {(row.owner, row.name, row.kind): row for row in written}
    rows = [row for row in written if not applies(row.symbol)]
    for row in made:
        before = old.get((row.owner, row.name, row.kind), row)
        others = before.others if problem_of(before) is None else _with(before.others, row)
        rows.append(replace(row, signature=before.signature, others=others))
    return sorted(rows, key=lambda row: (row.owner, row.name, row.kind))


def _with(others: Sequence[str], row: ContractRow) -> tuple[str, ...]:
    """Signatures, with that of a row in place of those that only have optional parameters more."""
    assert row.signature is not None
    new, strict = parameters_of(row.signature), row.kind == "overrides"
    return (*(one for one in others if not accepts(new, parameters_of(one), strict=strict)), row.signature)


def differences(written: Sequence[ContractRow], made: Sequence[ContractRow]) -> list[str]:
    """What is out of date in the rows that apply, a line for each.

    A signature is up to date while the row holds: another version may have added optional parameters.
    """
    old = {(row.owner, row.name, row.kind): row for row in written if applies(row.symbol)}
    new = {(row.owner, row.name, row.kind): row for row in made}
    found = [f"{old[key].symbol} ({key[2]}): not used any more" for key in sorted(old.keys() - new.keys())]
    found += [f"{new[key].symbol} ({key[2]}): has no row" for key in sorted(new.keys() - old.keys())]
    for key in sorted(old.keys() & new.keys()):
        row, now = old[key], new[key]
        if problem := problem_of(row):
            found.append(f"{row.symbol} ({row.kind}): {problem}")
        elif (row.where, row.why) != (now.where, now.why):
            found.append(f"{row.symbol} ({row.kind}): {row.where} {row.why!r} should be {now.where} {now.why!r}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m scripts.contract", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the file is out of date")
    options = parser.parse_args(arguments)
    ensure_platform(device="cpu")
    from scripts import contract_rows  # imports megatron

    rows, problems = contract_rows.rows_of(contract_rows.all_uses())
    path = contract.PATH
    written = rows_in(path) if path.exists() else ()
    if options.check and not problems:
        problems = differences(written, rows)
        problems += ["run: python -m scripts.contract"] if problems else []
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    if not options.check:
        for difference in differences(written, rows):
            print(difference)
        rows = merged(written, rows)
        path.write_text(text_of(rows), encoding="utf-8")
    print(f"{len(rows)} rows in {path}{' are up to date' if options.check else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
