#!/usr/bin/env bash
# Sets up the environment if needed, then builds the documentation site with the API reference in out/site. Warnings are
# errors. Arguments go to sphinx-build: scripts/docs.sh -E (rebuild everything).
#
# Sphinx is not in the environment of the other scripts, but in a variant of it that links to the other packages.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
python=$("$MHP_PYTHON" scripts/variant_env.py "$MHP_VENV-docs" --extra docs)
PYTHONPATH="$MHP_ROOT${PYTHONPATH:+:$PYTHONPATH}" "$python" -m sphinx -b html -W --keep-going -q -j auto \
  -c docs -d out/site-doctrees "$@" . out/site
printf '<meta http-equiv="refresh" content="0; url=docs/site.html">\n' >out/site/index.html
printf 'docs.sh: %s\n' "$MHP_ROOT/out/site/index.html"
