"""Kernels compiled for a Hopper GPU on a machine without one, and what is known to be wrong in the machine code.

The fault, in ptxas 12.8 of Triton 3.6: operands of tensor cores in shared memory have descriptors of 64 bits. To take the next columns,
a small number is added to a descriptor whose upper half is a constant. For some kernels ptxas adds a register to the upper
half that is in use for something else, and the tensor cores read other memory. (ptxas 12.9 does not.) On an H200 all kernels
that had it were wrong, and no others: bfloat16 heads of 16 x 40, 12 x 10 and 40 x 72 channels in earlier forms of the delta rule's.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

HOPPER_SHARED_BYTES = 227 * 1024  # of a thread block
LAYOUTS = (0x4, 0x8, 0xC)  # of an operand: the upper bits of its descriptor


def compiled(kernel, types, constants, folder: Path, **launch) -> str:
    """The machine code of a kernel that fits into shared memory and is without the fault.

    Args:
        kernel: Triton's.
        types: Of an argument, by its name; called for those that are no constant.
        constants: By name.
        folder: For a file.
        **launch: ``num_warps`` and so on.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {name: "constexpr" if name in constants else types(name) for name in kernel.arg_names}
    # As Triton specialises them: pointers and strides are multiples of 16, other numbers are not looked at.
    aligned = [at for at, kind in enumerate(kinds.values()) if kind.startswith("*") or kind == "i64"]
    attrs = {(at,): [["tt.divisibility", 16]] for at in aligned}
    source = ASTSource(kernel, kinds, constexprs=constants, attrs=attrs)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    assert found.metadata.shared <= HOPPER_SHARED_BYTES
    path = folder / "kernel.cubin"
    path.write_bytes(found.asm["cubin"])
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", path]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "EXIT" in sass and faults(sass) == []
    return sass


def faults(sass: str) -> list[str]:
    """Instructions that add a register which is not zero to the constant upper half of a descriptor."""
    zero, found = {"URZ"}, []
    for line in sass.splitlines():
        instruction = re.search(r"\*/\s+(?:@!?U?P\w+ +)?(\S+) (.*?) ;", line)
        if instruction is None:
            continue
        name, (target, *operands) = instruction[1], [part.strip() for part in instruction[2].split(",")]
        constants = [int(x, 16) for x in operands if re.fullmatch(r"-?0x[0-9a-f]{8}", x)]
        if name == "UIADD3.X" and any((x & 0xFFFFFFFF) >> 28 in LAYOUTS for x in constants):
            found += [line] * any(x.startswith("UR") and x not in zero for x in operands)
        if name == "UMOV" and operands[0] in ("URZ", "0x0"):
            zero.add(target)
        else:
            zero -= {target, f"UR{int(target[2:]) + 1}" if name.endswith(".64") and target[2:].isdigit() else target}
            zero.add("URZ")
    return found


def spills(sass: str) -> bool:
    """Whether registers do not suffice."""
    return re.search(r"\b(LDL|STL)\b", sass) is not None
