"""``exact="bits"`` on several ranks: sums over ranks do not depend on the size of the messages."""

from __future__ import annotations

import pytest

from tests.harness.named_models import named
from tests.harness.selection import mostly_slow
from tests.harness.workers.launch import run_play


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(
    ("preset", "tp", "pp", "ep", "etp"),
    [
        *(("tiny", 4, 1, 1, 1), ("tiny-gdn", 4, 1, 1, 1), ("tiny", 1, 2, 1, 1)),
        ("tiny-olmo-hybrid", 2, 1, 1, 1),  # norms of heads of both ranks
        *(("tiny-nemotron-3", 1, 1, 2, 1), ("tiny-qwen3-next", 1, 1, 2, 1)),  # each rank has experts and requests
        *(("tiny-nemotron-3", 2, 1, 1, 2), ("tiny-qwen3-next", 2, 1, 1, 1)),  # parts of experts; a share of tokens
        ("tiny-moe", 2, 1, 2, 2),
    ],
)
def test_ranks_give_the_bits_of_a_request_alone(tmp_path, preset, tp, pp, ep, etp):
    model = {"name": preset, "layer_pattern": "|".join([named(preset).layer_pattern] * pp)}
    play = {
        "sizes": {"tp": tp, "pp": pp, "ep": ep, "etp": etp},
        "model": model,
        "parts": {"bits": ["bits", 8, [1, 2, 4, 6, 10]]},
    }
    for rank in run_play(tmp_path, play, max(tp, ep * etp) * pp):
        assert rank["bits"]["finished"] > 0
        assert rank["bits"]["differing"] == []
        assert bool(rank["bits"]["differing_by_rows"]) == (tp * ep > 1)


@pytest.mark.multi
@pytest.mark.parametrize("preset", mostly_slow(["tiny", "tiny-gdn", "tiny-olmo-hybrid"], "tiny"))
def test_a_trainer_on_two_ranks_has_the_bits_of_the_engine(tmp_path, preset):
    part = ["tests.harness.trainer:of_requests", [1, 60, 200], 70, 128]
    play = {"sizes": {"tp": 2}, "model": {"name": preset}, "parts": {"trainer": part}}
    for rank in run_play(tmp_path, play, 2):
        found = rank["trainer"]
        assert found["without gradients"] == found["with gradients"] == 0 < found["by default"]
        assert found["between the gradients"] < 1e-6
