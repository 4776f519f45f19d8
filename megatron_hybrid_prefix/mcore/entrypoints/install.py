"""`install`: scripts that construct megatron's context, controller and engine get this package's classes.

Opt-in; `uninstall` undoes it. Three constructors are replaced (`patches.constructors`). They turn an object of exactly
megatron's class into one of our subclass. So it does not matter when, or from where, a script imported the class. Megatron's
``MegatronLLM`` and ``MegatronAsyncLLM`` get the cache this way, too. Megatron's description of a model's recurrent states,
``MambaInferenceStateConfig.from_model``, then includes layers of every kind, on every pipeline stage. With several stages every
rank has to ask for it, as `build_engine` does: the stages of a hybrid model tell each other what they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.mcore.entrypoints.patches import constructors
from megatron_hybrid_prefix.platform import patched_machine
from megatron_hybrid_prefix.upstream.check import check_overrides
from megatron_hybrid_prefix.upstream.rebinding import Applied, apply
from megatron_hybrid_prefix.upstream.version import check_version

_applied = Applied()
_prefix: HybridPrefixConfig | None = None


def install(prefix: HybridPrefixConfig | None = None) -> None:
    """New ``DynamicInferenceContext``, ``TextGenerationController`` and ``DynamicInferenceEngine`` objects are this package's.

    Affects models with recurrent layers only. Other models, contexts without a cache, and existing objects stay megatron's.
    Models with layers that megatron's engine cannot run (Gated DeltaNet) get these classes with or without a cache. A second
    call changes the settings. Call ``ensure_platform`` first, or ``patch_platform`` where the script starts its own process groups.

    Args:
        prefix: Settings of the cache for every context. None: only contexts whose ``InferenceConfig`` has
            ``enable_prefix_caching`` get a cache, with its ``prefix_caching_mamba_gb``.

    Raises:
        PlatformError: megatron-core is missing or unsupported; nothing is replaced.
        UpstreamDriftError: A name that this package relies on does not exist, or takes other parameters; nothing is replaced.
            If neither was called, the first context raises it instead.
    """
    global _prefix
    check_version()
    if patched_machine() is not None:  # else the first context checks: the layers must not be imported before
        from megatron_hybrid_prefix.mcore.engine import controller, engine  # noqa: F401  for the check

        check_overrides()
    if not _applied.rebindings:
        apply(constructors(lambda: _prefix), _applied)
    _prefix = prefix


def uninstall() -> None:
    """Restore megatron's constructors. Objects built in between keep working. Safe to call twice."""
    global _prefix
    _applied.undo()
    _prefix = None


@contextmanager
def installed(prefix: HybridPrefixConfig | None = None) -> Iterator[None]:
    """`install` for a block: ``with installed(config): llm = MegatronLLM(...)``. Restores the previous settings."""
    before, was_installed = _prefix, bool(_applied.rebindings)
    install(prefix)
    try:
        yield
    finally:
        if was_installed:
            install(before)
        else:
            uninstall()
