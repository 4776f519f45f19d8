"""With caching off the engine's answers equal the model's: compared with a float64 token-by-token recompute."""

from __future__ import annotations

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.models import HybridModelConfig, build_hybrid_model, get_preset
from tests.harness.engine_helpers import assert_matches, greedy, random_tokens, run_to_end
from tests.harness.naive_model import NaiveHybridModel

LENGTHS = (1, 2, 3, 127, 128, 129, 255, 256, 257, 600)


@pytest.fixture(scope="module")
def reference(tiny):
    return NaiveHybridModel(tiny, get_preset("tiny"))


@pytest.mark.parametrize("mode", ["legacy", "async"])
def test_each_prompt_length_alone(tiny, reference, mode):
    engine = build_engine(tiny, max_sequence_length=1024, async_sched_mode=mode)
    for number, length in enumerate(LENGTHS):
        finished: dict = {}
        engine.add_request(number, random_tokens(length, seed=number), greedy(8))
        run_to_end(engine, finished)
        assert_matches(reference, finished[number])


@pytest.mark.parametrize("mode", ["legacy", "async"])
def test_prompts_that_arrive_while_others_decode(tiny, reference, mode):
    engine = build_engine(tiny, max_sequence_length=1024, async_sched_mode=mode)
    finished: dict = {}
    for number, length in enumerate((257, 1, 128, 3, 600, 2, 256, 127, 129, 255)):
        engine.add_request(number, random_tokens(length, seed=100 + number), greedy(5 + 3 * (number % 4)))
        if number % 2:  # two at a time: a batch of prefills beside running decodes
            run_to_end(engine, finished, steps=2)
    run_to_end(engine, finished)
    assert len(finished) == 10
    for request in finished.values():
        assert_matches(reference, request)


@pytest.mark.parametrize(
    "changes", [{"d_conv": 2}, {"d_conv": 3, "chunk_size": 64}, {"activation": "relu2", "num_query_groups": 2}]
)
def test_other_dimensions(platform, changes):
    config = get_preset("tiny", **changes)
    model = build_hybrid_model(config, seed=3, platform=platform)
    engine = build_engine(model, max_sequence_length=1024)
    finished: dict = {}
    for number, length in enumerate((2, 200, 300)):
        engine.add_request(number, random_tokens(length, seed=number), greedy(6))
    run_to_end(engine, finished)
    for request in finished.values():
        assert_matches(NaiveHybridModel(model, config), request)


def test_upstream_caching_agrees_where_it_is_right(tiny, reference):
    """Long tails after a block boundary, where megatron-core's own prefix cache is right."""
    engine = build_engine(tiny, max_sequence_length=2048, enable_prefix_caching=True, prefix_caching_mamba_gb=0.05)
    shared = random_tokens(768, seed=1)
    finished: dict = {}
    for number in range(4):
        engine.add_request(number, shared + random_tokens(90 + number, seed=50 + number), greedy(6))
        run_to_end(engine, finished)
    assert engine.context.lifetime_prefill_token_count < sum(len(r.prompt_tokens) for r in finished.values())
    for request in finished.values():
        assert_matches(reference, request)


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_a_prompt_is_computed_in_one_step_and_in_chunks(tiny):
    """Not token by token, which would take several operators per token and recurrent layer."""
    engine = build_engine(tiny, max_sequence_length=1024)
    counts = {}
    for number, length in enumerate((1, 600)):
        finished: dict = {}
        engine.add_request(number, random_tokens(length, seed=number), greedy(1))
        with Operators() as operators:
            run_to_end(engine, finished, steps=1)
        assert number in finished
        counts[length] = operators.count
    assert counts[600] - counts[1] < 600 * tiny.hybrid_config.layer_pattern.count("M")


def test_a_budget_that_cannot_hold_the_live_states_is_one_clear_line(tiny):
    with pytest.raises(ValueError, match=r"buffer_size_gb=.* too small: .*max_requests=16"):
        build_engine(tiny, buffer_size_gb=0.0001)
    with pytest.raises(ValueError, match="max_tokens=64 must be at least max_requests=128"):
        build_engine(tiny, max_tokens=64, max_requests=128)
    with pytest.raises(ValueError, match="unknown InferenceConfig field"):
        build_engine(tiny, no_such_field=1)


@pytest.mark.parametrize(
    ("preset", "fields", "message"),
    [
        ("tiny", {"block_size_tokens": 0}, "block_size_tokens=0: must be at least 1"),
        ("tiny", {"num_speculative_tokens": 1}, "num_speculative_tokens=1: the model has no multi-token prediction"),
        ("tiny", {"num_speculative_tokens": -1}, "num_speculative_tokens=-1: must not be negative"),
        (
            "tiny_mtp",
            {"num_speculative_tokens": 4},
            "num_speculative_tokens=4: the model drafts at most mtp_num_layers=3",
        ),
        (
            "tiny_mtp",
            {"num_speculative_tokens": 3, "block_size_tokens": 3},
            "num_speculative_tokens=3 must be below block_size_tokens=3",
        ),
    ],
)
def test_blocks_and_drafts_that_no_engine_has_are_one_clear_line(request, preset, fields, message):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        build_engine(request.getfixturevalue(preset), **fields)
    assert "\n" not in str(error.value)


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="no attention layer"):
        get_preset("tiny", layer_pattern="M-M-")
    assert isinstance(get_preset("tiny"), HybridModelConfig)


def test_cuda_graphs_without_a_gpu_are_refused_in_one_line(platform):
    with pytest.raises(ValueError, match="cuda_graph_impl='local' needs a CUDA device"):
        build_hybrid_model("tiny", platform=platform, cuda_graph_impl="local")
