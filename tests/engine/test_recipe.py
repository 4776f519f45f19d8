"""The settings of a public account of corrupt rollouts, of which 48 to 58 % were wrong with megatron's own cache.

Prefix caching on and no memory for states: megatron's later chunks then skip whatever KV matches. Here they are set as NeMo-RL sets
them, with this cache on by a variable alone.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

from megatron_hybrid_prefix.mcore import restore_mixers
from tests.engine.test_env_install import run
from tests.harness.rl import sampling, worker_engine
from tests.harness.workers.env_recipe import ANSWER, BLOCK, TURNS, episode
from tests.harness.workers.launch import WORKERS

# max_tokens, and tokens of the first prompt: the account's, where a prompt is one chunk, and with chunks of four blocks.
ONE_CHUNK, CHUNKS = (16384, 1100), (1024, 2200)
AS_LONG = (16384, 20000)  # likewise, with the account's own chunks


def off_by(found: dict[str, Any], model: Any) -> float:
    """How far an episode's log-probs are from those of one chunk over all of its ids, by megatron without a cache."""
    ids = found["ids"]
    fields = {"max_tokens": len(ids) + BLOCK, "max_sequence_length": len(ids) + BLOCK, "buffer_size_gb": 0.1}
    plain = {"enable_prefix_caching": False, "materialize_only_last_token_logits": False, "block_size_tokens": BLOCK}
    engine = worker_engine(model, **fields, **plain)
    assert type(engine) is DynamicInferenceEngine
    engine.add_request(0, ids, sampling(1, skip_prompt_log_probs=False))
    (record,) = engine.step_modern()["finished_request_records"]
    expected = record.merge().prompt_log_probs  # from the second token on
    pairs = ((turn["at"] - 1, turn["log_probs"]) for turn in found["turns"])
    return max(abs(one - expected[at + offset]) for at, ours in pairs for offset, one in enumerate(ours))


def check(found: dict[str, Any]) -> None:
    """It ran with states: turn for turn everything is reused up to the last block that the turn before computed."""
    assert found["context"] == "HybridPrefixContext"
    first, *later = found["turns"]
    assert first["reused"] == 0 and len(later) == TURNS - 1
    for before, turn in zip(found["turns"], later, strict=False):
        assert turn["reused"] == (before["at"] + ANSWER - 1) // BLOCK * BLOCK
    stats = found["stats"]
    assert (
        stats["checkpoints_published"] > 0
        and not stats["lost_tokens_no_state"]
        and not any(stats["fallbacks"].values())
    )


@pytest.mark.parametrize(
    "cases",
    [pytest.param([ONE_CHUNK, CHUNKS], marks=pytest.mark.slow), pytest.param([AS_LONG], marks=pytest.mark.nightly)],
)
def test_the_recipe_by_variables_alone(cases, tiny, tmp_path):
    """This cache is on, says what it has, keeps states, and log-probs are those of a plain run, whatever the chunks."""
    out = tmp_path / "out.json"
    given = [f"{chunk}:{prompt}" for chunk, prompt in cases]
    result = run(sys.executable, WORKERS / "env_recipe.py", out, *given, HYBRID_PREFIX_INSTALL="1")
    assert result.returncode == 0, result.stderr[-4000:]
    for found in json.loads(out.read_text()):
        check(found)
        assert off_by(found, tiny) < 1e-4
    assert "for contexts with enable_prefix_caching (for all: set HYBRID_PREFIX_CONFIG)" in result.stderr
    assert result.stderr.count("recurrent states: ") == len(cases) and "MiB for KV and states: " in result.stderr


@pytest.mark.parametrize(
    ("case", "wrong"), [(ONE_CHUNK, False), (CHUNKS, True), pytest.param(AS_LONG, True, marks=pytest.mark.nightly)]
)
def test_megatrons_own_cache_fails_it(case, wrong, tiny):
    """The mutant: the same without the variable. One chunk is right, as megatron reuses nothing then."""
    restore_mixers(tiny)
    found = episode(tiny, *case)
    assert (off_by(found, tiny) > 0.01) == wrong
    with pytest.raises(AssertionError, match="DynamicInferenceContext"):
        check(found)
