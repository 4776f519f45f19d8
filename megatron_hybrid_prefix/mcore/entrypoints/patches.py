"""Every name of megatron that the cache replaces. (``platform/patches.py`` replaces what a machine lacks.)"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.mcore.entrypoints.arguments import naming_flags
from megatron_hybrid_prefix.support.environment import say
from megatron_hybrid_prefix.upstream import modules
from megatron_hybrid_prefix.upstream.overrides import lost_override
from megatron_hybrid_prefix.upstream.rebinding import Rebinding

logger = logging.getLogger(__name__)


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


def _our_context(
    original: Callable[..., None], settings: Callable[[], HybridPrefixConfig | None]
) -> Callable[..., None]:
    from megatron_hybrid_prefix.upstream.names import DynamicInferenceContext

    def __init__(self: Any, model_config: Any, inference_config: Any) -> None:
        from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
        from megatron_hybrid_prefix.mcore.context.reports import report_none_asked
        from megatron_hybrid_prefix.mcore.context.slot_context import SlotContext
        from megatron_hybrid_prefix.mcore.state.layout import needs_this_package, states_of_config
        from megatron_hybrid_prefix.platform import replace_names

        prefix, state = settings(), inference_config.mamba_inference_state_config
        caches = prefix is not None or inference_config.enable_prefix_caching
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
            self.__init__(model_config, inference_config, *([prefix] if caches else []))

    return __init__


def _needs_ours(context: Any) -> bool:
    """Whether a context needs this package's controller and engine."""
    from megatron_hybrid_prefix.mcore.context.slot_context import SlotContext

    return isinstance(context, SlotContext)


def _our_controller(original: Callable[..., None]) -> Callable[..., None]:
    from megatron_hybrid_prefix.upstream.names import TextGenerationController

    def __init__(self: Any, inference_wrapped_model: Any, tokenizer: Any) -> None:
        from megatron_hybrid_prefix.layers.base import put_before
        from megatron_hybrid_prefix.mcore.engine.controller import HybridPrefixController

        if _needs_ours(inference_wrapped_model.inference_context):
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
        from megatron_hybrid_prefix.mcore.engine.engine import HybridPrefixEngine
        from megatron_hybrid_prefix.mcore.state.layout import check_described, kinds_in

        model = controller.inference_wrapped_model.model
        if not _needs_ours(context) and kinds_in(model):  # without a layer of ours it is megatron's matter
            check_described(model, context.config.mamba_inference_state_config)
        if not _needs_ours(context) or isinstance(self, HybridPrefixEngine):
            original(self, controller=controller, context=context)
        elif type(self) is DynamicInferenceEngine:
            self.__class__ = HybridPrefixEngine
            HybridPrefixEngine.__init__(self, controller, context)
        else:
            raise TypeError(f"{type(self).__name__} must derive from HybridPrefixEngine to run with this cache")

    return __init__


def constructors(settings: Callable[[], HybridPrefixConfig | None]) -> tuple[Rebinding, ...]:
    """The constructors that `install` replaces. Obsolete once megatron's high-level API takes its classes as parameters.

    Args:
        settings: Called for each new context; returns the settings of its cache. None: only contexts whose
            ``InferenceConfig`` has ``enable_prefix_caching`` get a cache.
    """
    why_config = "scripts and megatron.training ask it, and it describes Mamba2 layers of a stage only"
    why_context = "scripts, MegatronLLM and the static engine name the class"
    why = "scripts and MegatronLLM name the class"
    make_context = partial(_our_context, settings=settings)
    return (
        Rebinding(modules.STATE_CONFIG_CLASS, "from_model", _our_state_config, why_config, same_signature=True),
        Rebinding(modules.DYNAMIC_CONTEXT_CLASS, "__init__", make_context, why_context, same_signature=True),
        Rebinding(modules.CONTROLLER_CLASS, "__init__", _our_controller, why, same_signature=True),
        Rebinding(modules.DYNAMIC_ENGINE_CLASS, "__init__", _our_engine, why, same_signature=True),
    )
