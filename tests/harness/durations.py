"""Seconds of tests by folder: the table in CONTRIBUTING.md.

Usage: ``python -m tests.harness.durations DEFAULT.xml [ALL.xml]``, with files of pytest's ``--junitxml``. One column
per file.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence


def by_folder(path: str) -> Counter[str]:
    """Seconds of set-up, test and clean-up, by folder of ``tests/``.

    Raises:
        ValueError: A test is outside of these folders.
    """
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        match (case.attrib["classname"] or case.attrib["name"]).split("."):  # no class where a whole file is skipped
            case ["tests", folder, _, *_]:
                seconds[folder] += float(case.attrib["time"])
            case parts:
                raise ValueError(f"{'.'.join(parts)} is in no folder of tests/")
    return seconds


def table(columns: Sequence[Counter[str]], names: Sequence[str]) -> str:
    """One row per folder, the slowest of the first column first, and the sums."""
    folders = sorted(set().union(*columns), key=lambda folder: (-columns[0][folder], folder))
    rows = [["part", *names], ["---"] * (1 + len(names))]
    rows += [[f"`tests/{folder}`", *(f"{column[folder]:,.0f}" for column in columns)] for folder in folders]
    rows.append(["all of them", *(f"{column.total():,.0f}" for column in columns)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    files = sys.argv[1:3]
    print(table([by_folder(file) for file in files], ["default", "`--all`"][: len(files)]))
