"""Plans one budget for KV and states: what it holds, what it reuses, and how to split it where it has to be split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.lab.capacity import Sizes
from megatron_hybrid_prefix.lab.fit import CHECKPOINTS
from megatron_hybrid_prefix.lab.memory import GIB, Memory
from megatron_hybrid_prefix.lab.replay import Policy, replay
from megatron_hybrid_prefix.lab.traces import Trace
from megatron_hybrid_prefix.pool.pages import PageLayout

# On conversations, documents, agents and mixes the best share was mostly 15 to 30 %, and 25 % near it (docs/benchmarks.md).
ADVISED_STATE_SHARE = 0.25
SCANNED_SHARES = tuple(n / 20 for n in range(1, 11))
RAISED_BY = 0.25  # share of the budget


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBudget:
    """What one budget holds.

    Attributes:
        layout: Pages and blocks.
        conversations: Conversations that are kept: the KV of each, and a checkpoint.
        split_blocks: KV blocks of the advised fixed split, with the states of running requests taken off.
        split_states: Checkpoints of the advised fixed split.
    """

    layout: PageLayout
    conversations: int
    split_blocks: int
    split_states: int


def one_budget(
    sizes: Sizes, *, cache_bytes: int, block_tokens: int, conversation_tokens: int, live_bytes: int
) -> OneBudget:
    """Computes what ``cache_bytes`` hold.

    Args:
        sizes: The model.
        cache_bytes: Bytes for KV, checkpoints and states of running requests.
        block_tokens: Tokens per KV block.
        conversation_tokens: Tokens of a conversation that is kept.
        live_bytes: Bytes of the states of running requests, which a fixed split reserves.

    Raises:
        ValueError: There is no room for a state and a KV block.
    """
    layout = PageLayout.within(
        cache_bytes, block_bytes=sizes.kv_block_bytes(block_tokens), state_bytes=sizes.state_bytes
    )
    blocks = ceil_div(conversation_tokens, block_tokens) + CHECKPOINTS * layout.page_blocks
    states = int(cache_bytes * ADVISED_STATE_SHARE)
    return OneBudget(
        layout=layout,
        conversations=(layout.total_blocks - layout.page_blocks) // blocks,  # one page is a running request's
        split_blocks=max(0, (cache_bytes - states - live_bytes) // layout.block_bytes),
        split_states=states // layout.state_bytes,
    )


def reuse_of_one_budget(
    trace: Trace, sizes: Sizes, cache_bytes: int, eviction: str, on_request: Callable[[int], None]
) -> dict[str, Any]:
    """Replays the trace: with shared memory, with more of it, and with fixed splits.

    Args:
        trace: Recorded requests.
        sizes: The model.
        cache_bytes: Bytes for KV and states.
        eviction: Name of the eviction policy.
        on_request: See `replay`.

    Returns:
        Shares of the prompt tokens that are reused: ``shared``, ``shared_raised``, ``splits`` by share of states, and
        ``best_split``, the share of states that reuses most.
    """
    memory = Memory(
        cache_bytes=cache_bytes, block_bytes=sizes.kv_block_bytes(trace.block_tokens), state_bytes=sizes.state_bytes
    )

    def reuse(of: Memory) -> float:
        policy = Policy(name=eviction, eviction=eviction)
        return replay(trace, policy, memory=of, on_request=on_request).reused_token_fraction

    splits = {share: reuse(replace(memory, state_share=share)) for share in SCANNED_SHARES}
    return {
        "shared": reuse(memory),
        "shared_raised": reuse(replace(memory, cache_bytes=int(cache_bytes * (1 + RAISED_BY)))),
        "splits": splits,
        "best_split": max(splits, key=lambda share: splits[share]),
    }


def advised_split(cache_bytes: int, share: float) -> str:
    """The options of a fixed split with this share for states."""
    states, kv = cache_bytes * share / GIB, cache_bytes * (1 - share) / GIB
    return f"--mamba-gb {states:.3g} --buffer-gb {kv:.3g} ({share:.0%} for states)"


def advice(cache_bytes: int, reuse: dict[str, Any] | None) -> str:
    """Which fixed split to give, in words."""
    split = advised_split(cache_bytes, ADVISED_STATE_SHARE if reuse is None else reuse["best_split"])
    if reuse is None:
        return f"as a fixed split: {split}; add --trace to find the split of your requests"
    best, shared = reuse["splits"][reuse["best_split"]], reuse["shared"]
    return f"best fixed split of {len(reuse['splits'])}: {split} reuses {best:.4f}, shared {shared:.4f}"
