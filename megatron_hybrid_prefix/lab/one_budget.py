"""Plans one budget for KV and states: what it holds, what it reuses, and how to split it where it has to be split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.lab.capacity import Sizes
from megatron_hybrid_prefix.lab.memory import Memory, floor_gib
from megatron_hybrid_prefix.lab.replay import Policy, replay
from megatron_hybrid_prefix.lab.traces import Trace
from megatron_hybrid_prefix.pool.pages import ALIGNMENT_BYTES, PageLayout, padded_block_bytes

# On conversations, documents, agents and mixes the best share was mostly 15 to 30 %, and 25 % near it (docs/benchmarks.md).
ADVISED_STATE_SHARE = 0.25
SCANNED_SHARES = tuple(n / 20 for n in range(1, 11))
RAISED_BY = 0.25  # each budget in turn is raised by this share of all budgets together


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBudget:
    """What one budget holds. A conversation that is kept has its KV and a checkpoint.

    Attributes:
        layout: Pages and blocks, as the engine has them.
        block_padding_bytes: Bytes of padding behind each KV block, so that a state fills its page better.
        own_bytes: Bytes that the engine keeps for itself: a state, or with drafts those of all running requests.
        conversations: Conversations that are kept.
        split_blocks: KV blocks of the advised fixed split, with the states of running requests taken off.
        split_states: Checkpoints of the advised fixed split.
        split_conversations: Conversations that the advised fixed split keeps.
        host_states: States that the host tier holds, if it holds no KV.
        host_conversations: Conversations that the host tier keeps.
    """

    layout: PageLayout
    block_padding_bytes: int
    own_bytes: int
    conversations: int
    split_blocks: int
    split_states: int
    split_conversations: int
    host_states: int
    host_conversations: int

    @property
    def prefers_split(self) -> bool:
        """Whether the fixed split keeps more: where a state is much smaller than a KV block."""
        return self.split_conversations > self.conversations


def one_budget(
    sizes: Sizes,
    *,
    cache_bytes: int,
    block_tokens: int,
    conversation_tokens: int,
    max_requests: int,
    drafts: int = 0,
    host_bytes: int = 0,
) -> OneBudget:
    """Computes what ``cache_bytes`` hold.

    Args:
        sizes: The model.
        cache_bytes: Bytes for KV, checkpoints and states of running requests.
        block_tokens: Tokens per KV block.
        conversation_tokens: Tokens of a conversation that is kept.
        max_requests: Most running requests. A fixed split reserves their states; one budget only does with drafts.
        drafts: Draft tokens of speculative decoding.
        host_bytes: Bytes of the host tier.

    Raises:
        ValueError: There is no room for a state and a KV block.
    """
    block_bytes = sizes.kv_block_bytes(block_tokens)
    step_bytes = padded_block_bytes(block_bytes, sizes.state_bytes, alignment_bytes=ALIGNMENT_BYTES)
    page_blocks = ceil_div(sizes.state_bytes, step_bytes)
    live_bytes = max_requests * sizes.live_bytes(drafts)
    own_slots = live_bytes // sizes.state_bytes if drafts else 1
    try:
        buffer = PageLayout.of_buffer(cache_bytes, block_bytes=step_bytes, page_blocks=page_blocks, own_slots=own_slots)
    except ValueError as error:
        reason = f" (drafts set {own_slots} states aside: lower --max-requests)" if drafts else ""
        raise ValueError(f"{error}{reason}") from None
    layout = PageLayout(block_bytes=step_bytes, state_bytes=sizes.state_bytes, total_blocks=buffer.total_blocks)
    conversation_blocks = ceil_div(conversation_tokens, block_tokens)
    each_blocks = conversation_blocks + page_blocks
    states_bytes = int(cache_bytes * ADVISED_STATE_SHARE)
    split_states = states_bytes // sizes.state_bytes
    # One block is megatron's dummy.
    split_blocks = max(0, (cache_bytes - states_bytes - live_bytes) // block_bytes - 1)
    return OneBudget(
        layout=layout,
        block_padding_bytes=step_bytes - block_bytes,
        own_bytes=own_slots * layout.page_bytes,
        conversations=(layout.total_blocks - page_blocks) // each_blocks,  # one page is a running request's
        split_blocks=split_blocks,
        split_states=split_states,
        split_conversations=min(split_states, split_blocks // conversation_blocks),
        # Padding stays on the device.
        host_states=host_bytes // sizes.state_bytes,
        host_conversations=host_bytes // (conversation_blocks * block_bytes + sizes.state_bytes),
    )


def reuse_in_one_memory(
    trace: Trace,
    sizes: Sizes,
    *,
    cache_bytes: int,
    host_bytes: int,
    eviction: str,
    on_request: Callable[[int], None],
    state_share: float | None = None,
) -> float:
    """Share of the trace's prompt tokens that one memory reuses, or with ``state_share`` a fixed split of it.

    Args:
        trace, sizes, cache_bytes, host_bytes, eviction, on_request: See `reuse_of_one_budget`.
        state_share: See `Memory`.
    """
    memory = Memory(
        cache_bytes=cache_bytes,
        block_bytes=sizes.kv_block_bytes(trace.block_tokens),
        state_bytes=sizes.state_bytes,
        state_share=state_share,
    )
    policy = Policy(name=eviction, eviction=eviction, options=memory.host_options(host_bytes))
    return replay(trace, policy, memory=memory, on_request=on_request).reused_token_fraction


def reuse_of_one_budget(
    trace: Trace,
    sizes: Sizes,
    *,
    cache_bytes: int,
    host_bytes: int = 0,
    eviction: str,
    on_request: Callable[[int], None],
) -> dict[str, Any]:
    """Replays the trace: with shared memory, with more of it and of the host, and with fixed splits.

    Args:
        trace: Recorded requests.
        sizes: The model.
        cache_bytes: Bytes for KV and states.
        host_bytes: Bytes of the host tier.
        eviction: Name of the eviction policy.
        on_request: See `replay`.

    Returns:
        Shares of the prompt tokens that are reused: ``shared``, ``shared_raised``, ``host_raised``, ``splits`` by share of
        states, ``best_split``, the share of states that reuses most, and ``raised_by_bytes``.
    """
    more_bytes = int((cache_bytes + host_bytes) * RAISED_BY)

    def reuse(cache: int, host: int, share: float | None = None) -> float:
        return reuse_in_one_memory(
            trace,
            sizes,
            cache_bytes=cache,
            host_bytes=host,
            state_share=share,
            eviction=eviction,
            on_request=on_request,
        )

    splits = {share: reuse(cache_bytes, host_bytes, share) for share in SCANNED_SHARES}
    return {
        "raised_by_bytes": more_bytes,
        "shared": reuse(cache_bytes, host_bytes),
        "shared_raised": reuse(cache_bytes + more_bytes, host_bytes),
        "host_raised": reuse(cache_bytes, host_bytes + more_bytes),
        "splits": splits,
        "best_split": max(splits, key=lambda share: splits[share]),
    }


def split_options(cache_bytes: int, share: float = ADVISED_STATE_SHARE) -> str:
    """The options of a fixed split with this share for states."""
    states_bytes = int(cache_bytes * share)
    kv_bytes = cache_bytes - states_bytes
    return f"--mamba-gb {floor_gib(states_bytes)} --buffer-gb {floor_gib(kv_bytes)}"


def advised_split(cache_bytes: int, share: float = ADVISED_STATE_SHARE) -> str:
    """A fixed split in words."""
    return f"{split_options(cache_bytes, share)} ({share:.0%} for states)"


def advice(plan: OneBudget, cache_bytes: int, reuse: dict[str, Any] | None) -> str:
    """Which fixed split to give, in words."""
    if reuse is None:
        text = (
            "a fixed split keeps more, because states waste their blocks" if plan.prefers_split else "as a fixed split"
        )
        return f"{text}: {advised_split(cache_bytes)}; add --trace to find the split of your requests"
    split = advised_split(cache_bytes, reuse["best_split"])
    best, shared = reuse["splits"][reuse["best_split"]], reuse["shared"]
    return f"best fixed split of {len(reuse['splits'])}: {split} reuses {best:.4f}, shared {shared:.4f}"
