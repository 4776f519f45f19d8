"""Writes the contract with the installed megatron-core: what this package relies on in it, one row per name.

    .venv/bin/python -m scripts.contract            writes megatron_hybrid_prefix/upstream/contracts/SERIES.json
    .venv/bin/python -m scripts.contract --check    only names the rows that are out of date; then the exit code is 1

The rows come from our sources (``contract_scan.py``) and from the installed megatron-core (``contract_rows.py``). Written by
hand is only why we override a method: the first sentence of the docstring of ours. With another megatron-core in the
environment, another file is written, and what changed since the other series is listed. Nothing is written if an override
has no reason or other parameters than megatron's, or if a source uses a name that megatron does not have.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from megatron_hybrid_prefix.platform import ensure_platform
from megatron_hybrid_prefix.upstream.check import ContractRow, problem_of
from megatron_hybrid_prefix.upstream.contract import path_of, rows_in
from megatron_hybrid_prefix.upstream.version import check_version


def text_of(rows: Sequence[ContractRow]) -> str:
    """A contract as JSON: a list of rows for each owner, one line per row."""
    owners = []
    for owner, of_owner in groupby(rows, key=lambda row: row.owner):
        lines = [json.dumps({k: v for k, v in asdict(row).items() if v and k != "owner"}) for row in of_owner]
        owners.append(f"{json.dumps(owner)}: [\n  " + ",\n  ".join(lines) + "\n ]")
    return "{\n " + ",\n ".join(owners) + "\n}\n"


def differences(written: Sequence[ContractRow], made: Sequence[ContractRow]) -> list[str]:
    """What is out of date in a contract, a line for each row.

    A signature is up to date while the row holds: a later release of the series may have added optional parameters.
    """
    old = {(row.owner, row.name, row.kind): row for row in written}
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
    path = path_of(check_version())
    if options.check and not problems:
        problems = differences(rows_in(path), rows) if path.exists() else [f"there is no {path.name}"]
        problems += ["run: python -m scripts.contract"] if problems else []
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    if not options.check:
        earlier = [file for file in path.parent.glob("*.json") if file != path]
        for file in earlier if not path.exists() else ():
            print(f"since {file.stem}:", *differences(rows_in(file), rows), sep="\n  ")
        path.write_text(text_of(rows), encoding="utf-8")
    print(f"{len(rows)} rows in {path}{' are up to date' if options.check else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
