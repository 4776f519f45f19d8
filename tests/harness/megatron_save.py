"""A program with the flags of Megatron-LM's inference programs that saves the model of its flags, with random weights, to ``--save``."""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.inference.utils import add_inference_args, get_model_builder
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import save_checkpoint
from megatron.training.initialize import initialize_megatron


def main() -> None:
    args = parse_and_validate_args(extra_args_provider=add_inference_args)
    initialize_megatron()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = get_model_builder(args).build_distributed_models(pg_collection=groups, wrap_with_ddp=False)
    save_checkpoint(1, model, None, None, num_floating_point_operations_so_far=0)


if __name__ == "__main__":
    main()
