"""The kernels of the gated delta rule compile for a GPU as they are launched, on a machine without one, and without a known fault.

The fault, in ptxas 12.8 of Triton 3.6: operands of tensor cores in shared memory have descriptors of 64 bits. To take the next columns,
a small number is added to a descriptor whose upper half is a constant. For some kernels ptxas adds a register to the upper
half that is in use for something else, and the tensor cores read other memory. (ptxas 12.9 does not.) On an H200 all kernels
that had it were wrong, and no others: bfloat16 heads of 16 x 40, 12 x 10 and 40 x 72 channels in earlier forms of these kernels.
"""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from megatron_hybrid_prefix.lab import capacity
from megatron_hybrid_prefix.ops import delta_rule_triton
from megatron_hybrid_prefix.ops.delta_rule_triton import CHUNK, check_heads, launch_options

HOPPER_SHARED_BYTES = 227 * 1024  # of a thread block
FLOAT32 = {"log_decay_ptr", "factors_ptr", "decays_ptr", "states_ptr", "after_ptr"}
INT64 = {"first_chunks_ptr", "source_slots_ptr", "live_slots_ptr", "chunk_slots_ptr", "slots_ptr"}
KERNELS = {"_prepare_kernel": "prepare", "_pass_kernel": "pass_on"}
SIZES = [
    *((name, torch.bfloat16, size) for name in KERNELS for size in (16, 64, 80, 128)),
    ("_pass_kernel", torch.bfloat16, 256),
    ("_pass_kernel", torch.float32, 256),
]
LAYOUTS = (0x4, 0x8, 0xC)  # of an operand: the upper bits of its descriptor


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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "size"), SIZES)
def test_compiles_within_shared_memory_and_without_the_fault(name, dtype, size, tmp_path):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(delta_rule_triton, name)
    options = dict(getattr(launch_options(dtype, size, size, normalise=True), KERNELS[name]))
    launch = {key: options.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in options}
    inputs = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    types = {arg: "constexpr" if arg in options else type_of(arg, inputs) for arg in kernel.arg_names}
    # As Triton specialises them: pointers and strides are multiples of 16, other numbers are not looked at.
    aligned = [i for i, arg in enumerate(kernel.arg_names) if arg.endswith("_ptr") or arg.startswith("stride")]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, types, constexprs=options, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    assert compiled.metadata.shared <= HOPPER_SHARED_BYTES
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", tmp_path / "kernel.cubin"]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "EXIT" in sass and faults(sass) == []


def test_the_fault_is_seen():
    """As ptxas 12.8 compiled heads of 40 x 72 channels: UR4 holds where shared memory begins."""
    right = ["UMOV UR4, URZ", "UIADD3 UR10, UP1, UR10, 0x40, URZ", "UIADD3.X UR11, UR4, -0x7fffffe0, URZ, UP1, !UPT"]
    wrong = ["UMOV UR4, URZ", "ULEA UR4, UR8, UR4, 0x18", *right[1:]]
    for lines, count in ((right, 0), (wrong, 1)):
        assert len(faults("\n".join(f"        /*0010*/                   {line} ;" for line in lines))) == count


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
