#!/usr/bin/env bash
# Collects every wheel that an air-gapped x86-64 GPU host needs beside its own Python 3.12 and PyTorch, and prints
# the line that installs them there.
#   scripts/wheelhouse.sh DIR [--with te,mamba] [--split MB] [--dry-run | --no-download]
#
#   DIR            folder for the wheels; existing wheels are not downloaded or built again
#   --with LIST    also: te (Transformer Engine); mamba (mamba-ssm and causal-conv1d with their compiled extensions,
#                  for Hopper GPUs only: sm_90). No CUDA toolkit is needed. On two busy cores: te 30 minutes, mamba 20
#   --split MB     split files larger than MB into parts, for media with a size limit, and write join.sh beside them
#   --dry-run      only print what would be done
#   --no-download  only split and print, for the wheels that are in DIR
#
# Needs the network, and a Python 3.12 with torch for building: $MHP_PYTHON, or the environment of scripts/bootstrap.sh.
# Runs on any Linux, without a GPU. --with needs g++, ninja and a torch for CUDA 13.0, and MAX_JOBS limits its processes.
set -euo pipefail

say() { printf 'wheelhouse: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }
usage() { sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

here=${BASH_SOURCE[0]%/*}
[[ $here == "${BASH_SOURCE[0]}" ]] && here=.
root=$(cd "$here/.." && pwd -P)

# The FA4 set. These versions belong together. (nvidia-cutlass-dsl alone would install the libraries for CUDA 12.)
fa4=(
  flash-attn-4==4.0.0b36
  nvidia-cutlass-dsl==4.8.1
  nvidia-cutlass-dsl-libs-base==4.8.1
  nvidia-cutlass-dsl-libs-core==4.8.1
  nvidia-cutlass-dsl-libs-cu13==4.8.1
  quack-kernels==0.6.5
  apache-tvm-ffi==0.1.15.post2
  torch-c-dlpack-ext==0.1.5
  protobuf
)
# Dependencies of the package and megatron-core that PyTorch does not install, in the versions of constraints.txt.
binary=(megatron-core einops pyzmq msgpack packaging psutil safetensors tokenizers rich markdown-it-py mdurl pygments)
# Packages that mamba-ssm imports.
binary+=(transformers huggingface-hub httpx2 httpcore2 truststore tqdm pyyaml regex)
# The server, and its grammars.
binary+=(llguidance prometheus-client starlette uvicorn anyio idna h11 click pydantic pydantic-core annotated-types typing-inspection)
# Built here: without CUDA extensions, because only their Triton parts are used, or with them (--with mamba).
source=(causal-conv1d mamba-ssm)
# Transformer Engine, and what it imports. Its part for PyTorch comes as C++ and is built here.
te=(
  transformer-engine==2.20.2
  transformer-engine-cu13==2.20.2
  onnxscript==0.7.2
  onnx==1.23.1
  onnx-ir==1.0.0
  ml-dtypes==0.6.0
  nvdlfw-inspect==0.2.2
)
te_source=transformer-engine-torch==2.20.2
# The compiler, and the headers that PyTorch's own CUDA packages lack.
toolkit=(
  nvidia-cuda-nvcc==13.0.88
  nvidia-cuda-crt==13.0.88
  nvidia-nvvm==13.0.88
  nvidia-cuda-cccl==13.0.85
  nvidia-cudnn-frontend==1.32.0
)
arch=90

dir="" split="" dry=0 download=1 with=""
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --split)
      [[ ${2:-} =~ ^[1-9][0-9]{0,6}$ ]] || die "--split needs a size in MB, such as 60"
      split=$2
      shift
      ;;
    --with)
      [[ ${2:-} =~ ^(te|mamba)(,(te|mamba))*$ ]] || die "--with needs te, mamba, or both: te,mamba"
      with=$2
      shift
      ;;
    --dry-run) dry=1 ;;
    --no-download) download=0 ;;
    -*) die "unknown option $1 (see --help)" ;;
    *)
      [[ -z $dir ]] || die "one folder, not two: $dir and $1"
      dir=$1
      ;;
  esac
  shift
done
[[ -n $dir ]] || die "name a folder for the wheels (see --help)"
[[ ! -e $dir || -d $dir ]] || die "$dir is no folder"

# Prints "name==version" with the version of constraints.txt, or the name alone.
pinned() {
  sed -n "s/^\($1==[^; ]*\).*/\1/p" "$root/constraints.txt" | grep . || printf '%s\n' "$1"
}

run() {
  if ((dry)); then
    printf '%s\n' "$(printf '%q ' "$@")"
  else
    "$@" </dev/null >&2
  fi
}

pip_download() {
  # For the target host, not for this machine. pip needs each platform tag by name.
  local platforms=() minor
  for minor in {5..35}; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done # 35: Ubuntu 22.04
  platforms+=(--platform manylinux1_x86_64 --platform manylinux2010_x86_64 --platform manylinux2014_x86_64)
  run "$python" -m pip download --no-input --disable-pip-version-check --no-deps --only-binary :all: \
    --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" --dest "$dir" "$@"
}

has() { [[ ,$with, == *,$1,* ]]; }

# pip_build NAME=VALUE... -- PACKAGE...
pip_build() {
  local settings=()
  while [[ $1 != -- ]]; do
    settings+=("$1")
    shift
  done
  shift
  # Not from pip's cache, which cannot tell a wheel with extensions from one without.
  run env ${settings[@]+"${settings[@]}"} "$python" -m pip wheel --no-input --disable-pip-version-check --no-deps --no-build-isolation \
    --no-cache-dir --wheel-dir "$dir" "$@"
}

# The variables of builds with CUDA, in `cuda`. Makes a CUDA toolkit of the index's wheels and of PyTorch's CUDA packages.
make_toolkit() {
  local home=$work/toolkit/nvidia/cu13 site
  cuda=(
    CUDA_HOME="$home" PYTHONPATH="$work/toolkit" PATH="${python%/*}:$PATH" PYTORCH_NVCC="$work/nvcc"
    MAMBA_FORCE_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE
    NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_CUDA_ARCHS=$arch
  )
  run "$python" -m pip install --no-input --disable-pip-version-check --no-deps --only-binary :all: \
    --target "$work/toolkit" "${toolkit[@]}"
  ((!dry)) || return 0
  site=$("$python" -c 'import torch; print(torch.__path__[0].rpartition("/")[0])')
  cp -rsn "$site/nvidia/." "$work/toolkit/nvidia/"
  ln -sfn lib "$home/lib64"
  ln -sf libcudart.so.13 "$home/lib/libcudart.so"
  # Both packages list every architecture in their setup.py. The compiler gets one of them.
  cat >"$work/nvcc" <<NVCC
#!/usr/bin/env bash
kept=()
while ((\$#)); do
  if [[ \$1 == -gencode && \$2 != *code=sm_$arch ]]; then shift; else kept+=("\$1"); fi
  shift
done
exec "$home/bin/nvcc" "\${kept[@]}"
NVCC
  chmod +x "$work/nvcc"
}

# Builds what is not in the folder. An extension shows in the name of a wheel: it is for one Python and one platform.
build() {
  local missing=() name tag=""
  has mamba && tag=-cp312-cp312
  for name in "${source[@]}"; do
    compgen -G "$dir/${name//-/_}-*$tag-*.whl" >/dev/null || missing+=("$(pinned "$name")")
  done
  if ((${#missing[@]})) && ! has mamba; then
    say "building ${missing[*]} without CUDA extensions"
    pip_build MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE \
      CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE -- "${missing[@]}"
    missing=()
  fi
  has te && ! compgen -G "$dir/transformer_engine_torch-*.whl" >/dev/null && missing+=("$te_source")
  ((${#missing[@]})) || return 0
  make_toolkit
  for name in "${missing[@]}"; do
    say "building $name, which takes minutes"
    # A wheel of an earlier run that has no extensions would hide this one.
    ((dry)) || (name=${name%%==*} && rm -f "$dir/${name//-/_}"-*-none-any.whl)
    SECONDS=0
    pip_build "${cuda[@]}" -- "$name"
    ((dry)) || say "built $name in $SECONDS s"
  done
}

collect() {
  local name wanted=()
  for name in "${binary[@]}"; do wanted+=("$(pinned "$name")"); done
  if has te; then wanted+=("${te[@]}"); fi
  say "downloading ${#wanted[@]} wheels, and the ${#fa4[@]} of FlashAttention 4"
  pip_download "${wanted[@]}" "${fa4[@]}"
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  build
  say "building this package"
  ((dry)) || rm -f "$dir"/megatron_hybrid_prefix-*.whl
  # From a copy, because setuptools leaves its build folder in the source tree.
  mkdir "$work/copy"
  cp -R "$root/setup.py" "$root/pyproject.toml" "$root/README.md" "$root/LICENSE" "$root/megatron_hybrid_prefix" "$work/copy"
  pip_build -- "$work/copy"
}

# Wheels that do not install on the target host.
check_wheels() {
  local file name
  for file in "$dir"/*.whl; do
    name=${file##*/}
    case $name in
      *-cp312-* | *-py3-none-any.whl | *-py2.py3-none-any.whl | *-abi3-*x86_64.whl | *-py3-none-*x86_64.whl) ;;
      *) die "$name is not for Python 3.12 on x86-64 (was it built with another Python?)" ;;
    esac
    case $name in
      *-any.whl | *x86_64.whl) ;;
      *) die "$name is not for x86-64" ;;
    esac
  done
}

split_large() {
  local file limit_bytes=$((split * 1000000)) large=()
  for file in "$dir"/*.whl; do
    (($(wc -c <"$file") <= limit_bytes)) || large+=("${file##*/}")
  done
  (cd "$dir" && sha256sum -- *.whl >SHA256SUMS)
  for file in ${large[@]+"${large[@]}"}; do
    rm -f "$dir/$file".part-*
    split --bytes="$limit_bytes" --numeric-suffixes=1 --suffix-length=3 "$dir/$file" "$dir/$file.part-"
    rm "$dir/$file"
    say "split $file"
  done
  cat >"$dir/join.sh" <<'JOIN'
#!/bin/sh
# Joins the parts of large wheels, and checks all wheels. Safe to repeat.
set -eu
cd "$(dirname "$0")"
for first in *.whl.part-001; do
  [ -e "$first" ] || continue
  wheel=${first%.part-001}
  cat "$wheel".part-* >"$wheel.joining"
  mv "$wheel.joining" "$wheel"
done
sha256sum --check --quiet SHA256SUMS
rm -f ./*.whl.part-*
JOIN
  chmod +x "$dir/join.sh"
}

python=${MHP_PYTHON:-}
if ((download)); then
  if [[ -z $python ]] && ((dry)); then
    python=python3.12
  elif [[ -z $python ]]; then
    . "$root/scripts/bootstrap.sh"
    python=$MHP_PYTHON
  fi
  if ((!dry)); then
    "$python" -c 'import sys, pip, setuptools, wheel, torch; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
      die "$python is no Python 3.12 with pip, setuptools, wheel and torch: set MHP_PYTHON"
    [[ -z $with ]] || "$python" -c 'import sys, torch; sys.exit(not (torch.version.cuda or "").startswith("13.0"))' ||
      die "--with needs a torch for CUDA 13.0 in $python"
    mkdir -p "$dir"
    # Parts of an earlier run, which pip cannot install.
    if compgen -G "$dir/*.whl.part-001" >/dev/null; then (cd "$dir" && ./join.sh); fi
  fi
  collect
fi
if ((!dry)); then
  compgen -G "$dir/*.whl" >/dev/null || die "there are no wheels in $dir"
  check_wheels
  say "$(find "$dir" -name '*.whl' | wc -l) wheels, $(du -sm "$dir" | cut -f1) MB in $dir"
  [[ -z $split ]] || split_large
fi

# Not $dir: the target host has another path.
{
  [[ -z $split ]] || echo 'sh WHEELS/join.sh'
  echo 'python3.12 -m pip install --no-index --no-deps --upgrade --target TARGET WHEELS/*.whl'
  # With --target, pip does not make the .pth file work that would add the second folder.
  echo 'export PYTHONPATH=TARGET:TARGET/nvidia_cutlass_dsl/dsl_packages'
} | if ((dry)); then cat; else tee "$dir/INSTALL.txt"; fi
say "on the host, with WHEELS for the folder of these files and TARGET for a new, absolute one, run the lines above"
