"""The command `demo`, with a shorter context and shorter answers. In the last turn upstream restores a wrong state."""

from __future__ import annotations

import json

import pytest

from megatron_hybrid_prefix.cli import demo


@pytest.fixture(autouse=True)
def short(platform, monkeypatch):
    import megatron.core.inference.engines  # noqa: F401  (before stderr is captured: upstream wants its file number)

    monkeypatch.setattr(demo, "CONTEXT_BYTES", 1500)
    monkeypatch.setattr(demo, "ANSWER_TOKENS", 4)


def test_the_last_prompt_shows_the_difference(tmp_path, capsys):
    out = tmp_path / "out"
    assert demo.main(["--out", str(out), "--device", "cpu"]) == 0
    data = json.loads((out / "demo.json").read_text())
    requests = {name: engine["requests"] for name, engine in data["engines"].items()}
    assert list(requests) == ["off", "upstream", "ours"] and len(requests["ours"]) == len(demo.QUESTIONS) + 1
    assert requests["ours"][-1]["prompt_tokens"] % demo.BLOCK_TOKENS == demo.TAIL_TOKENS
    assert requests["ours"][-1]["computed_tokens"] == requests["upstream"][-1]["computed_tokens"] == demo.TAIL_TOKENS
    assert sum(request["reused_tokens"] for request in requests["off"]) == 0
    gaps = {
        pair["engine"]: [request["max_log_prob_difference"] for request in pair["requests"]]
        for pair in data["comparisons"]
        if pair["against"] == "off"
    }
    assert max(gaps["ours"]) < 1e-4 < 1e-3 < gaps["upstream"][-1]
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "ours against off" in capsys.readouterr().out


def test_bad_input_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert demo.main(["--out", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot make ") and error.count("\n") == 1
