"""Eviction policies by name: which checkpoint goes when a slot is needed. (KV blocks have an order of their own:
``index/blocks.py``.)

- ``lru``: the least recently used goes first (``lru.py``);
- ``recompute_cost``: the one goes first whose loss is expected to cost the least (``recompute_cost.py``);
- any other that a plugin registers (``megatron_hybrid_prefix/plugins.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hybrid_prefix.plugins import Registry
from megatron_hybrid_prefix.policy.base import EvictionPolicy
from megatron_hybrid_prefix.policy.lru import LruEviction
from megatron_hybrid_prefix.policy.recompute_cost import RecomputeCostEviction

DEFAULT_EVICTION_POLICY = "recompute_cost"

_POLICIES: Registry[Callable[[], EvictionPolicy[Any]]] = Registry("eviction_policy")


def register_eviction_policy(name: str, factory: Callable[[], EvictionPolicy[Any]]) -> None:
    """Add a policy that settings and command lines may name.

    Args:
        name: New.
        factory: Makes an empty policy. Each tier has one of its own.

    Raises:
        ValueError: The name is empty or taken.
    """
    _POLICIES.register(name, factory)


def eviction_policy_names() -> tuple[str, ...]:
    """Names of all policies, in order of registration.

    Raises:
        PluginError: A plugin cannot be imported.
    """
    return _POLICIES.names()


def check_eviction_policy(name: str) -> None:
    """Raises ValueError, listing the names, if there is no such policy; PluginError if a plugin cannot be imported."""
    _POLICIES.check(name)


def present_eviction_policy(name: str) -> str:
    """The name in use today of a policy that may be given by a former name (that warns); other names are returned as is."""
    return _POLICIES.present_name(name)


def make_eviction_policy(name: str) -> EvictionPolicy[Any]:
    """An empty policy.

    Raises:
        ValueError: There is no such policy; the message lists the names.
        PluginError: A plugin cannot be imported.
    """
    return _POLICIES[name]()


register_eviction_policy("lru", LruEviction)
_POLICIES.register("recompute_cost", RecomputeCostEviction, former_names=["replay_cost"])
