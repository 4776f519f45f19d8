"""`naming_flags`: errors of a script that has flags of ``megatron.training`` name the flag, not the field that it set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Arguments whose names do not follow from the field of a config that they set.
ARGUMENTS = {
    "block_size_tokens": "inference_dynamic_batching_block_size",
    "mamba_gb": "inference_dynamic_batching_prefix_caching_mamba_gb",
    "static_kv_memory_pointers": "rl_persist_cuda_graphs",
}
PREFIXES = ("inference_dynamic_batching_", "inference_", "rl_", "")


@contextmanager
def naming_flags() -> Iterator[None]:
    """A context in which the one-line error of a field names the flag that set it, if `megatron.training` has parsed flags.

    Raises:
        ValueError: That error.
    """
    try:
        yield
    except ValueError as error:
        field, _, rest = str(error).partition("=")
        training = sys.modules.get("megatron.training.global_vars")
        try:
            args = None if training is None else training.get_args()
        except AssertionError:  # the script has parsed none
            args = None
        names = [ARGUMENTS.get(field, ""), *(prefix + field for prefix in PREFIXES)]
        flag = next((name for name in names if name and hasattr(args, name)), None)
        if flag is None:
            raise
        raise ValueError(f"--{flag.replace('_', '-')}={rest}") from None
