"""`Given`: the values of a ``config.json``. And what several families read and write in the same way. No torch, no megatron.

Names have changed with transformers' releases: old and new ones are read. A value that megatron's layers cannot compute is
refused in one line that names it; a value that is not read changes nothing in the model's answers. What a file does not say
is what transformers' config class says. ``tests/models/test_hf_config_fields.py`` lists all fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

from megatron_hybrid_prefix.errors import shown
from megatron_hybrid_prefix.models.config import HybridModelConfig

_MOST_LAYERS = 2**14  # patterns are texts and lists: more takes memory without end
# Counts beside a ``text_config``, too; transformers reads no other value there, such as YaRN's.
_OUTER = "dtype", "torch_dtype", "quantization_config", "max_position_embeddings"
# "mrope_" names divide channels among the three positions of an image's part; a text's three are equal.
_ROPE_NAMES = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_YARN = {
    "factor": "yarn_factor",
    "original_max_position_embeddings": "yarn_original_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attention_factor",
    "truncate": "yarn_truncate",
}
_ATTENTION = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_sequence_length",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
}
_MAMBA = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_state": "mamba_state_dim",
    "mamba_n_groups": "mamba_num_groups",
    "mamba_d_conv": "d_conv",
}
_GATED_NORM_EPSILON = 1e-5  # of megatron's Mamba mixer, whatever the model's is


class Given:
    """The values of a ``config.json``, by their names, old and new.

    Args:
        data: The file's JSON object.
        name: What errors call it.
    """

    def __init__(self, data: Mapping[str, Any], name: str) -> None:
        self.data, self.name = data, name

    @classmethod
    def of_text(cls, data: Mapping[str, Any], name: str) -> Given:
        """Of a language model: the values of a ``text_config``, and of the outer ones those of `_OUTER` that it lacks."""
        text = data.get("text_config")
        if not isinstance(text, dict):
            return cls(data, name)
        return cls({**text, **{each: data[each] for each in _OUTER if each in data and text.get(each) is None}}, name)

    def error(self, text: str) -> ValueError:
        """An error about this file."""
        return ValueError(f"{self.name}: {text}")

    def __contains__(self, name: str) -> bool:
        """Whether the file has this name, with a value or null."""
        return name in self.data

    def get(self, *names: str) -> Any:
        """The first of these names with a value; None: there is none."""
        return next((self.data[name] for name in names if self.data.get(name) is not None), None)

    def whole(self, *names: str, default: int | None = None) -> int:
        """The first of these names with a value, as a whole number."""
        value = self.real(*names, default=default, what="a whole number")
        if value < 0 or not value.is_integer():
            raise self.error(f"{names[0]} is {shown(self.get(*names))}, not a whole number")
        if value > 2**53:
            raise self.error(f"{names[0]} is {shown(self.get(*names))}, too large")
        return int(value)

    def layers(self) -> int:
        """``num_hidden_layers``."""
        if (layers := self.whole("num_hidden_layers")) > _MOST_LAYERS:
            raise self.error(f"num_hidden_layers is {layers}, too large")
        return layers

    def real(self, *names: str, default: float | None = None, what: str = "a number") -> float:
        """The first of these names with a value, as a number."""
        value = self.get(*names)
        value = default if value is None else value
        if value is None or type(value) not in (int, float):
            raise self.error(f"{names[0]} {'is missing' if value is None else f'is {shown(value)}, not {what}'}")
        try:
            return float(value)
        except OverflowError:
            raise self.error(f"{names[0]} is {shown(value)}, too large") from None

    def fields(self, names: Mapping[str, str], **defaults: int) -> dict[str, Any]:
        """Fields of `HybridModelConfig` by their names in the file, all of them whole numbers; `written` is the other way round."""
        return {ours: self.whole(theirs, default=defaults.get(ours)) for theirs, ours in names.items()}

    def flag(self, name: str, default: bool) -> bool:
        """A value that is true or false."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.error(f"{name} is {shown(value)}, neither true nor false")
        return value

    def only(self, name: str, *possible: Any) -> None:
        """Checks that a value is one of these; the first is what a file without the name has.

        Raises:
            ValueError: It is another.
        """
        value = self.get(name)
        if value is not None and value not in possible:
            raise self.error(
                f"{name} is {shown(value)}; megatron's layers can do {' or '.join(map(repr, possible))} only"
            )

    def check_step_limits(self) -> None:
        """Checks that the step size of Mamba2 layers is not clamped. transformers 5 writes {"__float__": "Infinity"}."""
        limits = self.get("time_step_limit")
        try:
            found = [float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits or (0, "inf")]
        except (KeyError, TypeError, ValueError):
            found = []
        if found != [0.0, float("inf")]:
            raise self.error(f"time_step_limit is {shown(limits)}: megatron's mixer does not clamp the step size")

    def inner(self, name: str) -> Given:
        """A value that is a JSON object."""
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.error(f"{name} is {shown(value)}, no JSON object")
        return Given(value, f"{self.name}: {name}")

    def texts(self, *names: str) -> list[str] | None:
        """The first of these names with a value, as a list of texts."""
        value = self.get(*names)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self.error(f"{names[0]} is not a list of texts")
        return value


def written(config: HybridModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Values for a ``config.json``, by its names of fields."""
    return {theirs: getattr(config, ours) for theirs, ours in names.items()}


def attention(given: Given, *, kv_heads: int | None, channels: int | None = None) -> dict[str, Any]:
    """Fields that all families have.

    Args:
        given: The file.
        kv_heads: Key/value heads where the file has no such name; None: as many as query heads. A null always means that.
        channels: Channels of a head, likewise; None: they follow from the width and the query heads.
    """
    given.only("attention_bias", False)
    if given.get("sliding_window") is not None and given.get("use_sliding_window") is not False:
        raise given.error("sliding_window: megatron's dynamic engine has attention to all tokens only")
    heads, hidden = given.whole("num_attention_heads"), given.whole("hidden_size")
    if kv_heads is None or "num_key_value_heads" in given:
        kv_heads = heads
    if channels is None or "head_dim" in given:
        channels = hidden // max(1, heads)
    channels = given.whole("attention_head_dim", default=channels)  # an old name
    return given.fields(_ATTENTION, num_query_groups=kv_heads, kv_channels=channels)


def attention_json(config: HybridModelConfig) -> dict[str, Any]:
    """`attention` the other way round."""
    return written(config, _ATTENTION)


def rotary(given: Given, *, default_fraction: float) -> dict[str, Any]:
    """Fields of rotary embeddings, in ``rope_parameters`` or next to it; with YaRN ``max_sequence_length``, too."""
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise given.error("rope_parameters is not a mapping")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise given.error(f"rope_type {shown(kind)}: only default and yarn are supported")
    known = _ROPE_NAMES | (_YARN.keys() | {"mscale", "mscale_all_dim"} if kind == "yarn" else set())
    if other := sorted(name for name, value in rope.items() if name not in known and value is not None):
        raise given.error(f"rope_parameters has {other[0]}, none of {', '.join(sorted(known))}")
    both = Given({**given.data} | {name: value for name, value in rope.items() if value is not None}, given.name)
    fraction = both.real("partial_rotary_factor", default=default_fraction)
    fields = {"rotary_base": both.whole("rope_theta", default=10_000), "rotary_fraction": fraction}
    return fields | (_yarn(given, Given(rope, f"{given.name}: rope_parameters")) if kind == "yarn" else {})


def _yarn(given: Given, rope: Given) -> dict[str, Any]:
    """Fields of YaRN as transformers reads them: an original length outside of ``rope_parameters`` counts first."""
    length, factor = given.whole("max_position_embeddings"), rope.real("factor")
    name = "original_max_position_embeddings"
    original = (rope if given.get(name) is None else given).whole(name, default=length)
    if rope.get("attention_factor") is not None:
        attention = rope.real("attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (1 + 0.1 * rope.real(each) * log(max(1.0, factor)) for each in ("mscale", "mscale_all_dim"))
        attention = above / below
    else:
        attention = 1 + 0.1 * log(max(1.0, factor))
    return {
        "max_sequence_length": max(length, int(min(2**53, factor * original))),
        "yarn_factor": factor,
        "yarn_original_length": original,
        "yarn_beta_fast": rope.real("beta_fast", default=0.0) or 32.0,  # 0 is none, too
        "yarn_beta_slow": rope.real("beta_slow", default=0.0) or 1.0,
        "yarn_attention_factor": attention,
        "yarn_truncate": rope.flag("truncate", "truncate" not in rope),  # null is false
    }


def rotary_json(config: HybridModelConfig) -> dict[str, Any]:
    """`rotary` the other way round; nothing where there are no rotary embeddings."""
    if config.rotary_base is None:
        return {}
    rope = {"rope_theta": float(config.rotary_base), "partial_rotary_factor": config.rotary_fraction}
    yarn = {"rope_type": "default"} if config.yarn_factor is None else {"rope_type": "yarn", **written(config, _YARN)}
    return {"rope_parameters": rope | yarn}


def mamba(given: Given) -> dict[str, Any]:
    """Fields of Mamba2 layers as Bamba and Granite 4 name them, but for the epsilon of their norm (`norm_epsilon`)."""
    given.only("mamba_proj_bias", False)
    given.only("mamba_conv_bias", True)
    given.only("hidden_act", "silu")  # also that of MLPs
    given.check_step_limits()
    heads, inner = given.whole("mamba_n_heads"), given.whole("mamba_expand", default=2) * given.whole("hidden_size")
    head_dim = inner // max(1, heads) if given.get("mamba_d_head") in (None, "auto") else given.whole("mamba_d_head")
    if heads * head_dim != inner:
        raise given.error(f"mamba_n_heads x mamba_d_head is {heads * head_dim}, mamba_expand x hidden_size is {inner}")
    return given.fields(_MAMBA, d_conv=4) | {"mamba_head_dim": head_dim}


def mamba_json(config: HybridModelConfig) -> dict[str, Any]:
    """`mamba` the other way round."""
    expand = config.mamba_num_heads * config.mamba_head_dim // config.hidden_size
    sizes = {"mamba_d_head": config.mamba_head_dim, "mamba_expand": expand, "mamba_chunk_size": config.chunk_size}
    return written(config, _MAMBA) | sizes


def norm_epsilon(given: Given, pattern: str, *names: str, default: float | None = None) -> float:
    """Epsilon of the norms; that of the gated norm in megatron's Mamba mixer cannot be set."""
    epsilon = given.real(*names, default=default)
    if "M" in pattern and epsilon != _GATED_NORM_EPSILON:
        raise given.error(f"{names[0]} is {epsilon:g}: the norm in megatron's mixer has {_GATED_NORM_EPSILON:g}")
    return epsilon
