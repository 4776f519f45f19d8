#!/usr/bin/env bash
# Sets up if needed, then runs the demonstration. Arguments go to tools/demo.py.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
exec "$MHP_PYTHON" tools/demo.py "$@"
