"""Shared by the verbs that run engines: the platform and its memory, engines, sending prompts; versions and hardware.

Torch and megatron are imported when a platform is started, so that bad input is reported at once.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import platform as host
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.console.engine_options import Budgets, check_memory
from megatron_hybrid_prefix.console.terminal import (
    InputError,
    Interrupt,
    Stopped,
    as_input_errors,
    as_memory_errors,
    no_garbage_collection,
)
from megatron_hybrid_prefix.errors import PlatformError
from megatron_hybrid_prefix.upstream.version import check_version

PACKAGES = ("torch", "triton", "mamba-ssm", "causal-conv1d", "flash-attn-4", "transformer-engine")


# --- Platform --------------------------------------------------------------------------------------------------------


@contextmanager
def started_platform(args: argparse.Namespace) -> Iterator[Any]:
    """The platform for ``--tp``, ``--pp`` and ``--device``. Shut down at the end if it was started here.

    Raises:
        InputError: It cannot be started.
    """
    first = "megatron.core" not in sys.modules
    with no_garbage_collection():  # it would look at all modules again and again while they are imported
        from megatron_hybrid_prefix.platform import ensure_platform, running_platform, shut_down

    was_running = running_platform() is not None
    try:
        with no_garbage_collection():
            with as_input_errors(ValueError, PlatformError):
                started = ensure_platform(tp=args.tp, pp=args.pp, device=args.device)
            unregister_stack_dumps()
        if first:
            gc.freeze()  # modules stay: later collections pass them over; later, an engine that has ended would stay, too
        yield started
    except (InputError, Stopped):  # all ranks get here; after another exception they may not
        if not was_running:
            shut_down()
        raise
    if not was_running:
        shut_down()


def unregister_stack_dumps() -> None:
    """Removes megatron's signal handlers, which print a stack trace at every Ctrl-C and SIGTERM."""
    import megatron.core.inference.engines  # noqa: F401

    for number in (signal.SIGINT, signal.SIGTERM):
        faulthandler.unregister(number)


def default_device() -> str:
    """The running platform's device type; without one, "cuda" if there is a GPU."""
    import torch

    from megatron_hybrid_prefix.platform import running_platform

    running = running_platform()
    if running is not None:
        return str(running.device.type)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _most_of_ranks(platform: Any, value: int) -> int:
    """The largest value of all ranks. A collective call."""
    if platform.world_size == 1:
        return value
    import torch

    values = torch.tensor([value], dtype=torch.int64, device=platform.device)
    torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX)
    return int(values.item())


def stop_requested(platform: Any, interrupt: Interrupt) -> bool:
    """Whether Ctrl-C was pressed on any rank. A collective call, so that all ranks stop at the same step."""
    return bool(_most_of_ranks(platform, int(interrupt.requested)))


def free_for_engines(platform: Any) -> int:
    """Bytes that are free now for a rank's engines: the least of all ranks, so that all have the same budgets."""
    from megatron_hybrid_prefix.platform.memory import free_bytes

    sharing = 1 if platform.device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return -_most_of_ranks(platform, -(free_bytes(platform.device) // sharing))


def budgets_of(args: argparse.Namespace, platform: Any) -> Budgets:
    """The budgets of the options. A collective call, before any rank has its engine.

    Raises:
        InputError: They do not fit into what is free now.
    """
    budgets = Budgets.of(args, platform.device.type, free_bytes=free_for_engines(platform))
    check_memory(budgets, platform.device, ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return budgets


# --- Engines ---------------------------------------------------------------------------------------------------------


def greedy(generate: int) -> Any:
    """Megatron's sampling parameters for exactly ``generate`` tokens, without log-probs."""
    from megatron_hybrid_prefix.upstream.names import SamplingParams

    return SamplingParams(num_tokens_to_generate=generate, top_k=1, termination_id=-1)


def made_engine(what: str, model: Any, fields: dict[str, Any], tokenizer: Any = None) -> Any:
    """An engine that has run once.

    Args:
        what: The engine, for errors.
        model: Its model.
        fields: Arguments of build_engine.
        tokenizer: Its tokenizer; None: it gives no text.

    Raises:
        InputError: It cannot be built.
    """
    from megatron_hybrid_prefix.mcore import build_engine
    from megatron_hybrid_prefix.mcore.runner import run_batch

    with as_input_errors(ValueError, prefix=f"{what}: "), as_memory_errors(what):
        engine = build_engine(model, tokenizer=tokenizer, **fields)
        # The first forward of a process does lazy set-up. Two tokens are too few to be cached.
        run_batch(engine, [[0, 1]], greedy(2))
    return engine


@contextmanager
def running_engine(name: str, model: Any, fields: dict[str, Any], tokenizer: Any = None) -> Iterator[Any]:
    """The engine ``name`` of `ENGINES`, released at the end; arguments as of `made_engine`."""
    from megatron_hybrid_prefix.mcore.runner import release_engine

    engine = made_engine(f"engine {name}", model, fields, tokenizer)
    try:
        yield engine
    finally:
        release_engine(engine)
        del engine
        gc.collect()  # an engine has reference cycles


def send(
    engine: Any,
    prompts: Sequence[list[int]],
    sampling: Any,
    should_stop: Callable[[], bool],
    on_done: Callable[[int], None] = lambda count: None,
) -> list[Any]:
    """Sends prompts at once.

    Args:
        engine: An engine without requests.
        prompts: Token ids of each.
        sampling: Megatron's sampling parameters, for all or one for each.
        should_stop: See `stop_requested`.
        on_done: Called after each step with the number of answers.

    Returns:
        A `RequestResult` each.

    Raises:
        Stopped: Ctrl-C.
    """
    from megatron_hybrid_prefix.mcore.runner import run_batch

    results: list[Any] = run_batch(engine, prompts, sampling, on_step=on_done, should_stop=should_stop)
    if any(result.status == "stopped" for result in results):
        raise Stopped
    return results


def cache_figures(engine: Any) -> dict[str, Any] | None:
    """Statistics of this package's cache in an engine; None if the engine has no such cache."""
    context = engine.context
    return None if getattr(context, "prefix_cache", None) is None else context.prefix_stats().as_dict()


# --- Facts -----------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Versions of this package, Python, and the installed dependencies."""
    found = {"megatron-hybrid-prefix": __version__, "python": host.python_version()}
    found["megatron-core"] = str(check_version().version)  # a checkout has no package metadata
    for name in PACKAGES:
        try:
            found[name] = version_of(name)
        except PackageNotFoundError:
            continue
    return found


def hardware(platform: Any) -> dict[str, Any]:
    """CPU and GPU of this rank. Needs a running platform."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), host.machine())
    found: dict[str, Any] = {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ranks": platform.world_size,
    }
    if platform.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(platform.device)
        driver = Path("/proc/driver/nvidia/version")
        version = re.search(r"\b\d+\.\d+(\.\d+)?\b", driver.read_text()) if driver.is_file() else None
        found |= {
            "gpu": gpu.name,
            "gpu_memory_gib": round(gpu.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": version[0] if version else None,
        }
    return found
