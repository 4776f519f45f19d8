"""A mixture-of-experts layer for inference: all experts in two grouped matrix products, without Transformer Engine.

`ExpertsLayer` is megatron's ``MoELayer`` with parts of ours. `ExpertDispatcher` sorts the tokens by expert;
`GroupedExperts` computes all experts of this rank with ``torch.nn.functional.grouped_mm``, or those of few tokens, unsorted,
with kernels that read a weight only where a token goes (`experts_of_few`). With latent experts
(``moe_latent_size``) a `LatentProjection` comes before them, and one after. Router and shared expert are megatron's.

Host synchronisation: with expert-parallel size 1 there is none in bfloat16 on a Hopper or Blackwell GPU, so a CUDA graph
can capture the layer: the number of rows is tokens x top-k, and the rows of each expert are counted on the device. Three
cases synchronise: an exchange between expert-parallel ranks (its sizes are arguments of the collective), ``grouped_mm`` in
other types or on other GPUs (PyTorch then loops over the experts), and experts one by one (`build_experts`).
CUDA graphs are refused there (`check_capture`, `build_experts`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, override

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix.ops.elementwise import silu, squared_relu
from megatron_hybrid_prefix.ops.experts import can_run, experts_of_few
from megatron_hybrid_prefix.ops.invariant import scope
from megatron_hybrid_prefix.ops.invariant.linear import linear
from megatron_hybrid_prefix.ops.invariant.reduce import sum_over_ranks
from megatron_hybrid_prefix.upstream import moe
from megatron_hybrid_prefix.upstream.check import check_overrides
from megatron_hybrid_prefix.upstream.overrides import is_known

logger = logging.getLogger(__name__)

ROW_BYTES = 16
"""``grouped_mm`` takes matrices whose rows begin at multiples of it."""
PARTITION_DIMS = {"linear_fc1": 0, "linear_fc2": 1}
"""The dimension of one expert's weights that tensor parallelism divides."""
GRAPH_CAPABILITIES = (9, 10)
"""Major compute capabilities whose ``grouped_mm`` reads the sizes of groups on the device (torch 2.11, bfloat16)."""


class GroupedExperts(torch.nn.Module):
    """All experts of this rank, weights stacked; takes the place of megatron's ``SequentialMLP``.

    It has the interface that ``MoELayer`` asks of experts. Checkpoints have the names and pieces of ``SequentialMLP`` and
    ``TEGroupedMLP``: each loads what the others saved.

    Attributes:
        linear_fc1_weight: (experts, width or 2 x width, hidden), the second with a gate: its rows first.
        linear_fc2_weight: (experts, hidden, width). ``width`` is this tensor-parallel rank's part of an expert; ``hidden`` is
            ``moe_latent_size`` where there is one.

    Args:
        num_local_experts: Experts of this rank.
        config: Megatron's ``TransformerConfig``.
        pg_collection: Process groups; ``ep``, ``expt_tp`` and ``expt_dp`` are used.
        name: Megatron passes the module's name; not used.

    Raises:
        ValueError: The config asks for something that `what_is_missing` names.
    """

    def __init__(self, num_local_experts: int, config: Any, *, pg_collection: Any, name: str | None = None) -> None:
        super().__init__()
        self.config = config
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        if (missing := what_is_missing(config, self.tp_group.size())) is not None:
            raise ValueError(f"grouped experts: {missing}")
        width = config.moe_ffn_hidden_size // self.tp_group.size()
        first = 2 * width if config.gated_linear_unit else width
        hidden = config.moe_latent_size or config.hidden_size
        self.linear_fc1_weight = _weights(config, config.init_method, num_local_experts, first, hidden)
        self.linear_fc2_weight = _weights(config, config.output_layer_init_method, num_local_experts, hidden, width)

    def takes_unsorted(self, tokens: torch.Tensor) -> bool:
        """Whether `forward` takes these tokens, (tokens, hidden), as `experts_of_few` does; one of somebody else's does not."""
        activation = self.config.activation_func is (F.silu if self.config.gated_linear_unit else squared_relu)
        return activation and is_known(self, "forward") and can_run(tokens)

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Every row through its expert.

        Args:
            rows: (rows, hidden), those of the first expert first; or tokens, see `takes_unsorted`.
            tokens_per_expert: (experts,) integers, rows of each; their sum is the number of rows. Or the routing map of tokens.
            probs: (rows,), what the router multiplies each row's output by; or (tokens, experts).

        Returns:
            (rows, hidden), this tensor-parallel rank's part of a sum, which for tokens is over their experts, too; and no bias.
        """
        if not len(rows):
            return rows, None
        if tokens_per_expert.dtype == torch.bool:
            weights = self.linear_fc1_weight, self.linear_fc2_weight
            return experts_of_few(rows, tokens_per_expert, probs, *weights, self.config.moe_router_topk), None
        if scope.is_on():
            return self._each(rows, tokens_per_expert, probs), None
        ends = tokens_per_expert.to(rows.device).cumsum(0).to(torch.int32)
        inner = F.grouped_mm(rows, self.linear_fc1_weight.transpose(1, 2), offs=ends)
        if self.config.gated_linear_unit:
            gate, up = inner.chunk(2, dim=-1)
            inner = self.config.activation_func(gate) * up
        else:
            inner = self.config.activation_func(inner)
        inner = (inner * probs.unsqueeze(-1)).to(rows.dtype)
        return F.grouped_mm(inner, self.linear_fc2_weight.transpose(1, 2), offs=ends), None

    def _each(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """`forward` for ``exact="bits"``: a row has the same bits in any batch, and where the kernels run, those of an unsorted token."""
        if self.takes_unsorted(rows):
            numbers = torch.arange(len(tokens_per_expert), device=rows.device)
            chosen = (
                numbers.repeat_interleave(tokens_per_expert.to(rows.device), output_size=len(rows))[:, None] == numbers
            )
            weights = self.linear_fc1_weight, self.linear_fc2_weight
            return experts_of_few(rows, chosen, chosen * probs[:, None], *weights, 1)
        counts, outputs = tokens_per_expert.tolist(), []
        parts = zip(
            self.linear_fc1_weight, self.linear_fc2_weight, rows.split(counts), probs.split(counts), strict=True
        )
        for first, second, own, weights in parts:
            inner = linear(own, first)
            if self.config.gated_linear_unit:
                gate, up = inner.chunk(2, dim=-1)
                inner = silu(gate) * up
            else:
                inner = self.config.activation_func(inner)
            outputs.append(linear((inner * weights[:, None]).to(rows.dtype), second))
        return torch.cat(outputs)

    def local_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Each expert's weights under the names that megatron gives them: "0.linear_fc1.weight", and views.

        The views say how they are partitioned, as parameters of megatron's linear layers do.
        """
        found = []
        for name, partition_dim in PARTITION_DIMS.items():
            for number, weight in enumerate(getattr(self, f"{name}_weight").unbind(0)):
                weight.tensor_model_parallel, weight.partition_dim = True, partition_dim
                found.append((f"{number}.{name}.weight", weight))
        return found

    def backward_dw(self) -> None:
        """Part of megatron's interface of experts; nothing is delayed here."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What megatron's distributed checkpoints save and load."""
        if (metadata or {}).get("singleton_local_shards"):
            raise ValueError("grouped experts: checkpoints with singleton_local_shards are not supported")
        sharded: dict[str, Any] = {
            f"{prefix}{name}_weight": self._sharded(name, f"{prefix}experts.{name}.weight", sharded_offsets)
            for name in PARTITION_DIMS
        }
        sharded[f"{prefix}_extra_state"] = {
            f"{name}.{number}": self._no_extra_state(f"{prefix}experts.{name}._extra_state", sharded_offsets, number)
            for name in PARTITION_DIMS
            for number in range(self.num_local_experts)
        }
        return sharded

    def get_extra_state(self) -> None:
        """None: see `_no_extra_state`."""

    def set_extra_state(self, state: Any) -> None:
        """Nothing is kept of it."""

    def _no_extra_state(self, key: str, sharded_offsets: tuple[Any, ...], number: int) -> Any:
        """What megatron's linear layers save besides their weights: nothing, by name. A strict load asks for it."""
        number += self.ep_group.rank() * self.num_local_experts
        of_expert = (len(sharded_offsets), number, self.ep_group.size() * self.num_local_experts)
        replica_id = (0, self.tp_group.rank(), self.dp_group.rank())
        return moe.make_sharded_object_for_checkpoint(None, key, (*sharded_offsets, of_expert), replica_id)

    def _sharded(self, name: str, key: str, sharded_offsets: tuple[Any, ...]) -> Any:
        weights = getattr(self, f"{name}_weight")
        first = len(sharded_offsets)
        divided = 1 + PARTITION_DIMS[name]
        tp, tp_rank = self.tp_group.size(), self.tp_group.rank()
        pieces = 2 if name == "linear_fc1" and self.config.gated_linear_unit else 1

        def build(key: str, values: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[Any]:
            return [
                moe.ShardedTensor.from_rank_offsets(
                    key,
                    piece,
                    *sharded_offsets,
                    (first, self.ep_group.rank(), self.ep_group.size()),
                    # All ranks' gates, then all ranks' second halves.
                    (first + divided, number * tp + tp_rank, pieces * tp),
                    replica_id=replica_id,
                    prepend_axis_num=first,
                )
                for number, piece in enumerate(values.chunk(pieces, dim=divided))
            ]

        def merge(loaded: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(loaded, dim=divided)

        replica_id = (0, 0, self.dp_group.rank())
        if pieces == 1:
            return build(key, weights, replica_id, None)[0]
        return moe.ShardedTensorFactory(key, weights, build, merge, replica_id)


def _weights(config: Any, fill: Callable[[torch.Tensor], Any], *shape: int) -> torch.nn.Parameter:
    """(..., rows, columns); filled, matrix by matrix, only where the config says so."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    values = torch.empty(shape, dtype=config.params_dtype, device=device)
    if config.perform_initialization:
        for matrix in values.view(-1, *shape[-2:]):
            fill(matrix)
    return torch.nn.Parameter(values)


class LatentProjection(torch.nn.Module):
    """A linear layer that every tensor-parallel rank has whole, between a token's channels and those of latent experts.

    Megatron's needs Transformer Engine (``TELinear`` with ``parallel_mode="duplicated"``). Checkpoints have its names and
    pieces: each loads what the other saved.

    Args:
        config: Megatron's ``TransformerConfig``.
        fill: Fills the weight, as the config says.
        rows: Channels of the output.
        columns: Channels of the input.
    """

    def __init__(self, config: Any, fill: Callable[[torch.Tensor], Any], rows: int, columns: int) -> None:
        super().__init__()
        self.weight = _weights(config, fill, rows, columns)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(..., columns) to (..., rows); and no bias."""
        return (linear if scope.is_on() else F.linear)(x, self.weight), None

    def get_extra_state(self) -> None:
        """None, by name, as of `GroupedExperts`."""

    def set_extra_state(self, state: Any) -> None:
        """Nothing is kept of it."""


def what_is_missing(config: Any, tp: int) -> str | None:
    """Why `GroupedExperts` cannot compute the experts of this config, in a few words; None if it can."""
    wanted = {
        "experts with a bias (add_bias_linear)": config.add_bias_linear,
        "fp8 or fp4": config.fp8 or config.fp4,
        "moe_apply_probs_on_input": config.moe_apply_probs_on_input,
        "activation_func_clamp_value": config.activation_func_clamp_value is not None,
        "glu_linear_offset": config.glu_linear_offset,
        "moe_mlp_glu_interleave_size": config.moe_mlp_glu_interleave_size is not None,
        "use_te_activation_func": config.use_te_activation_func,
    }
    for name, value in wanted.items():
        if value:
            return f"{name} is not supported"
    if config.moe_ffn_hidden_size % tp:
        return f"tp={tp} does not divide moe_ffn_hidden_size={config.moe_ffn_hidden_size}"
    dtype = config.params_dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"grouped_mm does not take {dtype}"
    for what, count in (
        ("moe_latent_size", config.moe_latent_size) if config.moe_latent_size else ("hidden_size", config.hidden_size),
        ("moe_ffn_hidden_size/tp", config.moe_ffn_hidden_size // tp),
    ):
        if count * dtype.itemsize % ROW_BYTES:
            return (
                f"{what}={count} is not a multiple of {ROW_BYTES // dtype.itemsize}, which grouped_mm needs in {dtype}"
            )
    return None


def check_capture(dtype: torch.dtype, ep: int, device: torch.device) -> None:
    """Raise ValueError, in one line, if a CUDA graph cannot capture an `ExpertsLayer`."""
    if ep > 1:
        raise ValueError(
            f"CUDA graphs with experts need ep=1, not ep={ep}: the exchange between ranks has sizes of the host"
        )
    if dtype != torch.bfloat16:
        raise ValueError(f"CUDA graphs with experts need bfloat16: grouped_mm reads sizes on the host in {dtype}")
    if torch.cuda.get_device_capability(device)[0] not in GRAPH_CAPABILITIES:
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"CUDA graphs with experts need a Hopper or Blackwell GPU: grouped_mm reads sizes on the host on {name}"
        )


def build_experts(num_local_experts: int, config: Any, *, pg_collection: Any, name: str | None = None) -> Any:
    """`GroupedExperts`; where those cannot do what the config asks for, megatron's own, one by one (a log line says so).

    Raises:
        ValueError: CUDA graphs are asked for, and the experts would be computed one by one.
    """
    missing = what_is_missing(config, pg_collection.expt_tp.size())
    if missing is None:
        return GroupedExperts(num_local_experts, config, pg_collection=pg_collection, name=name)
    if config.cuda_graph_impl != "none":
        raise ValueError(f"CUDA graphs with experts need grouped experts: {missing}")
    logger.warning("experts are computed one by one: %s", missing)
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return moe.SequentialMLP(num_local_experts, config, submodules, pg_collection=pg_collection, name=name)


class ExpertDispatcher(moe.MoETokenDispatcher):  # type: ignore[misc]
    """Tokens to experts and back, where all tensor-parallel ranks hold the same tokens (no sequence parallelism).

    Where tensor parallelism divides each expert, each of its ranks routes every token and computes its part of the expert. Where
    experts are whole, each rank routes its share of the tokens. One all-reduce over the tokens adds the parts, or puts the
    shares together. (Megatron's dispatchers take it that the ranks hold different tokens. They gather them, and would compute
    every token once a rank.) That all ranks route alike rests on equal inputs: an all-reduce gives all ranks the same
    bits.

    With expert parallelism, the rows of other ranks' experts are exchanged in one all-to-all each way.

    The methods are megatron's six stages of a layer; what a later stage needs of an earlier one is kept in between.

    Args:
        config: Megatron's ``TransformerConfig``.
        pg_collection: Process groups; ``ep``, ``tp`` and ``expt_tp`` are used.
        layer: Few tokens go unsorted to its experts, where these take them.
    """

    def __init__(self, config: Any, pg_collection: Any, layer: Any) -> None:
        super().__init__(config, pg_collection)
        self._layer = layer
        self._layer_group = pg_collection.tp
        self._shares = pg_collection.tp.size() // self.tp_size
        self._share = pg_collection.tp.rank() // self.tp_size

    @override
    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort this rank's tokens by expert, unless the experts do.

        Args:
            tokens: (..., hidden).
            routing_map: (tokens, all experts) bool, top-k of them True for each token.
            probs: (tokens, all experts), the router's weights, zero elsewhere.

        Returns:
            rows: (own tokens x top-k, hidden), those of the first expert first.
            probs: (own tokens x top-k,), the weight of each row.
        """
        self._shape = tokens.shape
        self._order: torch.Tensor | None = None
        tokens = self._own(tokens.reshape(-1, tokens.shape[-1]))
        routing_map, probs = self._own(routing_map), self._own(probs)
        experts, whole = self._layer.experts, self.ep_size == 1 and not moe.replays(self._layer.router)
        if whole and isinstance(experts, GroupedExperts) and experts.takes_unsorted(tokens):
            self._counts = routing_map
            return tokens, probs
        top_k, num_experts = self.config.moe_router_topk, routing_map.shape[1]
        # The same number of experts for every token, so no size depends on the routing; in the order of their numbers,
        # so that a token's sum does not depend on the batch.
        experts = routing_map.to(torch.uint8).topk(top_k, dim=1).indices.sort(dim=1).values
        weights = probs.gather(1, experts).flatten()
        experts = experts.flatten()
        self._order = experts.argsort(stable=True)
        self._counts = torch.zeros(num_experts, dtype=torch.int64, device=tokens.device)
        self._counts.scatter_add_(0, experts, torch.ones_like(experts))
        return tokens[self._order // top_k], weights[self._order]

    @override
    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row to the rank that has its expert; see `dispatch_preprocess` for both arguments."""
        if self.ep_size == 1:
            return hidden_states, probs
        sent = self._counts.view(self.ep_size, -1)
        self._received = moe.all_to_all(self.ep_group, sent)  # (ranks, local experts): what each rank sends here
        sizes = torch.stack([sent.sum(1), self._received.sum(1)])
        self._sent_rows, self._received_rows = sizes.tolist()
        exchange = (self._received_rows, self._sent_rows)
        return moe.all_to_all(self.ep_group, hidden_states, *exchange), moe.all_to_all(self.ep_group, probs, *exchange)

    @override
    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort what came from several ranks by expert; returns the three arguments of the experts."""
        if self.ep_size == 1:
            return hidden_states, self._counts, probs
        of_rank = torch.arange(self._received.shape[1], device=hidden_states.device).repeat(self.ep_size)
        experts = of_rank.repeat_interleave(self._received.flatten(), output_size=len(hidden_states))
        self._local_order = experts.argsort(stable=True)
        return hidden_states[self._local_order], self._received.sum(0), probs[self._local_order]

    @override
    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Undo the sorting of `dispatch_postprocess`."""
        if self.ep_size == 1:
            return hidden_states
        return torch.empty_like(hidden_states).index_copy_(0, self._local_order, hidden_states)

    @override
    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Each row back to the rank that has its token."""
        if self.ep_size == 1:
            return hidden_states
        returned: torch.Tensor = moe.all_to_all(self.ep_group, hidden_states, self._sent_rows, self._received_rows)
        return returned

    @override
    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sum of each token's experts, and of all tensor-parallel ranks' parts, in the shape that came in."""
        sums = hidden_states
        if self._order is not None:
            rows = torch.empty_like(sums).index_copy_(0, self._order, sums)
            sums = rows.view(-1, self.config.moe_router_topk, rows.shape[-1]).sum(1)
        if self._shares > 1:
            every = sums.new_zeros(math.prod(self._shape[:-1]), sums.shape[1])
            self._own(every).copy_(sums)
            sums = every
        if scope.is_on():
            return sum_over_ranks(sums, self._layer_group).view(self._shape)
        added: torch.Tensor = moe.reduce_from_tensor_model_parallel_region(sums, group=self._layer_group)
        return added.view(self._shape)

    def _own(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of this rank's share of the tokens: all of them where experts are divided."""
        own: torch.Tensor = tokens.tensor_split(self._shares)[self._share]
        return own


class ExpertsLayer(moe.MoELayer):  # type: ignore[misc]
    """Megatron's layer with `ExpertDispatcher`, and with `LatentProjection` where experts are latent.

    Megatron's dispatcher stays where ours does not apply: with sequence parallelism, and where experts drop tokens.

    Attributes:
        fc1_latent_proj: From the channels of a token to those of the experts that the router chooses; with
            ``moe_latent_size`` only.
        fc2_latent_proj: Back, after the sum of a token's experts.

    Args:
        config: Megatron's ``TransformerConfig``.
        submodules: Megatron's ``MoESubmodules``.
        layer_number: Number of the layer, from 1.
        pg_collection: Process groups; None: megatron's global ones.
        is_mtp_layer: Whether the layer is part of multi-token prediction.
        name: The module's name.

    Raises:
        ValueError: See `check_layer`.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        check_overrides(ExpertsLayer, ExpertDispatcher)
        check_layer(vars(config))
        groups = moe.get_default_pg_collection() if pg_collection is None else pg_collection
        # With a latent size megatron's constructor asks for Transformer Engine; without one it would build other experts.
        latent, config.moe_latent_size = config.moe_latent_size, None
        try:
            others = replace(submodules, experts=lambda *_, **__: None)
            super().__init__(config, others, layer_number, groups, is_mtp_layer, name)
        finally:
            config.moe_latent_size = latent
        self.submodules = submodules
        own_name = None if name is None else f"{name}.experts"
        self.experts = submodules.experts(self.num_local_experts, config, pg_collection=groups, name=own_name)
        if latent:
            hidden = config.hidden_size
            self.fc1_latent_proj = LatentProjection(config, config.init_method, latent, hidden)
            self.fc2_latent_proj = LatentProjection(config, config.output_layer_init_method, hidden, latent)
        if _dispatches(vars(config)):
            self.token_dispatcher = ExpertDispatcher(config, groups, self)


def check_layer(fields: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, if `ExpertsLayer` cannot run with these fields of a ``TransformerConfig``.

    Args:
        fields: By name; a field that is absent has megatron's default.
    """
    if fields.get("transformer_impl") == "inference_optimized":
        raise ValueError(
            "transformer_impl='inference_optimized' has experts of its own: use megatron's hybrid_inference_stack_spec, or "
            "build_hybrid_model, which does"
        )
    if fields.get("moe_shared_expert_overlap") and _dispatches(fields):
        # Megatron's dispatcher would run the shared expert, and its linear layers would not add up their ranks' parts.
        raise ValueError("moe_shared_expert_overlap=True is not supported: the dispatcher overlaps nothing; use False")


def _dispatches(fields: Mapping[str, Any]) -> bool:
    """Whether `ExpertDispatcher` takes the place of megatron's dispatcher."""
    return not fields.get("sequence_parallel") and fields.get("moe_expert_capacity_factor") is None
