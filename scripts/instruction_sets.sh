#!/usr/bin/env bash
# Runs tests once for each set of processor instructions that MKL, oneDNN and PyTorch can be told to use, with 1 and 2
# threads, and prints a table of what passed. So a bound that only holds on one processor shows.
#   scripts/instruction_sets.sh [--settings NAMES] [--threads NUMBERS] [pytest arguments]
#
#   --settings NAMES   only these, by comma: none, mkl-sse42, mkl-avx2, mkl-avx512, mkl-compatible, onednn-sse41,
#                      onednn-avx2, aten-default
#   --threads NUMBERS  only these, by comma (default: 1,2)
#   pytest arguments   files, -k and the like; by default the tests that compare floating-point numbers
#
# Exit code: 0; 1 if a test failed; 2 for bad input. Sets up as the other scripts do.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
export PYTHONPATH=$MHP_ROOT${PYTHONPATH:+:$PYTHONPATH}
exec "$MHP_PYTHON" -m tests.harness.instruction_sets "$@"
