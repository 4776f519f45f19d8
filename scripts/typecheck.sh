#!/usr/bin/env bash
# Sets up the environment if needed, then runs mypy (strict) on the whole package.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
exec "$MHP_PYTHON" -m mypy megatron_hybrid_prefix "$@"
