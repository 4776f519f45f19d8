"""Eviction policies by name. A policy picks the checkpoint to evict when a slot is needed.

- ``lru``: the least recently used one (``lru.py``).
- ``recompute_cost``: the one that is cheapest to lose (``recompute_cost.py``).
- Plugins may register others (``megatron_hybrid_prefix/plugins.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hybrid_prefix.plugins import Registry
from megatron_hybrid_prefix.policy.base import EvictionPolicy, KnowsTiers, SharesMemory
from megatron_hybrid_prefix.policy.lru import LruEviction
from megatron_hybrid_prefix.policy.recompute_cost import RecomputeCostEviction

DEFAULT_EVICTION_POLICY = "recompute_cost"

_POLICIES: Registry[Callable[[], EvictionPolicy[Any]]] = Registry("eviction_policy")

# A policy that settings and command lines can name, and what makes an empty one. Each tier has its own.
register_eviction_policy = _POLICIES.register
eviction_policy_names = _POLICIES.names
check_eviction_policy = _POLICIES.check


def make_eviction_policy(name: str, *, state_blocks: float = 0.0) -> EvictionPolicy[Any]:
    """Makes an empty policy. ``state_blocks``, where states and KV share their memory: bytes of a state, in KV blocks.

    Raises:
        ValueError: There is no such policy. The message lists the names.
        PluginError: A plugin cannot be imported.
    """
    policy = _POLICIES[name]()
    if state_blocks and isinstance(policy, SharesMemory):
        policy.share_memory(state_blocks=state_blocks)
    return policy


def make_policy_below(above: EvictionPolicy[Any], name: str, *, state_blocks: float) -> EvictionPolicy[Any]:
    """Makes the policy of the tier below.

    Args:
        above: The policy of the tier above, which was not used yet.
        name: Its name.
        state_blocks: Bytes of a state in KV blocks.
    """
    below = above.tier_below() if isinstance(above, KnowsTiers) else make_eviction_policy(name)
    if isinstance(below, SharesMemory):
        below.share_memory(state_blocks=state_blocks)
    return below


register_eviction_policy("lru", LruEviction)
register_eviction_policy("recompute_cost", RecomputeCostEviction)
