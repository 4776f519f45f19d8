#!/usr/bin/env bash
# Sets up the environment if needed, then runs the demo. Arguments go to it: `scripts/demo.sh --help`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
exec "$MHP_PYTHON" -m examples.demo "$@"
