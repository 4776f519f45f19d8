"""Where a hit takes longer than a cold prompt of the tokens that it computes: on the host, and on the GPU::

    python -m tests.gpu.hit_over_cold [--preset hybrid-4b] [--tokens 8192] [--rounds 30]

Hits of a shared prefix and cold prompts, of 300 own tokens each, take turns. Without a GPU it only tries the script: ``--preset tiny
--device cpu --tokens 1024 --rounds 3``, and no CUDA graphs are captured.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.gpu.shared_tier import Milestones, milestones_table
from tests.harness.engine_helpers import greedy, kv_budget, random_tokens, run_to_end, state_bytes

OWN_TOKENS, BLOCK = 300, 256
WARM_UP, PROFILED = 4, 6  # prompts of each kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="hybrid-4b")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=8192, help="of the shared prefix")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    on_gpu = ensure_platform(device=args.device).device.type == "cuda"
    model = build_hybrid_model(args.preset, seed=0, **({"cuda_graph_impl": "local"} if on_gpu else {}))
    vocabulary, longest = model.hybrid_config.vocab_size, args.tokens + 2 * OWN_TOKENS
    engine = build_engine(
        model,
        HybridPrefixConfig(mamba_gb=64.5 * state_bytes(model) / 2**30),
        max_sequence_length=longest + BLOCK,
        max_requests=8,
        max_tokens=(longest // 64 + 1) * 64,
        block_size_tokens=BLOCK,
        **({"num_cuda_graphs": 8} if on_gpu else {}),
        **kv_budget(model, 8 * (longest // BLOCK + 2), block_tokens=BLOCK, max_requests=8),
    )
    shared = random_tokens(args.tokens, seed=1, vocabulary=vocabulary)
    milestones = Milestones()
    sent = 0

    def prompt(name, seed):
        own = random_tokens(OWN_TOKENS, seed=1000 + 2 * seed + (name == "cold"), vocabulary=vocabulary)
        return shared + own if name == "hit" else own

    def send(tokens):
        """Milliseconds to the first token, and milestones."""
        nonlocal sent
        sent += 1
        if on_gpu:
            torch.cuda.synchronize()
        milestones.start()
        start = time.perf_counter()
        with torch.inference_mode():
            # The second token: at the end megatron turns the whole prompt into text, after the first token.
            engine.add_request(sent, tokens, greedy(2))
            accepted = (time.perf_counter() - start) * 1e3
            run_to_end(engine, {}, steps=1)
            if on_gpu:
                torch.cuda.synchronize()
            over = (time.perf_counter() - start) * 1e3
            found = milestones.found() | {"request accepted": (0.0, accepted, accepted)}
            run_to_end(engine, {})
        return over, found

    names = ("hit", "cold")
    for seed in range(WARM_UP):
        for name in names:
            send(prompt(name, seed))
    results = {name: [] for name in names}
    for seed in range(WARM_UP, WARM_UP + args.rounds):
        for name in names:
            results[name].append(send(prompt(name, seed)))
    times = {name: [ms for ms, _ in found] for name, found in results.items()}
    for name, found in results.items():
        print(f"{name}: {statistics.median(times[name]):.2f} ms")
        print(*milestones_table([parts for _, parts in found]), sep="\n", flush=True)
    ratios = [hit / cold for hit, cold in zip(*times.values(), strict=True)]
    medians = statistics.median(times["hit"]) / statistics.median(times["cold"])
    print(f"hit over cold: {medians:.3f} of the medians, {statistics.median(ratios):.3f} median of the rounds")
    if on_gpu:
        gpu_time(lambda name, seed: send(prompt(name, 10_000 + seed)), names)
    shut_down()


def gpu_time(run, names):
    """Prints the GPU's own time of each kind, and the kernels that differ most."""
    found = {}
    for name in names:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for seed in range(PROFILED):
                run(name, seed)
        found[name] = {event.key: event.self_device_time_total / PROFILED for event in profile.key_averages()}
        print(f"{name}: {sum(found[name].values()) / 1e3:.2f} ms on the GPU")
    hit, cold = (found[name] for name in names)
    for key in sorted(hit | cold, key=lambda key: -abs(hit.get(key, 0.0) - cold.get(key, 0.0)))[:8]:
        print(f"{hit.get(key, 0.0):9.0f} {cold.get(key, 0.0):9.0f} us  {key[:100]}")


if __name__ == "__main__":
    main()
