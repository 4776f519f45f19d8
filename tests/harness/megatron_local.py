"""A program with megatron.training's flags that generates as Megatron-RL does: with ``MegatronLocal`` of ``megatron/rl``.

Prompts go one after another to its server; it is suspended and resumed between two rounds, as for a refit. It takes the flags of
Megatron-LM's ``offline_inference.py``. All names are Megatron-LM's.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import torch.distributed as dist
from megatron.inference.utils import add_inference_args, get_model_for_inference
from megatron.rl.inference.megatron import MegatronLocal
from megatron.training import get_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.initialize import initialize_megatron

PORT = 8294  # as Megatron-RL's; that of its coordinator is fixed, too
GREEDY = {"temperature": 1e-4}  # it takes no 0


async def rounds(model: Any, prompts: list[str]) -> list[dict[str, Any]]:
    """The answers of two rounds, on rank 0."""
    server = await MegatronLocal.launch(model, host="127.0.0.1", port=PORT)
    found = []
    try:
        for epoch in range(2):
            if epoch:
                await server.suspend()
                await server.resume()
            server.set_generation_epoch(epoch)
            if dist.get_rank() == 0:
                for prompt in prompts:
                    answer = await server.agenerate(server.prepare_request(prompt, GREEDY))
                    found.append({"generated_tokens": answer.token_ids[answer.prompt_length :]})
    finally:
        await server.kill()
    return found


def main() -> None:
    args = parse_and_validate_args(
        extra_args_provider=add_inference_args, args_defaults={"no_load_rng": True, "no_load_optim": True}
    )
    initialize_megatron()
    model = get_model_for_inference()
    with open(get_args().prompt_file, encoding="utf-8") as lines:
        prompts = [json.loads(line)["text"] for line in lines]
    found = asyncio.run(rounds(model, prompts))
    if dist.get_rank() == 0:
        with open(args.output_path, "w", encoding="utf-8") as out:
            json.dump(dict(enumerate(found)), out)


if __name__ == "__main__":
    main()
