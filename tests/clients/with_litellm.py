"""Uses the server through the router of `litellm`: ``with_litellm.py URL``. Prints what it got as JSON.

Runs in the clients' environment, so it imports only its neighbour.
"""

import asyncio
import json
import os
import re
import sys
import urllib.request

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # the prices in the package: the others are on the network

import litellm
from with_prompts import MESSAGES, PROMPT

URL = sys.argv[1]
GREEDY = {"temperature": 0, "max_tokens": 12}
ADDRESS = {"api_base": f"{URL}/v1", "api_key": "none"}
litellm.telemetry = False
router = litellm.Router(
    model_list=[
        {"model_name": "chat", "litellm_params": {"model": "openai/tiny", **ADDRESS}},
        {"model_name": "chat-as-vllm", "litellm_params": {"model": "hosted_vllm/tiny", **ADDRESS}},
        {"model_name": "text", "litellm_params": {"model": "text-completion-openai/tiny", **ADDRESS}},
    ],
    num_retries=0,
)
found: dict[str, object] = {}


async def chat_of(model):
    """Whole, streamed and with log-probs. Returns the text."""
    whole = await router.acompletion(model=model, messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    text = whole.choices[0].message.content
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens <= 12
    streamed, usage = "", None
    options = {"include_usage": True}
    async for chunk in await router.acompletion(
        model=model, messages=MESSAGES, stream=True, stream_options=options, **GREEDY
    ):
        usage = getattr(chunk, "usage", None) or usage
        streamed += chunk.choices[0].delta.content or "" if chunk.choices else ""
    assert streamed == text
    assert usage.prompt_tokens_details.cached_tokens > 0
    return text


def breakpoints():
    """States that the server kept because of a breakpoint."""
    with urllib.request.urlopen(f"{URL}/metrics") as page:
        return int(float(re.search(r'checkpoints_total\{reason="breakpoint"\} (\S+)', page.read().decode())[1]))


async def kept(model, mark):
    """States kept at the breakpoints of a chat whose first part is marked, or not. Its salt keeps it from the others."""
    part = {"type": "text", "text": "Rules. " + PROMPT} | ({"cache_control": {"type": "ephemeral"}} if mark else {})
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "a" * 100}]}]
    extra = {"cache_salt": f"{model} {mark}", "cache_breakpoints": []}
    before = breakpoints()
    await router.acompletion(model=model, messages=messages, extra_body=extra, **GREEDY)
    return breakpoints() - before


async def main():
    """All of it."""
    found["chat"] = await chat_of("chat")
    assert await chat_of("chat-as-vllm") == found["chat"]
    text = await router.atext_completion(model="text", prompt=PROMPT, **GREEDY)
    found["completion"] = text.choices[0].text
    streamed = ""
    async for chunk in await router.atext_completion(model="text", prompt=PROMPT, stream=True, **GREEDY):
        streamed += chunk.choices[0].text or ""
    assert streamed == found["completion"]
    several = await asyncio.gather(
        *(router.acompletion(model="chat", messages=MESSAGES, seed=number, **GREEDY) for number in range(8))
    )
    assert {answer.choices[0].message.content for answer in several} == {found["chat"]}
    found["marked"] = [await kept("chat", mark) for mark in (False, True)]  # as "hosted_vllm", litellm drops the mark
    try:
        await router.acompletion(model="chat", messages=MESSAGES, **GREEDY | {"max_tokens": 10**6})
    except litellm.ContextWindowExceededError:
        found["too_long"] = "ContextWindowExceededError"
    except litellm.BadRequestError:
        found["too_long"] = "BadRequestError"


asyncio.run(main())
print(json.dumps(found))
