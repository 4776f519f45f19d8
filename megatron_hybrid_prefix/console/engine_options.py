"""The options that verbs share, and what engines are built with: `OPTIONS` has each of them once.

This module imports neither torch nor megatron before a platform is started, so that bad input is reported at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.config import CheckpointDtypeName, ExactName, HybridPrefixConfig
from megatron_hybrid_prefix.console.hf import choose_model
from megatron_hybrid_prefix.console.terminal import InputError, as_input_errors, check_can_plot, check_writable
from megatron_hybrid_prefix.models.config import PRESETS, HybridModelConfig
from megatron_hybrid_prefix.pool.layout import CHECKPOINT_DTYPES
from megatron_hybrid_prefix.sampling import drafts_problem
from megatron_hybrid_prefix.support.arithmetic import ceil_div
from megatron_hybrid_prefix.tiers.registry import parse_url

GIB = 2**30
DEFAULT_PRESET = "tiny"
DEFAULT_CACHE_GB = {"cpu": 0.3, "cuda": 28.0}
MAMBA_SHARE = {"cpu": 1 / 6, "cuda": 2 / 7}  # of it that megatron's own cache sets aside for checkpoints
DEFAULT_MAX_TOKENS = {"cpu": 4096, "cuda": 16384}
STEP_TOKENS_MULTIPLE = 64  # megatron pads a step's tokens to this, and asserts that max_tokens is a multiple
KEPT_FREE = 0.15  # of the memory that is free before engines are built: activations, CUDA graphs, the allocator


# --- Memory ----------------------------------------------------------------------------------------------------------


def default_cache_gb(free_bytes: int, device_type: str, engines: int = 1) -> float:
    """GiB of an engine: the usual ones, or less where they do not fit.

    Args:
        free_bytes: Free on a rank once it has all weights.
        device_type: "cpu" or "cuda".
        engines: That have their memory at the same time.
    """
    room_gb = max(0.0, free_bytes * (1 - KEPT_FREE) / GIB / engines)
    return min(DEFAULT_CACHE_GB[device_type], int(room_gb * 1000) / 1000)  # never more than there is


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Memory that engines get on each rank, the same for all but "off", which goes without ``mamba_gb``.

    Attributes:
        cache_gb: GiB for KV blocks, checkpoints and the states of running requests.
        mamba_gb: How many of these megatron's own cache sets aside for checkpoints.
        host_gb: GiB of host memory for evicted KV and states.
        shared: URL of the tier behind the host memory; None: none.
        exact, checkpoint_dtype: The fields of `HybridPrefixConfig`, of the engines with this package's cache.
    """

    cache_gb: float
    mamba_gb: float
    host_gb: float = 0.0
    shared: str | None = None
    exact: ExactName | None = None
    checkpoint_dtype: CheckpointDtypeName | None = None

    @classmethod
    def of(
        cls, args: argparse.Namespace, device_type: str, *, free_bytes: int, engines: int = 1, **wanted: float
    ) -> Budgets:
        """The budgets of the options; else ``wanted``; else `default_cache_gb`, whose arguments these are.

        Raises:
            InputError: More is wanted for checkpoints than there is in all.
        """
        names = ("cache_gb", "mamba_gb", "host_gb")
        given = {name: value for name in names if (value := getattr(args, name)) is not None}
        found = {"cache_gb": default_cache_gb(free_bytes, device_type, engines)} | wanted | given
        check_cap(found.get("mamba_gb"), found["cache_gb"])
        own = {name: getattr(args, name, None) for name in ("shared", "exact", "checkpoint_dtype")}
        return cls(**{"mamba_gb": found["cache_gb"] * MAMBA_SHARE[device_type]} | found | own)

    @property
    def prefix(self) -> HybridPrefixConfig:
        """Settings of this package's cache."""
        return HybridPrefixConfig(**{name: value for name, value in asdict(self).items() if name != "mamba_gb"})


UPSTREAM = "upstream"  # megatron's own engine
# Engine name -> arguments of build_engine.
ENGINES: dict[str, Callable[[Budgets], dict[str, Any]]] = {
    "off": lambda budgets: {"buffer_size_gb": budgets.cache_gb - budgets.mamba_gb},
    UPSTREAM: lambda budgets: {
        "buffer_size_gb": budgets.cache_gb - budgets.mamba_gb,
        "enable_prefix_caching": True,
        "prefix_caching_mamba_gb": budgets.mamba_gb,
    },
    "ours": lambda budgets: {"prefix": budgets.prefix},
}


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


def check_memory(budgets: Budgets, device: Any, where: str = "", ranks: int = 1) -> None:
    """Checks that budgets fit into the memory that is free now.

    Args:
        budgets: Of an engine.
        device: The platform's device.
        where: Before the message.
        ranks: Of this host, that do not have theirs yet: host memory is needed once for each of them.

    Raises:
        InputError: They do not.
    """
    from megatron_hybrid_prefix.platform.memory import free_bytes, host_free_bytes

    cache, host = {"--cache-gb": budgets.cache_gb}, {"--host-gb": budgets.host_gb}
    places = [("GPU", cache, free_bytes(device), 1), ("host", host, host_free_bytes(), ranks)]
    if device.type == "cpu":
        places = [("host", cache | host, host_free_bytes(), ranks)]
    for kind, parts, free, copies in places:
        need_gb = copies * sum(parts.values())
        if need_gb * GIB > free:
            names = " and ".join(f"{name} {gb:g}" for name, gb in parts.items() if gb)
            each = f" on each of {copies} ranks" if copies > 1 else ""
            raise InputError(
                f"{where}{names}{each}: {need_gb:.6g} GiB of {kind} memory are needed, {free / GIB:.4g} GiB are free"
            )


# --- Options ---------------------------------------------------------------------------------------------------------


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


def seconds(text: str) -> float:
    """An argparse type: 0, or a number above it."""
    try:
        return abs(float(text)) and positive_float(text, "a number of seconds, 0 or above")
    except ValueError:
        return positive_float(text, "a number of seconds, 0 or above")


Option = dict[str, Any]


def _option(text: str, **more: Any) -> Option:
    """Arguments of argparse for an option with this help."""
    return {"help": text} | more


_count = partial(_option, type=positive_int, metavar="N")
_gib = partial(_option, type=positive_float, metavar="GIB")
_flag = partial(_option, action="store_true")
_folder = partial(_option, type=Path, metavar="DIR")
_path = partial(_option, type=Path, metavar="PATH")

_MODEL: dict[str, Option] = {
    "--preset": _option(f"model: {', '.join(PRESETS)} (default: tiny)", metavar="NAME"),
    "--hf": _option(
        "a Hugging Face folder (config.json, *.safetensors) instead of --preset; nothing is downloaded", metavar="DIR"
    ),
    "--seed": _option("seed of the random weights (default: 0)", type=int, default=0, metavar="N"),
    "--tp": _count("tensor-parallel size (default: 1)", default=1),
    "--pp": _count("pipeline-parallel size (default: 1)", default=1),
    "--device": _option("default: cuda if there is a GPU, else cpu", choices=("cpu", "cuda")),
}
_TEXT: dict[str, Option] = {
    "--tokenizer": _folder(
        "folder with a Hugging Face tokenizer.json, or 'bytes': a token per byte (default: that of --hf, else bytes)"
    ),
    "--no-generation-config": _flag(
        "with --hf: do not take end tokens and default sampling from its generation_config.json"
    ),
    "--add-bos": _flag(
        "start text with the tokenizer's begin-of-text token even if neither the tokenizer nor the chat template does; "
        "never twice"
    ),
}
_ENGINE: dict[str, Option] = {
    "--block-size-tokens": _count("tokens per KV block (default: 256)", default=256),
    "--cache-gb": _gib(
        "memory that KV blocks, checkpoints and the states of running requests share (default: 0.3 on CPU, 28 on GPU, less "
        "where less is free)"
    ),
    "--mamba-gb": _gib("most memory for checkpoints in --cache-gb (default: no limit)"),
    "--host-gb": _gib("pinned host memory for evicted KV and states, this cache only (default: none)"),
    "--shared": _option(
        "folder, Mooncake Store or a plugin's tier behind the host memory that outlives the process and may be shared, such "
        "as file:///var/cache/prefix?gb=200 or mooncake://10.0.0.1:50051; needs --host-gb, and a secret: "
        "HYBRID_PREFIX_SECRET, or secret_file in the URL (default: none)",
        metavar="URL",
    ),
    "--state-dtype": _option(
        "dtype of the matrix states (default: the parameters' for Mamba2, float32 for Gated DeltaNet)",
        choices=("float32", "bfloat16"),
    ),
    "--exact": _option(
        "this cache: tokens and log-probs have the same bits on hits and misses, alone and in any batch; slower (default: "
        "the same up to rounding)",
        choices=("bits",),
    ),
    "--max-requests": _count("most running requests (default: %(default)s)", default=16),
    "--max-tokens": _count("most tokens per step (default: 4096 on CPU, 16384 on GPU; more if a prompt is longer)"),
    "--chunked-prefill": _flag("split long prompts over several steps"),
    "--async-scheduling": {
        "action": argparse.BooleanOptionalAction,
        "help": "launch the next step while one runs, megatron-core's asynchronous scheduling (default: on a GPU, where it can be)",
    },
    "--cuda-graphs": _option(
        "sizes of a step to capture CUDA graphs for; 0: none (default: chosen on a GPU, where they can be)",
        type=whole_number,
        metavar="N",
    ),
}
OPTIONS: dict[str, Option] = {
    **_MODEL,
    "--load": _folder(
        "load the weights from a Megatron distributed checkpoint, such as one of convert (default: random weights)"
    ),
    **_TEXT,
    "--max-sequence-length": _count("longest prompt plus answer, in tokens (default: the model's)"),
    "--num-speculative-tokens": _option(
        "tokens to draft in each decode step, for models with multi-token prediction such as tiny-mtp (default: none)",
        type=whole_number,
        default=0,
        metavar="N",
    ),
    **_ENGINE,
    "--checkpoint-dtype": _option(
        "dtype in which checkpoints keep matrix states (default: as live states)", choices=CHECKPOINT_DTYPES
    ),
    "--json": _path("write all results as JSON"),
    "--plot": _path("draw the results, as PNG or SVG"),
}
MODEL_OPTIONS, TEXT_OPTIONS, ENGINE_OPTIONS = tuple(_MODEL), tuple(_TEXT), tuple(_ENGINE)


def add_options(parser: Any, *names: str, title: str | None = None, **changed: Any) -> None:
    """Adds shared options.

    Args:
        parser: A parser or a group.
        names: Of `OPTIONS`.
        title: Of a group of the parser for them; None: no group.
        changed: What is different here, by the option's destination, such as ``max_requests={"default": 64}``.
    """
    group = parser if title is None else parser.add_argument_group(title)
    for name in names:
        group.add_argument(name, **OPTIONS[name] | changed.get(name[2:].replace("-", "_"), {}))


def add_several_engines(parser: Any, option: str, default: Sequence[str], **changed: Any) -> Any:
    """Adds the options of engines, for a verb that runs several of `ENGINES`. Returns their group.

    Args:
        parser: The parser.
        option: The one that names the engines.
        default: Which run by default.
        changed: See `add_options`.
    """
    text = "off: megatron-core without prefix caching; upstream: with its own; ours: with this package's cache.\n"
    text += "Those with a cache have the same memory, --cache-gb; off goes without --mamba-gb of it."
    group = parser.add_argument_group("engines", description=text)
    text = f"an engine to run; repeatable (default: {', '.join(default)})"
    group.add_argument(option, action="append", choices=tuple(ENGINES), metavar="ENGINE", help=text)
    own = "what engine upstream sets aside of --cache-gb for checkpoints (default: 1/6 on CPU, 2/7 on GPU)"
    add_options(group, *ENGINE_OPTIONS, mamba_gb={"help": own}, **changed)
    return group


def engine_names(given: Sequence[str] | None, default: Sequence[str], option: str) -> list[str]:
    """The engines that ``option`` names, else the default ones. Raises InputError if one is named twice."""
    names = list(given or default)
    if len(set(names)) < len(names):
        raise InputError(f"{option}: {' and '.join(names)} name an engine twice")
    return names


def check_output(args: argparse.Namespace) -> None:
    """Checks at the start that what ``--json`` and ``--plot`` name can be written. Raises InputError if not."""
    if getattr(args, "json", None) is not None:
        check_writable(args.json)
    if getattr(args, "plot", None) is not None:
        check_can_plot("--plot", args.plot)


def check_engine_options(args: argparse.Namespace) -> HybridModelConfig:
    """Checks all shared options, as far as that needs neither torch nor a device. Returns the model's configuration.

    Raises:
        InputError: No engine can be built with these options.
    """
    config = choose_model(args, DEFAULT_PRESET)
    with as_input_errors(ValueError):
        config.check_parallel(tp=args.tp, pp=args.pp)
    with as_input_errors(ValueError):
        names = ("exact", "state_dtype", "checkpoint_dtype", "shared")
        own: dict[str, Any] = {name: getattr(args, name, None) for name in names}
        HybridPrefixConfig(cache_gb=1, host_gb=args.host_gb or 0.0, **own)
        if args.shared is not None:
            parse_url(args.shared)[1].check()
    if args.max_requests is not None and args.max_requests % args.tp:
        raise InputError(f"--max-requests {args.max_requests} is not a multiple of --tp {args.tp}")
    if (args.max_tokens or 0) % STEP_TOKENS_MULTIPLE:
        raise InputError(f"--max-tokens {args.max_tokens} is not a multiple of {STEP_TOKENS_MULTIPLE}")
    if (getattr(args, "max_sequence_length", None) or 0) > config.max_sequence_length:
        raise InputError(f"--max-sequence-length: {args.preset} has at most {config.max_sequence_length}")
    drafts = getattr(args, "num_speculative_tokens", 0)
    if problem := drafts_problem(drafts, config, args.preset):
        raise InputError(f"--num-speculative-tokens {drafts}: {problem}")
    if getattr(args, "load", None) is not None and not args.load.is_dir():
        raise InputError(f"--load: there is no folder {args.load}")
    check_output(args)
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
        "num_speculative_tokens": getattr(args, "num_speculative_tokens", 0) or None,
    }
    if args.async_scheduling is not None:
        fields["async_sched_mode"] = AsyncScheduleMode.ASYNC if args.async_scheduling else AsyncScheduleMode.LEGACY
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
    """Fields as JSON values: settings as text, and of an enumeration the value."""
    texts = {name: str(value) if is_dataclass(value) else value for name, value in fields.items()}
    return {name: getattr(value, "value", value) for name, value in texts.items()}
