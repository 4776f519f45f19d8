"""Tiers behind the host, by name. The package has none: plugins register them."""

from __future__ import annotations

from collections.abc import Callable

from megatron_hybrid_prefix.plugins import Registry
from megatron_hybrid_prefix.tiers.base import Tier
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST

_TIERS: Registry[Callable[[str], Tier]] = Registry("tier_behind_host")


def register_tier(name: str, factory: Callable[[str], Tier]) -> None:
    """Register a tier. Settings and command lines name it as ``NAME`` or ``NAME:ARGUMENT``.

    Args:
        name: A new name without a colon.
        factory: Takes the argument ("" if there is none) and returns the tier of one rank. May raise ValueError.

    Raises:
        ValueError: The name is empty or taken, or contains a colon.
    """
    if ":" in name or name in (DEVICE, HOST):
        raise ValueError(f"tier_behind_host={name!r}: not a valid name for a tier")
    _TIERS.register(name, factory)


def tier_name(setting: str) -> str:
    """The name in ``NAME`` or ``NAME:ARGUMENT``.

    Raises:
        ValueError: No tier has this name; the message lists the names.
        PluginError: A plugin cannot be imported.
    """
    name = setting.partition(":")[0]
    _TIERS.check(name)
    return name


def make_tier(setting: str) -> Tier:
    """Make the tier of ``NAME`` or ``NAME:ARGUMENT``.

    Raises:
        ValueError: No tier has this name, or the tier refuses the argument.
        PluginError: A plugin cannot be imported.
    """
    return _TIERS[tier_name(setting)](setting.partition(":")[2])
