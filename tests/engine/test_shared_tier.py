"""The shared folder in the engine: other engines resume what one computed, and faults cost time only."""

from __future__ import annotations

import argparse
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.mcore.entrypoints import arguments
from megatron_hybrid_prefix.tiers import file as file_tier
from megatron_hybrid_prefix.tiers import folder as folders
from megatron_hybrid_prefix.tiers.file import HEADER_BYTES
from megatron_hybrid_prefix.tiers.units import Load, LoadState
from tests.harness.engine_helpers import random_tokens
from tests.harness.lifecycle_helpers import BLOCK, MODES, EngineHarness, tokens
from tests.harness.limits import HANG_S, wait_until
from tests.harness.mutants import MUTANTS, check_answers, mutated_resume
from tests.harness.selection import mostly_slow
from tests.harness.shared_tiers import check_ranks, stats_of, written
from tests.harness.workers.launch import run_ranks

each_mode = pytest.mark.parametrize("mode", mostly_slow(MODES, "async"))
PROMPT = tokens(4, 9, seed=1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "a secret for the tests")
    return tmp_path / "cache"


def url(folder: Path, **parameters: Any) -> str:
    parameters = {"gb": 1, "min_tokens": 0, "wait_s": HANG_S} | parameters
    return f"file://{folder}?" + "&".join(f"{name}={value}" for name, value in parameters.items())


def start(model: Any, folder: Path, parameters: dict[str, Any] | None = None, **fields: Any) -> EngineHarness:
    """An engine as of a new process."""
    defaults = {
        "slots": 6,
        "blocks": 20,
        "host_gb": 0.01,
        "max_requests": 2,
        "shared": url(folder, **(parameters or {})),
    }
    return EngineHarness(model, **(defaults | fields))


def computed(model: Any, folder: Path, **fields: Any) -> EngineHarness:
    """An engine that has computed the prompt and written it to the folder."""
    served = start(model, folder, **fields)
    served.send(PROMPT)
    return written(served)


def tier_of(served: EngineHarness) -> Any:
    return served.cache._store.host.behind.tier


def entries(folder: Path, kind: str = "") -> list[Path]:
    return sorted(path for path in folder.rglob(f"{kind}*-*-*-*"))


@each_mode
def test_another_engine_resumes_what_one_computed(model, folder, mode):
    first = start(model, folder, async_sched_mode=mode)
    cold = first.send(PROMPT)
    hit = first.send(PROMPT)
    state = {name: each.clone() for name, each in state_of(first).items()}
    written(first)
    assert (stats_of(first).kv_blocks, stats_of(first).states) == (4, 1) and stats_of(first).bytes_stored > 0
    second = start(model, folder, async_sched_mode=mode)
    loaded = second.send(PROMPT)
    stats = second.context.prefix_stats()
    assert loaded.num_cached_tokens == 4 * BLOCK == stats.reused_tokens_host
    assert stats.tiers["shared"].loads == 5 and stats.fallbacks == {} == stats.tiers["shared"].faults
    assert cold.generated_tokens == hit.generated_tokens == loaded.generated_tokens
    assert hit.generated_log_probs == loaded.generated_log_probs
    assert all(torch.equal(each, state[name]) for name, each in state_of(second).items())
    for served in (first, second):
        served.check()
        served.check_drained()


def state_of(served: EngineHarness) -> dict[str, torch.Tensor]:
    slot = served.cache.node(served.cache.chain(PROMPT).keys[-1]).slot
    return served.context.shared_memory.state(slot)


@pytest.mark.parametrize("mutant", mostly_slow([None, *MUTANTS], "ssm_zeroed"))
def test_a_hit_reads_what_it_loaded(model, folder, mutant):
    computed(model, folder)
    served = start(model, folder)
    served.send(tokens(6, 7, seed=900), count=1)  # other states, for a mutant
    with mutated_resume(served.engine, mutant):
        served.send(PROMPT, count=8)
    assert served.context.prefix_stats().reused_tokens_host == 4 * BLOCK
    check_answers(served, mutant)


@pytest.mark.slow
def test_two_engines_take_turns_in_conversations(model, folder):
    """Each turn goes to the other engine, with little memory on the device and the host."""
    served = [start(model, folder, slots=2, blocks=16, host_gb=0.0006) for _ in range(2)]
    history = {session: tokens(2, 9, seed=50 + session) for session in range(3)}
    reused = 0
    for turn in range(4):
        for session in history:
            one = served[(turn + session) % 2]
            tier_of(one).folder.refresh()
            answer = one.send(history[session], count=6)
            written(one)
            reused += bool(answer.num_cached_tokens)
            history[session] += [*answer.generated_tokens, *random_tokens(44, seed=1000 + 10 * session + turn)]
    assert reused == 9  # all but the first turns
    for one in served:
        assert stats_of(one).loads > 0 and one.context.prefix_stats().fallbacks == {}
        one.check()
        one.check_drained()


@pytest.mark.parametrize("min_blocks", mostly_slow([0, 3], 0))
def test_the_next_turn_resumes_from_the_end_of_the_answer(model, folder, min_blocks):
    """The process is gone right after the answer: nothing was evicted. A short answer is not worth a state."""
    first = start(model, folder, {"min_tokens": min_blocks * BLOCK})
    answer = first.send(PROMPT, count=2 * BLOCK)
    written(first)
    assert stats_of(first).states == (1 if min_blocks else 2)
    history = [*PROMPT, *answer.generated_tokens, *random_tokens(20, seed=9)]
    second = start(model, folder, {"min_tokens": min_blocks * BLOCK})
    assert second.send(history).num_cached_tokens == (4 if min_blocks else 6) * BLOCK
    assert second.context.prefix_stats().fallbacks == {}
    second.check()
    second.check_drained()


def test_only_what_is_worth_a_load_is_written_and_loaded(model, folder):
    served = start(model, folder, {"min_tokens": 3 * BLOCK})
    short = tokens(2, 9, seed=3)
    served.send(short)
    served.send(PROMPT)
    written(served)
    assert (stats_of(served).kv_blocks, stats_of(served).states) == (4, 1)
    again = start(model, folder, {"min_tokens": 3 * BLOCK})
    again.send(PROMPT[: 2 * BLOCK + 1])  # two blocks on the device now
    assert again.send(PROMPT).num_cached_tokens == 2 * BLOCK and stats_of(again).loads == 0


@pytest.mark.slow
def test_guesses_are_not_written_until_they_are_used(model, folder):
    served = start(model, folder, retention_interval_tokens=BLOCK)
    served.send(PROMPT)
    assert stats_of(written(served)).states == 1
    served.send([*PROMPT[: 2 * BLOCK], *random_tokens(30, seed=8)])
    assert stats_of(written(served)).states == 2
    served.check()


@pytest.mark.slow
def test_salts_adapters_and_secrets_do_not_match(model, folder, monkeypatch):
    first = start(model, folder)
    for attributes in ({"cache_salt": "a"}, {"cache_adapter": "b"}):
        first.send(PROMPT, **attributes)
    written(first)
    assert (stats_of(first).kv_blocks, stats_of(first).states) == (4, 1), "nobody can ask for those of the adapter"
    second = start(model, folder)
    hits = [second.send(PROMPT, **each).num_cached_tokens for each in ({}, {"cache_salt": "b"}, {"cache_adapter": "b"})]
    assert hits == [0, 0, 0]  # what an adapter's weights are, only its process knows
    assert second.send(PROMPT, cache_salt="a").num_cached_tokens == 4 * BLOCK
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "another secret for the tests")
    assert start(model, folder).send(PROMPT, cache_salt="a").num_cached_tokens == 0


@pytest.mark.parametrize("other", mostly_slow(["weights", "dtype", "block", "setting", "name"], "weights"))
def test_another_model_or_layout_does_not_match(model, platform, folder, other):
    from megatron_hybrid_prefix.models import build_hybrid_model

    computed(model, folder)
    fields: dict[str, Any] = {}
    twin, parameters = build_hybrid_model("tiny", seed=0, platform=platform), {}
    if other == "weights":
        with torch.no_grad():
            list(twin.parameters())[3].flatten()[1] += 0.5
    elif other == "dtype":
        fields["state_dtype"] = "bfloat16"
    elif other == "block":
        fields["block_size_tokens"] = 2 * BLOCK
    elif other == "setting":
        for module in twin.modules():
            if hasattr(module, "eps"):
                module.eps *= 2
    else:
        parameters["weights"] = "another"
    assert start(twin, folder, parameters, **fields).send(PROMPT).num_cached_tokens == 0


def test_new_weights_and_the_old_ones_again(model, folder):
    served = start(model, folder)
    served.send(PROMPT)
    written(served)
    weight = next(module for module in model.modules() if type(module).__name__ == "SlotMambaMixer").out_proj.weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(1.5)
        served.engine.invalidate()
        assert served.send(PROMPT).num_cached_tokens == 0
        served.check(2)
        other = start(model, folder)
        assert other.send(PROMPT).num_cached_tokens == 0  # its epoch is another, so its keys are
    finally:
        with torch.no_grad():
            weight.copy_(before)
        served.engine.invalidate()
    again = start(model, folder)
    assert again.send(PROMPT).num_cached_tokens == 4 * BLOCK
    again.check()


# -- faults ------------------------------------------------------------------------------------------------------------


def spoil(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = entries(folder, "kv" if "kv" in fault else "state")[0]
    content = bytearray(path.read_bytes())
    if "bit" in fault:
        content[HEADER_BYTES + 17] ^= 4
    elif "truncated" in fault:
        del content[-100:]
    path.write_bytes(content)
    if "deleted" in fault:
        path.unlink()
    elif "folder" in fault:
        shutil.rmtree(folder)
    elif "unreadable" in fault:

        def fails(*arguments: Any) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(file_tier.os, "preadv", fails)


# Reasons of the folder, and of the cache.
FAULTS = {
    "kv bit": ("wrong", "host_load_failed"),
    "state bit": ("wrong", "host_load_failed"),
    "kv truncated": ("not_valid", "tier_load_missing"),
    "state truncated": ("not_valid", "tier_load_missing"),
    "kv deleted": ("gone", "tier_load_missing"),
    "folder deleted": ("gone", "tier_load_missing"),
    "unreadable": ("read_EIO", "tier_load_missing"),
}


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, "state bit", "kv deleted"))
def test_a_fault_is_a_counted_miss(model, folder, fault, monkeypatch):
    reason, fallback = FAULTS[fault]
    computed(model, folder)
    served = start(model, folder, {"refresh_s": 10.0**6})  # else the thread that looks may see it first
    spoil(folder, fault, monkeypatch)
    answer = served.send(PROMPT)
    monkeypatch.undo()
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "a secret for the tests")
    assert answer.num_cached_tokens == 0
    assert served.context.prefix_stats().fallbacks == {fallback: 1} | (
        {} if fallback == "host_load_failed" else {"host_load_given_up": 1}
    )
    assert stats_of(served).faults[reason] > 0 and stats_of(served).failed > 0
    served.check()
    served.check_drained()
    written(served)  # what was deleted is there again
    tier_of(served).folder.refresh()
    again = start(model, folder)
    assert again.send(PROMPT).num_cached_tokens == 4 * BLOCK
    again.check()


@pytest.mark.parametrize("fault", mostly_slow(["full disk", "read-only"], "full disk"))
def test_a_folder_that_takes_nothing_equals_no_folder(model, folder, fault, monkeypatch, caplog):
    served = start(model, folder)

    def fails(file: int, content: memoryview) -> None:
        raise OSError(28, "No space left on device") if fault == "full disk" else OSError(30, "Read-only file system")

    monkeypatch.setattr(folders, "write_all", fails)
    with caplog.at_level(logging.ERROR):
        served.send(PROMPT)
        written(served)
    faults = stats_of(served).faults
    if fault == "full disk":  # writing stops at the first error, but every thread may be in the middle of a write
        assert set(faults) == {"write_ENOSPC", "no_room"} and sum(faults.values()) == 5
    else:
        assert faults == {"write_EROFS": 5}
    assert stats_of(served).full == 5 == stats_of(served).stores and entries(folder) == []
    assert len(caplog.records) == 1
    assert served.send(PROMPT).num_cached_tokens == 4 * BLOCK  # on the device
    served.check()


class Gate:
    """A disk that answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.asked = threading.Event(), threading.Event()
        read_file = file_tier.read_file

        def slow(*arguments: Any) -> Any:
            self.asked.set()
            assert self.opened.wait(HANG_S)
            return read_file(*arguments)

        monkeypatch.setattr(file_tier, "read_file", slow)


def asks_the_disk(served: Any, disk: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the thread that reads runs: it has asked the disk before the request gives up."""
    behind = served.context.host_moves.arena.behind
    fetched = behind.fetched

    def fetched_once_asked(load: Load, wait_s: float = 0.0) -> bool | None:
        assert disk.asked.wait(HANG_S)
        return fetched(load, wait_s)

    monkeypatch.setattr(behind, "fetched", fetched_once_asked)


def test_a_slow_disk_is_a_miss(model, folder, monkeypatch):
    """The request does not wait for longer than it may; others do not wait at all; later the disk is used again."""
    computed(model, folder)
    served = start(model, folder, {"wait_s": 0.05})
    disk = Gate(monkeypatch)
    asks_the_disk(served, disk, monkeypatch)
    assert served.send(PROMPT).num_cached_tokens == 0
    assert served.context.prefix_stats().fallbacks == {"tier_load_late": 1, "host_load_given_up": 1}
    served.engine.reset()
    wait_until(tier_of(served)._is_stuck, "the read takes longer than a request waits")
    assert served.send(PROMPT).num_cached_tokens == 0
    assert set(stats_of(served).faults) == {"stuck"}
    disk.opened.set()
    wait_until(lambda: not tier_of(served)._reads, "the disk answers")
    served.engine.reset()
    monkeypatch.setattr(tier_of(served), "wait_s", HANG_S)
    assert served.send(PROMPT).num_cached_tokens == 4 * BLOCK
    served.check()
    served.check_drained()


def test_a_late_load_costs_nothing_of_what_its_request_stores(model, folder, monkeypatch):
    """The pages of the late load are still being filled: the request's own entries go elsewhere, and come back."""
    computed(model, folder)
    served = start(model, folder, {"wait_s": 0.05})
    disk = Gate(monkeypatch)
    asks_the_disk(served, disk, monkeypatch)
    served.send(PROMPT)
    assert served.context.prefix_stats().fallbacks == {"tier_load_late": 1, "host_load_given_up": 1}
    for seed in range(6):  # the prompt has to leave the device
        served.send(tokens(4, 5, seed=800 + seed))
    disk.opened.set()
    wait_until(lambda: not tier_of(served)._reads, "the disk answers")
    monkeypatch.setattr(tier_of(served), "wait_s", HANG_S)
    assert served.send(PROMPT).num_cached_tokens == 4 * BLOCK
    assert served.context.prefix_stats().fallbacks == {"tier_load_late": 1, "host_load_given_up": 1}
    served.check()
    served.check_drained()


def test_a_request_is_admitted_while_its_entries_are_read(model, folder, monkeypatch):
    """The disk answers once the step is being prepared; before that it would be late."""
    computed(model, folder)
    served = start(model, folder)
    disk, context, admitted = Gate(monkeypatch), served.context, list[tuple[int, bool]]()
    prepare = context.initialize_attention_state

    def prepare_and_open(*arguments: Any, **options: Any) -> Any:
        admitted.append((context.total_request_count, any(live.is_loading for live in served.cache.live.values())))
        disk.opened.set()
        return prepare(*arguments, **options)

    monkeypatch.setattr(context, "initialize_attention_state", prepare_and_open)
    assert served.send(PROMPT).num_cached_tokens == 4 * BLOCK
    assert admitted[0] == (1, False)
    assert served.context.prefix_stats().fallbacks == {}
    served.check()
    served.check_drained()


@each_mode
def test_entries_of_an_admitted_request_that_do_not_arrive(model, folder, mode):
    """Another request is in the same step; its answer is right, too."""
    computed(model, folder, async_sched_mode=mode)
    served = start(model, folder, {"refresh_s": 10.0**6}, async_sched_mode=mode)
    for path in entries(folder, "state"):
        path.unlink()
    missed, other = served.add(PROMPT, 4), served.add(random_tokens(30, seed=7), 4)
    served.run()
    assert [served.finished[each].num_cached_tokens for each in (missed, other)] == [0, 0]
    assert served.context.prefix_stats().fallbacks == {"tier_load_missing": 1, "host_load_given_up": 1}
    served.check()
    assert served.send(PROMPT).num_cached_tokens == 4 * BLOCK  # on the device
    served.check_drained()


@pytest.mark.parametrize("in_time", [True, False])
def test_what_did_not_arrive_cannot_stop_a_step(model, folder, in_time, monkeypatch):
    """The forward of the failed load reads its blocks: not what was there before. Nobody samples from NaN."""
    computed(model, folder)
    served = start(model, folder, {"refresh_s": 10.0**6} | ({} if in_time else {"wait_s": 0.05}))
    for tensors in served.context.host_moves._tensors().values():
        for tensor in tensors:
            tensor.fill_(255)
    if in_time:
        for path in entries(folder, "state"):
            path.unlink()
    else:
        Gate(monkeypatch)
    sampling = {"top_k": 0, "top_p": 0.9, "temperature": 1.0}
    missed = served.add(PROMPT, 4, params=sampling)
    served.run()
    assert len(served.finished[missed].generated_tokens) == 4
    reason = "tier_load_missing" if in_time else "tier_load_late"
    assert served.context.prefix_stats().fallbacks == {reason: 1, "host_load_given_up": 1}


def test_a_load_that_is_late_before_its_request_is_admitted_fails_no_forward(model, folder, monkeypatch):
    """It began while another request ran, which has ended."""
    computed(model, folder)
    served = start(model, folder)
    disk = Gate(monkeypatch)
    served.add(random_tokens(30, seed=7), 2)
    served.step()
    missed = served.add(PROMPT)
    served.step()
    (load,) = [live.load for live in served.cache.live.values() if live.is_loading]
    assert load.state is LoadState.FETCHING
    load.deadline_s = 0.0  # late by now
    monkeypatch.setattr(served.cache, "fail_load", lambda plan: pytest.fail("a forward ran without its entries"))
    served.run()
    assert served.finished[missed].num_cached_tokens == 0
    assert served.context.prefix_stats().fallbacks == {"tier_load_late": 1, "host_load_given_up": 1}
    disk.opened.set()
    served.check()


def test_a_step_that_raised_says_nothing_about_the_loads_of_the_next(model, folder, monkeypatch):
    computed(model, folder)
    served = start(model, folder, {"refresh_s": 10.0**6})

    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("broken bookkeeping")

    with monkeypatch.context() as patched:
        patched.setattr(served.context, "update_requests", broken)
        served.add(random_tokens(30, seed=7))
        with pytest.raises(RuntimeError, match="broken bookkeeping"):
            served.run()
    served.engine.reset()
    for path in entries(folder, "state"):
        path.unlink()
    missed = served.add(PROMPT)
    served.run()
    assert served.finished[missed].num_cached_tokens == 0
    assert served.context.prefix_stats().fallbacks["tier_load_missing"] == 1


@pytest.mark.slow
@each_mode
def test_others_run_while_a_load_waits_for_the_disk(model, folder, mode, monkeypatch):
    computed(model, folder, async_sched_mode=mode)
    served = start(model, folder, async_sched_mode=mode)
    disk = Gate(monkeypatch)
    running = served.add(random_tokens(30, seed=7), 60)
    served.step(3)
    waiting = served.add(PROMPT, 4)
    served.step(20)
    assert (waiting in served.cache.live and served.cache.live[waiting].is_loading) and (running in served.cache.live)
    disk.opened.set()
    served.run()
    assert served.finished[waiting].num_cached_tokens == 4 * BLOCK
    served.check()
    served.check_drained()


@pytest.mark.parametrize("end", mostly_slow(["abort", "invalidate", "reset", "pages are needed"], "pages are needed"))
def test_a_load_that_ends_while_the_disk_is_read(model, folder, end, monkeypatch):
    """What the disk returns later is used by nobody."""
    computed(model, folder)
    served = start(model, folder, host_gb=0.0005)
    disk = Gate(monkeypatch)
    running = served.add(random_tokens(30, seed=7), 20)
    served.step(2)
    waiting = served.add(PROMPT, 4)
    served.step(2)
    assert (waiting in served.cache.live and served.cache.live[waiting].is_loading) and disk.asked.wait(HANG_S)
    if end == "invalidate":
        served.engine.invalidate()
    elif end == "reset":
        served.engine.reset()
    else:
        served.engine.abort_request(waiting)
    if end == "pages are needed":
        for seed in range(3):
            served.send(tokens(5, 5, seed=80 + seed))
    disk.opened.set()
    wait_until(lambda: not tier_of(served)._reads, "the disk answers")
    if end == "reset":
        served.finished.clear()
    else:
        served.run()
        assert served.finished[running] is not None
    for _ in range(2):
        served.send(PROMPT)
    served.send(tokens(5, 5, seed=81))
    assert not served.context.host_moves.arena.loads.running
    served.check(*(number for number in served.finished if number != waiting))
    served.check_drained()


@pytest.mark.slow
def test_an_entry_that_is_overwritten_while_it_is_stored_is_not_stored(model, folder, monkeypatch):
    """Host memory for one prompt; the disk takes the first one while the second one is computed."""
    served = start(model, folder, host_gb=0.0004)
    put, may_write = tier_of(served).put, threading.Event()
    monkeypatch.setattr(tier_of(served), "put", lambda *entry: may_write.wait(HANG_S) and put(*entry))
    for seed in range(4):
        served.send(tokens(4, 9, seed=seed))
    may_write.set()
    written(served)
    assert 0 < stats_of(served).full < stats_of(served).stores
    again = start(model, folder)
    for seed in range(4):
        again.send(tokens(4, 9, seed=seed))
    assert again.context.prefix_stats().fallbacks == {} and stats_of(again).faults == {}
    again.check()


@pytest.mark.slow
def test_two_requests_with_one_prefix_read_it_once(model, folder):
    computed(model, folder)
    served = start(model, folder)
    served.send(PROMPT, [*PROMPT[: 4 * BLOCK], 7, 8, 9])
    assert stats_of(served).loads == 5 and stats_of(served).failed == 0
    assert all(request.num_cached_tokens == 4 * BLOCK for request in served.finished.values())
    served.check()
    served.check_drained()


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_a_load_that_is_late_on_one_rank_is_a_miss_on_all(folder, tmp_path, layout):
    """If the ranks decided differently, the engine would raise."""
    ranks = run_ranks("shared_tier.py", tmp_path / "found.json", layout, folder)
    check_ranks(ranks)
    assert [set(found["late"]["faults"]) for found in ranks] == [set(), {"stuck"}]


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_and_flags(folder):
    config = HybridPrefixConfig(mamba_gb=1, host_gb=2, shared=url(folder))
    parser = arguments.add_hybrid_prefix_args(argparse.ArgumentParser(exit_on_error=False))
    flags = ["--hybrid-prefix-host-gb", "2", "--hybrid-prefix-shared", url(folder)]
    args = parser.parse_args([arguments.SWITCH, arguments.BUDGET, "1", *flags])
    assert arguments.hybrid_prefix_config_from_args(args) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shared": "/tmp/x", "host_gb": 1}, "must be a URL"),
        ({"shared": "file:///tmp/x?gb=1"}, "set host_gb above 0"),
    ],
)
def test_settings_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        HybridPrefixConfig(mamba_gb=1, **fields)


@pytest.mark.parametrize("fault", ["no secret", "not writable"])
def test_what_is_missing_is_said_at_the_start(model, folder, fault, monkeypatch):
    if fault == "no secret":
        monkeypatch.delenv("HYBRID_PREFIX_SECRET")
    else:
        folder.parent.mkdir(exist_ok=True)
        folder.write_text("a file")
    with pytest.raises(ValueError, match="set HYBRID_PREFIX_SECRET" if fault == "no secret" else "cannot use") as error:
        start(model, folder)
    assert "\n" not in str(error.value)
