"""Gated Delta Product layers: what megatron's main trains is what the engine runs. Other versions have a stand-in with its parameters."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.harness.delta_product import HAS_MEGATRONS
from tests.harness.lifecycle_helpers import EngineHarness, tokens
from tests.harness.naive_model import NaiveHybridModel
from tests.harness.named_models import named

of_main = pytest.mark.skipif(not HAS_MEGATRONS, reason="this megatron-core has no Gated Delta Product layers")


@of_main
@pytest.mark.parametrize("with_slots", [False, True], ids=["megatrons_class", "slot_class"])
def test_the_reference_is_what_megatron_trains(platform, with_slots):
    """Megatron's own forward, with PyTorch in place of flash-linear-attention; and its gradients are finite."""
    model = build_hybrid_model(named("tiny-gdp"), seed=0, platform=platform)
    if with_slots:
        build_engine(model)
    layer = model.decoder.layers[0].mixer
    hidden = torch.randn(150, 1, 64, generator=torch.Generator().manual_seed(0))
    theirs, bias = layer(hidden.requires_grad_())
    reference = NaiveHybridModel(model, model.hybrid_config)
    expected = reference._delta_product(hidden[:, 0].detach().double(), "decoder.layers.0.mixer.", None, None)
    assert bias is None
    assert (theirs[:, 0] - expected).abs().max() <= 1e-5 * expected.abs().max()
    theirs.sum().backward()
    assert hidden.grad.isfinite().all() and hidden.grad[-1].any()


@pytest.mark.parametrize("pairs", [1, 2, 3, 4])
def test_answers(platform, pairs):
    """Of each number of pairs: a long answer, and turns that resume from it, in bfloat16's parameters' own float32 states, too."""
    model = build_hybrid_model(named("tiny-gdp", gdp_num_householder=pairs), seed=0, platform=platform)
    served = EngineHarness(model)
    first = served.send(tokens(3, 9, seed=1), count=70)
    turn = served.send([*first.prompt_tokens.tolist(), *first.generated_tokens, 5], count=5)
    assert turn.num_cached_tokens == 256
    served.check()
