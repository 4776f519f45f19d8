#!/usr/bin/env bash
# Sets up if needed, then makes the site of the documents and of the API in out/site; a warning is an error. Arguments go to
# sphinx-build: scripts/docs.sh -E (nothing is taken from the last time).
#
# Sphinx is not in the environment of the other scripts: an environment beside it has it, and links to the other packages.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$MHP_ROOT"
python=$("$MHP_PYTHON" scripts/variant_env.py "$MHP_VENV-docs" --extra docs)
PYTHONPATH="$MHP_ROOT${PYTHONPATH:+:$PYTHONPATH}" "$python" -m sphinx -b html -W --keep-going -q -j auto \
  -c docs -d out/site-doctrees "$@" . out/site
printf '<meta http-equiv="refresh" content="0; url=docs/site.html">\n' >out/site/index.html
printf 'docs.sh: %s\n' "$MHP_ROOT/out/site/index.html"
