#!/usr/bin/env bash
# What takes too long for .ci/run: other installations of this package. Every part runs; any failure is an error.
#   scripts/nightly.sh [PART ...]     only these; default: all
#
#   without-mamba   all tests without mamba-ssm and causal-conv1d, as a plain `pip install` of this package leaves it
#   transformers    folders of Hugging Face with another transformers than that of constraints.txt
#   more            more of what tests of .ci/run show
#   wheel           the wheel where only PyTorch is installed, with what it needs from the package index: each verb of its command
#
# Sets up the environments if needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' scripts/nightly.sh; }

(($#)) || set -- without-mamba transformers more wheel
rc=0
for part in "$@"; do
  case $part in
    # torch.compile as in the processes of users, who have no mamba-ssm.
    without-mamba) TORCHDYNAMO_DISABLE=0 scripts/test.sh --all --without-mamba || rc=1 ;;
    transformers) scripts/test.sh --transformers 5.24.0 --all tests/models/test_hf_*.py || rc=1 ;;
    more) scripts/test.sh --all -m nightly tests/core tests/engine tests/distributed || rc=1 ;;
    wheel) scripts/test.sh --all -n 0 -m nightly tests/packaging/test_wheel.py || rc=1 ;;
    -h | --help) usage; exit 0 ;;
    *) printf 'nightly.sh: unknown part %s; there are: without-mamba transformers more wheel\n' "$part" >&2; exit 2 ;;
  esac
done
exit "$rc"
