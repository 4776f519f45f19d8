"""How much memory KV and states get: what megatron is told, and the layout that all ranks use."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from megatron_hybrid_prefix.mcore.ranks.agreement import max_over_model_ranks, min_over_model_ranks, of_all_stages
from megatron_hybrid_prefix.mcore.state.layout import states_of_config
from megatron_hybrid_prefix.platform.memory import total_bytes
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout, own_bytes
from megatron_hybrid_prefix.support.arithmetic import ceil_div, round_up

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_hybrid_prefix.pool.layout import RingLayout
    from megatron_hybrid_prefix.upstream.config import InferenceConfig

MOST_REQUESTS = 1024
"""Default of ``max_requests``, if their states take at most half of the memory, and their rings a sixteenth."""
_REQUESTS_MULTIPLE = 4  # megatron rounds batch sizes to it


def for_cache_gb(
    config: InferenceConfig, cache_gb: float, model_config: TransformerConfig, *, is_exact: bool = False
) -> InferenceConfig:
    """What megatron is told with ``cache_gb``: a budget of which it sets nothing aside for states.

    Megatron takes the states of ``max_requests`` requests from ``buffer_size_gb``, and gives the rest to KV. So it is told a
    budget that is larger by these states. It allocates none of it: `HybridPrefixContext` allocates the memory.

    A collective if ``max_requests`` is not set. Then their states may take half of the memory, and their rings a sixteenth. Raises MemoryError for more than the
    device has in all: megatron would list the blocks of it before any is allocated.
    """
    if cache_gb * 2**30 > (there := total_bytes()):
        raise MemoryError(f"cache_gb={cache_gb}: cannot allocate it: there are {there / 2**30:.4g} GiB in all")
    state = config.mamba_inference_state_config
    assert state is not None
    states = states_of_config(state)
    request_bytes = megatrons_bytes(states.slots.slot_bytes, config.num_speculative_tokens)
    of_steps = {"block_tokens": config.block_size_tokens, "drafts": config.num_speculative_tokens}
    rings = states.rings(model_config.params_dtype, **of_steps, is_open=is_exact)
    requests = config.max_requests
    if requests is None:
        multiple = math.lcm(_REQUESTS_MULTIPLE, model_config.tensor_model_parallel_size)
        most = min(MOST_REQUESTS, config.max_tokens or MOST_REQUESTS)
        cache_bytes, states_bytes = int(cache_gb * 2**30), states.slots.slot_bytes
        fitting = min(
            [most, *(cache_bytes // part // size for part, size in ((2, states_bytes), (16, rings.bytes(1))) if size)]
        )
        requests = min_over_model_ranks(min(most, fitting), config.pg_collection)
        requests = max(1, requests // multiple) * multiple
    return dataclasses.replace(
        config, max_requests=requests, buffer_size_gb=cache_gb + (requests * request_bytes) / 2**30
    )


def megatrons_bytes(state_bytes: int, drafts: int) -> int:
    """Bytes that megatron counts for the states of a request: with drafts also one after each token of a step."""
    return state_bytes * (drafts + 2 if drafts else 1)


def agree_on_budget(
    memory_bytes: int,
    *,
    block_bytes: int,
    state_bytes: int,
    live_bytes: int,
    rings: RingLayout,
    max_requests: int,
    option: str,
    groups: Any,
) -> tuple[PageLayout, bool]:
    """The layout of the memory, with the same numbers of blocks on all ranks. A collective.

    Pipeline stages differ in their layers: pages are those of the stage whose states are largest, in blocks. Each stage pads
    its own blocks, if need be.

    Running requests have slots of their own in a memory that has no room for more.

    Args:
        memory_bytes: Budget on this rank.
        block_bytes: Bytes of a KV block on this rank, without padding.
        state_bytes: Bytes of a checkpoint on this rank; 0 on a stage without recurrent layers.
        live_bytes: Bytes of the state of a running request, at least as many.
        rings: What that request has beside it.
        max_requests: Maximum of running requests.
        option: The budget in words, for the error.
        groups: Megatron's process groups.

    Returns:
        Blocks and pages; and whether the states of running requests are in the pages. Else each has one of the engine's own slots.

    Raises:
        ValueError: There is no room for a KV block and the states of running requests on some rank; raised on all ranks.
    """
    of_stages = of_all_stages((live_bytes, state_bytes, block_bytes), groups)
    live, kept, block = max(of_stages, key=lambda sizes: sizes[0] / sizes[2])
    page = PageLayout.of(
        state_bytes=max(1, kept),
        live_bytes=live if live > kept else 0,
        block_bytes=block,
        alignment_bytes=ALIGNMENT_BYTES,
    )
    if not page.page_live:  # on that stage checkpoints are no smaller: on all they are as live states
        state_bytes = live_bytes
    page_bytes = max(page.page_states * state_bytes, page.page_live * live_bytes)
    step_bytes = max(block_bytes, round_up(ceil_div(page_bytes, page.page_blocks), ALIGNMENT_BYTES))

    def blocks_beside(own_slots: int) -> int:
        left = memory_bytes - own_bytes(live_bytes, rings, own_slots=own_slots, requests=max_requests)
        return min_over_model_ranks(left // step_bytes, groups) - 1  # the last one is megatron's dummy block

    blocks = blocks_beside(1)
    live_states = blocks > page.page_blocks
    if not live_states:
        blocks = blocks_beside(max_requests)
    if blocks < 1:
        of_rings = rings.bytes(max_requests, ALIGNMENT_BYTES)
        needs = [max_requests * live_bytes + 2 * step_bytes, live_bytes + (page.page_blocks + 2) * step_bytes]
        least = min(
            max_over_model_ranks([need + of_rings for need in needs], groups)
        )  # another rank may be the tight one
        raise ValueError(
            f"{option} is too small: {memory_bytes / 2**20:.2f} MiB have no room for a state and a KV block; with the rings of "
            f"{max_requests} requests they need {least / 2**20:.2f} MiB"
        )
    sizes = {"block_bytes": step_bytes, "state_bytes": state_bytes, "live_bytes": live_bytes if page.page_live else 0}
    return dataclasses.replace(page, **sizes, total_blocks=blocks), live_states
