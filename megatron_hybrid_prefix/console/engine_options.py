"""Shared by the commands that run engines: options, the engines' names and arguments, the platform, versions.

This module imports neither torch nor megatron before a platform is started, so that bad input is reported at once.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import platform as host
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.config import ExactName, HybridPrefixConfig
from megatron_hybrid_prefix.console.hf import add_hf_option, choose_model
from megatron_hybrid_prefix.console.terminal import (
    InputError,
    Interrupt,
    Stopped,
    as_input_errors,
    split_names,
)
from megatron_hybrid_prefix.errors import PlatformError
from megatron_hybrid_prefix.models.config import PRESETS
from megatron_hybrid_prefix.tiers.registry import parse_url

GIB = 2**30
DEFAULT_PRESET = "tiny"
DEFAULT_BUFFER_GB = {"cpu": 0.25, "cuda": 20.0}
DEFAULT_MAMBA_GB = {"cpu": 0.05, "cuda": 8.0}
DEFAULT_MAX_TOKENS = {"cpu": 4096, "cuda": 16384}
STEP_TOKENS_MULTIPLE = 64  # megatron pads a step's tokens to this, and asserts that max_tokens is a multiple
ENGINE_ADVICE = "lower its budgets, --max-tokens or --max-requests"
PACKAGES = ("megatron-core", "torch", "triton", "mamba-ssm", "causal-conv1d", "flash-attn-4", "transformer-engine")


# --- Memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Memory that engines get on each rank. All engines with a cache get the same in all, unless ``cache_gb`` is given.

    Attributes:
        buffer_gb: GiB for KV blocks and the states of running requests, in megatron's own engines.
        mamba_gb: GiB for checkpoints, in megatron's own engine with a cache.
        cache_gb: GiB for all of these, in an engine with this package's cache. None: the sum of the two.
        by_parts: Whether one of the two was given as an option, so that an error names them.
        host_gb: GiB of host memory for evicted KV and states.
        shared: URL of the tier behind the host memory; None: none.
        exact: The field of `HybridPrefixConfig`, of the engines with this package's cache.
    """

    buffer_gb: float
    mamba_gb: float
    cache_gb: float | None = None
    by_parts: bool = False
    host_gb: float = 0.0
    shared: str | None = None
    exact: ExactName | None = None

    @classmethod
    def of(cls, args: argparse.Namespace, device_type: str, **wanted: float) -> Budgets:
        """The budgets of the options of `add_engine_options`, else ``wanted``, else the defaults."""
        names = ("cache_gb", "buffer_gb", "mamba_gb", "host_gb")
        given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
        defaults = {"buffer_gb": DEFAULT_BUFFER_GB[device_type], "mamba_gb": DEFAULT_MAMBA_GB[device_type]}
        by_parts = "cache_gb" not in given and bool(given.keys() & defaults.keys())
        return cls(**(defaults | wanted | given), by_parts=by_parts, shared=args.shared, exact=args.exact)

    @property
    def prefix(self) -> HybridPrefixConfig:
        """Settings of this package's cache."""
        cache_gb = self.buffer_gb + self.mamba_gb if self.cache_gb is None else self.cache_gb
        return HybridPrefixConfig(cache_gb=cache_gb, host_gb=self.host_gb, exact=self.exact, shared=self.shared)


UPSTREAM = "upstream"  # megatron's own engine
# Engine name -> arguments of build_engine.
ENGINES: dict[str, Callable[[Budgets], dict[str, Any]]] = {
    "off": lambda budgets: {"buffer_size_gb": budgets.buffer_gb},
    UPSTREAM: lambda budgets: {
        "buffer_size_gb": budgets.buffer_gb,
        "enable_prefix_caching": True,
        "prefix_caching_mamba_gb": budgets.mamba_gb,
    },
    "ours": lambda budgets: {"prefix": budgets.prefix},
}
DEFAULT_ENGINES = ("off", "upstream", "ours")


def budget_of(fields: dict[str, Any]) -> dict[str, float]:
    """GiB per rank by name, of an engine with these arguments of build_engine."""
    prefix = fields.get("prefix")
    if prefix is not None:
        return {"cache_gb": prefix.cache_gb} | ({"host_gb": prefix.host_gb} if prefix.host_gb else {})
    mamba_gb = fields.get("prefix_caching_mamba_gb")
    return {"buffer_gb": fields["buffer_size_gb"]} | ({} if mamba_gb is None else {"mamba_gb": mamba_gb})


def check_cap(mamba_gb: float | None, cache_gb: float | None) -> None:
    """Raises InputError if ``--mamba-gb`` is more than ``--cache-gb``."""
    if mamba_gb is not None and cache_gb is not None and mamba_gb > cache_gb:
        raise InputError(
            f"--mamba-gb {mamba_gb:g}: the most for checkpoints in --cache-gb {cache_gb:g}, so it cannot be larger: lower it, "
            "or raise --cache-gb"
        )


def check_memory(
    budgets: Budgets, fields: dict[str, Any], device: Any, where: str = "", *, all_ranks: bool = False
) -> None:
    """Checks that an engine's budget fits into the memory that is free now.

    Args:
        budgets: Where the engine's budget comes from.
        fields: Arguments of build_engine.
        device: The platform's device.
        where: Before the message.
        all_ranks: Whether no rank of this host has its budget yet, so that it is needed once for each of them.

    Raises:
        InputError: It does not.
    """
    from megatron_hybrid_prefix.platform.memory import free_bytes, host_free_bytes

    budget = budget_of(fields)
    if budgets.by_parts and "cache_gb" in budget:
        del budget["cache_gb"]
        budget |= {"buffer_gb": budgets.buffer_gb, "mamba_gb": budgets.mamba_gb}
    on_host = {name: gb for name, gb in budget.items() if name == "host_gb" or device.type == "cpu"}
    on_device = {name: gb for name, gb in budget.items() if name not in on_host}
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if all_ranks else 1
    for kind, parts, free, copies in (
        ("GPU", on_device, free_bytes(device), 1),
        ("host", on_host, host_free_bytes(), ranks),
    ):
        need_gb = copies * sum(parts.values())
        if need_gb * GIB > free:
            names = " and ".join(f"--{name.replace('_', '-')} {gb:g}" for name, gb in parts.items())
            each = f" on each of {copies} ranks" if copies > 1 else ""
            raise InputError(
                f"{where}{names}{each}: {need_gb:.6g} GiB of {kind} memory are needed, {free / GIB:.4g} GiB are free"
            )


# --- Options ---------------------------------------------------------------------------------------------------------


def add_model_options(add: Callable[..., Any], *, shown: str = DEFAULT_PRESET) -> None:
    """Adds the options of the model and its ranks. ``shown``: the default preset, for the help."""
    add(
        "--preset",
        metavar="NAME",
        help=f"model: {', '.join(PRESETS)} (default: {shown})",
    )
    add_hf_option(add)
    add("--seed", type=int, default=0, metavar="N", help="seed of the random weights (default: %(default)s)")
    add("--tp", type=positive_int, default=1, metavar="N", help="tensor-parallel size (default: %(default)s)")
    add("--pp", type=positive_int, default=1, metavar="N", help="pipeline-parallel size (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU, else cpu")


def add_engine_options(
    add: Callable[..., Any],
    *,
    max_requests: int | None,
    max_requests_text: str,
    cuda_graphs_text: str,
    several_engines: bool = True,
) -> None:
    """Adds the options of engines.

    Args:
        add: Adds an option.
        max_requests: Default of ``--max-requests``.
        max_requests_text: That default, in the help.
        cuda_graphs_text: The default of ``--cuda-graphs``, in the help.
        several_engines: Whether the command runs the engines of `ENGINES`. Otherwise it runs this package's engine.
    """
    cache, ours = "GiB for KV blocks, checkpoints and the states of running requests together", ""
    if several_engines:
        ours = "engine ours: "
        cache = f"{ours}{cache} (default: --buffer-gb and --mamba-gb together)"
        buffer = "engines off, upstream: GiB for KV blocks and the states of running requests"
        mamba = "engine upstream: GiB for checkpoints (default: 0.05 on CPU, 8 on GPU)"
    else:
        cache = f"{cache} (default: 0.3 on CPU, 28 on GPU)"
        buffer = "instead of --cache-gb: the memory is this and --mamba-gb together"
        mamba = "most GiB for checkpoints (default: no limit; with --buffer-gb 0.05 on CPU, 8 on GPU are added)"
    add("--block-size-tokens", type=positive_int, default=256, help="tokens per KV block (default: %(default)s)")
    add("--cache-gb", type=positive_float, help=cache)
    add("--buffer-gb", type=positive_float, help=f"{buffer} (default: 0.25 on CPU, 20 on GPU)")
    add("--mamba-gb", type=positive_float, help=mamba)
    add(
        "--host-gb",
        type=positive_float,
        help="GiB of pinned host memory for evicted KV and states, this cache only (default: none)",
    )
    add(
        "--shared",
        metavar="URL",
        help="folder, Mooncake Store or a plugin's tier behind the host memory that outlives the process and may be shared, "
        "such as file:///var/cache/prefix?gb=200 or mooncake://10.0.0.1:50051; needs --host-gb, and a secret: "
        "HYBRID_PREFIX_SECRET, or secret_file in the URL (default: none)",
    )
    add(
        "--state-dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the matrix states (default: the parameters' for Mamba2, float32 for Gated DeltaNet)",
    )
    add(
        "--exact",
        choices=("bits",),
        help=f"{ours}tokens and log-probs have the same bits on hits and misses, "
        "alone and in any batch; slower (default: the same up to rounding)",
    )
    add("--max-requests", type=positive_int, default=max_requests, help=f"most running requests ({max_requests_text})")
    add(
        "--max-tokens",
        type=positive_int,
        help="most tokens per step (default: 4096 on CPU, 16384 on GPU; more if a prompt is longer)",
    )
    add("--chunked-prefill", action="store_true", help="split long prompts over several steps")
    add("--async-scheduling", action="store_true", help="use megatron-core's asynchronous scheduling")
    add(
        "--cuda-graphs",
        type=whole_number,
        metavar="N",
        help=f"number of CUDA graphs to capture, GPU only ({cuda_graphs_text})",
    )


def positive_int(text: str) -> int:
    """An argparse type: a whole number above 0."""
    value = whole_number(text, "a whole number above 0")
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def whole_number(text: str, what: str = "a whole number") -> int:
    """An argparse type: a whole number, 0 or more, that a tensor's size can be."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    if len(text.lstrip("0")) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is too large: it must have at most 9 digits")
    return int(text)


def positive_float(text: str, what: str = "a number above 0") -> float:
    """An argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def engine_names(text: str, option: str) -> list[str]:
    """Engine names from a comma-separated list; see `split_names`."""
    if "split" in text.split(","):
        raise InputError(f"{option}: the engine 'split' was removed: use ours, where KV and states share one memory")
    return split_names(text, ENGINES, "an engine", option)


def check_engine_options(args: argparse.Namespace) -> Any:
    """Checks everything that needs neither torch nor a device. Returns the model's configuration.

    Raises:
        InputError: No engine can be built with these options.
    """
    config = choose_model(args, DEFAULT_PRESET)
    with as_input_errors(ValueError):
        config.check_parallel(tp=args.tp, pp=args.pp)
    with as_input_errors(ValueError):
        HybridPrefixConfig(
            cache_gb=1, host_gb=args.host_gb or 0.0, exact=args.exact, state_dtype=args.state_dtype, shared=args.shared
        )
        if args.shared is not None:
            parse_url(args.shared)[1].check()
    if args.max_requests is not None and args.max_requests % args.tp:
        raise InputError(f"--max-requests {args.max_requests} is not a multiple of --tp {args.tp}")
    if (args.max_tokens or 0) % STEP_TOKENS_MULTIPLE:
        raise InputError(f"--max-tokens {args.max_tokens} is not a multiple of {STEP_TOKENS_MULTIPLE}")
    return config


# --- Engines ---------------------------------------------------------------------------------------------------------


def engine_fields(
    args: argparse.Namespace, device_type: str, longest_tokens: int, max_sequence_length: int | None = None
) -> dict[str, Any]:
    """Fields of megatron's ``InferenceConfig`` that all engines share: all but budgets.

    Args:
        args: Parsed options of `add_engine_options`.
        device_type: "cpu" or "cuda".
        longest_tokens: Length of the longest prompt.
        max_sequence_length: Longest prompt plus answer; None: the model's.
    """
    from megatron_hybrid_prefix.upstream.config import AsyncScheduleMode

    room_tokens = 0 if args.chunked_prefill else step_tokens(longest_tokens)
    fields: dict[str, Any] = {
        "block_size_tokens": args.block_size_tokens,
        "max_requests": args.max_requests,
        "max_tokens": args.max_tokens or max(DEFAULT_MAX_TOKENS[device_type], room_tokens),
        "enable_chunked_prefill": args.chunked_prefill,
        "max_sequence_length": max_sequence_length,
        "num_cuda_graphs": args.cuda_graphs or None,
    }
    if args.async_scheduling:
        fields["async_sched_mode"] = AsyncScheduleMode.ASYNC
    return {name: value for name, value in fields.items() if value is not None}


def step_tokens(tokens: int) -> int:
    """``tokens``, rounded up to a valid limit of a step."""
    return ceil_div(tokens, STEP_TOKENS_MULTIPLE) * STEP_TOKENS_MULTIPLE


def state_dtype_field(model: Any, state_dtype: str | None) -> dict[str, Any]:
    """The field of ``InferenceConfig`` that sets the dtype of the matrix states. Empty for the layer kinds' choice."""
    if state_dtype is None:
        return {}
    from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config, with_state_dtype

    config = mamba_state_config(model)
    return {} if config is None else {"mamba_inference_state_config": with_state_dtype(config, state_dtype)}


def plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as JSON values."""
    return {name: getattr(value, "value", value) for name, value in fields.items()}


# --- Platform --------------------------------------------------------------------------------------------------------


@contextmanager
def started_platform(args: argparse.Namespace) -> Iterator[Any]:
    """The platform for ``--tp``, ``--pp`` and ``--device``. Shut down at the end if it was started here.

    Raises:
        InputError: It cannot be started.
    """
    from megatron_hybrid_prefix.platform import ensure_platform, running_platform, shut_down

    was_running = running_platform() is not None
    try:
        with as_input_errors(ValueError, PlatformError):
            started = ensure_platform(tp=args.tp, pp=args.pp, device=args.device)
        unregister_stack_dumps()
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


def stop_requested(platform: Any, interrupt: Interrupt) -> bool:
    """Whether Ctrl-C was pressed on any rank. A collective call, so that all ranks stop at the same step."""
    if platform.world_size == 1:
        return interrupt.requested
    import torch

    flag = torch.tensor([int(interrupt.requested)], dtype=torch.int32, device=platform.device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag.item())


def cache_figures(engine: Any) -> dict[str, Any] | None:
    """Statistics of this package's cache in an engine; None if the engine has no such cache."""
    context = engine.context
    return None if getattr(context, "prefix_cache", None) is None else context.prefix_stats().as_dict()


def versions() -> dict[str, str]:
    """Versions of this package, Python, and the installed dependencies."""
    found = {"megatron-hybrid-prefix": __version__, "python": host.python_version()}
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
