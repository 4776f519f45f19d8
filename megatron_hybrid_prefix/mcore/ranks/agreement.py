"""What all tensor- and pipeline-parallel ranks have to agree on: numbers, and what the cache decides."""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from typing import Any, cast

import torch

from megatron_hybrid_prefix.errors import RankDisagreementError

_NO_CLAIM = 2**62


def min_over_model_ranks(value: int | None, pg_collection: Any = None) -> int | None:
    """The smallest value of all ranks that run the same requests.

    Args:
        value: This rank's; None where it has no say (no recurrent layers).
        pg_collection: Megatron's process groups; by default those of its parallel state.

    Returns:
        None where no rank has a say.
    """
    groups = _model_groups(pg_collection)
    if not groups:
        return value
    least = torch.tensor([_NO_CLAIM if value is None else value], device=torch.cuda.current_device())
    for group in groups:
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    agreed = int(least)
    return None if agreed == _NO_CLAIM else agreed


def max_over_model_ranks[T: (int, list[int])](values: T, pg_collection: Any = None) -> T:
    """The largest value of all ranks that run the same requests; of a list, each one.

    Args:
        values: This rank's, as many on every rank.
        pg_collection: Megatron's process groups; by default those of its parallel state.
    """
    groups = _model_groups(pg_collection)
    if not groups:
        return values
    most = torch.tensor(values, device=torch.cuda.current_device())
    for group in groups:
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
    return cast(T, most.tolist())  # an int for an int


def of_all_stages[T](value: T) -> list[T]:
    """What each pipeline stage says; every rank has to ask."""
    from megatron.core import parallel_state

    stages = [value] * parallel_state.get_pipeline_model_parallel_world_size()
    if len(stages) > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.all_gather_object(stages, value, group=group)
    return stages


def _model_groups(pg_collection: Any = None) -> list[Any]:
    """Process groups of more than one rank whose ranks run the same requests."""
    from megatron.core import parallel_state

    if pg_collection is not None:
        groups = [pg_collection.tp, pg_collection.pp]
    else:
        groups = [
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ]
    return [group for group in groups if group is not None and torch.distributed.get_world_size(group) > 1]


class DecisionLog:
    """What the cache decided on this rank, to be compared with the other ranks' before each forward.

    Args:
        pg_collection: Megatron's process groups; by default those of its parallel state.
    """

    def __init__(self, pg_collection: Any = None) -> None:
        self._groups = _model_groups(pg_collection)
        self._digest = hashlib.blake2b(digest_size=7)  # negated below, so less than an int64
        self._since: list[str] = []  # since the ranks agreed last

    def note(self, decision: str) -> None:
        """One more decision, in words that are the same on every rank that decides alike."""
        self._digest.update(decision.encode() + b"\n")
        self._since.append(decision)

    def compare(self) -> None:
        """All ranks are here and decided alike so far; costs a collective a group.

        Raises:
            RankDisagreementError: Two ranks differ; says the first decision in which they do, on both. Every rank
                raises it.
        """
        own = int.from_bytes(self._digest.digest(), "big")
        extremes = torch.tensor([own, -own], device=torch.cuda.current_device())
        for group in self._groups:
            torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MIN, group=group)
        least, most = extremes.tolist()
        if least != -most:
            raise RankDisagreementError(self._difference())
        self._since.clear()

    def _difference(self) -> str:
        logs = {torch.distributed.get_rank(): self._since}
        for group in self._groups:
            every: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(every, logs, group=group)
            logs = {rank: log for part in every for rank, log in part.items()}
        first_rank, *others = sorted(logs)
        for rank in others:
            for here, there in zip_longest(logs[first_rank], logs[rank], fillvalue="nothing"):
                if here != there:
                    return f"ranks decide differently: rank {first_rank}: {here}; rank {rank}: {there}"
        return "ranks decided differently before their last agreement"
