"""`Memory`: bytes that KV and states share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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
        state_bytes: Bytes of a checkpoint.
        mamba_bytes: Most bytes of checkpoints; None: no limit.
        live_bytes: Bytes of a live state, if it is larger; else 0.
    """

    cache_bytes: int
    block_bytes: int
    state_bytes: int
    mamba_bytes: int | None = None
    live_bytes: int = 0

    @property
    def layout(self) -> PageLayout:
        """Pages and blocks. Raises ValueError if there is no room for a KV block and a state."""
        layout = PageLayout.of(block_bytes=self.block_bytes, state_bytes=self.state_bytes, live_bytes=self.live_bytes)
        if self.cache_bytes < layout.least_bytes:
            raise ValueError(f"cache_bytes={self.cache_bytes}: a state and a KV block need {layout.least_bytes} bytes")
        return replace(layout, total_blocks=self.cache_bytes // layout.block_bytes)

    @property
    def most_states(self) -> int:
        """States that are cached at most."""
        fit = self.layout.slots
        return fit if self.mamba_bytes is None else min(fit, self.mamba_bytes // self.state_bytes)

    def cache_sizes(self) -> dict[str, Any]:
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
    live = {"live state": layout.page_live} if layout.page_live else {}
    sizes = live | {"checkpoint" if live else "state": layout.page_states}
    states = " or ".join(f"a {what}" if count == 1 else f"{count} {what}s" for what, count in sizes.items())
    return f"{states} {'takes' if layout.page_states == 1 else 'take'} {blocks}"
