"""The kernels of the gated delta rule compile for a GPU as they are launched, on a machine without one."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.lab import capacity
from megatron_hybrid_prefix.ops import delta_rule_triton
from megatron_hybrid_prefix.ops.delta_rule_triton import CHUNK, check_heads, launch_options
from tests.kernels.compiled import compiled

FLOAT32 = {"log_decay_ptr", "factors_ptr", "decays_ptr", "states_ptr", "after_ptr"}
INT64 = {"first_chunks_ptr", "source_slots_ptr", "live_slots_ptr", "chunk_slots_ptr", "slots_ptr"}
KERNELS = {"_prepare_kernel": "prepare", "_pass_kernel": "pass_on"}
SIZES = [
    *((name, torch.bfloat16, size) for name in KERNELS for size in (16, 64, 80, 128)),
    ("_pass_kernel", torch.bfloat16, 256),
    ("_pass_kernel", torch.float32, 256),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "size"), SIZES)
def test_compiles_within_shared_memory_and_without_the_fault(name, dtype, size, tmp_path):
    options = dict(getattr(launch_options(dtype, size, size, normalise=True), KERNELS[name]))
    launch = {key: options.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in options}
    inputs = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]

    def type_of(name: str) -> str:
        if name in INT64:
            return "*i64"
        if name == "bounds_ptr":
            return "*i32"
        if name.endswith("_ptr"):
            return "*fp32" if name in FLOAT32 else inputs
        return "i64" if name.startswith("stride") else "fp32" if name in ("scale", "epsilon") else "i32"

    assert compiled(getattr(delta_rule_triton, name), type_of, options, tmp_path, **launch)


@pytest.mark.parametrize(
    ("dtype", "key_size", "value_size", "message"),
    [
        (torch.bfloat16, 600, 64, "heads of 600 key channels in torch.bfloat16: at most 512 are supported"),
        (torch.bfloat16, 16, 40, "heads of 16 key and 40 value channels in torch.bfloat16: use multiples of 16"),
        (torch.float16, 12, 16, "heads of 12 key and 16 value channels in torch.float16: use multiples of 16"),
    ],
)
def test_heads_that_the_kernels_do_not_support_are_refused_in_one_line(dtype, key_size, value_size, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_heads(dtype, key_size, value_size)


@pytest.mark.parametrize(("dtype", "key_size", "value_size"), [(torch.bfloat16, 128, 256), (torch.float32, 12, 10)])
def test_heads_that_the_kernels_support(dtype, key_size, value_size):
    check_heads(dtype, key_size, value_size)


def test_plan_has_the_chunk_of_the_kernels():
    assert capacity._DELTA_NET_CHUNK == CHUNK  # which may not import torch
