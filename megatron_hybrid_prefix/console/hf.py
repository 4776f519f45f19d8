"""Shared by the verbs: the model of ``--preset`` or ``--hf DIR`` (a Hugging Face folder), its weights and its tokenizer.

This module imports neither torch nor megatron before a model is built.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_hybrid_prefix.console.terminal import (
    InputError,
    as_input_errors,
    as_memory_errors,
    has_other_ranks,
    progress,
)
from megatron_hybrid_prefix.errors import PlatformError
from megatron_hybrid_prefix.models.config import HybridModelConfig, get_preset
from megatron_hybrid_prefix.models.hf.folder import HfFolder, open_folder
from megatron_hybrid_prefix.pool.layout import DTYPE_BYTES
from megatron_hybrid_prefix.sampling import SamplingOptions
from megatron_hybrid_prefix.text.hf_tokens import GENERATION_CONFIG, end_token_ids
from megatron_hybrid_prefix.text.tokenizer import Tokenizer, load_tokenizer

BYTES = "bytes"  # --tokenizer bytes: a token per byte, also with --hf


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
    """This rank's shard, with random weights or those of ``--load`` or ``--hf``; the latter come with a progress bar.

    Raises:
        InputError: It cannot be built or loaded.
    """
    from megatron_hybrid_prefix import models

    overrides: dict[str, Any] = {}
    graphs = getattr(args, "cuda_graphs", None)
    if graphs is not None:
        overrides["cuda_graph_impl"] = "local" if graphs else "none"
    if graphs and getattr(args, "graph_scope", None) is not None:
        overrides["inference_cuda_graph_scope"] = args.graph_scope
    if getattr(args, "enable_return_routed_experts", False):
        overrides["moe_enable_routing_replay"] = True
    folder = folder_of(args)
    with (
        as_input_errors(ValueError, PlatformError, OSError),
        as_memory_errors("the model", "it can be split over ranks with --tp and --pp"),
    ):
        if folder is None:
            model = models.build_hybrid_model(config, seed=args.seed, platform=platform, **overrides)
            if getattr(args, "load", None) is not None:
                models.load_checkpoint(model, args.load)
            return model
        columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with progress(["weights"], 1, *columns) as done:

            def on_read(values: int, total: int) -> None:
                done("weights", values * value_bytes, total * value_bytes)

            value_bytes = DTYPE_BYTES[config.dtype]
            return models.build_hybrid_model(config, hf=folder, platform=platform, on_read=on_read, **overrides)


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
    generation_config = not args.no_generation_config
    with as_input_errors(ValueError):
        ends = () if folder is None else end_token_ids(folder.path, generation_config=generation_config)
        tokenizer = (
            load_tokenizer(None, vocab_size)
            if path is None
            else load_tokenizer(path, vocab_size, end_tokens=ends, generation_config=generation_config)
        )
    if getattr(args, "add_bos", False) and tokenizer.bos is None:
        raise InputError("--add-bos: the tokenizer has no begin-of-text token")
    return tokenizer


# What is taken of generation_config.json.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """What ``generation_config.json`` says of sampling, by the names of `SamplingOptions`; without the values that change nothing.

    ``do_sample`` false is a temperature of 0. Without ``do_sample``, only the penalty counts: it says nothing of sampling.

    Raises:
        InputError: A value is not one that can be sampled with, or, with drafts, a penalty.
    """
    folder = folder_of(args)
    if folder is None or args.no_generation_config:
        return {}
    nothing = asdict(SamplingOptions())
    found: dict[str, Any] = {}
    for name in _SAMPLING:
        value = folder.generation.get(name)
        if value is None:
            continue
        with as_input_errors(ValueError, prefix=f"{folder.path / GENERATION_CONFIG}: "):
            options = SamplingOptions(**{name: value})
            if getattr(args, "num_speculative_tokens", 0):
                options.check_drafts("--num-speculative-tokens; use --no-generation-config")
        if value != nothing[name] and not (name == "top_k" and value >= folder.config.vocab_size):
            found[name] = value
    samples = folder.generation.get("do_sample")
    if samples:
        return found
    penalty = {name: value for name, value in found.items() if name == "repetition_penalty"}
    return penalty | ({"temperature": 0.0} if samples is False else {})
