"""Uses the server through the `openai` package: ``with_openai.py URL``. Prints what it got as JSON.

Runs in the clients' environment, so it imports only its neighbour.
"""

import asyncio
import json
import sys
from importlib.metadata import version

import openai
from with_prompts import MESSAGES, PROMPT

URL = sys.argv[1]
MODEL = "tiny"
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 12}
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
found: dict[str, object] = {"version": version("openai")}


def text_of(stream, *, chat):
    """Joined text and the last usage of a stream."""
    text, usage, finish = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += (choice.delta.content if chat else choice.text) or ""
            finish = choice.finish_reason or finish
    return text, usage, finish


def cached(usage):
    """Prompt tokens that were not computed."""
    return usage.prompt_tokens_details.cached_tokens


assert [model.id for model in client.models.list()] == [MODEL]

# Completions: whole, streamed, with log-probs, of ids, with the prompt.
whole = client.completions.create(prompt=PROMPT, logprobs=2, **GREEDY)
again = client.completions.create(prompt=PROMPT, logprobs=2, **GREEDY)
found["completion"] = {"text": whole.choices[0].text, "logprobs": whole.choices[0].logprobs.token_logprobs}
assert again.choices[0].text == whole.choices[0].text
assert cached(whole.usage) == 0 < cached(again.usage) < again.usage.prompt_tokens
found["cached"], found["prompt_tokens"] = cached(again.usage), again.usage.prompt_tokens
options = {"include_usage": True}
text, usage, finish = text_of(
    client.completions.create(prompt=PROMPT, stream=True, stream_options=options, **GREEDY), chat=False
)
assert (text, finish) == (whole.choices[0].text, whole.choices[0].finish_reason)
assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
echo = client.completions.create(prompt=PROMPT, echo=True, logprobs=0, **GREEDY | {"max_tokens": 0})
assert echo.choices[0].text == PROMPT
found["echo"] = echo.choices[0].logprobs.token_logprobs
several = client.completions.create(prompt=[PROMPT, "One more."], n=2, seed=1, **GREEDY | {"temperature": 1.0})
assert [choice.index for choice in several.choices] == [0, 1, 2, 3]

# Chats: whole, streamed, with log-probs, with usage in each chunk.
chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
notes = chat.choices[0].logprobs.content
found["chat"] = {"text": chat.choices[0].message.content, "logprobs": [note.logprob for note in notes]}
assert all(len(note.top_logprobs) == 3 and note.logprob == note.top_logprobs[0].logprob for note in notes)
text, usage, _ = text_of(
    client.chat.completions.create(messages=MESSAGES, stream=True, stream_options=options, **GREEDY), chat=True
)
assert text == chat.choices[0].message.content and cached(usage) > 0
both = {"include_usage": True, "continuous_usage_stats": True}
with client.chat.completions.create(messages=MESSAGES, stream=True, stream_options=both, **GREEDY) as stream:
    counts = [chunk.usage.completion_tokens for chunk in stream]
assert counts == sorted(counts) and counts[-1] == chat.usage.completion_tokens
with client.chat.completions.stream(messages=MESSAGES, **GREEDY) as stream:  # the client's own accumulation
    assert stream.get_final_completion().choices[0].message.content == text

# Errors have the client's classes.
for error, fields in (
    (openai.BadRequestError, {"max_tokens": 10**6}),
    (openai.BadRequestError, {"temperature": 9}),
    (openai.NotFoundError, {"model": "gpt"}),
):
    try:
        client.completions.create(prompt="x", **GREEDY | fields)
    except error as caught:
        assert caught.body["message"] and caught.request_id
    else:
        raise AssertionError(f"no {error.__name__}")


async def at_once():
    """The same prompt and others, at the same time."""
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(
            *(client.completions.create(prompt=f"{number}. {PROMPT}", **GREEDY) for number in range(12)),
            *(client.completions.create(prompt=PROMPT, **GREEDY) for _ in range(4)),
        )
    return [answer.choices[0].text for answer in answers]


texts = asyncio.run(at_once())
assert texts[12:] == [whole.choices[0].text] * 4 and len(texts) == 16
print(json.dumps(found))
