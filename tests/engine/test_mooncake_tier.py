"""Mooncake Store behind the host, with a fake of it: other engines resume what one computed, and faults cost time only."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from megatron_hybrid_prefix.tiers.header import HEADER_BYTES
from tests.harness.fake_mooncake import FakeCluster, use_fake_mooncake
from tests.harness.lifecycle_helpers import BLOCK, EngineHarness, tokens
from tests.harness.limits import HANG_S, wait_until
from tests.harness.selection import mostly_slow
from tests.harness.shared_tiers import check_ranks, stats_of, written
from tests.harness.workers.launch import run_ranks

PROMPT = tokens(4, 9, seed=1)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "a secret for the tests")
    found = FakeCluster()
    use_fake_mooncake(monkeypatch, found)
    return found


def start(model: Any, **parameters: Any) -> EngineHarness:
    """An engine as of a new process."""
    parameters = {"min_tokens": 0, "wait_s": HANG_S, "ask_s": HANG_S, "refresh_s": 1e-9} | parameters
    url = "mooncake://127.0.0.1:50051?" + "&".join(f"{name}={value}" for name, value in parameters.items())
    return EngineHarness(model, slots=6, blocks=20, host_gb=0.01, max_requests=2, shared=url)


def computed(model: Any) -> EngineHarness:
    """An engine that has computed the prompt and written it to the store."""
    served = start(model)
    served.send(PROMPT)
    return written(served)


def test_another_engine_resumes_what_one_computed(model, cluster):
    first = start(model)
    cold, hit = first.send(PROMPT), first.send(PROMPT)
    written(first)
    assert stats_of(first).bytes_stored > 0 and len(cluster.objects) == 5
    second = start(model)
    loaded = second.send(PROMPT)
    stats = second.context.prefix_stats()
    assert loaded.num_cached_tokens == 4 * BLOCK == stats.reused_tokens_host
    assert stats.tiers["shared"].loads == 5 and stats.fallbacks == {} == stats.tiers["shared"].faults
    assert cold.generated_tokens == hit.generated_tokens == loaded.generated_tokens
    assert hit.generated_log_probs == loaded.generated_log_probs
    content, stored_bytes = sum(map(len, cluster.objects.values())), stats_of(first).bytes_stored
    first.send([*PROMPT, *tokens(2, 0, seed=7)])  # the next turn: KV that is there is offered again, and not sent
    written(first)
    assert stats_of(first).stores == 5 + 4 + 3 and len(cluster.objects) == 5 + 3
    grown = sum(map(len, cluster.objects.values())) - content
    assert stats_of(first).bytes_stored - stored_bytes == grown - 3 * HEADER_BYTES and stats_of(first).full == 0
    for served in (first, second):
        served.check()
        served.check_drained()


def spoil(cluster: FakeCluster, fault: str) -> None:
    name = next(name for name in cluster.objects if ("/kv/" if "kv" in fault else "/state/") in name)
    if "bit" in fault:
        cluster.objects[name][-17] ^= 4
    elif "truncated" in fault:
        del cluster.objects[name][-100:]
    elif "gone" in fault:
        cluster.lost = name
    else:
        cluster.broken_transfers = 1


# Reasons of the tier, and of the cache.
FAULTS = {
    "kv bit": ("wrong", "host_load_failed"),
    "state bit": ("wrong", "host_load_failed"),
    "kv truncated": ("not_valid", "tier_load_missing"),
    "state gone": ("gone", "tier_load_missing"),
    "transfer": ("read_transfer_failed", "tier_load_missing"),
}


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, "state bit"))
def test_a_fault_is_a_counted_miss(model, cluster, fault):
    reason, fallback = FAULTS[fault]
    computed(model)
    served = start(model)
    spoil(cluster, fault)
    assert served.send(PROMPT).num_cached_tokens == 0
    given_up = {} if fallback == "host_load_failed" else {"host_load_given_up": 1}
    assert served.context.prefix_stats().fallbacks == {fallback: 1} | given_up
    assert stats_of(served).faults[reason] > 0 and stats_of(served).failed > 0
    served.check()
    served.check_drained()


@pytest.mark.slow
def test_what_was_wrong_is_right_afterwards(model, cluster):
    computed(model)
    spoil(cluster, "kv bit")
    served = start(model)
    served.send(PROMPT)
    served.engine.reset()  # of this process: it is computed and offered again
    served.send(PROMPT)
    written(served)
    again = start(model)
    assert again.send(PROMPT).num_cached_tokens == 4 * BLOCK and stats_of(again).faults == {}
    again.check()


@pytest.mark.slow
def test_a_master_that_goes_and_comes_back(model, cluster, caplog):
    served = computed(model)
    cluster.is_away = True
    with caplog.at_level(logging.ERROR):
        for seed in range(2, 5):
            served.send(tokens(4, 9, seed=seed))
        written(served)
    assert set(stats_of(served).faults) == {"no_master"} and len(caplog.records) == 1
    cluster.restart()
    tier = served.cache._store.host.behind.tier
    wait_until(lambda: not tier._asker.is_down, "the master is found")
    served.send(tokens(4, 9, seed=5))
    written(served)
    other = start(model)
    assert other.send(PROMPT).num_cached_tokens == 0  # the master has forgotten it
    assert other.send(tokens(4, 9, seed=5)).num_cached_tokens == 4 * BLOCK
    for each in (served, other):
        each.check()
        each.check_drained()


@pytest.mark.slow
@pytest.mark.parametrize("hangs", ["question", "read"])
def test_a_store_that_hangs_is_a_miss(model, cluster, hangs):
    """The request does not wait for longer than it may; later the store is used again."""
    computed(model)
    served = start(model, **({"ask_s": 0.01} if hangs == "question" else {"wait_s": 0.05}))
    tier = served.cache._store.host.behind.tier
    cluster.gated = ("batch_is_exist" if hangs == "question" else "batch_get_into_multi_buffers",)
    cluster.gate.clear()
    assert served.send(PROMPT).num_cached_tokens == 0
    if hangs == "question":
        assert set(stats_of(served).faults) == {"late_answer"} and served.context.prefix_stats().fallbacks == {}
    else:
        assert served.context.prefix_stats().fallbacks == {"tier_load_late": 1, "host_load_given_up": 1}
    cluster.gate.set()
    wait_until(lambda: not cluster.waiting, "the store answers")
    served.engine.reset()
    tier.wait_s = tier._asker._wait_s = HANG_S
    assert served.send(PROMPT).num_cached_tokens == 4 * BLOCK
    served.check()
    served.check_drained()


@pytest.mark.multi
@pytest.mark.slow
def test_a_load_that_is_late_on_one_rank_is_a_miss_on_all(tmp_path, monkeypatch):
    """TP=2. If the ranks decided differently, the engine would raise."""
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "a secret for the tests")
    check_mooncake_ranks(run_ranks("mooncake_tier.py", tmp_path / "found.json", "fake"))


def check_mooncake_ranks(ranks: list[dict[str, Any]]) -> None:
    """What ``workers/mooncake_tier.py`` should find."""
    check_ranks(ranks)
    assert set(ranks[-1]["missing"]["faults"]) == {"gone"} and ranks[0]["missing"]["faults"] == {}
