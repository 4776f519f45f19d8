"""The components of a layer's state by its dimensions, for each kind of the package. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hybrid_prefix.pool.layout import StateComponent

GDN_CONV, GDN_STATE = "gdn_conv", "gdn_state"


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
