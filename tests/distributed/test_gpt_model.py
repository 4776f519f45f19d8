"""A ``GPTModel`` with Gated DeltaNet layers on several ranks, with the cache, says what the ``HybridModel`` says on one without."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hybrid_prefix import build_engine
from tests.engine.test_install import TOKENS
from tests.harness.engine_helpers import assert_damaged, assert_same, random_tokens
from tests.harness.lifecycle_helpers import BLOCK, tokens
from tests.harness.selection import mostly_slow
from tests.harness.workers import scenario
from tests.harness.workers.launch import need_ranks, run_play

pytestmark = pytest.mark.multi

# Sizes, and the model. Stages are halves; one has no recurrent layers.
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp2": ({"tp": 2}, {"name": "tiny-gdn", "layer_pattern": "G-*-G-*-"}),
    "pp2": ({"pp": 2}, {"name": "tiny-gdn", "layer_pattern": "G-*-|G-*-"}),
    "pp2-plain": ({"pp": 2}, {"name": "tiny-gdn", "layer_pattern": "*-*-|G-*-"}),
    "ep2": ({"ep": 2}, {"name": "tiny-qwen3-next", "layer_pattern": "GEGEGE*E"}),
}


def session(*before: Any, **fields: Any) -> dict[str, Any]:
    """A prefix, three prompts with it, one after another, and those together with a shorter one."""
    prefix = tokens(3, 0, seed=1)
    tails = [prefix[: 2 * BLOCK] + random_tokens(own, seed=10 + own) for own in (1, 3, 70)]
    batches = [[prefix], *[[tail] for tail in tails], [*tails, prefix[: BLOCK + 5]]]
    engine = {"cache_gb": 0.01, "check_ranks": True, "max_requests": 8, "async_sched_mode": "async"}
    engine |= {"max_sequence_length": 512, "retention_interval_tokens": None} | fields
    return {"engine": engine, "events": [*before, *(["sends", batch, 5] for batch in batches)]}


@pytest.fixture(scope="module", params=mostly_slow(LAYOUTS, "pp2-plain"))
def case(request, platform, tmp_path_factory):
    """The ``HybridModel`` on one rank, its answers without a cache, and each rank's findings."""
    need_ranks(2)
    sizes, model = LAYOUTS[request.param]
    hybrid = scenario.build(**model | {"layer_pattern": model["layer_pattern"].replace("|", "")}, platform=platform)
    right = scenario.play(hybrid, **session(slots=None))["answers"]
    parts = {"on": session(), "script": ["script"], "damaged": session(["last: damage"])}
    play = {"sizes": sizes, "model": model | {"kind": "gpt"}, "parts": parts}
    return hybrid, right, run_play(tmp_path_factory.mktemp("ranks"), play)


def test_answers_are_those_of_the_hybrid_model(case):
    _, right, ranks = case
    for rank in ranks:
        answers = rank["on"]["answers"]
        assert_same(answers, right)
        assert [answer["cached_tokens"] for answer in answers] == [0, 128, 128, 128, 128, 128, 192, 64]


def test_a_wrong_state_on_one_rank_shows(case):
    """(Expert-parallel ranks have requests of their own.)"""
    _, right, ranks = case
    assert_damaged(ranks[-1]["damaged"]["answers"], right)


def test_a_script_in_megatrons_words(case):
    hybrid, _, ranks = case
    expected = TOKENS(build_engine(hybrid, block_size_tokens=BLOCK))
    for rank in ranks:
        found = rank["script"]
        assert (found["context"], found["answers"], found["skipped_blocks"]) == ("HybridPrefixContext", expected, 4)


# Whose description of its states a stage gets.
DESCRIBED = {
    "M*-M-|*-": ["MambaInferenceStateConfig", "RecurrentStateConfig"],
    "*-|G*-": ["RecurrentStateConfig", "RecurrentStateConfig"],
}


@pytest.mark.slow
@pytest.mark.parametrize("pattern", DESCRIBED)
def test_stages_with_and_without_recurrent_layers(pattern, platform, tmp_path):
    """With `install` a stage without recurrent layers caches as its neighbour does."""
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
