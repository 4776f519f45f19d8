#!/usr/bin/env bash
# Creates the virtual environment that all other scripts use. Run it or source it:
#   run:    prints the path of the environment's python on stdout (everything else goes to stderr)
#   source: sets MHP_ROOT, MHP_VENV and MHP_PYTHON, and puts the environment first on PATH
#
# Safe to repeat (less than 3 s if nothing is to do), to interrupt, and to run twice at once.
#   PYTHON=...                    the Python (>= 3.12) to use (default: searched for)
#   MHP_VENV=...                  the environment's folder (default: .venv in the repository)
#   MHP_BUILD_CUDA_EXTENSIONS=1   compile the CUDA extensions of mamba-ssm and causal-conv1d (slow, and not
#                                 needed: inference uses only their Triton parts)
set -euo pipefail

mhp_say() { printf 'bootstrap: %s\n' "$*" >&2; }
mhp_die() { mhp_say "$2"; exit "$1"; }

# Prints "X.Y<tab>path of the real interpreter" if $1 starts and its version is 3.12 up to $2. Other exit codes:
# 10: other version; 11: cannot make environments; anything else: does not start.
mhp_probe() {
  local out rc=0
  out=$("$1" -c '
import sys
if not (3, 12) <= sys.version_info[:2] <= tuple(int(n) for n in sys.argv[1].split(".")):
    sys.exit(10)
sys.stdout.write("%d.%d\t%s\n" % (sys.version_info[0], sys.version_info[1], sys._base_executable))
try:
    import ensurepip, venv
except ImportError:
    sys.exit(11)' "$2" </dev/null 2>/dev/null) || rc=$?
  [[ $rc -ne 0 || $out == 3.*$'\t'?* ]] || rc=1 # not a Python at all
  printf '%s' "$out"
  return "$rc"
}

# Sets mhp_base (an interpreter), mhp_base_version and mhp_maker (venv or uv). Exits if there is no interpreter.
mhp_find_python() {
  local found="" rc=0 candidate limit without_venv="" patterns
  mhp_maker=venv
  if [[ -n ${PYTHON:-} ]]; then
    found=$(mhp_probe "$PYTHON" 3.99) || rc=$?
    case $rc in
      0) ;;
      10) mhp_die 2 "PYTHON=$PYTHON is not Python 3.12 or newer" ;;
      11) mhp_die 2 "PYTHON=$PYTHON cannot make environments (on Debian and Ubuntu: apt install python${found%%$'\t'*}-venv)" ;;
      *) mhp_die 2 "PYTHON=$PYTHON does not start (want Python 3.12 or newer)" ;;
    esac
  else
    local pyenv="${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions"
    patterns=(python3.12 python3.13 python3 "$pyenv"/3.12*/bin/python "$pyenv"/3.1[3-9]*/bin/python)
    # constraints.txt was tested with 3.12 and 3.13. Newer versions are used only if neither is there.
    for limit in 3.13 3.99; do
      for candidate in "${patterns[@]}"; do
        rc=0
        found=$(mhp_probe "$candidate" "$limit") || rc=$?
        ((rc == 0)) && break 2
        ((rc == 11)) && without_venv=$candidate
        found=""
      done
    done
    if [[ -z $found ]] && command -v uv >/dev/null; then
      for limit in '>=3.12,<3.14' install; do
        [[ $limit == install ]] && { uv python install 3.12 >&2 || break; limit=3.12; }
        candidate=$(uv python find --system --no-project "$limit" 2>/dev/null) || continue
        rc=0
        found=$(mhp_probe "$candidate" 3.99) || rc=$?
        ((rc == 11)) && mhp_maker=uv && break # uv itself needs neither venv nor ensurepip
        ((rc == 0)) && break
        found=""
      done
    fi
    [[ -n $found ]] || mhp_die 2 "no Python 3.12 or newer found${without_venv:+ that can make environments ($without_venv lacks venv or ensurepip)}; install one (Debian, Ubuntu: apt install python3.12 python3.12-venv; else: uv python install 3.12, or pyenv install 3.12) or set PYTHON=/path/to/python3.12"
  fi
  mhp_base_version=${found%%$'\t'*}
  mhp_base=${found#*$'\t'}
}

# Commands for the environment's python: "ready" (the stamp fits and the packages are there), "stamp" (write it),
# "healthy" (worth repairing rather than rebuilding), "mend" (drop what a killed pip left half-installed),
# "requirements" (what this package and its tests need, without the extra "mamba", which is built apart).
mhp_ask() {
  "$MHP_VENV/bin/python" -I -c '
import hashlib, importlib.metadata, importlib.util, os, pathlib, shutil, sys, sysconfig

question, root, venv, version, mode = sys.argv[1:]
root, venv = pathlib.Path(root), pathlib.Path(venv)
site = pathlib.Path(sysconfig.get_path("purelib"))
stamp = venv / ".mhp-ready"

def key():
    files = [root / name for name in ("pyproject.toml", "setup.py", "constraints.txt", "scripts/bootstrap.sh")]
    digest = hashlib.sha256("\0".join((sys.version, str(root), str(venv), mode)).encode())
    for file in files:
        digest.update(b"\0" + file.read_bytes())
    return digest.hexdigest()

def version_fits():
    mine = "%d.%d" % sys.version_info[:2]
    return sys.version_info >= (3, 12) and version in ("", mine)

def complete(dist_info):  # pip writes these two last
    return (dist_info / "INSTALLER").exists() and (dist_info / "RECORD").exists()

if question == "ready":
    names = "torch", "megatron.core", "mamba_ssm", "causal_conv1d", "megatron_hybrid_prefix", "pytest"
    ok = version_fits() and stamp.read_text() == key() and all(map(importlib.util.find_spec, names))
    sys.exit(0 if ok else 1)
elif question == "stamp":
    part = stamp.with_suffix(".part")
    part.write_text(key())
    os.replace(part, stamp)
elif question == "healthy":
    import pip
    same = os.path.samefile(sys.prefix, venv)
    # The scripts of a moved or copied environment have the old path.
    scripts = str(venv).encode() in (venv / "bin" / "pip").read_bytes()[:1000]
    whole = any(map(complete, site.glob("pip-*.dist-info")))
    sys.exit(0 if version_fits() and same and scripts and whole else 1)
elif question == "mend":
    for path in [*site.glob("~*"), *(d for d in site.glob("*.dist-info") if not complete(d))]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
elif question == "requirements":
    from packaging.requirements import Requirement
    for text in importlib.metadata.requires("megatron-hybrid-prefix"):
        need = Requirement(text)
        wanted = need.marker is None or any(need.marker.evaluate({"extra": e}) for e in ("bench", "dev", "hf", "serve"))
        if wanted:
            need.marker = None
            print(need)
' "$1" "$MHP_ROOT" "$MHP_VENV" "$mhp_want_version" "${MHP_BUILD_CUDA_EXTENSIONS:-0}"
}

# Runs a stage with its output in the log. If it fails, shows the end of the log and exits.
mhp_stage() {
  mhp_say "$1"
  printf '\n== %s\n' "$1" >>"$mhp_log"
  "${@:2}" >>"$mhp_log" 2>&1 </dev/null && return
  tail -n 20 "$mhp_log" >&2
  mhp_die 1 "failed: $1 (full log: $mhp_log)"
}

mhp_pip() {
  # A container's PIP_CONSTRAINT would conflict with constraints.txt; PIP_USER does not work in an environment.
  env -u PIP_CONSTRAINT -u PIP_USER -u PIP_TARGET -u PIP_PREFIX \
    "$MHP_VENV/bin/python" -m pip "$1" --no-input --disable-pip-version-check -c "$MHP_ROOT/constraints.txt" "${@:2}"
}

mhp_make_venv() {
  if [[ $mhp_maker == uv ]]; then
    uv venv --seed --no-project --python "$mhp_base" "$MHP_VENV"
  else
    "$mhp_base" -m venv "$MHP_VENV"
  fi
}

mhp_build_mamba() {
  # The extra "mamba". CUDA extensions take half an hour to compile and are not used here. pip's cache is left out: it
  # would not tell a wheel with extensions from one without.
  local args=(--no-build-isolation --no-deps --no-cache-dir mamba-ssm causal-conv1d)
  if [[ ${MHP_BUILD_CUDA_EXTENSIONS:-0} == 1 ]]; then
    mhp_pip install --force-reinstall "${args[@]}"
  else
    MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE \
      mhp_pip install "${args[@]}"
  fi
}

mhp_install_requirements() {
  # Not through the package's metadata: the package is installed editable, without its dependencies.
  local requirements
  requirements=$(mhp_ask requirements) && [[ -n $requirements ]] || return 1
  local -a list
  mapfile -t list <<<"$requirements"
  mhp_pip install "${list[@]}"
}

mhp_set_up() {
  mhp_log="$MHP_VENV.log"
  : >"$mhp_log"
  if [[ -e $MHP_VENV ]] && ! mhp_ask healthy 2>/dev/null; then
    [[ $MHP_VENV == "$MHP_ROOT/.venv" || -e $MHP_VENV/pyvenv.cfg || -z $(ls -A "$MHP_VENV") ]] ||
      mhp_die 2 "MHP_VENV=$MHP_VENV exists and is no environment; remove it or name another place"
    mhp_say "$MHP_VENV is unfinished, broken, moved or of another Python version: making it again"
    mv "$MHP_VENV" "$MHP_VENV.old.$$" # at once, so that being killed leaves nothing half-removed
  fi
  rm -rf "$MHP_VENV".old.*
  if [[ ! -e $MHP_VENV ]]; then
    mhp_stage "making $MHP_VENV with Python $mhp_base_version ($mhp_base)" mhp_make_venv
  fi
  rm -f "$MHP_VENV/.mhp-ready"
  mhp_stage "checking what is installed" mhp_ask mend
  mhp_stage "installing build tools" mhp_pip install setuptools wheel packaging ninja
  mhp_stage "installing megatron-hybrid-prefix (editable)" mhp_pip install --no-build-isolation --no-deps -e "$MHP_ROOT"
  mhp_stage "installing torch, megatron-core and the other requirements (about 5 GB; takes minutes)" mhp_install_requirements
  mhp_stage "building mamba-ssm and causal-conv1d" mhp_build_mamba
  mhp_stage "trying the result" "$MHP_VENV/bin/python" -c 'import torch, megatron.core, pytest'
  mhp_stage "writing the stamp" mhp_ask stamp
}

mhp_bootstrap() {
  local here=${BASH_SOURCE[0]%/*}
  [[ $here == "${BASH_SOURCE[0]}" ]] && here=.
  MHP_ROOT=$(cd "$here/.." && pwd -P)
  MHP_VENV=${MHP_VENV:-$MHP_ROOT/.venv}
  [[ $MHP_VENV == */* ]] || MHP_VENV=./$MHP_VENV
  [[ -d ${MHP_VENV%/*}/ ]] || mkdir -p "${MHP_VENV%/*}"
  MHP_VENV=$(cd "${MHP_VENV%/*}/" && pwd -P)/${MHP_VENV##*/}
  MHP_PYTHON=$MHP_VENV/bin/python
  unset PYTHONHOME
  mhp_want_version=""
  mhp_base=""
  if [[ -n ${PYTHON:-} ]]; then
    mhp_find_python
    mhp_want_version=$mhp_base_version
  fi
  if ! mhp_ask ready 2>/dev/null; then
    [[ -n $mhp_base ]] || mhp_find_python
    { exec 9>>"$MHP_VENV.lock"; } 2>/dev/null || mhp_die 1 "cannot write $MHP_VENV.lock"
    # Python rather than flock(1), which not every system has. The lock belongs to descriptor 9: it stays when this
    # python ends, and goes when the last process that holds 9 ends, so a killed set-up leaves none behind.
    "$mhp_base" -I -c '
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.stderr.write("bootstrap: waiting for another set-up of this environment\n")
    fcntl.flock(9, fcntl.LOCK_EX)' || mhp_die 1 "cannot lock $MHP_VENV.lock"
    if ! mhp_ask ready 2>/dev/null; then # unless the other process has made it
      SECONDS=0
      mhp_set_up
      mhp_say "ready in $SECONDS s"
    fi
    exec 9>&-
  fi
  export MHP_ROOT MHP_VENV MHP_PYTHON
  export PATH="$MHP_VENV/bin:$PATH"
}

mhp_bootstrap
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  printf '%s\n' "$MHP_PYTHON"
fi
