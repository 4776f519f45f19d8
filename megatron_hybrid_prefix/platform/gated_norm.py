"""`GatedRMSNorm`: the norm of megatron's Mamba mixer if mamba-ssm is not installed or cannot run."""

from __future__ import annotations

from typing import Any

import torch

from megatron_hybrid_prefix.ops.gated_norm import gated_rms_norm


class GatedRMSNorm(torch.nn.Module):
    """RMS norm over groups of features, with a SiLU gate; has the parameters and names of mamba-ssm's ``RMSNorm``.

    Args:
        hidden_size: Features on this rank.
        eps: Added to the mean square.
        group_size: Features that share a root mean square; None: all.
        norm_before_gate: ``norm(x) * silu(z)``; else ``norm(x * silu(z))``.
        device: Device of the weight.
        dtype: Dtype of the weight.

    Attributes:
        weight: (hidden_size,), initially ones.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.group_size = hidden_size if group_size is None else group_size
        self.norm_before_gate = norm_before_gate

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise.

        Args:
            x: (..., hidden_size).
            z: The gate, shape of x, or None.

        Returns:
            Shape and dtype of x.
        """
        return gated_rms_norm(x, self.weight, z, self.eps, self.group_size, self.norm_before_gate)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For megatron's distributed checkpoints: tensor-parallel ranks shard the weight."""
        from megatron.core import parallel_state

        from megatron_hybrid_prefix.upstream.packages import make_sharded_tensors_for_checkpoint

        group = getattr(self, "tp_group", None)  # the mixer sets it
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group() if group is None else group,
            dp_cp_group=None if metadata is None else metadata["dp_cp_group"],
        )
