"""Engines in turn over one shared tier, which is late and then incomplete on the last rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from tests.harness.engine_helpers import random_tokens
from tests.harness.limits import HANG_S
from tests.harness.workers.prefix_parallel import BLOCK_TOKENS, Session

PROMPTS = [random_tokens(3 * BLOCK_TOKENS + 9, seed=70 + number) for number in range(2)]
WAITS_S = {"off": 0, "write": HANG_S, "late": 0.1, "missing": HANG_S, "hit": HANG_S}


def run_sessions(
    model: Any,
    layout: tuple[str, int, int],
    *,
    url_of: Callable[[float], str],
    faults: Mapping[str, Callable[[Any], AbstractContextManager[None]]],
) -> dict[str, Any]:
    """What each engine found: one without the cache, and those of `WAITS_S` with it.

    Args:
        model: The model.
        layout: Its pattern, and the tensor- and pipeline-parallel sizes.
        url_of: The tier's URL, by its ``wait_s``.
        faults: Contexts in which a tier is "late" or "missing" entries.
    """
    last = dist.get_rank() == dist.get_world_size() - 1
    found: dict[str, Any] = {}
    decisions = []
    for name, wait_s in WAITS_S.items():
        cached = name != "off"
        fields = {"host_gb": 0.01, "shared": url_of(wait_s), "check_ranks": True} if cached else {}
        session = Session(model, *layout, mode="legacy", slots=8, cached=cached, **fields)
        context = session.engine.context
        tier = context.prefix_cache._store.host.behind.tier if cached else None
        if name == "late" and not last:
            tier.wait_s = HANG_S  # this rank's entries arrive, however long it takes
        with faults[name](tier) if last and name in faults else nullcontext():
            session.send(*PROMPTS)
        found[name] = {"answers": session.found()["answers"]}
        if cached:
            stats = context.prefix_stats()
            found[name] |= {"fallbacks": stats.fallbacks, "faults": stats.tiers["shared"].faults}
            decisions.append(session.decisions)
            assert context.host_moves.drain(HANG_S)
        dist.barrier()
    return found | {"decisions": decisions}
