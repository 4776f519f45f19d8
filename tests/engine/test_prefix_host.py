"""The host tier in the engine: evicted entries come back bit by bit, and failures only cost time."""

from __future__ import annotations

import logging
from itertools import groupby
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.mcore.state import moves as host
from megatron_hybrid_prefix.tiers.units import EntryKind, Tag
from megatron_hybrid_prefix.transfers import entry_copies, to_device
from tests.harness.cached import on_device as block_of
from tests.harness.engine_helpers import random_tokens
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, raising, tokens
from tests.harness.mutants import MUTANTS, check_answers, mutated_resume
from tests.harness.selection import mostly_slow, mostly_slow_rows

HOST_GB = 0.05  # some hundred states of `tiny`


def small(model: Any, **fields: Any) -> EngineHarness:
    """On the device there is room for one request of seven blocks with its state, and for two states in other pages."""
    return EngineHarness(model, **({"slots": 2, "blocks": 11, "host_gb": HOST_GB, "max_requests": 2} | fields))


def push_out(served: EngineHarness, seed: int = 900, count: int = 3) -> None:
    """Sends other prompts until the device has nothing of the earlier ones."""
    for number in range(count):
        served.send(tokens(6, 7, seed=seed + number), count=1)


def on_device(served: EngineHarness, prompt: list[int]) -> int:
    """Number of the prompt's blocks on the device."""
    return sum(block_of(served.cache, key) is not None for key in served.cache.chain(prompt).keys)


def state_of(served: EngineHarness, prompt: list[int]) -> dict[str, torch.Tensor]:
    """The state on the device after the prompt's last full block."""
    slot = served.cache.node(served.cache.chain(prompt).keys[-1]).slot
    return {name: tensor.clone() for name, tensor in served.context.shared_memory.state(slot).items()}


def kv_of(served: EngineHarness, prompt: list[int]) -> torch.Tensor:
    """KV of the prompt's full blocks."""
    blocks = [block_of(served.cache, key) for key in served.cache.chain(prompt).keys]
    return served.context.memory_buffer[:, :, blocks].clone()


def test_cold_device_hit_and_host_hit_are_the_same(model):
    served = small(model, async_sched_mode="async")
    shared = tokens(4, 0, seed=1)
    prompt = shared + random_tokens(9, seed=2)
    cold = served.send(prompt)
    state, kv = state_of(served, prompt), kv_of(served, prompt)
    before = served.context.prefix_stats()
    hit = served.send(prompt)
    after = served.context.prefix_stats()
    assert after.reused_tokens_device - before.reused_tokens_device == 4 * BLOCK and after.tiers["host"].loads == 0
    push_out(served)
    assert on_device(served, prompt) == 0
    loaded = served.send(prompt)
    stats = served.context.prefix_stats()
    assert stats.reused_tokens_host == 4 * BLOCK == loaded.num_cached_tokens
    assert stats.tiers["host"].loads == 5 and stats.fallbacks == {}
    assert cold.generated_tokens == hit.generated_tokens == loaded.generated_tokens
    assert hit.generated_log_probs == loaded.generated_log_probs
    for name, tensor in state_of(served, prompt).items():
        assert torch.equal(tensor, state[name])
    assert torch.equal(kv_of(served, prompt), kv)
    served.finish()


def noted_launches(served: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is launched from now on: forwards, gathers, copies to the host, loads."""
    order: list[str] = []
    model = served.engine.controller.inference_wrapped_model
    for owner, name in (
        (entry_copies.EntryCopies, "gather"),
        (entry_copies.EntryCopies, "to_pages"),
        (to_device.ToDevice, "run"),
        (model, "run_one_forward_step"),
    ):
        run = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *args, run=run, name=name, **more: (order.append(name.split("_")[-1]), run(*args, **more))[1],
        )
    return order


def test_a_forward_does_not_wait_until_copies_to_the_host_are_launched(model, monkeypatch):
    """Entries are gathered before the forward that needs their room, and copied to the host after its launch."""
    served = small(model, async_sched_mode="async")
    push_out(served)
    order = noted_launches(served, monkeypatch)
    served.send(tokens(6, 7, seed=990), count=1)
    gathers = order.count("gather")
    assert gathers and order.count("pages") == gathers
    assert order[: gathers + 1] == [*gathers * ["gather"], "step"]
    served.check()


def test_copies_to_the_host_are_launched_if_nobody_says_when_a_forward_is(model, monkeypatch):
    """With a controller of somebody else."""
    served = small(model)
    monkeypatch.setattr(served.context.host_moves, "send", lambda: None)
    push_out(served)
    order = noted_launches(served, monkeypatch)
    served.send(tokens(6, 7, seed=990), count=1)
    assert order.index("gather") < order.index("step") < order.index("pages")


def test_a_load_does_not_wait_until_copies_to_the_host_are_launched(model, monkeypatch):
    """Those of what it evicts."""
    served = small(model, async_sched_mode="async")
    prompt = tokens(4, 0, seed=1) + random_tokens(9, seed=2)
    served.send(prompt, count=1)
    push_out(served)
    order = noted_launches(served, monkeypatch)
    served.send(prompt, count=1)
    assert order.count("gather") == order.count("pages")
    assert order.index("gather") < order.index("run") < order.index("step") < order.index("pages")
    served.check()


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_a_host_hit_reads_what_it_loaded(model, mutant):
    check_host_hit(model, mutant)


@pytest.mark.parametrize("mutant", mostly_slow([None, *MUTANTS], None, "ssm_zeroed"))
def test_a_host_hit_of_gated_delta_net(tiny_mixed, mutant):
    check_host_hit(tiny_mixed, mutant)


def check_host_hit(model, mutant):
    served = small(model, slots=6)
    prompt = tokens(3, 9, seed=3)
    served.send(prompt, count=1)
    push_out(served, count=6)
    with mutated_resume(served.engine, mutant):
        served.send(prompt, count=8)
    assert served.context.prefix_stats().reused_tokens_host == 3 * BLOCK
    check_answers(served, mutant)


@pytest.mark.parametrize("chunk", [None, 100])
def test_half_from_the_device_half_from_the_host(model, chunk):
    chunked = {} if chunk is None else {"enable_chunked_prefill": True, "max_tokens": chunk}
    served = small(model, async_sched_mode="async", **chunked)
    prompt = tokens(6, 5, seed=4)
    served.send(prompt, count=1)
    served.send(tokens(4, 7, seed=5), count=1)  # takes some of its blocks, deepest first, and both slots
    left = on_device(served, prompt)
    assert 0 < left < 6
    before = served.context.prefix_stats()
    served.send(prompt + random_tokens(20, seed=6), count=6)
    stats = served.context.prefix_stats()
    assert stats.reused_tokens_host - before.reused_tokens_host == 6 * BLOCK
    assert stats.tiers["host"].loads - before.tiers["host"].loads == 6 - left + 1
    served.finish()


def test_a_load_takes_place_while_others_run(model):
    served = small(model, async_sched_mode="async", blocks=16)
    prompt = tokens(4, 9, seed=1)
    served.send(prompt)
    push_out(served, count=5)
    running = served.add(random_tokens(30, seed=7), 40)
    served.step(3)
    loading = served.add(prompt, 4)
    served.step()
    assert {running, loading} <= served.cache.live.keys(), "nobody waits for a load from the host"
    served.run()
    assert served.context.prefix_stats().reused_tokens_host == 4 * BLOCK
    served.finish()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def spoil(served: EngineHarness, prompt: list[int], what: EntryKind) -> None:
    """Flips one bit of an entry on the host."""
    mover, tier = served.context.host_moves, served.cache._device.host
    node = served.cache.node(served.cache.chain(prompt).keys[-1])
    entry = (tier.kv if what == EntryKind.KV else tier.of_states)[node]
    mover.pages.memory[entry.pages[0] * mover.pages.page_bytes + 17] ^= 4


FAULTS = [
    *(("state bit", "async", None), ("load raises", "legacy", None), ("tag", "async", 100)),
    *(("kv bit", "legacy", None), ("store raises", "async", None)),
]


@pytest.mark.parametrize(("fault", "mode", "chunk"), mostly_slow_rows(FAULTS, *FAULTS[:2]))
def test_a_fault_costs_time_only(model, fault, mode, chunk, caplog, monkeypatch):
    chunked = {} if chunk is None else {"enable_chunked_prefill": True, "max_tokens": chunk}
    if fault == "store raises":  # by the copy engines, too
        monkeypatch.setattr(entry_copies, "ENGINE_BYTES", 1)
    served = small(model, async_sched_mode=mode, blocks=16, slots=3, **chunked)
    mover = served.context.host_moves
    prompt = tokens(4, 9, seed=1)
    served.send(prompt)

    fails = raising(RuntimeError("the copy engine is on fire"))
    if fault == "store raises":
        monkeypatch.setattr(mover.copies, "to_pages", fails)
    push_out(served, count=5)
    monkeypatch.undo()
    assert on_device(served, prompt) == 0
    if fault == "kv bit":
        spoil(served, prompt, EntryKind.KV)
    elif fault == "state bit":
        spoil(served, prompt, EntryKind.STATE)
    elif fault == "tag":
        node = served.cache.node(served.cache.chain(prompt).keys[-1])
        page = served.cache._device.host.of_states[node].pages[0]
        mover.pages.tags[page] = Tag(kind=EntryKind.STATE, key=node.key, depth_tokens=3 * BLOCK, epoch=0)
    elif fault == "load raises":
        monkeypatch.setattr(mover.to_device, "_load", fails)
    running = served.add(random_tokens(30, seed=7), 30)
    served.step(2)
    with caplog.at_level(logging.ERROR):
        hit = served.add(prompt + random_tokens(150, seed=8), 6)
        served.run()
    monkeypatch.undo()
    stats = served.context.prefix_stats()
    assert stats.fallbacks == {"host_load_failed": 1}
    assert sum("the request is recomputed" in record.message for record in caplog.records) == 1
    assert served.finished[hit].num_cached_tokens == 0
    served.finish()
    node = served.cache.node(served.cache.chain(prompt).keys[-1])
    assert node is not None and node not in served.cache._device.host.of_states  # not used again
    assert running in served.finished
    served.send(prompt)
    push_out(served, seed=1900, count=5)
    assert served.context.prefix_stats().reused_tokens_host == 0
    served.send(prompt)  # stored anew
    assert served.context.prefix_stats().reused_tokens_host == 4 * BLOCK
    served.check()


@pytest.mark.parametrize("fault", ["kv", "state", "load raises"])
def test_nobody_samples_from_a_wrong_load(model, fault, monkeypatch):
    """A forward runs on the entries of a load before it is known that they are wrong. With NaN there, sampling raised."""
    served = small(model, async_sched_mode="async", blocks=16)
    mover, prompt = served.context.host_moves, tokens(4, 9, seed=1)
    served.send(prompt)
    push_out(served, count=5)
    if fault == "load raises":
        for tensors in served.context.host_moves.copies.tensors().values():
            for tensor in tensors:
                tensor.fill_(255)  # NaN in any floating type
        monkeypatch.setattr(mover.to_device, "_load", raising(RuntimeError("the copy engine is on fire")))
    else:
        node = served.cache.node(served.cache.chain(prompt).keys[-1])
        tier = served.cache._device.host
        for page in (tier.kv if fault == "kv" else tier.of_states)[node].pages:
            mover.pages.rows[page].fill_(255)  # NaN in any floating type
    hit = served.add(prompt, 4, params={"top_k": 0, "top_p": 0.9, "temperature": 1.0})
    served.run()
    assert len(served.finished[hit].generated_tokens) == 4
    assert served.context.prefix_stats().fallbacks == {"host_load_failed": 1}
    served.check_drained()


def test_no_pinned_memory_no_tier(model, monkeypatch, caplog):
    monkeypatch.setattr(host, "Mover", raising(RuntimeError("cannot allocate memory")))
    with caplog.at_level(logging.WARNING):
        served = small(model)
    assert sum("no host tier" in record.message for record in caplog.records) == 1
    served.send(tokens(4, 9, seed=1))
    push_out(served)
    served.send(tokens(4, 9, seed=1))
    stats = served.context.prefix_stats()
    assert stats.tiers["host"].stores == stats.tiers["host"].loads == stats.tiers["host"].bytes_budget == 0
    served.check()


def test_without_host_memory_there_is_nothing(model, monkeypatch):
    monkeypatch.setattr(host, "Mover", None)  # would be called
    served = small(model, host_gb=0.0)
    assert served.context.host_moves is None and not served.cache._device.below
    served.send(tokens(4, 9, seed=1))
    push_out(served)
    assert not served.cache._device.host.entries()


# -- preemption --------------------------------------------------------------------------------------------------------


def four_at_once(model: Any, *, slots: int = 8, **fields: Any) -> tuple[EngineHarness, list[int]]:
    """Requests that need twelve blocks in the end, with only ten blocks."""
    served = EngineHarness(model, slots=slots, blocks=10, **fields)
    return served, [served.add(tokens(1, 20 + number, seed=60 + number), BLOCK) for number in range(4)]


PREEMPTING = [("async", True, False), ("legacy", False, False), ("async", False, True)]


@pytest.mark.parametrize(("mode", "decode_checkpoints", "chunked"), mostly_slow_rows(PREEMPTING, *PREEMPTING[:2]))
def test_a_preempted_request_goes_on_where_it_was(model, mode, decode_checkpoints, chunked):
    computed = {}
    for host_gb in (HOST_GB, 0.0):
        served, _ = four_at_once(
            model,
            host_gb=host_gb,
            async_sched_mode=mode,
            decode_checkpoints=decode_checkpoints,
            enable_chunked_prefill=chunked,
        )
        served.finish()
        stats = served.context.prefix_stats()
        # Each prompt is counted once; what a preempted request finds of itself is no reuse.
        assert stats.prompt_tokens == stats.computed_prompt_tokens == sum(BLOCK + 20 + number for number in range(4))
        assert stats.reused_tokens == 0 == sum(request.num_cached_tokens for request in served.finished.values())
        assert stats.resumed_tokens > 0 or not host_gb
        computed[host_gb] = stats.recomputed_tokens
        preempted = served.engine.evicted_request_count
        assert preempted > 0 and served.context.prefix_stats().tiers["host"].preempted == (preempted if host_gb else 0)
        if host_gb:
            # Each time just the token that was sampled last had never been computed.
            assert computed[host_gb] == preempted
    assert computed[0.0] > computed[HOST_GB]


@pytest.mark.parametrize(("mode", "decode_checkpoints"), [("async", True), ("legacy", False)])
def test_states_of_answers_and_preempted_requests_are_sent_after_the_next_forward(
    model, mode, decode_checkpoints, monkeypatch
):
    served, _ = four_at_once(
        model, host_gb=HOST_GB, slots=2, async_sched_mode=mode, decode_checkpoints=decode_checkpoints
    )
    order = noted_launches(served, monkeypatch)
    served.run()
    served.check()
    assert served.engine.evicted_request_count > 0
    between = [list(launches) for is_step, launches in groupby(order, lambda name: name == "step") if not is_step]
    sent = [launches for launches in between[:-1] if "pages" in launches]  # the last one is over: nothing waits
    assert sent
    for launches in sent:
        last = len(launches) - launches[::-1].index("pages")
        assert set(launches[:last]) == {"pages"}, "what was gathered before the forward; the next waits"


def test_swapped_out_data_is_private_to_its_request(model):
    served, ids = four_at_once(model, host_gb=HOST_GB)
    served.step_until(lambda: served.context.prefix_stats().tiers["host"].preempted)
    assert served.cache._device.host.private
    preempted = next(i for i in ids if i in served.cache._requests.swapped_out)
    assert served.engine.abort_request(preempted)
    assert not served.cache._device.host.private
    served.run()
    served.check(*[i for i in ids if i != preempted])
    served.check_drained()


def test_a_preempted_request_that_cannot_go_on_starts_over(model):
    served, _ = four_at_once(model, host_gb=HOST_GB)
    served.step_until(lambda: served.context.prefix_stats().tiers["host"].preempted)
    mover, tier = served.context.host_moves, served.cache._device.host
    mover.to_host.send()
    for entry in tier.private:
        mover.pages.memory[entry.pages[0] * mover.pages.page_bytes] ^= 1
    served.run()
    assert served.context.prefix_stats().fallbacks == {"host_load_failed": 1}
    served.finish()
