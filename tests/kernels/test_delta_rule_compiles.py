"""The kernels of the gated delta rule compile for a GPU as they are launched, on a machine without one."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.lab import capacity
from megatron_hybrid_prefix.ops import delta_rule_triton
from megatron_hybrid_prefix.ops.delta_rule_triton import CHUNK, check_heads, launch_options

HOPPER_SHARED_BYTES = 227 * 1024  # of a thread block
FLOAT32 = {"log_decay_ptr", "cumulative_ptr", "totals_ptr", "states_ptr", "after_ptr"}
INT64 = {"first_chunks_ptr", "source_slots_ptr", "live_slots_ptr", "chunk_slots_ptr", "slots_ptr"}
KERNELS = {
    "_normalise_kernel": "normalise",
    "_solve_kernel": "solve",
    "_write_kernel": "write",
    "_pass_kernel": "pass_on",
    "_output_kernel": "output",
}
SIZES = [
    *((name, torch.bfloat16, 128) for name in KERNELS),
    ("_pass_kernel", torch.bfloat16, 256),
    ("_pass_kernel", torch.float32, 256),
]


def type_of(name: str, inputs: str) -> str:
    if name in INT64:
        return "*i64"
    if name == "bounds_ptr":
        return "*i32"
    if name.endswith("_ptr"):
        return "*fp32" if name in FLOAT32 else f"*{inputs}"
    if name.startswith("stride"):
        return "i64"
    return "fp32" if name in ("scale", "epsilon") else "i32"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "size"), SIZES)
def test_compiles_within_shared_memory(name, dtype, size):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(delta_rule_triton, name)
    options = dict(getattr(launch_options(dtype, size, size, normalise=True), KERNELS[name]))
    launch = {key: options.pop(key) for key in ("num_warps", "num_stages") if key in options}
    inputs = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    types = {arg: "constexpr" if arg in options else type_of(arg, inputs) for arg in kernel.arg_names}
    source = ASTSource(kernel, types, constexprs=options)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= HOPPER_SHARED_BYTES


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
