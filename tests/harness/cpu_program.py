"""Runs one of Megatron-LM's own programs, which ask for CUDA, on the CPU: ``torchrun ... cpu_program.py PROGRAM ARGUMENTS...``.

It stands before ``PROGRAM`` in the command; on a GPU leave it out. No file of Megatron-LM changes. Run it by its path: a checkout of
Megatron-LM has packages ``tests`` and ``examples``, too.
"""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path

import torch

from megatron_hybrid_prefix.platform import patch_platform
from megatron_hybrid_prefix.platform.cpu import HostForCuda


def main(program: str, *arguments: str) -> None:
    patch_platform("cpu")  # with HYBRID_PREFIX_INSTALL this import of megatron installs the cache, as on a GPU

    from megatron import training
    from megatron.training import initialize
    from megatron.training.models import hybrid

    from megatron_hybrid_prefix.models.build import local_layer_specs

    training.initialize_megatron = initialize.initialize_megatron = partial(
        initialize.initialize_megatron, allow_no_cuda=True
    )
    initialize._compile_dependencies = lambda: None  # of data sets: takes a compiler, and serves training alone
    hybrid.default_hybrid_stack_spec = local_layer_specs()  # megatron's is of Transformer Engine

    torch.cuda.LongTensor = torch.LongTensor  # ranks agree on the time in one

    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).resolve().parent)  # as Python sets it for a script
    with HostForCuda():
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
