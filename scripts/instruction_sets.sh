#!/usr/bin/env bash
# Runs tests once for each instruction set that MKL, oneDNN and PyTorch can be limited to, with 1 and 2 threads, and
# prints a table of the results. This finds error bounds that only hold on one processor.
#   scripts/instruction_sets.sh [--settings NAMES] [--threads NUMBERS] [pytest arguments]
#
#   --settings NAMES   only these, comma-separated: none, mkl-sse42, mkl-avx2, mkl-avx512, mkl-compatible, onednn-sse41,
#                      onednn-avx2, aten-default
#   --threads NUMBERS  only these, comma-separated (default: 1,2)
#   pytest arguments   files, -k and so on (default: all tests that compare floating-point numbers)
#
# Exit code: 0; 1 if a test failed; 2 for bad input. Sets up the environment if needed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
export PYTHONPATH=$MHP_ROOT${PYTHONPATH:+:$PYTHONPATH}
exec "$MHP_PYTHON" -m tests.harness.instruction_sets "$@"
