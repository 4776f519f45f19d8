"""Reports of a `HybridPrefixContext`: memory, policy, warnings at the start, and the text that ranks compare."""

from __future__ import annotations

import logging
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from megatron_hybrid_prefix.support.environment import CONFIG_VARIABLE, is_on, say

if TYPE_CHECKING:
    from megatron_hybrid_prefix.metrics import PrefixStats
    from megatron_hybrid_prefix.upstream.config import InferenceConfig

logger = logging.getLogger(__name__)


def memory_report(context: Any) -> str:
    """Slots and bytes of the recurrent states on this rank: running requests, speculation, checkpoints."""
    mamba_gb, state_bytes = context.prefix_config.mamba_gb, context.state_layout.slot_bytes
    memory, layout = context.shared_memory, context.layout
    kept_bytes = memory.kept.slot_bytes
    types = ", ".join(
        f"{'SSM' if component.name == 'ssm' else component.name} in {component.dtype}"
        for _, component in context.state_layout
        if component.name != "conv"  # holds inputs of the layer, in the parameters' dtype
    )
    states = _count(layout.page_states, "checkpoint" if layout.page_live else "state")
    if layout.page_live:
        states += f", or for {_count(layout.page_live, 'live state')}"
    pages = f"{layout.pages} pages of {_count(layout.page_blocks, 'block')} for {states}"
    kept = f"; {_size(kept_bytes)} as checkpoints" if layout.page_live else ""
    lines = [
        f"recurrent states: {_size(state_bytes)} each, {types}{kept}",
        f"  memory: {_size(memory.buffer.numel())} for KV and states: {layout.total_blocks} KV blocks of "
        f"{_size(layout.block_bytes)}, or {pages}",
    ]
    rings, requests = memory.ring_layout, context.max_requests
    if rings.kinds:
        lines.append(
            f"  decodes: states are written every {rings.tokens} tokens, {_size(rings.bytes(requests))} set aside for {requests} rings"
        )
    if memory.first_page_slot > 1:
        states = memory.first_page_slot
        lines.append(f"  running requests: {_count(states, 'state')}, {_size(states * state_bytes)} set aside")
    if mamba_gb is not None:
        lines.append(
            f"  mamba_gb={mamba_gb:g}: at most {_count(context.checkpoint_slots, 'state')} cached, "
            f"{_size(context.checkpoint_slots * kept_bytes)}"
        )
    if context.host_moves is not None:
        lines.append(f"  {context.host_moves.report()}")
    return "\n".join(lines)


def policy_report(context: Any) -> str:
    """Which states are kept and evicted, in one line."""
    prefix = context.prefix_config
    interval = prefix.retention_interval_tokens
    every = "by the length of a prompt" if interval is None else f"every {interval} tokens" if interval else "off"
    return (
        f"prefix cache: blocks of {context.block_size_tokens} tokens, SSM chunks of {context.mamba_chunk_size}; intervals {every}, "
        + f"decode {'on' if prefix.decode_checkpoints else 'off'}; eviction {prefix.eviction_policy}; "
        + ("hits equal misses bit for bit" if context.is_exact else "hits equal misses up to rounding")
        + (f", checkpoints in {prefix.checkpoint_dtype}" if context.shared_memory.encodes else "")
    )


@cache
def report_none_asked() -> None:
    """Say once, where the variable is set, that a context has no cache."""
    if is_on():
        example = f"{CONFIG_VARIABLE}='{{\"cache_gb\": 50}}'"
        say(logger, f"a context without enable_prefix_caching has no prefix cache; for all contexts set {example}")


def report_ignored(config: InferenceConfig, eviction_policy: str) -> None:
    """Log on rank 0 what is ignored: ``mamba_memory_ratio``, which NeMo-RL always sets, and a policy that is not the default."""
    theirs, first = config.prefix_caching_eviction_policy.value, torch.distributed.get_rank() == 0
    if theirs not in ("ref_zero", eviction_policy) and first:
        logger.warning("prefix_caching_eviction_policy=%s is ignored, eviction_policy is %s", theirs, eviction_policy)
    if config.mamba_memory_ratio is not None and first:
        logger.info("mamba_memory_ratio=%s is ignored: KV and states share one memory", config.mamba_memory_ratio)


def report_start(context: Any) -> None:
    """Log both reports on rank 0, and warn about settings that prevent any reuse. With the variable, say at the end what was reused."""
    if torch.distributed.get_rank() != 0:
        return
    if is_on():  # nothing else in a script says it
        weakref.finalize(context, report_end, context.prefix_cache.counters)
    logger.info("%s\n%s", memory_report(context), policy_report(context))
    kept_in = context.prefix_config.checkpoint_dtype
    if kept_in is not None and not context.shared_memory.encodes:
        logger.warning("checkpoint_dtype=%s has no effect: live states have no more bytes", kept_in)
    if not context.checkpoint_slots:
        mamba_gb = context.prefix_config.mamba_gb
        what = "the memory" if mamba_gb is None else f"mamba_gb={mamba_gb:g}"
        logger.warning("%s has no room for a cached state: nothing is reused", what)
    elif context.max_sequence_length <= context.block_size_tokens:
        logger.warning(
            "block_size_tokens=%d is not less than max_sequence_length=%d: no prompt fills a block, nothing is reused",
            context.block_size_tokens,
            context.max_sequence_length,
        )


def report_end(stats: PrefixStats) -> None:
    """Say in one line what was reused, when a context is dropped or its process ends."""
    if stats.prompt_tokens:
        share = stats.reused_tokens / stats.prompt_tokens
        say(logger, f"prefix cache: {stats.reused_tokens} of {stats.prompt_tokens} prompt tokens reused ({share:.0%})")


def describe_forward(context: Any) -> str:
    """The rows of the next forward, in words: the same text on all ranks that decide alike."""
    rows = slice(0, context.total_request_count)
    stats = context.prefix_cache.stats()
    return (
        f"forward of requests {context.request_ids[rows].tolist()} ({context.paused_request_count} paused) in live slots "
        f"{[context.states.live.slot(index) for index in context.live_indices[rows].tolist()]} with KV blocks "
        f"{[[block for block in row if block != -1] for row in context.request_to_kv_block_ids[rows].tolist()]}; "
        f"{context.prefix_cache.blocks.available_count} KV blocks available, {stats.slots_used} slots used"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _size(count_bytes: int) -> str:
    return f"{count_bytes / 2**30:.2f} GiB" if count_bytes >= 2**30 else f"{count_bytes / 2**20:.3f} MiB"
