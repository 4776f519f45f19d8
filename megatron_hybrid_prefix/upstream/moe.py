"""Megatron's mixture of experts: the classes that ours derive from or build. Their modules are named here only."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.inference.utils import set_moe_metadata_sync
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import all_to_all, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.moe.token_dispatcher_inference import InferenceAllGatherDispatcherBase
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from megatron_hybrid_prefix.upstream.capabilities import form_of

TRAINING_COUNTERS = frozenset(
    ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps", "qb_beta_accum", "qb_beta_count")
)
"""Buffers of megatron's routers that count in training. No output depends on them."""


VIEWS_OF_WEIGHTS = frozenset(("_fc1_weight", "_fc2_weight"))
"""Buffers that the experts of ``transformer_impl="inference_optimized"`` make in their first forward, for weights to be views of."""

INFERENCE_ACTIVATIONS = ("relu2", "swiglu") if form_of("inference-optimized experts") == "SwiGLU, too" else ("relu2",)
"""What these experts compute, as `HybridModelConfig` names it."""


def count_tokens_of_drafts(model: Any) -> None:
    """Let the layers that draft count their tokens, where experts are those of ``transformer_impl="inference_optimized"``.

    Megatron lets the first layer that it finds count, and the kernels of all experts take that number for their rows. Forwards of the
    decoder and of the layers that draft have different numbers: kernels would leave rows out, or go on after the last one.
    """
    decoders: list[InferenceAllGatherDispatcherBase] = []
    drafting: list[InferenceAllGatherDispatcherBase] = []
    for name, module in model.named_modules():
        if isinstance(module, MoELayer) and hasattr(module, "_inference_token_dispatcher"):
            (drafting if ".mtp." in f".{name}" else decoders).append(module._inference_token_dispatcher)
    if not drafting:
        return
    set_moe_metadata_sync(model)  # else megatron does it before its first forward, once in a process
    dispatcher: InferenceAllGatherDispatcherBase
    for dispatcher in [*decoders, *drafting]:
        dispatcher._runs_metadata_sync = dispatcher in [*decoders[:1], *drafting]


def keep_router_buffers(model: Any) -> None:
    """Routers' biases in float32, where a cast of the model has changed them: megatron does it in their next forward."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()
