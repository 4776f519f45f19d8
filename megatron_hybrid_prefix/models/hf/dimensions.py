"""`dimensions_of`: the values of a Hugging Face ``config.json`` as a `HybridModelConfig`. No torch, no megatron.

Names have changed with transformers' releases: old and new ones are read. A value that megatron's layers cannot compute is
refused in one line that names it; a value that is not read here changes nothing in the model's answers. What a file does
not say is what transformers' config class says. ``tests/models/test_hf_config_fields.py`` lists all fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from megatron_hybrid_prefix.models.config import HybridModelConfig

_REFUSED = {
    "granitemoehybrid": "megatron's layers have no embedding_multiplier, attention_multiplier, residual_multiplier and "
    "logits_scaling",
    "falcon_h1": "megatron has no layer of attention and Mamba2 side by side",
    "jamba": "its recurrent layers are Mamba1",
    "zamba2": "its attention layers share weights",
    "lfm2": "its recurrent layers are short convolutions",
}
_DTYPES = ("float32", "bfloat16")
KV_DEFAULTS: dict[str, tuple[int | None, int | None]] = {
    "nemotron_h": (8, 128),
    "bamba": (8, None),
    "qwen3_next": (2, 256),
    "qwen3_5_text": (4, 256),
    "qwen3_5_moe_text": (2, 256),
}
"""Key/value heads and channels where config.json has no such name; None, or no entry: they follow from the query heads."""
_NEMOTRON_H_OLD_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
_ROPE_NAMES = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_MROPE_NAMES = {"mrope_section", "mrope_interleaved"}
_WITH_IMAGES = ("qwen3_5", "qwen3_5_moe")
_GATED_NORM_EPSILON = 1e-5  # of megatron's Mamba mixer, whatever the model's is
_NEMOTRON_H_LAYERS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


class Given:
    """The values of a ``config.json``, by their names, old and new.

    Args:
        data: The file's JSON object.
        name: What errors call it.
    """

    def __init__(self, data: Mapping[str, Any], name: str) -> None:
        self.data, self.name = data, name

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
        value = self.get(*names)
        value = default if value is None else value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < 0:
            raise self.error(f"{names[0]} {'is missing' if value is None else f'is {value!r}, not a whole number'}")
        return value

    def real(self, *names: str, default: float) -> float:
        """The first of these names with a value, as a number."""
        value = self.get(*names)
        value = default if value is None else value
        if type(value) not in (int, float):
            raise self.error(f"{names[0]} is {value!r}, not a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A value that is true or false."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.error(f"{name} is {value!r}, neither true nor false")
        return value

    def only(self, name: str, *possible: Any) -> None:
        """Checks that a value is one of these; the first is what a file without the name has.

        Raises:
            ValueError: It is another.
        """
        value = self.get(name)
        if value is not None and value not in possible:
            raise self.error(f"{name} is {value!r}; megatron's layers can do {' or '.join(map(repr, possible))} only")

    def check_step_limits(self) -> None:
        """Checks that the step size of Mamba2 layers is not clamped. transformers 5 writes {"__float__": "Infinity"}."""
        limits = self.get("time_step_limit")
        try:
            found = [float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits or (0, "inf")]
        except (KeyError, TypeError, ValueError):
            found = []
        if found != [0.0, float("inf")]:
            raise self.error(f"time_step_limit is {limits!r}: megatron's mixer does not clamp the step size")

    def texts(self, *names: str) -> list[str] | None:
        """The first of these names with a value, as a list of texts."""
        value = self.get(*names)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self.error(f"{names[0]} is not a list of texts")
        return value


def dimensions_of(data: Mapping[str, Any], name: str, *, dtype: str = "bfloat16") -> HybridModelConfig:
    """Dimensions of the model that a ``config.json`` describes.

    Args:
        data: The file's JSON object.
        name: What errors call the file.
        dtype: The parameters' dtype if the file does not say it.

    Raises:
        ValueError: The model is of no family here, needs what megatron's layers lack, or a value is missing or wrong.
    """
    given = Given(data, name)
    if data.get("model_type") in _WITH_IMAGES:
        given = _language_model(given)
    model_type = given.data.get("model_type")
    if model_type not in _READERS:
        known = ", ".join(_READERS)
        if model_type is None:
            raise given.error(f"model_type is missing; families: {known}")
        why = _REFUSED.get(model_type, f"it is none of {known}")
        raise given.error(f"model_type {model_type!r} is not supported: {why}")
    if given.get("quantization_config") is not None:
        raise given.error("quantization_config: quantized weights are not supported; take the bfloat16 model")
    try:
        config = _READERS[model_type](given)
        return replace(
            config,
            dtype=_dtype(given, "dtype", "torch_dtype") or dtype,
            state_dtype=_dtype(given, "mamba_ssm_cache_dtype", "mamba_ssm_dtype"),
            tie_embeddings=given.flag("tie_word_embeddings", False),
        )
    except ValueError as error:
        if str(error).startswith(f"{name}: "):
            raise
        raise given.error(str(error)) from None


def _language_model(given: Given) -> Given:
    """The values of a model with images that say what its language model is."""
    text = given.get("text_config")
    if not isinstance(text, dict):
        raise given.error("text_config, which has the dimensions of the language model, is missing")
    both = {name: given.get(name) for name in ("dtype", "torch_dtype", "quantization_config")}
    tied = given.flag("tie_word_embeddings", False) or text.get("tie_word_embeddings")
    own = {"model_type": f"{given.data['model_type']}_text", "tie_word_embeddings": tied}
    return Given({**both, **text, **own}, f"{given.name}: text_config")


def _dtype(given: Given, *names: str) -> str | None:
    value = given.get(*names)
    if value is None or value == "auto":
        return None
    value = str(value).removeprefix("torch.")
    if value not in _DTYPES:
        raise given.error(f"{names[0]} is {value!r}, none of {', '.join(_DTYPES)}")
    return value


def _attention(given: Given) -> dict[str, Any]:
    """Fields that all families have."""
    given.only("attention_bias", False)
    if given.get("sliding_window") is not None and given.get("use_sliding_window") is not False:
        raise given.error("sliding_window: megatron's dynamic engine has attention to all tokens only")
    kv_heads, channels = kv_heads_and_channels(given)
    return {
        "hidden_size": given.whole("hidden_size"),
        "vocab_size": given.whole("vocab_size"),
        "max_sequence_length": given.whole("max_position_embeddings"),
        "num_attention_heads": given.whole("num_attention_heads"),
        "num_query_groups": kv_heads,
        "kv_channels": channels,
        "ffn_hidden_size": given.whole("intermediate_size"),
    }


def kv_heads_and_channels(given: Given) -> tuple[int, int]:
    """Key/value heads of an attention layer, and the channels of a head. A null means that they follow from the query heads.

    Raises:
        ValueError: A value is missing or no whole number.
    """
    heads, hidden = given.whole("num_attention_heads"), given.whole("hidden_size")
    kv_heads, channels = KV_DEFAULTS.get(given.data["model_type"], (None, None))
    if kv_heads is None or "num_key_value_heads" in given:
        kv_heads = heads
    if channels is None or "head_dim" in given:
        channels = hidden // max(1, heads)
    return (
        given.whole("num_key_value_heads", default=kv_heads),
        given.whole("head_dim", "attention_head_dim", default=channels),
    )


# --- Nemotron-H ------------------------------------------------------------------------------------------------------


def _nemotron_h(given: Given) -> HybridModelConfig:
    old = {new: given.data[name] for name, new in _NEMOTRON_H_OLD_NAMES.items() if name in given}
    given = Given({**given.data, **old}, given.name)
    pattern = _nemotron_h_pattern(given)
    for name in ("use_bias", "mlp_bias", "mamba_proj_bias", "residual_in_fp32"):
        given.only(name, False)
    given.only("use_conv_bias", True)
    given.only("mlp_hidden_act", "relu2")
    given.only("mamba_hidden_act", "silu")
    given.check_step_limits()
    epsilon = _epsilon(given, pattern, "layer_norm_epsilon", "norm_eps", "rms_norm_eps", default=1e-5)
    return HybridModelConfig(
        layer_pattern=pattern,
        **_attention(given),
        mamba_num_heads=given.whole("mamba_num_heads"),
        mamba_head_dim=given.whole("mamba_head_dim"),
        mamba_state_dim=given.whole("ssm_state_size"),
        mamba_num_groups=given.whole("n_groups"),
        d_conv=given.whole("conv_kernel", default=4),
        activation="relu2",
        layernorm_epsilon=epsilon,
        **(_nemotron_h_experts(given) if "E" in pattern else {}),
    )


def _nemotron_h_experts(given: Given) -> dict[str, Any]:
    """Fields of layers of experts."""
    if given.get("moe_latent_size") is not None:
        raise given.error("moe_latent_size: experts of a latent size are not supported")
    given.only("norm_topk_prob", True)
    given.only("n_shared_experts", 1)
    experts, chosen = given.whole("n_routed_experts", "num_local_experts"), given.whole("num_experts_per_tok")
    groups, chosen_groups = given.whole("n_group", default=1), given.whole("topk_group", default=1)
    if chosen_groups == groups:  # all of them: no choice
        groups = chosen_groups = 0
    elif chosen != 2 * chosen_groups:
        raise given.error(
            f"num_experts_per_tok is {chosen}, and topk_group {chosen_groups} of n_group {groups}: megatron rates a group by "
            f"its {chosen // max(1, chosen_groups)} best experts, this model by its 2 best"
        )
    return {
        "num_moe_experts": experts,
        "moe_router_topk": chosen,
        "moe_router_score": "sigmoid",
        "moe_router_groups": groups,
        "moe_router_topk_groups": chosen_groups,
        "moe_router_scaling": given.real("routed_scaling_factor", default=1.0),
        "moe_ffn_hidden_size": given.whole("moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": given.whole("moe_shared_expert_intermediate_size"),
    }


def _nemotron_h_pattern(given: Given) -> str:
    kinds = given.texts("layers_block_type", "layer_types")
    if kinds is not None:
        for kind in kinds:
            if kind not in _NEMOTRON_H_LAYERS:
                raise given.error(f"layers_block_type has {kind!r}, none of {', '.join(_NEMOTRON_H_LAYERS)}")
        return "".join(_NEMOTRON_H_LAYERS[kind] for kind in kinds)
    pattern = given.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise given.error("neither layers_block_type nor hybrid_override_pattern says which layers there are")
    if given.whole("num_hidden_layers", default=len(pattern)) != len(pattern):
        raise given.error(f"hybrid_override_pattern has {len(pattern)} layers, num_hidden_layers is another number")
    return pattern


# --- Qwen3-Next ------------------------------------------------------------------------------------------------------


def _qwen3_next(given: Given) -> HybridModelConfig:
    experts = given.whole("num_experts", default=512)
    without = given.get("mlp_only_layers") or []
    step = max(1, given.whole("decoder_sparse_step", default=1))
    after = [
        "E" if experts and number not in without and (number + 1) % step == 0 else "-"
        for number in range(given.whole("num_hidden_layers"))
    ]
    if "E" in after and not given.flag("norm_topk_prob", True):
        raise given.error("norm_topk_prob is false: the router's weights here are a softmax over the chosen experts")
    return _qwen(given, after, experts)


def _qwen(given: Given, after: list[str], experts: int) -> HybridModelConfig:
    """A model of Gated DeltaNet and gated attention; ``after`` has the symbol after each of these layers."""
    given.only("hidden_act", "silu")
    layers = given.whole("num_hidden_layers")
    kinds = given.texts("layer_types")
    if kinds is None:
        every = max(1, given.whole("full_attention_interval", default=4))
        kinds = ["full_attention" if number % every == 0 else "linear_attention" for number in range(1, layers + 1)]
    symbols = {"linear_attention": "G", "full_attention": "*"}
    if len(kinds) != layers or set(kinds) - set(symbols):
        raise given.error(f"layer_types must be {layers} times linear_attention or full_attention")
    fields: dict[str, Any] = {}
    if "E" in after:
        fields = {
            "num_moe_experts": experts,
            "moe_router_topk": given.whole("num_experts_per_tok"),
            "moe_ffn_hidden_size": given.whole("moe_intermediate_size"),
            "moe_shared_expert_intermediate_size": given.whole("shared_expert_intermediate_size"),
            "moe_shared_expert_gate": True,
        }
    base, fraction = _rotary(given, default_fraction=0.25, ignored=_MROPE_NAMES)
    return HybridModelConfig(
        layer_pattern="".join(symbols[kind] + symbol for kind, symbol in zip(kinds, after, strict=True)),
        **_attention(given),
        gdn_num_key_heads=given.whole("linear_num_key_heads"),
        gdn_num_value_heads=given.whole("linear_num_value_heads"),
        gdn_key_head_dim=given.whole("linear_key_head_dim"),
        gdn_value_head_dim=given.whole("linear_value_head_dim"),
        d_conv=given.whole("linear_conv_kernel_dim", default=4),
        activation="swiglu",
        rotary_base=base,
        rotary_fraction=fraction,
        attention_output_gate=True,
        qk_norm=True,
        float32_norms=True,
        layernorm_epsilon=given.real("rms_norm_eps", default=1e-6),
        **fields,
    )


def _qwen3_5(given: Given) -> HybridModelConfig:
    given.only("attn_output_gate", True)
    given.only("output_gate_type", "swish", "silu")
    return _qwen(given, given.whole("num_hidden_layers") * ["-"], 0)


def _qwen3_5_moe(given: Given) -> HybridModelConfig:
    given.only("attn_output_gate", True)
    given.only("output_gate_type", "swish", "silu")
    given = Given({"intermediate_size": given.get("moe_intermediate_size")} | given.data, given.name)
    return _qwen(given, given.whole("num_hidden_layers") * ["E"], given.whole("num_experts"))


def _rotary(given: Given, *, default_fraction: float, ignored: Collection[str] = ()) -> tuple[int, float]:
    """Base and fraction of rotary embeddings, in ``rope_parameters`` or next to it; ``ignored`` may be there, too."""
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise given.error("rope_parameters is not a mapping")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise given.error(f"rope_type {kind!r}: only rotary embeddings without scaling are supported")
    if other := sorted(name for name, value in rope.items() if name not in {*_ROPE_NAMES, *ignored} and value is not None):
        raise given.error(f"rope_parameters has {other[0]}, none of {', '.join(sorted(_ROPE_NAMES))}")
    both = Given({**given.data} | {name: value for name, value in rope.items() if value is not None}, given.name)
    base = both.whole("rope_theta", default=10_000)
    return base, both.real("partial_rotary_factor", default=default_fraction)


# --- Bamba -----------------------------------------------------------------------------------------------------------


def _bamba(given: Given) -> HybridModelConfig:
    for name in ("mlp_bias", "mamba_proj_bias"):
        given.only(name, False)
    given.only("mamba_conv_bias", True)
    given.only("hidden_act", "silu")
    given.check_step_limits()
    given.only("partial_rotary_factor", 0.5)  # transformers takes 0.5, and another value from rope_parameters only
    layers, indices = given.whole("num_hidden_layers"), given.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < layers for index in indices):
        raise given.error(f"attn_layer_indices is {indices!r}, no list of layers from 0 to {layers - 1}")
    pattern = "".join("*-" if number in indices else "M-" for number in range(layers))
    base, fraction = _rotary(given, default_fraction=0.5)
    heads = given.whole("mamba_n_heads")
    inner = given.whole("mamba_expand", default=2) * given.whole("hidden_size")
    head_dim = inner // max(1, heads) if given.get("mamba_d_head") in (None, "auto") else given.whole("mamba_d_head")
    if heads * head_dim != inner:
        raise given.error(f"mamba_n_heads x mamba_d_head is {heads * head_dim}, mamba_expand x hidden_size is {inner}")
    attention = _attention(given)
    if (turned := given.whole("attn_rotary_emb", default=0)) and turned != fraction * attention["kv_channels"]:
        raise given.error(f"attn_rotary_emb is {turned}; transformers turns {fraction:g} x {attention['kv_channels']}")
    return HybridModelConfig(
        layer_pattern=pattern,
        **attention,
        mamba_num_heads=heads,
        mamba_head_dim=head_dim,
        mamba_state_dim=given.whole("mamba_d_state"),
        mamba_num_groups=given.whole("mamba_n_groups"),
        d_conv=given.whole("mamba_d_conv", default=4),
        activation="swiglu",
        rotary_base=base,
        rotary_fraction=fraction,
        layernorm_epsilon=_epsilon(given, pattern, "rms_norm_eps", default=1e-5),
    )


def _epsilon(given: Given, pattern: str, *names: str, default: float) -> float:
    """Epsilon of the norms; that of the gated norm in megatron's Mamba mixer cannot be set."""
    epsilon = given.real(*names, default=default)
    if "M" in pattern and epsilon != _GATED_NORM_EPSILON:
        raise given.error(f"{names[0]} is {epsilon:g}: the norm in megatron's mixer has {_GATED_NORM_EPSILON:g}")
    return epsilon


_READERS: dict[str, Callable[[Given], HybridModelConfig]] = {
    "nemotron_h": _nemotron_h,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "bamba": _bamba,
}
