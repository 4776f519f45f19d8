"""The components of a layer's state by its dimensions, and those of its ring, for each kind of the package. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_hybrid_prefix.pool.layout import RingLayout, SlotLayout, StateComponent, StateLayout

GDN_CONV, GDN_STATE = "gdn_conv", "gdn_state"
GDP_CONV, GDP_STATE = "gdp_conv", "gdp_state"
Ring = Callable[[tuple[StateComponent, ...], int, int, str], tuple[StateComponent, ...]]
"""A layer's ring by the components of its state, R, the most tokens of a row in a step, and the dtype of its inputs."""


def mamba2_components(
    conv_shape: Sequence[int], conv_dtype: str, ssm_shape: Sequence[int], ssm_dtype: str
) -> tuple[StateComponent, ...]:
    """Components of a Mamba2 layer whose states have these shapes and dtypes."""
    return (
        StateComponent(name="conv", shape=tuple(conv_shape), dtype=conv_dtype),
        StateComponent(name="ssm", shape=tuple(ssm_shape), dtype=ssm_dtype, accumulates=True),
    )


def gated_delta_net_components(
    *, channels: int, taps: int, heads: int, key_dim: int, value_dim: int, window_dtype: str, state_dtype: str | None
) -> tuple[StateComponent, ...]:
    """A window of (channels, taps), and a matrix (key_dim, value_dim) per value head.

    The matrices are float32 where ``state_dtype`` is None: a token's write is what the matrix lacks of its value, so each
    rounding of the matrix is read back at every later token. Published models of this kind keep them in float32.
    """
    return (
        StateComponent(name=GDN_CONV, shape=(channels, taps), dtype=window_dtype),
        StateComponent(
            name=GDN_STATE, shape=(heads, key_dim, value_dim), dtype=state_dtype or "float32", accumulates=True
        ),
    )


def gated_delta_product_components(
    *, pairs: int, groups: int, heads: int, key_dim: int, value_dim: int, **others: Any
) -> tuple[StateComponent, ...]:
    """As of a Gated DeltaNet, with matrices of (groups, heads of each, key_dim, value_dim).

    A token has ``pairs`` of a key for each group and a value for each head, and a query for each group.
    """
    others |= {"channels": pairs * heads * value_dim + (pairs + 1) * groups * key_dim, "key_dim": key_dim}
    conv, matrix = gated_delta_net_components(heads=heads, value_dim=value_dim, **others)
    matrices = (groups, heads // groups, key_dim, value_dim)
    return replace(conv, name=GDP_CONV), replace(matrix, name=GDP_STATE, shape=matrices)


def mamba2_ring(
    state: tuple[StateComponent, ...], tokens: int, step_tokens: int, dtype: str
) -> tuple[StateComponent, ...]:
    """Inputs of the convolution; and x and B behind it, and dt and its decay."""
    conv, ssm = state
    (channels, taps), (heads, headdim, _) = conv.shape, ssm.shape
    of_B = (channels - heads * headdim) // 2
    entries = ring_entries(tokens, step_tokens)
    return (
        StateComponent(name="conv_recent", shape=(taps - 1 + step_tokens, channels), dtype=conv.dtype),
        StateComponent(name="ssm_inputs", shape=(entries, heads * headdim + of_B), dtype=dtype),
        StateComponent(name="ssm_steps", shape=(entries, 2, heads), dtype="float32"),
    )


def gated_delta_net_ring(
    state: tuple[StateComponent, ...], tokens: int, step_tokens: int, dtype: str
) -> tuple[StateComponent, ...]:
    """Inputs of the convolution; and keys behind it, what is written along them, and the decays."""
    conv, matrix = state
    (channels, taps), (heads, key_dim, value_dim) = conv.shape, matrix.shape
    key_heads = (channels - heads * value_dim) // (2 * key_dim)
    entries = ring_entries(tokens, step_tokens)
    return (
        StateComponent(name="gdn_recent", shape=(taps - 1 + step_tokens, channels), dtype=conv.dtype),
        StateComponent(name="gdn_keys", shape=(entries, key_heads, key_dim), dtype=dtype),
        StateComponent(name="gdn_written", shape=(entries, heads, value_dim), dtype=matrix.dtype),
        StateComponent(name="gdn_decays", shape=(entries, heads), dtype="float32"),
    )


def gated_delta_product_ring(
    state: tuple[StateComponent, ...], tokens: int, step_tokens: int, dtype: str
) -> tuple[StateComponent, ...]:
    """As of a Gated DeltaNet, with all pairs of a token in an entry: (entries, pairs, ...)."""
    conv, matrix = state
    (channels, taps), (groups, _, key_dim, value_dim) = conv.shape, matrix.shape
    keys, heads = groups * key_dim, math.prod(matrix.shape[:2])
    entry = ring_entries(tokens, step_tokens), (channels - keys) // (heads * value_dim + keys)
    return (
        StateComponent(name="gdp_recent", shape=(taps - 1 + step_tokens, channels), dtype=conv.dtype),
        StateComponent(name="gdp_keys", shape=(*entry, groups, key_dim), dtype=dtype),
        StateComponent(name="gdp_written", shape=(*entry, heads, value_dim), dtype=matrix.dtype),
        StateComponent(name="gdp_decays", shape=(*entry, heads), dtype="float32"),
    )


def mamba2_open_ring(
    state: tuple[StateComponent, ...], tokens: int, step_tokens: int, dtype: str
) -> tuple[StateComponent, ...]:
    """Inputs of the convolution; and what the scan gets of a chunk's tokens: x and B, and dt as it comes."""
    recent, inputs, steps = mamba2_ring(state, tokens, step_tokens, dtype)
    return (
        recent,
        replace(inputs, shape=(tokens, *inputs.shape[1:])),
        StateComponent(name="ssm_dt", shape=(tokens, steps.shape[2]), dtype=dtype),
    )


def gated_delta_net_open_ring(
    state: tuple[StateComponent, ...], tokens: int, step_tokens: int, dtype: str
) -> tuple[StateComponent, ...]:
    """Inputs of the convolution; and what the scan gets of a chunk's tokens: keys, values, decays, and beta."""
    recent, *others = gated_delta_net_ring(state, tokens, step_tokens, dtype)
    keys, values, decays = (replace(each, shape=(tokens, *each.shape[1:])) for each in others)
    values, beta = replace(values, name="gdn_values", dtype=dtype), replace(decays, name="gdn_beta", dtype=dtype)
    return recent, keys, values, decays, beta


RINGS: Mapping[str, Ring] = {
    "mamba2": mamba2_ring,
    "gated_delta_net": gated_delta_net_ring,
    "gated_delta_product": gated_delta_product_ring,
}
OPEN_RINGS: Mapping[str, Ring] = {"mamba2": mamba2_open_ring, "gated_delta_net": gated_delta_net_open_ring}


def open_rings_of(
    slots: SlotLayout, rings: Mapping[str, Ring], chunk_tokens: Sequence[int], *, step_tokens: int, dtype: str
) -> RingLayout:
    """The rings of a model whose decodes have a prefill's bits, by the chunk of each kind; else as `rings_of`."""
    kinds = []
    for of, tokens in zip(slots.kinds, chunk_tokens, strict=True):
        kinds.append(replace(of, components=rings[of.kind](of.components, tokens, step_tokens, dtype)))
    return RingLayout(tokens=1, kinds=tuple(kinds), is_open=True)


def rings_of(
    slots: SlotLayout, rings: Mapping[str, Ring], *, block_tokens: int, step_tokens: int, dtype: str
) -> RingLayout:
    """The rings of a model, of which all layers are flushed together: at the multiples that suit the kind that needs most.

    Args:
        slots: Its states.
        rings: The ring of each kind.
        block_tokens: Tokens of a KV block.
        step_tokens: Most tokens of a row in a step: one, and its drafts.
        dtype: Name of the dtype of what recurrent layers get, the parameters'.
    """

    def bytes_of(layout: StateLayout, tokens: int) -> int:
        return sum(component.bytes for component in rings[layout.kind](layout.components, tokens, step_tokens, dtype))

    wanted = [block_tokens]
    for layout in slots.kinds:
        if entry_bytes := bytes_of(layout, 2) - bytes_of(layout, 1):
            state_bytes = sum(component.bytes for component in layout.components if component.accumulates)
            wanted.append(ring_tokens(state_bytes, entry_bytes, block_tokens))
    tokens = min(wanted)
    kinds = ((layout, rings[layout.kind](layout.components, tokens, step_tokens, dtype)) for layout in slots.kinds)
    return RingLayout(
        tokens=tokens,
        kinds=tuple(StateLayout(kind=of.kind, layers=of.layers, components=ring) for of, ring in kinds if ring),
    )


def ring_tokens(state_bytes: int, entry_bytes: int, block_tokens: int) -> int:
    """R: tokens between two writes of a state, a divisor of the block.

    A state is written once in R steps, and R / 2 entries are read in each: the bytes are fewest at sqrt(2 state / entry). The
    power of two next to that, from 8 to 64; fewer only where the block demands it.
    """
    best = (2 * state_bytes / entry_bytes) ** 0.5
    choices = [tokens for tokens in (8, 16, 32, 64) if block_tokens % tokens == 0]
    return min(choices, key=lambda tokens: abs(tokens - best)) if choices else block_tokens & -block_tokens


def ring_entries(tokens: int, step_tokens: int) -> int:
    """Entries of a ring that is flushed at multiples of ``tokens``: a step overwrites none that it, or the next, reads."""
    return tokens + 2 * step_tokens - 1
