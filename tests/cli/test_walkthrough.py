"""The walkthrough: the conversation does what the document says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import walkthrough
from tests.harness.engine_helpers import LOG_PROB_NOISE

ROOT = Path(__file__).resolve().parents[2]
LOG_PROBS = re.compile(r"within \de[+-]\d\d")  # depends on the machine


@pytest.fixture(scope="module")
def turns(tiny):
    return {turn["name"]: turn for turn in walkthrough.walk(tiny)}


def verbs(turn):
    return [verb for verb, _ in turn["events"]]


def test_each_turn_does_what_it_is_for(turns):
    counted = {name: turn["counted"] for name, turn in turns.items()}
    assert list(turns) == ["turn 1", "turn 2", "another conversation", "turn 3"]
    assert [turn["prompt_tokens"] for turn in turns.values()] == [200, 330, 520, 460]
    assert counted["turn 1"]["computed_prompt_tokens"] == 200
    assert counted["turn 2"]["reused_tokens_device"] == 256 and counted["turn 2"]["computed_prompt_tokens"] == 74
    assert counted["another conversation"]["kv_evictions"] > 0 and counted["another conversation"]["evictions"] > 0
    assert counted["turn 3"]["reused_tokens_host"] == 384 and counted["turn 3"]["computed_prompt_tokens"] == 76
    assert verbs(turns["turn 2"]) == ["match", "admit", "plan", "publish", "decode"]
    assert {"evict", "store"} <= set(verbs(turns["another conversation"]))
    assert {"load", "fetch"} <= set(verbs(turns["turn 3"])) and counted["turn 3"]["loaded from the host"] == 3


def test_answers_are_those_of_caching_off(turns):
    for turn in turns.values():
        assert turn["same_tokens"] and turn["answer_tokens"] == walkthrough.ANSWER_TOKENS
        assert turn["max_log_prob_difference"] <= LOG_PROB_NOISE


def test_the_document_shows_what_is_printed(turns, monkeypatch, capsys):
    monkeypatch.setattr(walkthrough, "walk", lambda model: iter(turns.values()))
    with pytest.raises(SystemExit, match="0"):
        walkthrough.main()
    document = (ROOT / "docs" / "walkthrough.md").read_text()
    shown = LOG_PROBS.sub("", "\n".join(re.findall(r"```text\n(.*?)```", document, re.S)))
    printed = LOG_PROBS.sub("", capsys.readouterr().out)
    assert [line for line in shown.splitlines() if line] == [line for line in printed.splitlines() if line]


def test_other_answers_are_an_error(turns, monkeypatch):
    wrong = turns["turn 1"] | {"same_tokens": False}
    monkeypatch.setattr(walkthrough, "walk", lambda model: iter([wrong]))
    with pytest.raises(SystemExit, match="1"):
        walkthrough.main()
