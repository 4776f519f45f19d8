"""Shared by the commands: ``--hf DIR``, a Hugging Face folder in the place of a preset.

This module imports neither torch nor megatron before a model is built.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_hybrid_prefix.console.terminal import (
    InputError,
    as_input_errors,
    as_memory_errors,
    has_other_ranks,
    is_main_rank,
)
from megatron_hybrid_prefix.errors import PlatformError
from megatron_hybrid_prefix.hf_tokens import GENERATION_CONFIG, end_token_ids
from megatron_hybrid_prefix.models.config import HybridModelConfig, get_preset
from megatron_hybrid_prefix.models.hf.folder import HfFolder, open_folder
from megatron_hybrid_prefix.pool.layout import DTYPE_BYTES
from megatron_hybrid_prefix.sampling import SamplingOptions
from megatron_hybrid_prefix.tokenizer import Tokenizer, load_tokenizer

BYTES = "bytes"  # --tokenizer bytes: a token per byte, also with --hf


def add_hf_option(add: Callable[..., Any]) -> None:
    """Adds ``--hf``."""
    add(
        "--hf",
        metavar="DIR",
        help="a Hugging Face folder (config.json, *.safetensors) instead of --preset; nothing is downloaded",
    )


def add_tokenizer_options(add: Callable[..., Any]) -> None:
    """Adds ``--tokenizer`` and ``--no-generation-config``."""
    add(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder with a Hugging Face tokenizer.json, or 'bytes': a token per byte (default: that of --hf, else bytes)",
    )
    add(
        "--no-generation-config",
        action="store_true",
        help="with --hf: do not take end tokens and default sampling from its generation_config.json",
    )


def add_bos_option(add: Callable[..., Any]) -> None:
    """Adds ``--add-bos``."""
    add(
        "--add-bos",
        action="store_true",
        help="start text with the tokenizer's begin-of-text token even if neither the tokenizer nor the chat template does; never "
        "twice",
    )


@cache
def _open(path: str) -> HfFolder:
    with as_input_errors(ValueError, prefix="--hf: "):
        return open_folder(path)


def folder_of(args: argparse.Namespace) -> HfFolder | None:
    """The folder of ``--hf``; None: it is not given.

    Raises:
        InputError: It cannot be read, or is of an unsupported model.
    """
    path = getattr(args, "hf", None)
    return None if path is None else _open(str(path))


def choose_model(args: argparse.Namespace, default_preset: str) -> HybridModelConfig:
    """Dimensions for ``--hf`` or ``--preset``. Sets ``args.preset`` to the name to show.

    Raises:
        InputError: Both are given, there is no such preset, or something is wrong with the folder or its files.
    """
    if getattr(args, "hf", None) is None:
        args.preset = args.preset or default_preset
        with as_input_errors(ValueError):
            return get_preset(args.preset)
    if args.preset is not None:
        raise InputError(f"--hf {args.hf} and --preset {args.preset}: give one of them")
    if getattr(args, "load", None) is not None:
        raise InputError(f"--hf {args.hf} and --load {args.load}: give one of them")
    folder = _checked_folder(args)
    args.preset = folder.name
    return folder.config


def _checked_folder(args: argparse.Namespace) -> HfFolder:
    """The folder of ``--hf``, its files checked. With several ranks they start here: an error on one is an error on all."""
    found: list[HfFolder] = []

    def check() -> None:
        found.append(_open(str(args.hf)))
        with as_input_errors(ValueError, prefix="--hf: "):
            found[0].check_weights()

    if not has_other_ranks():
        check()
        return found[0]
    from megatron_hybrid_prefix.models.checkpoint import together
    from megatron_hybrid_prefix.platform import join_ranks, shut_down

    with as_input_errors(ValueError, OSError):
        join_ranks(device=getattr(args, "device", None))
        try:
            together(check)
        except (ValueError, OSError):
            shut_down()
            raise
    return found[0]


def build_model(args: argparse.Namespace, config: HybridModelConfig, platform: Any) -> Any:
    """This rank's shard, with random weights or those of ``--hf``, which come with a progress bar.

    Raises:
        InputError: It cannot be built or loaded.
    """
    from megatron_hybrid_prefix import models

    overrides: dict[str, Any] = {"cuda_graph_impl": "local"} if getattr(args, "cuda_graphs", None) else {}
    folder = folder_of(args)
    with (
        as_input_errors(ValueError, PlatformError, OSError),
        as_memory_errors("the model", "it can be split over ranks with --tp and --pp"),
    ):
        if folder is None:
            return models.build_hybrid_model(config, seed=args.seed, platform=platform, **overrides)
        with _reading(DTYPE_BYTES[config.dtype]) as on_read:
            return models.build_hybrid_model(config, hf=folder, platform=platform, on_read=on_read, **overrides)


@contextmanager
def _reading(value_bytes: int) -> Iterator[Callable[[int, int], None]]:
    """A progress bar of bytes on stderr, silent as `progress` is. Yields what to call with values read, and all values."""
    console = Console(stderr=True)
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), DownloadColumn()),
        *(TransferSpeedColumn(), TimeRemainingColumn()),
    )
    bars = Progress(*columns, console=console, transient=True, disable=not (console.is_terminal and is_main_rank()))
    with bars:
        task = bars.add_task("weights", total=None)

        def on_read(values: int, total: int) -> None:
            bars.update(task, completed=values * value_bytes, total=total * value_bytes)

        yield on_read


# --- Tokenizer and generation_config.json ----------------------------------------------------------------------------


def tokenizer_folder(args: argparse.Namespace) -> Path | None:
    """The folder of ``--tokenizer``, else that of ``--hf``; None: a token per byte.

    Raises:
        InputError: The folder of ``--hf`` has no tokenizer.
    """
    if args.tokenizer is not None:
        return None if str(args.tokenizer) == BYTES else Path(args.tokenizer)
    folder = folder_of(args)
    if folder is None:
        return None
    if not (folder.path / "tokenizer.json").is_file():
        raise InputError(
            f"{folder.path} has no tokenizer.json: give --tokenizer DIR, or --tokenizer {BYTES} for a token per byte"
        )
    return folder.path


def tokenizer_of(args: argparse.Namespace, vocab_size: int) -> Tokenizer:
    """The tokenizer. Its end tokens are those that its own folder and the folder of ``--hf`` name.

    ``--no-generation-config`` leaves out what ``generation_config.json`` names.

    Raises:
        InputError: It cannot be read, or does not suit the model.
    """
    path, folder = tokenizer_folder(args), folder_of(args)
    if path is None:
        return load_tokenizer(None, vocab_size)
    generation_config = not args.no_generation_config
    with as_input_errors(ValueError):
        ends = () if folder is None else end_token_ids(folder.path, generation_config=generation_config)
        return load_tokenizer(path, vocab_size, end_tokens=ends, generation_config=generation_config)


# Of generation_config.json: the least and the greatest value that can be sampled with.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, float("inf")),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 10.0),
}


def default_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """What ``generation_config.json`` says of sampling, by the names of `SamplingOptions`; without the values that change nothing.

    ``do_sample`` false is a temperature of 0. Without ``do_sample``, only the penalty counts: it says nothing of sampling.

    Raises:
        InputError: A value is not one that can be sampled with.
    """
    folder = folder_of(args)
    if folder is None or args.no_generation_config:
        return {}
    nothing = asdict(SamplingOptions())
    found: dict[str, Any] = {}
    for name, (low, high) in _RANGES.items():
        value = folder.generation.get(name)
        if value is None:
            continue
        if type(value) not in (int, float) or not low <= value <= high or (name == "top_k" and type(value) is not int):
            raise InputError(f"{folder.path / GENERATION_CONFIG}: {name} is {value!r}")
        if value != nothing[name] and not (name == "top_k" and value >= folder.config.vocab_size):
            found[name] = value
    samples = folder.generation.get("do_sample")
    if samples:
        return found
    penalty = {name: value for name, value in found.items() if name == "repetition_penalty"}
    return penalty | ({"temperature": 0.0} if samples is False else {})
