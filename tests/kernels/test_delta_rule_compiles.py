"""The kernels of the gated delta rule compile for a GPU, on a machine without one."""

from __future__ import annotations

import pytest

from megatron_hybrid_prefix.ops import delta_rule_triton
from megatron_hybrid_prefix.ops.delta_rule_triton import CHUNK, PART

pytestmark = pytest.mark.slow

BLOCKS = {"BLOCK_K": 128, "BLOCK_V": 32}
CONSTANTS = {
    "_normalise_kernel": {"NORMALISE": True, "ROWS": PART, "BLOCK": 128},
    "_solve_kernel": {"BLOCK_K": 128, "CHUNK": CHUNK, "PART": PART},
    "_write_kernel": BLOCKS | {"CHUNK": CHUNK},
    "_pass_kernel": BLOCKS | {"CHUNK": CHUNK},
    "_output_kernel": BLOCKS | {"CHUNK": CHUNK},
    "_update_kernel": BLOCKS | {"NORMALISE": True, "AFTER": True},
}
FLOAT32 = {"log_decay_ptr", "cumulative_ptr", "states_ptr", "after_ptr"}
INT64 = {"first_chunks_ptr", "source_slots_ptr", "live_slots_ptr", "chunk_slots_ptr", "slots_ptr"}


def type_of(name: str) -> str:
    if name in INT64:
        return "*i64"
    if name == "bounds_ptr":
        return "*i32"
    if name.endswith("_ptr"):
        return "*fp32" if name in FLOAT32 else "*bf16"
    if name.startswith("stride"):
        return "i64"
    return "fp32" if name in ("scale", "epsilon") else "i32"


@pytest.mark.parametrize("name", CONSTANTS)
def test_compiles_for_bfloat16(name):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(delta_rule_triton, name)
    constants = dict(CONSTANTS[name])
    if "PRECISION" in kernel.arg_names:
        constants["PRECISION"] = "tf32"
    types = {arg: "constexpr" if arg in constants else type_of(arg) for arg in kernel.arg_names}
    source = ASTSource(kernel, types, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
