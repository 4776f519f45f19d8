"""A script with megatron.training's flags that makes its own process groups. Usage: ``torchrun env_training.py OUT.json FLAGS...``.

The environment switches the cache on; all names but those of the test are megatron's.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import initialize

from examples import megatron_checkpoint as tool
from megatron_hybrid_prefix.platform import patched_machine, running_platform
from tests.engine.test_install import CONFIG, ENGINE, TOKENS, skipped
from tests.harness.workers.launch import write_findings


def main(out, flags):
    machine = patched_machine()
    args = tool.parse(flags, machine)
    with tool.megatron_at_work(machine):
        initialize._compile_dependencies = lambda: None  # of data sets; a wheel of megatron-core has no makefile
        initialize.initialize_megatron(allow_no_cuda=True)
        model = tool.build_model(args, machine)
    engine = ENGINE(model, CONFIG(model, enable_prefix_caching=True))
    found = {
        "answers": TOKENS(engine),
        "context": type(engine.context).__name__,
        "skipped": skipped(engine),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "gloo": parallel_state.get_data_parallel_group_gloo().size(),
        "embedding": list(model.embedding.word_embeddings.weight.shape),
        "platform": running_platform(),
    }
    write_findings(out, found)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()  # gloo's threads may abort a process that ends with them


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
