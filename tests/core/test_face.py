"""The size of the cache's face: the public methods and properties that a reader of its callers has to know."""

from __future__ import annotations

from typing import Any

from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.settings import CacheSettings

MOST = 46


def public(kind: type) -> set[str]:
    """Names of public methods and properties of a class of this package, inherited ones included."""
    of_package = [each for each in kind.__mro__ if each.__module__.startswith("megatron_hybrid_prefix.")]
    members = {name: value for each in of_package for name, value in vars(each).items() if not name.startswith("_")}
    return {
        f"{kind.__name__}.{name}" for name, value in members.items() if callable(value) or isinstance(value, property)
    }


def exposed(root: Any) -> set[type]:
    """Classes of this package that can be reached by public attributes: through tables and lists, too."""
    found: set[type] = set()
    left = [root]
    while left:
        value = left.pop()
        if isinstance(value, dict | list | tuple | set):
            left += value.values() if isinstance(value, dict) else value
        elif type(value).__module__.startswith("megatron_hybrid_prefix.") and type(value) not in found:
            found.add(type(value))
            names = {*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())}
            left += [getattr(value, name) for name in names if not name.startswith("_")]
    return found


def test_the_face_of_the_cache_is_small():
    cache = HybridPrefixCache(CacheSettings(block_tokens=4, kv_blocks=12, page_blocks=2, host_pages=20))
    for number in (1, 2):
        admission = cache.admit(number, cache.match(cache.chain([1] * 9)))
        assert admission is not None
        cache.publish(cache.plan(number, admission.resume_tokens, 9))
    names = set[str]().union(*map(public, exposed(cache)))
    assert {"HybridPrefixCache.admit", "BlocksById.allocate", "Loads.begin_load_back"} <= names
    assert "LiveRequest.is_loading" in names, "what is in its tables counts, too"
    assert len(names) <= MOST, sorted(names)
