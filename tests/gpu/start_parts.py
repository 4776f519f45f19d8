"""Where the time from a process's start to its first answer goes, with empty caches of kernels and with full ones. On an idle GPU::

    python -m tests.gpu.start_parts [--preset hybrid-4b] [--graphs 8] [--requests 64] [--scope layer|block]

Two processes, one after the other, with the same new cache folders. ``kernels`` are parts of ``graphs`` and of ``first answer``; the
compilations of a kernel whose configurations are timed are parts of that, too. ``--preset tiny --device cpu`` tries the script.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

BEGAN = "START_PARTS_BEGAN"


class Clock:
    """Seconds and counts by part."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[float, int]] = {}

    def add(self, name: str, seconds: float) -> None:
        before, count = self.parts.get(name, (0.0, 0))
        self.parts[name] = before + seconds, count + 1

    def time(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(name, time.perf_counter() - began_s)

        return call


def watch_kernels(clock: Clock) -> None:
    import triton
    from triton.runtime.autotuner import Autotuner

    def compiled(*, times: Any, cache_hit: bool, **about: Any) -> None:
        clock.add("  kernels: Triton, " + ("loaded" if cache_hit else "compiled"), times.total / 1e6)

    triton.knobs.compilation.listener = compiled
    Autotuner._bench = clock.time("  kernels: Triton, configurations timed", Autotuner._bench)
    if "flash_attn.cute" in sys.modules:
        import cutlass.cute as cute
        from flash_attn.cute.cache_utils import JITPersistentCache

        compile_one = cute.compile

        class Compile:
            """``cute.compile`` has options in brackets, too."""

            def __getattr__(self, name: str) -> Any:
                return getattr(compile_one, name)

            def __getitem__(self, options: Any) -> Any:
                return clock.time("  kernels: FA4, compiled", compile_one[options])

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return clock.time("  kernels: FA4, compiled", compile_one)(*args, **kwargs)

        cute.compile = Compile()
        load = JITPersistentCache._try_load_from_storage
        JITPersistentCache._try_load_from_storage = clock.time("  kernels: FA4, looked up in the folder", load)


def child(args: argparse.Namespace) -> None:
    clock = Clock()
    last_s = float(os.environ[BEGAN])

    def part(name: str) -> None:
        nonlocal last_s
        now_s = time.time()
        clock.add(name, now_s - last_s)
        last_s = now_s

    import torch

    from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
    from megatron_hybrid_prefix.mcore.runner import run_batch
    from megatron_hybrid_prefix.models import build_hybrid_model
    from megatron_hybrid_prefix.platform import ensure_platform, shut_down
    from tests.gpu.measure import BLOCK_TOKENS
    from tests.harness.engine_helpers import cache_gb_for, greedy
    from tests.harness.named_models import named

    part("torch and this package imported")
    platform = ensure_platform(device=args.device)
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

    on_gpu = platform.device.type == "cuda"
    if on_gpu:
        watch_kernels(clock)
    part("megatron imported, platform started")
    capture = {"cuda_graph_impl": "local", "inference_cuda_graph_scope": args.scope} if on_gpu else {}
    model = build_hybrid_model(named(args.preset), seed=0, **capture)
    part("model, random weights")
    DynamicInferenceEngine.create_cuda_graphs = clock.time("graphs", DynamicInferenceEngine.create_cuda_graphs)
    sizes = {"block_tokens": BLOCK_TOKENS, "max_requests": args.requests}
    engine = build_engine(
        model,
        HybridPrefixConfig(cache_gb=cache_gb_for(model, 256, states=2 * args.requests, **sizes)),
        block_size_tokens=BLOCK_TOKENS,
        max_requests=args.requests,
        max_sequence_length=16384,
        max_tokens=16384,
        enable_chunked_prefill=True,
        **({"num_cuda_graphs": args.graphs} if on_gpu else {}),
    )
    part("engine, with graphs")
    if on_gpu:
        clock.add(f"graphs: kinds of step: {len(engine.context.cuda_graph_batch_dimensions_list)}", 0.0)
    for tokens in (2, 8492):
        run_batch(engine, [list(range(1, 17)) * (tokens // 16) + [3] * (tokens % 16)], greedy(2))
        if on_gpu:
            torch.cuda.synchronize()
        part(f"answer to {tokens} tokens")
    shut_down()
    print(json.dumps(clock.parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="hybrid-4b")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--graphs", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--scope", default="layer", choices=("layer", "block"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    found: list[dict[str, tuple[float, int]]] = []
    with tempfile.TemporaryDirectory() as folder:
        folders = {"XDG_CACHE_HOME": folder, "TRITON_HOME": folder}
        for _ in range(2):
            env = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("FLASH_ATTENTION_", "TRITON_"))
            }
            env |= folders | {BEGAN: str(time.time())}
            command = [sys.executable, "-m", "tests.gpu.start_parts", *sys.argv[1:], "--child"]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'seconds (times)':48} {'empty':>16} {'full':>16}")
    for name in dict.fromkeys(name for parts in found for name in parts):
        columns = (parts.get(name, (0.0, 0)) for parts in found)
        print(f"{name:48} " + " ".join(f"{seconds:10.2f} ({count:3})" for seconds, count in columns))


if __name__ == "__main__":
    main()
