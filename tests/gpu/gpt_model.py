"""Answers of a ``HybridModel``, and those of the ``GPTModel`` with its weights. Usage: ``gpt_model.py PRESET OUT.json``."""

from __future__ import annotations

import sys

from megatron_hybrid_prefix.platform import ensure_platform
from tests.gpu.graphs import finish, run
from tests.gpu.models import GPT


def main(preset, out):
    print(ensure_platform().describe(), flush=True)
    found = {"eager": run(preset, graphs=False), "alone": run(preset, graphs=False, together=False)}
    found["uncached_graphs"] = run(preset, graphs=True, cached=False)  # graphs pad products, so they round differently
    found["uncached_gpt"] = run(GPT + preset, graphs=False, cached=False)
    found["gpt"] = run(GPT + preset, graphs=False)
    found["gpt_graphs"] = run(GPT + preset, graphs=True)
    finish(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
