"""`install` over two pipeline stages: a stage without recurrent layers caches as its neighbour does."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix import build_engine
from tests.engine.test_install import BLOCK, TOKENS
from tests.harness.workers import scenario
from tests.harness.workers.launch import run_play

pytestmark = [pytest.mark.multi, pytest.mark.slow]

# Whose description of its states a stage gets.
DESCRIBED = {
    "M*-M-|*-": ["MambaInferenceStateConfig", "RecurrentStateConfig"],
    "*-|G*-": ["RecurrentStateConfig", "RecurrentStateConfig"],
}


@pytest.mark.parametrize("pattern", DESCRIBED)
def test_stages_with_and_without_recurrent_layers(pattern, platform, tmp_path):
    name = "tiny-gdn" if "G" in pattern else "tiny"
    model = scenario.build(name, layer_pattern=pattern.replace("|", ""), platform=platform)
    expected = TOKENS(build_engine(model, block_size_tokens=BLOCK))
    parts = {"hybrid": ["script"], "plain": ["script", {"name": "tiny", "layer_pattern": "*-|*-"}]}
    ranks = run_play(tmp_path, {"sizes": {"pp": 2}, "model": {"name": name, "layer_pattern": pattern}, "parts": parts})
    assert [rank["hybrid"]["described"] for rank in ranks] == DESCRIBED[pattern]
    for rank in ranks:
        hybrid, plain = rank["hybrid"], rank["plain"]
        assert hybrid["context"] == "HybridPrefixContext"
        assert hybrid["answers"] == expected and hybrid["skipped_blocks"] == 4
        assert (plain["described"], plain["context"]) == (None, "DynamicInferenceContext")
