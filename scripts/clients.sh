#!/usr/bin/env bash
# Runs public clients against the server: litellm, renderers, lm-eval and guidellm, in an environment apart (.venv-clients),
# since their pins clash with ours. Makes both environments if needed (the second takes some minutes and 1 GB); the clients then
# run without network. Arguments go to pytest: scripts/clients.sh -k guidellm -s
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
clients=(tests/clients/requirements.txt tests/clients/constraints.txt)
linked=(--only torch --only triton --only 'nvidia-*' --only 'cuda-*') # gigabytes that both can share
MHP_CLIENTS_PYTHON=$("$MHP_PYTHON" scripts/variant_env.py "$MHP_VENV-clients" "${linked[@]}" \
  --requirements "${clients[0]}" --constraints "${clients[1]}")
export MHP_CLIENTS_PYTHON
exec "$MHP_PYTHON" -m pytest -q -m clients tests/clients "$@"
