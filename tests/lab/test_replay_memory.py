"""`replay --cache-gb`: a memory in bytes, for KV and states."""

from __future__ import annotations

import json
from dataclasses import replace as with_fields
from typing import Any

import pytest

from megatron_hybrid_prefix.cli import replay as command
from megatron_hybrid_prefix.lab.memory import Memory
from megatron_hybrid_prefix.lab.replay import Replayed, ceiling_tokens, replay
from megatron_hybrid_prefix.lab.traces import Trace
from tests.harness.steps import steps
from tests.harness.trace_helpers import made_up, write_trace

GIB = 2**30
# Nemotron-H-8B in bf16, KV blocks of 256 tokens: a state is as large as 12.5 blocks.
MEMORY = Memory(cache_bytes=5 * GIB // 2, block_bytes=4_194_304, state_bytes=52_297_728)


def replayed(trace: Trace, host_bytes: int = 0, **changes: int) -> Replayed:
    memory = with_fields(MEMORY, **changes)
    return replay(trace, **memory.cache_sizes(), **memory.host_options(host_bytes))


def run(*arguments: Any) -> int:
    return command.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def chats():
    return made_up("chat", 450)


def test_a_memory_that_has_room_for_everything_reuses_as_much_as_is_possible(chats):
    sizes = with_fields(MEMORY, cache_bytes=3000 * GIB).cache_sizes()
    found = replay(chats, retention_interval_tokens=chats.block_tokens, **sizes)
    assert found.reused_tokens == ceiling_tokens(chats)


def test_a_limit_of_the_states(chats):
    """States keep to the limit, also in the layout's pages. A limit that cannot be reached changes nothing."""
    free = replayed(chats)
    found = [replayed(chats, mamba_bytes=count * 52_297_728 + 9) for count in (0, 5, 900)]
    assert [run.settings["state_slots"] for run in found] == [0, 5, free.settings["state_slots"]]
    assert [run.counters["slots_used"] for run in found[:2]] == [0, 5]
    assert 0 == sum(found[0].reused_tokens) < sum(found[1].reused_tokens) < sum(free.reused_tokens)
    assert found[2].reused_tokens == free.reused_tokens


def test_table_and_json(tmp_path, capsys):
    trace, report = write_trace(tmp_path / "t.jsonl", made_up("chat", 90)), tmp_path / "r.json"
    arguments = ["--preset", "nemotron-h-8b", "--cache-gb", "1.5", "3", "--mamba-gb", "0.5", "--json", report]
    assert run(trace, *arguments) == 0
    said = capsys.readouterr().out
    for text in ("GiB for KV and states", "1.5", "no limits", "lru"):
        assert text in said
    data = json.loads(report.read_text())
    assert data["reused_token_fraction"] == data["reused_token_fractions"]["recompute_cost"]["3"]
    assert [found["budget"] for found in data["runs"]] == ["1.5", "3"] * 2
    assert {found["settings"]["state_slots"] for found in data["runs"]} == {GIB // 2 // 52_297_728}
    assert data["runs"][0]["counters"]["memory_use"]["total_blocks"] == 184
    assert run(trace, *arguments, "--host-gb", "2") == 0
    with_host = json.loads(report.read_text())["runs"][0]
    assert with_host["settings"]["host_pages"] == 2 * GIB // (8_388_608 // 8)
    assert with_host["counters"]["tiers"]["host"]["loads"] > 0


def test_checkpoints_in_int8(tmp_path, capsys):
    """More of them fit, on the host, too. Those of this model in bfloat16 are as live states."""
    trace, report = write_trace(tmp_path / "t.jsonl", made_up("chat", 90)), tmp_path / "r.json"
    given = ["--preset", "nemotron-h-8b", "--cache-gb", "1.5", "--mamba-gb", "0.5", "--host-gb", "0.5", "--json"]
    found = {}
    for dtype in ("", "bfloat16", "int8"):
        assert run(trace, *given, report, *(["--checkpoint-dtype", dtype] if dtype else [])) == 0
        assert (f", checkpoints in {dtype}" in capsys.readouterr().out) == bool(dtype)
        found[dtype] = json.loads(report.read_text())["runs"][0]
    as_live, in_int8 = found[""], found["int8"]
    assert as_live | {"seconds": 0} == found["bfloat16"] | {"seconds": 0}
    sizes = {"kv_blocks": 192, "page_blocks": 7, "page_states": [1, 2], "state_slots": GIB // 2 // 28_311_552}
    sizes |= {"host_pages": 512, "host_kv_pages": 8, "host_state_pages": 27}
    assert in_int8["settings"].items() >= sizes.items()
    assert in_int8["reused_tokens"] > as_live["reused_tokens"]


def steps_of_a_request(kind: str, requests: int, gib: int) -> float:
    trace = made_up(kind, requests)
    return steps(lambda: replayed(trace, cache_bytes=gib * GIB)) / requests


@pytest.mark.parametrize("kind", ["scan", pytest.param("chat", marks=pytest.mark.slow)])
def test_a_request_takes_no_more_steps_in_a_larger_memory_or_a_longer_trace(kind):
    base = steps_of_a_request(kind, 150, 2)
    assert steps_of_a_request(kind, 150, 8) <= 1.25 * base
    assert steps_of_a_request(kind, 450, 2) <= 1.3 * base


# -- a host tier -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "host"), [(GIB, GIB), (2 * GIB, 2 * GIB), (2 * GIB, 4 * GIB)])
def test_a_host_tier_reuses_as_much_as_more_memory_on_the_device(chats, device, host):
    tiers, one = replayed(chats, host, cache_bytes=device), replayed(chats, cache_bytes=device + host)
    assert sum(tiers.reused_tokens) > 0.9 * sum(one.reused_tokens)
