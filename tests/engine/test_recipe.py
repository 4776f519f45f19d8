"""Settings of a public account of rollouts, half of which had wrong log-probs with megatron's own cache; with ours by a variable alone.

Prefix caching is on, with no memory for states: later chunks of a prompt then skip whatever KV matches.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from megatron.core.inference.config import PrefixCachingEvictionPolicy
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

from megatron_hybrid_prefix.mcore import restore_mixers
from tests.engine.test_env_install import run
from tests.harness.engine_helpers import random_tokens
from tests.harness.rl import sampling, worker_engine

TURNS, ANSWER, TOOL = 3, 24, 90
FIELDS = {"block_size_tokens": 256, "buffer_size_gb": 0.1}
# max_tokens, and tokens of the first prompt. The account's, one chunk; chunks of four blocks; as the account's prompts, too (a minute).
ONE_CHUNK, CHUNKS, LONG = (16384, 1100), (1024, 2200), (16384, 20000)
RECIPE = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.engine.test_recipe import episode
model = build_hybrid_model("tiny", seed=0)
print(json.dumps([episode(model, *case) for case in json.loads(sys.argv[1])]))
"""


def episode(model: Any, max_tokens: int, prompt_tokens: int) -> dict[str, Any]:
    """One agent, in an engine as NeMo-RL makes it. LRU, as it sets since September 2026: else megatron's forgets a turn at its end."""
    fields = FIELDS | {"max_tokens": max_tokens, "max_sequence_length": prompt_tokens + 1024}
    engine = worker_engine(model, **fields, prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU)
    ids, turns, context = random_tokens(prompt_tokens, seed=max_tokens), [], engine.context
    for turn in range(TURNS):
        before = len(ids) + context.lifetime_prefill_token_count
        engine.add_request(turn, ids, sampling(ANSWER))
        while engine.has_unfinished_requests():
            records = engine.step_modern()["finished_request_records"]
        answer, reused = records[0].merge(), int(before - context.lifetime_prefill_token_count)
        turns.append({"at": len(ids), "log_probs": list(answer.generated_log_probs), "reused": reused})
        ids = [*ids, *answer.generated_tokens, *random_tokens(TOOL, seed=turn)]
    stats = context.prefix_stats().as_dict() if hasattr(context, "prefix_stats") else None
    return {"ids": ids, "turns": turns, "stats": stats}


def off_by(found: dict[str, Any], model: Any) -> float:
    """How far an episode's log-probs are from those of one chunk over all of its ids, by megatron without a cache."""
    whole = dict.fromkeys(("max_tokens", "max_sequence_length"), len(found["ids"]) + 256)
    fields = FIELDS | whole | {"enable_prefix_caching": False, "materialize_only_last_token_logits": False}
    engine = worker_engine(model, **fields)
    assert type(engine) is DynamicInferenceEngine
    engine.add_request(0, found["ids"], sampling(1, skip_prompt_log_probs=False))
    expected = engine.step_modern()["finished_request_records"][0].merge().prompt_log_probs  # from the second token on
    pairs = ((turn["at"] - 1, turn["log_probs"]) for turn in found["turns"])
    return max(abs(one - expected[at + offset]) for at, ours in pairs for offset, one in enumerate(ours))


@pytest.mark.parametrize("cases", [[ONE_CHUNK, CHUNKS], pytest.param([LONG], marks=pytest.mark.nightly)])
def test_this_cache_is_on_with_states_and_log_probs_are_a_plain_runs(cases, tiny):
    """A turn reuses all blocks that the turn before computed."""
    result = run(sys.executable, "-c", RECIPE, json.dumps(cases), HYBRID_PREFIX_INSTALL="1")
    assert result.returncode == 0, result.stderr[-4000:]
    assert "for contexts with enable_prefix_caching (for all: set HYBRID_PREFIX_CONFIG)" in result.stderr
    assert result.stderr.count("recurrent states: ") == len(cases)  # the report of what it has
    for found in json.loads(result.stdout.splitlines()[-1]):
        ends = [(turn["at"] + ANSWER - 1) // 256 * 256 for turn in found["turns"]]
        assert [turn["reused"] for turn in found["turns"]] == [0, *ends[:-1]]
        assert found["stats"]["checkpoints_published"] > 0 == found["stats"]["lost_tokens_no_state"]
        assert off_by(found, tiny) < 1e-4


@pytest.mark.parametrize("case", [CHUNKS, pytest.param(LONG, marks=pytest.mark.nightly)])
def test_megatrons_own_cache_fails_it(case, tiny):
    """The mutant: without the variable, a later chunk skips blocks without a state."""
    restore_mixers(tiny)
    found = episode(tiny, *case)
    assert found["stats"] is None and off_by(found, tiny) > 0.01
