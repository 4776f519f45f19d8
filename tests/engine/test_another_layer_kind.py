"""One file outside the package adds a recurrent layer kind to megatron's engine, beside Mamba2 or alone."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from megatron_hybrid_prefix.layers.base import KINDS
from megatron_hybrid_prefix.layers.kinds import kind_of, restore_mixers, use_slot_mixers
from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config, states_of_config
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.plugins import PLUGINS_VARIABLE
from tests.harness.drafts import Drafting
from tests.harness.engine_helpers import assert_matches, random_tokens, state_bytes
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness
from tests.harness.naive_model import NaiveHybridModel

FOLDER = Path(__file__).resolve().parents[1] / "harness" / "plugins"
PACKAGE = Path(__file__).resolve().parents[2] / "megatron_hybrid_prefix"
BESIDE, ALONE = (3,), (0, 3)  # decoder layers of "M*-M*-" that are of the new kind


@pytest.fixture(scope="module")
def kind(platform):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        patch.setenv(PLUGINS_VARIABLE, "leaky_recall")
        yield importlib.import_module("leaky_recall")


def built(kind, preset="tiny", layers=BESIDE):
    """A model with the new kind in these layers."""
    model = build_hybrid_model(preset, seed=0)
    for number in layers:
        model.decoder.layers[number].mixer = kind.LeakyRecall(model.config.hidden_size, seed=number)
    return model


@pytest.fixture(scope="module", params=[BESIDE, ALONE], ids=["beside_mamba2", "alone"])
def model(kind, request):
    return built(kind, layers=request.param)


class Reference(NaiveHybridModel):
    """A float64 reference. Each position is computed from all before it, without chunks and without a state."""

    def _mamba(self, x, prefix, zero_ssm_at, zero_conv_at):
        if prefix + "trace_in" not in self.weights:
            return super()._mamba(x, prefix, zero_ssm_at, zero_conv_at)
        leaky = sys.modules["leaky_recall"]
        w = {name: self.weights[prefix + name] for name in ("trace_in", "query", "key", "value", "out")}
        rows = []
        for t in range(len(x)):
            age = torch.arange(t, -1, -1, dtype=torch.float64)[:, None]
            past = x[: t + 1]
            trace = (leaky.TRACE_DECAY**age * (past @ w["trace_in"])).sum(0)
            scores = leaky.MEMORY_DECAY**age * (past @ w["key"]) @ (x[t] @ w["query"])[:, None]
            rows.append(torch.cat([trace, (scores * (past @ w["value"])).sum(0)]))
        return torch.stack(rows) @ w["out"]


def serve(model, **fields):
    served = EngineHarness(model, **fields)
    served.check = lambda: None  # by `compare`
    return served


def compare(served, tolerance=1e-5):
    reference = Reference(served.model, served.model.hybrid_config)
    for request in served.finished.values():
        assert_matches(reference, request, tolerance)


def test_the_package_does_not_know_it():
    assert not any("leaky" in path.read_text(encoding="utf-8").lower() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_chunked_prefill": True, "max_tokens": 128, "async_sched_mode": "async"},
        {"checkpoint_dtype": "int8"},
    ],
    ids=["whole", "chunked", "int8"],
)
def test_hits_say_what_misses_say(model, fields):
    served = serve(model, **fields)
    prefix = random_tokens(2 * BLOCK, seed=1)
    for own in (1, 7, 25, 40):
        served.send(prefix + random_tokens(own, seed=own))
    (first, *others) = [request.num_cached_tokens for request in served.finished.values()]
    assert first == 0 and set(others) == {2 * BLOCK}
    answer = served.finished[1]
    turn = served.send([*prefix, *random_tokens(1, seed=1), *answer.generated_tokens, *random_tokens(70, seed=9)])
    assert turn.num_cached_tokens == 2 * BLOCK
    # Together: hits and misses prefilled beside decodes.
    served.send(*[prefix[: BLOCK * (n % 3)] + random_tokens(20 + n, seed=20 + n) for n in range(6)], count=6)
    compare(served, 0.1 if served.context.shared_memory.encodes else 1e-5)
    served.check_drained()


def test_its_hits_are_verified(model):
    served = serve(model, verify_hits=1.0)
    for own in (3, 4):
        served.send([*random_tokens(2 * BLOCK, seed=1), own])
    stats = served.context.prefix_stats()
    assert (stats.verified_hits, stats.verify_mismatches) == (1, 0)


@pytest.mark.parametrize("component", ["trace", "memory"])
def test_a_wrong_component_is_noticed(model, component):
    served = serve(model)
    prefix = random_tokens(2 * BLOCK, seed=1)
    served.send([*prefix, 5])
    for node in [node for node in served.cache.nodes() if node.slot >= 0]:
        served.context.shared_memory.state(node.slot)[component].zero_()
    assert served.send(prefix + random_tokens(9, seed=2)).num_cached_tokens == 2 * BLOCK
    with pytest.raises(AssertionError):
        compare(served)


def test_states_of_decodes_and_of_preempted_requests(model):
    """Blocks that are filled by decoding; few KV blocks, so that requests are preempted and continue from the host."""
    served = serve(model, blocks=9, paused_blocks=2, host_gb=0.01, max_requests=4)
    prompts = [random_tokens(BLOCK + 20 * n, seed=50 + n) for n in range(4)]
    served.send(*prompts, count=BLOCK + 40)
    assert served.engine.evicted_request_count > 0
    history = [*prompts[0], *served.finished[1].generated_tokens]
    assert served.send([*history, 3]).num_cached_tokens >= BLOCK
    assert served.context.prefix_stats().checkpoints_by_reason["decode"] > 0
    compare(served)


def test_a_slot_holds_the_states_of_all_kinds(model, kind, request):
    served = serve(model, slots=5)
    names = set(served.context.shared_memory.states)
    assert {"trace", "memory"} <= names <= {"trace", "memory", "conv", "ssm"}
    own = kind.TRACE * 8 + kind.KEYS * kind.VALUES * 4
    layers = sum(isinstance(module, kind.LeakyRecall) for module in model.modules())
    mamba = sum(
        part.numel() * part.element_size()
        for name, part in served.context.shared_memory.state(0).items()
        if name in ("conv", "ssm")
    )
    assert served.context.state_layout.slot_bytes == layers * own + mamba == state_bytes(model)
    assert served.context.checkpoint_slots == 5
    assert "trace in float64, memory in float32" in served.context.memory_report()


def test_new_weights_are_told_to_the_layers(model, kind):
    served = serve(model)
    before = [module.resets for module in model.modules() if isinstance(module, kind.LeakyRecall)]
    prompt = random_tokens(BLOCK + 9, seed=3)
    served.send(prompt)
    served.engine.invalidate()
    assert [module.resets - 1 for module in model.modules() if isinstance(module, kind.LeakyRecall)] == before
    assert served.send(prompt).num_cached_tokens == 0


def test_cuda_graphs_cannot_capture_it_unless_it_says_so(kind):
    states = states_of_config(mamba_state_config(built(kind)))
    with pytest.raises(ValueError, match=r"CUDA graphs cannot capture layers of kind leaky_recall$"):
        states.check(block_tokens=BLOCK, cuda_graph_impl="local", drafts=0)


def test_it_cannot_be_decoded_speculatively(kind):
    with pytest.raises(ValueError, match="layers of kind leaky_recall do not support speculative decoding"):
        EngineHarness(built(kind, "tiny-mtp"), num_speculative_tokens=2)


@pytest.mark.parametrize("layers", [BESIDE, ALONE], ids=["beside_mamba2", "alone"])
def test_it_drafts_one_token_after_another_if_it_says_so(kind, monkeypatch, layers):
    """`SlotLayer` keeps the state after each; the engine goes back to the one after the last accepted token."""
    monkeypatch.setattr(kind.Kind, "drafts", True)
    served = Drafting(built(kind, "tiny-mtp", layers), 3, lambda request_id, position: (request_id + position) % 4)
    for number in range(3):
        served.ask(random_tokens(BLOCK - 9 + 20 * number, seed=number), 40)
    served.run()
    again = served.ask([*served.truth[1], 5], 9)
    served.run()
    assert served.finished[again].num_cached_tokens == BLOCK
    assert set(served.drafted) == {0, 1, 2, 3}
    compare(served)


def test_layers_of_one_kind_with_different_states_are_refused(kind, monkeypatch):
    model = built(kind, layers=ALONE)
    first = model.decoder.layers[0].mixer
    monkeypatch.setattr(
        kind.Kind, "chunk_tokens", lambda self, module: kind.CHUNK if module is first else 2 * kind.CHUNK
    )
    with pytest.raises(
        ValueError, match="layer 4: its states differ from those of other layers of kind 'leaky_recall'"
    ):
        EngineHarness(model)


def test_the_last_registered_matching_kind_wins(kind, model, monkeypatch):
    class Other(kind.Kind):
        name = "other"
        slot_class = type("OtherSlots", (kind.LeakyRecallBySlots,), {})

    monkeypatch.setitem(KINDS._by_name, "other", Other())
    layers = [module for module in model.modules() if isinstance(module, kind.LeakyRecall)]
    restore_mixers(model)
    before = [type(module) for module in layers]
    assert {kind_of(module).name for module in layers} == {"other"}
    assert use_slot_mixers(model) and all(isinstance(module, Other.slot_class) for module in layers)
    assert all(hasattr(module, "slot_layer_number") for module in layers)
    restore_mixers(model)
    assert [type(module) for module in layers] == before


def test_bits_of_a_kind_without_a_decode_over_the_open_chunk_are_refused_in_one_line(model):
    with pytest.raises(ValueError, match=r"^layers of kind leaky_recall have no decode with the bits of their prefill"):
        EngineHarness(model, exact="bits")
