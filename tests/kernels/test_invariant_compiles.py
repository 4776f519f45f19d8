"""The invariant product compiles for a GPU with each of its tiles, within its memory and without the fault of `test_delta_rule_compiles`."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from megatron_hybrid_prefix.ops.invariant import linear_triton
from megatron_hybrid_prefix.ops.invariant.linear_triton import tile_for
from tests.kernels.test_delta_rule_compiles import HOPPER_SHARED_BYTES, faults

H200 = 132  # multiprocessors
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def tiles():
    """Every tile that a product may get, with its type."""
    few = {(tile_for(1, columns, torch.bfloat16, H200), torch.bfloat16) for columns in (4096, 32768)}
    most = {(tile, torch.bfloat16) for tile, _ in linear_triton._TILES}
    return sorted(few | most | {(tile_for(1, 1, torch.float32, H200), torch.float32)}, key=str)


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "dtype"), tiles(), ids=str)
def test_compiles_within_shared_memory_and_without_the_fault(tile, dtype, tmp_path):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, name = linear_triton._linear_kernel, TYPES[dtype]
    constants = {
        **{"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUP": tile.group},
        **{"PARTS": tile.parts, "PERSISTENT": tile.persistent},
    }
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    types["x"] = f"tensordesc<{name}[{tile.rows},{tile.depth}]>"
    types["weight"] = f"tensordesc<{name}[{tile.columns},{tile.depth}]>"
    types["out"] = f"tensordesc<{name}[{tile.rows},{tile.columns // tile.parts}]>"
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = triton.compile(ASTSource(kernel, types, constexprs=constants), GPUTarget("cuda", 90, 32), options)
    assert compiled.metadata.shared <= HOPPER_SHARED_BYTES
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    sass = subprocess.run(
        [triton.knobs.nvidia.nvdisasm.path, "-c", path], capture_output=True, text=True, check=True
    ).stdout
    assert "EXIT" in sass and faults(sass) == []
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers do not suffice"
    if dtype == torch.bfloat16:
        assert ("HGMMA" if tile.rows >= 64 else "HMMA") in sass


@pytest.mark.parametrize(("rows", "columns"), [(1, 4096), (16, 32768), (64, 4096), (128, 18560), (8192, 21504)])
def test_a_tile_is_no_larger_than_its_output_needs(rows, columns):
    """Larger ones waste a decode's time, smaller ones a prefill's."""
    tile = tile_for(rows, columns, torch.bfloat16, H200)
    assert tile.rows < 2 * max(rows, linear_triton._FEW_ROWS)
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    assert tiles >= H200 / 2
