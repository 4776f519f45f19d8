#!/usr/bin/env bash
# Sets up if needed, then runs ruff (lint and format, nothing is changed) and mypy; all three, whatever fails.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
rc=0
"$MHP_PYTHON" -m ruff check . || rc=1
"$MHP_PYTHON" -m ruff format --check . || rc=1
scripts/typecheck.sh || rc=1
exit "$rc"
