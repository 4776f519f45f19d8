"""Sizes of the platform and of a script, over two ranks: those that differ are an error that names both."""

from __future__ import annotations

from typing import Any

import pytest

from examples import megatron_checkpoint as tool
from megatron_hybrid_prefix.errors import PlatformError
from megatron_hybrid_prefix.platform import ensure_platform, patch_platform, undo_platform
from megatron_hybrid_prefix.platform.sizes import running_sizes
from tests.engine.test_arguments import INFERENCE, MODEL
from tests.harness.limits import COLLECTIVE_HANG_S
from tests.harness.workers.launch import run_play

pytestmark = [pytest.mark.multi, pytest.mark.slow]

TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))
OWN_GROUPS = "make the process groups with those sizes, before ensure_platform(), which keeps them"
# Arguments of `ensure_platform`, flags, and the error.
DIFFER: list[tuple[dict[str, int], list[str], str]] = [
    ({}, [TP, "2"], "tp=2 dp=1, but this process runs with tp=1 dp=2; call ensure_platform(tp=2, pp=1, ep=1) first"),
    ({}, [PP, "2"], "pp=2 dp=1, but this process runs with pp=1 dp=2; call ensure_platform(tp=1, pp=2, ep=1) first"),
    ({"tp": 2}, [], "tp=1 dp=2, but this process runs with tp=2 dp=1; call ensure_platform(tp=1, pp=1, ep=1) first"),
    (
        {"tp": 2},
        [PP, "2"],
        "tp=1 pp=2, but this process runs with tp=2 pp=1; call ensure_platform(tp=1, pp=2, ep=1) first",
    ),
    ({}, [CP, "2"], f"cp=2 dp=1, but this process runs with cp=1 dp=2; {OWN_GROUPS}"),
]
SAME: list[tuple[dict[str, int] | None, list[str]]] = [({"tp": 2}, [TP, "2"]), ({}, []), (None, [TP, "2"])]


def outcome(sizes, flags):
    """What a script gets that calls `ensure_platform` (no sizes: `patch_platform`, and megatron makes the groups) first: the error of
    `initialize_megatron`, or the sizes and the groups that it goes on with.
    """
    platform = (
        patch_platform("cpu")
        if sizes is None
        else ensure_platform(**sizes, device="cpu", timeout_s=COLLECTIVE_HANG_S["cpu"])
    )
    with tool.megatron_at_work(platform):
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
        from megatron.core.rerun_state_machine import destroy_rerun_state_machine
        from megatron.training import initialize
        from megatron.training.global_vars import destroy_global_vars

    try:
        args = tool.parse([*MODEL, *flags, *INFERENCE], platform)
        initialize._compile_dependencies = lambda: None  # of data sets; a wheel of megatron-core has no makefile
        initialize.initialize_megatron(allow_no_cuda=True, skip_mpu_initialization=sizes is not None)
        model = tool.build_model(args, platform)
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "gloo": [
                parallel_state.get_data_parallel_group_gloo().size(),
                parallel_state.get_data_parallel_group_gloo(with_context_parallel=True).size(),
                parallel_state.get_expert_data_parallel_group_gloo().size(),
            ],
            "dp": running_sizes()["dp"],
        }
    except PlatformError as error:
        return str(error)
    finally:
        destroy_global_vars()
        destroy_num_microbatches_calculator()
        destroy_rerun_state_machine()
        parallel_state.destroy_model_parallel()
        undo_platform()  # the ranks stay together


def on_ranks(_, cases):
    return [outcome(*case) for case in cases]


def test_sizes_of_flags_and_of_the_platform(tmp_path):
    """Megatron keeps the groups that run and ignores its flags: each rank would hold the whole model."""
    cases: list[Any] = [*((sizes, flags) for sizes, flags, _ in DIFFER), *SAME]
    parts = {"outcomes": ["tests.distributed.test_platform_sizes:on_ranks", cases]}
    for found in (rank["outcomes"] for rank in run_play(tmp_path, {"parts": parts})):
        for (sizes, flags, error), said in zip(DIFFER, found, strict=False):
            assert said == f"flags of megatron.training: {error}", (sizes, flags)
        sharded, whole, patched = found[len(DIFFER) :]
        assert (sharded["gloo"], sharded["dp"]) == ([1, 1, 1], 1)
        assert (whole["gloo"], whole["dp"]) == ([2, 2, 2], 2)
        assert sharded["parameters"] < whole["parameters"]
        assert patched == sharded, "megatron made the groups"
