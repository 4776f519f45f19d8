"""The fast reference against the slow one."""

from __future__ import annotations

import pytest
import torch

from tests.harness.engine_helpers import random_tokens
from tests.harness.quadratic_model import QuadraticHybridModel


@pytest.mark.parametrize("length", [1, 3, 77, 300])
def test_is_the_naive_model(tiny, tiny_reference, length):
    tokens = random_tokens(length, seed=length)
    torch.testing.assert_close(
        QuadraticHybridModel(tiny, tiny.hybrid_config).log_probs(tokens),
        tiny_reference.log_probs(tokens),
        rtol=0,
        atol=1e-10,
    )
