"""Where a model's sums come with the next norm, and where both are computed apart as ever: what a user puts between them is honoured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.models import build_hybrid_model, get_preset, norms
from tests.harness.named_models import named

TOKENS = torch.arange(1, 20)[None]


@pytest.fixture
def sums(platform, monkeypatch):
    """As where the kernel runs, with its PyTorch version; an entry for each sum, and for each norm that was there already."""
    found, add, norm = [], norms.norm_of_sum, norms.NormOfSum.forward
    monkeypatch.setattr(norms, "norm_of_sum", lambda *args: found.append("sum") or add(*args))
    monkeypatch.setattr(norms, "can_fuse", lambda x, weight: True)

    def forward(self, x):
        there, out = getattr(x, norms._NORMED, (None, None))[1], norm(self, x)
        return found.append("norm") or out if out is there else out

    monkeypatch.setattr(norms.NormOfSum, "forward", forward)
    return found


def built(config: Any) -> Any:
    """As on a GPU."""
    model = build_hybrid_model(config)
    norms.fuse_sums_and_norms(model, model.hybrid_config.residual_multiplier)
    return model


@torch.inference_mode()
def logits(model: Any, fuses: bool = True) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "can_fuse", lambda x, weight: fuses)
        return model(TOKENS, TOKENS, None, runtime_gather_output=True)


def test_norms_behind_layers_are_not_left_out(sums):
    """A sum that comes with the next norm has none of its own before it."""
    model = built(named("tiny-olmo-hybrid"))
    torch.testing.assert_close(logits(model), logits(model, fuses=False))
    assert sums == ["sum", "norm"] * 5  # of six layers before those with norms behind them, all but the last


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-granite-dense", "float32 norms"])
def test_each_sum_comes_with_the_next_norm(name, sums):
    model = built(get_preset("tiny", float32_norms=True) if name == "float32 norms" else named(name))
    apart = logits(model, fuses=False)
    assert not sums
    torch.testing.assert_close(logits(model), apart)
    assert sums == ["sum", "norm"] * len(model.decoder.layers)
    for norm in (module for module in model.modules() if isinstance(module, norms.NormOfSum)):
        norm.weight.data.mul_(1.5)
    torch.testing.assert_close(logits(model), logits(model, fuses=False), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(logits(model), apart, rtol=1e-2, atol=1e-3)
    sums.clear()
    torch.testing.assert_close(model(TOKENS, TOKENS, None, runtime_gather_output=True), logits(model, fuses=False))
    assert not sums, "gradients may be asked for"


class LouderNorm(norms.NormOfSum):
    def forward(self, x):
        return super().forward(x.mul_(1.5))


def before(module: Any, args: Any, named: Any) -> None:
    (named.get("hidden_states") if named else args[0]).mul_(1.5)


BETWEEN = {  # all of them change a sum in place
    "a hook of the layer": lambda layer, _: layer.register_forward_hook(lambda m, args, found: found.mul_(1.5)),
    "a hook of the next": lambda _, after: after.register_forward_pre_hook(before, with_kwargs=True),
    "a hook of the norm": lambda _, after: after.input_layernorm.register_forward_pre_hook(before, with_kwargs=True),
    "a forward": lambda layer, _: setattr(layer, "forward", lambda f=layer.forward, **named: f(**named).mul_(1.5)),
    "a class": lambda _, after: setattr(after.input_layernorm, "__class__", LouderNorm),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_is_put_between_is_honoured(name, sums):
    model = built("tiny")
    model.decoder.layers[1].input_layernorm.weight.data.add_(0.5)
    plain = logits(model)
    BETWEEN[name](*model.decoder.layers[:2])
    sums.clear()
    found = logits(model)
    assert 0 < sums.count("norm") < len(model.decoder.layers)
    torch.testing.assert_close(found, logits(model, fuses=False))
    assert not torch.allclose(found, plain)


def test_a_graph_of_one_layer_has_no_norm_of_the_next(sums, monkeypatch):
    model = built("tiny")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    logits(model)
    assert sums.count("sum") == len(model.decoder.layers), "in a graph of the whole forward"
    for layer in model.decoder.layers:
        layer.cudagraph_manager = None
    logits(model)
    assert sums.count("sum") == len(model.decoder.layers)
