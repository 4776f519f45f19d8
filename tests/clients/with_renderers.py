"""An agent on the client of `renderers`, which verifiers and prime-rl train with: ``with_renderers.py URL TOKENIZER``.

Prints what each turn got as JSON. It keeps the ids of each turn, and never tokenises an answer. Runs in the clients' environment.
"""

import asyncio
import json
import sys

import openai
from renderers.client import OverlongPromptError, generate
from renderers.default import DefaultRenderer
from transformers import PreTrainedTokenizerFast
from with_prompts import MESSAGES

URL, FOLDER = sys.argv[1:]
TURNS = 10


async def main():
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    fields = {"client": client, "renderer": DefaultRenderer(tokenizer), "messages": MESSAGES, "model": "tiny"}
    found, ids = [], None
    for turn in range(TURNS):
        sampling = {"max_tokens": 60, "min_tokens": 50, "temperature": 1.0, "seed": turn}
        sampling["routed_experts_prompt_start"] = turn  # verifiers sends it along
        answer = await generate(**fields, prompt_ids=ids, sampling_params=sampling, cache_salt="renderers")
        names = ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason", "usage")
        found.append({name: answer[name] for name in names})
        between = tokenizer.encode("\nuser: Why?\nassistant:", add_special_tokens=False)
        ids = answer["prompt_ids"] + answer["completion_ids"] + between
    try:
        await generate(**fields, prompt_ids=[5] * 5000, sampling_params={})
    except OverlongPromptError:
        print(json.dumps(found))


asyncio.run(main())
