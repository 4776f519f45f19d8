"""Runs tests with every choice of instruction sets of the numeric libraries; see scripts/instruction_sets.sh."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "none": {},
    "mkl-sse42": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "mkl-avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "mkl-avx512": {"MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    "onednn-sse41": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "aten-default": {"ATEN_CPU_CAPABILITY": "default"},
}
NUMERIC_TESTS = (
    "tests/kernels",
    "tests/engine/test_bits.py",
    "tests/engine/test_engine_exact.py",
    "tests/models/test_hf_folder_parity.py",
    "tests/models/test_models.py",
    "tests/engine/test_prefix_verify.py",
    "tests/engine/test_prefix_exact.py",
    "tests/engine/test_prefix_speculative.py",
    "tests/engine/test_prefix_turns.py",
    "tests/core/test_shared_buffer.py",
)
# What the libraries say they use: a setting that this processor ignores proves nothing.
PROBE = """
import torch
x = torch.ones(64, 64)
x @ x
torch.nn.functional.conv1d(x[None], torch.ones(8, 64, 3))
print("aten", torch.backends.cpu.get_cpu_capability())
"""


def instructions(environment: dict[str, str]) -> str:
    """Returns the instruction sets of MKL, oneDNN and PyTorch, shortened."""
    verbose = environment | {"MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"}
    said = subprocess.run([sys.executable, "-c", PROBE], env=verbose, capture_output=True, text=True, check=True).stdout
    mkl = re.search(r"Intel\(R\) 64 architecture (.*?), Lnx", said)
    name = "?" if mkl is None else re.sub(r"Intel\(R\) |\(Intel\(R\).*?\) |enabled processors|\(limited\) ", "", mkl[1])
    cpu = re.search(r"cpu,isa:(.*)", said)
    aten = re.search(r"^aten (.*)", said, re.MULTILINE)
    assert aten is not None
    return f"MKL {name.strip()}; oneDNN {'?' if cpu is None else cpu[1].strip()}; ATen {aten[1]}"


def run(environment: dict[str, str], arguments: list[str]) -> tuple[dict[str, int], list[str]]:
    """Runs pytest. Returns counts by outcome, and the ids of failed tests. Prints only if something is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1) or not report.exists():
            raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    if done.returncode:
        print(done.stdout[-20_000:], file=sys.stderr)
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.attrib['classname']}::{case.attrib['name']}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return count, failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/instruction_sets.sh", description=__doc__)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="names, by comma")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, by comma")
    options, pytest_arguments = parser.parse_known_args()
    names, threads = options.settings.split(","), options.threads.split(",")
    if unknown := [name for name in names if name not in SETTINGS]:
        parser.error(f"no setting {unknown[0]!r}; there are: {', '.join(SETTINGS)}")
    if not all(number.isdecimal() and int(number) for number in threads):
        parser.error(f"--threads {options.threads}: positive numbers by comma")
    wrong: dict[str, list[str]] = {}
    print(
        "| setting | threads | instructions in use | passed | failed | skipped |\n|---|---|---|---|---|---|", flush=True
    )
    for name in names:
        for number in threads:
            environment = os.environ | SETTINGS[name] | {"MHP_TEST_THREADS": number, "OMP_NUM_THREADS": number}
            count, failed = run(environment, pytest_arguments or list(NUMERIC_TESTS))
            passed = count["tests"] - count["skipped"] - len(failed)
            setting = " ".join(f"`{key}={value}`" for key, value in SETTINGS[name].items()) or "none"
            print(
                f"| {setting} | {number} | {instructions(environment)} | {passed} | {len(failed)} | {count['skipped']} |",
                flush=True,
            )
            if failed:
                wrong[f"{name}, {number} threads"] = failed
    for what, failed in wrong.items():
        print(f"\n{what}:", *failed, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
