"""Tiers behind the host by name. There is none in the package: a plugin registers one."""

from __future__ import annotations

from collections.abc import Callable

from megatron_hybrid_prefix.plugins import Registry
from megatron_hybrid_prefix.tiers.base import Tier
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST

_TIERS: Registry[Callable[[str], Tier]] = Registry("tier_behind_host")


def register_tier(name: str, factory: Callable[[str], Tier]) -> None:
    """Add a tier that settings and command lines may name as ``NAME`` or ``NAME:ARGUMENT``.

    Args:
        name: New; without a colon.
        factory: Makes the tier of one rank out of the argument ("" without one). It may raise ValueError.

    Raises:
        ValueError: The name is empty or taken, or has a colon.
    """
    if ":" in name or name in (DEVICE, HOST):
        raise ValueError(f"tier_behind_host={name!r}: cannot be the name of a tier")
    _TIERS.register(name, factory)


def tier_name(setting: str) -> str:
    """The name in ``NAME`` or ``NAME:ARGUMENT``.

    Raises:
        ValueError: There is no such tier; the message lists the names.
        PluginError: A plugin cannot be imported.
    """
    name = setting.partition(":")[0]
    _TIERS.check(name)
    return name


def make_tier(setting: str) -> Tier:
    """The tier that ``NAME`` or ``NAME:ARGUMENT`` asks for.

    Raises:
        ValueError: There is no such tier, or it refuses the argument.
        PluginError: A plugin cannot be imported.
    """
    return _TIERS[tier_name(setting)](setting.partition(":")[2])
