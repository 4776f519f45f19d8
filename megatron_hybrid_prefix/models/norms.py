"""`Float32RMSNorm`: an RMS norm whose weight is float32 whatever its input is (`HybridModelConfig.float32_norms`)."""

from __future__ import annotations

import torch

from megatron_hybrid_prefix.ops.gated_norm import gated_rms_norm


class Float32RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` in one kernel on a GPU, without gradients. PyTorch has one for equal types only, and runs eight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and not torch.is_grad_enabled() and x.dtype != self.weight.dtype and self.eps is not None:
            return gated_rms_norm(x, self.weight, None, self.eps, x.shape[-1], True)
        return super().forward(x)
