"""One rank of a functional test. Usage: ``torchrun ranks.py OUT.json CASE DEVICE LAYERS``.

Writes a list with the findings of each rank to ``OUT.json``, which `run.py` judges. Everything also runs with caching
off on the same ranks, in one scheduling mode: both modes must give its answers. The data-parallel coordinator is a process that
imports this file, hence the main guard.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.distributed.functional.run import CASES, Case
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end
from tests.harness.limits import COLLECTIVE_HANG_S, HANG_S
from tests.harness.named_models import named
from tests.harness.workers import coordinator, expert_parallel, prefix_parallel
from tests.harness.workers.launch import write_findings

BLOCK_TOKENS = prefix_parallel.BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Models:
    """What is run of a kind of recurrent layers.

    Attributes:
        patterns: Layers, by pipeline stages.
        experts: A model with experts.
        replicas: A model that replicas serve.
    """

    patterns: dict[int, str]
    experts: str
    replicas: str


MODELS = {
    "mamba2": Models({1: "M*-M*-", 2: "M*-|M*-"}, "tiny-moe", "tiny"),
    "gated-delta-net": Models({1: "G*-MG*-", 2: "G*-|MG*-"}, "tiny-mixed", "tiny-gdn"),
}
STEPS_BEFORE_DEATH = 5


# --- Tensor and pipeline parallel ------------------------------------------------------------------------------------


def layout(case: Case, platform: Any, models: Models) -> dict[str, Any]:
    """Findings of each scenario, with caching off and on; and with wrong states."""
    pattern = models.patterns[case.pp]
    model = prefix_parallel.build(pattern, case.tp, case.pp, platform)

    scenarios = {"tails": prefix_parallel.tails, "host": prefix_parallel.host}

    def play(mode: str, name: str, *, cached: bool = True, damaged: bool = False) -> dict[str, Any]:
        session = prefix_parallel.Session(
            model,
            pattern,
            case.tp,
            case.pp,
            mode=mode,
            slots=prefix_parallel.SLOTS[name],
            cached=cached,
            check_ranks=cached,
            **prefix_parallel.FIELDS[name],
        )
        if damaged:
            prefix_parallel.damage_sources(session.engine.context)
        scenarios[name](session)
        return session.found()

    off = {name: play("legacy", name, cached=False) for name in scenarios}
    runs = {
        f"{name}, {mode}": {"off": off[name], "on": play(mode, name)}
        for mode in prefix_parallel.MODES
        for name in scenarios
    }
    return {"runs": runs, "damaged": play("legacy", "tails", damaged=True)}


# --- Expert parallel -------------------------------------------------------------------------------------------------


def experts(case: Case, platform: Any, models: Models) -> dict[str, Any]:
    """Findings of a model with experts. Each data-parallel rank has different requests, and decides alone."""
    model = build_hybrid_model(named(models.experts), seed=0, platform=platform)

    def answers(mode: str, prefix: HybridPrefixConfig | None) -> dict[str, Any]:
        return expert_parallel.answers(model, dist.get_rank() // case.tp, mode, prefix, ranks=case.ranks)

    off, cache = answers("legacy", None), HybridPrefixConfig(mamba_gb=0.002, check_ranks=True)
    return {"runs": {mode: {"off": off, "on": answers(mode, cache)} for mode in expert_parallel.MODES}}


# --- Data parallel, behind megatron's coordinator --------------------------------------------------------------------


def replicas(case: Case, platform: Any, models: Models) -> dict[str, Any]:
    """Findings of requests through the coordinator. Rank 0 has the client, and compares with a local engine."""
    model = build_hybrid_model(models.replicas, seed=0, platform=platform)
    fields = {"max_sequence_length": 512, "block_size_tokens": BLOCK_TOKENS, "buffer_size_gb": 0.05}
    engine = build_engine(model, HybridPrefixConfig(mamba_gb=0.01, check_ranks=True), **fields)
    prefixes = [random_tokens(2 * BLOCK_TOKENS, seed=seed) for seed in range(case.ranks)]
    # Of each prefix one prompt, at once, so that each replica gets one; then more of each, in turn.
    rounds = [[prefix + random_tokens(3 + own, seed=100 + own) for prefix in prefixes] for own in range(4)]
    replies = asyncio.run(_serve(engine, rounds, is_client=platform.rank == 0))
    engine.context.check_integrity()
    run: dict[str, Any] = {"on": {"answers": replies}}
    plain, finished = build_engine(model, **fields), {}
    for number, prompt in enumerate([prompt for prompts in rounds for prompt in prompts] if replies else []):
        plain.add_request(number, prompt, greedy(coordinator.NEW_TOKENS))
        run_to_end(plain, finished)
    run["off"] = {
        "answers": [
            {"tokens": list(map(int, request.generated_tokens)), "log_probs": list(request.generated_log_probs)}
            for _, request in sorted(finished.items())
        ]
    }
    return {"runs": {"coordinator": run}, "own_stats": engine.context.prefix_stats().as_dict()}


async def _serve(engine: Any, rounds: Sequence[Sequence[list[int]]], *, is_client: bool) -> list[dict[str, Any]]:
    """Serves until the client says stop. The client's rank returns its replies."""
    if not is_client:
        await engine.start_listening_to_data_parallel_coordinator(hostname="127.0.0.1")
        await asyncio.wait_for(engine.engine_loop_task, timeout=HANG_S)
        return []

    async def send(client: Any) -> list[Any]:
        replies = []
        for prompts in rounds:
            replies += await asyncio.gather(*(coordinator.ask(client, prompt) for prompt in prompts))
        return replies

    return [coordinator.described(reply) for reply in await coordinator.serve(engine, send)]


# --- A rank dies -----------------------------------------------------------------------------------------------------


def killed(case: Case, platform: Any, models: Models, out: str) -> dict[str, Any]:
    """The last rank kills itself between two steps. The others continue, and must not complete.

    Each rank writes its process id to ``OUT.rankN`` when it gets this far.
    """
    pattern = models.patterns[case.pp]
    model = prefix_parallel.build(pattern, case.tp, case.pp, platform)
    session = prefix_parallel.Session(model, pattern, case.tp, case.pp, mode="legacy", slots=8, check_ranks=True)
    for number in range(3):
        session.add(random_tokens(BLOCK_TOKENS + 9, seed=number), 40)
    session.run(steps=STEPS_BEFORE_DEATH)
    Path(f"{out}.rank{platform.rank}").write_text(str(os.getpid()))
    if platform.rank == case.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    session.run()
    return {}


def main(out: str, name: str, device: str, layers: str) -> None:
    case = CASES[name]
    platform = ensure_platform(tp=case.tp, pp=case.pp, ep=case.ep, device=device, timeout_s=COLLECTIVE_HANG_S[device])
    kinds = {"layout": layout, "experts": experts, "replicas": replicas, "killed": partial(killed, out=out)}
    play = kinds[case.kind]
    write_findings(out, play(case, platform, MODELS[layers]) | {"platform": platform.describe()})
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
