"""Builds the `Mover` of a context: sizes that the ranks agree on, the host memory, the tier behind it, and its entries' names."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_hybrid_prefix.mcore.ranks.agreement import max_over_model_ranks, min_over_model_ranks, place_in_model
from megatron_hybrid_prefix.mcore.state.fingerprint import Fingerprint
from megatron_hybrid_prefix.policy.base import SharesMemory
from megatron_hybrid_prefix.policy.registry import make_eviction_policy
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from megatron_hybrid_prefix.tiers.base import Tier
from megatron_hybrid_prefix.tiers.behind import TierBehind
from megatron_hybrid_prefix.tiers.registry import parse_url
from megatron_hybrid_prefix.tiers.units import EntryKind
from megatron_hybrid_prefix.transfers.host_pages import HostSizes
from megatron_hybrid_prefix.transfers.mover import DeviceMover, Mover
from megatron_hybrid_prefix.transfers.pinned import choose_page_bytes

if TYPE_CHECKING:
    from megatron_hybrid_prefix.config import HybridPrefixConfig

logger = logging.getLogger(__name__)


class Secrets(NamedTuple):
    """Of the keys of blocks: ``keys`` of all, ``adapters`` of those with an adapter; see `CacheSettings`."""

    keys: bytes | None = None
    adapters: bytes = b""


def open_mover(context: Any, prefix: HybridPrefixConfig, on_device: DeviceMover) -> tuple[Mover | DeviceMover, Secrets]:
    """The mover of a context, and the secrets of its cache, which is made afterwards. A collective.

    Without a host tier, if ``host_gb`` is 0, the cache has no states, or some rank lacks the memory; then there is a warning.

    Raises:
        ValueError: The shared tier cannot be used.
    """
    if not prefix.host_gb or not context.checkpoint_slots:
        return on_device, Secrets()
    groups = context.config.pg_collection
    own_bytes = {kind: sum(tensor[:, 0].nbytes for tensor in of_kind) for kind, of_kind in on_device.tensors().items()}
    # Pipeline stages differ in their layers. All use the largest entry size, so that they decide alike.
    entry_bytes = {kind: max_over_model_ranks(size, groups) for kind, size in own_bytes.items()}
    page_bytes = choose_page_bytes(entry_bytes.values())
    behind, secrets = None, Secrets()
    if prefix.shared is not None:
        tier, key = _open_tier(
            context, prefix, prefix.shared, own_bytes[EntryKind.STATE] // max(1, own_bytes[EntryKind.KV])
        )
        behind = TierBehind(tier, lambda depth_blocks: min_over_model_ranks(depth_blocks, groups))
        secrets = Secrets(key, os.urandom(16))
    sizes = HostSizes(
        pages=min_over_model_ranks(int(prefix.host_gb * 2**30) // page_bytes, groups),
        page_bytes=page_bytes,
        pages_of={kind: max(1, ceil_div(size, page_bytes)) for kind, size in entry_bytes.items()},
    )
    mover = None
    try:
        if sizes.pages < sum(sizes.pages_of.values()):
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
        return mover, secrets
    if mover is not None:
        mover.close()
    elif behind is not None:
        behind.tier.close()
    return on_device, Secrets()


def _open_tier(context: Any, prefix: HybridPrefixConfig, url: str, state_blocks: int) -> tuple[Tier, bytes]:
    """The tier behind the host, and its secret. A collective. ``state_blocks``: the KV blocks that are as large as a state."""

    def make_ranking() -> Any:
        policy = make_eviction_policy(prefix.eviction_policy)
        if isinstance(policy, SharesMemory):  # entries of both kinds share the budget
            policy.share_memory(state_blocks=max(1, state_blocks))
        return policy

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

    Args:
        context: The context.
        model: This rank's part of the model. Its weights are read now, and again after they were invalidated.
    """
    tier, url = context.moves.tier, context.prefix_config.shared
    if tier is None:
        return
    shapes = {
        kind.name: [(tensor.shape[0], *tensor.shape[2:], str(tensor.dtype), tensor.device.type) for tensor in of_kind]
        for kind, of_kind in context.host_moves.copies.tensors().items()
    }
    # All that entries depend on, but for the model.
    layout = (
        context.block_size_tokens,
        context.state_layout,
        sorted(shapes.items()),
        place_in_model(context.config.pg_collection),
    )
    tier.name_entries(Fingerprint(model, repr(layout), weights=parse_url(url)[1].weights))
