"""The name of shared entries: whatever changes a state changes it, and nothing else does."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.mcore.state.fingerprint import Fingerprint


class Mask(enum.Enum):
    CAUSAL, NONE = 1, 2


@dataclasses.dataclass
class Config:
    """As Megatron's: modules read it at each forward."""

    activation: Callable[..., Any] = torch.nn.functional.silu
    rotary_interleaved: bool = False
    window: tuple[int, int] | None = None
    scaling_factor: float | None = None
    dtype: torch.dtype = torch.float32
    unknown: object = dataclasses.field(default_factory=object)  # its repr has an address


class Layer(torch.nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.mask, self.norm_before_gate, self.scale = config, Mask.CAUSAL, True, 0.5
        self.linear = torch.nn.Linear(3, 3)
        torch.nn.init.ones_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)
        self.register_buffer("bias_of_experts", torch.zeros(3))


def name(change: Callable[[Layer], object] = lambda layer: None, **config: Any) -> bytes:
    layer = Layer(Config(**config))
    change(layer)
    return Fingerprint(layer, "layout")()


def test_equal_models_have_one_name():
    assert name() == name() == name(lambda layer: layer.eval())


@pytest.mark.parametrize(
    "config",
    [
        {"activation": torch.nn.functional.gelu},
        {"activation": functools.partial(torch.nn.functional.gelu, approximate="tanh")},
        {"rotary_interleaved": True},
        {"window": (128, 0)},
        {"scaling_factor": 2.5},
        {"dtype": torch.bfloat16},
    ],
    ids=lambda config: next(iter(config)),
)
def test_another_config_has_another_name(config):
    assert name(**config) != name()


def test_partial_functions_differ_by_their_arguments():
    def gelu(approximate: str) -> Any:
        return functools.partial(torch.nn.functional.gelu, approximate=approximate)

    assert name(activation=gelu("none")) != name(activation=gelu("tanh"))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "mask", Mask.NONE),
        lambda layer: setattr(layer, "norm_before_gate", False),
        lambda layer: setattr(layer, "scale", 1.0),
        lambda layer: layer.bias_of_experts.fill_(1),
        lambda layer: layer.linear.weight.data[0].neg_(),
        lambda layer: layer.to(torch.float64),
    ],
    ids=["enum", "flag", "number", "buffer", "weight", "dtype"],
)
def test_another_module_has_another_name(change):
    assert name(change) != name()
