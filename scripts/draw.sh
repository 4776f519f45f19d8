#!/usr/bin/env bash
# Makes docs/images/NAME.svg from docs/images/NAME.dot, for every .dot file there. The sources' digest goes into the SVG:
# tests/packaging/test_docs.py compares it.
#
# Uses Graphviz's `dot` where it is installed, else its WebAssembly build from npm (Node.js is enough, no compiler).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../docs/images"

render() {
  if command -v dot >/dev/null; then
    dot -Tsvg "$1"
  elif command -v npx >/dev/null; then
    npx -y -p @hpcc-js/wasm-graphviz-cli@1.11.2 wasm-graphviz-cli -T svg "$1"
  else
    echo "draw.sh: neither dot (Graphviz) nor npx (Node.js) is installed" >&2
    return 2
  fi
}

for source in *.dot; do
  svg=$(render "$source") # a failure leaves the old file as it is
  digest=$(sha256sum <"$source")
  printf '%s\n' "$svg" | sed -e "1a <!-- made by scripts/draw.sh from $source, sha256 ${digest%% *} -->" \
    -e 's/font-family="Arial"/font-family="Arial,Helvetica,sans-serif"/' >"${source%.dot}.svg"
  echo "docs/images/${source%.dot}.svg"
done
