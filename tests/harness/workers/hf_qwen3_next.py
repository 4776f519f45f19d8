"""A Qwen3-Next of Hugging Face on two tensor-parallel ranks. Usage: ``torchrun hf_qwen3_next.py OUT.json FOLDER``.

FOLDER is what `make_reference` left. Weights come from its safetensors file, by slices.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from safetensors import safe_open

from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.hf_helpers import QWEN3_NEXT, gaps, load_reference
from tests.harness.hf_state_dict import copy_hf_weights
from tests.harness.workers.launch import write_findings


class CountedSlice:
    """A slice of a file that counts the values read of it."""

    def __init__(self, file, name):
        self._slice = file.get_slice(name)
        self.values_read = 0

    @property
    def shape(self):
        return tuple(self._slice.get_shape())

    def __getitem__(self, where):
        found = self._slice[where]
        self.values_read += math.prod(found.shape)
        return found


def main(out, folder):
    reference = load_reference(Path(folder))
    platform = ensure_platform(tp=2, device="cpu")
    model = build_hybrid_model(QWEN3_NEXT, seed=9, platform=platform)
    with safe_open(Path(folder) / "model.safetensors", "pt") as file:
        slices = {name: CountedSlice(file, name) for name in file.keys()}  # noqa: SIM118
        copy_hf_weights(model, slices, QWEN3_NEXT)
    found = gaps(model, reference) | {
        "values_read": sum(one.values_read for one in slices.values()),
        "values_held": sum(parameter.numel() for parameter in model.parameters()),
    }
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
