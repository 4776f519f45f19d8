"""The command `demo`, with short prompts: what it shows of megatron-core's cache, and that a wrong answer is called wrong."""

from __future__ import annotations

import io
import json
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_hybrid_prefix.cli import demo
from megatron_hybrid_prefix.console import demo_report, demo_session
from megatron_hybrid_prefix.console.demo_report import Part
from megatron_hybrid_prefix.tokenizer import common_tokens

BLOCK = 128
SHORT = ("--device", "cpu", "--rounds", "1")
FIRST, NEXT, SAME, OTHER, HERD, CHUNKS = PARTS = [name for name, _ in demo_session.PARTS]


@pytest.fixture
def short(platform, monkeypatch):
    import megatron.core.inference.engines  # noqa: F401  (before stderr is captured: upstream wants its file number)

    monkeypatch.setitem(demo_session.CONTEXT_TOKENS, "cpu", 1000)
    monkeypatch.setattr(demo_session, "HERD_USERS", 3)


def engines_of(part):
    return part["engines"]["off"], part["engines"]["upstream"], part["engines"]["ours"]


# -- the session on the engines ----------------------------------------------------------------------------------------


def test_it_shows_what_is_wrong_and_what_is_not_reused(short, tmp_path, capsys):
    data, plot = tmp_path / "demo.json", tmp_path / "demo.png"
    assert demo.main([*SHORT, "--json", str(data), "--plot", str(plot)]) == 0
    data = json.loads(data.read_text())
    assert [part["part"] for part in data["parts"]] == PARTS
    parts = {part["part"]: engines_of(part) for part in data["parts"]}
    for off, _, ours in parts.values():
        assert off["reused_tokens"] == 0 and ours["exact"] and ours["max_log_prob_difference"] < 1e-4
    assert [part for part in PARTS if not parts[part][1]["exact"]] == [SAME, CHUNKS]
    for part in (NEXT, OTHER, HERD):
        assert parts[part][2]["reused_tokens"] > parts[part][1]["reused_tokens"]
    assert parts[NEXT][2]["reused_tokens"] - parts[NEXT][1]["reused_tokens"] >= BLOCK
    off, upstream, ours = parts[SAME]
    assert off["prompt_tokens"] % BLOCK == demo_session.TAIL_TOKENS
    assert ours["reused_tokens"] == upstream["reused_tokens"] == off["prompt_tokens"] - demo_session.TAIL_TOKENS
    assert plot.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert said.count("WRONGLY") == 2 and "Exact in 6 of 6 parts: this cache." in said
    assert "In 4 of 6: megatron-core's." in said and max(map(len, said.splitlines()[:-1])) <= 100


def test_a_wrong_state_is_called_wrong(short, tmp_path, capsys, monkeypatch):
    """This package's cache, with every state that a request resumes from set to zeros."""
    from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext

    original = HybridPrefixContext.initialize_attention_state

    def damaging(context, **kwargs):
        if context.prefix_cache is not None:
            for plan in context.step_plans():
                if plan.source_slot is not None:
                    context.shared_memory.state(plan.source_slot)["ssm"].zero_()
        return original(context, **kwargs)

    monkeypatch.setattr(HybridPrefixContext, "initialize_attention_state", damaging)
    path = tmp_path / "wrong.json"
    assert demo.main([*SHORT, "--json", str(path)]) == demo.EXIT_WRONG
    parts = {part["part"]: part for part in json.loads(path.read_text())["parts"]}
    assert not parts[NEXT]["engines"]["ours"]["exact"]
    assert parts[NEXT]["verdict"].startswith("THIS CACHE IS WRONG: ")
    assert parts[FIRST]["engines"]["ours"]["exact"]
    assert "THIS CACHE IS WRONG" in capsys.readouterr().out


# -- verdicts ----------------------------------------------------------------------------------------------------------


def result(generated=(1, 2, 3), log_probs=(-1.0, -2.0, -3.0), *, reused=0, first_s=0.1):
    return SimpleNamespace(
        generated=list(generated),
        log_probs=list(log_probs),
        reused_tokens=reused,
        prompt_tokens=100,
        time_to_first_token_s=first_s,
    )


def judged(upstream, ours):
    return part_of({"off": [[result()]], "upstream": [[upstream]], "ours": [[ours]]})


def part_of(rounds, name="s"):
    return Part(name=name, title="t", engines=demo_report.outcomes(rounds))


@pytest.mark.parametrize(
    ("upstream", "ours", "said"),
    [
        (result(), result(), "Nothing is cached yet"),
        (result(reused=64), result(reused=64), "both reuse 64"),
        (result(reused=64), result(reused=96, first_s=0.05), "This cache reuses 96 prompt tokens, megatron-core's 64: "),
        (result(reused=96), result(reused=64), "This cache reuses 64 prompt tokens, megatron-core's 96: "),
        (result((1, 2, 4)), result(), "megatron-core's cache answers WRONGLY: other tokens than without a cache, from token 3"),
        (result((1, 2)), result(), "WRONGLY: other tokens than without a cache, from token 3"),
        (result(log_probs=(-1.0, -2.01, -3.0)), result(), "WRONGLY: a log-prob is off by 0.01"),
        (result(log_probs=(-1.0, math.nan, -3.0)), result(), "WRONGLY: a log-prob is no number"),
        (result(), result((9, 2, 3)), "THIS CACHE IS WRONG: other tokens than without a cache, from token 1"),
        (result((7,)), result(log_probs=(0.0, -2.0, -3.0)), "THIS CACHE IS WRONG: a log-prob is off by 1"),
    ],
)  # fmt: skip
def test_a_verdict_follows_from_the_answers(upstream, ours, said):
    assert said in judged(upstream, ours).verdict


def rounds_of(*seconds: float) -> list[list[SimpleNamespace]]:
    return [[result(first_s=at)] for at in seconds]


def test_one_slow_round_changes_no_first_token_and_is_shown():
    """A fresh machine had 1,058 ms in a row of 94, where one round was measured."""
    rounds = {
        "off": rounds_of(0.4, 0.4, 0.4),
        "upstream": rounds_of(0.1, 0.11, 0.12),
        "ours": rounds_of(0.094, 1.058, 0.096),
    }
    part = part_of(rounds)
    found = part.engines
    assert found["ours"].first_token_ms == pytest.approx(96)
    assert found["ours"].time(spread=True) == "96 ms (94 to 1,058)" and found["ours"].time() == "96 ms"
    assert found["upstream"].time(spread=True) == "110 ms"  # they differ little
    console = Console(record=True, width=100, file=io.StringIO())
    demo_report.print_demo(console, [part])
    assert "96 ms (94 to 1,058)" in console.export_text()


def test_the_rounds_are_three_and_share_nothing():
    assert demo.make_parser().parse_args([]).rounds == 3
    first, second = (session_of(900, number) for number in (0, 1))
    prompts = [[one.text, *one.herd, *one.chunked] for one in (first, second)]
    assert all(common_tokens(a, b) == 0 for a in prompts[0] for b in prompts[1])


def test_all_rounds_are_compared():
    rounds = rounds_of(0.3, 0.1, 0.2)
    wrong = [*rounds[:2], [result((1, 2, 9))]]
    assert not demo_report.outcomes({"off": rounds, "upstream": rounds, "ours": wrong})["ours"].exact


def test_the_summary_counts():
    parts = [
        judged(result(), result()),
        judged(result((5,)), result()),
        judged(result(reused=32), result(reused=64)),
        judged(result(reused=64), result(reused=32)),
    ]
    said = demo_report.summary(parts)
    assert "in 4 of 4 parts: this cache. In 3 of 4: megatron-core's." in said
    assert said.endswith("this cache reuses more in 1 of 3, less in 1.")


def test_a_wrong_answer_is_written_on_its_bar(tmp_path):
    rounds = {"off": [[result()]], "upstream": [[result((5,))]], "ours": [[result(first_s=0.012)]]}
    parts = [demo_report.as_json(part_of(rounds, name)) for name in ("not drawn", "the same prompt")]
    demo_report.save_demo_plot(tmp_path / "demo.svg", parts, "tiny on a CPU")
    drawn = (tmp_path / "demo.svg").read_text()
    for text in ("100 ms  WRONG ANSWER", "12 ms", "the same prompt", "megatron-core's cache", "tiny on a CPU"):
        assert f"<!-- {text} -->" in drawn
    assert "not drawn" not in drawn


# -- input -------------------------------------------------------------------------------------------------------------


def test_bad_input_is_one_line(tmp_path, capsys):
    for argv, said in (
        (["--preset", "none"], ""),
        (["--context", "x"], "unrecognized arguments: --context x"),
        (["--json", str(tmp_path / "absent" / "x.json")], "cannot write "),
        (["--plot", "a.jpg"], "--plot: a.jpg must end with .png or .svg"),
        (["--plot", "."], "cannot write .: it is a folder"),
    ):
        assert demo.main([*argv, "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {said}") and error.count("\n") == 1


def session_of(context_tokens: int, number: int = 0) -> demo_session.Session:
    return demo_session.make_session(number, context_tokens, BLOCK)


def test_a_session_of_any_length_ends_where_it_should():
    for length in range(900, 900 + BLOCK + 1):
        session = session_of(length)
        assert session.answer_tokens > BLOCK
        assert len(session.next_turn([0] * session.answer_tokens)) % BLOCK == demo_session.TAIL_TOKENS
        assert len(session.text) % BLOCK == BLOCK - demo_session.GAP_TOKENS
        assert len(session.herd) == demo_session.HERD_USERS and session.herd[0] != session.herd[1]
