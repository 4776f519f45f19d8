#!/usr/bin/env bash
# Sets up if needed, then type-checks (strictly) the layers that need neither torch nor megatron, and the commands.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
checked=()
for name in _version.py errors.py arithmetic.py plugins.py config.py metrics.py tokenizer.py cache.py index policy \
  pool/slots.py pool/layout.py tiers/base.py tiers/registry.py tiers/units.py layers/grid.py console lab bench serve cli; do
  path=megatron_hybrid_prefix/$name
  # mypy calls a folder without modules an error.
  if [[ -f $path ]] || compgen -G "$path/*.py" >/dev/null; then checked+=("$path"); fi
done
exec "$MHP_PYTHON" -m mypy "${checked[@]}" "$@"
