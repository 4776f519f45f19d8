"""Multipliers of embeddings, scores, residuals and logits. test_prefix_exact.py compares answers with float64, test_bits.py bits."""

from __future__ import annotations

import logging

import pytest
import torch

from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from megatron_hybrid_prefix.models.build import local_layer_specs
from megatron_hybrid_prefix.models.multipliers import multiplier_fields, scale_residuals
from tests.harness.named_models import named


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ("mamba_layer", "mamba_bda"),
        *((layer, "self_attn_bda") for layer in ("gdn_layer", "attention_layer")),
        *((layer, "mlp_bda") for layer in ("mlp_layer", "moe_layer")),
    ],
)
def test_a_residual_is_added_alike_everywhere_in_a_tensor(layer, name):
    """``torch.add(alpha=)`` rounds values in another way at the end of a tensor: exact="bits" would differ by the batch."""
    generator = torch.Generator().manual_seed(1)
    x, residual, bias = (torch.randn(1021, generator=generator).bfloat16() for _ in range(3))
    submodules = getattr(scale_residuals(local_layer_specs(), 0.22).submodules, layer).submodules
    add = getattr(submodules, name)(training=False, fused=False)
    whole = add((x, None), residual, 0.0)
    parts = [add((x[at : at + 1], None), residual[at : at + 1], 0.0) for at in range(len(x))]
    assert torch.equal(whole, torch.cat(parts))
    torch.testing.assert_close(whole, residual + 0.22 * x)
    torch.testing.assert_close(add((x, bias), residual, 0.0), residual + 0.22 * (x + bias))


def test_scores_keep_their_scale_where_only_embeddings_are_multiplied():
    """Megatron's MuP would divide them by the channels of a head."""
    assert multiplier_fields(get_preset("tiny", embedding_multiplier=2.0))["softmax_scale"] == 16**-0.5
    assert multiplier_fields(get_preset("tiny")) == {}


def test_a_model_with_multipliers_is_built_without_a_warning(platform, caplog):
    """Megatron multiplies as part of its MuP, of whose training it warns."""
    with caplog.at_level(logging.WARNING):
        build_hybrid_model(named("tiny-granite-dense"), platform=platform)
    assert caplog.records == []
