"""Conversations that do not fit into the memory, with and without a host tier. On an idle GPU::

    python -m tests.gpu.host_pressure [--preset hybrid-4b] [--repeats 3] [--host-gb 24]

10 conversations of 3 turns: 30 prompts of 8,000 to 12,000 tokens, and memory for the KV and the states of three of them. The prompts
come all at once (``queue``), or each turn when the answer to the one before is there (``turns``). The engines take turns. ``--preset tiny
--device cpu --scale 64 --host-gb 0.1`` tries the script.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.gpu.measure import report, started, synchronize
from tests.harness.engine_helpers import cache_gb_for, greedy

CONVERSATIONS, TURNS, FIT, ANSWER = 10, 3, 3, 32
FIRST, LAST = 8_000, 12_000  # tokens of the first and the last turns' prompts


def conversations(scale: int, vocabulary: int, seed: int) -> list[list[list[int]]]:
    """The prompts of each conversation: each turn begins with the one before, and adds a question of another length."""
    dice = random.Random(seed)
    found = []
    for _ in range(CONVERSATIONS):
        ends = sorted(dice.randint(FIRST // scale, LAST // scale) for _ in range(TURNS))
        tokens = [dice.randrange(vocabulary) for _ in range(ends[-1])]
        found.append([tokens[:end] for end in ends])
    return found


def sizes(model: Any, block_tokens: int, scale: int, requests: int) -> dict[str, Any]:
    """Memory for three conversations, and a step for one prompt."""
    blocks = FIT * (LAST // scale // block_tokens + 1)
    return {
        "cache_gb": cache_gb_for(model, blocks, states=FIT * TURNS, block_tokens=block_tokens, max_requests=requests),
        "max_sequence_length": LAST // scale + 2 * block_tokens,
        "max_tokens": LAST // scale + block_tokens,
        "max_requests": requests,
        "block_size_tokens": block_tokens,
    }


@torch.inference_mode()
def serve(engine: Any, prompts: list[list[list[int]]], *, at_once: bool, answer: int = ANSWER) -> dict[str, float]:
    """Sends all prompts, turn by turn, and steps to the end. Returns counts of this run, and its seconds."""
    before, steps, running = engine.context.prefix_stats(), 0, 0
    waiting = [[(number, turn) for turn in range(TURNS)] for number in range(len(prompts))]
    ids: dict[int, int] = {}  # conversation of each request
    synchronize()
    start_s = time.perf_counter()

    def send(number: int) -> None:
        if waiting[number]:
            _, turn = waiting[number].pop(0)
            ids[len(ids)] = number
            engine.add_request(len(ids) - 1, prompts[number][turn], greedy(answer))

    for _ in range(TURNS if at_once else 1):
        for number in range(len(prompts)):
            send(number)
    while engine.has_unfinished_requests():
        for record in engine.step_modern()["finished_request_records"]:
            send(ids[record.request_id])
        steps, running = steps + 1, running + engine.context.total_request_count
    seconds = time.perf_counter() - start_s
    after = engine.context.prefix_stats()
    host, earlier = after.tiers["host"], before.tiers["host"]
    return {
        "seconds": seconds,
        "steps": steps,
        "running": running / steps,
        "computed": after.computed_prompt_tokens - before.computed_prompt_tokens,
        "reused": after.reused_tokens - before.reused_tokens,
        "reused_host": after.reused_tokens_host - before.reused_tokens_host,
        "loads": host.loads - earlier.loads,
        "given_up": after.fallbacks.get("host_load_given_up", 0) - before.fallbacks.get("host_load_given_up", 0),
        "waited": host.seconds_waited - earlier.seconds_waited,
    }


def main(args: Any) -> None:
    model = build_hybrid_model(args.preset, seed=0, cuda_graph_impl="none")
    block_tokens = max(16, 256 // args.scale) if args.scale > 1 else 256
    fields = sizes(model, block_tokens, args.scale, args.requests)
    memory = {"cache_gb": fields.pop("cache_gb")}
    settings = {"without": {}, "with": {"host_gb": args.host_gb}}
    engines = {
        name: build_engine(model, HybridPrefixConfig(**memory, **own), **fields) for name, own in settings.items()
    }
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for repeat in range(args.repeats + 1):
        prompts = conversations(args.scale, model.hybrid_config.vocab_size, seed=repeat)
        for way in ("queue", "turns"):
            for name, engine in engines.items():
                run = serve(engine, prompts, at_once=way == "queue")
                print(way, name, repeat, {key: round(value, 3) for key, value in run.items()}, flush=True)
                engine.invalidate()
                if repeat:  # the first is warm-up
                    found.setdefault(way, {}).setdefault(name, []).append(run)
    for way, runs in found.items():
        medians = {
            name: {key: statistics.median(run[key] for run in own) for key in own[0]} for name, own in runs.items()
        }
        ratio = medians["with"]["seconds"] / medians["without"]["seconds"]
        print(f"{way}: with a host tier {ratio:.3f} of the time without")
        report(args, {"way": way, "ratio": ratio, **medians})


if __name__ == "__main__":
    with started(
        __doc__, preset="hybrid-4b", scale=1, repeats=3, host_gb=24.0, requests=16, sizes=lambda args: {}
    ) as arguments:
        main(arguments)
