"""`HybridPrefixConfig`: what a user chooses about the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

EvictionPolicyName = Literal["lru", "replay_cost"]
StateDtypeName = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPrefixConfig:
    """Settings of the prefix cache, validated once.

    Attributes:
        mamba_gb: Memory for checkpoints of the recurrent state on each rank, in GiB; all of it holds checkpoints. 0, or
            less than one checkpoint, keeps none. (Where megatron offloads while suspended, as much pinned host memory.)
        eviction_policy: Which checkpoint goes when a slot is needed: "replay_cost", the one whose loss is expected to cost the
            least, by the distance to the nearest other one and by how often such states are used again; or "lru", the
            least recently used.
        verify_hits: Share of the hits, 0 to 1, that are computed as if nothing were cached, and then compared with what is;
            differences are logged and counted. Costs what those hits would have saved.
        state_dtype: Type of the SSM states, live and kept: "float32" or "bfloat16"; None: the parameters'. (Windows of the
            convolution are inputs of the layer, and stay in the parameters' type.)
        retention_interval_tokens: Of each prompt the state after every so many tokens is kept, too, where there is room for
            it, so that a prefix can be resumed from the second time it is seen: a multiple of the block size; 0: none;
            None: chosen by the prompt's length, 16 states at most.
        decode_checkpoints: Whether the blocks and states that a request reaches while it generates are kept, so that the next
            turn does not compute the answer again.
        coalesce_prefixes: Whether a request waits for a prefix that another one is computing, rather than computing it too.
        host_gb: Pinned host memory on each rank, in GiB, for KV blocks and states that the device has no more room for; they
            come back when a prompt needs them. Taken and pinned at the start, with up to 0.6 GiB on the device for staging.
            0: none.
        host_state_share: Part of it that states may take, 0 to 1, the rest is for KV blocks; None: by use.
        host_write_through: Whether prompts go to the host as soon as they are computed, not only when they are evicted.
        verify_host_loads: Whether every byte that comes back is checked, on the device.
        check_ranks: Before each forward, compare what the cache decided on all tensor- and pipeline-parallel ranks, and
            stop with the first difference. For tests and for hunting a bug: it waits for all ranks.
    """

    mamba_gb: float
    eviction_policy: EvictionPolicyName = "replay_cost"
    verify_hits: float = 0.0
    state_dtype: StateDtypeName | None = None
    retention_interval_tokens: int | None = None
    decode_checkpoints: bool = True
    coalesce_prefixes: bool = True
    host_gb: float = 0.0
    host_state_share: float | None = None
    host_write_through: bool = False
    verify_host_loads: bool = True
    check_ranks: bool = False

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
        _check_choice("eviction_policy", self.eviction_policy, get_args(EvictionPolicyName))
        if self.state_dtype is not None:
            _check_choice("state_dtype", self.state_dtype, get_args(StateDtypeName))


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be {' or '.join(map(repr, choices))}")
