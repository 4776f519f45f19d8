"""``exact="bits"`` on several ranks: sums over ranks do not depend on the size of the messages."""

from __future__ import annotations

import pytest

from tests.harness.named_models import named
from tests.harness.workers.launch import run_play


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(("preset", "tp", "pp"), [("tiny", 4, 1), ("tiny-gdn", 4, 1), ("tiny", 1, 2)])
def test_ranks_give_the_bits_of_a_request_alone(tmp_path, preset, tp, pp):
    model = {"name": preset, "layer_pattern": "|".join([named(preset).layer_pattern] * pp)}
    play = {"sizes": {"tp": tp, "pp": pp}, "model": model, "parts": {"bits": ["bits", 8, [1, 2, 4, 6, 10]]}}
    for rank in run_play(tmp_path, play, tp * pp):
        assert rank["bits"]["finished"] > 0
        assert rank["bits"]["differing"] == []
        assert bool(rank["bits"]["differing_by_rows"]) == (tp > 1)
