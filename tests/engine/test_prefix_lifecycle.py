"""Suspend and resume, new weights, resets, and forwards that fail. (`test_prefix_requests.py` has the requests.)"""

from __future__ import annotations

import asyncio
import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from torch.multiprocessing.reductions import StorageWeakRef

from tests.harness.drafts import Drafting
from tests.harness.engine_helpers import LOG_PROB_NOISE, assert_matches
from tests.harness.lifecycle_helpers import BLOCK, MODES, EngineHarness, raising, tokens
from tests.harness.selection import mostly_slow

PERSIST, OFFLOAD, RECOMPUTE = KVCacheManagementMode
each_mode = pytest.mark.parametrize("mode", mostly_slow(MODES, "legacy"))
each_management = pytest.mark.parametrize("management", KVCacheManagementMode, ids=lambda value: value.value)


# -- suspend and resume ------------------------------------------------------------------------------------------------


def state_storages(served: EngineHarness) -> dict[str, torch.UntypedStorage]:
    """Memory of KV and recurrent states."""
    tensors = served.context.shared_memory.states | {"kv": served.context.memory_buffer}
    return {name: tensor.untyped_storage() for name, tensor in tensors.items()}


@each_management
def test_what_an_idle_engine_keeps_while_suspended(model, management):
    served = EngineHarness(model, kv_cache_management_mode=management, keep_on_resume=True)
    prompt = tokens(2, 30, seed=1)
    served.send(prompt)
    sizes = {name: storage.nbytes() for name, storage in state_storages(served).items()}
    assert sizes.keys() == {"conv", "ssm", "kv"} and min(sizes.values()) > 0

    served.engine.suspend()
    if management == PERSIST:
        assert {name: storage.nbytes() for name, storage in state_storages(served).items()} == sizes
    elif management == OFFLOAD:
        assert {storage.nbytes() for storage in state_storages(served).values()} == {0}
    else:
        assert served.context.shared_memory is None
    served.engine.suspend()  # harmless
    served.engine.resume()
    served.engine.resume()

    assert {name: storage.nbytes() for name, storage in state_storages(served).items()} == sizes
    kept = management != RECOMPUTE
    assert (served.cache.memory_use().keyed_blocks, served.kept_states) == ((2, 1) if kept else (0, 0))
    served.check_drained()
    assert served.send(prompt).num_cached_tokens == (2 * BLOCK if kept else 0)
    assert served.send(prompt).num_cached_tokens == 2 * BLOCK
    served.finish()


def test_recompute_lets_go_of_all_memory(model):
    """Checks the storages, because a forgotten view would keep a storage alive."""
    served = EngineHarness(model, kv_cache_management_mode=RECOMPUTE)
    prompt = tokens(2, 30, seed=1)
    served.send(prompt)
    served.add(prompt, 9)  # resumed from a checkpoint
    served.step(3)
    storages = {name: StorageWeakRef(storage) for name, storage in state_storages(served).items()}
    assert not any(ref.expired() for ref in storages.values())
    served.engine.suspend()
    gc.collect()
    assert [name for name, ref in storages.items() if not ref.expired()] == []
    served.engine.resume()
    served.finish()


def served_in_chunks(model, management, **fields):
    """An engine that computes prompts in chunks of two blocks, and whose weights do not change."""
    fields = {"enable_chunked_prefill": True, "max_tokens": 2 * BLOCK, "max_requests": 3} | fields
    return EngineHarness(model, keep_on_resume=True, kv_cache_management_mode=management, **fields)


@each_mode
@each_management
def test_requests_in_every_state_live_through_a_suspension(model, management, mode):
    """One in decode after a hit, one in decode after a miss, one between two chunks of its prompt, one waiting."""
    served = served_in_chunks(model, management, async_sched_mode=mode)
    prefix = tokens(2, 0, seed=1)
    served.send(prefix + tokens(0, 9, seed=2))
    decoding = [served.add(prefix + tokens(0, 7, seed=3), 30), served.add(tokens(1, 20, seed=4), 30)]
    served.step(4)
    chunked = served.add(prefix + tokens(4, 11, seed=5), 5)
    waiting = served.add(prefix + tokens(0, 30, seed=6), 5)
    served.step(1)
    assert served.context.chunked_prefill_request_id == chunked
    assert 2 * BLOCK < served.engine.get_request(chunked).finished_chunk_token_count < 6 * BLOCK
    before = {number: len(served.engine.get_request(number).generated_tokens) for number in decoding}
    assert min(before.values()) > 1 and waiting in served.engine.waiting_request_ids

    served.suspend_and_resume()
    served.finish()
    cached = [served.finished[number].num_cached_tokens for number in (*decoding, chunked, waiting)]
    if management == RECOMPUTE:
        # The chunked one found again what the first had computed again: it counts what it skipped, once.
        assert cached[:3] == [2 * BLOCK, 0, 2 * BLOCK]
        for number in decoding:
            parts = served.records[number].requests
            assert [len(part.generated_tokens) for part in parts] == [before[number], 30 - before[number]]
    else:
        assert cached == [2 * BLOCK, 0, 2 * BLOCK, 2 * BLOCK]
    assert served.send(prefix + tokens(4, 12, seed=5)).num_cached_tokens >= 2 * BLOCK
    served.check()


@pytest.mark.parametrize("slots", [32, None])
def test_a_capture_on_resume_starts_running_requests_over_and_says_so(model, slots, monkeypatch, caplog):
    """If offloaded buffers may move, CUDA graphs are captured again, which resets the context."""
    served = served_in_chunks(model, OFFLOAD, slots=slots)
    prefix = tokens(2, 0, seed=1)
    served.send(prefix + tokens(0, 9, seed=2))
    running = [served.add(prefix + tokens(0, 7, seed=3), 30), served.add(tokens(1, 20, seed=4), 30)]
    aborted = served.add(tokens(1, 3, seed=7), 30)
    served.step(4)
    assert served.engine.abort_request(aborted)
    chunked = served.add(tokens(6, 11, seed=5), 5)
    waiting = served.add(prefix + tokens(0, 30, seed=6), 5)
    served.step(2)
    assert served.context.chunked_prefill_request_id == chunked
    served.engine.cuda_graph_impl = "local"
    monkeypatch.setattr(DynamicInferenceEngine, "create_cuda_graphs", lambda engine: engine.context.reset())
    kept = served.context.prefix_stats().slots_used
    with caplog.at_level("WARNING"):
        served.suspend_and_resume()
    said = f"drops {kept} cached states and restarts {len(running)} running requests"
    assert bool(kept) == bool(slots) and sum(said in record.message for record in caplog.records) == 1
    served.run()
    served.check(*running, chunked, waiting)
    served.check_drained()
    assert served.send(prefix + tokens(0, 12, seed=5)).num_cached_tokens == (2 * BLOCK if slots else 0)


def test_a_chunked_prefill_that_starts_over_reports_its_prompt_once(model):
    """Its first chunks had already returned log-probs of the prompt."""
    fields = {"enable_chunked_prefill": True, "max_tokens": BLOCK, "materialize_only_last_token_logits": False}
    served = EngineHarness(model, kv_cache_management_mode=RECOMPUTE, **fields)
    prompt = tokens(4, 20, seed=1)
    number = served.add(prompt, params={"skip_prompt_log_probs": False, "top_n_logprobs": 2})
    served.step(3)
    assert served.context.chunked_prefill_request_id == number
    assert served.engine.get_request(number).prompt_log_probs
    served.suspend_and_resume()
    served.run()
    request = served.finished[number]
    assert len(request.prompt_log_probs) == len(request.prompt_top_n_logprobs) == len(prompt) - 1
    assert len(request.generated_log_probs) == len(request.generated_top_n_logprobs) == 4
    served.check()
    # Compared with megatron, not with the reference: what megatron reports at the end of a chunk is of another token.
    whole = EngineHarness(model, slots=None, **fields)
    whole.send(prompt, params={"skip_prompt_log_probs": False, "top_n_logprobs": 2})
    assert request.prompt_log_probs == pytest.approx(whole.finished[1].prompt_log_probs, abs=LOG_PROB_NOISE)


@each_management
def test_requests_aborted_and_refused_while_suspended_stay_so(model, management):
    served = served_in_chunks(model, management, max_requests=2)
    kept = served.add(tokens(0, 50, seed=1), 12)
    active = served.add(tokens(0, 50, seed=2), 12)
    served.step(3)
    served.engine.suspend()
    waiting = served.add(tokens(1, 0, seed=4), 5)
    with pytest.warns(UserWarning, match="failed to be added"):
        refused = served.add(tokens(100, 0, seed=5))
    assert served.engine.abort_request(active) and served.engine.abort_request(waiting)
    served.engine.resume()
    served.check_integrity()
    served.run()
    assert sorted(served.finished) == [kept, active, waiting, refused]
    assert served.finished[refused].failed() and served.finished[waiting].generated_tokens == []
    assert 0 < len(served.finished[active].generated_tokens) < 12
    assert_matches(served.reference, served.finished[active])
    served.check(kept)
    served.check_drained()
    assert served.step() == []  # an idle step


# -- forget ------------------------------------------------------------------------------------------------------------

FORGET = {
    "context.invalidate": lambda engine: engine.context.invalidate(),
    "engine.invalidate": lambda engine: engine.invalidate(),
    "context.reset": lambda engine: engine.context.reset(),
    "context.reset_metadata": lambda engine: engine.context.reset_metadata(),
    "engine.reset": lambda engine: engine.reset(),
}
KEEP = {
    "context.reset": lambda engine: engine.context.reset(preserve_prefix_cache=True),
    "context.reset_metadata": lambda engine: engine.context.reset_metadata(preserve_prefix_cache=True),
}


@pytest.mark.parametrize("how", FORGET)
def test_forgetting_forgets_kv_and_states_together(model, how):
    served = EngineHarness(model)
    shared = tokens(3, 0, seed=1)
    served.send(shared + tokens(0, 20, seed=2))
    FORGET[how](served.engine)
    served.check_drained()
    assert served.cache.memory_use().keyed_blocks == served.kept_states == 0
    served.send(tokens(1, 5, seed=3))  # block ids are handed out in another order than before
    longer = served.send(shared + tokens(2, 20, seed=4))  # its only state: after 5 blocks
    miss = served.send(shared + tokens(0, 30, seed=5))  # so here is KV without a state
    hit = served.send(shared + tokens(0, 40, seed=6))
    assert [request.num_cached_tokens for request in (longer, miss, hit)] == [0, 0, 3 * BLOCK]
    served.finish()


@pytest.mark.parametrize("how", KEEP)
def test_a_reset_may_keep_the_cache(model, how):
    """As in megatron's dummy step of an idle expert-parallel rank."""
    served = EngineHarness(model)
    prompt = tokens(2, 20, seed=1)
    served.send(prompt)
    KEEP[how](served.engine)
    served.check_drained()
    assert served.send(prompt).num_cached_tokens == 2 * BLOCK
    served.check()


# -- forwards that fail ------------------------------------------------------------------------------------------------


class Boom(Exception):
    """Raised in a step."""


def check_reset_is_needed(served: EngineHarness) -> None:
    """Checks that each step asks for it; resets; checks that nothing is held."""
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^[^\n]*engine\.reset\(\)[^\n]*$"):
            served.step()
    served.engine.reset()
    served.check_drained()


@each_mode
@pytest.mark.parametrize("phase", ["prefill", "chunk", "decode"])
def test_a_forward_that_raises(model, phase, mode, monkeypatch):
    served = EngineHarness(
        model,
        async_sched_mode=mode,
        enable_chunked_prefill=phase == "chunk",
        max_tokens=(3 if phase == "chunk" else 8) * BLOCK,
    )
    prefix = tokens(2, 0, seed=1)
    served.send(prefix + tokens(0, 9, seed=2))
    served.add(prefix + tokens(1, 20, seed=3), 9)  # resumes, and would keep another state
    if phase != "prefill":
        served.add(tokens(2, 10, seed=4), 9)
    if phase == "decode":
        served.step(4)
    elif phase == "chunk":
        served.step(1)
        assert served.context.chunked_prefill_request_id == 3
    layer = model.decoder.layers[model.hybrid_config.layer_pattern.rindex("M")]  # those before it write their states
    monkeypatch.setattr(layer, "forward", raising(Boom, monkeypatch.undo))
    with pytest.raises(Boom):
        served.step()
    served.check_integrity()
    # What the forwards before it left (with async scheduling the last one is published in the step that fails).
    left = {"prefill": (2, 1), "chunk": (4, 2), "decode": (5, 3)}[phase]
    assert (served.cache.memory_use().keyed_blocks, served.kept_states) == left
    assert served.cache.stats().slots_used == served.kept_states  # reserved ones are free again
    check_reset_is_needed(served)
    assert served.cache.memory_use().keyed_blocks == served.kept_states == 0
    first = served.send(prefix + tokens(1, 20, seed=3), count=9)
    again = served.send(prefix + tokens(1, 20, seed=3), count=9)
    assert [first.num_cached_tokens, again.num_cached_tokens] == [0, 3 * BLOCK]
    served.finish()


@pytest.mark.parametrize("what", ["zero_live_states", "initialize_attention_state"])
def test_a_step_that_raises_before_its_forward_needs_a_reset(model, what, monkeypatch):
    """Zeros of live states, moves and copies are launched there; some may be lost."""
    served = EngineHarness(model)
    prompt = tokens(2, 9, seed=1)
    served.add(prompt, 4)
    owner = served.context if what == "zero_live_states" else DynamicInferenceContext
    monkeypatch.setattr(owner, what, raising(Boom, monkeypatch.undo))
    with pytest.raises(Boom):
        served.step()
    check_reset_is_needed(served)
    again = served.add(prompt, 4)
    served.run()
    served.check(again)


# Where a step does its bookkeeping, and what is called there: of the engine, its context or its controller.
BOOKKEEPING = {
    "legacy": ("update_requests", "_transfer_samples_to_cpu"),
    "async": ("resolve_requests", "prepare_requests", "commit_sampled_tokens", "_build_async_sched_request_state"),
    "both": ("schedule_waiting_requests", "post_process_requests", "async_bookkeep", "take_stopped_ids"),
}


FAILURES = [(mode, name, 32, Boom) for mode in MODES for name in (*BOOKKEEPING[mode], *BOOKKEEPING["both"])]
FAILURES += [
    ("legacy", "update_requests", None, Boom),
    ("async", "resolve_requests", None, asyncio.CancelledError),
    ("legacy", "post_process_requests", 32, asyncio.CancelledError),
]


@pytest.mark.parametrize(("mode", "name", "slots", "error"), FAILURES)
def test_a_step_that_raises_in_its_bookkeeping_needs_a_reset(model, slots, mode, name, error, monkeypatch):
    """Rows, states and tokens may not belong together: who went on would get, and cache, wrong answers."""
    served = EngineHarness(model, async_sched_mode=mode, slots=slots)
    prompts = [tokens(2, number, seed=1 + number) for number in (9, BLOCK - 3)]
    for prompt in prompts:
        served.add(prompt, 12)
    served.step(4)
    owner = next(each for each in (served.engine, served.context, served.engine.controller) if hasattr(each, name))
    served.add(tokens(1, 5, seed=9), 4)  # is scheduled in the step that raises
    monkeypatch.setattr(owner, name, raising(error))
    with pytest.raises(error):
        served.step(5)
    monkeypatch.undo()
    check_reset_is_needed(served)
    again = [served.add(prompt, 12) for prompt in prompts]
    served.run()
    served.check(*again)


@pytest.mark.parametrize("slots", [None, 32])
def test_drafts_that_a_failed_step_accepted_are_forgotten(tiny_mtp, slots, monkeypatch):
    """Megatron forgets them at the end of a step, and refuses every prefill that finds some."""
    served = Drafting(tiny_mtp, 1, async_sched_mode="legacy", slots=slots)
    prompt = tokens(2, 30, seed=1)
    accepted, update = served.engine.controller._accepted_tokens_per_request, served.context.update_requests

    def failing(*args: Any, **kwargs: Any) -> Any:
        if bool((accepted != -1).any()):
            monkeypatch.undo()
            raise Boom
        return update(*args, **kwargs)

    monkeypatch.setattr(served.context, "update_requests", failing)
    served.ask(prompt, 20)
    with pytest.raises(Boom):
        served.run()
    assert bool((accepted != -1).any())
    served.engine.reset()
    again = served.ask(prompt, 4)
    served.run()
    served.check(again)


@pytest.mark.parametrize("name", ["add_request", "initialize_attention_state"])
@pytest.mark.parametrize("raises", [False, True])
def test_megatron_does_the_bookkeeping_of_a_step_with_one_thread(model, monkeypatch, name, raises):
    """To split an array of a prompt's length among all threads takes longer than the rest of it. They are back afterwards."""
    served, original, seen = EngineHarness(model), getattr(DynamicInferenceContext, name), []

    def observed(*args, **options):
        seen.append(torch.get_num_threads())
        if raises:
            raise ValueError("an error of this test")
        return original(*args, **options)

    monkeypatch.setattr(DynamicInferenceContext, name, observed)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ValueError) if raises else nullcontext():
            served.send(tokens(0, 2 * BLOCK, seed=1), count=1)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
