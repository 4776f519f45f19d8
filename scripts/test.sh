#!/usr/bin/env bash
# Sets up if needed, then runs every test that this machine can run. Arguments go to pytest.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
exec "$MHP_PYTHON" -m pytest -q "$@"
