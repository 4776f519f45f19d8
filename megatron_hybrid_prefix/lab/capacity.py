"""Sizes of a model's recurrent states and KV blocks, from a preset, Megatron arguments, or a Hugging Face config.json.

Needs neither torch nor megatron. A file names its dimensions as its makers do. A missing name gets the makers' default;
if there is no default, the name is required.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.console.terminal import InputError, as_input_errors, read_text
from megatron_hybrid_prefix.models.config import PRESETS, HybridModelConfig
from megatron_hybrid_prefix.pool.layout import StateComponent, StateLayout

_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Dimensions of the whole model that decide the size of states and KV.

    Attributes:
        name: Name of the preset or file.
        mamba_layers, attention_layers: Number of layers.
        heads, head_dim, state_dim, groups, conv_taps: Dimensions of a Mamba2 layer.
        kv_heads, kv_channels: Dimensions of an attention layer.
        dtype: Dtype of parameters, KV and convolution states.
        state_dtype: Dtype of the SSM states.
        tp: Tensor-parallel size. Bytes are per rank.
    """

    name: str
    mamba_layers: int
    attention_layers: int
    heads: int
    head_dim: int
    state_dim: int
    groups: int
    conv_taps: int
    kv_heads: int
    kv_channels: int
    dtype: str = "bfloat16"
    state_dtype: str = "bfloat16"
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("mamba_layers", "attention_layers", "heads", "head_dim", "state_dim", "groups", "conv_taps"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{self.name}: {name} is {getattr(self, name)}; the model must be a hybrid (Mamba2 and attention layers)"
                )
        for name in ("dtype", "state_dtype"):
            if getattr(self, name) not in _VALUE_BYTES:
                raise ValueError(f"{self.name}: {name} {getattr(self, name)!r} is none of {', '.join(_VALUE_BYTES)}")
        for name in ("heads", "groups", "kv_heads"):
            if getattr(self, name) % self.tp:
                raise ValueError(f"{self.name}: tp={self.tp} does not divide {name}={getattr(self, name)}")

    @property
    def layout(self) -> StateLayout:
        """Layout of one state on one rank."""
        heads, groups = self.heads // self.tp, self.groups // self.tp
        channels = heads * self.head_dim + 2 * groups * self.state_dim
        conv = StateComponent(name="conv", shape=(channels, self.conv_taps), dtype=self.dtype)
        ssm = StateComponent(name="ssm", shape=(heads, self.head_dim, self.state_dim), dtype=self.state_dtype)
        return StateLayout(kind="mamba2", layers=self.mamba_layers, components=(conv, ssm))

    @property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint on one rank."""
        return self.layout.slot_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the KV of one token on one rank."""
        return 2 * self.attention_layers * (self.kv_heads // self.tp) * self.kv_channels * _VALUE_BYTES[self.dtype]

    def kv_block_bytes(self, block_tokens: int) -> int:
        """Bytes of one KV block on one rank."""
        return block_tokens * self.kv_token_bytes

    def live_bytes(self, speculative_tokens: int) -> int:
        """Bytes of one running request's states: one, and one more per token that may be accepted in a step with drafts."""
        return self.state_bytes * (2 + speculative_tokens if speculative_tokens else 1)


def sizes_of(model: str, *, tp: int = 1, state_dtype: str | None = None) -> Sizes:
    """Reads the sizes of a preset or file.

    Args:
        model: A preset; a YAML or JSON file of Megatron arguments; or a Hugging Face config.json, or its folder.
        tp: Tensor-parallel size.
        state_dtype: Dtype of the SSM states; None: that of the parameters.

    Raises:
        InputError: There is no such preset or file, or the file is not understood.
    """
    with as_input_errors(ValueError):
        if model in PRESETS:
            sizes = _of_preset(model, PRESETS[model])
        else:
            path = Path(model)
            path = path / "config.json" if path.is_dir() else path
            if not path.is_file():
                raise InputError(f"{model}: neither a file nor a preset; presets: {', '.join(PRESETS)}")
            data = _read(path)
            reader = _of_hugging_face if "model_type" in data else _of_megatron
            sizes = reader(_Fields(str(path), data))
        return replace(sizes, tp=tp, state_dtype=state_dtype or sizes.dtype)


def _of_preset(name: str, config: HybridModelConfig) -> Sizes:
    return Sizes(
        name=name,
        mamba_layers=config.count("M"),
        attention_layers=config.count("*"),
        heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        state_dim=config.mamba_state_dim,
        groups=config.mamba_num_groups,
        conv_taps=config.d_conv,
        kv_heads=config.num_query_groups,
        kv_channels=config.kv_channels,
        dtype=config.dtype,
        state_dtype=config.dtype,
    )


# --- Files -----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        if path.suffix == ".json":
            raise InputError(f"{path}: not JSON: {error}") from None
        data = _read_yaml(path, text)
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping of names to values")
    return data


def _read_yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise InputError(f"{path}: reading YAML needs pyyaml: pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{path}: neither JSON nor YAML: {error}") from None


class _Fields:
    """The values of a file, by name."""

    def __init__(self, name: str, data: Mapping[str, Any]) -> None:
        self.name = name
        # Command-line spelling is accepted: --hidden-size is hidden_size.
        self._data = {str(key).lstrip("-").replace("-", "_"): value for key, value in data.items()}

    def get(self, *names: str) -> Any:
        """The first of these names with a value."""
        return next((self._data[name] for name in names if self._data.get(name) is not None), None)

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of these names with a value, as a whole number."""
        value = self.get(*names)
        if value is None:
            value = default
        if type(value) is not int or value < 0:
            said = "is missing" if value is None else f"is {value!r}, not a whole number"
            raise InputError(f"{self.name}: {names[0]} {said}")
        return value

    def text(self, *names: str) -> str:
        """The first of these names with a value, as text."""
        value = self.get(*names)
        if not isinstance(value, str):
            raise InputError(f"{self.name}: {names[0]} {'is missing' if value is None else f'is {value!r}, not text'}")
        return value

    def list_of_text(self, name: str) -> list[str] | None:
        """A list of texts; None if the name has no value."""
        value = self.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise InputError(f"{self.name}: {name} is not a list of texts")
        return value


def _of_megatron(fields: _Fields) -> Sizes:
    """Names and defaults of ``megatron.training.arguments``."""
    pattern = fields.text("hybrid_layer_pattern", "hybrid_override_pattern").split("/")[
        0
    ]  # after "/" follow MTP depths
    hidden_size, query_heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    head_dim = fields.number("mamba_head_dim", default=64)
    dtype = "bfloat16" if fields.get("bf16") else "float16" if fields.get("fp16") else "float32"
    grouped = bool(fields.get("group_query_attention"))
    return Sizes(
        name=fields.name,
        mamba_layers=pattern.count("M"),
        attention_layers=pattern.count("*"),
        heads=fields.number("mamba_num_heads", default=2 * hidden_size // max(1, head_dim)),
        head_dim=head_dim,
        state_dim=fields.number("mamba_state_dim", default=128),
        groups=fields.number("mamba_num_groups", default=8),
        conv_taps=fields.number("mamba_d_conv", default=4),
        kv_heads=fields.number("num_query_groups", default=1) if grouped else query_heads,
        kv_channels=fields.number("kv_channels", default=hidden_size // max(1, query_heads)),
        dtype=dtype,
        state_dtype=dtype,
    )


def _of_hugging_face(fields: _Fields) -> Sizes:
    kind = fields.text("model_type")
    if kind not in _LAYERS:
        raise InputError(f"{fields.name}: model_type {kind!r} is none of {', '.join(_LAYERS)}")
    mamba_layers, attention_layers = _LAYERS[kind](fields)
    hidden_size, query_heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    heads = fields.number("mamba_num_heads", "mamba_n_heads")
    width = fields.number("mamba_expand", default=2) * hidden_size
    head_dim = fields.get("mamba_head_dim", "mamba_d_head")
    dtype = fields.get("dtype", "torch_dtype")
    return Sizes(
        name=fields.name,
        mamba_layers=mamba_layers,
        attention_layers=attention_layers,
        heads=heads,
        head_dim=width // max(1, heads)
        if head_dim in (None, "auto")
        else fields.number("mamba_head_dim", "mamba_d_head"),
        state_dim=fields.number("ssm_state_size", "mamba_d_state"),
        groups=fields.number("n_groups", "mamba_n_groups"),
        conv_taps=fields.number("conv_kernel", "mamba_d_conv"),
        kv_heads=fields.number("num_key_value_heads", default=query_heads),
        kv_channels=fields.number("head_dim", "attention_head_dim", default=hidden_size // max(1, query_heads)),
        dtype=str(dtype or "bfloat16"),
        state_dtype=str(dtype or "bfloat16"),
    )


def _by_pattern(fields: _Fields) -> tuple[int, int]:
    kinds = fields.list_of_text("layers_block_type")
    if kinds is not None:
        return kinds.count("mamba"), kinds.count("attention")
    pattern = fields.text("hybrid_override_pattern")
    return pattern.count("M"), pattern.count("*")


def _by_indices(fields: _Fields) -> tuple[int, int]:
    indices = fields.get("attn_layer_indices")
    if not isinstance(indices, list):
        raise InputError(f"{fields.name}: attn_layer_indices is not a list")
    return fields.number("num_hidden_layers") - len(indices), len(indices)


def _by_types(fields: _Fields) -> tuple[int, int]:
    kinds = fields.list_of_text("layer_types") or fields.list_of_text("layers_block_type")
    if kinds is None:
        raise InputError(f"{fields.name}: layer_types is missing")
    return kinds.count("mamba"), kinds.count("attention")


def _side_by_side(fields: _Fields) -> tuple[int, int]:
    layers = fields.number("num_hidden_layers")
    return layers, layers


# Functions that count Mamba2 and attention layers, by model_type.
_LAYERS: dict[str, Callable[[_Fields], tuple[int, int]]] = {
    "nemotron_h": _by_pattern,
    "bamba": _by_indices,
    "granitemoehybrid": _by_types,
    "falcon_h1": _side_by_side,
}
