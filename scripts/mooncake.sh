#!/usr/bin/env bash
# Runs the tests of the shared tier on a real Mooncake Store, with TCP on this host, in an environment apart (.venv-mooncake, which
# links to the packages of the other). Not in CI. Arguments go to pytest: scripts/mooncake.sh -k holder
#
#   scripts/mooncake.sh --master [FLAGS]   starts a master instead: on loopback, its admin port, too, unless FLAGS say otherwise
#   scripts/mooncake.sh --holder [FLAGS]   starts a process that lends memory: --global_segment_size=8GB
#
# Mooncake needs libibverbs, also without such a device. Where it is missing, Debian's packages are unpacked beside the environment.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
python=$("$MHP_PYTHON" scripts/variant_env.py "$MHP_VENV-mooncake" --extra mooncake)

libraries="$MHP_VENV-mooncake-libraries"
mhp_imports() { "$python" -c 'import mooncake.store' 2>/dev/null; }
mhp_use_libraries() {
  local folder
  for folder in "$libraries"/{usr/,}lib/*-linux-gnu; do
    [[ -d $folder ]] && LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  done
  export LD_LIBRARY_PATH
}
mhp_imports || mhp_use_libraries
if ! mhp_imports; then
  command -v apt-get >/dev/null && command -v dpkg >/dev/null ||
    mhp_die 2 "Mooncake needs libibverbs: install rdma-core (Debian, Ubuntu: libibverbs1)"
  mhp_say "unpacking libibverbs1 into $libraries"
  mkdir -p "$libraries"
  (
    cd "$libraries"
    apt-get -qq download libibverbs1 libnl-3-200 libnl-route-3-200 ||
      mhp_die 1 "cannot download libibverbs1: apt-get update, or install it"
    for package in ./*.deb; do dpkg -x "$package" .; done
  )
  mhp_use_libraries
  mhp_imports || mhp_die 1 "Mooncake does not start: $("$python" -c 'import mooncake.store' 2>&1 | tail -1)"
fi

programs=$("$python" -c 'import mooncake, os; print(os.path.dirname(mooncake.__file__))')
case ${1:-} in
  --master) exec "$programs/mooncake_master" --rpc_address=127.0.0.1 --metrics_host=127.0.0.1 "${@:2}" ;;
  --holder) exec "$programs/mooncake_client" --host=127.0.0.1 --metadata_server=P2PHANDSHAKE "${@:2}" ;;
esac
exec "$python" -m pytest -q tests/mooncake "$@"
