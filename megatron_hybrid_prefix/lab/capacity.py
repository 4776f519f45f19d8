"""Sizes of a model's recurrent states and KV blocks, from a preset, Megatron arguments, or a Hugging Face config.json.

Needs neither torch nor megatron. A file names its dimensions as its makers do. A missing name gets the makers' default;
if there is no default, the name is required.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.console.terminal import InputError, as_input_errors, read_text
from megatron_hybrid_prefix.layers.components import gated_delta_net_components, mamba2_components
from megatron_hybrid_prefix.models.config import PRESETS, HybridModelConfig
from megatron_hybrid_prefix.models.hf.dimensions import Given, kv_heads_and_channels
from megatron_hybrid_prefix.pool.layout import DTYPE_BYTES, SlotLayout, StateLayout
from megatron_hybrid_prefix.pool.pages import own_bytes

_DELTA_NET_CHUNK = 64  # tokens
VALUE_BYTES = {name: DTYPE_BYTES[name] for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Sizes:
    """Dimensions of a model's Mamba2 layers: how many there are, and those of one."""

    layers: int
    heads: int
    head_dim: int
    state_dim: int
    groups: int
    conv_taps: int

    def layout(self, tp: int, dtype: str, state_dtype: str | None) -> StateLayout:
        """One state on one of ``tp`` ranks."""
        heads, groups = self.heads // tp, self.groups // tp
        channels = heads * self.head_dim + 2 * groups * self.state_dim
        ssm_shape = (heads, self.head_dim, self.state_dim)
        components = mamba2_components((channels, self.conv_taps), dtype, ssm_shape, state_dtype or dtype)
        return StateLayout(kind="mamba2", layers=self.layers, components=components)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSizes:
    """Dimensions of a model's Gated DeltaNet layers: how many there are, and those of one."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int

    def layout(self, tp: int, dtype: str, state_dtype: str | None) -> StateLayout:
        """One state on one of ``tp`` ranks."""
        key_heads, value_heads = self.key_heads // tp, self.value_heads // tp
        components = gated_delta_net_components(
            channels=2 * key_heads * self.key_dim + value_heads * self.value_dim,
            taps=self.conv_taps,
            heads=value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            window_dtype=dtype,
            state_dtype=state_dtype,
        )
        return StateLayout(kind="gated_delta_net", layers=self.layers, components=components)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Dimensions of the whole model that decide the size of states and KV.

    Attributes:
        name: Name of the preset or file.
        recurrent: Dimensions of the recurrent layers, by kind.
        attention_layers: Number of attention layers.
        kv_heads, kv_channels: Dimensions of an attention layer.
        dtype: Dtype of parameters, KV and convolution states.
        state_dtype: Dtype of the matrix states. None: the choice of each kind.
        tp: Tensor-parallel size. Bytes are per rank.
        vocabulary: Number of token ids, or None if the file does not say it.
    """

    name: str
    recurrent: tuple[Mamba2Sizes | DeltaNetSizes, ...]
    attention_layers: int
    kv_heads: int
    kv_channels: int
    dtype: str = "bfloat16"
    state_dtype: str | None = None
    tp: int = 1
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        if not self.recurrent:
            raise ValueError(f"{self.name}: there are no recurrent layers; the model must be a hybrid")
        if self.attention_layers < 1:
            raise ValueError(f"{self.name}: attention_layers is {self.attention_layers}; the model must be a hybrid")
        shared = dict[str, int]()
        for kind in self.recurrent:
            of_kind: dict[str, int] = {field.name: getattr(kind, field.name) for field in fields(kind)}
            for name, value in of_kind.items():
                if value < 1:
                    raise ValueError(f"{self.name}: {name} is {value}; the model must be a hybrid")
            shared |= {name: value for name, value in of_kind.items() if name.endswith(("heads", "groups"))}
        for name in ("dtype", "state_dtype"):
            value = getattr(self, name)
            if value not in VALUE_BYTES and not (name == "state_dtype" and value is None):
                raise ValueError(f"{self.name}: {name} {value!r} is none of {', '.join(VALUE_BYTES)}")
        for name, value in shared.items():
            if value % self.tp:
                raise ValueError(f"{self.name}: tp={self.tp} does not divide {name}={value}")
        if self.kv_heads % self.tp and self.tp % self.kv_heads:
            raise ValueError(
                f"{self.name}: tp={self.tp} is neither a divisor nor a multiple of kv_heads={self.kv_heads}"
            )

    @property
    def layout(self) -> SlotLayout:
        """One state on one rank."""
        return SlotLayout(tuple(kind.layout(self.tp, self.dtype, self.state_dtype) for kind in self.recurrent))

    def check_blocks(self, block_tokens: int) -> None:
        """Raise ValueError, in one line, if KV blocks of so many tokens do not suit a kind of layers."""
        if block_tokens % _DELTA_NET_CHUNK and any(isinstance(kind, DeltaNetSizes) for kind in self.recurrent):
            raise ValueError(
                f"KV blocks of {block_tokens} tokens: Gated DeltaNet layers need a multiple of {_DELTA_NET_CHUNK}"
            )

    @property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint on one rank."""
        return self.layout.slot_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the KV of one token on one rank. With more ranks than heads, several ranks hold the same head."""
        heads = max(1, self.kv_heads // self.tp)
        return 2 * self.attention_layers * heads * self.kv_channels * VALUE_BYTES[self.dtype]

    def kv_block_bytes(self, block_tokens: int) -> int:
        """Bytes of one KV block on one rank."""
        return block_tokens * self.kv_token_bytes

    @property
    def next_logits_bytes(self) -> int | None:
        """Bytes on the host of the logits beside a checkpoint, for log-probs of prompts; None without a vocabulary."""
        return None if self.vocabulary is None else self.vocabulary * VALUE_BYTES[self.dtype]

    def live_bytes(self, speculative_tokens: int) -> int:
        """Bytes of one running request's states: one, and one more per token that may be accepted in a step with drafts."""
        return own_bytes(self.state_bytes, own_slots=1, drafts=speculative_tokens)


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
        reader = _of_hugging_face if "model_type" in data else _of_megatron
        sizes = reader(_Fields(str(path), data))
        return replace(sizes, tp=tp, state_dtype=state_dtype or sizes.state_dtype)


def sizes_of_config(name: str, config: HybridModelConfig, *, tp: int = 1, state_dtype: str | None = None) -> Sizes:
    """Sizes of a model with these dimensions; arguments as of `sizes_of`. Raises ValueError where ``tp`` does not divide."""
    mamba = Mamba2Sizes(
        layers=config.count("M"),
        heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        state_dim=config.mamba_state_dim,
        groups=config.mamba_num_groups,
        conv_taps=config.d_conv,
    )
    delta_net = DeltaNetSizes(
        layers=config.count("G"),
        key_heads=config.gdn_num_key_heads,
        value_heads=config.gdn_num_value_heads,
        key_dim=config.gdn_key_head_dim,
        value_dim=config.gdn_value_head_dim,
        conv_taps=config.d_conv,
    )
    return Sizes(
        name=name,
        recurrent=tuple(kind for kind in (mamba, delta_net) if kind.layers),
        attention_layers=config.count("*"),
        kv_heads=config.num_query_groups,
        kv_channels=config.kv_channels,
        dtype=config.dtype,
        state_dtype=state_dtype or config.state_dtype,
        tp=tp,
        vocabulary=config.vocab_size,
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


class _Fields(Given):
    """The values of a file, by name."""

    def __init__(self, name: str, data: Mapping[str, Any]) -> None:
        # Command-line spelling is accepted: --hidden-size is hidden_size.
        super().__init__({str(key).lstrip("-").replace("-", "_"): value for key, value in data.items()}, name)

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


def _of_megatron(given: _Fields) -> Sizes:
    """Names and defaults of ``megatron.training.arguments``."""
    pattern = given.text("hybrid_layer_pattern", "hybrid_override_pattern").split("/")[0]  # then depths of MTP
    hidden_size, query_heads = given.number("hidden_size"), given.number("num_attention_heads")
    recurrent: list[Mamba2Sizes | DeltaNetSizes] = []
    if pattern.count("M"):
        head_dim = given.number("mamba_head_dim", default=64)
        recurrent.append(
            Mamba2Sizes(
                layers=pattern.count("M"),
                heads=given.number("mamba_num_heads", default=2 * hidden_size // max(1, head_dim)),
                head_dim=head_dim,
                state_dim=given.number("mamba_state_dim", default=128),
                groups=given.number("mamba_num_groups", default=8),
                conv_taps=given.number("mamba_d_conv", default=4),
            )
        )
    if pattern.count("G"):
        recurrent.append(_delta_net_of(given, pattern.count("G")))
    dtype = "bfloat16" if given.get("bf16") else "float16" if given.get("fp16") else "float32"
    grouped = bool(given.get("group_query_attention"))
    return Sizes(
        name=given.name,
        recurrent=tuple(recurrent),
        attention_layers=pattern.count("*"),
        kv_heads=given.number("num_query_groups", default=1) if grouped else query_heads,
        kv_channels=given.number("kv_channels", default=hidden_size // max(1, query_heads)),
        dtype=dtype,
        vocabulary=given.number("padded_vocab_size", "vocab_size", default=0) or None,
    )


def _delta_net_of(given: _Fields, layers: int) -> DeltaNetSizes:
    """Megatron and Hugging Face have the same names; the defaults are megatron's."""
    return DeltaNetSizes(
        layers=layers,
        key_heads=given.number("linear_num_key_heads", default=16),
        value_heads=given.number("linear_num_value_heads", default=32),
        key_dim=given.number("linear_key_head_dim", default=128),
        value_dim=given.number("linear_value_head_dim", default=128),
        conv_taps=given.number("linear_conv_kernel_dim", default=4),
    )


def _of_hugging_face(given: _Fields) -> Sizes:
    kind = given.text("model_type")
    if kind not in _LAYERS:
        raise InputError(f"{given.name}: model_type {kind!r} is none of {', '.join(_LAYERS)}")
    recurrent_layers, attention_layers = _LAYERS[kind](given)
    of_kind = _delta_net_of if kind in _DELTA_NETS else _mamba_of
    kv_heads, kv_channels = kv_heads_and_channels(given)
    return Sizes(
        name=given.name,
        recurrent=(of_kind(given, recurrent_layers),),
        attention_layers=attention_layers,
        kv_heads=kv_heads,
        kv_channels=kv_channels,
        dtype=str(given.get("dtype", "torch_dtype") or "bfloat16"),
        state_dtype=given.get("mamba_ssm_cache_dtype"),
        vocabulary=given.number("vocab_size", default=0) or None,
    )


def _mamba_of(given: _Fields, layers: int) -> Mamba2Sizes:
    heads = given.number("mamba_num_heads", "mamba_n_heads")
    width = given.number("mamba_expand", default=2) * given.number("hidden_size")
    head_dim = given.get("mamba_head_dim", "mamba_d_head")
    return Mamba2Sizes(
        layers=layers,
        heads=heads,
        head_dim=width // max(1, heads)
        if head_dim in (None, "auto")
        else given.number("mamba_head_dim", "mamba_d_head"),
        state_dim=given.number("ssm_state_size", "mamba_d_state"),
        groups=given.number("n_groups", "mamba_n_groups"),
        conv_taps=given.number("conv_kernel", "mamba_d_conv", default=4),
    )


def _by_pattern(given: _Fields) -> tuple[int, int]:
    kinds = given.texts("layers_block_type", "layer_types")
    if kinds is not None:
        return _counts(kinds)
    pattern = given.text("hybrid_override_pattern")
    return pattern.count("M"), pattern.count("*")


def _by_indices(given: _Fields) -> tuple[int, int]:
    indices = given.get("attn_layer_indices")
    if not isinstance(indices, list):
        raise InputError(f"{given.name}: attn_layer_indices is not a list")
    return given.number("num_hidden_layers") - len(indices), len(indices)


def _by_types(given: _Fields) -> tuple[int, int]:
    kinds = given.texts("layer_types") or given.texts("layers_block_type")
    if kinds is None:
        raise InputError(f"{given.name}: layer_types is missing")
    return _counts(kinds)


def _counts(kinds: list[str]) -> tuple[int, int]:
    """Recurrent and attention layers, in the names of transformers 4 and 5."""
    return (
        kinds.count("mamba") + kinds.count("linear_attention"),
        kinds.count("attention") + kinds.count("full_attention"),
    )


def _side_by_side(given: _Fields) -> tuple[int, int]:
    layers = given.number("num_hidden_layers")
    return layers, layers


def _one_in_four(given: _Fields) -> tuple[int, int]:
    kinds = given.texts("layer_types")
    if kinds is not None:
        return kinds.count("linear_attention"), kinds.count("full_attention")
    layers = given.number("num_hidden_layers")
    attention = layers // max(1, given.number("full_attention_interval", default=4))
    return layers - attention, attention


_DELTA_NETS = ("qwen3_next",)
# Functions that count recurrent and attention layers, by model_type.
_LAYERS: dict[str, Callable[[_Fields], tuple[int, int]]] = {
    "nemotron_h": _by_pattern,
    "bamba": _by_indices,
    "granitemoehybrid": _by_types,
    "falcon_h1": _side_by_side,
    "qwen3_next": _one_in_four,
}
