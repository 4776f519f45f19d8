"""Builds the `Mover` of a context: sizes that the ranks agree on, the host memory, the tier behind it, and its entries' names."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_hybrid_prefix.mcore.ranks.agreement import max_over_model_ranks, min_over_model_ranks, place_in_model
from megatron_hybrid_prefix.mcore.state.fingerprint import Fingerprint, conditions_of_bits
from megatron_hybrid_prefix.policy.registry import make_eviction_policy
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from megatron_hybrid_prefix.tiers.base import Tier
from megatron_hybrid_prefix.tiers.behind import TierBehind
from megatron_hybrid_prefix.tiers.registry import parse_url
from megatron_hybrid_prefix.tiers.units import EntryKind
from megatron_hybrid_prefix.transfers.host_pages import HostSizes, choose_page_bytes
from megatron_hybrid_prefix.transfers.mover import DeviceMover, Mover

if TYPE_CHECKING:
    from megatron_hybrid_prefix.config import HybridPrefixConfig

logger = logging.getLogger(__name__)

TOKENS_VARIABLE = "HYBRID_PREFIX_TOKENS_PER_GIB"
_LEAST_EXPONENT = 64  # of a rate that is not 0
_COPIED_BYTES = 2**28  # to measure the host link
_SQUARE = 4096  # rows of the matrices of the product that measures the device


def open_mover(
    context: Any, prefix: HybridPrefixConfig, on_device: DeviceMover
) -> tuple[Mover | DeviceMover, bytes | None]:
    """The mover of a context, and the secret of its cache's keys if there is a tier behind the host. A collective.

    Without a host tier, if ``host_gb`` is 0, the cache has no states, or some rank lacks the memory; then there is a warning.

    Raises:
        ValueError: The shared tier cannot be used.
    """
    if not prefix.host_gb or not context.checkpoint_slots:
        return on_device, None
    groups = context.config.pg_collection
    own_bytes = {kind: sum(tensor[:, 0].nbytes for tensor in of_kind) for kind, of_kind in on_device.tensors().items()}
    # Pipeline stages differ in their layers. All use the largest entry size, so that they decide alike.
    entry_bytes = {kind: max_over_model_ranks(size, groups) for kind, size in own_bytes.items()}
    page_bytes = choose_page_bytes(entry_bytes.values())
    behind, secret = None, None
    if prefix.shared is not None:
        state_blocks = own_bytes[EntryKind.STATE] // max(1, own_bytes[EntryKind.KV])
        tier, secret = _open_tier(context, prefix, prefix.shared, state_blocks)
        behind = TierBehind(tier, partial(min_over_model_ranks, pg_collection=groups))
    sizes = HostSizes(
        pages=min_over_model_ranks(int(prefix.host_gb * 2**30) // page_bytes, groups),
        page_bytes=page_bytes,
        pages_of={kind: max(1, ceil_div(size, page_bytes)) for kind, size in entry_bytes.items()},
    )
    mover = None
    try:
        if sizes.pages < sizes.pages_of[EntryKind.STATE] + sizes.pages_of[EntryKind.KV]:
            raise MemoryError("it has no room for a state and a KV block")
        mover = Mover(
            on_device,
            sizes=sizes,
            device=context.shared_memory.kv_rows.device,
            tier=behind,
            max_of_ranks=partial(max_over_model_ranks, pg_collection=groups),
        )
    except (RuntimeError, MemoryError) as error:
        logger.warning("no host tier: cannot allocate host_gb=%g of pinned memory: %s", prefix.host_gb, error)
    if min_over_model_ranks(int(mover is not None), groups):
        assert mover is not None
        return mover, secret
    if mover is not None:
        mover.close()
    elif behind is not None:
        behind.tier.close()
    return on_device, None


def _open_tier(context: Any, prefix: HybridPrefixConfig, url: str, state_blocks: int) -> tuple[Tier, bytes]:
    """The tier behind the host, and its secret. A collective. ``state_blocks``: the KV blocks that are as large as a state."""
    # Entries of both kinds share the budget.
    make_ranking = partial(make_eviction_policy, prefix.eviction_policy, state_blocks=max(1, state_blocks))
    kind, settings = parse_url(url)
    problem = ""
    try:
        secret = settings.secret()
        tier = kind(settings, block_tokens=context.block_size_tokens, make_ranking=make_ranking)
    except (ValueError, OSError) as error:
        problem = str(error) if isinstance(error, ValueError) else f"shared: cannot use {url}: {error}"
    if max_over_model_ranks(int(bool(problem)), context.config.pg_collection):
        raise ValueError(problem or "shared: another rank cannot use it")
    return tier, secret


def name_entries(context: Any, model: Any) -> None:
    """Use the entries of this model's weights in the tier behind the host, if there is one.

    The weights of this rank's part of the model are read now, and again after they were invalidated.
    """
    tier, url = context.moves.tier, context.prefix_config.shared
    if tier is None:
        return
    tensors = context.host_moves.copies.tensors()
    shapes = {
        kind.name: [(each.shape[0], *each.shape[2:], str(each.dtype), each.device.type) for each in tensors[kind]]
        for kind in (EntryKind.KV, EntryKind.STATE)
    }
    # All that entries depend on, but for the model.
    layout = (
        context.block_size_tokens,
        context.state_layout,
        sorted(shapes.items()),
        *((context.shared_memory.kept,) if context.shared_memory.encodes else ()),
        place_in_model(context.config.pg_collection),
        *(conditions_of_bits(context.shared_memory.buffer.device) if context.is_exact else ()),
    )
    tier.name_entries(Fingerprint(model, repr(layout), weights=parse_url(url)[1].weights))


def page_tokens(context: Any, model: torch.nn.Module) -> float:
    """Tokens that the model computes in the time in which a page is loaded from the host; see `HostTier.page_tokens`.

    Measured once, by a matrix product and a copy, and rounded to a power of two: the largest of all ranks. Or given, per GiB, by the
    environment variable ``HYBRID_PREFIX_TOKENS_PER_GIB``. Without a GPU 0. A collective.

    Raises:
        ValueError: The variable is no number of 0 or more.
    """
    mover: Mover = context.host_moves
    given = os.environ.get(TOKENS_VARIABLE)
    if given is not None:
        try:
            tokens = float(given) * mover.sizes.page_bytes / 2**30
        except ValueError:
            tokens = -1.0
        if not 0 <= tokens < math.inf:
            raise ValueError(f"{TOKENS_VARIABLE}={given!r}: must be a number, 0 or more")
    elif mover.pages.memory.device.type == "cpu" and context.shared_memory.kv_rows.device.type == "cuda":
        tokens = _seconds_to_load(mover) / _seconds_to_compute(model)
    else:
        tokens = 0.0
    exponent = max_over_model_ranks(
        math.ceil(math.log2(tokens)) if tokens else -_LEAST_EXPONENT, context.config.pg_collection
    )
    return 0.0 if exponent <= -_LEAST_EXPONENT else 2.0**exponent


def _seconds_to_load(mover: Mover) -> float:
    """Seconds that a page takes to the device."""
    rows = mover.pages.rows[: max(1, _COPIED_BYTES // mover.sizes.page_bytes)]
    target = torch.empty_like(rows, device=torch.cuda.current_device())
    return _seconds(lambda: target.copy_(rows, non_blocking=True)) / len(rows)


def _seconds_to_compute(model: torch.nn.Module) -> float:
    """Seconds that a token of a long prompt takes, by the number of parameters."""
    square = torch.empty(_SQUARE, _SQUARE, dtype=torch.bfloat16, device=torch.cuda.current_device())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return _seconds(lambda: square @ square) / _SQUARE**3 * parameters


def _seconds(launch: Callable[[], object]) -> float:
    """Seconds that the second of two launches takes on the device."""
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3
