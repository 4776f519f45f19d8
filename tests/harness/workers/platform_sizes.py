"""Flags of megatron.training beside `ensure_platform`. Usage: ``torchrun platform_sizes.py OUT.json CASES``.

CASES: JSON, a list of arguments of `ensure_platform` (null: `patch_platform`, and megatron makes the groups) and flags. For each OUT gets the error of `initialize_megatron`, or the sizes and
the groups that it goes on with.
"""

from __future__ import annotations

import json
import sys

from examples import megatron_checkpoint as tool
from megatron_hybrid_prefix.errors import PlatformError
from megatron_hybrid_prefix.platform import ensure_platform, patch_platform, shut_down, undo_platform
from megatron_hybrid_prefix.platform.sizes import running_sizes
from tests.engine.test_arguments import INFERENCE, MODEL
from tests.harness.limits import COLLECTIVE_HANG_S
from tests.harness.workers.launch import write_findings

CPU = {"device": "cpu", "timeout_s": COLLECTIVE_HANG_S["cpu"]}


def outcome(sizes, flags):
    """What a script gets that calls `ensure_platform`, or `patch_platform`, first."""
    platform = patch_platform("cpu") if sizes is None else ensure_platform(**sizes, **CPU)
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


def main(out, cases):
    write_findings(out, [outcome(*case) for case in json.loads(cases)])
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
