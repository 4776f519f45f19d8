#!/usr/bin/env bash
# Sets up the environment if needed, then runs the tests that this machine can run.
#   scripts/test.sh [--all] [--megatron VERSION|DIR] [--transformers VERSION] [--without-mamba] [ARGUMENTS OF PYTEST ...]
#
#   (nothing)                 some tests of every kind: at most five minutes on two idle cores
#   --all                     all tests but those marked nightly (scripts/nightly.sh): at most fifteen minutes
#   --megatron VERSION|DIR    with another megatron-core, or a checkout of Megatron-LM, in an environment made for it
#   --transformers VERSION    with another transformers, in an environment made for it
#   --without-mamba           without mamba-ssm and causal-conv1d, as a plain `pip install` of this package leaves it
#
# These options must come first. Tests run in two processes (-n 0: one process) with MHP_TEST_THREADS threads each
# (default: 1).
set -euo pipefail

usage() { sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
die() { printf 'test.sh: %s\n' "$1" >&2; exit 2; }

all=0 megatron="" named="" transformers="" without=0
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --all) all=1 ;;
    --megatron)
      megatron=${2:-} named=${2:-}
      if [[ -d $megatron ]]; then
        megatron=$(cd -- "$megatron" && pwd -P)
        named=${megatron##*/}-$(cksum <<<"$megatron" | cut -d " " -f 1) # other checkouts may have the same last name
      elif [[ ! $megatron =~ ^[0-9]+(\.[0-9]+)+[a-z0-9]*$ ]]; then
        die "--megatron needs a version, such as 0.19.3, or the folder of a checkout of Megatron-LM, not '$megatron'"
      fi
      shift
      ;;
    --transformers)
      transformers=${2:-}
      [[ $transformers =~ ^[0-9]+(\.[0-9]+)+[a-z0-9]*$ ]] || die "--transformers needs a version, such as 5.24.0, not '$transformers'"
      shift
      ;;
    --without-mamba) without=1 ;;
    *) break ;;
  esac
  shift
done

. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
python=$MHP_PYTHON
if ((without)) || [[ -n $megatron$transformers ]]; then
  folder=$MHP_VENV variant=()
  if [[ -n $megatron ]]; then folder+=-megatron-$named variant+=(--megatron "$megatron"); fi
  if [[ -n $transformers ]]; then folder+=-transformers-$transformers variant+=(--transformers "$transformers"); fi
  if ((without)); then folder+=-without-mamba variant+=(--without mamba-ssm --without causal-conv1d); fi
  python=$("$python" scripts/variant_env.py "$folder" "${variant[@]}")
  export PATH="${python%/*}:$PATH"
fi
# Tests start a hundred processes, and each would compile all of our sources again: half a second of 4.
unset PYTHONDONTWRITEBYTECODE
arguments=(-n 2 --dist loadfile --no-loadscope-reorder) # in the order that tests/conftest.py gives
if ((all)); then arguments+=(-m "not nightly"); else arguments+=(-m "not slow and not nightly"); fi
exec "$python" -m pytest -q "${arguments[@]}" "$@"
