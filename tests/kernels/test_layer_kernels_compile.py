"""Kernels of layers, of attention and of loads compile for a GPU as they are launched, on a machine without one."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid_prefix.lab import capacity
from megatron_hybrid_prefix.layers.components import ring_entries
from megatron_hybrid_prefix.ops import (
    convolution,
    delta_gates,
    delta_rule_triton,
    elementwise,
    gated_norm,
    mamba_decode,
    mamba_scan,
    residual_norm,
    state_codes,
    wrong_entries,
)
from megatron_hybrid_prefix.ops.invariant import linear_triton
from megatron_hybrid_prefix.ops.invariant.linear_triton import tile_for
from megatron_hybrid_prefix.platform.kernels import attention_cuda
from tests.kernels.compiled import compiled, faults, spills

H200 = 132  # multiprocessors
INT32 = {"sources_ptr", "starts_ptr", "chunk_bounds_ptr", "bounds_ptr", "end_ptr", "wrong_ptr"}
INT32 |= {"cu_seqlens_q_ptr", "lengths_ptr", "block_table_ptr", "positions_ptr", "origins_ptr", "ends_ptr"}
INT64 = {"first_chunks_ptr", "source_slots_ptr", "live_slots_ptr", "chunk_slots_ptr", "state_slots_ptr"}
INT64 |= {
    "added_ptr",
    "rings_ptr",
    "kept_ptr",
    "slots_ptr",
    "entries_ptr",
    "ids_ptr",
    "sums_ptr",
    "expected_ptr",
    "places_ptr",
}
FLOAT32 = {"log_decay_ptr", "decays_ptr", "dt_ptr", "steps_ptr"}
OUTPUTS = {"P": 64, "N": 128, "CHUNK": 128, "OF_D": 1, "GATE": False, "OPEN": False}
OUTPUTS |= {"BLOCK_M": 64, "BLOCK_K": 128, "BLOCK_P": 64, "BLOCK_N": 128}
KERNELS = {  # module, constants
    "_gates_kernel": (delta_gates, {"MARKS": True, "ROWS": 8, "BLOCK": 32, "WIDTH": 128}),
    "_gated_norm_kernel": (
        gated_norm,
        {"GROUP": 128, "SHARED": True, "GATE": True, "NORM_FIRST": True, "GROUPS": 16, "BLOCK": 128},
    ),
    "_convolve_kernel": (convolution, {"TAPS": 4, "BIAS": True, "TOKENS": 32, "CHANNELS": 256}),
    "_write_conv_windows_kernel": (convolution, {"D_CONV": 4, "WIDTH": 4, "BLOCK": 256}),
    "_convolve_tokens_kernel": (mamba_decode, {"TAPS": 4, "BIAS": True, "CHANNELS": 128}),
    "_zero_after_kernel": (mamba_scan, {"ROWS": 16, "BLOCK": 1024}),
    "_pass_states_kernel": (
        mamba_scan,
        {"P": 64, "N": 128, "CHUNK": 128, "BLOCK_P": 64, "BLOCK_N": 64, "BLOCK_K": 64, "OPEN": False, "TOGETHER": 1},
    ),
    "_chunk_decays_kernel": (mamba_scan, {"CHUNK": 128, "HEADS": 8, "OPEN": False, "COLUMNS": 512}),
    "_chunk_outputs_kernel": (mamba_scan, OUTPUTS),
    "_norm_of_sum_kernel": (residual_norm, {"WIDTH": 4096, "PARTS": 8}),
    "_squared_relu_kernel": (elementwise, {"BLOCK": 2048}),
    "_swiglu_kernel": (elementwise, {"BLOCK": 2048}),
    "_zero_wrong_rows_kernel": (elementwise, {"BOTH": True, "HEADS": 8, "BLOCK": 128}),
    "_zero_wrong_kernel": (wrong_entries, {"BLOCK": 2048}),
}
VALUES = {96: 192}  # channels of values, where they are not those of keys
DELTA_RULE = {"_prepare_kernel": "prepare", "_pass_kernel": "pass_on"}


def type_of(name: str, inputs: str = "bf16") -> str:
    if name in INT32:
        return "*i32"
    if name in INT64:
        return "*i64"
    if name.endswith("_ptr"):
        return "*fp32" if name in FLOAT32 else f"*{inputs}"
    return "i64" if name.startswith("stride") else "fp32" if name in ("epsilon", "scale", "multiplier") else "i32"


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, tmp_path):
    module, constants = KERNELS[name]
    launch = {"num_warps": 4, "num_stages": 1} if name == "_chunk_outputs_kernel" else {}
    assert compiled(getattr(module, name), type_of, constants, tmp_path, **launch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_chunk_decays_kernel", "_pass_states_kernel", "_chunk_outputs_kernel"])
def test_scan_of_open_chunks(name, tmp_path):
    """As a decode launches it: registers suffice."""
    constants = KERNELS[name][1] | {"OPEN": True}
    constants |= {"_chunk_outputs_kernel": mamba_scan._TILE, "_pass_states_kernel": {"TOGETHER": 32}}.get(name, {})
    types = {
        "states_ptr": "*fp32",
        "kept_states_ptr": "*fp32",
        "before_ptr": "*fp32",
        "sources_ptr": "*i64",
        "A_ptr": "*fp32",
        "dt_ptr": "*bf16",
    }
    types |= {"dt_ptr": "*fp32"} if name == "_pass_states_kernel" else {}
    options = {key: constants.pop(key) for key in ("num_stages",) if key in constants}
    sass = compiled(
        getattr(mamba_scan, name), lambda arg: types.get(arg) or type_of(arg), constants, tmp_path, **options
    )
    assert not spills(sass) and ("HMMA" in sass) == (name == "_chunk_outputs_kernel")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "size", "is_open"),
    [
        *((name, torch.bfloat16, size, False) for name in DELTA_RULE for size in (16, 64, 80, 96, 128)),
        *((name, torch.bfloat16, size, True) for name in DELTA_RULE for size in (16, 64, 80, 96, 128)),
        *(
            ("_pass_kernel", dtype, 256, opened)
            for dtype in (torch.bfloat16, torch.float32)
            for opened in (False, True)
        ),
    ],
)
def test_delta_rule(name, dtype, size, is_open, tmp_path):
    chosen = delta_rule_triton.launch_options(dtype, size, VALUES.get(size, size), normalise=True, opened=is_open)
    launch = dict(getattr(chosen, DELTA_RULE[name]))
    options = {key: launch.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in launch}
    inputs = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]

    def kind(name: str) -> str:
        return (
            "*fp32" if name in ("factors_ptr", "decays_ptr", "states_ptr", "kept_states_ptr") else type_of(name, inputs)
        )

    assert compiled(getattr(delta_rule_triton, name), kind, launch, tmp_path, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "tokens", "R", "P", "N"),
    [
        *((states, tokens, 16, 64, 128) for states in ("bf16", "fp32") for tokens in (0, 1, 4)),
        *(("bf16", 1, *sizes) for sizes in ((64, 64, 128), (8, 8, 8), (16, 40, 96), (16, 16, 256))),
        *(("bf16", 4, 16, *sizes) for sizes in ((16, 16), (40, 96), (128, 16))),
    ],
)
def test_update_of_rings(states, tokens, R, P, N, tmp_path):
    """The registers suffice."""
    entries = ring_entries(R, max(1, tokens))
    constants = {"REPEAT": 16, "ENTRIES": entries, "OF_D": 1, "GATE": False}
    constants |= mamba_decode.tile_of(P, N, 2 if states == "bf16" else 4, entries - tokens, tokens)
    options = {key: constants.pop(key) for key in ("num_warps", "maxnreg")}
    constants["CORES"] = True
    types = {"states_ptr": f"*{states}", "A_ptr": "*fp32", "dt_ptr": "*bf16"}

    def kind(name: str) -> str:
        return types.get(name) or type_of(name)

    assert not spills(compiled(mamba_decode._update_kernel, kind, constants, tmp_path, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "tokens", "R", "size"),
    [
        *((states, tokens, 16, 128) for states in ("bf16", "fp32") for tokens in (0, 1, 4)),
        *(("bf16", 1, 16, size) for size in (16, 48, 64, 80, 256)),
        *(("fp32", tokens, 16, 96) for tokens in (0, 1)),
        *(("bf16", 1, 64, 128), ("fp32", 3, 22, 128)),  # the latter: three pairs a token
    ],
)
def test_update_of_the_delta_rule(states, tokens, R, size, tmp_path):
    """The registers suffice."""
    itemsize, entries = 2 if states == "bf16" else 4, ring_entries(R, max(1, tokens))
    constants = delta_rule_triton.update_tile(size, VALUES.get(size, size), itemsize, entries, tokens)
    constants |= {"NORMALISE": True, "CORES": True, "REPEAT": 4}
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in constants}
    types = {"states_ptr": f"*{states}", "written_ptr": f"*{states}"}
    kernel = delta_rule_triton._update_kernel
    assert not spills(compiled(kernel, lambda name: types.get(name) or type_of(name), constants, tmp_path, **options))


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (128, 128), (96, 192), (128, 256)])
def test_codes_of_states(rows, columns, keep, tmp_path):
    """The registers suffice."""
    constants, kernel = state_codes.tile_of(rows, columns) | {"KEEP": keep}, state_codes._code_slots_kernel
    types, warps = {"states_ptr": "*fp32", "values_ptr": "*i8"}, constants.pop("num_warps")
    assert not spills(
        compiled(kernel, lambda name: types.get(name) or type_of(name), constants, tmp_path, num_warps=warps)
    )


@pytest.mark.parametrize(
    ("dtype", "key_size", "value_size", "message"),
    [
        (torch.bfloat16, 600, 64, "heads of 600 key channels in torch.bfloat16: at most 512 are supported"),
        (torch.bfloat16, 16, 40, "heads of 16 key and 40 value channels in torch.bfloat16: use multiples of 16"),
        (torch.float16, 12, 16, "heads of 12 key and 16 value channels in torch.float16: use multiples of 16"),
    ],
)
def test_heads_that_the_delta_rule_does_not_support_are_refused_in_one_line(dtype, key_size, value_size, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        delta_rule_triton.check_heads(dtype, key_size, value_size)
    for supported in ((torch.bfloat16, 128, 256), (torch.float32, 12, 10)):
        delta_rule_triton.check_heads(*supported)


def test_plan_has_the_chunk_of_the_delta_rule():
    assert capacity._DELTA_NET_CHUNK == delta_rule_triton.CHUNK  # which may not import torch


@pytest.mark.slow
@pytest.mark.parametrize(("headdim", "d_state"), [(16, 32), (16, 64), (16, 128), (32, 64), (32, 128), (64, 128)])
def test_outputs_of_small_heads_are_without_the_fault_of_the_gated_delta_rule(headdim, d_state, tmp_path):
    """Their tensor cores read memory by what another kernel had left in a register: bits depended on what else ran."""
    tiles = mamba_scan._tiles(torch.bfloat16, headdim, d_state, 128)
    launch = {option: tiles.pop(option) for option in ("num_warps", "num_stages")}
    sizes = OUTPUTS | {"P": headdim, "N": d_state} | tiles
    assert "HGMMA" in compiled(mamba_scan._chunk_outputs_kernel, type_of, sizes, tmp_path, **launch)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize(("dtype", "queries"), [(torch.bfloat16, 1), (torch.bfloat16, 300), (torch.float32, 300)])
def test_attention(dtype, queries, dim, tmp_path):
    tiles = attention_cuda.tiles_of(dtype, dim, queries)
    launch = {option: tiles.pop(option) for option in ("num_warps", "num_stages")}
    inputs = "bf16" if dtype == torch.bfloat16 else "fp32"
    kernel = attention_cuda._paged_attention_kernel
    sass = compiled(kernel, lambda name: type_of(name, inputs), tiles, tmp_path, **launch)
    assert dtype == torch.float32 or ("HGMMA" if queries > 16 else "HMMA") in sass
    assert not spills(sass) or (dim, queries) == (256, 300)  # a few


def tiles():
    """Every tile that an invariant product may get, with the types of its inputs and outputs."""
    few = {tile_for(1, columns, torch.bfloat16, H200) for columns in (4096, 32768)}
    most = {
        (tile, "bf16", out) for tile in few | {tile for tile, _ in linear_triton._TILES} for out in ("bf16", "fp32")
    }
    return sorted(most | {(tile_for(1, 1, torch.float32, H200), "fp32", "fp32")}, key=str)


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "dtype", "out"), tiles(), ids=str)
def test_invariant_product(tile, dtype, out, tmp_path):
    constants = {
        **{"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUP": tile.group},
        **{"PARTS": tile.parts, "PERSISTENT": tile.persistent},
    }
    blocks = {
        "x": (dtype, tile.rows, tile.depth),
        "weight": (dtype, tile.columns, tile.depth),
        "out": (out, tile.rows, tile.columns // tile.parts),
    }
    types = {name: f"tensordesc<{of}[{rows},{columns}]>" for name, (of, rows, columns) in blocks.items()}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    sass = compiled(linear_triton._linear_kernel, lambda arg: types.get(arg, "i32"), constants, tmp_path, **options)
    assert not spills(sass)
    if dtype == "bf16":
        assert ("HGMMA" if tile.rows >= 64 else "HMMA") in sass


@pytest.mark.parametrize(("rows", "columns"), [(1, 4096), (16, 32768), (64, 4096), (128, 18560), (8192, 21504)])
def test_a_tile_is_no_larger_than_its_output_needs(rows, columns):
    """Larger ones waste a decode's time, smaller ones a prefill's."""
    tile = tile_for(rows, columns, torch.bfloat16, H200)
    assert tile.rows < 2 * max(rows, linear_triton._FEW_ROWS)
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    assert tiles >= H200 / 2


def test_the_fault_is_seen():
    """As ptxas 12.8 compiled heads of 40 x 72 channels: UR4 holds where shared memory begins."""
    right = ["UMOV UR4, URZ", "UIADD3 UR10, UP1, UR10, 0x40, URZ", "UIADD3.X UR11, UR4, -0x7fffffe0, URZ, UP1, !UPT"]
    wrong = ["UMOV UR4, URZ", "ULEA UR4, UR8, UR4, 0x18", *right[1:]]
    for lines, count in ((right, 0), (wrong, 1)):
        assert len(faults("\n".join(f"        /*0010*/                   {line} ;" for line in lines))) == count
