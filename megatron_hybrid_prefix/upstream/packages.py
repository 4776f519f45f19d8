"""Which optional packages megatron found when its layers were imported. Importing this module imports the layers."""

from __future__ import annotations

from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.models.hybrid import hybrid_model  # imported here to silence its warnings, too
from megatron.core.ssm import mamba_mixer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import attention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


def has_mamba_ssm() -> bool:
    """Whether mamba-ssm is installed."""
    return bool(mamba_mixer.HAVE_MAMBA_SSM)


def has_mamba_parts() -> bool:
    """Whether mamba-ssm and causal-conv1d are installed and new enough; megatron checks this before each forward."""
    return (
        has_mamba_ssm()
        and mamba_mixer.causal_conv1d_fn is not None
        and bool(mamba_mixer._check_mamba_sequence_packing_support()[0])
    )


def attention_family() -> str | None:
    """The flash-attention that megatron's dynamic path calls, or None."""
    if attention.HAVE_FA4:
        return "FA4"
    if attention.HAVE_FA3:
        return "FA3"
    return None if attention.flash_attn_varlen_func is None else "flash-attention 2"
