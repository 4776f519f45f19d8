"""Engines in turn over one shared tier, which is late and then incomplete on the last rank; as JSON.

Usage: ``torchrun shared_tier.py OUT.json tp|pp FOLDER``. `mooncake_tier` does the same with a Mooncake Store.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from megatron_hybrid_prefix.tiers.tier_moves import TierMoves
from tests.harness.engine_helpers import random_tokens
from tests.harness.limits import COLLECTIVE_HANG_S, HANG_S, wait_until
from tests.harness.workers.launch import write_findings
from tests.harness.workers.prefix_parallel import BLOCK_TOKENS, Session, build

PROMPTS = [random_tokens(3 * BLOCK_TOKENS + 9, seed=70 + number) for number in range(2)]
WAITS_S = {"off": 0, "write": HANG_S, "late": 0.1, "missing": HANG_S, "hit": HANG_S}


@contextmanager
def slow(tier: Any) -> Iterator[None]:
    """No read of this rank comes back in time. A request that waits gives up once that is known, however slow the machine is."""
    over, get, fetched = threading.Event(), tier.get, TierMoves.fetched

    def get_late(*arguments: Any) -> Any:
        with tier._reading():
            assert over.wait(HANG_S)
        return get(*arguments)

    def fetched_late(moves: Any, load: Any, wait_s: float = 0.0) -> Any:
        if wait_s:
            wait_until(tier._is_stuck, "the read takes longer than a request waits")
        return fetched(moves, load, wait_s)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tier, "get", get_late)
        patched.setattr(TierMoves, "fetched", fetched_late)
        yield
    over.set()


def run_sessions(
    out: str,
    layout: tuple[str, int, int],
    *,
    url_of: Callable[[float], str],
    lose: Callable[[Any], AbstractContextManager[None]],
) -> None:
    """Writes what each engine found: one without the cache, and those of `WAITS_S` with it.

    Args:
        out: File.
        layout: The model's pattern, and the tensor- and pipeline-parallel sizes.
        url_of: The tier's URL, by its ``wait_s``.
        lose: A context in which a tier is missing states.
    """
    pattern, tp, pp = layout
    platform = ensure_platform(tp=tp, pp=pp, device="cpu", timeout_s=COLLECTIVE_HANG_S["cpu"])
    model = build(pattern, tp, pp, platform)
    faults = {"late": slow, "missing": lose}
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
    write_findings(out, found | {"decisions": decisions})
    shut_down()


@contextmanager
def lose(folder, tier):
    """This rank's states are gone."""
    for path in Path(folder, "v1", tier._name.hex()).rglob("state-*"):
        path.unlink()
    yield


def main(out, layout, folder):
    ranks = int(os.environ["WORLD_SIZE"])
    run_sessions(
        out,
        ("M*-M*-", ranks, 1) if layout == "tp" else ("M*-|M*-", 1, ranks),
        url_of=lambda wait_s: f"file://{folder}?gb=1&min_tokens=0&wait_s={wait_s}&refresh_s=1000000",
        lose=partial(lose, folder),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
