"""`replay --cache-gb`: one memory for KV and states beside fixed splits of the same bytes; made-up traffic."""

from __future__ import annotations

import json
from dataclasses import replace as with_fields
from typing import Any

import pytest

from megatron_hybrid_prefix.cli import replay as command
from megatron_hybrid_prefix.index.host_tier import HostTier
from megatron_hybrid_prefix.index.tree import NO_BLOCK
from megatron_hybrid_prefix.lab import traffic
from megatron_hybrid_prefix.lab.memory import Memory
from megatron_hybrid_prefix.lab.replay import CacheServer, Policy, ceiling_tokens, replay
from megatron_hybrid_prefix.lab.traces import Trace, read_trace
from megatron_hybrid_prefix.pool.slots import NO_SLOT
from tests.harness.steps import steps

GIB = 2**30
# Nemotron-H-8B in bf16, KV blocks of 256 tokens: a state is as large as 12.5 blocks.
SHARED = Memory(cache_bytes=5 * GIB // 2, block_bytes=4_194_304, state_bytes=52_297_728)
RULE = Policy(name="recompute_cost", eviction="recompute_cost")


def run(*arguments: Any) -> int:
    return command.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def changing():
    return traffic.changing_traffic(requests=150)


def test_counts_of_a_fixed_split():
    memory = Memory(cache_bytes=1000, block_bytes=10, state_bytes=30, state_share=0.25)
    assert memory.counts() == (75, 7), "250 bytes are eight states; one of them is the running request's"
    assert with_fields(memory, state_share=0.01).counts() == (99, 0)


def test_shared_memory_beats_every_fixed_split_where_traffic_changes(changing):
    shared = sum(replay(changing, RULE, memory=SHARED).reused_tokens)
    splits = {
        percent: sum(replay(changing, RULE, memory=with_fields(SHARED, state_share=percent / 100)).reused_tokens)
        for percent in (10, 20, 25, 30, 40, 50, 60, 70, 80)
    }
    assert shared > 1.05 * max(splits.values()), (shared, splits)
    assert shared <= sum(ceiling_tokens(changing))


def test_shared_memory_that_has_room_for_everything_reuses_as_much_as_is_possible(changing):
    every_block = with_fields(RULE, interval_tokens=changing.block_tokens)
    memory = with_fields(SHARED, cache_bytes=3000 * GIB)
    assert replay(changing, every_block, memory=memory).reused_tokens == ceiling_tokens(changing)


def test_made_up_traffic_is_the_same_for_the_same_seed(tmp_path, changing):
    path = tmp_path / "t.jsonl"
    assert traffic.main([str(path), "--requests", "150"]) == 0
    assert read_trace([path]) == with_fields(changing, requests=read_trace([path]).requests)
    assert [list(request.keys) for request in read_trace([path]).requests] == [r.keys for r in changing.requests]
    assert traffic.changing_traffic(requests=20, seed=1) != traffic.changing_traffic(requests=20)
    with pytest.raises(SystemExit):
        traffic.main([str(path), "--phases", "chats,books"])


def test_table_and_json(tmp_path, capsys):
    trace, report = tmp_path / "t.jsonl", tmp_path / "r.json"
    traffic.main([str(trace), "--requests", "30"])
    arguments = ["--preset", "nemotron-h-8b", "--cache-gb", "3,1.5", "--splits", "2", "--json", report]
    assert run(trace, *arguments) == 0
    said = capsys.readouterr().out
    for text in ("4,194,304", "52,297,728", "in 13 blocks", "best of 2 fixed splits", "no limits", "lru", "%)"):
        assert text in said
    data = json.loads(report.read_text())
    assert list(data["by_cache_gb"]) == ["1.5", "3"]
    assert data["reused_token_fraction"] == data["by_cache_gb"]["3"]
    assert [found["memory"]["state_share"] for found in data["runs"]] == [None, 0.05, 0.1] * 4
    use = data["runs"][0]["counters"]["memory_use"]
    assert use["total_blocks"] == 384 and use["padding_bytes"] == use["state_pages"] * (13 * 4_194_304 - 52_297_728)
    assert {found["memory"]["cache_bytes"] for found in data["runs"]} == {3 * GIB, 3 * GIB // 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache-gb", "3"], "--cache-gb: needs the bytes of a model: give --preset or --hf"),
        (["--splits", "3"], "--splits: needs --cache-gb"),
        (["--cache-gb", "3", "--kv-blocks", "4"], "--cache-gb replaces --state-slots and --kv-blocks"),
        (["--cache-gb", "3", "--preset", "tiny", "--splits", "20"], "--splits 20: at most 19"),
        (["--cache-gb", "3,3", "--preset", "tiny"], "--cache-gb: 3,3 has a number twice"),
        (
            ["--cache-gb", "0.01", "--preset", "nemotron-h-8b"],
            "--cache-gb 0.01: too small: a state and a KV block take 0.0487",
        ),
        (["--cache-gb", "3", "--preset", "tiny", "--baselines", "upstream"], "--baselines upstream: megatron-core's"),
        (["--cache-gb", "3", "--preset", "tiny", "--plot", "x.png"], "--plot: shows state slots"),
        (["--cache-gb", "1e300", "--preset", "tiny"], "--cache-gb 1e+300: more than any machine has"),
        (["--cache-gb", "1e8", "--preset", "tiny"], "409,600,000,000 KV blocks: a replay has at most 4,194,304"),
        (["--state-slots", "9999999"], "9,999,999 state slots: a replay has at most 4,194,304"),
        (["--kv-blocks", "9999999"], "9,999,999 KV blocks: a replay has at most 4,194,304"),
        (["--hf", "somewhere", "--preset", "tiny"], "--hf"),
    ],
)
def test_bad_options_are_named(tmp_path, capsys, arguments, message):
    trace = tmp_path / "t.jsonl"
    traffic.main([str(trace), "--requests", "2"])
    assert run(trace, *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}") and said.count("\n") == 1


def steps_of_a_request(kind: str, requests: int, gib: int) -> float:
    trace = traffic.changing_traffic(phases=[kind], requests=requests)
    memory = with_fields(SHARED, cache_bytes=gib * GIB)
    return steps(lambda: replay(trace, RULE, memory=memory)) / requests


@pytest.mark.parametrize("kind", ["fresh", pytest.param("chats", marks=pytest.mark.slow)])
def test_a_request_takes_no_more_steps_in_a_larger_memory_or_a_longer_trace(kind):
    base = steps_of_a_request(kind, 150, 2)
    assert steps_of_a_request(kind, 150, 8) <= 1.25 * base
    assert steps_of_a_request(kind, 450, 2) <= 1.25 * base


# -- a host tier -------------------------------------------------------------------------------------------------------

TIERS = [None, 0.25]
"""One memory on the device, and a fixed split."""


def unreachable_states(trace: Trace, share: float | None, eviction: str = "recompute_cost") -> int:
    """States on the host, after the trace, whose KV is neither there nor on the device."""
    memory = with_fields(SHARED, cache_bytes=GIB, state_share=share)
    server = CacheServer(
        with_fields(RULE, eviction=eviction, options=memory.host_options(GIB)),
        trace.block_tokens,
        memory.cache_options(),
    )
    for request in trace.requests:
        server.serve(request)
    cache = server._cache
    cache.check_integrity()
    states = [node for node in cache.inspect.nodes() if node.host_slot != NO_SLOT]
    assert len(states) > 3 and cache.stats().evictions > 100
    found = 0
    for node in states:
        above = node
        while above is not None and not above.block_id == above.host_block == NO_BLOCK:
            above = above.parent
        found += above is not None
    return found


@pytest.mark.parametrize("eviction", ["lru", "recompute_cost"])
@pytest.mark.parametrize("share", TIERS)
def test_every_state_on_the_host_has_its_kv(changing, share, eviction):
    assert unreachable_states(changing, share, eviction) == 0


def any_kv_is_evicted(self: HostTier) -> bool:
    """A mutant of `HostTier._evict_spare_kv`."""
    has_kv = (
        node for node in self._tree if node.host_block != NO_BLOCK and not self.entries.is_pinned(node.host_block)
    )
    node = next(has_kv, None)
    if node is not None:
        self.drop_kv(node)
    return node is not None


def test_a_state_whose_kv_was_evicted_is_found(changing, monkeypatch):
    monkeypatch.setattr(HostTier, "_evict_spare_kv", any_kv_is_evicted)
    assert unreachable_states(changing, None) > 0


@pytest.mark.parametrize(("device", "host"), [(GIB, GIB), (2 * GIB, 2 * GIB), (2 * GIB, 4 * GIB)])
def test_a_host_tier_reuses_as_much_as_more_memory_on_the_device(changing, device, host):
    memory = with_fields(SHARED, cache_bytes=device)
    tiers = replay(changing, with_fields(RULE, options=memory.host_options(host)), memory=memory)
    one = replay(changing, RULE, memory=with_fields(SHARED, cache_bytes=device + host))
    assert sum(tiers.reused_tokens) > 0.9 * sum(one.reused_tokens)
