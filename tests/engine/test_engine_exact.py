"""With caching off the engine's answers equal the model's: compared with a float64 token-by-token recompute."""

from __future__ import annotations

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from tests.harness.engine_helpers import random_tokens
from tests.harness.lifecycle_helpers import MODES, EngineHarness


@pytest.mark.parametrize("mode", MODES)
def test_prompts_that_arrive_while_others_decode(model, mode):
    served = EngineHarness(model, slots=None, async_sched_mode=mode)
    for number, length in enumerate((257, 1, 128, 3, 600, 2, 256, 127, 129, 255)):
        served.add(random_tokens(length, seed=100 + number), 5 + 3 * (number % 4))
        if number % 2:  # two at a time: a batch of prefills beside running decodes
            served.step(2)
    served.run()
    assert len(served.finished) == 10
    served.check()


@pytest.mark.parametrize(
    "changes", [{"d_conv": 2}, {"d_conv": 3, "chunk_size": 64}, {"activation": "relu2", "num_query_groups": 2}]
)
def test_other_dimensions(platform, changes):
    served = EngineHarness(build_hybrid_model(get_preset("tiny", **changes), seed=3, platform=platform), slots=None)
    served.send(*(random_tokens(length, seed=length) for length in (2, 200, 300)))
    served.check()


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_a_prompt_is_computed_in_one_step_and_in_chunks(tiny):
    """Not token by token, which would take several operators per token and recurrent layer."""
    served, counts = EngineHarness(tiny, slots=None, block_size_tokens=256), {}
    for length in (1, 600):
        number = served.add(random_tokens(length, seed=length), 1)
        with Operators() as operators:
            (record,) = served.engine.step_modern()["finished_request_records"]
        assert record.request_id == number
        counts[length] = operators.count
    assert counts[600] - counts[1] < 600 * tiny.hybrid_config.layer_pattern.count("M")
