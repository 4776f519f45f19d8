"""What a cache holds on the device, by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any


def on_device(cache: Any, key: bytes) -> int | None:
    """The KV block with this key; None if it is not on the device."""
    node = cache.node(key)
    return None if node is None or node.block_id < 0 else node.block_id


def keys_on_device(cache: Any) -> list[bytes]:
    """Keys of all KV blocks on the device."""
    return [node.key for node in cache.nodes() if node.block_id >= 0]


@contextmanager
def watched_calls(
    owner: object, names: Sequence[str], watch: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """A context that enters ``watch()`` around each call of these methods of one object, to measure them."""

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def within(*args: Any, **kwargs: Any) -> Any:
            with watch():
                return call(*args, **kwargs)

        return within

    for name in names:
        setattr(owner, name, watched(getattr(owner, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(owner, name)
