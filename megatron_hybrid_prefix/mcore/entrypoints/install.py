"""`install`: scripts that construct megatron's context, controller and engine themselves get this package's.

Opt-in, and undone by `uninstall`. Three constructors are replaced (`patches.constructors`): they turn an object of exactly
megatron's class into one of the subclass here, so that it does not matter when, or from where, a script imported the
class. That is also how megatron's ``MegatronLLM`` and ``MegatronAsyncLLM`` are given the cache. And megatron's description of
a model's recurrent states, ``MambaInferenceStateConfig.from_model``, includes layers of every kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.mcore.entrypoints.patches import constructors
from megatron_hybrid_prefix.platform import running_platform
from megatron_hybrid_prefix.upstream.contract import check_contract
from megatron_hybrid_prefix.upstream.rebinding import Applied, Rebinding, apply
from megatron_hybrid_prefix.upstream.version import check_version

_applied = Applied()
_prefix: HybridPrefixConfig | None = None


def install(prefix: HybridPrefixConfig | None = None) -> None:
    """From now on megatron's ``DynamicInferenceContext``, ``TextGenerationController`` and ``DynamicInferenceEngine`` are ours.

    Only for models with recurrent layers; for others, and where nothing asks for a cache, megatron's objects stay as they
    are, and so do those that exist already. Models with layers that megatron's engine cannot run (Gated DeltaNet) get these
    classes with or without a cache. Calling it again changes the settings. Call ``ensure_platform`` first.

    Args:
        prefix: Settings of the cache, for every context. None: those contexts whose ``InferenceConfig`` has
            ``enable_prefix_caching``, with its ``prefix_caching_mamba_gb``.

    Raises:
        PlatformError: There is no megatron-core, or an unsupported one; nothing is replaced then.
        UpstreamDriftError: A name that this package relies on does not exist, or takes other parameters; likewise where a
            platform runs, else the first context raises it.
    """
    global _prefix
    check_version()
    if running_platform() is not None:  # else with the first context: no layer may be imported before a platform runs
        check_contract()
    if not _applied.rebindings:
        apply(constructors(lambda: _prefix), _applied)
    _prefix = prefix


def uninstall() -> None:
    """Put megatron's constructors back; what was built in between goes on. Safe to call twice."""
    global _prefix
    _applied.undo()
    _prefix = None


@contextmanager
def installed(prefix: HybridPrefixConfig | None = None) -> Iterator[None]:
    """`install` for a block: ``with installed(config): llm = MegatronLLM(...)``. What was installed before comes back."""
    before, was_installed = _prefix, bool(_applied.rebindings)
    install(prefix)
    try:
        yield
    finally:
        if was_installed:
            install(before)
        else:
            uninstall()


def installed_rebindings() -> tuple[Rebinding, ...]:
    """What is replaced right now."""
    return tuple(_applied.rebindings)
