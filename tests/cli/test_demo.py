"""`examples/demo.py`, with a short text: what it shows of megatron-core's cache, and that a wrong answer is called wrong."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from examples import demo
from megatron_hybrid_prefix.text.tokenizer import common_tokens

BLOCK = 128
FIRST, NEXT, SAME, OTHER, HERD, CHUNKS = demo.PARTS


@pytest.fixture
def short(engine_imported, monkeypatch):
    preset, block, _, *memory = demo.SIZES["cpu"]
    monkeypatch.setitem(demo.SIZES, "cpu", (preset, block, 1000, *memory))


def play(path, *argv, code=0):
    assert demo.main(["--device", "cpu", "--rounds", "1", "--json", str(path), *argv]) == code
    return {part["part"]: part["engines"] for part in json.loads(path.read_text())["parts"]}


def test_it_shows_what_is_wrong_and_what_is_not_reused(short, tmp_path, capsys):
    plot = tmp_path / "demo.svg"
    parts = play(tmp_path / "demo.json", "--plot", str(plot))
    assert list(parts) == [*demo.PARTS]
    for part in parts.values():
        assert part["off"]["reused_tokens"] == 0
        assert part["ours"]["exact"] and part["ours"]["max_log_prob_difference"] < 1e-4
    assert [name for name, part in parts.items() if not part["upstream"]["exact"]] == [SAME, CHUNKS]
    more = {name: part["ours"]["reused_tokens"] - part["upstream"]["reused_tokens"] for name, part in parts.items()}
    assert min(more[NEXT], more[OTHER], more[HERD]) >= BLOCK and more[SAME] == 0
    same = parts[SAME]["ours"]
    assert same["prompt_tokens"] % BLOCK == 2 and same["reused_tokens"] == same["prompt_tokens"] - 2
    said = capsys.readouterr().out
    assert said.count("WRONG") == 2 and "Exact in 6 of 6 parts: this cache. In 4 of 6: megatron-core's." in said
    assert "this cache reuses more in 3 of 4." in said and max(map(len, said.splitlines()[2:])) <= 120
    assert plot.read_text().count("WRONG ANSWER -->") == 2 and "<!-- first question -->" not in plot.read_text()


def test_a_wrong_state_is_called_wrong(short, tmp_path, capsys, monkeypatch):
    """This package's cache, with every state that a request resumes from set to zeros."""
    from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext

    original = HybridPrefixContext.initialize_attention_state

    def damaging(context, **kwargs):
        if context.prefix_cache is not None:
            for plan in context._step.plans():
                if plan.source_slot is not None:
                    context.shared_memory.state(plan.source_slot)["ssm"].zero_()
        return original(context, **kwargs)

    monkeypatch.setattr(HybridPrefixContext, "initialize_attention_state", damaging)
    parts = play(tmp_path / "wrong.json", code=1)
    assert not parts[NEXT]["ours"]["exact"] and parts[FIRST]["ours"]["exact"]
    assert "Exact in 6 of 6 parts: this cache" not in capsys.readouterr().out


def result(generated=(1, 2, 3), log_probs=(-1.0, -2.0, -3.0), *, reused=0, first_s=0.1):
    return SimpleNamespace(
        generated=list(generated),
        log_probs=list(log_probs),
        reused_tokens=reused,
        prompt_tokens=100,
        time_to_first_token_s=first_s,
    )


@pytest.mark.parametrize(
    ("answer", "exact"),
    [
        (result(), True),
        (result(log_probs=(-1.0, -2.00001, -3.0)), True),
        (result(log_probs=(-1.0, -2.01, -3.0)), False),
        (result(log_probs=(-1.0, math.nan, -3.0)), False),
        (result((1, 2, 4)), False),
        (result((1, 2)), False),
    ],
)
def test_an_answer_is_judged_by_tokens_and_log_probs(answer, exact):
    truth = [[result()], [result()]]
    assert demo.judge(truth, [[answer], [result()]])["exact"] == exact
    assert demo.judge(truth, [[result()], [answer]])["exact"] == exact, "of all rounds"


def test_one_slow_round_changes_no_first_token():
    found = demo.judge([[result()]] * 3, [[result(first_s=at, reused=64)] for at in (0.094, 1.058, 0.096)])
    assert found["first_token_ms"] == pytest.approx(96) and found["reused_tokens"] == 64


def test_rounds_share_nothing_and_texts_end_before_a_block():
    for length in range(900, 900 + BLOCK + 1):
        first, second = (demo.Session(number, BLOCK, length) for number in (0, 1))
        texts = [[one.text, one.herd_text, one.start, one.unrelated] for one in (first, second)]
        assert all(common_tokens(a, b) == 0 for a, b in zip(*texts, strict=True))
        assert all(len(text) % BLOCK == BLOCK - 8 for text in texts[0][:3])


def test_bad_input_is_one_line(tmp_path, capsys):
    for argv, said in (
        (["--context", "x"], "unrecognized arguments: --context x"),
        (["--rounds", "0"], "argument --rounds: '0' is not a whole number above 0"),
        (["--json", str(tmp_path / "absent" / "x.json")], "cannot write "),
        (["--plot", "a.jpg"], "--plot: a.jpg must end with .png or .svg"),
    ):
        assert demo.main([*argv, "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {said}") and error.count("\n") == 1
