"""`HybridPrefixConfig`: the settings of the prefix cache."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from megatron_hybrid_prefix.policy.registry import (
    DEFAULT_EVICTION_POLICY,
    check_eviction_policy,
    eviction_policy_names,
)
from megatron_hybrid_prefix.tiers.registry import parse_url

StateDtypeName = Literal["float32", "bfloat16"]
CheckpointDtypeName = Literal["bfloat16", "int8"]
ExactName = Literal["bits"]


def _setting(default: Any, text: str, **more: Any) -> Any:
    """A field, with its help text, for the class's docstring and for ``--help``, and argparse options."""
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPrefixConfig:
    """Settings of the prefix cache, validated once. All sizes are per rank."""

    cache_gb: float | None = _setting(
        None,
        "GPU memory for KV blocks, checkpoints and the states of running requests together, in GiB per rank. What is "
        "worth least per byte is evicted, KV or states. Replaces megatron's buffer_size_gb. None: buffer_size_gb, plus "
        "mamba_gb. If megatron offloads its buffers on suspend, it pins as much host memory.",
    )
    mamba_gb: float | None = _setting(
        None,
        "Most bytes of checkpoints, in GiB per rank. A cap, no reservation: KV may take what checkpoints leave. 0, or less "
        "than one checkpoint, disables reuse. None: no cap.",
    )
    eviction_policy: str = _setting(
        DEFAULT_EVICTION_POLICY,
        "Which checkpoint to evict when a slot is needed. 'recompute_cost': the one that is cheapest to lose, by "
        "the tokens it saves and by how often such states are reused. 'lru': the least recently used one. Plugins may add "
        "others.",
        choices=eviction_policy_names,
    )
    verify_hits: float = _setting(
        0.0,
        "Share of the hits, 0 to 1, to compute without the cache and compare with it. Mismatches are logged and "
        "counted. A verified hit saves no time. Use it to test a new model or machine.",
    )
    state_dtype: StateDtypeName | None = _setting(  # noqa: RUF009  (a field)
        None,
        "Dtype of the matrix states, live and cached: 'float32' or 'bfloat16'. None: the dtype of the parameters for "
        "Mamba2, 'float32' for Gated DeltaNet. 'float32' is more precise and takes more memory. Convolution states "
        "always have the dtype of the parameters.",
    )
    checkpoint_dtype: CheckpointDtypeName | None = _setting(  # noqa: RUF009  (a field)
        None,
        "Dtype in which checkpoints keep matrix states, on all tiers: 'int8' (with scales, a little more than a quarter of float32) or "
        "'bfloat16'. More of them fit, and log-probs after a hit differ by about 0.001; see docs/states.md. None: that of "
        "live states.",
    )
    exact: ExactName | None = _setting(  # noqa: RUF009  (a field)
        None,
        "'bits': tokens and log-probs of a request have the same bits on a hit and on a miss, alone and in any batch, "
        "however its prompt is cut into chunks, and after a preemption. Slower; see docs/bit-for-bit.md. "
        "None: they are the same up to rounding.",
    )
    retention_interval_tokens: int | None = _setting(
        None,
        "Also checkpoint every N prompt tokens while slots are free, so that the second request with a prefix can "
        "already reuse it. A multiple of the block size; 0 disables; None: 16 evenly spaced ones, and some near the end.",
    )
    decode_checkpoints: bool = _setting(
        True,
        "Cache generated tokens, too, so that the next turn of a chat does not recompute the answer. Turn it off "
        "if answers never come back in a prompt.",
    )
    keep_on_resume: bool = _setting(
        False,
        "Keep what is cached when a suspended engine resumes, if the weights are as before. By default it is dropped, because "
        "trainers change the weights meanwhile. Turn it on where they rarely change.",
    )
    check_weights: bool = _setting(
        True,
        "Notice changed weights that nobody announced, by samples of each tensor, when a suspended or paused engine goes on "
        "and when a request comes to an idle one. Turn it off only where engine.invalidate() or a new generation epoch "
        "announces every change.",
    )
    prompt_log_probs_gb: float = _setting(
        0.25,
        "Most host memory for log-probs of cached prompts, in GiB per rank. Requests that want the log-probs of their "
        "prompt fill it, and skip only tokens whose log-probs are there. Not allocated before. 0: these requests are "
        "always computed whole.",
    )
    host_gb: float = _setting(
        0.0,
        "Pinned host memory for evicted KV blocks and states, in GiB per rank. They load back when a prompt needs "
        "them. Allocated at start, with 0.75 GiB of GPU memory for staging (0.63 GiB and two states, if that is "
        "more). 0: no host tier.",
    )
    shared: str | None = _setting(
        None,
        "Tier behind the host tier that outlives the process, and that others may use: a folder, a Mooncake Store, or "
        "the scheme of a plugin: 'file:///var/cache/prefix?gb=200', 'mooncake://10.0.0.1:50051'. A restarted process, or "
        "another replica with the same weights, reuses what is there. Needs host_gb, and a secret: "
        "HYBRID_PREFIX_SECRET, or secret_file in the URL. None: no such tier.",
    )
    check_ranks: bool = _setting(
        False,
        "Before each forward, compare the cache's decisions on all tensor- and pipeline-parallel ranks, and stop "
        "at the first difference. Slow, because every step waits for all ranks. For tests and debugging.",
    )

    def __post_init__(self) -> None:
        if self.cache_gb is not None and not 0 < self.cache_gb < float("inf"):
            raise ValueError(f"cache_gb={self.cache_gb}: must be above 0")
        for name in ("mamba_gb", "host_gb", "prompt_log_probs_gb"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value}: must be 0 or more")
        if self.cache_gb is not None and self.mamba_gb is not None and self.mamba_gb > self.cache_gb:
            raise ValueError(
                f"mamba_gb={self.mamba_gb} is a cap within cache_gb={self.cache_gb}, and larger: lower mamba_gb, or leave it out"
            )
        if not 0 <= self.verify_hits <= 1:
            raise ValueError(f"verify_hits={self.verify_hits}: must be from 0 to 1")
        interval = self.retention_interval_tokens
        if interval is not None and interval < 0:
            raise ValueError(f"retention_interval_tokens={interval}: must be 0 or more, or None")
        check_eviction_policy(self.eviction_policy)
        if self.shared is not None:
            parse_url(self.shared)
            if not self.host_gb:
                raise ValueError(f"shared={self.shared!r}: needs a host tier; set host_gb above 0")
        if self.exact is not None and self.exact not in get_args(ExactName):
            raise ValueError(f"exact={self.exact!r}: must be {' or '.join(map(repr, get_args(ExactName)))}, or None")
        if self.exact is not None and self.state_dtype not in (None, "float32"):
            raise ValueError(f"exact={self.exact!r} needs state_dtype='float32', not {self.state_dtype!r}")
        if self.checkpoint_dtype is not None and self.checkpoint_dtype not in get_args(CheckpointDtypeName):
            names = " or ".join(map(repr, get_args(CheckpointDtypeName)))
            raise ValueError(f"checkpoint_dtype={self.checkpoint_dtype!r}: must be {names}, or None")
        if self.exact is not None and self.checkpoint_dtype is not None:
            raise ValueError(f"exact={self.exact!r} keeps states as they are: it needs checkpoint_dtype=None")
        dtypes = get_args(StateDtypeName)
        if self.state_dtype is not None and self.state_dtype not in dtypes:
            raise ValueError(f"state_dtype={self.state_dtype!r}: must be {' or '.join(map(repr, dtypes))}")

    @property
    def states_are(self) -> StateDtypeName | None:
        """``state_dtype``; float32 where bits have to be equal, as a state is rounded where it is kept."""
        return "float32" if self.exact else self.state_dtype


def _attributes() -> str:
    """The "Attributes" section of the class's docstring, made from the fields' help texts."""
    wrap = textwrap.TextWrapper(width=110, initial_indent=" " * 8, subsequent_indent=" " * 12).fill
    return "\n".join(wrap(f"{item.name}: {item.metadata['help']}") for item in fields(HybridPrefixConfig))


if HybridPrefixConfig.__doc__ is not None:  # None under python -OO
    HybridPrefixConfig.__doc__ += f"\n\n    Attributes:\n{_attributes()}\n    "
