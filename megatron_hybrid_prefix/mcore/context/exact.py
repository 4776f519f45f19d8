"""What ``HybridPrefixConfig(exact="bits")`` needs of a context, and how it cuts prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_hybrid_prefix.config import HybridPrefixConfig

if TYPE_CHECKING:
    from megatron_hybrid_prefix.upstream.config import InferenceConfig


def check_exact_config(prefix: HybridPrefixConfig, config: InferenceConfig, grid_tokens: int) -> None:
    """Raise ValueError, in one line, if these settings do not go with ``exact``.

    Args:
        prefix: With ``exact``.
        config: Megatron's.
        grid_tokens: At multiples of it, chunks of recurrent layers of all kinds end.
    """
    name = f"exact={prefix.exact!r}"
    least = 2 * grid_tokens + (config.max_requests or 0) * (config.num_speculative_tokens + 1)
    if config.enable_chunked_prefill and config.max_tokens is not None and config.max_tokens < least:
        raise ValueError(
            f"{name} with chunked prefill needs max_tokens of {least} or more, not {config.max_tokens}: chunks of a prompt end "
            f"at multiples of {grid_tokens} tokens"
        )


def end_on_grid(*, start: int, budget: int, end: int, quantum: int) -> int:
    """Where the next chunk of a prompt ends, so that the scan's chunks are those of the whole prompt.

    Args:
        start: Position of the first token to compute.
        budget: Most tokens to compute.
        end: End of the prompt.
        quantum: Chunks but the last end at multiples of it.

    Returns:
        A position after ``start``, or ``start`` if the budget is too small. Never one token before the end of the prompt:
        megatron moves such a chunk's end.
    """
    if end - start <= budget:
        return end
    last = (start + budget) // quantum * quantum
    if end - last == 1:
        last -= quantum
    return max(last, start)
