"""Where the time from the start of ``hybrid-prefix serve`` to its ``/health`` goes, without kept kernels and with them. On an idle GPU::

    python -m tests.gpu.start_parts [--preset hybrid-4b] [--graphs 8] [--requests 64] [--scope block|layer] [--limit 120]

Two servers, one after the other, with the same new cache folders; each then answers two prompts of 8,492 tokens. One that takes longer
than ``--limit`` seconds is killed, and the table has what it told. Lines that are further in are parts of those above them; the
compilations of a kernel whose configurations are timed are parts of that, too. ``--preset tiny --device cpu`` tries the script.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

MARK = "@part "
Parts = dict[str, tuple[float, int]]


def tell(name: str, seconds: float) -> None:
    print(f"\n{MARK}{json.dumps([name, seconds])}", flush=True)


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            tell(name, time.perf_counter() - began_s)

    return call


PACKAGES = (
    "torch", "torch._dynamo", "torch._inductor", "sympy", "triton", "megatron.core", "mamba_ssm", "transformers",
    "cutlass",
)  # fmt: skip
PACKAGES += ("quack", "flash_attn.cute", "transformer_engine", "megatron_hybrid_prefix.upstream.packages")


class TimedImports(MetaPathFinder):
    """Tells how long packages take to import, each with what it imports first."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in PACKAGES:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in later)), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = timed(f"    imported: {name}", spec.loader.exec_module)
        return spec


def watch_start() -> None:
    """Tells the parts of `ensure_platform`."""
    import torch

    from megatron_hybrid_prefix.platform import start

    start._start_distributed = timed("  device, process group", start._start_distributed)
    start._start_parallel_state = timed("  parallel state", start._start_parallel_state)
    torch.cuda.is_available = timed("    CUDA asked for", torch.cuda.is_available)


def watch_megatron() -> None:
    """Tells the parts of a capture, and kernels that are compiled or loaded."""
    import torch
    import triton
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
    from triton.runtime.autotuner import Autotuner

    def compiled(*, times: Any, cache_hit: bool, **about: Any) -> None:
        tell("    kernels: Triton, " + ("loaded" if cache_hit else "compiled"), times.total / 1e6)

    triton.knobs.compilation.listener = compiled
    Autotuner._bench = timed("    kernels: Triton, configurations timed", Autotuner._bench)
    DynamicInferenceEngine.create_cuda_graphs = timed("  graphs", DynamicInferenceEngine.create_cuda_graphs)
    TextGenerationController._dynamic_step_forward_logits = timed(
        "  forwards, captured or not", TextGenerationController._dynamic_step_forward_logits
    )
    torch.cuda.graph.__enter__ = timed("    captures: begun", torch.cuda.graph.__enter__)
    torch.cuda.graph.__exit__ = timed("    captures: ended", torch.cuda.graph.__exit__)
    gc.collect = timed("    garbage collected", gc.collect)
    if "flash_attn.cute" in sys.modules:
        import cutlass.cute as cute
        from flash_attn.cute.cache_utils import JITPersistentCache

        compile_one = cute.compile

        class Compile:
            """``cute.compile`` has options in brackets, too."""

            def __getattr__(self, name: str) -> Any:
                return getattr(compile_one, name)

            def __getitem__(self, options: Any) -> Any:
                return timed("    kernels: FA4, compiled", compile_one[options])

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return timed("    kernels: FA4, compiled", compile_one)(*args, **kwargs)

        cute.compile = Compile()
        load = JITPersistentCache._try_load_from_storage
        JITPersistentCache._try_load_from_storage = timed("    kernels: FA4, looked up in the folder", load)


def serve(began_s: float, scope: str, options: list[str]) -> None:
    """The server's process, which was started at a time of day."""
    sys.meta_path.insert(0, TimedImports())
    from megatron_hybrid_prefix.cli import serve as command
    from megatron_hybrid_prefix.console.terminal import no_garbage_collection

    with no_garbage_collection():  # as the command imports torch
        from megatron_hybrid_prefix import platform

    watch_start()
    ensure = timed("megatron imported, platform started", platform.ensure_platform)

    def ensure_platform(*args: Any, **kwargs: Any) -> Any:
        tell("Python, torch, tokenizer, options", time.time() - began_s)
        started = ensure(*args, **kwargs)
        if started.device.type == "cuda":
            watch_megatron()
        return started

    build = timed("model, random weights", command.build_model)

    def build_model(args: argparse.Namespace, *rest: Any) -> Any:
        args.graph_scope = scope  # an option of `bench`
        return build(args, *rest)

    platform.ensure_platform = ensure_platform
    command.build_model = build_model
    command.make_engine = timed("engine, with graphs and two tokens", command.make_engine)
    sys.exit(command.main(options))


def question(url: str, began_s: float, add: Callable[[str, float], None]) -> None:
    """Asks a server until it has answered two prompts."""

    def ask(path: str, body: Any = None) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()

    ask("/health")
    add("START OF SERVE TO /health", time.time() - began_s)
    for number, token in (("first", 3), ("second", 4)):
        asked_s = time.time()
        prompt = [token, *range(1, 17)] * 499 + [5] * 9
        ask("/v1/completions", {"model": "measured", "prompt": prompt, "max_tokens": 2})
        add(f"{number} answer to 8,492 tokens", time.time() - asked_s)


def watch(process: subprocess.Popen[str], began_s: float) -> Parts:
    """Prints what a server tells as it tells it; returns its parts."""
    parts: Parts = {}

    def add(name: str, seconds: float) -> None:
        before_s, count = parts.get(name, (0.0, 0))
        parts[name] = before_s + seconds, count + 1
        if not name.startswith("    ") or seconds > 1:
            print(f"{time.time() - began_s:8.2f} s: {name} {seconds:.2f}", flush=True)

    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            add(*json.JSONDecoder().raw_decode(line, len(MARK))[0])  # a progress bar may follow in the line
        elif line.strip():
            print(line, end="", flush=True)
        if line.startswith("serving "):
            try:
                question(line.split()[-1], began_s, add)
            except OSError:
                if process.poll() is None:
                    raise  # else it was killed
            process.terminate()
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="hybrid-4b")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--graphs", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--scope", default="block", choices=("layer", "block"))
    parser.add_argument("--limit", type=float, default=120.0)
    args = parser.parse_args()
    options = ["--preset", args.preset, "--device", args.device, "--max-requests", str(args.requests)]
    options += ["--port", "0", "--max-sequence-length", "16384", "--served-model-name", "measured"]
    if args.device == "cuda":
        options += ["--cuda-graphs", str(args.graphs)]
    found: list[Parts] = []
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLASH_ATTENTION_", "TRITON_"))}
    with tempfile.TemporaryDirectory() as folder:
        for kernels in ("no kernels are kept", "kernels are kept"):
            print(f"\n{kernels}", flush=True)
            command = [sys.executable, "-m", "tests.gpu.start_parts", "serve"]
            began_s = time.time()
            with subprocess.Popen(
                [*command, str(began_s), args.scope, *options],
                env=kept | {"XDG_CACHE_HOME": folder, "TRITON_HOME": folder},
                stdout=subprocess.PIPE,
                text=True,
            ) as process:
                timer = threading.Timer(args.limit, process.kill)
                timer.start()
                try:
                    found.append(watch(process, began_s))
                finally:
                    timer.cancel()
                    process.kill()
    print(f"\n{'seconds (times)':50} {'not kept':>16} {'kept':>16}")
    for name in dict.fromkeys(name for parts in found for name in parts):
        columns = (parts.get(name, (0.0, 0)) for parts in found)
        print(f"{name:50} " + " ".join(f"{seconds:9.2f} ({count:4})" for seconds, count in columns))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(float(sys.argv[2]), sys.argv[3], sys.argv[4:])
    main()
