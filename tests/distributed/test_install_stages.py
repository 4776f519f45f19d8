"""`install` over two pipeline stages: a stage without recurrent layers caches as its neighbour does."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset
from tests.engine.test_install import BLOCK, TOKENS
from tests.harness.workers.launch import run_ranks

pytestmark = [pytest.mark.multi, pytest.mark.slow]

# Whose description of its states a stage gets.
DESCRIBED = {
    "M*-M-|*-": ["MambaInferenceStateConfig", "RecurrentStateConfig"],
    "*-|G*-": ["RecurrentStateConfig", "RecurrentStateConfig"],
}


@pytest.mark.parametrize("pattern", DESCRIBED)
def test_stages_with_and_without_recurrent_layers(pattern, platform, tmp_path):
    preset = get_preset("tiny-gdn" if "G" in pattern else "tiny", layer_pattern=pattern.replace("|", ""))
    model = build_hybrid_model(preset, seed=0, platform=platform)
    expected = TOKENS(build_engine(model, block_size_tokens=BLOCK))
    ranks = run_ranks("install_stages.py", tmp_path / "found.json", pattern)
    hybrid, plain = [rank[pattern] for rank in ranks], [rank["*-|*-"] for rank in ranks]
    assert [stage["described"] for stage in hybrid] == DESCRIBED[pattern]
    for stage in hybrid:
        assert stage["context"] == "HybridPrefixContext"
        assert stage["answers"] == expected and stage["skipped_blocks"] == 4
    for stage in plain:
        assert (stage["described"], stage["context"]) == (None, "DynamicInferenceContext")
