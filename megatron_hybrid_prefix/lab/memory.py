"""`Memory`: bytes that KV and states share."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.pool.pages import PageLayout
from megatron_hybrid_prefix.support.arithmetic import ceil_div

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


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory that KV, checkpoints and the state of the running request share.

    Attributes:
        cache_bytes: All bytes.
        block_bytes: Bytes of a KV block.
        state_bytes: Bytes of a state.
        mamba_bytes: Most bytes of cached states; None: no limit.
    """

    cache_bytes: int
    block_bytes: int
    state_bytes: int
    mamba_bytes: int | None = None

    @property
    def layout(self) -> PageLayout:
        """Pages and blocks."""
        return PageLayout.within(self.cache_bytes, block_bytes=self.block_bytes, state_bytes=self.state_bytes)

    @property
    def most_states(self) -> int:
        """States that are cached at most."""
        fit = self.layout.slots
        return fit if self.mamba_bytes is None else min(fit, self.mamba_bytes // self.state_bytes)

    def cache_sizes(self) -> dict[str, int]:
        """Fields of `CacheSettings`."""
        return {**self.layout.cache_sizes(), "state_slots": self.most_states}

    def host_options(self, host_bytes: int) -> dict[str, int]:
        """Fields of `CacheSettings` for a host tier; none for 0 bytes. A page is 1/8 of the smaller kind of entry."""
        if not host_bytes:
            return {}
        page_bytes = max(1, min(self.block_bytes, self.state_bytes) // 8)
        return {
            "host_pages": host_bytes // page_bytes,
            "host_kv_pages": ceil_div(self.block_bytes, page_bytes),
            "host_state_pages": ceil_div(self.state_bytes, page_bytes),
        }


def page_words(layout: PageLayout) -> str:
    """What a page holds, in words."""
    blocks = "1 KV block" if layout.page_blocks == 1 else f"{layout.page_blocks} KV blocks"
    return f"a state takes {blocks}" if layout.page_states == 1 else f"{layout.page_states} states take {blocks}"
