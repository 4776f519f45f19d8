"""Saves a checkpoint of a model with random weights, as `megatron.training` does.

Usage: ``python megatron_checkpoint.py FOLDER OUT.json ARGUMENTS...``: megatron's arguments; OUT gets what the model says,
with caching off, to each prompt of the arguments.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: str, out: str, *argv: str) -> None:
    from examples import megatron_checkpoint as tool
    from megatron_hybrid_prefix.platform import ensure_platform

    platform = ensure_platform(device="cpu", seed=7)
    args = tool.parse([*argv, "--save", folder, "--save-interval", "10"], platform)
    from megatron.training import get_tokenizer
    from megatron.training.checkpointing import save_checkpoint
    from megatron.training.initialize import initialize_megatron

    from megatron_hybrid_prefix.mcore import build_engine_from_args

    initialize_megatron(allow_no_cuda=True, skip_mpu_initialization=True)
    model = tool.build_model(args, platform)
    save_checkpoint(10, [model], None, None, num_floating_point_operations_so_far=0)
    requests = tool.read_prompts(args, get_tokenizer())
    engine = build_engine_from_args(model, args, tokenizer=get_tokenizer())
    results = tool.generate(engine, requests, False, lambda: False).results
    found = [{"tokens": result.generated, "log_probs": result.log_probs} for result in results]
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
