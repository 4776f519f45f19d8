"""Megatron's mixture of experts: the classes that ours derive from or build. Their modules are named here only."""

from __future__ import annotations

from typing import Any, override

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.inference.contexts.routing_metadata import RoutingMetadata
from megatron.core.inference.utils import set_moe_metadata_sync
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import all_to_all, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.moe.token_dispatcher_inference import InferenceAllGatherDispatcherBase
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from megatron_hybrid_prefix.upstream.capabilities import form_of
from megatron_hybrid_prefix.upstream.state_config import decoder

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


def routers_of(model: Any) -> list[TopKRouter]:
    """The routers of a model's decoder on this pipeline stage, in their order."""
    return [module for module in decoder(model).modules() if isinstance(module, TopKRouter)]


def replays(router: Any) -> bool:
    """Whether a router takes routes that it is given. They may name an expert twice, as zeros for padding do."""
    replay = getattr(router, "router_replay", None)
    return replay is not None and replay.router_replay_action not in (None, RouterReplayAction.RECORD)


class ModelRoutes(RoutingMetadata):
    """Megatron's record of the experts that tokens went through, of one model's decoder.

    Megatron reads all routers of the process: those of other models, too, and of layers that draft, which see other tokens.
    """

    routing_indices_buffer: torch.Tensor | None

    def __init__(self, context: Any, model: Any) -> None:
        routers = routers_of(model)
        super().__init__(context, routers[0].topk)
        self._replays = [router.router_replay for router in routers]

    @override
    def enable_static_buffer_recording(self) -> None:
        if self.routing_indices_buffer is None:
            sizes = self.max_tokens, len(self._replays), self.moe_router_topk
            self.routing_indices_buffer = torch.empty(sizes, dtype=torch.int32, device=self.device)
        for layer, replay in enumerate(self._replays):
            replay.set_static_buffer(self.routing_indices_buffer[:, layer])

    @override
    def disable_static_buffer_recording(self) -> None:
        for replay in self._replays:
            replay.clear_static_buffer()

    @override
    def get_routing_indices(self) -> torch.Tensor | None:
        """(tokens of this rank with padding, layers, experts of a token); None: a router recorded nothing."""
        tokens, buffer = self.context.padded_active_token_count, self.routing_indices_buffer
        if self.context.using_cuda_graph_this_step():
            return None if buffer is None else buffer[:tokens]
        recorded = [replay.get_recorded_indices() for replay in self._replays]
        if any(rows is None for rows in recorded):
            return None
        return torch.stack([rows[:tokens] for rows in recorded], dim=1)


def keep_router_buffers(model: Any) -> None:
    """Routers' biases in float32, where a cast of the model has changed them: megatron does it in their next forward."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()
