"""Layers whose rows do not depend on each other, for ``HybridPrefixConfig(exact="bits")``.

`use_invariant_layers` puts these classes before those of a model's layers, in place. Each computes as megatron does unless
`scope.is_on`: the model's own turns the scope on while it runs a step of a context that ``is_exact``. So engines with and
without the mode may share a model.

The recurrent layers need none: their chunks lie on the absolute token grid, and their operations are invariant to the rows.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix.layers.base import put_before
from megatron_hybrid_prefix.layers.whole import is_whole
from megatron_hybrid_prefix.ops.elementwise import sigmoid, silu
from megatron_hybrid_prefix.ops.invariant import scope
from megatron_hybrid_prefix.ops.invariant.attention import attend_paged
from megatron_hybrid_prefix.ops.invariant.linear import linear
from megatron_hybrid_prefix.ops.invariant.norm import rms_norm
from megatron_hybrid_prefix.ops.invariant.reduce import sum_over_ranks
from megatron_hybrid_prefix.ops.invariant.route import largest, route
from megatron_hybrid_prefix.upstream.invariant import (
    MLP,
    BaseMoELayer,
    ColumnParallelLinear,
    HybridModel,
    L2Norm,
    ProductSeam,
    RowParallelLinear,
    SelfAttention,
    SelfAttentionSeam,
    SharedExpertMLP,
    TopKRouter,
    wider_outputs,
)
from megatron_hybrid_prefix.upstream.overrides import lost_override


class InvariantModel(HybridModel):
    """Turns the scope on for steps of an exact context."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Says which context a step is of, and whether a trainer's forward is to have a step's bits."""
        inference_context = args[5] if len(args) > 5 else kwargs.get("inference_context")
        exact = bool(getattr(inference_context, "is_exact", False)) or is_whole(self, inference_context, args, kwargs)
        # After some recompilations a compiled function runs as it is written, with other bits: here it always does.
        compiles = exact and "torch._dynamo" in sys.modules
        with scope.invariant(exact), torch.compiler.set_stance("force_eager") if compiles else nullcontext():
            return super().forward(*args, **kwargs)


class InvariantColumns(ProductSeam):
    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        return linear(x, weight) if scope.is_on() else None


class InvariantRows(RowParallelLinear):
    """Adds the ranks' products in the order of the ranks."""

    def forward(self, input_: torch.Tensor) -> Any:
        """Neither the product nor the sum over ranks depends on other rows."""
        if not scope.is_on():
            return super().forward(input_)
        output = sum_over_ranks(linear(input_, self.weight), self.tp_group)
        if self.bias is None or self.skip_bias_add:
            return output, self.bias
        return output + self.bias, None


class InvariantNorm(torch.nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if scope.is_on():
            return rms_norm(x, self.weight, torch.finfo(x.dtype).eps if self.eps is None else self.eps)
        return super().forward(x)


class InvariantAttention(SelfAttentionSeam):
    """On a GPU, flash-attention with one split is invariant by itself."""

    def flash_decode_and_prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        seqlens_k: torch.Tensor,
        block_table: torch.Tensor,
        is_decode_only: bool,
        softmax_offset: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over pages whose rows do not depend on each other."""
        if q.is_cuda or softmax_offset is not None or not scope.is_on():
            sizes = max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, seqlens_k
            return super().flash_decode_and_prefill(q, k, v, *sizes, block_table, is_decode_only, softmax_offset)
        starts = range(0, len(q) + 1, len(q) // len(seqlens_k)) if is_decode_only else cu_seqlens_q.tolist()
        queries, lengths = q.squeeze(1), seqlens_k.tolist()
        scale = getattr(self, "softmax_scale", None) or q.shape[-1] ** -0.5
        out = attend_paged(queries, k, v, starts=list(starts), lengths=lengths, block_table=block_table, scale=scale)
        return out.unsqueeze(1)

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor | None:
        if x.is_cuda or not scope.is_on():
            return None
        return (x * sigmoid(gate.reshape(x.shape).float())).to(x.dtype)


class InvariantMLP(MLP):
    """On a GPU, PyTorch's activations and ours round alike everywhere in a tensor."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """An activation that rounds alike everywhere."""
        if hidden_states.is_cuda or not self.config.gated_linear_unit or not scope.is_on():
            return super().forward(hidden_states, *args, **kwargs)
        return _gated_mlp(self, hidden_states)


def _gated_mlp(mlp: MLP, x: torch.Tensor) -> Any:
    output, bias = mlp.linear_fc1(x)
    gate, values = (output if bias is None else output + bias).chunk(2, dim=-1)
    return mlp.linear_fc2(silu(gate) * values)


class InvariantSharedExpert(SharedExpertMLP):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """An MLP, whose gate is a product, too."""
        if not scope.is_on():
            found: torch.Tensor = super().forward(hidden_states)
            return found
        is_plain = hidden_states.is_cuda or not self.config.gated_linear_unit
        output, _ = (MLP.forward if is_plain else _gated_mlp)(self, hidden_states)
        if self.use_shared_expert_gate:
            gate = sigmoid(linear(hidden_states, self.gate_weight, torch.float32))
            output = (output * gate).to(output.dtype)
        return output


class InvariantRouter(TopKRouter):
    """Losses and counters are of training; what drops tokens is refused."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits, (..., experts), in ``moe_router_dtype``."""
        if not scope.is_on():
            found: torch.Tensor = super().gating(input)
            return found
        dtype = torch.float32 if self.config.moe_router_dtype == "fp32" else input.dtype
        logits = linear(input.to(self.weight.dtype), self.weight, dtype)
        return logits if self.bias is None else (logits + self.bias).to(dtype)

    def routing(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Weights and map of the chosen experts, both (tokens, experts); routes may be recorded and replayed."""
        if not scope.is_on():
            return super().routing(logits, *args, **kwargs)
        config, replay = self.config, self.router_replay
        sizes = self.topk, config.moe_router_num_groups, config.moe_router_group_topk

        def choose(scores: torch.Tensor) -> torch.Tensor:
            found = largest(scores, *sizes) if replay is None else replay.get_replay_topk(scores, *sizes, largest)
            return found[1]

        return route(
            logits.view(-1, logits.shape[-1]),
            choose,
            score_function=self.score_function,
            use_pre_softmax=config.moe_router_pre_softmax,
            expert_bias=self.expert_bias,
            scaling_factor=config.moe_router_topk_scaling_factor,
        )


# The first that a module is of counts.
_CLASSES: tuple[tuple[type, type], ...] = (
    (HybridModel, InvariantModel),
    (ColumnParallelLinear, InvariantColumns),
    (RowParallelLinear, InvariantRows),
    (torch.nn.RMSNorm, InvariantNorm),
    (SelfAttention, InvariantAttention),
    (SharedExpertMLP, InvariantSharedExpert),
    (MLP, InvariantMLP),
    (TopKRouter, InvariantRouter),
)


def use_invariant_layers(model: torch.nn.Module) -> int:
    """Put the classes on a built model, in place. Weights, training and other engines do not change.

    Returns:
        How many modules changed; 0 if all had theirs.
    """
    found = ((_class_for(module), module) for module in model.modules())
    return sum(put_before("Invariant", ours, module) for ours, module in found if ours is not None)


def _class_for(module: torch.nn.Module) -> type | None:
    return next((ours for base, ours in _CLASSES if isinstance(module, base)), None)


def invariant_problem(model: torch.nn.Module) -> str | None:
    """Why a model's steps cannot be exact bit for bit, in one line; None: they can."""
    config: Any = next((m.config for m in model.modules() if isinstance(m, HybridModel)), None)
    if config is None:
        return "the model is no HybridModel"
    found = _problem_of_config(config) or _problem_of_routing(config) or _problem_of_modules(model)
    if found is None and next(model.parameters()).is_cuda:
        from megatron_hybrid_prefix.layers.invariant_cuda import cuda_problem

        found = cuda_problem(model)
    return found


def _problem_of_config(config: Any) -> str | None:
    checks: tuple[tuple[bool, str], ...] = (
        (bool(config.sequence_parallel), "sequence_parallel adds ranks in the order of the network; turn it off"),
        (
            config.transformer_impl == "inference_optimized",
            "layers of transformer_impl='inference_optimized' are not covered; use 'local'",
        ),
        (config.context_parallel_size > 1, "context_parallel_size above 1 is not covered"),
        (bool(config.multi_latent_attention), "multi-latent attention is not covered"),
        (config.window_size is not None, "window_size (sliding-window attention) is not covered"),
        (config.softmax_type != "vanilla", f"softmax_type={config.softmax_type!r} is not covered"),
        (bool(config.fp8 or config.fp4), "fp8 and fp4 are not covered"),
        (config.normalization != "RMSNorm", f"normalization={config.normalization!r} is not covered"),
        (
            config.gated_linear_unit and config.activation_func is not F.silu,
            "of gated activations only SiLU is covered",
        ),
        (config.activation_func is F.gelu, "the activation GELU is not covered"),
        (
            config.activation_func_clamp_value is not None or bool(config.glu_linear_offset),
            "activation_func_clamp_value and glu_linear_offset are not covered",
        ),
    )
    return next((message for applies, message in checks if applies), None)


def _problem_of_routing(config: Any) -> str | None:
    """What makes a token depend on others or on chance. Losses do in training alone."""
    refused = {
        "moe_router_score_function": config.moe_router_score_function not in ("softmax", "sigmoid"),
        "moe_router_load_balancing_type": config.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing"),
        "moe_router_dtype": config.moe_router_dtype == "fp64",
        "moe_input_jitter_eps": config.moe_input_jitter_eps is not None,
        "moe_router_force_load_balancing": config.moe_router_force_load_balancing,
        "moe_router_force_biased": config.moe_router_force_biased is not None,
        "moe_router_fusion": config.moe_router_fusion,
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor is not None,
    }
    name = next((name for name, applies in refused.items() if applies), None) if config.num_moe_experts else None
    return None if name is None else f"{name}={getattr(config, name)!r} is not covered"


def _problem_of_experts(layer: Any) -> str | None:
    """Other experts, and what takes tokens to them, may add in any order."""
    own = __name__.partition(".")[0] + "."
    parts = (layer.experts, layer.token_dispatcher, *([] if isinstance(layer.router, TopKRouter) else [layer.router]))
    other = next((type(part).__name__ for part in parts if not type(part).__module__.startswith(own)), None)
    return None if other is None else f"{other} is not covered; of experts, GroupedExperts of build_hybrid_model are"


def _problem_of_modules(model: torch.nn.Module) -> str | None:
    for name, module in model.named_modules():
        if type(module).__module__.startswith("transformer_engine") or "TE" in type(module).__name__[:2]:
            return f"{name} is of Transformer Engine; build the model with transformer_impl='local'"
        if isinstance(module, L2Norm):
            return f"{name} is an L2 norm (qk_l2_norm), which is not covered"
        found = _problem_of_experts(module) if isinstance(module, BaseMoELayer) else None
        if (ours := _class_for(module)) is not None:
            found = lost_override(module, ours, lost=("_forward_impl",), extends=ours is InvariantModel)
        if found is not None:
            return f"{name}: {found}"
        if isinstance(module, torch.nn.Linear):
            return f"{name} is a plain torch.nn.Linear, which is not covered"
        if isinstance(module, ColumnParallelLinear) and (wider := wider_outputs(module)) is not None:
            return f"{name} has outputs in {wider} (logit_dtype), which are not covered"
        if isinstance(module, RowParallelLinear) and not module.input_is_parallel:
            return f"{name} scatters its input, which is not covered"
    return None
