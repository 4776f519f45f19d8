"""Tiers below the host, by the scheme of the URL in the setting ``shared``. Plugins may add to them."""

from __future__ import annotations

from urllib.parse import urlsplit

from megatron_hybrid_prefix.plugins import Registry
from megatron_hybrid_prefix.tiers.base import Tier
from megatron_hybrid_prefix.tiers.file import FileTier
from megatron_hybrid_prefix.tiers.mooncake import MooncakeTier
from megatron_hybrid_prefix.tiers.settings import TierSettings

_TIERS: Registry[type[Tier]] = Registry("shared")


def register_tier(scheme: str, tier: type[Tier]) -> None:
    """Register a kind of tier. Settings and command lines name it by a URL, ``SCHEME://...``.

    Args:
        scheme: A new scheme, in small letters.
        tier: Its class; ``settings_class`` reads the URL.

    Raises:
        ValueError: The scheme is taken, or no URL can have it.
    """
    if urlsplit(f"{scheme}://").scheme != scheme:
        raise ValueError(f"shared={scheme!r}: not a valid scheme for a tier")
    _TIERS.register(scheme, tier)


def parse_url(url: str) -> tuple[type[Tier], TierSettings]:
    """The kind of tier that a URL names, and its settings.

    Raises:
        ValueError: The URL is not valid; one line says why.
        PluginError: A plugin cannot be imported.
    """
    kinds = {scheme: _TIERS[scheme] for scheme in _TIERS.names()}
    try:
        parts = urlsplit(url)
        kind = kinds[parts.scheme]
    except (ValueError, KeyError):
        examples = " or ".join(kind.settings_class.example or f"{scheme}://" for scheme, kind in kinds.items())
        raise ValueError(f"shared={url!r}: must be a URL such as {examples}") from None
    return kind, kind.settings_class.of(url, parts)


register_tier("file", FileTier)
register_tier("mooncake", MooncakeTier)
