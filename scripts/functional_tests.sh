#!/usr/bin/env bash
# Tests on several ranks: tensor, pipeline and expert parallelism, and a rank that is killed. What ranks say and decide is
# compared with one rank on the CPU; how far log-probs are off is printed at the end.
#   scripts/functional_tests.sh N [--device cpu|cuda] [ARGUMENTS OF PYTEST ...]
#
#   N          number of ranks (on GPUs, one GPU each); layouts that need more are skipped; 4 runs all of them
#   --device   cpu uses gloo, cuda uses NCCL and torchrun (default: cuda if there is a GPU)
#
# Sets up the environment as the other scripts do, unless $PYTHON or python3 already has torch, megatron-core and the test tools.
set -euo pipefail

here=${BASH_SOURCE[0]%/*}
[[ $here == "${BASH_SOURCE[0]}" ]] && here=.
root=$(cd "$here/.." && pwd -P)
die() { printf 'functional_tests.sh: %s\n' "$1" >&2; exit 2; }

case ${1:-} in
  -h | --help) sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
  [2-9] | [1-9][0-9]) export MHP_RANKS=$1; shift ;;
  *) die "give the number of ranks, 2 or more, not '${1:-}'" ;;
esac
device=
if [[ ${1:-} == --device ]]; then
  [[ ${2:-} == cpu || ${2:-} == cuda ]] || die "--device needs cpu or cuda, not '${2:-}'"
  device=$2
  shift 2
fi

python=${PYTHON:-python3}
if ! "$python" -c 'import hypothesis, pytest, torch, megatron.core.package_info' </dev/null >/dev/null 2>&1; then
  . "$root/scripts/bootstrap.sh"
  python=$MHP_PYTHON
fi
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
export MHP_RANKS_DEVICE=${device:-$( ((gpus)) && echo cuda || echo cpu)}
if [[ $MHP_RANKS_DEVICE == cuda ]]; then
  ((gpus >= MHP_RANKS)) || die "N=$MHP_RANKS: there are $gpus GPUs"
  export TRITON_F32_DEFAULT=ieee # products of float32 in float32, as on the CPU
fi
cd "$root"
exec "$python" -m pytest -v -rP -p no:logging tests/distributed/test_{prefix_parallel,expert_parallel,killed_rank}.py "$@"
