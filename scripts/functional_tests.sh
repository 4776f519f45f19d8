#!/usr/bin/env bash
# Functional tests on several ranks: tensor, pipeline, expert and data parallelism, and a rank that is killed.
#   scripts/functional_tests.sh N [--device cpu|cuda] [--cases NAMES] [--layers KIND] [--json PATH]
#
#   N              number of ranks (on GPUs, one GPU each); cases that need more are skipped; 4 runs all cases
#   --device       cpu uses gloo, cuda uses NCCL (default: cuda if there is a GPU)
#   --cases NAMES  only these cases, comma-separated: tp2, pp2, tp2-pp2, ep2, tp2-ep2, dp2, killed, killed-alone (without torchrun)
#   --layers KIND  recurrent layers of the models: mamba2 (default), gated-delta-net (with some Mamba2)
#   --json PATH    write the results, with hardware and versions
#
# Prints one line per case: passed, failed or skipped, and why. Exit code: 0; 1 if a case failed; 2 for bad input.
# Sets up the environment as the other scripts do, unless $PYTHON or python3 already has torch and megatron-core.
set -euo pipefail

here=${BASH_SOURCE[0]%/*}
[[ $here == "${BASH_SOURCE[0]}" ]] && here=.
root=$(cd "$here/.." && pwd -P)
for argument in "$@"; do
  case $argument in
    -h | --help)
      sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
  esac
done

has_packages() {
  "$1" -c '
import sys
from importlib.util import find_spec
sys.exit(sys.version_info < (3, 12) or not all(map(find_spec, ("torch", "megatron", "megatron.core"))))' \
    </dev/null >/dev/null 2>&1
}

python=${PYTHON:-python3}
if ! has_packages "$python"; then
  . "$root/scripts/bootstrap.sh"
  python=$MHP_PYTHON
fi
cd "$root"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m tests.distributed.functional.run "$@"
