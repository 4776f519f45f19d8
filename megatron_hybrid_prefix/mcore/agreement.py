"""Numbers that all tensor- and pipeline-parallel ranks have to agree on."""

from __future__ import annotations

from typing import Any

import torch

_NO_CLAIM = 2**62


def min_over_model_ranks(value: int | None, pg_collection: Any = None) -> int | None:
    """The smallest value of all ranks that run the same requests.

    Args:
        value: This rank's; None where it has no say (no recurrent layers).
        pg_collection: Megatron's process groups; by default those of its parallel state.

    Returns:
        None where no rank has a say.
    """
    from megatron.core import parallel_state

    if pg_collection is not None:
        groups = [pg_collection.tp, pg_collection.pp]
    else:
        groups = [
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ]
    least = torch.tensor([_NO_CLAIM if value is None else value], device=torch.cuda.current_device())
    for group in groups:
        if group is not None and torch.distributed.get_world_size(group) > 1:
            torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    agreed = int(least)
    return None if agreed == _NO_CLAIM else agreed
