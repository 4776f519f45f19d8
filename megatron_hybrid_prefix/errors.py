"""Errors of the package, each meant to be read by a person in one line."""


class PlatformError(RuntimeError):
    """The machine, or the order of imports, does not allow what was asked for."""


class UpstreamDriftError(PlatformError):
    """A symbol of megatron-core (or torch) that the package hooks into is missing or has another signature."""


class PluginError(ImportError):
    """A module named in ``HYBRID_PREFIX_PLUGINS`` cannot be imported."""


class CacheCorruptionError(RuntimeError):
    """An invariant of the cache does not hold (see ``check_integrity``)."""


class RankDisagreementError(RuntimeError):
    """Tensor- or pipeline-parallel ranks took different decisions (see ``check_ranks``)."""
