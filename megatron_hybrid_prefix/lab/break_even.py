"""From how many tokens on loading a prefix from a shared folder is faster than computing it."""

from __future__ import annotations

GB = 10**9
LOAD_RATES = (1, 2, 4, 8, 16, 32)  # GB/s for one rank: a network, disks, the page cache


def break_even_tokens(kv_token_bytes: int, state_bytes: int, gb_per_s: float, tokens_per_s: float) -> int | None:
    """Fewest tokens of a prefix whose KV and state load in less time than they are computed; None: never.

    Args:
        kv_token_bytes: Bytes of the KV of a token on one rank.
        state_bytes: Bytes of a state on one rank.
        gb_per_s: What the rank reads, in 10^9 bytes per second.
        tokens_per_s: Prompt tokens that the ranks of a model compute per second.
    """
    gain_bytes = gb_per_s * GB / tokens_per_s - kv_token_bytes  # of a token
    return None if gain_bytes <= 0 else int(state_bytes / gain_bytes) + 1


def break_even(kv_token_bytes: int, state_bytes: int, tokens_per_s: float | None) -> dict[int, int | None]:
    """`break_even_tokens` by GB/s; empty if the speed of prefill is not known."""
    if tokens_per_s is None:
        return {}
    return {rate: break_even_tokens(kv_token_bytes, state_bytes, rate, tokens_per_s) for rate in LOAD_RATES}


def break_even_rows(found: dict[int, int | None]) -> list[tuple[str, str]]:
    """Rows of the report."""
    return [
        (f"loading from a shared folder at {rate} GB/s pays from", "never" if tokens is None else f"{tokens:,} tokens")
        for rate, tokens in found.items()
    ]
