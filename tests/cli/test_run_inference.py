"""`hybrid-prefix generate`, and `run_batch` under it: bad input, results, comparison, ranks, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import random
import shlex
import signal
import time
from pathlib import Path

import pytest

from megatron_hybrid_prefix.cli import generate
from megatron_hybrid_prefix.console.answers import least_tokens
from megatron_hybrid_prefix.console.engine_options import ENGINES, KEPT_FREE, Budgets, budget_of, default_cache_gb
from megatron_hybrid_prefix.console.prompts import Reader, parse_prompts
from megatron_hybrid_prefix.console.terminal import InputError
from megatron_hybrid_prefix.text.tokenizer import common_tokens
from tests.harness.engine_helpers import LOG_PROB_NOISE, greedy
from tests.harness.limits import wait_until
from tests.harness.workers.launch import COMMAND, Prepared, environments_of, run_prepared

pytestmark = pytest.mark.usefixtures("engine_imported")
CONTEXT = "The cache holds keys and values in blocks, and a recurrent state at some of the block boundaries. " * 12


def run_json(tmp_path, *argv):
    """Runs the command in this process, which must succeed, and returns the JSON it saved."""
    path = tmp_path / "result.json"
    assert generate.main([*map(str, argv), "--json", str(path)]) == 0
    return json.loads(path.read_text())


def write(path, *lines):
    """Writes a file of lines. Lines that are not text are written as JSON."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def requests_of(data, engine=None):
    """Of the engine; by default of the first."""
    requests = data["engines"][engine or next(iter(data["engines"]))]["requests"]
    for request in requests:
        assert request["computed_tokens"] + request["reused_tokens"] == request["prompt_tokens"]
        assert request["time_to_first_token_s"] > 0
    return requests


# --- Bad input: one line, exit code 2, nothing written ---------------------------------------------------------------

# Values of single sampling fields: tests/harness/bad_requests.py; layouts: tests/models/test_models.py; engines:
# tests/engine/test_refusals.py.
BAD_OPTIONS = {  # by command line
    "x --temperature -0.5": "temperature=-0.5 must be a number in 0..1e+06",
    "": "give prompts (as text or --jsonl), or --conversation",
    "x --conversation ok.json": "but only one of them",
    "--jsonl absent.jsonl": "cannot read absent.jsonl: No such file",
    "--jsonl binary.txt": "binary.txt: not UTF-8 text (byte 1)",
    "x --sessions ok.jsonl": "or --conversation, or --sessions, but only one of them",
    "--sessions absent.jsonl": "cannot read absent.jsonl",
    "--sessions empty.jsonl": "empty.jsonl: no requests in it",
    "--sessions ok.jsonl --max-sequence-length 8": "ok.jsonl:1: 9 tokens leave no",
    "''": "prompt 1: the prompt is empty",
    f"{'x' * 64} --max-sequence-length 64": "64 tokens leave no room",
    "--conversation ok.json --max-sequence-length 70": "turn 2: ",
    f"{'x' * 65} --max-tokens 64": "65 tokens are more than --max-tokens 64",
    "x --max-tokens 65": "--max-tokens 65 is not a multiple of 64",
    "--conversation ok.json --concurrency batch": "--concurrency batch",
    "x --preset huge": "no preset 'huge'; there are: tiny",
    "x --compare best": "argument --compare: invalid choice: 'best' (choose from 'off'",
    "x --compare off --compare off": "--compare: off and off name an engine twice",
    "x --fast": "unrecognized arguments: --fast",
    "x --tp 0": "argument --tp: '0' is not a whole number above 0",
    "x --exact tokens": "argument --exact: invalid choice: 'tokens'",
    "x --tp 3": "tp=3 does not divide mamba_num_groups=4",
    "x --json absent/r.json": "cannot write absent/r.json: there is no folder absent",
    "x --json .": "it is a folder",
    "x --json pipe": "cannot write pipe: it is no regular file",
    "x --json -": "cannot write to -: standard output has the report",
    f"x --json {'a' * 300}": "File name too long",
    "--jsonl empty.jsonl": "empty.jsonl: no prompts in it",
    "x --compare off --compare ours --cache-gb 1e9": "--cache-gb 1e+09: 1e+09 GiB of host memory are needed, ",
    "x --compare ours --host-gb 1e9": "--cache-gb 0.3 and --host-gb 1e+09: ",
    "x --compare upstream --mamba-gb 1e9": (
        "--mamba-gb 1e+09: the most for checkpoints in --cache-gb 0.3, so it cannot be larger"
    ),
    "x --max-tokens 960000000": (
        "engine ours: not enough memory; lower --cache-gb, --max-requests or --max-tokens, or run fewer"
    ),
    f"x --max-requests {'9' * 30}": "is too large: it must have at most 9 digits",
    "x --num-speculative-tokens 2": "--num-speculative-tokens 2: tiny has no multi-token prediction",
    "x --preset tiny-mtp --num-speculative-tokens 4": "--num-speculative-tokens 4: tiny-mtp drafts at most 3",
    "x --load absent": "--load: there is no folder absent",
    "x --tokenizer absent": "no tokenizer at absent",
    "x --compare off --cache-gb 0.0001": "is too small: the recurrent states of max_requests=16 need",
    "x --compare upstream --mamba-gb 0.0001": "engine upstream: Mamba prefix",
    "x --compare ours --cache-gb 0.0001": "cache_gb=0.0001 is too small",
    f"{'x' * 2000} --compare off --cache-gb 0.002 --max-requests 4": (
        "need 8 KV blocks of 256 tokens, there are 5: raise buffer_size_gb or lower max_requests"
    ),
    f"{'x' * 2000} --compare ours --cache-gb 0.0017": "need 8 KV blocks of 256 tokens, there are 3: raise cache_gb",
    "x --load .": "is not a complete checkpoint",
    "x --cuda-graphs 2": "needs a CUDA device",
    "x --top-p 0.5 --top-k 3 --compare off --compare upstream": (
        "engine upstream: megatron samples by top_k or by top_p"
    ),
}
BAD_LINES = {
    '{"prompt": ': "bad.jsonl:3: not JSON",
    '["prompt"]': 'bad.jsonl:3: expected an object with either "prompt" or "tokens"',
    '{"prompt": "x", "tokens": [1]}': 'bad.jsonl:3: expected an object with either "prompt" or "tokens"',
    '{"tokens": [1, 512]}': "bad.jsonl:3: token 512 is outside the vocabulary of 512",
    '{"tokens": [-1]}': "bad.jsonl:3: token -1 is outside",
    '{"tokens": [1.5]}': 'bad.jsonl:3: "tokens" must be a list of token ids',
    '{"tokens": []}': "bad.jsonl:3: the prompt is empty",
    '{"prompt": "x", "temprature": 1}': "bad.jsonl:3: unknown field 'temprature'",
    '{"prompt": "x", "num_tokens_to_generate": true}': "bad.jsonl:3: num_tokens_to_generate=True is not of type int",
    '{"prompt": "x", "num_tokens_to_generate": 0}': "bad.jsonl:3: num_tokens_to_generate=0 must be at least 1",
    '{"prompt": "abc", "cache_breakpoints": 3}': "bad.jsonl:3: cache_breakpoints=3 is not of type list",
    '{"prompt": "abc", "cache_breakpoints": [1, 4]}': "bad.jsonl:3: cache_breakpoints: 4 is not between 1 and the prompt's 3 tokens",
    '{"tokens": [1, 2], "cache_breakpoints": [true]}': "bad.jsonl:3: cache_breakpoints: True is not between 1 and",
}
# Lines that are no JSON: tests/lab/test_replay_trace.py, which reads them alike.
BAD_SESSIONS = {
    "[1]": 'bad.jsonl:3: expected an object with "timestamp" and "input"',
    '{"timestamp": 3}': 'bad.jsonl:3: expected an object with "timestamp" and "input"',
    '{"timestamp": true, "input": "x"}': 'bad.jsonl:3: "timestamp" must be a number',
    '{"timestamp": NaN, "input": "x"}': 'bad.jsonl:3: "timestamp" must be a number',
    '{"timestamp": 3, "input": ["x"]}': 'bad.jsonl:3: "input" must be text',
    '{"timestamp": 3, "input": ""}': "bad.jsonl:3: the prompt is empty",
}
BAD_CONVERSATIONS = {
    '{"turns": [\n"x",]}': "bad.json:2: not JSON",
    '{"system": "x"}': 'expected an object with "system"',
    '{"turns": []}': "no user turn",
    '{"turns": ["x", 3]}': "turn 2 must be text",
    '{"turns": ["x"], "context": 3}': "must be text",
}
# Bad input in a file: its option, its name, what stands before it, and the messages.
BAD_FILES = {
    "--jsonl": ("bad.jsonl", '{"prompt": "good"}\n\n', BAD_LINES),
    "--sessions": ("bad.jsonl", '{"timestamp": 5, "input": "good", "more": [1]}\n\n', BAD_SESSIONS),
    "--conversation": ("bad.json", "", BAD_CONVERSATIONS),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a valid conversation and a binary file."""
    write(tmp_path / "ok.json", {"turns": ["What is it?", "Why?"]})
    (tmp_path / "binary.txt").write_bytes(b"a\xff")
    write(tmp_path / "ok.jsonl", {"timestamp": 1, "input": "A session"})
    (tmp_path / "empty.jsonl").write_text("\n\n")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def expect_error(capsys, folder, argv, message):
    before = sorted(folder.iterdir())
    output = [] if "--json" in argv else ["--json", "result.json"]
    assert generate.main([*argv, *output]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(case, folder, capsys):
    expect_error(capsys, folder, shlex.split(case), BAD_OPTIONS[case])
    assert "platform" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "text"), [(option, text) for option, (_, _, table) in BAD_FILES.items() for text in table]
)
def test_bad_files(option, text, folder, capsys):
    name, before, table = BAD_FILES[option]
    write(folder / name, before + text)
    expect_error(capsys, folder, [option, name], table[text])


@pytest.mark.parametrize(
    ("argv", "ours", "upstream"),
    [
        ([], {"cache_gb": 0.3}, {"buffer_gb": 0.25, "mamba_gb": 0.05}),
        (["--mamba-gb", "0.1"], {"cache_gb": 0.3}, {"buffer_gb": 0.2, "mamba_gb": 0.1}),
        (["--mamba-gb", "1", "--cache-gb", "4"], {"cache_gb": 4}, {"buffer_gb": 3, "mamba_gb": 1}),
        (["--cache-gb", "3"], {"cache_gb": 3}, {"buffer_gb": 2.5, "mamba_gb": 0.5}),
        (["--host-gb", "1"], {"cache_gb": 0.3, "host_gb": 1}, {"buffer_gb": 0.25, "mamba_gb": 0.05}),
    ],
)
def test_engines_with_a_cache_have_the_same_memory(argv, ours, upstream):
    args = generate.make_parser().parse_intermixed_args(["x", *argv])
    budgets = Budgets.of(args, "cpu", free_bytes=2**40)
    found = {name: budget_of(arguments(budgets)) for name, arguments in ENGINES.items()}
    assert found["ours"] == pytest.approx(ours) and found["upstream"] == pytest.approx(upstream)
    assert found["off"] == {"buffer_gb": found["upstream"]["buffer_gb"]}


@pytest.mark.parametrize(
    ("free_gib", "device", "engines", "cache_gb"),
    [
        (140, "cuda", 1, 28),  # an H200: the usual ones
        (140, "cuda", 3, 28),
        (70, "cuda", 1, 28),
        (70, "cuda", 3, 19.833),  # three engines on an H100 with the weights of hybrid-4b
        (20, "cuda", 1, 17),
        (0, "cuda", 3, 0),
        (-1, "cuda", 3, 0),
        (8, "cpu", 3, 0.3),
        (0.6, "cpu", 3, 0.169),
    ],
)
def test_the_default_budget_fits_what_is_free(free_gib, device, engines, cache_gb):
    found = default_cache_gb(int(free_gib * 2**30), device, engines)
    assert found == cache_gb
    assert engines * found <= max(0, free_gib * (1 - KEPT_FREE))


def test_given_budgets_stay_as_given_where_little_is_free():
    args = generate.make_parser().parse_intermixed_args(["x", "--cache-gb", "40", "--mamba-gb", "3"])
    budgets = Budgets.of(args, "cuda", free_bytes=28 * 2**30, engines=2)
    assert (budgets.cache_gb, budgets.mamba_gb) == (40, 3)
    args = generate.make_parser().parse_intermixed_args(["x", "--mamba-gb", "3"])
    wanted = Budgets.of(args, "cuda", free_bytes=28 * 2**30, engines=2, cache_gb=10.5, mamba_gb=9)
    assert (wanted.cache_gb, wanted.mamba_gb) == (10.5, 3)  # of a scenario
    args = generate.make_parser().parse_intermixed_args(["x", "--cache-gb", "2"])
    with pytest.raises(InputError, match="--mamba-gb 9: the most for checkpoints in --cache-gb 2"):
        Budgets.of(args, "cuda", free_bytes=28 * 2**30, cache_gb=10.5, mamba_gb=9)


# --- Results ---------------------------------------------------------------------------------------------------------


def test_prompts_of_every_kind_in_one_batch(folder, capsys):
    lines = write(
        folder / "lines.jsonl",
        {"prompt": "héllo", "num_tokens_to_generate": 3},
        "",
        {"tokens": list(range(300)), "num_tokens_to_generate": 1},
    )
    data = run_json(folder, "hi", CONTEXT, "--jsonl", lines, "--num-tokens-to-generate", 5)
    requests = requests_of(data)
    assert [r["label"] for r in requests] == ["prompt 1", "prompt 2", "lines.jsonl:1", "lines.jsonl:3"]
    assert [r["prompt_tokens"] for r in requests] == [2, len(CONTEXT), 6, 300]
    assert [len(r["generated"]) for r in requests] == [5, 5, 3, 1]
    assert all(len(r["log_probs"]) == len(r["generated"]) and max(r["log_probs"]) < 0 for r in requests)
    assert requests[3]["tokens_per_second"] is None
    assert list(data["engines"]) == ["ours"]
    total = data["engines"]["ours"]["totals"]
    assert total["computed_tokens"] == total["prompt_tokens"] == 308 + len(CONTEXT)
    assert (total["generated_tokens"], total["failed_requests"]) == (14, 0)
    output = capsys.readouterr().out
    assert output.count("platform: CPU") == 1
    assert "the prefix cache has 0.3 GiB (--cache-gb); to go without it: --compare off\n" in output
    assert "prompt 2" in output and "wrote" in output

    # One at a time they say the same, and an own budget of tokens changes nothing either.
    alone = run_json(folder, "hi", "--num-tokens-to-generate", 5, "--concurrency", "sequential", "--cache-gb", 0.01)
    assert requests_of(alone)[0]["generated"] == requests[0]["generated"]
    assert requests_of(alone)[0]["log_probs"] == pytest.approx(requests[0]["log_probs"], abs=LOG_PROB_NOISE)


def test_prompts_of_standard_input_and_after_two_dashes(folder, monkeypatch):
    common = ("--num-tokens-to-generate", 1)

    def lengths(text, *argv):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return [request["prompt_tokens"] for request in requests_of(run_json(folder, *common, *argv))]

    given = ["x", "--seed", "1", "-", "--", "-hello", "-", "--json"]
    assert parse_prompts(generate.make_parser(), given).prompt == ["x", Path("-"), "-hello", "-", "--json"]
    assert lengths("three", "x", "-", "--seed", 1) == [1, 5]
    assert lengths('{"prompt": "ab"}\n{"prompt": "c"}', "--jsonl", "-") == [2, 1]
    assert lengths('{"timestamp": 1, "input": "ab"}', "--sessions", "-") == [2]
    assert lengths('{"turns": ["x"]}', "--conversation", "-") == [len("User: x\nAssistant:")]


def test_standard_input_is_read_once(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"x")))
    expect_error(capsys, folder, ["-", "-"], "standard input (-) is empty, or was read before")
    monkeypatch.setenv("WORLD_SIZE", "2")
    expect_error(capsys, folder, ["-"], "several ranks need it: give a file")


def test_sampling_options(folder):
    common = ("hi", "--num-tokens-to-generate", 6)
    greedy = requests_of(run_json(folder, *common))[0]
    bos = requests_of(run_json(folder, *common, "--add-bos", "--no-log-probs"))[0]
    assert (bos["prompt_tokens"], bos["log_probs"]) == (3, [])
    sampled = [requests_of(run_json(folder, *common, "--top-p", 0.9, "--temperature", 2))[0] for _ in range(2)]
    assert sampled[0]["generated"] == sampled[1]["generated"] != greedy["generated"]
    both = ("--top-p", 0.9, "--top-k", 1 << 8, "--temperature", 2)
    assert requests_of(run_json(folder, *common, *both))[0]["generated"] != greedy["generated"]
    for options in (("--temperature", 0), ("--temperature", 0, "--top-k", 5, "--top-p", 0.5), ("--top-k", 1)):
        assert requests_of(run_json(folder, *common, *options))[0]["generated"] == greedy["generated"]
    stopped = requests_of(run_json(folder, "hi", "--num-tokens-to-generate", 40, "--stop-word", "\\", "--ignore-eos"))[
        0
    ]
    assert len(stopped["generated"]) == len(stopped["log_probs"])
    assert ord("\\") not in stopped["generated"]


def test_saved_weights_are_loaded(folder, platform):
    from megatron_hybrid_prefix import models

    models.save_checkpoint(models.build_hybrid_model("tiny", seed=3, platform=platform), folder / "weights")
    options = ("hi", "--num-tokens-to-generate", 4)
    same, loaded, other = (
        requests_of(run_json(folder, *options, *more))[0]["log_probs"]
        for more in (("--seed", 3), ("--load", "weights"), ())
    )
    assert same == loaded != other


def test_options_of_the_engine(folder):
    plain = requests_of(run_json(folder, CONTEXT, "--num-tokens-to-generate", 4))[0]
    for options in (("--chunked-prefill", "--max-tokens", 256), ("--async-scheduling",), ("--block-size-tokens", 128)):
        other = requests_of(run_json(folder, CONTEXT, "--num-tokens-to-generate", 4, *options))[0]
        assert other["generated"] == plain["generated"]
        assert other["log_probs"] == pytest.approx(plain["log_probs"], abs=LOG_PROB_NOISE)


def test_drafts(folder):
    fields = ("--preset", "tiny-mtp", "--ignore-eos", "--num-tokens-to-generate", 12, "--compare", "ours")
    plain, drafted = (run_json(folder, CONTEXT, *fields, "--num-speculative-tokens", drafts) for drafts in (0, 2))
    assert drafted["engine_fields"]["num_speculative_tokens"] == 2
    (one,), (other,) = requests_of(plain, "ours"), requests_of(drafted, "ours")
    assert one["generated"] == other["generated"]
    assert one["log_probs"] == pytest.approx(other["log_probs"], abs=LOG_PROB_NOISE)


def test_exact_to_the_bit(folder):
    """The option reaches the engine with this package's cache, and no other."""
    parser = generate.make_parser()
    for argv, exact in (([], None), (["--exact", "bits"], "bits")):
        budgets = Budgets.of(parser.parse_intermixed_args(["x", *argv]), "cpu", free_bytes=2**40)
        fields = {name: arguments(budgets) for name, arguments in ENGINES.items()}
        assert fields["ours"]["prefix"].exact == exact
        assert all("prefix" not in fields[name] for name in ("off", "upstream"))
    argv = (CONTEXT, CONTEXT, "--compare", "ours", "--concurrency", "sequential", "--exact", "bits")
    requests = requests_of(run_json(folder, *argv), "ours")
    assert [request["reused_tokens"] > 0 for request in requests] == [False, True]
    assert requests[0]["log_probs"] == requests[1]["log_probs"] and requests[0]["generated"] == requests[1]["generated"]


def test_conversation_off_against_upstream(folder, capsys):
    session = {"system": "Answer.", "context": CONTEXT, "turns": ["What is kept?", "Where is it?"]}
    write(folder / "session.json", session)
    options = ("--compare", "off", "--compare", "upstream", "--num-tokens-to-generate", 8, "--ignore-eos")
    data = run_json(folder, "--conversation", "session.json", *options)
    off, upstream = requests_of(data), requests_of(data, "upstream")
    assert [r["label"] for r in off] == ["turn 1", "turn 2"]
    lengths = [r["prompt_tokens"] for r in off]
    assert lengths == [r["prompt_tokens"] for r in upstream]
    # Turn 2 continues turn 1 and its answer of 8 tokens.
    assert lengths[1] - lengths[0] == 8 + len("\nUser: Where is it?\nAssistant:")
    assert all(r["reused_tokens"] == 0 for r in off)
    assert upstream[0]["reused_tokens"] == 0
    assert all(r["reused_tokens"] >= 1024 and r["reused_tokens"] % 256 == 0 for r in upstream[1:])
    (comparison,) = data["comparisons"]
    assert (comparison["engine"], comparison["against"]) == ("upstream", "off")
    for entry in comparison["requests"]:
        assert entry["tokens_equal"] and entry["first_difference"] is None and entry["compared_log_probs"] == 8
        assert entry["max_log_prob_difference"] < LOG_PROB_NOISE
    assert "upstream against off" in capsys.readouterr().out
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == []


def test_a_difference_is_shown_and_is_no_error(folder, capsys):
    """Upstream restores a wrong convolution state if 2 tokens follow a cached boundary."""
    lines = write(folder / "same.jsonl", *[{"tokens": [7 * i % 251 for i in range(514)]}] * 2)
    data = run_json(
        folder, "--jsonl", lines, "--concurrency", "sequential", "--compare", "off", "--compare", "upstream"
    )
    assert [r["computed_tokens"] for r in requests_of(data, "upstream")] == [514, 2]
    first, second = data["comparisons"][0]["requests"]
    assert first["tokens_equal"] and first["max_log_prob_difference"] < LOG_PROB_NOISE
    assert not second["tokens_equal"] or second["max_log_prob_difference"] > 1e-3
    if not second["tokens_equal"]:
        assert 0 <= second["first_difference"] < 32
        assert "DIFFERENT" in capsys.readouterr().out


# --- Where prompts are shared ----------------------------------------------------------------------------------------


def test_a_conversation_names_the_ends_of_its_messages(folder):
    session = {"system": "Answer.", "context": CONTEXT, "turns": ["One?", "Zwölf?"]}
    write(folder / "session.json", session)
    options = ("--num-tokens-to-generate", 4, "--ignore-eos", "--add-bos", "--compare", "off", "--compare", "ours")
    data = run_json(folder, "--conversation", "session.json", *options)
    system = 1 + len("Answer.\n\n")
    context = system + len(CONTEXT) + 2
    one = context + len("User: One?\n")
    answer = one + len("Assistant:") + 4 + 1
    twelve = answer + len("User: Zwölf?\n") + 1  # two bytes for one letter
    for engine in ("off", "ours"):
        requests = requests_of(data, engine)
        found = [request["sampling"]["cache_breakpoints"] for request in requests]
        assert found == [[system, context, one], [system, context, one, answer, twelve]]
        assert [request["prompt_tokens"] for request in requests] == [one + 10, twelve + 10]


def test_an_end_inside_a_token_is_named_before_it():
    """With two characters per token, a part of odd length ends in the middle of a token."""

    class Pairs:
        bos, eod, vocab_size = 1, None, 1 << 16

        def tokenize(self, text):
            return [ord(text[i]) * 256 + ord(text[i + 1 : i + 2] or "\0") for i in range(0, len(text), 2)]

    reader = Reader(tokenizer=Pairs(), vocab_size=1 << 16, add_bos=True, sampling={})
    conversation = reader.conversation({"system": "abc", "context": "de", "turns": ["four", "five!"]}, "here")
    first, second = conversation.play(lambda request: [9, 9, 9])
    # A first token, "abc\n\nde\n\n", and "User: four\nAssistant:".
    assert len(first.tokens) == 1 + 5 + 11
    assert first.sampling["cache_breakpoints"] == [1 + 2, 1 + 5, 1 + 5 + 5]
    history = len(first.tokens) + 3 + 1
    assert second.sampling["cache_breakpoints"] == [3, 6, 11, history, history + 6]


def test_a_json_line_ends_where_json_says(folder):
    """JSON text may contain characters that str.splitlines() takes for line ends."""
    text = '{"prompt": "a\u2028b\x85c"}'
    requests = requests_of(run_json(folder, "--jsonl", write(folder / "lines.jsonl", text, text)))
    assert [request["prompt_tokens"] for request in requests] == [3 + 3 + 2] * 2


# --- Recorded sessions -----------------------------------------------------------------------------------------------


def test_least_tokens_against_comparing_all_pairs():
    rng = random.Random(1)
    prompts: list[list[int]] = []
    for _ in range(300):
        start = rng.choice(prompts)[: rng.randrange(12)] if prompts and rng.random() < 0.8 else []
        prompts.append(start + rng.choices([0, 1, 255, 256, 70_000], k=rng.randrange(1, 8)))
    for number, found in enumerate(least_tokens(prompts)):
        prompt = prompts[number]
        shared = (common_tokens(prompt, other) for other in prompts[:number])
        assert found == len(prompt) - max(shared, default=0)
    assert least_tokens([[1, 2], [1, 2], [1, 2, 3], [1], [2]]) == [2, 0, 1, 0, 1]
    assert least_tokens([]) == []


def test_sessions_in_the_order_of_time(folder, capsys):
    beginning = CONTEXT[:600]
    # Two agents with the same beginning; lines are not in order, and some have the same time.
    one = write(
        folder / "one.jsonl",
        {"timestamp": 20, "input": beginning + "x" * 100, "output": "recorded\u2028", "session_id": "1"},
        "",
        {"timestamp": 10.5, "input": beginning},
        {"timestamp": 20, "input": beginning + "x" * 100 + "yy"},
    )
    two = write(folder / "two.jsonl", {"timestamp": 20, "input": "Other"}, {"timestamp": 15, "input": beginning[:300]})
    argv = ["--sessions", one, "--sessions", two, "--num-tokens-to-generate", 2]
    data = run_json(folder, *argv, "--compare", "off", "--compare", "upstream", "--compare", "ours")
    assert data["engine_fields"]["budgets"] == {
        "off": {"buffer_gb": pytest.approx(0.25)},
        "upstream": {"buffer_gb": pytest.approx(0.25), "mamba_gb": pytest.approx(0.05)},
        "ours": {"cache_gb": 0.3},
    }
    for engine in ("off", "upstream", "ours"):
        requests = requests_of(data, engine)
        assert [r["label"] for r in requests] == [
            "one.jsonl:3",
            "two.jsonl:2",
            "one.jsonl:1",
            "one.jsonl:4",
            "two.jsonl:1",
        ]
        assert [r["prompt_tokens"] for r in requests] == [600, 300, 700, 702, 5]
        assert [len(r["generated"]) for r in requests] == [2] * 5
        total = data["engines"][engine]["totals"]
        assert total["least_computed_tokens"] == 707
        assert total["computed_tokens"] == sum(r["computed_tokens"] for r in requests) >= 707
        assert total["computed_over_least"] == pytest.approx(total["computed_tokens"] / 707)
    off, upstream, ours = (data["engines"][name]["totals"] for name in ("off", "upstream", "ours"))
    assert off["computed_tokens"] == 2307
    assert ours["computed_tokens"] <= upstream["computed_tokens"] == 600 + 300 + 188 + 190 + 5
    assert all(entry["tokens_equal"] for pair in data["comparisons"] for entry in pair["requests"])
    output = capsys.readouterr().out
    assert "5 requests; " in output and "ours against off: 5 of 5 answers equal" in output
    assert "2,307" in output and "707" in output and f"{2307 / 707:.3f}" in output

    batch = run_json(folder, *argv, "--concurrency", "batch")
    assert [r["generated"] for r in requests_of(batch)] == [r["generated"] for r in requests_of(data)]
    firsts = [request["time_to_first_token_s"] for request in requests_of(batch)]
    assert max(firsts) <= batch["engines"]["ours"]["totals"]["wall_s"]


# --- run_batch -------------------------------------------------------------------------------------------------------


@pytest.fixture
def batch(tiny):
    """A function that runs prompts on a new engine of ``tiny``, 20 greedy tokens each."""
    from megatron_hybrid_prefix import build_engine
    from megatron_hybrid_prefix.mcore.runner import run_batch

    sampling = greedy(20)

    def run(prompts, should_stop=lambda: False, **fields):
        engine = build_engine(tiny, max_sequence_length=1024, **fields)
        results = run_batch(engine, prompts, sampling, should_stop=should_stop)
        assert "add_request" not in vars(engine.context)
        assert sampling.num_tokens_to_generate == 20
        return engine, results

    return run


def test_concurrent_requests_are_told_apart(batch):
    shared = [i % 256 for i in range(512)]
    prompts = [shared + [i] * (20 + i) for i in range(3)] + [[5]]
    _, results = batch(prompts, enable_prefix_caching=True, prefix_caching_mamba_gb=0.05)
    assert [(r.computed_tokens, r.reused_tokens) for r in results] == [(532, 0), (21, 512), (22, 512), (1, 0)]


def test_what_cannot_fit_fails_and_the_others_go_on(batch):
    engine, results = batch([[1] * 1024, [1] * 40, [1] * 2000])
    assert [r.status for r in results] == ["failed", "completed", "failed"]
    assert "1024 prompt tokens leave no room" in results[0].error
    assert (results[1].error, len(results[1].generated)) == (None, 20)
    assert not engine.has_unfinished_requests()


def test_stopping_gives_what_there_is_and_leaves_a_usable_engine(batch):
    answers = iter([False, False, False, True])
    engine, results = batch([[1] * 40, [2] * 50], should_stop=lambda: next(answers))
    assert [(r.status, len(r.generated)) for r in results] == [("stopped", 3)] * 2
    assert not engine.has_unfinished_requests()


def test_recomputing_after_an_eviction_is_counted_apart(batch):
    prompts = [[i] * (249 + i) for i in range(4)]
    engine, results = batch(prompts, buffer_size_gb=0.0017, max_requests=4)
    assert engine.evicted_request_count > 0
    assert [r.computed_tokens for r in results] == [249, 250, 251, 252]
    assert sum(r.recomputed_tokens > 0 for r in results) == engine.evicted_request_count
    _, roomy = batch(prompts, max_requests=4)
    assert [r.generated for r in roomy] == [r.generated for r in results]


# --- Processes -------------------------------------------------------------------------------------------------------


def test_as_a_process():
    (wrong,) = run_prepared(COMMAND, "generate", "x", "--tp", 2)
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1 and "needs a multiple of 2 processes, and 1 were started" in wrong.stderr
    (shown,) = run_prepared(COMMAND, "generate", "--help")
    assert shown.returncode == 0 and "--num-tokens-to-generate" in shown.stdout


@pytest.mark.slow
def test_ctrl_c(tmp_path, tmp_path_factory):
    argv = ("generate", "hi", "--num-tokens-to-generate", 16000, "--ignore-eos", "--json", tmp_path / "result.json")
    process = Prepared(tmp_path_factory.mktemp("said"), COMMAND, *argv)
    wait_until(lambda: process.outputs[0].read_text().startswith("platform: "), "it has begun")
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    (ended,) = process.wait()
    assert (ended.returncode, ended.stderr) == (130, "interrupted: nothing was written\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_say_what_one_says(tmp_path, capfd):
    prompts = ("hi", CONTEXT, "--num-tokens-to-generate", "8", "--compare", "off", "--compare", "upstream")
    alone = run_json(tmp_path, *prompts)
    path = tmp_path / "two.json"
    ranks = run_prepared(COMMAND, "generate", *prompts, "--tp", 2, "--json", path, environments=environments_of(2))
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    said = "".join(rank.stdout for rank in ranks)
    assert said.count("platform: ") == 1 and "tp=2" in said
    two = json.loads(path.read_text())
    for engine in ("off", "upstream"):
        for a, b in zip(requests_of(alone, engine), requests_of(two, engine), strict=True):
            assert a["generated"] == b["generated"]
            assert a["log_probs"] == pytest.approx(b["log_probs"], abs=LOG_PROB_NOISE)
            assert a["computed_tokens"] == b["computed_tokens"]


@pytest.mark.multi
def test_two_ranks_say_what_is_wrong_once(tmp_path):
    argv = ("generate", "--jsonl", tmp_path / "absent", "--tp", 2)
    ranks = run_prepared(COMMAND, *argv, environments=environments_of(2))
    assert all(rank.returncode for rank in ranks)
    assert "".join(rank.stderr for rank in ranks).count("error: cannot read") == 1
