"""``exact="bits"`` on several ranks: sums over ranks do not depend on the size of the messages."""

from __future__ import annotations

import pytest

from tests.harness.workers.launch import run_ranks


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(("preset", "tp", "pp"), [("tiny", 4, 1), ("tiny-gdn", 4, 1), ("tiny", 1, 2)])
def test_ranks_give_the_bits_of_a_request_alone(tmp_path, preset, tp, pp):
    for rank in run_ranks("bits.py", tmp_path / "bits.json", preset, tp, pp, ranks=tp * pp):
        assert rank["finished"] > 0
        assert rank["differing"] == []
        assert bool(rank["differing_by_rows"]) == (tp > 1)
