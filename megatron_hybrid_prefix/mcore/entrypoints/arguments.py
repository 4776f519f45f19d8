"""The cache as flags of ``megatron.training``: `add_hybrid_prefix_args`, `hybrid_prefix_config_from_args`.

Megatron's flags switch the cache on and set its budget. Every other field of `HybridPrefixConfig` has a flag
``--hybrid-prefix-...``, made from the field and its help. Errors name the flag, not the field that it set.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from typing import Any, get_type_hints

from megatron_hybrid_prefix.config import HybridPrefixConfig
from megatron_hybrid_prefix.support.config_options import NONE, add_option, value_of

# Megatron's flags; added if the parser lacks them (an older release, or another parser).
SWITCH = "--inference-dynamic-batching-prefix-caching"
BUDGET = "--inference-dynamic-batching-prefix-caching-mamba-gb"
SWITCH_DEST = "inference_dynamic_batching_enable_prefix_caching"
BUDGET_DEST = "inference_dynamic_batching_prefix_caching_mamba_gb"
PREFIX = "hybrid_prefix_"

# Arguments of `megatron.training` whose names do not follow from the field of a config that they set.
_ARGUMENTS = {
    "block_size_tokens": "inference_dynamic_batching_block_size",
    "mamba_gb": BUDGET_DEST,
    "static_kv_memory_pointers": "rl_persist_cuda_graphs",
}
_PREFIXES = ("inference_dynamic_batching_", "inference_", "rl_", "")


def add_hybrid_prefix_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the cache's flags, as an ``extra_args_provider`` of ``megatron.training``. A second call does nothing.

    Args:
        parser: Megatron's parser, or any other.

    Returns:
        ``parser``.

    Raises:
        PluginError: A plugin cannot be imported.
    """
    known = parser._option_string_actions
    if flag_of(own_fields()[0].name) in known:
        return parser
    group = parser.add_argument_group("hybrid prefix cache", f"switched on with {SWITCH}; {NONE!r} stands for None")
    if SWITCH not in known:
        group.add_argument(
            SWITCH,
            dest=SWITCH_DEST,
            action=argparse.BooleanOptionalAction,
            default=False,
            help="cache prefixes of prompts",
        )
    if BUDGET not in known:
        group.add_argument(
            BUDGET, dest=BUDGET_DEST, type=float, default=None, help="most GiB of cached states of recurrent layers"
        )
    kinds = get_type_hints(HybridPrefixConfig)
    for field in own_fields():
        add_option(group, field, kinds[field.name], flag_of(field.name), PREFIX + field.name)
    return parser


def hybrid_prefix_config_from_args(args: argparse.Namespace) -> HybridPrefixConfig | None:
    """The cache's settings from parsed arguments; None: the cache is off.

    The memory is ``--hybrid-prefix-cache-gb``, or megatron's ``--inference-dynamic-batching-buffer-size-gb`` and
    ``...-mamba-gb`` together; the latter also caps the cached states. Chunked prefill and blocks stay as in the arguments.

    Raises:
        ValueError: Flags contradict each other, or a value is out of range. One line names the flag.
    """
    given = {
        field.name: value for field in own_fields() if (value := getattr(args, PREFIX + field.name, None)) is not None
    }
    budget = getattr(args, BUDGET_DEST, None)
    if not getattr(args, SWITCH_DEST, False):
        settings = [flag_of(name) for name in given] + [BUDGET] * (budget is not None)
        if settings:
            raise ValueError(f"{settings[0]} has no effect without {SWITCH}")
        return None
    _check_upstream(args, given)
    given = {name: value_of(value) for name, value in given.items()}
    flags = {name: flag_of(name) for name in given} | {"mamba_gb": BUDGET}
    with naming_flags(flags.get):
        return HybridPrefixConfig(mamba_gb=budget, **given)


def own_fields() -> list[Field[Any]]:
    """Fields of `HybridPrefixConfig` with a ``--hybrid-prefix-...`` flag."""
    return [field for field in fields(HybridPrefixConfig) if field.name != "mamba_gb"]


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--{PREFIX}{name}".replace("_", "-")


def parsed_flag_of(name: str) -> str | None:
    """The flag of ``megatron.training`` that sets a field of a config; None: there is none, or the script has parsed no flags."""
    training = sys.modules.get("megatron.training.global_vars")
    try:
        args = None if training is None else training.get_args()
    except AssertionError:  # none are parsed
        args = None
    names = [_ARGUMENTS.get(name, ""), *(prefix + name for prefix in _PREFIXES)]
    found = next((each for each in names if each and hasattr(args, each)), None)
    return found and f"--{found.replace('_', '-')}"


@contextmanager
def naming_flags(flag_of: Callable[[str], str | None] = parsed_flag_of) -> Iterator[None]:
    """A context in which the one-line error of a field names the flag that set it, if there is one.

    Raises:
        ValueError: That error.
    """
    try:
        yield
    except ValueError as error:
        field, _, rest = str(error).partition("=")
        if (flag := flag_of(field)) is None:
            raise
        raise ValueError(f"{flag}={rest}") from None


def _check_upstream(args: argparse.Namespace, given: dict[str, Any]) -> None:
    """Reject contradicting flags of megatron. (A flag at its default looks like one that is not given.)"""
    if getattr(args, "use_legacy_static_engine", False):
        raise ValueError(f"{SWITCH} needs the dynamic engine: leave out --use-legacy-static-engine")
    policy = getattr(args, "inference_dynamic_batching_prefix_caching_eviction_policy", None)
    own = given.get("eviction_policy", "lru")
    if policy == "lru" and own != "lru":
        flag = "--inference-dynamic-batching-prefix-caching-eviction-policy"
        raise ValueError(f"{flag_of('eviction_policy')} {own} contradicts {flag} {policy}")
    interval = given.get("retention_interval_tokens")
    block_tokens = getattr(args, "inference_dynamic_batching_block_size", None)
    if isinstance(interval, int) and block_tokens and interval % block_tokens:
        flag = "--inference-dynamic-batching-block-size"
        raise ValueError(
            f"{flag_of('retention_interval_tokens')} {interval} is not a multiple of {flag} {block_tokens}"
        )
    dtype = str(getattr(args, "mamba_inference_ssm_states_dtype", None)).removeprefix("torch.")
    dtype = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.get(dtype, dtype)
    wanted = given.get("state_dtype")
    if wanted not in (None, NONE) and dtype not in ("None", "bfloat16", wanted):  # bfloat16: megatron's default
        flag = "--mamba-inference-ssm-states-dtype"
        raise ValueError(f"{flag_of('state_dtype')} {wanted} contradicts {flag} {dtype}")
