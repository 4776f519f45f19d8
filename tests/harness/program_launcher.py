"""Runs one of Megatron-LM's own programs where it cannot run as it is: ``torchrun ... program_launcher.py PROGRAM ARGUMENTS...``.

That is a CPU, as these programs ask for CUDA, and a Hopper GPU with FlashAttention 4 alone, which refuses what megatron asks of it. It stands
before ``PROGRAM`` in the command; no file of Megatron-LM changes. Run it by its path: a checkout of Megatron-LM has packages ``tests`` and
``examples``, too.
"""

from __future__ import annotations

import runpy
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch

from megatron_hybrid_prefix.platform import patch_platform
from megatron_hybrid_prefix.platform.cpu import HostForCuda


def main(program: str, *arguments: str) -> None:
    """With HYBRID_PREFIX_INSTALL the first import of megatron here installs the cache, as in the program itself."""
    device = patch_platform().device.type
    host = _host_for_cuda() if device == "cpu" else nullcontext()
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).resolve().parent)  # as Python sets it for a script
    with host:
        runpy.run_path(program, run_name="__main__")


def _host_for_cuda() -> AbstractContextManager[object]:
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
    return HostForCuda()


if __name__ == "__main__":
    main(*sys.argv[1:])
