"""`Memory`: bytes for KV and states, shared or in a fixed split."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.console.terminal import InputError

GIB = 2**30
"""Bytes."""
_MOST_BYTES = 10**18


def bytes_of(count: float, unit: int, option: str) -> int:
    """Bytes of ``count`` units. Raises InputError, with the option's name, for more than any machine has."""
    if count * unit > _MOST_BYTES:
        raise InputError(f"{option} {count:g}: more than any machine has")
    return int(count * unit)


def floor_gib(count: int) -> str:
    """Bytes as GiB with two digits, not rounded up; a byte that was cut off counts."""
    return f"{(count + 1) * 100 // GIB / 100:g}"


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

    def host_options(self, host_bytes: int) -> dict[str, int]:
        """Arguments of `HybridPrefixCache` for a host tier of ``host_bytes`` bytes; see the function `host_options`."""
        return host_options(host_bytes, block_bytes=self.block_bytes, state_bytes=self.state_bytes)


def host_options(host_bytes: int, *, block_bytes: int, state_bytes: int) -> dict[str, int]:
    """Arguments of `HybridPrefixCache` for a host tier; none for 0 bytes. A page is 1/8 of the smaller kind of entry."""
    if not host_bytes:
        return {}
    page_bytes = max(1, min(block_bytes, state_bytes) // 8)
    return {
        "host_pages": host_bytes // page_bytes,
        "host_kv_pages": ceil_div(block_bytes, page_bytes),
        "host_state_pages": ceil_div(state_bytes, page_bytes),
    }
