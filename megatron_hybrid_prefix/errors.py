"""Exceptions of the package. Each message is one line that says what to change."""


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
