"""What the host does between a prompt's arrival and its first token. On an idle GPU::

    python -m tests.gpu.host_path [--preset hybrid-4b] [--tokens 8492] [--own 300] [--ways block,block-async,layer] [--times 30]

A way is what CUDA graphs capture, and how steps are scheduled. Milliseconds from ``add_request`` to the points of `POINTS`, medians, for a
cold prompt and for hits on all but its last ``--own`` tokens; what the device was busy, and its gaps. Then the functions that take
most of the host's time (``--functions``), by Python's profiler, which doubles it. ``--preset tiny --device cpu --tokens 556`` tries it.
"""

from __future__ import annotations

import cProfile
import pstats
import random
import statistics
import time
from collections import Counter, defaultdict
from typing import Any

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore.runner import release_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.gpu.measure import BLOCK_TOKENS, ON_GPU, engine_fields, started, synchronize
from tests.harness.engine_helpers import cache_gb_for, greedy
from tests.harness.named_models import named

# The start of these methods, on the engine, its context, its controller and the wrapped model.
POINTS = {
    "accepted": ("engine", "schedule_waiting_requests"),
    "admitted": ("context", "initialize_attention_state"),
    "described": ("context", "transfer_bookkeeping_to_gpu"),
    "forward": ("wrapped", "run_one_forward_step"),
    "launched": ("controller", "forward_launched"),
    "sampling": ("controller", "_dynamic_step_sample_logits"),
    "processed": ("engine", "post_process_requests"),
}


class Marks:
    """Notes when a prompt passes `POINTS` for the first time."""

    def __init__(self, engine: Any) -> None:
        self.at_s: dict[str, float] = {}
        controller = engine.controller
        objects = {"engine": engine, "context": engine.context, "controller": controller}
        objects["wrapped"] = controller.inference_wrapped_model
        for point, (of, name) in POINTS.items():
            self._mark(objects[of], name, point)

    def _mark(self, of: Any, name: str, point: str) -> None:
        inner = getattr(of, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            self.at_s.setdefault(point, time.perf_counter())
            return inner(*args, **kwargs)

        setattr(of, name, marked)


class Sender:
    """Sends prompts of two tokens one by one, each when the device is idle."""

    def __init__(self, engine: Any, marks: Marks) -> None:
        self.engine, self.marks, self.sent = engine, marks, 0

    @torch.inference_mode()
    def send(self, prompt: list[int]) -> dict[str, float]:
        """Milliseconds until each point, and until the first token is there."""
        engine, self.sent = self.engine, self.sent + 1
        synchronize()
        self.marks.at_s.clear()
        began_s = time.perf_counter()
        engine.add_request(self.sent, prompt, greedy(2))
        request = engine.get_request(self.sent)
        while not request.generated_tokens:
            engine.step_modern()
        self.marks.at_s["first token"] = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step_modern()
        return {point: (at_s - began_s) * 1e3 for point, at_s in self.marks.at_s.items()}


def gaps_of(send: Any) -> tuple[float, float, Counter[str]]:
    """Milliseconds in which a kernel ran, and did not, between the first and the last of ``send``; the gaps by the kernels around."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        send()
        synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, idle, end, last, gaps = 0.0, 0.0, 0.0, "", Counter[str]()
    for start, stop, name in spans:
        if last and start > end:
            idle += (start - end) / 1e3
            gaps[f"{last[:40]} ... {name[:40]}"] += (start - end) / 1e3
        busy += max(0.0, stop - max(start, end)) / 1e3
        if stop > end:
            end, last = stop, name
    return busy, idle, gaps


def measure(args: Any, way: str) -> None:
    scope, *more = way.split("-")
    graphs = args.graphs and ON_GPU and scope != "none"
    overrides = {"inference_cuda_graph_scope": scope} if graphs else {"cuda_graph_impl": "none"}
    model, dice = build_hybrid_model(named(args.preset), seed=0, **overrides), random.Random(0)
    fields = engine_fields(model, args.tokens, prompts=4)
    cache_gb = cache_gb_for(
        model,
        12 * (args.tokens // BLOCK_TOKENS + 1),
        states=32,
        block_tokens=BLOCK_TOKENS,
        max_requests=fields["max_requests"],
    )
    fields |= {
        "num_cuda_graphs": args.graphs if graphs else None,
        "async_sched_mode": "async" if "async" in more else "legacy",
    }
    began_s = time.perf_counter()
    engine = build_engine(model, HybridPrefixConfig(cache_gb=cache_gb), **fields)
    print(f"\n{way}: built in {time.perf_counter() - began_s:.1f} s", flush=True)
    sender = Sender(engine, Marks(engine))

    def new(count: int) -> list[int]:
        return [dice.randrange(model.hybrid_config.vocab_size) for _ in range(count)]

    shared = new(args.tokens - args.own)
    kinds = {"cold": lambda: new(args.tokens), "hit": lambda: shared + new(args.own), "short": lambda: new(args.own)}
    for _ in range(3):
        for prompt in kinds.values():
            sender.send(prompt())
    found: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in kinds}
    for _ in range(args.times):
        for kind, prompt in kinds.items():
            for point, ms in sender.send(prompt()).items():
                found[kind][point].append(ms)
    for kind, points in found.items():
        medians = {point: statistics.median(times) for point, times in points.items()}
        listed = sorted(medians.items(), key=lambda item: item[1])
        print(f"{kind:6}" + ", ".join(f"{point} {ms:.2f}" for point, ms in listed), flush=True)
    if ON_GPU:
        for kind in ("cold", "hit"):
            prompt = kinds[kind]()
            busy, idle, gaps = gaps_of(lambda prompt=prompt: sender.send(prompt))
            print(f"{kind}: busy {busy:.2f} ms, idle {idle:.2f}")
            for around, ms in gaps.most_common(args.gaps):
                print(f"    {ms:8.3f}  {around}")
    if args.functions > 0:
        profile = cProfile.Profile()
        for _ in range(args.times):
            prompt = kinds["hit"]()
            profile.enable()
            sender.send(prompt)
            profile.disable()
        for order in ("tottime", "cumtime"):
            pstats.Stats(profile).sort_stats(order).print_stats(args.functions)
    release_engine(engine)


def main(args: Any) -> None:
    for way in args.ways.split(","):
        measure(args, way)


OPTIONS = {"preset": "hybrid-4b", "tokens": 8492, "own": 300, "times": 30, "graphs": 8, "gaps": 12, "functions": 40}

if __name__ == "__main__":
    with started(__doc__, ways="block,block-async,layer", **OPTIONS) as arguments:
        main(arguments)
