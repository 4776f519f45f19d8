"""The Gated Delta Product layer of megatron's main, which other versions lack."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_hybrid_prefix.upstream.capabilities import form_of

IS_THERE = form_of("Gated Delta Product") == "yes"

if IS_THERE:
    from megatron.core.ssm.gated_delta_product import GatedDeltaProductMixer, GatedDeltaProductMixerSubmodules
else:

    class GatedDeltaProductMixer(torch.nn.Module):  # type: ignore[no-redef]
        """In place of megatron's: no model has one."""


def mixer_spec(in_proj: Any, out_proj: Any, pairs: int) -> ModuleSpec:
    """The layer with these linear layers; megatron takes ``pairs`` from the model's config. ValueError: it has no such layer."""
    if not IS_THERE:
        raise ValueError(f"gdp_num_householder={pairs}: only Megatron-LM's main has Gated Delta Product layers")
    submodules = GatedDeltaProductMixerSubmodules(in_proj=in_proj, out_proj=out_proj)
    return ModuleSpec(module=GatedDeltaProductMixer, submodules=submodules)
