"""What a suspension leaves: resets of a suspended engine, resumes that fail, and weights that changed meanwhile."""

from __future__ import annotations

import logging
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.engines.dynamic_engine import EngineState, EngineSuspendedError
from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.upstream.capabilities import form_of
from megatron_hybrid_prefix.upstream.coordinator import PARTIAL
from tests.harness.engine_helpers import assert_matches, greedy
from tests.harness.lifecycle_helpers import BLOCK, MODES, EngineHarness, raising, tokens
from tests.harness.refits import WAYS, copy_in_place
from tests.harness.selection import mostly_slow_rows
from tests.harness.shared_tiers import STORES, stats_of, written

MANAGEMENT = PERSIST, OFFLOAD, RECOMPUTE = tuple(KVCacheManagementMode)
each_management = pytest.mark.parametrize("management", MANAGEMENT, ids=lambda value: value.value)
ON_HOST = {"slots": 4, "blocks": 20, "host_gb": 0.02}  # what does not fit goes to the host


def busy(model: Any, **fields: Any) -> EngineHarness:
    """An engine with something cached, a request in decode, one between two chunks of its prompt, and one that waits."""
    served = EngineHarness(
        model, **({"enable_chunked_prefill": True, "max_tokens": 2 * BLOCK, "max_requests": 3} | fields)
    )
    served.send(tokens(2, 30, seed=1))
    served.add(tokens(1, 50, seed=2), BLOCK)
    served.step(4)
    chunked = served.add(tokens(6, 11, seed=3), 5)
    served.add(tokens(2, 5, seed=4), 5)
    served.step(1)
    assert served.context.chunked_prefill_request_id == chunked
    return served


# -- resets, and what is not possible while suspended ------------------------------------------------------------------

CACHES = {"cache": {}, "host tier": ON_HOST, "no cache": {"slots": None}}


@pytest.mark.parametrize(
    ("management", "cache"),
    [*((each, "cache") for each in MANAGEMENT), (RECOMPUTE, "host tier"), (PERSIST, "no cache")],
)
def test_a_suspended_engine_can_be_reset(model, management, cache):
    """It stays suspended, and has forgotten its requests once it resumes."""
    served = busy(model, kv_cache_management_mode=management, **CACHES[cache])
    with pytest.warns(UserWarning, match="failed to be added"):
        served.add(tokens(100, 0, seed=5))
    served.engine.suspend()
    for _ in range(2):
        served.engine.reset()
        assert served.engine.state == EngineState.SUSPENDED and not served.engine.has_unfinished_requests()
        served.check_integrity()
    with pytest.raises(EngineSuspendedError):
        served.step()
    late = served.add(tokens(0, 9, seed=5))
    served.engine.resume()
    served.run()
    assert list(served.finished) == [1, late]  # those that were dropped are 2 to 5
    again = [served.send(tokens(2, 30, seed=1)) for _ in range(2)]
    assert [request.num_cached_tokens for request in again] == [0, 0 if cache == "no cache" else 2 * BLOCK]
    served.finish()


@pytest.mark.parametrize("state", ["RUNNING", "PAUSED", "SUSPENDING", "SUSPENDED", "RESUMING", "STOPPED"])
def test_a_reset_behind_a_coordinator_leaves_its_states_and_signals_alone(model, state):
    """Its next signal asserts the state. One that has stopped starts again, without a coordinator."""
    engine = EngineHarness(model, kv_cache_management_mode=RECOMPUTE).engine
    suspended = state.startswith("SUSPEND")
    engine.use_coordinator = True
    if suspended:
        engine.suspend()
    engine.state, engine._pending_signals = EngineState[state], deque([b"a signal"])
    events = engine._state_events
    engine.reset()
    if state == "STOPPED":
        assert (engine.state, engine.use_coordinator) == (EngineState.RUNNING, False)
    else:
        assert (engine.state, engine.use_coordinator) == (EngineState[state], True)
        assert engine._state_events is events and list(engine._pending_signals) == [b"a signal"]
    engine.resume()
    assert engine.context.is_tensor_state_allocated


@each_management
def test_a_suspended_engine_generates_nothing_and_says_so(model, management):
    served = EngineHarness(model, kv_cache_management_mode=management)
    served.add(tokens(4, 9, seed=2))
    served.step()
    served.engine.suspend()
    for call in (served.step, lambda: served.engine.generate([tokens(0, 9, seed=1)], greedy(3))):
        with pytest.raises(EngineSuspendedError, match=r"^the engine is suspended: call engine\.resume\(\) first$"):
            call()
    served.engine.resume()
    served.run()
    served.check()
    assert len(served.engine.generate([tokens(0, 9, seed=1)], greedy(3))) == 1
    assert "forward_failed" not in served.context.prefix_stats().fallbacks
    served.check_drained()


@pytest.mark.parametrize("management", (OFFLOAD, RECOMPUTE), ids=lambda value: value.value)
def test_a_resume_without_memory_can_be_repeated(model, management, monkeypatch):
    """A trainer may still have it."""
    served = busy(model, kv_cache_management_mode=management, keep_on_resume=True)
    served.engine.suspend()
    fail = raising(MemoryError("an error of this test"), monkeypatch.undo)
    if management == RECOMPUTE:
        monkeypatch.setattr(type(served.context), "make_state_metadata", fail)  # KV and states are allocated
    else:
        monkeypatch.setattr(torch.TypedStorage, "resize_", fail)
    with pytest.raises(MemoryError):
        served.engine.resume()
    assert served.engine.state == EngineState.SUSPENDED
    assert (served.context.states, served.context.shared_memory) == (None, None) or management == OFFLOAD
    served.engine.resume()
    served.run()
    assert sorted(served.finished) == [1, 2, 3, 4]
    served.finish()


# -- weights that change while the engine is suspended, with nothing announced -----------------------------------------


def spoilt(served: EngineHarness, *ids: int) -> bool:
    """Whether an answer is not that of the current weights."""
    try:
        served.check(*ids)
    except AssertionError:
        return True
    return False


SUSPENSIONS = [  # each management, each model, each memory, each scheduling
    *(("tiny", PERSIST, "legacy", "cache"), ("tiny", OFFLOAD, "async", "cache"), ("tiny", RECOMPUTE, "async", "cache")),
    *(("tiny", PERSIST, "async", "host tier"), ("tiny", RECOMPUTE, "legacy", "host tier")),
    *(("tiny-gdn", RECOMPUTE, "async", "cache"), ("tiny-mixed", PERSIST, "async", "host tier")),
]
each_suspension = pytest.mark.parametrize(
    ("name", "management", "mode", "cache"), mostly_slow_rows(SUSPENSIONS, *SUSPENSIONS[1:4], SUSPENSIONS[5])
)


@each_suspension
def test_nothing_computed_before_a_suspension_is_reused(own_models, name, management, mode, cache, caplog):
    model, trained = own_models(name)
    served = EngineHarness(model, kv_cache_management_mode=management, async_sched_mode=mode, **CACHES[cache])
    prompts = [tokens(2, 30 + seed, seed=seed) for seed in range(3 if cache == "cache" else 14)]
    served.send(*prompts)
    if cache == "host tier":
        assert served.context.prefix_stats().tiers["host"].states
    served.engine.suspend()
    copy_in_place(model, trained)
    blocks, on_host = served.cache.memory_use().keyed_blocks, served.context.prefix_stats().tiers["host"].kv_blocks
    served.engine.resume()
    said = f"{blocks} cached KV blocks and {on_host} on the host are dropped, with their states: resume()"
    assert sum(said in record.message for record in caplog.records) == 1
    first = served.next_id + 1
    for prompt in prompts:
        assert served.send(prompt).num_cached_tokens == 0
    assert served.send(prompts[-1]).num_cached_tokens == 2 * BLOCK
    served.check(*range(first, served.next_id + 1))
    assert served.context.prefix_stats().invalidations == 1
    served.check_drained()


@pytest.mark.parametrize("management", (PERSIST, OFFLOAD), ids=lambda value: value.value)
@pytest.mark.parametrize("checked", [True, False])
def test_with_the_setting_the_cache_survives_equal_weights_only(own_models, management, checked, caplog):
    """Who trusts announcements, and makes none, gets states of old weights."""
    model, trained = own_models("tiny")
    served = EngineHarness(model, kv_cache_management_mode=management, keep_on_resume=True, check_weights=checked)
    prompt = tokens(2, 30, seed=1)
    served.send(prompt)
    served.suspend_and_resume()
    assert served.send(prompt).num_cached_tokens == 2 * BLOCK
    served.check()
    served.engine.suspend()
    copy_in_place(model, trained)
    served.engine.resume()
    assert served.send(prompt).num_cached_tokens == (0 if checked else 2 * BLOCK)
    assert spoilt(served, served.next_id) != checked
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert served.context.prefix_stats().invalidations == len(warned) == checked


@pytest.mark.parametrize(("way", "coordinator"), [("copy_", False), ("data", False), ("copy_", True)])
def test_however_weights_change(own_models, way, coordinator):
    """Behind a coordinator `resume` is called in the state SUSPENDED, and the loop goes on from RESUMING."""
    model, trained = own_models("tiny")
    served = EngineHarness(model)
    prompt, engine = tokens(2, 30, seed=1), served.engine
    served.send(prompt)
    engine.use_coordinator, engine.state = coordinator, EngineState.PAUSED if coordinator else engine.state
    engine.suspend()
    engine.state = EngineState.SUSPENDED
    WAYS[way](model, trained)
    engine.resume()
    engine.use_coordinator, engine.state = False, EngineState.RUNNING
    assert served.send(prompt, count=9).num_cached_tokens == 0
    served.check(2)
    fresh = EngineHarness(model, slots=None)
    fresh.send(prompt, count=9)
    assert served.finished[2].generated_tokens == fresh.finished[1].generated_tokens


@each_suspension
def test_requests_in_flight_publish_nothing_of_the_old_weights(own_models, name, management, mode, cache):
    """A request that had not begun is of the new weights. So is what a recomputing engine says after the suspension.

    In half of the cases the engine looks at the weights, as it is to keep its cache if they are the same.
    """
    model, trained = own_models(name)
    fields = {"kv_cache_management_mode": management, "async_sched_mode": mode, "keep_on_resume": mode == "async"}
    served = busy(model, **fields, **CACHES[cache])
    decoding, chunked, waiting = 2, 3, 4
    served.engine.suspend()
    copy_in_place(model, trained)
    served.engine.resume()
    served.check_integrity()
    served.run()
    assert len(served.finished[decoding].generated_tokens) == BLOCK
    served.check(waiting)
    if management == RECOMPUTE:
        served.check(chunked)
        assert_matches(served.reference, served.records[decoding][-1])
    first = served.next_id + 1
    for number in (decoding, chunked, waiting):
        request = served.finished[number]
        served.send(request.prompt_tokens.tolist() + list(request.generated_tokens))
    served.check(*range(first, served.next_id + 1))
    assert served.send(tokens(2, 30, seed=1)).num_cached_tokens == 0
    assert served.context.prefix_stats().invalidations == 1
    served.check(served.next_id)
    served.check_drained()


@pytest.mark.parametrize("management", (PERSIST, RECOMPUTE), ids=lambda value: value.value)
@pytest.mark.parametrize("announced", ["before", "while suspended", "after"])
def test_weights_that_are_announced_too_are_dropped_once(own_models, management, announced, caplog):
    """What is announced before drops all: `resume` has nothing left to drop, and what ran since the announcement after."""
    model, trained = own_models("tiny")
    served = EngineHarness(model, kv_cache_management_mode=management)
    prompt = tokens(2, 30, seed=1)
    served.send(prompt)
    served.engine.suspend()
    if announced == "before":  # also where a trainer announces them before it writes them
        served.engine._generation_epoch = 7
    copy_in_place(model, trained)
    if announced == "while suspended":
        served.engine._generation_epoch = 7
    served.engine.resume()
    if announced == "after":
        served.engine._generation_epoch = 7
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == (announced == "after")
    cached = [served.send(prompt).num_cached_tokens for _ in range(2)]
    served.engine._generation_epoch = 7  # no news
    cached.append(served.send(prompt).num_cached_tokens)
    assert cached == [0, 2 * BLOCK, 2 * BLOCK]
    served.check(2, 3, 4)


def test_a_resume_without_a_suspension_drops_nothing(model):
    served = EngineHarness(model)
    prompt = tokens(2, 30, seed=1)
    served.send(prompt)
    served.engine.resume()
    assert served.send(prompt).num_cached_tokens == 2 * BLOCK
    served.engine.suspend()
    served.engine.suspend()
    served.engine.resume()
    served.send(prompt)
    served.engine.resume()
    assert served.send(prompt).num_cached_tokens == 2 * BLOCK
    assert served.context.prefix_stats().invalidations == 1


# -- tiers that other processes use ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("store", "management"), [("folder", PERSIST), ("folder", RECOMPUTE), ("mooncake", OFFLOAD)])
def test_a_shared_tier_never_serves_states_of_other_weights(own_models, store, management, tmp_path, monkeypatch):
    """Neither those that this process stored before, nor, to processes with the old weights, those that it stores now."""
    model, trained = own_models("tiny")
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "a secret for the tests")
    shared = STORES[store](tmp_path / "cache", monkeypatch).url()
    fields = {"slots": 6, "blocks": 20, "host_gb": 0.01, "max_requests": 2, "shared": shared}
    prompt = tokens(4, 9, seed=1)
    served = EngineHarness(model, kv_cache_management_mode=management, **fields)
    served.send(prompt)
    running = served.add(tokens(2, 20, seed=2), BLOCK)
    served.step(5)
    written(served)
    stored = stats_of(served).stores
    served.engine.suspend()
    copy_in_place(model, trained)
    served.engine.resume()
    served.run()
    again = [served.send(prompt) for _ in range(2)]
    assert [request.num_cached_tokens for request in again] == [0, 4 * BLOCK]
    served.send(served.finished[running].prompt_tokens.tolist() + list(served.finished[running].generated_tokens))
    served.check(*range(running + 1, served.next_id + 1))
    written(served)
    assert stored and stats_of(served).stores > stored

    old = EngineHarness(own_models("tiny")[0], **fields)
    new = EngineHarness(trained, **fields)
    # Keys contain how often weights changed, so a new process finds nothing that was stored after a change.
    assert [other.send(prompt).num_cached_tokens for other in (old, new)] == [4 * BLOCK, 0]
    for other in (old, new):
        other.check()


# -- what layers derive from their weights -----------------------------------------------------------------------------


def mixers(model: Any) -> list[MambaMixer]:
    return [module for module in model.modules() if isinstance(module, MambaMixer)]


def replayed(self: MambaMixer) -> torch.Tensor:
    """The A of a decode in the replay of a CUDA graph: what is in the memory that was captured."""
    return self._A_neg_exp_cache.view(-1, 1, 1).expand(-1, self.headdim, self.d_state)


@pytest.mark.parametrize(
    ("how", "training", "cache"),
    [
        *(("invalidate", False, {}), ("epoch", True, {}), ("resume", True, {})),
        *((how, how == "invalidate", {"slots": None}) for how in ("invalidate", "resume", "notice")),
    ],
)
def test_what_a_captured_decode_reads_is_refreshed_in_place(own_models, how, training, cache, monkeypatch):
    model, _ = own_models("tiny")
    served = EngineHarness(model, **cache)
    served.send(tokens(1, 9, seed=1), count=9)
    monkeypatch.setattr(MambaMixer, "_get_decode_A_neg_exp", replayed)
    memory = [(mixer._A_neg_exp_cache.data_ptr(), mixer._A_neg_exp_cache.clone()) for mixer in mixers(model)]
    if how == "resume":
        served.engine.suspend()
    model.train(training)
    with torch.no_grad():
        for mixer in mixers(model):
            mixer.A_log.add_(0.4)
    if how == "invalidate":
        served.engine.invalidate()
    elif how == "epoch":
        served.engine._generation_epoch = 1
    elif how == "resume":
        served.engine.resume()
    model.eval()
    served.send(tokens(1, 9, seed=1), count=9)
    served.check(2)
    for mixer, (address, before) in zip(mixers(model), memory, strict=True):
        assert mixer._A_neg_exp_cache.data_ptr() == address
        assert torch.equal(mixer._A_neg_exp_cache, -torch.exp(mixer.A_log)) and not torch.equal(
            mixer._A_neg_exp_cache, before
        )


def test_a_model_that_was_built_in_inference_mode_is_refreshed_outside(platform):
    """Its memory cannot be written there."""
    with torch.inference_mode():
        model = build_hybrid_model("tiny", seed=5, platform=platform)
        served = EngineHarness(model)
        served.send(tokens(1, 9, seed=1))
    served.engine.invalidate()
    (mixer, *_) = mixers(model)
    assert torch.equal(mixer._A_neg_exp_cache, -torch.exp(mixer.A_log))


@pytest.mark.skipif(form_of("aborts and new tokens") == "no", reason="this megatron streams no new tokens")
@pytest.mark.parametrize("mode", MODES)
def test_a_stream_goes_on_after_the_request_was_preempted(model, mode):
    """Megatron counts the tokens of an answer that are sent, and a resumed request has those of its last part only."""
    served, messages = EngineHarness(model, async_sched_mode=mode, kv_cache_management_mode=RECOMPUTE), []
    engine = served.engine
    engine.socket_for_receiving_requests = SimpleNamespace(send=messages.append)
    engine.is_mp_coordinator, engine.ep_world_size = True, 1
    number = served.add(tokens(1, 9, seed=1), 20, streaming=True)
    engine.use_coordinator = True
    served.step(5)
    engine.use_coordinator = False  # as if the coordinator had suspended it
    served.suspend_and_resume()
    engine.use_coordinator = True
    while number not in served.finished:
        served.step()
    contents = [content for header, content in map(msgpack.unpackb, messages) if header == PARTIAL]
    sent = [token for partials in contents for partial in partials for token in partial["new_tokens"]]
    assert sent == served.finished[number].generated_tokens[:-1]
    assert engine.requests == {}
