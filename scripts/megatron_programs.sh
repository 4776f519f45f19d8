#!/usr/bin/env bash
# Runs Megatron-LM's own inference programs, of a checkout, without and with the cache, which the environment alone switches on.
# No file of the checkout changes. The answers must be equal, and the reused tokens those that the prompts share.
#   scripts/megatron_programs.sh CHECKOUT [PROGRAM ...] [--tp N ...] [--device cpu|cuda] [--keep DIR] [-- FLAG ...]
#
#   CHECKOUT   of Megatron-LM. Its megatron-core runs if it is supported; else the installed one, and from the checkout what that lacks
#   PROGRAM    some of those that --help lists (default: all)
#   --tp       tensor-parallel size, repeatable (default: 1, and 2 unless there is one GPU)
#   --device   cpu: through tests/harness/program_launcher.py, as these programs ask for CUDA; cuda: as they are (without the cache and
#              without FlashAttention 2 and 3 likewise), in bfloat16, where answers may differ by rounding and are only counted
#              (default: cuda if there is a GPU)
#   --keep     a folder for logs and answers
#   FLAG       of Megatron-LM, for all programs, such as -- --transformer-impl inference_optimized
#
# On two cores all programs take about ten minutes. $PYTHON or python3 is used if it has torch, megatron-core and the packages of
# tests/harness/megatron_programs.txt; else an environment is made, as by the other scripts.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
case ${1:-} in
  -h | --help) sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" ;;
  "") printf 'megatron_programs.sh: give a checkout of Megatron-LM\n' >&2; exit 2 ;;
esac
python=${PYTHON:-python3}
if ! "$python" -c 'import fastapi, httpx, hypercorn, openai, pytest, quart, torch, tqdm, transformers, megatron.core.package_info' </dev/null >/dev/null 2>&1; then
  . "$root/scripts/bootstrap.sh"
  python=$("$MHP_PYTHON" "$root/scripts/variant_env.py" "$MHP_VENV-programs" --requirements "$root/tests/harness/megatron_programs.txt")
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$root/scripts/megatron_programs.py" "$@"
