"""Every stand-in takes the parameters of the upstream function, by name, order and default.

Upstream is read, not imported: importing its mixer or its kernels needs a platform first.
"""

import ast
import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_hybrid_prefix.upstream.modules import COMMON_KERNELS, SSD_KERNELS

SSD, COMMON = (package.replace(".", "/") for package in (SSD_KERNELS, COMMON_KERNELS))
UPSTREAM = [
    ("ssd", "mamba_chunk_scan_combined_varlen", f"{SSD}/ssd_combined.py"),
    ("conv", "causal_conv1d_varlen_fn", f"{COMMON}/causal_conv1d_varlen.py"),
    ("conv", "causal_conv1d_varlen_carry_states", f"{COMMON}/causal_conv1d_varlen.py"),
    ("conv", "causal_conv1d_update", f"{COMMON}/causal_conv1d_triton.py"),
    ("conv", "causal_conv1d_varlen_states", "causal_conv1d/causal_conv1d_varlen.py"),
    ("decode", "selective_state_update", f"{SSD}/mamba_ssm.py"),
    ("kv_append", "triton_append_key_value_cache", "megatron/core/inference/contexts/fused_kv_append_kernel.py"),
    ("extraction", "scatter_intermediate_ssm", f"{COMMON}/intermediate_extraction.py"),
    ("extraction", "scatter_intermediate_conv", f"{COMMON}/intermediate_extraction.py"),
    *(
        ("rows", name, "megatron/core/inference/contexts/attention_context/triton/tensor_ops.py")
        for name in ("tensor_get_slice_after", "tensor_merge", "tensor_masked_update")
    ),
    *(
        ("speculative", name, "megatron/core/inference/text_generation_controllers/mtp_utils_triton.py")
        for name in ("verify_speculative_tokens", "prepare_next_forward_pass", "mamba_state_selective_copy")
    ),
]
NEWER = {"causal_conv1d_varlen_carry_states"}
"""Functions that only newer versions of megatron have."""


def upstream_parameters(function, file):
    """Returns [(name, kind, default or empty)] of a function read from an installed source file."""
    package, _, rest = file.partition("/")
    spec = find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    path = next(p for root in spec.submodule_search_locations if (p := Path(root) / rest).exists())
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            node.body, node.decorator_list, node.returns = [ast.Pass()], [], None
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                argument.annotation = None
            scope = {}
            exec(compile(ast.fix_missing_locations(ast.Module([node], [])), str(path), "exec"), scope)
            return [(p.name, p.kind, p.default) for p in inspect.signature(scope[function]).parameters.values()]
    if function in NEWER:
        pytest.skip(f"this megatron does not have {function}")
    raise AssertionError(f"{function} is not in {path}")


@pytest.mark.parametrize(("module", "function", "file"), UPSTREAM, ids=lambda value: value.rpartition("/")[2])
def test_same_parameters_as_upstream(module, function, file):
    stand_in = getattr(import_module(f"megatron_hybrid_prefix.platform.kernels.{module}"), function)
    got = [(p.name, p.kind, p.default) for p in inspect.signature(stand_in).parameters.values()]
    assert got == upstream_parameters(function, file)


def test_the_modules_import_torch_and_the_standard_library_only():
    import sys

    import megatron_hybrid_prefix.platform.kernels as kernels

    for path in Path(kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                assert top in ("torch", "megatron_hybrid_prefix") or top in sys.stdlib_module_names, (
                    f"{path.name} imports {name}"
                )
