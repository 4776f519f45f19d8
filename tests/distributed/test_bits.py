"""``exact="bits"`` on several ranks: sums over ranks do not depend on the size of the messages."""

from __future__ import annotations

import pytest

from tests.harness.workers.launch import run_ranks


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("preset", ["tiny", "tiny-gdn"])
def test_four_ranks_give_the_bits_of_a_request_alone(tmp_path, preset):
    for rank in run_ranks("bits.py", tmp_path / "bits.json", preset, 4, ranks=4):
        assert rank["finished"] > 0
        assert rank["differing"] == []
        # Gloo adds in an order that depends on an element's place in the message. (Two ranks have one order.)
        assert rank["differing_with_all_reduce"]
