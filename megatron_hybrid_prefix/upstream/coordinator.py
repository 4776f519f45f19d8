"""`CoordinatorSeam`: megatron's data-parallel coordinator, its private hooks under neutral names.

This module also has the other names that the coordinator's process needs. That process must not import an engine's modules,
because they need a running platform.
"""

from __future__ import annotations

from megatron.core.inference.config import PrefixCachingCoordinatorPolicy
from megatron.core.inference.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron.core.utils import get_pg_size

__all__ = ["CoordinatorSeam", "PrefixCachingCoordinatorPolicy", "get_pg_size"]


class CoordinatorSeam(DataParallelInferenceCoordinator):
    """Megatron's coordinator; a subclass overrides the methods without an underscore."""

    def _update_rank_hashes(self, rank_identity: bytes, request_hashes: list[int]) -> None:
        self.note_blocks(rank_identity, request_hashes)

    def note_blocks(self, rank_identity: bytes, keys: list[int]) -> None:
        """A replica got a request and will hold these blocks."""
        super()._update_rank_hashes(rank_identity, keys)

    @property
    def replicas_by_block(self) -> dict[int, dict[int, int]]:
        """The replicas that hold a block, by the block's key; oldest key first."""
        replicas: dict[int, dict[int, int]] = self._hash_table
        return replicas

    @property
    def pending_requests(self) -> list[int]:
        """Unfinished requests of each replica."""
        counts: list[int] = self._pending_counts.tolist()
        return counts

    def name_of(self, replica: int) -> bytes:
        """A replica's ZeroMQ identity, by its index in `pending_requests`."""
        name: bytes = self._identities_list[replica]
        return name
