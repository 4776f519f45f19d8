"""Loads a checkpoint in this layout, saves it, and fails to save. Usage: ``torchrun ... OUT.json TP PP FROM TO``.

The weights of `build_hybrid_model` are the same in every layout, so a model built with the saved one's seed is the
reference for every rank's shard.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from megatron_hybrid_prefix.models import build_hybrid_model, load_checkpoint, save_checkpoint
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.workers.launch import write_findings

SAVED_SEED = 1


def message_of(call):
    """Type and text of what ``call`` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def disk_full(*args, **kwargs):
    raise OSError("no space left\non this rank")


def main(out, tp, pp, checkpoint, save_to):
    ensure_platform(tp=tp, pp=pp, device="cpu")
    model, reference = build_hybrid_model("tiny", seed=7), build_hybrid_model("tiny", seed=SAVED_SEED)
    load_checkpoint(model, checkpoint)
    found = {
        "layers": len(model.decoder.layers),
        "unequal": [
            name
            for (name, value), (_, right) in zip(model.named_parameters(), reference.named_parameters(), strict=True)
            if not torch.equal(value, right)
        ],
    }
    save_checkpoint(model, save_to)
    found["again"] = message_of(lambda: save_checkpoint(model, save_to))
    found["missing"] = message_of(lambda: load_checkpoint(model, save_to + ".none"))
    if dist.get_rank() == 1:
        FileSystemWriter.write_data = disk_full
    found["failed"] = message_of(lambda: save_checkpoint(model, save_to + ".failed"))
    dist.barrier()  # rank 0 removes what was written
    found["left"] = sorted(os.listdir(os.path.dirname(save_to)))
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
