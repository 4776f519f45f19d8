"""`HybridPrefixConfig`: what a user chooses about the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPrefixConfig:
    """Settings of the prefix cache, validated once.

    Attributes:
        mamba_gb: Memory for checkpoints of the recurrent state on each rank, in GiB; all of it holds checkpoints.
    """

    mamba_gb: float

    def __post_init__(self) -> None:
        if not self.mamba_gb >= 0:
            raise ValueError(f"mamba_gb={self.mamba_gb}: must be 0 or more")
