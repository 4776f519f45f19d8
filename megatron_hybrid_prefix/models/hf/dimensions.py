"""`dimensions_of`: the values of a Hugging Face ``config.json`` as a `HybridModelConfig`; `config_json_of`: the other way round.

Which family a file is of says its ``model_type``; `family_of` finds one for dimensions. No torch, no megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

from megatron_hybrid_prefix.errors import shown
from megatron_hybrid_prefix.models.config import HybridModelConfig

# These register their families.
from megatron_hybrid_prefix.models.hf import bamba, granite, nemotron_h, olmo_hybrid, qwen3_5, qwen3_next  # noqa: F401
from megatron_hybrid_prefix.models.hf.family import FAMILIES, Family
from megatron_hybrid_prefix.models.hf.given import Given
from megatron_hybrid_prefix.models.hf.stored import blocks_of

WHY_REFUSED = {
    "falcon_h1": "megatron has no layer of attention and Mamba2 side by side",
    "mamba falcon_mamba jamba zamba": "its recurrent layers are Mamba1",
    "mamba2": "it has no attention layer, and megatron's dynamic engine needs one",
    "zamba2": "its attention layers share weights",
    "lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl": "its recurrent layers are short convolutions",
    "lara_mini": "its attention layers have sliding windows",
    "kimi_linear bailing_hybrid": "its recurrent layers are Kimi Delta Attention (decay by channel), its attention is latent",
    "glm5_next": "its recurrent layers are Kimi Delta Attention (decay by channel), its attention is indexed",
    "qwen4_exp": "its residuals are several streams (hyper-connections), its attention is indexed",
    "minimax": "its recurrent layers are lightning attention",
    "recurrent_gemma": "its recurrent layers are RG-LRU",
    "rwkv": "its recurrent layers are those of RWKV",
    "xlstm": "its recurrent layers are mLSTM",
    "deepseek_v4": "its attention is over compressed windows, and indexed",
    "zaya": "its attention convolves queries and keys, and delays values (CCA)",
    "inkling inkling_mm_model inkling2 inkling2_loop": "its attention layers have short convolutions",
    "nemotron_h_omni nemo_speechlm": "it is Nemotron-H with images or sound; only the language model by itself is read",
    "minicpmv4_6 minicpmv4_7 minicpm_ocr": "it is Qwen3.5 with other images; only the language model by itself is read",
    "jev": "it is a decision head on a language model; it writes no text",
}
"""By names in ``config.json``: what a hybrid model of transformers has that is missing here. docs/models.md has the same table."""

_REFUSED = {model_type: why for names, why in WHY_REFUSED.items() for model_type in names.split()}
_DTYPES = ("float32", "bfloat16")
_NOT_COMPARED = ("chunk_size", "dtype", "float32_norms", "state_dtype", "long_memory")  # how it is computed or made
_NAMED = 3  # differences that an error names
# Sizes that no family with such layers refuses: with them, a family that refuses a model says what else differs.
_USUAL: dict[str, Any] = {
    "hidden_size": 64,
    "layernorm_epsilon": 1e-5,
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_state_dim": 16, "mamba_num_groups": 1},
    **{"gdn_num_key_heads": 4, "gdn_num_value_heads": 4, "gdn_key_head_dim": 16, "gdn_value_head_dim": 16},
    **{"moe_shared_expert_intermediate_size": 64, "moe_router_groups": 0, "moe_router_topk_groups": 0},
}
_PREFIXES = {"mamba_": "M", "gdn_": "G", "moe_": "E", "num_moe_": "E", "ffn_": "-"}


def dimensions_of(data: Mapping[str, Any], name: str, *, dtype: str = "bfloat16") -> HybridModelConfig:
    """Dimensions of the model that a ``config.json`` describes.

    Args:
        data: The file's JSON object.
        name: What errors call the file.
        dtype: The parameters' dtype if the file does not say it.

    Raises:
        ValueError: The model is of no family here, needs what megatron's layers lack, or a value is missing or wrong.
        PluginError: A plugin cannot be imported.
    """
    model_type, known = data.get("model_type"), FAMILIES.names()
    if not isinstance(model_type, str) or model_type not in known:
        if model_type is None:
            raise ValueError(f"{name}: model_type is missing; families: {', '.join(known)}")
        other = f"it is none of {', '.join(known)}; register_family adds one (docs/models.md, Add a family)"
        why = _REFUSED.get(str(model_type).removesuffix("_text"), other)
        raise ValueError(f"{name}: model_type {shown(model_type)} is not supported: {why}")
    given = Given.of_text(data, name)
    blocks_of(given)  # which refuses weights that are quantised in another way than fp8
    try:
        config = FAMILIES[model_type].dimensions(given)
        return replace(
            config,
            dtype=_dtype(given, "dtype", "torch_dtype") or dtype,
            state_dtype=_dtype(given, "mamba_ssm_cache_dtype", "mamba_ssm_dtype"),
            # transformers' class with images reads the outer value, its class without them the inner one.
            tie_embeddings=any(part.flag("tie_word_embeddings", False) for part in (Given(data, name), given)),
        )
    except ValueError as error:
        if str(error).startswith(f"{name}: "):
            raise
        raise given.error(str(error)) from None


def _dtype(given: Given, *names: str) -> str | None:
    value = given.get(*names)
    if value is None or value == "auto":
        return None
    value = str(value).removeprefix("torch.")
    if value not in _DTYPES:
        raise given.error(f"{names[0]} is {shown(value)}, none of {', '.join(_DTYPES)}")
    return value


def config_json_of(family: Family, config: HybridModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model, `dimensions_of` the other way round."""
    config = _explicit(config)
    data: dict[str, Any] = {
        "model_type": family.name,
        "architectures": [family.architecture],
        "dtype": config.dtype,
        "tie_word_embeddings": config.tie_embeddings,
        **family.config_json(config),
    }
    if config.state_dtype is not None:
        data["mamba_ssm_cache_dtype"] = config.state_dtype
    return data


def family_of(config: HybridModelConfig, model_type: str | None = None) -> Family:
    """The family with this name, or the first that has such dimensions: its ``config.json`` can say them.

    Raises:
        ValueError: There is none; the message says what the nearest family has instead.
        PluginError: A plugin cannot be imported.
    """
    mismatches = []
    asked = FAMILIES.names() if model_type is None else [model_type]
    for family in dict.fromkeys(FAMILIES[name] for name in asked):
        count, what = _mismatch(family, config)
        if not count:
            return family
        mismatches.append((count, what))
    _, what = min(mismatches, key=lambda found: found[0])
    raise ValueError(what if model_type is not None else f"no family has these dimensions; the nearest: {what}")


def _mismatch(family: Family, config: HybridModelConfig) -> tuple[int, str]:
    """How many of these dimensions no model of the family has, and the first of them in one line."""
    try:
        found = _differences(family, config)
    except ValueError as error:
        try:
            others = len(_differences(family, replace(config, **_USUAL)))
        except ValueError:
            others = len(fields(config))
        return 1 + others, str(error)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return len(found), f"{family.name} has {', '.join(found[:_NAMED])}{more}"


def _differences(family: Family, config: HybridModelConfig) -> list[str]:
    """The dimensions that do not come back. Raises ValueError if the family refuses one."""
    read = dimensions_of(config_json_of(family, config), family.name)
    found, wanted = _compared(read), _compared(config)
    pairs = {name: (found.get(name), wanted.get(name)) for name in (wanted | found)}
    pairs = {name: (theirs, ours) for name, (theirs, ours) in pairs.items() if theirs != ours}
    if pairs.pop("layer_pattern", None) is not None:  # it may be long: the first layer that differs
        number = next(n for n, (a, b) in enumerate(zip_longest(read.layers, config.layers)) if a != b)
        pairs = {f"layers[{number}]": (read.layers[number : number + 1], config.layers[number : number + 1])} | pairs
    return [f"{name}={shown(theirs)} (not {shown(ours)})" for name, (theirs, ours) in pairs.items()]


def _compared(config: HybridModelConfig) -> dict[str, Any]:
    """Dimensions of the layers that there are."""
    absent = tuple(prefix for prefix, symbol in _PREFIXES.items() if symbol not in config.symbols)
    values = {field.name: getattr(_explicit(config), field.name) for field in fields(config)}
    return {name: value for name, value in values.items() if name not in _NOT_COMPARED and not name.startswith(absent)}


def _explicit(config: HybridModelConfig) -> HybridModelConfig:
    """The same model; what was left to others of its fields is said, and nothing of stages."""
    return replace(
        config,
        layer_pattern=config.layers,
        moe_ffn_hidden_size=config.expert_ffn_hidden_size,
        attention_multiplier=config.attention_multiplier or config.kv_channels**-0.5,
    )
