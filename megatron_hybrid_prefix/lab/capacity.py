"""Sizes of a model's recurrent states and KV blocks, from a preset, Megatron arguments, or a Hugging Face config.json.

Needs neither torch nor megatron. A file of Megatron arguments names its dimensions as megatron does: a missing name gets
megatron's default; if there is no default, the name is required.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.console.hf import folder_of
from megatron_hybrid_prefix.console.terminal import InputError, as_input_errors, read_text
from megatron_hybrid_prefix.layers import components as of_layers
from megatron_hybrid_prefix.layers.components import (
    RINGS,
    gated_delta_net_components,
    gated_delta_product_components,
    mamba2_components,
    rings_of,
)
from megatron_hybrid_prefix.models.config import PRESETS, HybridModelConfig
from megatron_hybrid_prefix.models.hf.dimensions import dimensions_of
from megatron_hybrid_prefix.models.hf.given import Given
from megatron_hybrid_prefix.pool.layout import DTYPE_BYTES, RingLayout, SlotLayout, StateLayout

_DELTA_NET_CHUNK = 64  # tokens, or pairs
_GDP_SPECS = {f"{name}{kind}_stack_spec" for name in ("gdp", "gated_delta_product") for kind in ("", "_inference")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What decides the size of states and KV.

    Attributes:
        name: Name of the preset or file.
        config: Dimensions of the model.
        state_dtype: Dtype of the matrix states. None: the choice of each layer kind.
        tp: Tensor-parallel size. Bytes are per rank.
        vocabulary: Number of token ids, or None if the file does not say it.
        routes: Whether KV blocks hold the experts that each token went through (``moe_enable_routing_replay``).
        checkpoint_dtype: Dtype in which checkpoints are kept (`SlotLayout.kept_in`). None: as live states.
    """

    name: str
    config: HybridModelConfig
    state_dtype: str | None = None
    tp: int = 1
    vocabulary: int | None = None
    routes: bool = False
    checkpoint_dtype: str | None = None

    def __post_init__(self) -> None:
        try:
            self.config.check_parallel(tp=self.tp, pp=1)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        if not self.config.count("M") + self.config.count("G"):
            raise ValueError(f"{self.name}: there are no recurrent layers; the model must be a hybrid")

    @property
    def layout(self) -> SlotLayout:
        """One state on one rank."""
        config, kinds = self.config, []
        of_delta: dict[str, Any] = {
            "taps": config.d_conv,
            "window_dtype": config.dtype,
            "state_dtype": self.state_dtype,
        }
        if layers := config.count("M"):
            heads, groups = config.mamba_num_heads // self.tp, config.mamba_num_groups // self.tp
            key_dim, value_dim = config.mamba_state_dim, config.mamba_head_dim
        if layers and config.gdp_num_householder:
            sizes: dict[str, Any] = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim, "groups": groups}
            components = gated_delta_product_components(pairs=config.gdp_num_householder, **sizes, **of_delta)
            kinds.append(StateLayout(kind="gated_delta_product", layers=layers, components=components))
        elif layers:
            channels = heads * value_dim + 2 * groups * key_dim
            matrix, state_dtype = (heads, value_dim, key_dim), self.state_dtype or config.dtype
            components = mamba2_components((channels, config.d_conv), config.dtype, matrix, state_dtype)
            kinds.append(StateLayout(kind="mamba2", layers=layers, components=components))
        if layers := config.count("G"):
            keys, heads = config.gdn_num_key_heads // self.tp, config.gdn_num_value_heads // self.tp
            key_dim, value_dim = config.gdn_key_head_dim, config.gdn_value_head_dim
            sizes = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim}
            components = gated_delta_net_components(
                channels=2 * keys * key_dim + heads * value_dim, **sizes, **of_delta
            )
            kinds.append(StateLayout(kind="gated_delta_net", layers=layers, components=components))
        return SlotLayout(tuple(kinds))

    def check_blocks(self, block_tokens: int) -> None:
        """Raise ValueError, in one line, if KV blocks of so many tokens do not suit a kind of layers."""
        pairs = {"G": ("Gated DeltaNet", 1), "M": ("Gated Delta Product", self.config.gdp_num_householder)}
        for symbol, (name, each) in pairs.items():
            if self.config.count(symbol) and block_tokens * each % _DELTA_NET_CHUNK:
                least = _DELTA_NET_CHUNK // math.gcd(_DELTA_NET_CHUNK, each)
                raise ValueError(f"KV blocks of {block_tokens} tokens: {name} layers need a multiple of {least}")

    @property
    def state_bytes(self) -> int:
        """Bytes of one live state on one rank."""
        return self.layout.slot_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint on one rank: never more than those of a live state."""
        return min(self.state_bytes, self.layout.kept_in(self.checkpoint_dtype).slot_bytes)

    @property
    def live_bytes(self) -> int:
        """Bytes of one live state, if they are more than those of a checkpoint; else 0, as in `PageLayout`."""
        return self.state_bytes if self.checkpoint_bytes < self.state_bytes else 0

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the KV and routes of one token on one rank. With more ranks than heads, several ranks hold the same head."""
        config, heads = self.config, max(1, self.config.num_query_groups // self.tp)
        routes = config.count("E") * config.moe_router_topk * (1 if config.num_moe_experts <= 2**8 else 2)
        return 2 * config.count("*") * heads * config.kv_channels * DTYPE_BYTES[config.dtype] + self.routes * routes

    def kv_block_bytes(self, block_tokens: int) -> int:
        """Bytes of one KV block on one rank."""
        return block_tokens * self.kv_token_bytes

    @property
    def next_logits_bytes(self) -> int | None:
        """Bytes on the host of the logits of a checkpoint, for log-probs of prompts; None without a vocabulary."""
        return None if self.vocabulary is None else self.vocabulary * DTYPE_BYTES[self.config.dtype]

    @property
    def open_ring_bytes(self) -> int | None:
        """Bytes of the rings of a running request with ``exact="bits"``, on one rank; None where a kind of layers has no such mode."""
        if any(each.kind not in of_layers.OPEN_RINGS for each in self.layout.kinds):
            return None
        chunks = [self.config.chunk_size if each.kind == "mamba2" else _DELTA_NET_CHUNK for each in self.layout.kinds]
        rings, dtype = of_layers.OPEN_RINGS, self.config.dtype
        return of_layers.open_rings_of(self.layout, rings, chunks, step_tokens=1, dtype=dtype).bytes(1)

    def rings(self, block_tokens: int, drafts: int) -> RingLayout:
        """What a running request has beside its state, on one rank."""
        of_steps = {"block_tokens": block_tokens, "step_tokens": drafts + 1}
        return rings_of(self.layout, RINGS, **of_steps, dtype=self.config.dtype)


def sizes_of(model: str, *, tp: int = 1, state_dtype: str | None = None) -> Sizes:
    """Reads the sizes of a preset or file.

    Args:
        model: A preset; a YAML or JSON file of Megatron arguments; or a Hugging Face config.json, or its folder.
        tp: Tensor-parallel size.
        state_dtype: Dtype of the matrix states; None: the model's (``mamba_ssm_cache_dtype``), or the layer kind's choice.

    Raises:
        InputError: There is no such preset or file, or the file is not understood.
    """
    with as_input_errors(ValueError):
        if model in PRESETS:
            return sizes_of_config(model, PRESETS[model], tp=tp, state_dtype=state_dtype)
        path = Path(model)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise InputError(f"{model}: neither a file nor a preset; presets: {', '.join(PRESETS)}")
        data = _read(path)
        if "model_type" in data:
            return sizes_of_config(str(path), dimensions_of(data, str(path)), tp=tp, state_dtype=state_dtype)
        # Command-line spelling is accepted: --hidden-size is hidden_size.
        given = Given({str(key).lstrip("-").replace("-", "_"): value for key, value in data.items()}, str(path))
        vocabulary = given.whole("padded_vocab_size", "vocab_size", default=0) or None
        return Sizes(name=str(path), config=_of_megatron(given), tp=tp, state_dtype=state_dtype, vocabulary=vocabulary)


def sizes_of_config(name: str, config: HybridModelConfig, *, tp: int = 1, state_dtype: str | None = None) -> Sizes:
    """Sizes of a model with these dimensions; arguments as of `sizes_of`. Raises ValueError where ``tp`` does not divide."""
    state_dtype = state_dtype or config.state_dtype
    return Sizes(name=name, config=config, tp=tp, state_dtype=state_dtype, vocabulary=config.vocab_size)


def sizes_from(
    model: str | None, args: argparse.Namespace, *, tp: int = 1, state_dtype: str | None = None
) -> Sizes | None:
    """Sizes of ``model`` (see `sizes_of`) or of the folder of ``--hf``; None: neither is given.

    Raises:
        InputError: Both are given, or the model is not understood.
    """
    folder = folder_of(args)
    if folder is None:
        return None if model is None else sizes_of(model, tp=tp, state_dtype=state_dtype)
    if model is not None:
        raise InputError(f"--hf {args.hf} and {model}: give one of them")
    with as_input_errors(ValueError):
        return sizes_of_config(folder.name, folder.config, tp=tp, state_dtype=state_dtype)


# --- Files -----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        if path.suffix == ".json":
            raise InputError(f"{path}: not JSON: {error}") from None
        try:
            import yaml

            data = yaml.safe_load(text)
        except ImportError:
            raise InputError(f"{path}: reading YAML needs pyyaml: pip install pyyaml") from None
        except yaml.YAMLError as problem:
            raise InputError(f"{path}: neither JSON nor YAML: {problem}") from None
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: expected a mapping of names to values")
    return dict(data)


def _of_megatron(given: Given) -> HybridModelConfig:
    """Names and defaults of ``megatron.training.arguments``; what decides no size here is made up."""
    pattern = given.get("hybrid_layer_pattern", "hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise given.error("hybrid_layer_pattern is missing")
    pattern = pattern.split("/")[0].replace("E", "-")  # then depths of MTP; experts are MLPs
    hidden_size, query_heads = given.whole("hidden_size"), given.whole("num_attention_heads")
    head_dim = given.whole("mamba_head_dim", default=64)
    spec = re.findall(r"\w+", str(given.get("spec") or ""))
    grouped = bool(given.get("group_query_attention"))
    fields: dict[str, Any] = dict(
        layer_pattern=pattern,
        hidden_size=hidden_size,
        vocab_size=2**16,
        max_sequence_length=2**16,
        num_attention_heads=query_heads,
        num_query_groups=given.whole("num_query_groups", default=1) if grouped else query_heads,
        kv_channels=given.whole("kv_channels", default=hidden_size // max(1, query_heads)),
        ffn_hidden_size=2**16,
        activation="swiglu",
        mamba_num_heads=given.whole("mamba_num_heads", default=2 * hidden_size // max(1, head_dim)),
        mamba_head_dim=head_dim,
        mamba_state_dim=given.whole("mamba_state_dim", default=128),
        mamba_num_groups=given.whole("mamba_num_groups", default=8),
        # Megatron writes the number into every file; the spec says whether there are such layers.
        gdp_num_householder=given.whole("gdp_num_householder", default=3) if _GDP_SPECS & {*spec[-1:]} else 0,
        gdn_num_key_heads=given.whole("linear_num_key_heads", default=16),
        gdn_num_value_heads=given.whole("linear_num_value_heads", default=32),
        gdn_key_head_dim=given.whole("linear_key_head_dim", default=128),
        gdn_value_head_dim=given.whole("linear_value_head_dim", default=128),
        d_conv=given.whole("mamba_d_conv" if "M" in pattern else "linear_conv_kernel_dim", default=4),
        # float16 has the same bytes as bfloat16.
        dtype="bfloat16" if given.get("bf16") or given.get("fp16") else "float32",
    )
    try:
        return HybridModelConfig(**fields)
    except ValueError as error:
        raise given.error(str(error)) from None
