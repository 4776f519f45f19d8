"""`Memory`: bytes for KV and states, shared or in a fixed split."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
"""Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A memory for KV, checkpoints and the state of the running request.

    Attributes:
        cache_bytes: All bytes.
        block_bytes: Bytes of a KV block.
        state_bytes: Bytes of a state.
        state_share: Share of the bytes that only states may use; KV uses the others. None: both share all bytes.
    """

    cache_bytes: int
    block_bytes: int
    state_bytes: int
    state_share: float | None = None

    def counts(self) -> tuple[int, int]:
        """KV blocks and checkpoint slots of a fixed split. One state belongs to the running request."""
        assert self.state_share is not None
        states = int(self.cache_bytes * self.state_share)
        return (self.cache_bytes - states) // self.block_bytes, max(0, states // self.state_bytes - 1)

    def cache_options(self) -> dict[str, int]:
        """Arguments of `HybridPrefixCache`."""
        if self.state_share is not None:
            kv_blocks, state_slots = self.counts()
            return {"kv_blocks": kv_blocks, "state_slots": state_slots}
        return {"cache_bytes": self.cache_bytes, "block_bytes": self.block_bytes, "state_bytes": self.state_bytes}
