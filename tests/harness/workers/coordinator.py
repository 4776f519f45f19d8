"""Requests through megatron's data-parallel coordinator, as JSON. Usage: ``torchrun coordinator.py OUT.json``.

One process holds the engine and the client; the coordinator is a second one, which imports this file: so the main
guard, and the imports inside functions.
"""

from __future__ import annotations

import asyncio
import json
import sys

from tests.harness.limits import HANG_S

BLOCK_TOKENS = 64
NEW_TOKENS = 5


async def ask(client, prompt, **attributes):
    """Sends one request and waits for its reply; returns what the client gets."""
    from tests.harness.engine_helpers import greedy

    params = greedy(NEW_TOKENS)
    params.add_attributes(attributes)
    return await asyncio.wait_for(client.add_request(prompt, params), timeout=HANG_S)


async def talk(client, engine, prompt):
    """All replies by name: the answer, and the returned sampling parameters."""
    replies = {}

    async def send(name, tokens=prompt, **attributes):
        replies[name] = await ask(client, tokens, **attributes)

    await send("a first", cache_salt="a")
    await send("a second", cache_salt="a", return_prompt_tokens=True)
    await send("b first", cache_salt="b")
    await send("b second", cache_salt="b")
    await send("no salt")
    await send("number as salt", cache_salt=7)
    await send("a with adapter", cache_salt="a", cache_adapter="x")
    await send("a without reading", cache_salt="a", cache_read=False)
    await send("a as text", tokens="a" * len(prompt), cache_salt="a")
    # Together, so that both tenants are in one batch.
    names = ["a", "b", "a", "c"]
    together = await asyncio.gather(*(ask(client, prompt, cache_salt=salt) for salt in names))
    replies |= {
        f"{name} together {number}": reply for number, (name, reply) in enumerate(zip(names, together, strict=True))
    }
    await send("a not kept", tokens=prompt[::-1], cache_salt="a", cache_write=False)
    await send("a after not kept", tokens=prompt[::-1], cache_salt="a")
    await send("too long", tokens=prompt * 4, cache_salt="a")
    client.set_generation_epoch(1)
    await send("a with new weights", cache_salt="a")
    await send("a with new weights again", cache_salt="a")
    client.pause_engines()  # as a trainer does that changes weights in between, and says nothing of it
    await asyncio.wait_for(wait_for_state(engine, "PAUSED"), timeout=HANG_S)
    next(engine.controller.inference_wrapped_model.model.parameters()).data.mul_(1.1)
    client.unpause_engines()
    await send("a after a pause", cache_salt="a")
    return replies


async def serve(engine, conversation):
    """Starts the coordinator, runs ``conversation(client)`` with the engine behind it, and stops both. Returns the
    replies.
    """
    from megatron.core.inference.inference_client import InferenceClient

    address = await engine.start_listening_to_data_parallel_coordinator(hostname="127.0.0.1")
    client = InferenceClient(address, deserialize=True)
    try:
        client.start()
        replies = await conversation(client)
        client.pause_engines()
        await asyncio.wait_for(wait_for_state(engine, "PAUSED"), timeout=HANG_S)
        client.stop_engines()
        await asyncio.wait_for(engine.engine_loop_task, timeout=HANG_S)
    finally:
        client.shutdown_coordinator()
        await asyncio.sleep(0.2)
        client.stop()
        engine.inference_coordinator_process.join(timeout=10)
        engine.inference_coordinator_process.kill()
    return replies


async def wait_for_state(engine, name):
    from megatron.core.inference.engines.dynamic_engine import EngineState

    await engine.wait_until(EngineState[name])


def described(reply):
    """A deserialised reply as plain values."""
    return {
        "type": type(reply).__name__,
        "status": reply.status.name,
        "tokens": list(reply.generated_tokens),
        "log_probs": list(reply.generated_log_probs or ()),
        "text": reply.generated_text,
        "cached_tokens": reply.num_cached_tokens,
        "prompt_tokens": None if reply.prompt_tokens is None else reply.prompt_tokens.tolist(),
        "carries_prompt": reply.remaining_prompt_tokens is not None,
        "prompt_length": reply.prompt_length,
        "events": [event.type.name for event in reply.events],
        "params": {name: value for name, value in vars(reply.sampling_params).items() if name.startswith("cache_")},
        "keys": list(reply.precomputed_block_hashes),
    }


def main(out):
    from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
    from megatron_hybrid_prefix.models import build_hybrid_model
    from megatron_hybrid_prefix.platform import ensure_platform, shut_down
    from tests.harness.engine_helpers import random_tokens

    model = build_hybrid_model("tiny", seed=0, platform=ensure_platform(device="cpu"))
    engine = build_engine(
        model, HybridPrefixConfig(mamba_gb=0.01), max_sequence_length=512, block_size_tokens=BLOCK_TOKENS
    )
    prompt = random_tokens(2 * BLOCK_TOKENS + 3, seed=5)
    empty_forwards = []
    engine.controller.dummy_forward = lambda: empty_forwards.append(1)
    replies = asyncio.run(serve(engine, lambda client: talk(client, engine, prompt)))
    engine.context.check_integrity()
    found = {
        "replies": {name: described(reply) for name, reply in replies.items()},
        "stats": engine.context.prefix_stats().as_dict(),
        "empty_forwards": len(empty_forwards),
    }
    with open(out, "w") as file:
        json.dump(found, file)
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1])
