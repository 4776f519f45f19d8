"""Checkpoints in int8 or bfloat16, on the device and below it (``checkpoint_dtype``); live states stay as they are."""

from __future__ import annotations

import logging
from itertools import product
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_hybrid_prefix import HybridPrefixConfig
from megatron_hybrid_prefix.layers.base import register_layer_kind
from megatron_hybrid_prefix.layers.slot_layer import SlotLayer
from megatron_hybrid_prefix.layers.step import PrefillSpan, PrefillStep
from megatron_hybrid_prefix.mcore import restore_mixers
from megatron_hybrid_prefix.ops.state_codes import decode
from megatron_hybrid_prefix.pool.shared_memory import slot_bytes
from megatron_hybrid_prefix.serve.metrics import memory_samples
from tests.harness.engine_helpers import assert_matches, random_tokens
from tests.harness.lifecycle_helpers import BLOCK, MANY, EngineHarness, tokens
from tests.harness.naive_model import NaiveHybridModel
from tests.harness.shared_tiers import Folder, stats_of

DTYPES = ("int8", "bfloat16")


@pytest.fixture(params=["tiny", "tiny_gdn", "tiny_mixed", "tiny_gdp", "tiny_nemotron_3"])
def any_model(request):
    yield (model := request.getfixturevalue(request.param))
    restore_mixers(model)


class Resumed(NaiveHybridModel):
    """Before the tokens at some places, matrix states are those that an engine kept there."""

    kept: ClassVar[dict[int, list[torch.Tensor]]] = {}  # of each layer
    found: ClassVar[dict[int, list[torch.Tensor]]] = {}  # in their place

    def carried(self, state: torch.Tensor, at: int) -> torch.Tensor:
        at, inside = divmod(at, self.config.gdp_num_householder or 1)  # which counts in pairs
        if inside or at not in self.kept:
            return state
        found = self.found.setdefault(at, [])
        found.append(state)
        return self.kept[at][(len(found) - 1) % len(self.kept[at])].view(state.shape).double()

    def log_probs(self, tokens: list[int], *args: Any) -> torch.Tensor:
        return self.logits(tokens).log_softmax(-1)


def checkpoint(served: EngineHarness, prompt: list[int], blocks: int) -> dict[str, torch.Tensor]:
    """What is kept of the state after so many blocks of a prompt, on the device."""
    slot = served.cache.node(served.cache.chain(prompt).keys[blocks - 1]).slot
    return {name: part.clone() for name, part in served.context.shared_memory.state(slot).items()}


def matrices(served: EngineHarness, kept: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer what comes back of its matrix states, and how far they may be from what was kept."""
    found, kinds = [], list(served.context.model_states.kind_of_layer)
    for number, kind in enumerate(kinds):
        (layout,) = [layout for layout in served.context.state_layout.kinds if layout.kind == kind]
        (name,) = [each.name for each in layout.components if each.accumulates]
        parts = [part[kinds[:number].count(kind)] for each, part in kept.items() if each.startswith(name)]
        if len(parts) == 1:
            found.append((parts[0].float(), 2**-8 * parts[0].float().abs()))
        else:
            steps = parts[1].float()[..., None] * parts[2].float()[..., None, :]
            found.append((decode(*parts), steps / 2))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_conversation_has_the_error_of_its_checkpoints_and_no_other(any_model, dtype):
    """Log-probs are those of a model in float64 that takes a checkpoint's states where a turn resumed, and those are rounded ones of its own."""
    chunks = {"enable_chunked_prefill": True, "max_tokens": 2 * BLOCK} if dtype == "int8" else {}
    served = EngineHarness(any_model, checkpoint_dtype=dtype, max_requests=2, **chunks)
    model, history = Resumed(any_model, any_model.hybrid_config), tokens(2, 5, seed=1)
    Resumed.kept, exact = {}, NaiveHybridModel(any_model, any_model.hybrid_config)
    for turn in range(4):
        done = served.send(history, count=BLOCK + 9)
        place = done.num_cached_tokens
        assert place == (len(history) - 15) // BLOCK * BLOCK * bool(turn)
        if turn:
            states = matrices(served, checkpoint(served, history, place // BLOCK))
            Resumed.kept[place], Resumed.found = [state for state, _ in states], {}
        assert_matches(model, done)
        for (state, most), own in zip(states, Resumed.found[place], strict=False) if turn else ():
            assert ((state.view(own.shape) - own).abs() <= 1.02 * most.view(own.shape) + 1e-5 * own.abs().max()).all()
        history = [*history, *done.generated_tokens, *random_tokens(15, seed=turn)]
    with pytest.raises(AssertionError):
        assert_matches(exact, done)
    served.check_drained()


def test_what_is_kept_while_a_prompt_goes_on(any_model):
    """Several of two prompts in one step. Live states at their ends are not rounded, the windows of checkpoints are not either."""
    exact, served = (EngineHarness(any_model, checkpoint_dtype=each) for each in (None, "int8"))
    prompts = tokens(4, 5, seed=1), tokens(4, 9, seed=2)
    for each in (exact, served):
        each.send(*prompts, cache_breakpoints=[BLOCK, 3 * BLOCK], count=4)
        each.check()
    for prompt, blocks in product(prompts, (1, 3, 4)):
        states, kept = checkpoint(exact, prompt, blocks), checkpoint(served, prompt, blocks)
        assert kept.keys() & states.keys(), "no windows"
        for name in kept.keys() & states.keys():
            torch.testing.assert_close(kept[name], states[name])
        for (own, _), (state, most) in zip(matrices(exact, states), matrices(served, kept), strict=True):
            assert ((state - own).abs() <= 1.02 * most + 1e-5 * own.abs().max()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_below_the_device_bytes_stay_as_they_are(model, dtype, tmp_path, monkeypatch):
    """On the host, in a folder, and back; an engine that keeps them in another form finds nothing of them."""
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "a secret for the tests")
    fields: dict[str, Any] = {"slots": 2, "blocks": 14, "host_gb": 0.01, "max_requests": 2}
    fields["shared"] = Folder(tmp_path / "cache", monkeypatch).url()
    served = EngineHarness(model, checkpoint_dtype=dtype, **fields)
    prompt = tokens(4, 9, seed=1)
    served.send(prompt)
    kept = checkpoint(served, prompt, 4)
    for seed in range(900, 920):  # more than the device has room for
        served.send(tokens(6, 7, seed=seed), count=1)
    assert served.cache.node(served.cache.chain(prompt).keys[3]).slot < 0
    assert served.send([*prompt, 3]).num_cached_tokens == 4 * BLOCK
    assert served.context.prefix_stats().reused_tokens_host == 4 * BLOCK
    again = checkpoint(served, prompt, 4)
    assert all(torch.equal(kept[name], part) for name, part in again.items())
    assert served.context.host_moves.drain(60)
    for other in (*({None, *DTYPES} - {dtype}), dtype):
        later = EngineHarness(model, checkpoint_dtype=other, **fields)
        assert later.send([*prompt, 4]).num_cached_tokens == (4 * BLOCK if other == dtype else 0), other
    again = checkpoint(later, prompt, 4)
    assert all(torch.equal(kept[name], part) for name, part in again.items())
    assert stats_of(later).loads > 0


def test_preempted_requests_go_on_from_exact_states(any_model):
    """No prompt has a prefix of another: all that is reused is what they left themselves."""
    served = EngineHarness(
        any_model, checkpoint_dtype="int8", slots=3, blocks=9, paused_blocks=2, host_gb=0.05, max_requests=4
    )
    served.send(*(random_tokens(BLOCK + 20 * n, seed=50 + n) for n in range(4)), count=BLOCK + 40)
    stats = served.context.prefix_stats()
    assert served.engine.evicted_request_count > 0 and stats.tiers["host"].preempted > 0
    assert stats.fallbacks.get("host_load_failed", 0) == 0
    served.check()
    served.check_drained()


@pytest.mark.parametrize("damage", [None, "ssm_int8", "ssm_row_scales", "conv"])
def test_verified_hits(model, damage, caplog):
    served = EngineHarness(model, checkpoint_dtype="int8", verify_hits=1.0)
    prompt = tokens(3, 0, seed=1)
    served.send([*prompt, 7])
    (node,) = [node for node in served.cache.nodes() if node.slot >= 0]
    if damage is not None:
        part = served.context.shared_memory.state(node.slot)[damage]
        part.copy_(part.flip(1) if damage == "ssm_int8" else 1.5 * part)
    with caplog.at_level(logging.WARNING, logger="megatron_hybrid_prefix"):
        served.send([*prompt, 3, 4])
    stats = served.context.prefix_stats()
    assert (stats.verified_hits, stats.verify_mismatches) == (1, int(damage is not None))
    assert damage is None or f"relative difference {damage.split('_')[0]}" in caplog.text


def test_verified_hits_of_a_conversation(any_model):
    """Later turns are verified against states and KV that were computed from a checkpoint."""
    served, history = EngineHarness(any_model, checkpoint_dtype="int8", verify_hits=0.4), tokens(2, 5, seed=1)
    for turn in range(8):
        done = served.send(history, count=BLOCK // 2)
        history = [*history, *done.generated_tokens, *random_tokens(BLOCK // 2, seed=turn)]
    stats = served.context.prefix_stats()
    assert stats.verified_hits > 1 and stats.verify_mismatches == 0 and stats.reused_tokens > 0


def test_more_of_them_fit_and_reports_say_so(model):
    plain, served = (EngineHarness(model, checkpoint_dtype=each) for each in (None, "int8"))
    sizes = [each.context.shared_memory.kept.slot_bytes for each in (plain, served)]
    assert sizes[0] > sizes[1]
    assert [each.context.checkpoint_slots for each in (plain, served)] == [MANY, MANY * sizes[0] // sizes[1]]
    assert "as checkpoints" in served.context.memory_report()
    assert "as checkpoints" not in plain.context.memory_report()
    assert plain.context.shared_memory.checkpoints is plain.context.shared_memory.states
    served.add(tokens(2, 5, seed=1))
    served.step()
    found = {tuple(labels.values()): value for _, name, value, labels in memory_samples(served.context) if labels}
    sizes = [slot_bytes(each) for each in (served.context.state_layout, served.context.shared_memory.kept)]
    assert [found[owner,] for owner in ("states_running", "checkpoints")] == [sizes[0], sizes[1]]


def test_nothing_to_gain_is_said(own_models, caplog):
    model = own_models("tiny")[0].bfloat16()
    model.config.params_dtype = torch.bfloat16
    with caplog.at_level(logging.WARNING, logger="megatron_hybrid_prefix"):
        served = EngineHarness(model, checkpoint_dtype="bfloat16")
    assert not served.context.shared_memory.encodes
    assert "checkpoint_dtype=bfloat16 has no effect: live states have no more bytes" in caplog.text


def test_a_step_numbers_its_checkpoints(platform):
    """What a larger step before left behind its own is no slot: a CUDA graph looks at all of them."""
    step = PrefillStep(quanta=[8], block_tokens=16, max_tokens=64, max_sequences=4, device="cpu", encodes=True)
    for kept, slots, windows, numbers in (
        ([{16: 5, 32: 9}, {16: 7}], [5, 9, 7], [-1, 5, -1, 9, -1, 7], [-1, 0, -1, 1, -1, 2]),
        ([{16: 3}], [3], [-1, 3, -1, -1], [-1, 0, -1, -1]),
    ):
        spans = [
            PrefillSpan(start_tokens=0, tokens=max(32 - 16 * n, 16), source_slot=0, live_slot=n, kept=each)
            for n, each in enumerate(kept)
        ]
        step.prepare(spans, tokens=64, sequences=4)
        step.copy()
        step.show()
        assert step._tensors["kept"].tolist() == slots + [-1] * (8 - len(slots))
        assert step.chunks[8].slots.tolist()[: len(numbers)] == numbers
        assert step._tensors["windows8"].tolist() == windows + [-1] * (len(step.chunks[8].slots) - len(windows))
        assert len(step.begin({"x": torch.zeros(2, 3)}, {})["x"]) == len(slots)


def test_a_plugin_with_an_earlier_prefill_is_refused():
    class Old(SlotLayer):
        def slot_prefill(self, inputs, states, step):
            raise NotImplementedError

    with pytest.raises(
        ValueError, match=r"slot_prefill takes \(inputs, states, step\), must take \(inputs, states, kept, step\)"
    ):
        register_layer_kind(SimpleNamespace(name="old", slot_class=Old))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"checkpoint_dtype": "int4"}, "checkpoint_dtype='int4': must be 'bfloat16' or 'int8', or None"),
        ({"checkpoint_dtype": "int8", "exact": "bits"}, "exact='bits' keeps states as they are"),
    ],
)
def test_what_is_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        HybridPrefixConfig(**fields)
