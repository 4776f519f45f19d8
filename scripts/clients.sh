#!/usr/bin/env bash
# Runs public clients against the server: litellm, renderers, lm-eval and guidellm in an environment apart (.venv-clients), and
# clients of agents and litellm's proxy in another (.venv-agents), since their pins clash with ours and with each other's. Makes the
# environments if needed (some minutes and 2 GB); the clients then run without network. Arguments go to pytest:
# scripts/clients.sh -k agents -s
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
environment() { # NAME, requirements, constraints, patterns of packages that are linked
  local name=$1 requirements=$2 constraints=$3
  "$MHP_PYTHON" scripts/variant_env.py "$MHP_VENV-$name" "${@:4}" \
    --requirements "tests/clients/$requirements" --constraints "tests/clients/$constraints"
}
linked=(--only torch --only triton --only 'nvidia-*' --only 'cuda-*') # gigabytes that both can share
MHP_CLIENTS_PYTHON=$(environment clients requirements.txt constraints.txt "${linked[@]}")
MHP_AGENTS_PYTHON=$(environment agents agents.txt agents-constraints.txt --only pip)
export MHP_CLIENTS_PYTHON MHP_AGENTS_PYTHON
exec "$MHP_PYTHON" -m pytest -q -m clients tests/clients "$@"
