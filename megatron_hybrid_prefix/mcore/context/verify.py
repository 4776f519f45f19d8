"""``verify_hits``: recompute some hits and compare the result with the cached states and KV.

For operators: a counter that stays 0 shows that the cache is right on this hardware, with these kernels.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch

from megatron_hybrid_prefix.index.tree import NO_BLOCK
from megatron_hybrid_prefix.mcore.context.request import StepState
from megatron_hybrid_prefix.ops.state_codes import decode
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.pool.shared_memory import SharedMemory
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from megatron_hybrid_prefix.requests.book import StepPlan

logger = logging.getLogger(__name__)

# Largest relative difference (L2) that rounding explains: matrix products over a different number of rows round
# differently, and so do all later layers. A state of another prompt or depth differs by about 1.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
# With encoded checkpoints: each code is off by 0.01 at most, and what came after a hit was computed from one.
_ENCODED = 1e-1


def verify_plan(context: Any, plan: StepPlan, step: StepState) -> None:
    """Compare the states that ``plan`` computed for verification, and the KV before them, with the cached ones; ``step`` counts.

    The forward of this plan just succeeded; nothing of it is published yet.
    """
    cache = context.prefix_cache
    memory = context.shared_memory
    # Float32 states of a bfloat16 model are computed from what it rounds.
    most = _ENCODED if memory.encodes else TOLERANCE[context.params_dtype]
    difference = _differing_bits if context.is_exact else partial(_relative_difference, most=most)
    for checkpoint in plan.checkpoints:
        if checkpoint.reason != CheckpointReason.VERIFY:
            continue
        live = cache.live[plan.request_id]
        keys = live.chain.keys[: checkpoint.position_tokens // cache.block_tokens]
        nodes = [cache.node(key) for key in keys]
        if nodes[-1] is None or nodes[-1].slot == NO_SLOT:
            continue  # evicted meanwhile
        fresh, kept = (_decoded(memory, slot) for slot in (checkpoint.slot, nodes[-1].slot))
        differences = {name: difference(state, kept[name]) for name, state in fresh.items()}
        cached = [NO_BLOCK if node is None else node.block_id for node in nodes]
        pairs = [(own, kept) for own, kept in zip(live.block_ids, cached, strict=False) if kept not in (NO_BLOCK, own)]
        if pairs:
            ids = (torch.tensor(ids, device=context.memory_buffer.device) for ids in zip(*pairs, strict=True))
            block_dim = context.memory_buffer.dim() - (3 if context.cache_mla_latent else 4)
            differences["kv"] = difference(*(context.memory_buffer.index_select(block_dim, each) for each in ids))
        wrong = {name: value for name, (value, tolerance) in differences.items() if not value <= tolerance}
        step.verified_hits += 1
        step.verify_mismatches += bool(wrong)
        if wrong:
            logger.warning(
                "request %d: the cache for its first %d tokens differs from recomputing them; %s %s",
                plan.request_id,
                checkpoint.position_tokens,
                "share of values with other bits" if context.is_exact else "relative difference",
                ", ".join(f"{name} {value:.1e}" for name, value in wrong.items()),
            )


def _decoded(memory: SharedMemory, slot: int) -> dict[str, torch.Tensor]:
    """The checkpoint in a slot by component name: what comes back of it."""
    row, found = memory.row(slot), dict[str, torch.Tensor]()
    for name in memory.states:
        parts = [part[:, row] for part in memory.parts(name)]
        found[name] = decode(*parts) if len(parts) > 1 else parts[0]
    return found


def _differing_bits(fresh: torch.Tensor, kept: torch.Tensor) -> tuple[float, float]:
    """Share of the values whose bits differ, and the largest that is right: none."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[fresh.element_size()]
    differ = fresh.view(integers) != kept.view(integers)
    return float(differ.sum()) / max(1, differ.numel()), 0.0


def _relative_difference(fresh: torch.Tensor, kept: torch.Tensor, *, most: float) -> tuple[float, float]:
    """Relative difference, and the largest that rounding explains: ``most``, or that of the dtype."""
    if not fresh.numel():
        return 0.0, 0.0  # a pipeline stage without recurrent layers
    size = kept.float().norm().clamp(min=1e-20)
    return float((fresh.float() - kept.float()).norm() / size), max(most, TOLERANCE.get(fresh.dtype, 0))
