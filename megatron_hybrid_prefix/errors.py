"""Exceptions of the package. Each message is one line that says what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


class PlatformError(RuntimeError):
    """The machine, or the order of imports, does not allow the request."""


class UpstreamDriftError(PlatformError):
    """A symbol of megatron-core or torch that this package uses is missing, or has another signature."""


class PluginError(ImportError):
    """A module named in ``HYBRID_PREFIX_PLUGINS`` cannot be imported."""


class CacheCorruptionError(RuntimeError):
    """An invariant of the cache does not hold (see ``check_integrity``)."""


class RankDisagreementError(RuntimeError):
    """Tensor- or pipeline-parallel ranks made different cache decisions (see ``check_ranks``)."""


class FieldError(ValueError):
    """A field of a request is wrong.

    Attributes:
        field: Its name.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class RequestDroppedError(RuntimeError):
    """The engine ended, or was reset, before a request was finished."""


def shown(value: Any) -> str:
    """A value in a message: one line of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
