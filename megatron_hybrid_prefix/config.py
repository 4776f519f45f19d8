"""`HybridPrefixConfig`: what a user chooses about the prefix cache."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from megatron_hybrid_prefix.policy.registry import (
    DEFAULT_EVICTION_POLICY,
    check_eviction_policy,
    eviction_policy_names,
    present_eviction_policy,
)
from megatron_hybrid_prefix.tiers.registry import tier_name

StateDtypeName = Literal["float32", "bfloat16"]


def _help(text: str, **more: Any) -> dict[str, Any]:
    """Metadata of a field: what it means, for the class's docstring and for ``--help``; and more for ``--help``."""
    return {"help": text, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPrefixConfig:
    """Settings of the prefix cache, validated once."""

    mamba_gb: float = field(
        metadata=_help(
            "Memory for checkpoints of the recurrent state on each rank, in GiB; all of it holds checkpoints. 0, or less "
            "than one checkpoint, keeps none. (Where megatron offloads while suspended, as much pinned host memory.)"
        )
    )
    eviction_policy: str = field(
        default=DEFAULT_EVICTION_POLICY,
        metadata=_help(
            "Which checkpoint goes when a slot is needed: 'recompute_cost', the one whose loss is expected to cost the "
            "least, by the distance to the nearest other one and by how often such states are used again; 'lru', the "
            "least recently used; or a rule that a plugin registers.",
            choices=eviction_policy_names,
            type=present_eviction_policy,
        ),
    )
    verify_hits: float = field(
        default=0.0,
        metadata=_help(
            "Share of the hits, 0 to 1, that are computed as if nothing were cached, and then compared with what is; "
            "differences are logged and counted. Costs what those hits would have saved."
        ),
    )
    state_dtype: StateDtypeName | None = field(
        default=None,
        metadata=_help(
            "Type of the SSM states, live and kept: 'float32' or 'bfloat16'; None: the parameters'. (Windows of the "
            "convolution are inputs of the layer, and stay in the parameters' type.)"
        ),
    )
    retention_interval_tokens: int | None = field(
        default=None,
        metadata=_help(
            "Also checkpoint every N prompt tokens while slots are free, so that a prefix can be resumed from the second "
            "time it is seen. A multiple of the block size; 0 disables; None chooses N (at most 16 per prompt)."
        ),
    )
    decode_checkpoints: bool = field(
        default=True,
        metadata=_help(
            "Whether the blocks and states that a request reaches while it generates are kept, so that the next turn does "
            "not compute the answer again."
        ),
    )
    coalesce_prefixes: bool = field(
        default=True,
        metadata=_help(
            "Whether a request waits for a prefix that another one is computing, rather than computing it too."
        ),
    )
    host_gb: float = field(
        default=0.0,
        metadata=_help(
            "Pinned host memory on each rank, in GiB, for KV blocks and states that the device has no more room for; they "
            "come back when a prompt needs them. Taken and pinned at the start, with up to 0.6 GiB on the device for "
            "staging. 0: none."
        ),
    )
    host_state_share: float | None = field(
        default=None,
        metadata=_help("Part of it that states may take, 0 to 1, the rest is for KV blocks; None: by use."),
    )
    host_write_through: bool = field(
        default=False,
        metadata=_help("Whether prompts go to the host as soon as they are computed, not only when they are evicted."),
    )
    tier_behind_host: str | None = field(
        default=None,
        metadata=_help(
            "A tier behind the host memory, as NAME or NAME:ARGUMENT, which a plugin registers: what the host evicts is "
            "offered to it, and comes back through the host when a prompt needs it. Needs host_gb. None: none."
        ),
    )
    verify_host_loads: bool = field(
        default=True, metadata=_help("Whether every byte that comes back is checked, on the device.")
    )
    check_ranks: bool = field(
        default=False,
        metadata=_help(
            "Before each forward, compare what the cache decided on all tensor- and pipeline-parallel ranks, and stop with "
            "the first difference. For tests and for hunting a bug: it waits for all ranks."
        ),
    )

    def __post_init__(self) -> None:
        for name in ("mamba_gb", "host_gb"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value}: must be 0 or more")
        if self.host_state_share is not None and not 0 <= self.host_state_share <= 1:
            raise ValueError(f"host_state_share={self.host_state_share}: must be from 0 to 1, or None")
        if not 0 <= self.verify_hits <= 1:
            raise ValueError(f"verify_hits={self.verify_hits}: must be from 0 to 1")
        interval = self.retention_interval_tokens
        if interval is not None and interval < 0:
            raise ValueError(f"retention_interval_tokens={interval}: must be 0 or more, or None")
        object.__setattr__(self, "eviction_policy", present_eviction_policy(self.eviction_policy))
        check_eviction_policy(self.eviction_policy)
        if self.tier_behind_host is not None:
            tier_name(self.tier_behind_host)
            if not self.host_gb:
                raise ValueError(f"tier_behind_host={self.tier_behind_host!r}: needs host_gb")
        dtypes = get_args(StateDtypeName)
        if self.state_dtype is not None and self.state_dtype not in dtypes:
            raise ValueError(f"state_dtype={self.state_dtype!r}: must be {' or '.join(map(repr, dtypes))}")


def _attributes() -> str:
    """The fields' help as the part of a docstring."""
    wrap = textwrap.TextWrapper(width=110, initial_indent=" " * 8, subsequent_indent=" " * 12).fill
    return "\n".join(wrap(f"{item.name}: {item.metadata['help']}") for item in fields(HybridPrefixConfig))


if HybridPrefixConfig.__doc__ is not None:  # None under python -OO
    HybridPrefixConfig.__doc__ += f"\n\n    Attributes:\n{_attributes()}\n    "
