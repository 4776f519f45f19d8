#!/usr/bin/env bash
# Runs tests once for each instruction set that MKL, oneDNN and PyTorch can be limited to, with 1 and 2 threads, and
# says before each run what the libraries really use. This finds error bounds that only hold on one processor.
#   scripts/instruction_sets.sh [pytest arguments]
#
#   pytest arguments   files, -k and so on (default: all tests that compare floating-point numbers)
#
# $SETTINGS has other settings, such as SETTINGS="MKL_CBWR=AVX2 none", $THREADS other numbers of threads.
# Exit code: 0; 1 if a test failed. Sets up the environment if needed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
mkl=MKL_ENABLE_INSTRUCTIONS
settings=${SETTINGS:-none $mkl=SSE4_2 $mkl=AVX2 $mkl=AVX512 MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=default}
if (($# == 0)); then
  set -- tests/kernels tests/core/test_shared_buffer.py tests/models/test_{hf_folder_parity,models}.py \
    tests/engine/test_{bits,engine_exact,prefix_verify,prefix_exact,prefix_speculative,prefix_turns}.py
fi
# A setting that this processor ignores proves nothing.
probe='
import torch
x = torch.ones(64, 64)
x @ x
torch.nn.functional.conv1d(x[None], torch.ones(8, 64, 3))
print("ATen", torch.backends.cpu.get_cpu_capability())'
rc=0
for setting in $settings; do
  for threads in ${THREADS:-1 2}; do
    environment=(env MHP_TEST_THREADS="$threads" OMP_NUM_THREADS="$threads")
    [[ $setting == none ]] || environment+=("$setting")
    echo "== $setting, $threads threads"
    "${environment[@]}" MKL_VERBOSE=1 ONEDNN_VERBOSE=1 "$MHP_PYTHON" -c "$probe" |
      sed -nE 's/.*Intel\(R\) 64 architecture (.*), Lnx.*/MKL \1/p; s/.*cpu,isa:/oneDNN /p; /^ATen/p'
    "${environment[@]}" "$MHP_PYTHON" -m pytest -q "$@" || rc=1
  done
done
exit "$rc"
