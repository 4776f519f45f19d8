"""Requests through megatron's data-parallel coordinator, as JSON: of several tenants, and bad ones among good ones.

Usage: ``torchrun coordinator.py OUT.json COUNT`` on one rank; COUNT bad ones.

The coordinator is a process that imports this file: so the main guard, and the imports inside functions.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import batched

from tests.harness.limits import HANG_S

TOGETHER = 8  # requests at a time
SEED = 7


def fields():
    """Fields of megatron's ``InferenceConfig``."""
    from tests.harness.bad_requests import BLOCK, LIMIT_TOKENS

    sizes = {"max_sequence_length": LIMIT_TOKENS, "max_tokens": LIMIT_TOKENS, "max_requests": 4, "buffer_size_gb": 0.02}
    return sizes | {"block_size_tokens": BLOCK}


def alone(model):
    """The answers of the good requests, each alone."""
    from megatron_hybrid_prefix import build_engine
    from tests.harness.bad_requests import good_requests, params

    engine = build_engine(model, **fields())
    return [
        list(engine.generate([asked.prompt], params(asked.fields))[0].merge().generated_tokens)
        for asked in good_requests()
    ]


def why(reply):
    """The error of a failed reply; None: it is complete."""
    if not reply.failed():
        return None
    return "; ".join(str(event.payload) for event in reply.events if isinstance(event.payload, Exception))


async def ask(llm, name, number, asked, found):
    """Sends one request, with a good prompt before the bad one."""
    from tests.harness.bad_requests import GOOD_PROMPT, params

    prompts = [asked.prompt] if name is None else [GOOD_PROMPT, asked.prompt]
    replies = await asyncio.wait_for(llm.generate(prompts, params(asked.fields)), timeout=HANG_S)
    reasons = [why(reply) for reply in replies]
    if name is None:
        found["sent"] += 1
        found["answers"].append([number, list(replies[0].generated_tokens)])
        found["wrong"] += [["good", reason] for reason in reasons if reason is not None]
        return
    found["refused"] += 1
    if (reasons[0] is None) != name.startswith("prompt: ") or asked.named not in (reasons[1] or ""):
        found["wrong"].append([name, *reasons])


async def tenants(llm):
    """Replies to one prompt, by name."""
    from tests.harness.bad_requests import BLOCK, params
    from tests.harness.engine_helpers import random_tokens

    prompt, replies = random_tokens(2 * BLOCK + 3, seed=5), {}

    async def send(name, tokens=prompt, **attributes):
        (reply,) = await asyncio.wait_for(llm.generate([tokens], params(attributes)), timeout=HANG_S)
        replies[name] = {
            "tokens": list(reply.generated_tokens),
            "cached_tokens": reply.num_cached_tokens,
            "prompt_tokens": None if reply.prompt_tokens is None else reply.prompt_tokens.tolist(),
            "params": {name: value for name, value in vars(reply.sampling_params).items() if name.startswith("cache_")},
            "keys": list(reply.precomputed_block_hashes),
        }

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
    await asyncio.gather(*(send(f"{salt} together", cache_salt=salt) for salt in ("a", "b", "c")))
    await send("a not kept", tokens=prompt[::-1], cache_salt="a", cache_write=False)
    await send("a after not kept", tokens=prompt[::-1], cache_salt="a")
    return replies


async def streamed(llm):
    """What megatron's own client gets of streamed requests: one to its end, and more than run at once, which it aborts."""
    from tests.harness.bad_requests import GOOD_PROMPT, params

    client, engine = llm._coord_runtime.client, llm.engine
    engine.local_metadata_ledger_enabled = True
    replies = [
        reply async for reply in client.add_request_streaming(GOOD_PROMPT, params({"num_tokens_to_generate": 12}))
    ]
    found = {"tokens": [token for reply in replies[:-1] for token in reply["partial"]["new_tokens"]]}
    found["final"] = list(replies[-1]["final"].generated_tokens)
    admit, admitted = engine.context.add_request, set()
    engine.context.add_request = lambda request, *more: (admitted.add(request.request_id), admit(request, *more))
    asked = params({"num_tokens_to_generate": 200})
    streams = [client.add_request_streaming(GOOD_PROMPT, asked) for _ in range(6)]
    await anext(streams[0])
    found["waited"] = len(engine.waiting_request_ids)
    for stream in streams:
        await stream.aclose()
    while engine.requests:
        await asyncio.sleep(0.01)
    engine.context.add_request = admit
    found["admitted"] = len(admitted)
    found["looked_up"] = len(engine.local_metadata_ledger) if hasattr(engine, "local_metadata_ledger") else None
    return found


async def talk(llm, count):
    """Tenants, the fuzz, and then what becomes of requests whose engine is reset, or fails."""
    from tests.harness.bad_requests import GOOD_PROMPT, fuzz, good_requests, params

    forwards = []
    llm.engine.controller.dummy_forward = lambda: forwards.append(1)
    found = {"answers": [], "sent": 0, "refused": 0, "wrong": [], "tenants": await tenants(llm)}
    found["empty_forwards"] = len(forwards)
    for some in batched(fuzz(count, SEED, messages=True), TOGETHER):
        await asyncio.gather(*(ask(llm, *each, found) for each in some))

    if hasattr(llm._coord_runtime.client, "add_request_streaming"):
        found["streamed"] = await asyncio.wait_for(asyncio.wrap_future(llm.submit(streamed(llm))), timeout=HANG_S)

    async def replies(prompts, **own):
        asked = llm.generate(prompts, params({"num_tokens_to_generate": 100} | own))
        return [why(reply) for reply in await asyncio.wait_for(asked, timeout=HANG_S)]

    longest = llm.context.max_sequence_length
    found["longest"] = await replies([GOOD_PROMPT[:1] * length for length in (longest - 1, longest, longest + 1)])
    from tests.engine.test_not_finite import NAN, embedding

    bad = next(token for token in range(512) if token not in GOOD_PROMPT)
    with embedding(llm.controller.inference_wrapped_model.model, bad, NAN):
        found["not finite"] = await replies([GOOD_PROMPT, [*GOOD_PROMPT, bad]], num_tokens_to_generate=4)
    running = asyncio.create_task(replies([GOOD_PROMPT] * 6))
    while llm.context.total_request_count < 2:
        await asyncio.sleep(0)
    await llm.pause()
    llm.engine.reset()
    found["reset"] = await running
    await llm.unpause()
    await ask(llm, None, 4, good_requests()[4], found)

    running = asyncio.create_task(replies([GOOD_PROMPT] * 6))
    while llm.context.total_request_count < 2:
        await asyncio.sleep(0)
    llm.engine.post_process_requests = lambda *args, **kwargs: 1 / 0
    found["failed"] = await running
    found["after"] = await replies([GOOD_PROMPT])
    return found


async def routes(llm):
    """Routes of a prompt, of its hit, and of its hit by two at a time, as megatron's client has them; and cached tokens."""
    from tests.harness.bad_requests import BLOCK, params
    from tests.harness.engine_helpers import random_tokens

    prompt = random_tokens(2 * BLOCK + 3, seed=5)
    replies = [reply for count in (1, 1, 2) for reply in await llm.generate([prompt] * count, params({}))]
    return [(reply.routing_indices.tolist(), reply.num_cached_tokens) for reply in replies]


async def behind_a_coordinator(model, talk):
    """The same through megatron's own API."""
    from megatron.core.inference.apis import MegatronAsyncLLM
    from megatron.core.inference.config import InferenceConfig, MambaInferenceStateConfig

    from megatron_hybrid_prefix import HybridPrefixConfig, install
    from megatron_hybrid_prefix.text.tokenizer import ByteTokenizer

    install(HybridPrefixConfig(mamba_gb=0.01))
    config = InferenceConfig(mamba_inference_state_config=MambaInferenceStateConfig.from_model(model), **fields())
    async with MegatronAsyncLLM(model=model, tokenizer=ByteTokenizer(512), inference_config=config) as llm:
        return await talk(llm)


def main(out, count):
    from megatron_hybrid_prefix.models import build_hybrid_model
    from megatron_hybrid_prefix.platform import ensure_platform, shut_down
    from tests.harness.workers.launch import write_findings

    model = build_hybrid_model("tiny", seed=0, platform=ensure_platform(device="cpu"))
    answers = alone(model)
    found = asyncio.run(behind_a_coordinator(model, lambda llm: talk(llm, count)))
    routed = build_hybrid_model("tiny-moe", seed=0, moe_enable_routing_replay=True)
    found["routes"] = asyncio.run(behind_a_coordinator(routed, routes))
    write_findings(out, found | {"alone": answers})
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
