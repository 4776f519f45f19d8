"""What a cache holds on the device, by key."""

from __future__ import annotations

from typing import Any


def on_device(cache: Any, key: bytes) -> int | None:
    """The KV block with this key; None if it is not on the device."""
    node = cache.node(key)
    return None if node is None or node.block_id < 0 else node.block_id


def keys_on_device(cache: Any) -> list[bytes]:
    """Keys of all KV blocks on the device."""
    return [node.key for node in cache.nodes() if node.block_id >= 0]
