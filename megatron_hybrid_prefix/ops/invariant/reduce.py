"""Sums over ranks in the order of the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


def sum_over_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' tensors, added in the order of the ranks.

    An all-reduce adds in an order that depends on an element's place in the message, and so on the other rows.

    Args:
        x: Contiguous, floating; the same shape on all ranks.
        group: The ranks.

    Returns:
        Shape and dtype of x; added in float32 (float64 of float64), rounded once.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x.contiguous(), group=group)
    total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)
