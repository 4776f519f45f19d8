"""Megatron's distributed checkpoints, written without an extra process."""

from __future__ import annotations

from typing import Any, override

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies import torch as strategies


class SynchronousStrategy(strategies.TorchDistSaveShardedStrategy):
    """Megatron's ``torch_dist`` strategy with PyTorch's own writer.

    Upstream's ``save`` runs its asynchronous writer, whose result queue is a separate process that runs the caller's
    ``__main__`` again. The files are the same.
    """

    @override
    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """PyTorch's own writer, in this process."""
        flat, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        dcp.save(
            strategies.mcore_to_pyt_state_dict(flat, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
            planner=strategies.MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
