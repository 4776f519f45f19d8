"""Rounds of an RL trainer on the ranks of a model, as JSON. Usage: ``torchrun rl_flow.py OUT.json TP``.

The coordinator is another process, which imports this file: so the main guard, and the imports inside functions.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from tests.harness.limits import COLLECTIVE_HANG_S, HANG_S

# By model: how it gets new weights after the first and after the second round.
COORDINATED = {"tiny": ("copy_", "swap_model_weights")}
DIRECT = {"tiny-mixed": ("data", "load_state_dict")}


def described(request: Any) -> dict[str, Any]:
    """An answer as plain values."""
    return {"tokens": list(request.generated_tokens), "log_probs": list(request.generated_log_probs)}


def direct(model: Any, trained: list[Any], ways: tuple[str, ...]) -> list[dict[str, Any]]:
    """One answer of each group, and the tokens computed, of each round. Every rank sends the requests."""
    from tests.harness.refits import WAYS
    from tests.harness.rl import Rollouts, rl_engine

    rollouts, rounds = Rollouts(rl_engine(model)), []
    for way, new in zip((*ways, None), (*trained, None), strict=True):
        answers, computed = rollouts.round(spans=True)
        rounds.append({"answers": [described(answer) for answer in answers], "computed": computed})
        rollouts.engine.suspend()
        if way is not None:
            WAYS[way](model, new)
        rollouts.engine.resume()
        rollouts.run()
    return rounds


async def coordinated(model: Any, trained: list[Any], ways: tuple[str, ...]) -> list[dict[str, Any]]:
    """The same with a coordinator. Rank 0 has the client, and all ranks wait for its signals.

    Nothing is announced after the first round, as by NeMo-RL's worker; an epoch after the second, as by megatron/rl.
    """
    import torch.distributed as dist
    from megatron.core.inference.engines.dynamic_engine import EngineState
    from megatron.core.inference.inference_client import InferenceClient

    from tests.harness.refits import WAYS
    from tests.harness.rl import SAMPLES, prompts_of_a_round, rl_engine, sampling

    engine, rounds = rl_engine(model), []
    address = await engine.start_listening_to_data_parallel_coordinator(
        inference_coordinator_port=None, launch_inference_coordinator=True, hostname="127.0.0.1"
    )
    client = InferenceClient(address, deserialize=True) if dist.get_rank() == 0 else None
    if client is not None:
        client.start()

    async def all_ranks(signal: str, state: EngineState) -> None:
        if client is not None:
            getattr(client, signal)()
        await asyncio.wait_for(engine.wait_until(state), timeout=HANG_S)

    for way, new in zip((*ways, None), (*trained, None), strict=True):
        before, replies = engine.context.lifetime_prefill_token_count, []
        if client is not None:
            asked = (client.add_request(prompt, sampling()) for prompt in prompts_of_a_round() for _ in range(SAMPLES))
            replies = await asyncio.wait_for(asyncio.gather(*asked), timeout=HANG_S)
        await all_ranks("pause_engines", EngineState.PAUSED)
        computed = int(engine.context.lifetime_prefill_token_count - before)
        rounds.append({"answers": [described(reply) for reply in replies[::SAMPLES]], "computed": computed})
        if way is None:
            break
        await all_ranks("suspend_engines", EngineState.SUSPENDED)
        WAYS[way](model, new)
        if client is not None and len(rounds) == 2:
            client.set_generation_epoch(1)
        await all_ranks("resume_engines", EngineState.RESUMED)
        await all_ranks("unpause_engines", EngineState.RUNNING)
    await all_ranks("stop_engines", EngineState.STOPPED)
    if client is not None:
        client.shutdown_coordinator()
        await asyncio.sleep(0.2)
        client.stop()
        engine.inference_coordinator_process.join(timeout=10)
        engine.inference_coordinator_process.kill()
    return rounds


def main(out: str, tp: int) -> None:
    from megatron_hybrid_prefix.models import build_hybrid_model
    from megatron_hybrid_prefix.platform import ensure_platform, shut_down
    from tests.harness.named_models import named
    from tests.harness.workers.launch import write_findings

    platform, found = ensure_platform(tp=tp, device="cpu", timeout_s=COLLECTIVE_HANG_S["cpu"]), {}
    for name, ways in (COORDINATED | DIRECT).items():
        model, *trained = [
            build_hybrid_model(named(name), seed=seed, platform=platform, cuda_graph_impl="none") for seed in (5, 6, 7)
        ]
        if name in DIRECT:
            found[name] = direct(model, trained, ways)
        else:
            found[name] = asyncio.run(coordinated(model, trained, ways))
    write_findings(out, found)
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
