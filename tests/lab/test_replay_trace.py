"""`hybrid-prefix replay`: formats, errors, figures, work."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid_prefix.cli import replay as command
from megatron_hybrid_prefix.console.terminal import InputError, Interrupt, Stopped
from megatron_hybrid_prefix.lab.replay import Replayed, ceiling_tokens, kv_alone, replay, unlimited_kv
from megatron_hybrid_prefix.lab.traces import Trace, TraceRequest, read_trace, sessions_of
from megatron_hybrid_prefix.policy.registry import eviction_policy_names
from tests.harness.trace_helpers import KINDS, made_up


def replayed(trace: Trace, state_slots: int, **rules: Any) -> Replayed:
    return replay(trace, **unlimited_kv(trace, state_slots), **rules)


def mooncake(blocks: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": blocks} | fields


def session(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": list(requests)} | fields


def step(t: float, tokens: int, blocks: list[int]) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 3, "hash_ids": blocks}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.fixture
def trace_file(tmp_path):
    return write(
        tmp_path / "t.jsonl",
        mooncake([1, 2, 3], 1300),
        mooncake([1, 2, 3, 4], 2048, timestamp=5),
        mooncake([1, 2, 9], 1100, timestamp=2),
        "",
    )


def run(*arguments: Any) -> int:
    return command.main([str(argument) for argument in arguments])


# -- formats -----------------------------------------------------------------------------------------------------------


def test_mooncake_lines_come_in_the_order_of_time_without_the_last_partial_block(trace_file):
    trace = read_trace([trace_file])
    assert (trace.format, trace.block_tokens, trace.prompt_tokens) == ("mooncake", 512, 1300 + 1100 + 2048)
    first, second, third = trace.requests
    assert [len(request.keys) for request in trace.requests] == [2, 2, 4]
    assert first.keys == second.keys == third.keys[:2], "1300 tokens fill two blocks"
    # The third block was partial in the first prompt: what it holds now was never computed as a whole.
    assert list(ceiling_tokens(trace)) == [0, 1024, 1024]


def test_an_id_means_its_text_and_all_text_before():
    trace = read_trace_of([mooncake([1, 2], 1024), mooncake([2, 1], 1024), mooncake([1, 1], 1024)])
    assert list(ceiling_tokens(trace)) == [0, 0, 512]


def trace_of(prompts: list[list[bytes]], block_tokens: int) -> Trace:
    requests = [TraceRequest(keys=keys, prompt_tokens=len(keys) * block_tokens + 2, timestamp=0) for keys in prompts]
    return Trace(format="mooncake", block_tokens=block_tokens, requests=tuple(requests))


def read_trace_of(lines: list[Any], **options: Any) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        return read_trace([write(Path(folder) / "t.jsonl", *lines)], **options)


def test_ids_of_a_session_mean_nothing_in_another():
    lines = [session(step(0, 130, [1, 2]), step(4, 192, [1, 2, 3])), session(step(1, 128, [1, 2]))]
    trace = read_trace_of(lines)
    assert (trace.format, trace.block_tokens) == ("session", 64)
    assert [request.prompt_tokens for request in trace.requests] == [130, 128, 192]
    assert list(ceiling_tokens(trace)) == [0, 0, 128]
    shared = read_trace_of([line | {"hash_id_scope": "global"} for line in lines])
    assert list(ceiling_tokens(shared)) == [0, 64, 128]


def test_an_agent_within_a_session_shares_its_ids():
    inner = {"t": 1, "type": "subagent", "requests": [step(1, 64, [1]), step(2, 100, [1, 7])]}
    trace = read_trace_of([session(step(0, 64, [1]), inner, step(3, 130, [1, 7]))])
    # 64 of 64 tokens are cached, but one has to be computed. The agent starts at 1.
    assert [(request.timestamp, len(request.keys)) for request in trace.requests] == [(0, 1), (2, 1), (3, 1), (3, 2)]
    assert list(ceiling_tokens(trace)) == [0, 0, 64, 64]


def test_a_request_continues_the_latest_session_whose_whole_blocks_begin_its_prompt():
    prompts = [[1], [1, 2], [1, 2, 3], [1, 2], [1, 2, 3, 4], [1, 2, 4], [1], [5, 2, 3]]
    trace = read_trace_of([mooncake(ids, len(ids) * 512 + 1, timestamp=at) for at, ids in enumerate(prompts)])
    sessions = sessions_of(trace)
    assert sessions.numbers == [0, 1, 1, 1, 1, 1, 2, 3], "one block, or another beginning, continues none"
    assert sessions.last == {0: 0, 1: 5, 2: 6, 3: 7}
    named = [
        {"session_id": name, "timestamp": at, "input_length": 16, "hash_ids": [1], "block_size": 16}
        for at, name in enumerate("aaba")
    ]
    assert sessions_of(read_trace_of(named)).numbers == [0, 0, 1, 0]
    assert sessions_of(trace, early=1.0).last == {0: 0, 1: 1, 2: 6, 3: 7} and not sessions_of(trace, never=1.0).last


def test_blocks_of_sessions_are_joined_and_equal_keys_are_one_object():
    line = session(step(0, 300, [1, 2, 3, 4, 5]), step(1, 330, [1, 2, 3, 4, 5, 6]), step(2, 192, [1, 2, 9]))
    trace = read_trace_of([line], block_tokens=128)
    assert trace.block_tokens == 128 and [len(request.keys) for request in trace.requests] == [2, 2, 1]
    first, second, third = (request.keys for request in trace.requests)
    assert all(mine is its for mine, its in zip(first, second, strict=True)) and third[0] is first[0]
    assert [request.answer_tokens for request in trace.requests] == [3, 3, 3]


def sessions_of_turns(count: int, turns: int) -> Trace:
    """Each turn has two blocks more, sent alternately."""
    lines = [
        {"session_id": name, "timestamp": turn, "input_length": 33 + 32 * turn, "block_size": 16}
        | {"hash_ids": [*range(2 * turn + 3)], "out": 10}
        for turn in range(turns)
        for name in range(count)
    ]
    return read_trace_of(lines)


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_sessions_side_by_side_hold_what_they_use_and_wait(at_once):
    trace = sessions_of_turns(4, 3)
    room = {"kv_blocks": 14, "page_blocks": 1, "live_states": True}  # of a prompt of 6 blocks, and states
    served: list[int] = []
    found = replay(trace, at_once=at_once, on_request=served.append, **room)
    assert served[-1] == 12 and not found.refused_requests
    # A session alone finds all of its last turn; of several some was evicted meanwhile.
    assert (sum(found.reused_tokens) == 4 * (32 + 64)) == (at_once == 1)
    assert replay(trace, at_once=at_once, **room).reused_tokens == found.reused_tokens
    ceiling = replay(trace, at_once=at_once, **kv_alone(room))
    assert sum(ceiling.reused_tokens) >= sum(found.reused_tokens)


def test_a_request_that_never_fits_is_left_out_and_its_session_goes_on():
    trace = read_trace_of([session(step(0, 64 * 20, [*range(20)]), step(1, 130, [1, 2]), step(2, 190, [1, 2]))])
    found = replay(trace, at_once=2, kv_blocks=8, page_blocks=1, live_states=False)
    assert found.refused_requests == 1 and list(found.reused_tokens) == [0, 0, 128]


@pytest.mark.parametrize("wrong", [{}, {"early": 0.3}, {"never": 1.0}])
@pytest.mark.parametrize("after_s", [0, 3])
def test_a_cache_that_is_told_of_ends_reuses_more(wrong, after_s):
    """Chats of four turns, of which some run at once, beside prompts that never come back; a second is two requests."""
    dice, lines, open_chats = random.Random(0), [], {}
    for number in range(600):
        if dice.random() < 0.5:
            ids = [10**6 + number, 1]
        else:
            name = dice.choice([*open_chats, number]) if len(open_chats) < 6 else dice.choice(list(open_chats))
            ids = open_chats[name] = [*open_chats.get(name, [10**7 + name, 2]), 10**8 + number]
            if len(ids) > 6:
                del open_chats[name]
        lines.append(mooncake(ids, len(ids) * 512 + 1, timestamp=500 * number))
    trace = read_trace_of(lines)
    without, hinted = (
        replay(trace, sessions=sessions, ends_after_s=after_s, **unlimited_kv(trace, 8))
        for sessions in (None, sessions_of(trace, **wrong))
    )
    assert hinted.reused_token_fraction > (1.2 if not wrong else 0.98) * without.reused_token_fraction
    assert (
        bool(hinted.counters["evictions_ended"]) == (wrong != {"never": 1.0}) and not without.counters["sessions_ended"]
    )


def test_a_line_may_be_one_request_of_a_session():
    lines = [
        {"session_id": name, "timestamp": at, "input_length": 40, "hash_ids": [1, 2, 3], "block_size": 16}
        for at, name in enumerate("aba")
    ]
    trace = read_trace_of(lines)
    assert (trace.format, trace.block_tokens) == ("session", 16)
    assert list(ceiling_tokens(trace)) == [0, 0, 32]


def test_texts_are_cut_into_bytes():
    lines = [{"timestamp": 2, "input": "x" * 300 + "é"}, {"timestamp": 1, "input": "x" * 280}]
    trace = read_trace_of(lines, block_tokens=64)
    assert [request.prompt_tokens for request in trace.requests] == [280, 302]
    assert list(ceiling_tokens(trace)) == [0, 256]
    assert read_trace_of(lines).block_tokens == 256


def test_a_byte_order_mark_is_no_text(tmp_path, trace_file):
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + trace_file.read_bytes())
    assert read_trace([marked]) == read_trace([trace_file])


def test_a_packed_file_is_named(tmp_path, capsys):
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(b"{}"))
    assert run(packed) == 2
    assert capsys.readouterr().err == f"error: {packed}: not UTF-8 text (byte 1); unpack it first\n"


def test_several_files_are_one_trace_and_a_limit_takes_the_first(tmp_path, trace_file):
    other = write(tmp_path / "u.jsonl", mooncake([1], 700, timestamp=1))
    lengths = [request.prompt_tokens for request in read_trace([trace_file, other]).requests]
    assert lengths == [1300, 700, 1100, 2048]
    assert [request.prompt_tokens for request in read_trace([trace_file, other], limit=2).requests] == [1300, 700]


GOOD = {
    "mooncake": mooncake([1, 2, 3], 1300),
    "session": session(step(0, 130, [1, 2, 3])),
    "text": {"timestamp": 0, "input": "text"},
}


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        ("mooncake", "{", "not JSON: Expecting property name"),
        ("mooncake", "[1]", "expected a JSON object"),
        ("mooncake", "[" * 100_000, "cannot read the JSON"),
        ("mooncake", mooncake([1, 2], 1300, timestamp="now"), '"timestamp" must be a number'),
        ("mooncake", mooncake([1], 512, timestamp=float("nan")), '"timestamp" must'),
        ("mooncake", mooncake([1, 2], 1300, timestamp=True), '"timestamp" must be a number'),
        ("mooncake", mooncake([], 0), '"input_length" must be a whole number, 1 or more'),
        ("mooncake", mooncake([1], 512.0), '"input_length" must be a whole number'),
        ("mooncake", mooncake([1, 2], 1024, output_length=-1), '"output_length" must be a whole number, 0 or more'),
        ("mooncake", mooncake([1, "2"], 1024), '"hash_ids" must be a list of whole numbers'),
        ("mooncake", mooncake([1, True], 1024), '"hash_ids" must be a list of whole numbers'),
        ("mooncake", mooncake({"1": 2}, 1024), '"hash_ids" must be a list of whole numbers'),
        ("mooncake", mooncake([1], 1300), '"hash_ids" has 1 ids for 1300 tokens in blocks of 512'),
        ("mooncake", mooncake([1, 2, 3, 4], 1300), '"hash_ids" has 4 ids for 1300 tokens in blocks of 512'),
        ("mooncake", {"timestamp": 1, "hash_ids": []}, '"input_length" is missing'),
        ("session", session(step(0, 130, [1, 2, 3]), block_size=32), "blocks of 32 tokens; expected 64"),
        ("session", session(block_size=0), '"block_size" must be a whole number, 1 or more'),
        ("session", session(requests=[3]), '"requests" must be a list of objects'),
        ("session", session(step(0, 130, [1])), 'request 1: "hash_ids" has 1 ids for 130 tokens'),
        ("session", session({"requests": [step(0, 0, [])]}), 'request 1: request 1: "in" must be a whole number'),
        ("session", {"block_size": 64, "hash_ids": [1], "input_length": 64, "timestamp": 0}, '"session_id" is missing'),
        ("text", {"timestamp": 0, "input": 5}, '"input" must be text'),
        ("text", {"timestamp": 0, "input": ""}, '"input" must be text, and not empty'),
        ("text", {"input": "x"}, '"timestamp" is missing'),
        ("text", mooncake([1], 512), '"input" is missing'),
        ("mooncake", GOOD["text"], '"input_length" is missing'),
    ],
)
def test_a_malformed_line_is_named(tmp_path, capsys, kind, line, message):
    path = write(tmp_path / "t.jsonl", GOOD[kind], "", GOOD[kind], line, GOOD[kind])
    assert run(path) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}:4: {message}") and said.count("\n") == 1


BAD_OPTIONS = {  # by command line
    "--state-slots 64 x": "argument --state-slots: 'x' is not a whole number",
    "--kv-blocks 4": "unrecognized arguments: --kv-blocks 4",
    "--interval 100": "--interval: 100 is not a multiple of the block of 512 tokens",
    "--interval x": "argument --interval: 'x' is not a whole number",
    "--hints -1": "argument --hints: '-1' is not a number of seconds, 0 or above",
    "--baselines lru": "unrecognized arguments: --baselines lru",
    "--preset huge": "huge: neither a file nor a preset; presets: tiny",
    "--json /nowhere/x.json": "cannot write /nowhere/x.json: there is no folder /nowhere",
    "--block-tokens 0": "argument --block-tokens: '0' is not a whole number above 0",
    "--eviction fifo": "argument --eviction: invalid choice: 'fifo' (choose from ",
    "--cache-gb 3": "--cache-gb: needs the bytes of a model: give --preset or --hf",
    "--mamba-gb 3": "--mamba-gb, --host-gb and --checkpoint-dtype go with --cache-gb; with --state-slots use --host-pages",
    "--cache-gb 2 4 --mamba-gb 3 --preset tiny": "--mamba-gb 3: the most for checkpoints in",
    "--cache-gb 3 --state-slots 4": "argument --state-slots: not allowed with argument --cache-gb",
    "--cache-gb 0.01 --preset nemotron-h-8b": "--cache-gb 0.01: cache_bytes=10737418: a state and a KV",
    "--cache-gb 1e300 --preset tiny": "--cache-gb 1e+300: more than any machine has",
    "--cache-gb 1e8 --preset tiny": "204,800,000,000 KV blocks: a replay has at most 8,388,608",
    "--state-slots 9999999": "9,999,999 state slots: a replay has at most 8,388,608",
    "--hf somewhere --preset tiny": "--hf",
}


@pytest.mark.parametrize("arguments", BAD_OPTIONS)
def test_bad_options_are_named(trace_file, capsys, arguments):
    assert run(trace_file, *arguments.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {BAD_OPTIONS[arguments]}") and said.count("\n") == 1


def test_files_that_cannot_be_read(tmp_path, capsys):
    assert run(tmp_path / "none.jsonl") == 2
    assert "cannot read" in capsys.readouterr().err
    assert run(write(tmp_path / "empty.jsonl", "", "")) == 2
    assert "no requests in it" in capsys.readouterr().err
    with pytest.raises(InputError, match="byte 0"):
        (tmp_path / "b.jsonl").write_bytes(b"\xff\xff")
        read_trace([tmp_path / "b.jsonl"])


# -- figures -----------------------------------------------------------------------------------------------------------


def test_table_and_json(tmp_path, trace_file, capsys):
    report = tmp_path / "r.json"
    assert run(trace_file, "--state-slots", "4", "16", "--interval", "1024", "--json", report) == 0
    said = capsys.readouterr().out
    data = json.loads(report.read_text())
    assert data["ceiling_fraction"] == 2048 / 4448 and data["reused_token_fraction"] == 2048 / 4448
    names = ["recompute_cost", "lru"]
    shares = {"4": 2048 / 4448, "16": 2048 / 4448}
    assert data["reused_token_fractions"] == {name: shares for name in names}
    assert [found["settings"]["eviction_policy"] for found in data["runs"]] == [
        name for name in names for _ in range(2)
    ]
    for found in data["runs"]:
        assert found["reused_tokens"] <= 2048 and found["prompt_tokens"] == 4448
        assert 0 < found["counters"]["slots_used"] <= found["settings"]["state_slots"] == int(found["budget"])
    for name in (*names, "0.4604", "state slots"):
        assert name in said


def test_what_a_policy_keeps(trace_file):
    trace = read_trace([trace_file])
    branch = read_trace_of([mooncake([1, 2, last], 1600) for last in (3, 4, 5)])
    for interval, expected in ((None, [0, 1024, 1024]), (0, [0, 0, 1024])):
        rules = {"eviction_policy": "lru", "retention_interval_tokens": interval}
        # The third prompt fills four blocks of which two were seen; all have the tail of the first.
        assert list(replayed(trace, 9, **rules).reused_tokens) == [0, 1024, 1024]
        assert list(replayed(branch, 9, **rules).reused_tokens) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_beats_the_ceiling_and_unlimited_memory_reaches_it(kind):
    trace = made_up(kind, 300)
    ceiling = ceiling_tokens(trace)
    for slots in (0, 8, 100_000):
        found = replayed(trace, slots).reused_tokens
        assert all(mine <= most for mine, most in zip(found, ceiling, strict=True))
    every_block = {"eviction_policy": "lru", "retention_interval_tokens": trace.block_tokens}
    found = replayed(trace, 100_000, **every_block)
    assert found.reused_tokens == ceiling and found.counters["kv_evictions"] == 0
    assert sum(replayed(trace, 0).reused_tokens) == 0


def test_prompts_that_need_more_blocks_than_there_are_are_counted():
    trace = trace_of([[bytes([block]) * 16 for block in range(blocks)] for blocks in (3, 9, 3)], 64)
    found = replay(trace, kv_blocks=8)
    assert found.refused_requests == 1 and list(found.reused_tokens) == [0, 0, 192]


def test_ctrl_c_ends_it(trace_file):
    interrupt = Interrupt()
    interrupt.requested = True
    with pytest.raises(Stopped):
        command.run([str(trace_file)], interrupt)


# -- a second tier -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", eviction_policy_names())
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_host_gives_what_a_large_device_gives(kind, eviction):
    """Then no requested state is ever lost; interval states may be."""
    trace = made_up(kind, 400, seed=3)
    rules = {"eviction_policy": eviction, "retention_interval_tokens": 0}
    with_host = replayed(trace, 4, host_pages=20_000, **rules)
    assert with_host.reused_tokens == replayed(trace, 20_000, **rules).reused_tokens
    assert with_host.counters["tiers"]["host"]["loads"] > 0


def test_host_options(trace_file, tmp_path):
    out = tmp_path / "out.json"
    assert run(trace_file, "--state-slots", "1", "--host-pages", "16", "--json", out) == 0
    assert [found["settings"]["host_pages"] for found in json.loads(out.read_text())["runs"]] == [16, 16]
