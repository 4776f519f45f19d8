"""Kernels around the gated delta rule, of a decode of Mamba2 and of loads, compile for a GPU as they are launched, on a machine without one."""

from __future__ import annotations

import subprocess

import pytest
import torch

from megatron_hybrid_prefix.ops import (
    chunk_outputs,
    convolution,
    delta_gates,
    elementwise,
    filled_rows,
    finite,
    mamba_decode,
    state_passing,
    wrong_entries,
)
from tests.kernels.test_delta_rule_compiles import faults

INT32 = {"sources_ptr", "starts_ptr", "chunk_bounds_ptr", "bounds_ptr", "end_ptr", "wrong_ptr"}
INT64 = {"first_chunks_ptr", "source_slots_ptr", "live_slots_ptr", "chunk_slots_ptr"}
INT64 |= {"slots_ptr", "entries_ptr", "ids_ptr", "sums_ptr", "expected_ptr", "places_ptr"}
KERNELS = {  # module, constants
    "_gates_kernel": (delta_gates, {"MARKS": True, "ROWS": 8, "BLOCK": 32}),
    "_gated_head_norm_kernel": (delta_gates, {"HEADS": 16, "BLOCK": 128}),
    "_convolve_kernel": (convolution, {"TAPS": 4, "BIAS": True, "TOKENS": 32, "CHANNELS": 256}),
    "_write_conv_windows_kernel": (convolution, {"D_CONV": 4, "WIDTH": 4, "BLOCK": 256}),
    "_convolve_tokens_kernel": (mamba_decode, {"TAPS": 4, "WIDTH": 4, "BIAS": True, "AFTER": False, "CHANNELS": 128}),
    "_update_kernel": (
        mamba_decode,
        {"P": 64, "N": 128, "OF_D": 1, "GATE": False, "AFTER": False, "BLOCK_P": 32, "BLOCK_N": 128},
    ),
    "_zero_after_kernel": (filled_rows, {"ROWS": 16, "BLOCK": 1024}),
    "_pass_states_kernel": (
        state_passing,
        {"P": 64, "N": 128, "CHUNK": 128, "BLOCK_P": 64, "BLOCK_N": 64, "BLOCK_K": 64},
    ),
    "_chunk_decays_kernel": (chunk_outputs, {"CHUNK": 128, "HEADS": 8}),
    "_chunk_outputs_kernel": (
        chunk_outputs,
        {"P": 64, "N": 128, "CHUNK": 128, "OF_D": 1, "GATE": False}
        | {"BLOCK_M": 64, "BLOCK_K": 128, "BLOCK_P": 64, "BLOCK_N": 128},
    ),
    "_squared_relu_kernel": (elementwise, {"BLOCK": 2048}),
    "_swiglu_kernel": (elementwise, {"BLOCK": 2048}),
    "_zero_wrong_rows_kernel": (finite, {"HEADS": 8, "BLOCK": 128}),
    "_zero_wrong_kernel": (wrong_entries, {"BLOCK": 2048}),
}


def type_of(name: str) -> str:
    if name in INT32:
        return "*i32"
    if name in INT64:
        return "*i64"
    if name.endswith("_ptr"):
        return "*fp32" if name in ("log_decay_ptr", "dt_ptr", "steps_ptr") else "*bf16"
    return "i64" if name.startswith("stride") else "fp32" if name == "epsilon" else "i32"


def compiled(name, **tiles):
    """For a Hopper GPU, with other tiles where they are given."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, constants = KERNELS[name]
    launch = {option: tiles.pop(option) for option in ("num_warps", "num_stages") if option in tiles}
    constants = constants | tiles
    kernel = getattr(module, name)
    types = {arg: "constexpr" if arg in constants else type_of(arg) for arg in kernel.arg_names}
    divisible = [[["tt.divisibility", 16]]] * len(types)  # as tensors, strides and widths of models are
    attrs = {(at,): value for at, value in enumerate(divisible) if types[kernel.arg_names[at]] != "constexpr"}
    attrs = {at: value for at, value in attrs.items() if types[kernel.arg_names[at[0]]] != "fp32"}
    source = ASTSource(kernel, types, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch).asm["cubin"]


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name):
    assert compiled(name)


@pytest.mark.slow
@pytest.mark.parametrize(("headdim", "d_state"), [(16, 32), (16, 64), (16, 128), (32, 64), (32, 128), (64, 128)])
def test_outputs_of_small_heads_are_without_the_fault_of_the_gated_delta_rule(headdim, d_state, tmp_path):
    """Their tensor cores read memory by what another kernel had left in a register: bits depended on what else ran."""
    tiles = chunk_outputs._tiles(torch.bfloat16, headdim, d_state, 128)
    (tmp_path / "kernel.cubin").write_bytes(compiled("_chunk_outputs_kernel", P=headdim, N=d_state, **tiles))
    command = [pytest.importorskip("triton").knobs.nvidia.nvdisasm.path, "-c", tmp_path / "kernel.cubin"]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "HGMMA" in sass and faults(sass) == []
