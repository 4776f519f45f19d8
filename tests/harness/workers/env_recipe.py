"""Agents in engines as NeMo-RL makes them, the cache on by variables alone. Usage: ``env_recipe.py OUT.json MAX_TOKENS:PROMPT...``."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

BLOCK, TURNS, ANSWER, TOOL = 256, 3, 24, 90  # tokens, apart from TURNS
# prefix_caching_mamba_gb is unset. LRU, as NeMo-RL's worker sets since September 2026: else megatron's cache forgets each turn at its end.
RECIPE = {"enable_prefix_caching": True, "block_size_tokens": BLOCK, "buffer_size_gb": 0.1}


def episode(model: Any, max_tokens: int, prompt_tokens: int) -> dict[str, Any]:
    """One agent: its ids, and of each turn where the answer starts, its log-probs, and the prompt tokens reused and computed."""
    from megatron.core.inference.config import PrefixCachingEvictionPolicy

    from tests.harness.engine_helpers import random_tokens
    from tests.harness.rl import sampling, worker_engine

    whole = prompt_tokens + TURNS * (ANSWER + TOOL)
    engine = worker_engine(
        model,
        max_tokens=max_tokens,
        max_sequence_length=whole + BLOCK,
        **RECIPE,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
    )
    ids, turns, context = random_tokens(prompt_tokens, seed=max_tokens), [], engine.context
    for turn in range(TURNS):
        before = context.lifetime_prefill_token_count
        engine.add_request(turn, ids, sampling(ANSWER))
        while engine.has_unfinished_requests():
            records = engine.step_modern()["finished_request_records"]
        answer, computed = records[0].merge(), int(context.lifetime_prefill_token_count - before)
        log_probs = list(answer.generated_log_probs)
        turns.append({"at": len(ids), "log_probs": log_probs, "reused": len(ids) - computed})
        ids = [*ids, *answer.generated_tokens, *random_tokens(TOOL, seed=turn)]
    stats = context.prefix_stats().as_dict() if hasattr(context, "prefix_stats") else {}
    return {"context": type(context).__name__, "ids": ids, "turns": turns, "stats": stats}


def main(out: str, *cases: str) -> None:
    logging.basicConfig(level=logging.INFO)
    from megatron_hybrid_prefix.models import build_hybrid_model

    model = build_hybrid_model("tiny", seed=0)
    Path(out).write_text(json.dumps([episode(model, *map(int, case.split(":"))) for case in cases]))


if __name__ == "__main__":
    main(*sys.argv[1:])
