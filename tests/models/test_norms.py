"""Where a layer's sum and the next layer's norm are computed together, and where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.models import build_hybrid_model, norms
from tests.harness.engine_helpers import random_tokens
from tests.harness.lifecycle_helpers import EngineHarness
from tests.harness.named_models import named


@pytest.fixture(params=["tiny", "tiny-gdn", "tiny-granite-dense"])
def fused(request: pytest.FixtureRequest, platform: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """A model as on a GPU, and how many sums were computed with their norms."""
    model, calls = build_hybrid_model(named(request.param), seed=0), [0]
    norms.fuse_sums_and_norms(model, model.hybrid_config.residual_multiplier)
    together = norms.norm_of_sum

    def counted(*args: Any) -> torch.Tensor:
        calls[0] += 1
        return together(*args)

    monkeypatch.setattr(norms, "norm_of_sum", counted)
    monkeypatch.setattr(norms, "can_fuse", lambda x, weight: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return model, calls


def test_answers_are_the_models(fused):
    model, calls = fused
    served = EngineHarness(model)
    with torch.inference_mode():
        served.send(random_tokens(140, 1), random_tokens(60, 2))
    assert calls[0] % len(model.decoder.layers) == 0 < calls[0]
    served.check()


@pytest.mark.parametrize("who", ["a norm", "a layer"])
def test_others_are_honoured(fused, who):
    """Hooks see the sum, and what they make of it is what is normalised."""
    model, calls = fused
    layer, after = model.decoder.layers[:2]
    seen: list[Any] = []
    if who == "a norm":
        norm = next(part for part in after.modules() if isinstance(part, norms.NormOfSum))
        norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    elif who == "a layer":
        layer.register_forward_hook(lambda *args: seen.append(args))
    served, all_layers = EngineHarness(model), len(model.decoder.layers)
    with torch.inference_mode():
        served.send(random_tokens(60, 1), count=1)
    assert seen and calls[0] == all_layers - 1
    served.check()


def test_gradients_flow(fused):
    model, calls = fused
    layer = model.decoder.layers[0]
    add = next(value for value in vars(layer).values() if isinstance(value, norms.SumAndNorm))(False, False)
    x, residual = torch.ones(2, 3, requires_grad=True), torch.zeros(2, 3)
    add((x, None), residual, 0.0).sum().backward()
    assert x.grad is not None and not calls[0]
