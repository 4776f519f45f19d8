"""Tiers that processes share, in the engine: other engines resume what one computed, and faults cost time only.

What each tier does with a file, an object or a URL is in ``tests/core``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.mcore.entrypoints import arguments
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.tiers.base import HEADER_BYTES
from megatron_hybrid_prefix.tiers.units import LoadState
from megatron_hybrid_prefix.transfers.to_device import Transfer
from tests.distributed.test_prefix_parallel import model_of, session
from tests.harness.engine_helpers import assert_same, random_tokens
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, raising, tokens
from tests.harness.limits import HANG_S, wait_until
from tests.harness.mutants import MUTANTS, check_answers, mutated_resume
from tests.harness.selection import mostly_slow, mostly_slow_rows
from tests.harness.shared_tiers import FAULTS, STORES, Folder, Mooncake, stats_of, tier_of, written
from tests.harness.workers.launch import WORKERS, run_play, run_prepared

PROMPT = tokens(4, 9, seed=1)
LATE = {"tier_load_late": 1, "host_load_given_up": 1}
MISSING = {"tier_load_missing": 1, "host_load_given_up": 1}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "a secret for the tests")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with pytest.MonkeyPatch.context() as faults:  # undone after the engines' last reads
        yield Folder(tmp_path / "cache", faults)


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> Mooncake:
    return Mooncake(Path(), monkeypatch)


def start(
    model: Any, store: Folder | Mooncake, parameters: dict[str, Any] | None = None, **fields: Any
) -> EngineHarness:
    """An engine as of a new process."""
    defaults = {"slots": 6, "blocks": 20, "host_gb": 0.01, "max_requests": 2}
    return EngineHarness(model, shared=store.url(**(parameters or {})), **(defaults | fields))


def computed(model: Any, store: Folder | Mooncake) -> EngineHarness:
    """An engine that has computed the prompt and written it to the store."""
    served = start(model, store)
    served.send(PROMPT)
    return written(served)


@pytest.mark.parametrize("name", STORES)
def test_another_engine_resumes_what_one_computed(model, name, request):
    store = request.getfixturevalue(name)
    first = start(model, store)
    cold = first.send(PROMPT)
    written(first)
    assert (stats_of(first).kv_blocks, stats_of(first).states) == (4, 1) or name == "mooncake"
    assert stats_of(first).bytes_stored > 0 and len(store.entries()) == 5
    second = start(model, store, async_sched_mode="async")
    loaded = second.send(PROMPT)
    stats = second.context.prefix_stats()
    assert loaded.num_cached_tokens == 4 * BLOCK == stats.reused_tokens_host
    assert stats.tiers["shared"].loads == 5 and stats.fallbacks == {} == stats.tiers["shared"].faults
    assert cold.generated_tokens == loaded.generated_tokens
    first.finish()
    second.finish()


def test_kv_that_is_there_is_offered_again_and_not_sent(model, mooncake):
    served, objects = computed(model, mooncake), mooncake.cluster.objects
    content, stored_bytes = sum(map(len, objects.values())), stats_of(served).bytes_stored
    served.send([*PROMPT, *tokens(2, 0, seed=7)])
    written(served)
    assert stats_of(served).stores == 5 + 4 + 3 and len(objects) == 5 + 3
    grown = sum(map(len, objects.values())) - content
    assert stats_of(served).bytes_stored - stored_bytes == grown - 3 * HEADER_BYTES and stats_of(served).full == 0


@pytest.mark.parametrize("mutant", mostly_slow([None, *MUTANTS], "ssm_zeroed"))
@pytest.mark.parametrize("name", mostly_slow(["model", "tiny_gdp"], "model"))
def test_a_hit_reads_what_it_loaded(request, name, folder, mutant):
    model = request.getfixturevalue(name)
    computed(model, folder)
    served = start(model, folder)
    served.send(tokens(6, 7, seed=900), count=1)  # other states, for a mutant
    with mutated_resume(served.engine, mutant):
        served.send(PROMPT, count=8)
    assert served.context.prefix_stats().reused_tokens_host == 4 * BLOCK
    check_answers(served, mutant)


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
    second.finish()


def test_only_what_is_worth_a_load_is_written_and_loaded(model, folder):
    served = start(model, folder, {"min_tokens": 3 * BLOCK})
    served.send(tokens(2, 9, seed=3))
    served.send(PROMPT)
    written(served)
    assert (stats_of(served).kv_blocks, stats_of(served).states) == (4, 1)
    again = start(model, folder, {"min_tokens": 3 * BLOCK})
    again.send(PROMPT[: 2 * BLOCK + 1])  # two blocks on the device now
    assert again.send(PROMPT).num_cached_tokens == 2 * BLOCK and stats_of(again).loads == 0


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


def test_another_model_does_not_match(model, platform, folder):
    computed(model, folder)
    twin = build_hybrid_model("tiny", seed=0, platform=platform)
    with torch.no_grad():
        list(twin.parameters())[3].flatten()[1] += 0.5
    assert start(twin, folder).send(PROMPT).num_cached_tokens == 0


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fault"),
    mostly_slow_rows(FAULTS, ("folder", "state bit"), ("folder", "state gone"), ("mooncake", "state bit")),
)
def test_a_fault_is_a_counted_miss(model, name, fault, request):
    """Another request is in the same step; its answer is right, too. What was wrong is right afterwards."""
    store = request.getfixturevalue(name)
    reason, fallback = FAULTS[name, fault]
    computed(model, store)
    served = start(model, store)
    store.spoil(fault)
    served.send(PROMPT, random_tokens(30, seed=7))
    assert [request.num_cached_tokens for request in served.finished.values()] == [0, 0]
    assert served.context.prefix_stats().fallbacks == (MISSING if fallback == "tier_load_missing" else {fallback: 1})
    assert stats_of(served).faults[reason] > 0 and stats_of(served).failed > 0
    served.finish()
    store.mend()
    served.engine.reset()  # of this process: it is computed and offered again
    served.send(PROMPT)
    written(served)
    again = start(model, store)
    assert again.send(PROMPT).num_cached_tokens == 4 * BLOCK and stats_of(again).faults == {}
    again.check()


@contextmanager
def late(served: EngineHarness, store: Folder) -> Iterator[None]:
    """The next load is late: the thread that reads has asked the disk before the request gives up, however late it runs."""
    store.close_gate()
    behind = served.context.host_moves.behind
    fetched = behind.fetched

    def fetched_once_asked(load: Transfer, wait_s: float = 0.0) -> LoadState:
        assert store.asked.wait(HANG_S)
        return fetched(load, wait_s)

    behind.fetched = fetched_once_asked
    yield
    del behind.fetched
    assert served.context.prefix_stats().fallbacks == LATE


def opened(served: EngineHarness, store: Folder) -> None:
    """The disk answers, to those who gave up as well."""
    store.gate.set()
    wait_until(lambda: not tier_of(served)._reads, "the disk answers")


def test_a_slow_disk_is_a_miss(model, folder, monkeypatch):
    """The request does not wait for longer than it may; others do not wait at all; later the disk is used again."""
    computed(model, folder)
    served = start(model, folder, {"wait_s": 0.05})
    with late(served, folder):
        assert served.send(PROMPT).num_cached_tokens == 0
    served.engine.reset()
    wait_until(tier_of(served)._is_stuck, "the read takes longer than a request waits")
    assert served.send(PROMPT).num_cached_tokens == 0
    assert set(stats_of(served).faults) == {"stuck"}
    opened(served, folder)
    served.engine.reset()
    monkeypatch.setattr(tier_of(served), "wait_s", HANG_S)
    assert served.send(PROMPT).num_cached_tokens == 4 * BLOCK
    served.finish()


@pytest.mark.slow
@pytest.mark.parametrize("hangs", ["question", "read"])
def test_a_store_that_hangs_is_a_miss(model, mooncake, hangs):
    """The request does not wait for longer than it may; later the store is used again."""
    computed(model, mooncake)
    served = start(model, mooncake, {"ask_s": 0.01} if hangs == "question" else {"wait_s": 0.05})
    tier, cluster = tier_of(served), mooncake.cluster
    cluster.gated = ("batch_is_exist" if hangs == "question" else "batch_get_into_multi_buffers",)
    cluster.gate.clear()
    assert served.send(PROMPT).num_cached_tokens == 0
    if hangs == "question":
        assert set(stats_of(served).faults) == {"late_answer"} and served.context.prefix_stats().fallbacks == {}
    else:
        assert served.context.prefix_stats().fallbacks == LATE
    cluster.gate.set()
    wait_until(lambda: not cluster.waiting, "the store answers")
    served.engine.reset()
    tier.wait_s = tier._client._wait_s = HANG_S
    assert served.send(PROMPT).num_cached_tokens == 4 * BLOCK
    served.finish()


def test_a_late_load_costs_nothing_of_what_its_request_stores(model, folder, monkeypatch):
    """The pages of the late load are still being filled: the request's own entries go elsewhere, and come back."""
    computed(model, folder)
    served = start(model, folder, {"wait_s": 0.05})
    with late(served, folder):
        served.send(PROMPT)
    for seed in range(6):  # the prompt has to leave the device
        served.send(tokens(4, 5, seed=800 + seed))
    opened(served, folder)
    monkeypatch.setattr(tier_of(served), "wait_s", HANG_S)
    assert served.send(PROMPT).num_cached_tokens == 4 * BLOCK
    assert served.context.prefix_stats().fallbacks == LATE
    served.finish()


def test_a_request_is_admitted_while_its_entries_are_read(model, folder, monkeypatch):
    """The disk answers once the step is being prepared; before that it would be late."""
    computed(model, folder)
    served = start(model, folder)
    folder.close_gate()
    context, admitted = served.context, list[tuple[int, int]]()
    prepare = context.initialize_attention_state

    def prepare_and_open(*arguments: Any, **options: Any) -> Any:
        admitted.append((context.total_request_count, len(served.cache.loads.fetches)))
        folder.gate.set()
        return prepare(*arguments, **options)

    monkeypatch.setattr(context, "initialize_attention_state", prepare_and_open)
    assert served.send(PROMPT).num_cached_tokens == 4 * BLOCK
    assert admitted[0] == (1, 0)
    assert served.context.prefix_stats().fallbacks == {}
    served.finish()


@pytest.mark.parametrize("in_time", [True, False])
def test_what_did_not_arrive_cannot_stop_a_step(model, folder, in_time):
    """The forward of the failed load reads its blocks: not what was there before. Nobody samples from NaN."""
    computed(model, folder)
    served = start(model, folder, {} if in_time else {"wait_s": 0.05})
    for tensors in served.context.host_moves.copies.tensors().values():
        for tensor in tensors:
            tensor.fill_(255)
    if in_time:
        folder.spoil("state gone")
    else:
        folder.close_gate()
    missed = served.add(PROMPT, 4, params={"top_k": 0, "top_p": 0.9, "temperature": 1.0})
    served.run()
    assert len(served.finished[missed].generated_tokens) == 4
    assert served.context.prefix_stats().fallbacks == (MISSING if in_time else LATE)
    folder.gate.set()


def test_a_load_that_is_late_before_its_request_is_admitted_fails_no_forward(model, folder, monkeypatch):
    """It began while another request ran, which has ended."""
    computed(model, folder)
    served = start(model, folder)
    folder.close_gate()
    served.add(random_tokens(30, seed=7), 2)
    served.step()
    missed = served.add(PROMPT)
    served.step()
    load = served.cache.loads.fetches[missed]
    assert load.state is LoadState.FETCHING and missed not in served.cache.live
    served.context.prefix_request(served.engine.get_request(missed)).deadline_s = 0.0  # late by now
    monkeypatch.setattr(served.cache, "fail_load", lambda plan: pytest.fail("a forward ran without its entries"))
    served.run()
    assert served.finished[missed].num_cached_tokens == 0
    assert served.context.prefix_stats().fallbacks == LATE
    folder.gate.set()
    served.check()


def test_a_step_that_raised_says_nothing_about_the_loads_of_the_next(model, folder, monkeypatch):
    computed(model, folder)
    served = start(model, folder)

    with monkeypatch.context() as patched:
        patched.setattr(served.context, "update_requests", raising(RuntimeError("broken bookkeeping")))
        served.add(random_tokens(30, seed=7))
        with pytest.raises(RuntimeError, match="broken bookkeeping"):
            served.run()
    served.engine.reset()
    folder.spoil("state gone")
    assert served.send(PROMPT).num_cached_tokens == 0
    assert served.context.prefix_stats().fallbacks["tier_load_missing"] == 1


@pytest.mark.parametrize("end", mostly_slow(["abort", "invalidate", "reset", "pages are needed"], "pages are needed"))
def test_a_load_that_ends_while_the_disk_is_read(model, folder, end):
    """What the disk returns later is used by nobody. Others run meanwhile."""
    computed(model, folder)
    served = start(model, folder, host_gb=0.0005)
    folder.close_gate()
    running = served.add(random_tokens(30, seed=7), 20)
    served.step(2)
    waiting = served.add(PROMPT, 4)
    served.step(9)
    assert waiting in served.cache.loads.fetches and running in served.cache.live and folder.asked.wait(HANG_S)
    if end == "invalidate":
        served.engine.invalidate()
    elif end == "reset":
        served.engine.reset()
    else:
        served.engine.abort_request(waiting)
    if end == "pages are needed":
        for seed in range(3):
            served.send(tokens(5, 5, seed=80 + seed))
    opened(served, folder)
    if end == "reset":
        served.finished.clear()
    else:
        served.run()
        assert served.finished[running] is not None
    for _ in range(2):
        served.send(PROMPT)
    served.send(tokens(5, 5, seed=81))
    assert not served.context.host_moves.to_device.transfers
    served.check(*(number for number in served.finished if number != waiting))
    served.check_drained()


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "pp", "tp, mooncake"])
def test_a_load_that_is_late_or_incomplete_on_one_rank_is_a_miss_on_all(tmp_path, layout):
    """If the ranks decided differently, the engine would raise. Engines in turn: without a cache, one that writes, and those that read."""
    tp, pp, pattern = (1, 2, "M*-|M*-") if layout == "pp" else (2, 1, "M*-M*-")
    folder, faults = tmp_path / "cache", "mooncake" in layout
    url = f"file://{folder}?gb=1&refresh_s=1000000"
    if faults:
        url = f"mooncake://127.0.0.1:50051?ask_s={HANG_S}&refresh_s=1e-9"
    sent = ["sends", [tokens(3, 9, seed=70 + number) for number in range(2)]]

    def part(wait_s: float, *before: Any) -> dict[str, Any]:
        fields = {"host_gb": 0.01, "check_ranks": True, "shared": f"{url}&min_tokens=0&wait_s={wait_s}"}
        return session(pattern, tp, pp, [*before, sent, ["mend"], ["drain"]], **fields)

    parts = {
        "off": session(pattern, tp, pp, [sent], without=True),
        "write": part(HANG_S),
        "late": part(0.1, ["rest: waits", HANG_S], ["last: slow"]),  # the others' entries arrive, however long it takes
        "missing": part(HANG_S, ["last: lose_states", "" if faults else str(folder)]),
        "hit": part(HANG_S),
    }
    play = {"sizes": {"tp": tp, "pp": pp}, "model": model_of(pattern, pp), "mooncake": faults, "parts": parts}
    ranks = run_play(tmp_path, play)
    expected = {
        "late": ([0, 0], {"tier_load_late": 2, "host_load_given_up": 2}),
        "missing": ([0, 0], {"tier_load_missing": 2, "host_load_given_up": 2}),
        "hit": ([3 * BLOCK] * 2, {}),
    }
    for found in ranks:
        for name, (cached, fallbacks) in expected.items():
            assert found[name]["decisions"] == ranks[0][name]["decisions"]
            assert [answer["cached_tokens"] for answer in found[name]["answers"]] == cached, name
            assert found[name]["stats"]["fallbacks"] == fallbacks, name
            assert_same(found[name]["answers"], ranks[0]["off"]["answers"])
    seen = [[set(found[name]["stats"]["tiers"]["shared"]["faults"]) for found in ranks] for name in ("late", "missing")]
    assert seen[1] == [set(), {"gone"}] if faults else seen[0] == [set(), {"stuck"}]


# -- restarts --------------------------------------------------------------------------------------------------------

KILLS = 24


@pytest.mark.slow
def test_killed_processes(tmp_path):
    """Of processes that are killed while they serve and write, the next one answers from the folder as if nothing had happened."""
    out, folder = tmp_path / "found.json", tmp_path / "cache"
    (ended,) = run_prepared(WORKERS / "shared_restart.py", out, folder, KILLS)
    assert ended.returncode == 0, ended.stderr[-6000:]
    found = json.loads(out.read_text())
    right = {line["turn"]: line for line in found["off"]}
    answers = [line for run in (*found["killed"], found["complete"], found["last"]) for line in run if "turn" in line]
    assert len(found["killed"]) == KILLS and len(answers) > 2 * KILLS
    for line in answers:
        assert line["tokens"] == right[line["turn"]]["tokens"]
        assert line["log_probs"] == pytest.approx(right[line["turn"]]["log_probs"], rel=0, abs=1e-5)
        # An entry may be gone by the time that it is read, or find no room. None was half there, and none was wrong.
        assert set(line["faults"]) <= {"gone", "no_room"}
        assert set(line["fallbacks"]) <= {"tier_load_missing", "host_load_given_up"}
    assert found["half_written"] > KILLS / 4, "too few were killed in the middle of a write"
    first_turns = [run[0] for run in found["killed"] if run]
    assert sum(line["cached"] > 0 for line in first_turns) > len(first_turns) / 2, "conversations hit at once"
    for line in found["last"][:-1]:
        length = found["lengths"][line["turn"]]
        assert line["cached"] == (length - 1) // BLOCK * BLOCK
    accounted = found["accounted"]
    assert accounted["bytes"] == sum(accounted["found"].values())
    assert accounted["named"] == {Path(path).name: size for path, size in accounted["found"].items()}


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_and_flags(folder):
    config = HybridPrefixConfig(mamba_gb=1, host_gb=2, shared=folder.url())
    parser = arguments.add_hybrid_prefix_args(argparse.ArgumentParser(exit_on_error=False))
    flags = ["--hybrid-prefix-host-gb", "2", "--hybrid-prefix-shared", folder.url()]
    args = parser.parse_args([arguments.SWITCH, arguments.BUDGET, "1", *flags])
    assert arguments.hybrid_prefix_config_from_args(args) == config


@pytest.mark.parametrize("fault", ["no secret", "not writable"])
def test_what_is_missing_is_said_at_the_start(model, folder, fault, monkeypatch):
    if fault == "no secret":
        monkeypatch.delenv("HYBRID_PREFIX_SECRET")
    else:
        folder.path.write_text("a file")
    with pytest.raises(ValueError, match="set HYBRID_PREFIX_SECRET" if fault == "no secret" else "cannot use") as error:
        start(model, folder)
    assert "\n" not in str(error.value)
