"""Answers of a ``HybridModel``, and those of the ``GPTModel`` with its weights. Usage: ``gpt_model.py PRESET OUT.json``."""

from __future__ import annotations

from tests.gpu.graphs import run, write
from tests.gpu.models import GPT


def find(preset):
    return {
        "eager": run(preset, graphs=False),
        "alone": run(preset, graphs=False, together=False),
        "uncached_graphs": run(preset, graphs=True, cached=False),  # graphs pad products, so they round differently
        "uncached_gpt": run(GPT + preset, graphs=False, cached=False),
        "gpt": run(GPT + preset, graphs=False),
        "gpt_graphs": run(GPT + preset, graphs=True),
    }


if __name__ == "__main__":
    write(find, __doc__)
