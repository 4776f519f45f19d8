"""`install`: scripts that construct megatron's context, controller and engine get this package's classes.

Opt-in; `uninstall` undoes it. Three constructors are replaced. They turn an object of exactly megatron's class into one of our
subclass. So it does not matter when, or from where, a script imported the class. Megatron's ``MegatronLLM`` and
``MegatronAsyncLLM`` get the cache this way, too. Megatron's description of a model's recurrent states,
``MambaInferenceStateConfig.from_model``, then includes layers of every kind, on every pipeline stage. With several stages every
rank has to ask for it, as `build_engine` does: the stages of a hybrid model tell each other what they have.

Every name of megatron that the cache replaces is here. (``platform/patches.py`` replaces what a machine lacks.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.mcore.entrypoints.arguments import naming_flags
from megatron_hybrid_prefix.platform import patched_machine
from megatron_hybrid_prefix.support.environment import say
from megatron_hybrid_prefix.upstream import modules
from megatron_hybrid_prefix.upstream.check import check_overrides
from megatron_hybrid_prefix.upstream.overrides import lost_override
from megatron_hybrid_prefix.upstream.rebinding import Applied, Rebinding, apply
from megatron_hybrid_prefix.upstream.version import check_version

logger = logging.getLogger(__name__)
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
        apply(CONSTRUCTORS, _applied)
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


def _our_state_config(original: Callable[..., Any]) -> Any:
    function = original.__func__  # type: ignore[attr-defined]  # a class method, bound to megatron's class

    def from_model(cls: Any, model: Any, conv_states_dtype: Any = None, ssm_states_dtype: Any = None) -> Any:
        from megatron_hybrid_prefix.mcore.state.layout import config_beyond_megatrons
        from megatron_hybrid_prefix.upstream.state_config import as_subclass

        config = config_beyond_megatrons(model, conv_states_dtype, ssm_states_dtype)
        if config is None:
            return function(cls, model, conv_states_dtype, ssm_states_dtype)
        return as_subclass(config, cls)

    return classmethod(from_model)


def _our_context(original: Callable[..., None]) -> Callable[..., None]:
    from megatron_hybrid_prefix.upstream.names import DynamicInferenceContext

    def __init__(self: Any, model_config: Any, inference_config: Any) -> None:
        from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
        from megatron_hybrid_prefix.mcore.context.reports import report_none_asked
        from megatron_hybrid_prefix.mcore.context.slot_context import SlotContext
        from megatron_hybrid_prefix.mcore.state.layout import needs_this_package, states_of_config
        from megatron_hybrid_prefix.platform import replace_names

        state = inference_config.mamba_inference_state_config
        caches = _prefix is not None or inference_config.enable_prefix_caching
        wanted = False
        if state is not None:
            states_of_config(state)  # raises if it does not describe all recurrent layers
            if not hasattr(inference_config, "keeps_megatrons"):
                wanted = caches or needs_this_package(state)
                if not caches:
                    report_none_asked()
        if type(self) is not DynamicInferenceContext or not wanted:
            if wanted and not isinstance(self, SlotContext):
                say(logger, f"no prefix cache: {type(self).__name__} does not derive from HybridPrefixContext")
            original(self, model_config=model_config, inference_config=inference_config)
            return
        if model_config.cuda_graph_impl == "local":
            replace_names(CONTEXT_IN_CUDA_GRAPHS)
        self.__class__ = HybridPrefixContext if caches else SlotContext
        with naming_flags():
            self.__init__(model_config, inference_config, *([_prefix] if caches else []))

    return __init__


def _our_controller(original: Callable[..., None]) -> Callable[..., None]:
    from megatron_hybrid_prefix.upstream.names import TextGenerationController

    def __init__(self: Any, inference_wrapped_model: Any, tokenizer: Any) -> None:
        from megatron_hybrid_prefix.layers.base import put_before
        from megatron_hybrid_prefix.mcore.context.slot_context import SlotContext
        from megatron_hybrid_prefix.mcore.engine.controller import HybridPrefixController

        if isinstance(inference_wrapped_model.inference_context, SlotContext):
            if (lost := lost_override(self, HybridPrefixController, extends=True)) is not None:
                raise TypeError(f"{lost}: derive the class from HybridPrefixController to run with this cache")
            if type(self) is TextGenerationController:
                self.__class__ = HybridPrefixController
            else:
                put_before("Prefix", HybridPrefixController, self, last=True)
        original(self, inference_wrapped_model=inference_wrapped_model, tokenizer=tokenizer)

    return __init__


def _our_engine(original: Callable[..., None]) -> Callable[..., None]:
    from megatron_hybrid_prefix.upstream.names import DynamicInferenceEngine

    def __init__(self: Any, controller: Any, context: Any) -> None:
        from megatron_hybrid_prefix.mcore.context.slot_context import SlotContext
        from megatron_hybrid_prefix.mcore.engine.engine import HybridPrefixEngine
        from megatron_hybrid_prefix.mcore.state.layout import check_described, kinds_in

        model, is_ours = controller.inference_wrapped_model.model, isinstance(context, SlotContext)
        if not is_ours and kinds_in(model):  # without a layer of ours it is megatron's matter
            check_described(model, context.config.mamba_inference_state_config)
        if not is_ours or isinstance(self, HybridPrefixEngine):
            original(self, controller=controller, context=context)
        elif type(self) is DynamicInferenceEngine:
            self.__class__ = HybridPrefixEngine
            HybridPrefixEngine.__init__(self, controller, context)
        else:
            raise TypeError(f"{type(self).__name__} must derive from HybridPrefixEngine to run with this cache")

    return __init__


_ASKED = "scripts and megatron.training ask it, and it describes Mamba2 layers of a stage only"
_NAMED_BY_ALL = "scripts, MegatronLLM and the static engine name the class"
_NAMED = "scripts and MegatronLLM name the class"

# Obsolete once megatron's high-level API takes its classes as parameters.
CONSTRUCTORS = (
    Rebinding(modules.STATE_CONFIG_CLASS, "from_model", _our_state_config, _ASKED, same_signature=True),
    Rebinding(modules.DYNAMIC_CONTEXT_CLASS, "__init__", _our_context, _NAMED_BY_ALL, same_signature=True),
    Rebinding(modules.CONTROLLER_CLASS, "__init__", _our_controller, _NAMED, same_signature=True),
    Rebinding(modules.DYNAMIC_ENGINE_CLASS, "__init__", _our_engine, _NAMED, same_signature=True),
)


def _accepting_subclasses(original: Callable[[Any], None]) -> Callable[[Any], None]:
    from megatron_hybrid_prefix.upstream.names import DynamicInferenceContext

    def _check_supported_type(meta: Any) -> None:
        if not isinstance(meta.value, DynamicInferenceContext):
            original(meta)

    return _check_supported_type


CONTEXT_IN_CUDA_GRAPHS = (
    Rebinding(
        modules.CUDA_GRAPHS,
        "_check_supported_type",
        _accepting_subclasses,
        "graphs of layers accept megatron's exact context class only; replaced only if graphs are enabled",
        same_signature=True,
    ),
)
