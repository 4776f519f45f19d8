#!/usr/bin/env bash
# Sets up the environment if needed, then runs ruff check, ruff format --check and mypy: all three, even if one fails.
#   scripts/lint.sh [check] [format] [types]     only the named ones
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
(($#)) || set -- check format types
rc=0
for what in "$@"; do
  case $what in
    check) "$MHP_PYTHON" -m ruff check . || rc=1 ;;
    format) "$MHP_PYTHON" -m ruff format --check . || rc=1 ;;
    types) scripts/typecheck.sh || rc=1 ;;
    *) printf 'lint.sh: unknown check %s; there are: check format types\n' "$what" >&2; exit 2 ;;
  esac
done
exit "$rc"
