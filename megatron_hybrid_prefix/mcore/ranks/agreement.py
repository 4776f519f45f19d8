"""Agreement of tensor- and pipeline-parallel ranks: on numbers, and on the cache's decisions.

``pg_collection`` is megatron's collection of process groups; by default the groups of its parallel state are used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, cast

import torch

from megatron_hybrid_prefix.errors import RankDisagreementError


def min_over_model_ranks(value: int, pg_collection: Any = None) -> int:
    """Minimum over all ranks that run the same requests; a collective."""
    return -max_over_model_ranks(-value, pg_collection)


def max_over_model_ranks[T: (int, list[int])](values: T, pg_collection: Any = None, *, experts: bool = False) -> T:
    """Maximum over all ranks that run the same requests, for each value of a list; a collective.

    Args:
        values: This rank's value or values; every rank gives the same number of them.
        experts: Also over the ranks that have other experts. They run other requests, but need each other's weights.
    """
    groups = model_groups(pg_collection, experts=experts)
    if not groups:
        return values
    agreed = torch.tensor(values, device=torch.cuda.current_device())
    max_on_device(agreed, groups)
    return cast(T, agreed.tolist())  # an int of a 0-d tensor


def max_on_device(values: torch.Tensor, groups: list[Any]) -> None:
    """Maximum over `model_groups`, in place, without waiting for the device; a collective."""
    for group in groups:
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=group)


def place_in_model(pg_collection: Any = None) -> tuple[tuple[int, int], ...]:
    """This rank and the number of ranks, in the tensor-parallel and in the pipeline-parallel group; not a collective."""
    return tuple(
        (torch.distributed.get_rank(group), torch.distributed.get_world_size(group))
        for group in _groups(pg_collection)
        if group is not None
    )


def of_all_stages[T](value: T, pg_collection: Any = None) -> list[T]:
    """The value of each pipeline stage; a collective."""
    stages = [value] * stage_count(pg_collection)
    if len(stages) > 1:
        torch.distributed.all_gather_object(stages, value, group=_groups(pg_collection)[1])
    return stages


def stage_count(pg_collection: Any = None) -> int:
    """Number of pipeline stages; not a collective."""
    group = _groups(pg_collection)[1]
    return 1 if group is None else torch.distributed.get_world_size(group)


def _groups(pg_collection: Any) -> tuple[Any, Any]:
    """The tensor-parallel and the pipeline-parallel process group; None where there is none."""
    from megatron.core import parallel_state

    if pg_collection is not None:
        return getattr(pg_collection, "tp", None), getattr(pg_collection, "pp", None)
    if not parallel_state.model_parallel_is_initialized():
        return None, None
    return parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()


def model_groups(pg_collection: Any, *, experts: bool = False) -> list[Any]:
    """Process groups of more than one rank, whose ranks run the same requests; with ``experts``, also those with other experts."""
    from megatron.core import parallel_state

    groups = [*_groups(pg_collection)]
    if experts and pg_collection is not None:
        groups.append(getattr(pg_collection, "ep", None))
    elif experts:
        groups.append(parallel_state.get_expert_model_parallel_group(check_initialized=False))
    return [group for group in groups if group is not None and torch.distributed.get_world_size(group) > 1]


class DecisionLog:
    """Log of the cache's decisions on this rank; compared with the other ranks before each forward.

    Args:
        pg_collection: Megatron's process groups.
        is_on: False: nothing is logged, nor compared.
    """

    def __init__(self, pg_collection: Any, *, is_on: bool) -> None:
        self._is_on, self._groups = is_on, model_groups(pg_collection)
        self._digest = hashlib.blake2b(digest_size=7)  # negated below, so less than an int64
        self._since: list[str] = []  # since the last agreement

    def note(self, decision: Callable[[], str]) -> None:
        """Add a decision. It is put into words only if they are compared: the same text on all ranks that decide alike."""
        if self._is_on:
            words = decision()
            self._digest.update(words.encode() + b"\n")
            self._since.append(words)

    def compare(self) -> None:
        """Check that all ranks decided alike so far. Costs one collective per group.

        Raises:
            RankDisagreementError: Two ranks differ; gives the first decision in which they differ, on both. Every rank
                raises it.
        """
        if not self._is_on:
            return
        own = int.from_bytes(self._digest.digest(), "big")
        extremes = torch.tensor([own, -own], device=torch.cuda.current_device())
        max_on_device(extremes, self._groups)
        most, least = extremes.tolist()
        if most != -least:
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
