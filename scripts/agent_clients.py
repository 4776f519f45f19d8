#!/usr/bin/env python3
"""Clients of agents against a running server: ``agent_clients.py URL [MODEL]``. `scripts/clients.sh` has their environment.

openai, litellm, langchain, pydantic-ai, openai-agents and instructor; anthropic and openai's responses through litellm's proxy, which it
starts as docs/server.md says. Each one: plain and streamed; five calls of a tool in a loop, forced, so that a model of random weights
calls, too; a schema. What a client says was cached is compared with the server's own count. The chat template has to be of a family
with tools and without thoughts. A line for each client.
"""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}  # nothing from the network

import agents
import anthropic
import instructor
import langchain_openai
import litellm
import openai
import pydantic_ai
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1], (sys.argv[2:] or ["tiny"])[0]
ONE = {"parallel_tool_calls": False}
TURNS, KEY = 5, "sk-agents"
RULES = "The cache keeps keys and values of a prompt in blocks, and a state at the ends of some. " * 4
HOW = {"temperature": 0, "max_tokens": 200}
DRAWN = {"temperature": 1, "max_tokens": 400}
ADDRESS = {"base_url": f"{URL}/v1", "api_key": "none"}
AS_VLLM = {
    "model": f"hosted_vllm/{MODEL}",
    "use_chat_completions_api": True,
    "api_base": f"{URL}/v1",
    "api_key": "none",
}
CONFIG = {"model_list": [{"model_name": MODEL, "litellm_params": AS_VLLM}]}


class Look(BaseModel):
    """Says what the weather is."""

    model_config = ConfigDict(extra="forbid")
    place: str = Field(json_schema_extra={"enum": ["Rome", "Oslo"]})
    day: int = Field(ge=1, le=7)


SCHEMA = Look.model_json_schema()
FUNCTION = {"name": "look", "description": Look.__doc__, "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "look"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "look", "schema": SCHEMA, "strict": True}}


def look(place: str, day: int) -> str:
    """Says what the weather is."""
    return f"{place} {day}: rain"


def asked(name):
    """Messages that no other client sends, so that nothing of them is cached."""
    return [{"role": "system", "content": f"{name}: {RULES}"}, {"role": "user", "content": "Where does it rain?"}]


def reused():
    """Prompt tokens that the server did not compute, so far."""
    with urllib.request.urlopen(f"{URL}/metrics") as page:
        found = re.findall(r"^hybrid_prefix_reused_tokens_total\S* (\S+)", page.read().decode(), re.M)
    return round(sum(map(float, found)))  # of all replicas


def fits(arguments):
    """Whether they are of the schema."""
    fields = arguments if isinstance(arguments, dict) else json.loads(arguments)
    return [*fields] == ["place", "day"] and fields["place"] in ("Rome", "Oslo") and 1 <= fields["day"] <= 7


def check(name, plain, streamed, turn, schema):
    """Runs a client. ``turn`` returns the arguments of the next call, and the prompt tokens that were cached."""
    text = plain()
    assert text and text == streamed(), f"{name}: {text!r}"
    before = reused()
    calls, cached = zip(*(turn() for _ in range(TURNS)), strict=True)
    assert sum(cached) == reused() - before > 0, f"{name}: {cached}, in all {reused() - before}"
    assert all(map(fits, calls)), f"{name}: {calls}"
    for left in reversed(range(20)):  # random weights may write blanks up to the end
        try:
            assert fits(found := schema()), f"{name}: {found}"
            break
        except Exception:
            if not left:
                raise
    print(f"{name}: plain, streamed, {len(calls)} calls, a schema; cached {[*cached]}", flush=True)


def chat_client(name, create):
    """Of clients with openai's chat: ``create(messages=..., **fields)``."""
    history = asked(name)

    def streamed():
        chunks = create(messages=asked(name), stream=True, **HOW)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def turn():
        answer = create(messages=history, tools=TOOLS, tool_choice=NAMED, **HOW)
        (call,) = answer.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        history.append({"role": "assistant", "content": None, "tool_calls": [call.model_dump()]})
        history.append({"role": "tool", "tool_call_id": call.id, "content": look(**arguments)})
        return arguments, answer.usage.prompt_tokens_details.cached_tokens

    check(
        name,
        lambda: create(messages=asked(name), **HOW).choices[0].message.content,
        streamed,
        turn,
        lambda: create(messages=asked(name), response_format=FORMAT, **DRAWN).choices[0].message.content,
    )


def with_langchain(name):
    """langchain-openai."""
    model, drawn = (langchain_openai.ChatOpenAI(model=MODEL, **ADDRESS, **how) for how in (HOW, DRAWN))
    caller = model.bind_tools(TOOLS, tool_choice="look", **ONE)
    history = asked(name)

    def turn():
        answer = caller.invoke(history)
        (call,) = answer.tool_calls
        history.extend([answer, {"role": "tool", "tool_call_id": call["id"], "content": look(**call["args"])}])
        return call["args"], answer.usage_metadata["input_token_details"]["cache_read"]

    check(
        name,
        lambda: model.invoke(asked(name)).content,
        lambda: "".join(chunk.content for chunk in model.stream(asked(name))),
        turn,
        lambda: drawn.with_structured_output(SCHEMA | {"title": "look"}, method="json_schema").invoke(asked(name)),
    )


def with_pydantic_ai(name):
    """pydantic-ai: an output tool, which it forces itself, in five runs of one conversation; its own way to give a schema."""
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(**ADDRESS))
    rules, question = (message["content"] for message in asked(name))

    def agent_of(output, how=HOW):
        return pydantic_ai.Agent(model, instructions=rules, model_settings=how, output_type=output)

    history = []
    agent, caller, judge = agent_of(str), agent_of(Look, HOW | ONE), agent_of(pydantic_ai.NativeOutput(Look), DRAWN)

    async def stream():
        async with agent.run_stream(question) as answer:
            return await answer.get_output()

    def turn():
        answer = caller.run_sync(question, message_history=history)
        history[:] = answer.all_messages()
        return answer.output.model_dump(), answer.usage.cache_read_tokens

    check(
        name,
        lambda: agent.run_sync(question).output,
        lambda: asyncio.run(stream()),
        turn,
        lambda: judge.run_sync(question).output.model_dump(),
    )


def with_openai_agents(name):
    """openai-agents: its own loop, which ends after five turns."""
    rules, question = (message["content"] for message in asked(name))
    calls = []

    @agents.function_tool(name_override="look")
    def tool(place: Literal["Rome", "Oslo"], day: Annotated[int, Field(ge=1, le=7)]) -> str:
        """Says what the weather is."""
        calls.append({"place": place, "day": day})
        return look(place, day)

    def agent(**fields):
        how = agents.ModelSettings(**HOW | fields.pop("how", {}))
        client = openai.AsyncOpenAI(**ADDRESS, max_retries=0)  # for each loop of events
        model = agents.OpenAIChatCompletionsModel(MODEL, client)
        return agents.Agent(name="agent", instructions=rules, model=model, model_settings=how, **fields)

    async def stream():
        answer = agents.Runner.run_streamed(agent(), question)
        events = [event.data async for event in answer.stream_events() if event.type == "raw_response_event"]
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    def loop():
        caller = agent(tools=[tool], how=ONE | {"tool_choice": "look"}, reset_tool_choice=False)
        try:
            agents.Runner.run_sync(caller, question, max_turns=TURNS)
        except agents.MaxTurnsExceeded as end:
            for call, answer in zip(calls, end.run_data.raw_responses, strict=True):
                yield call, answer.usage.input_tokens_details.cached_tokens

    turns = loop()
    check(
        name,
        lambda: agents.Runner.run_sync(agent(), question).final_output,
        lambda: asyncio.run(stream()),
        lambda: next(turns),
        lambda: agents.Runner.run_sync(agent(output_type=Look, how=DRAWN), question).final_output.model_dump(),
    )


def with_instructor(name):
    """instructor: objects by a named tool, five times; by ``response_format``."""
    plain = openai.OpenAI(**ADDRESS, max_retries=0)
    by_tool, by_schema = (
        instructor.from_openai(plain, mode=mode) for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
    )
    fields = {"model": MODEL, "response_model": Look, "max_retries": 0} | HOW
    history = asked(name)

    def turn():
        found, answer = by_tool.chat.completions.create_with_completion(messages=history, **fields)
        history.append({"role": "assistant", "content": found.model_dump_json()})
        history.append({"role": "user", "content": "And then?"})
        return found.model_dump(), answer.usage.prompt_tokens_details.cached_tokens

    def last():
        return [*by_tool.chat.completions.create_partial(messages=asked(name), **fields)][-1].model_dump_json()

    def whole():
        return by_tool.chat.completions.create(messages=asked(name), **fields).model_dump_json()

    check(
        name,
        whole,
        last,
        turn,
        lambda: by_schema.chat.completions.create(messages=asked(name), **fields | DRAWN).model_dump(),
    )


def with_anthropic(name, url):
    """anthropic's messages, through the proxy."""
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    rules, question = (message["content"] for message in asked(name))
    how, drawn = (
        {"max_tokens": each["max_tokens"], "extra_body": {"temperature": each["temperature"]}} for each in (HOW, DRAWN)
    )
    fields = {"model": MODEL, "system": rules} | how
    tools = [{"name": "look", "description": Look.__doc__, "input_schema": SCHEMA}]
    choice = {"type": "tool", "name": "look"}
    history = [{"role": "user", "content": question}]

    def streamed():
        with client.messages.stream(messages=history[:1], **fields) as stream:
            return "".join(stream.text_stream)

    def turn():
        with client.messages.stream(messages=history, tools=tools, tool_choice=choice, **fields) as stream:
            answer = stream.get_final_message()
        call = next(part for part in answer.content if part.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": look(**call.input)}
        history.append({"role": "assistant", "content": [part.model_dump() for part in answer.content]})
        history.append({"role": "user", "content": [result]})
        return call.input, answer.usage.cache_read_input_tokens or 0

    def schema():
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        return client.messages.create(messages=history[:1], output_config=form, **fields | drawn).content[0].text

    check(name, lambda: client.messages.create(messages=history[:1], **fields).content[0].text, streamed, turn, schema)


def with_responses(name, url):
    """openai's responses, through the proxy."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    rules, question = (message["content"] for message in asked(name))
    fields = {"model": MODEL, "instructions": rules, "temperature": 0, "max_output_tokens": HOW["max_tokens"]}
    tools, history = [{"type": "function"} | FUNCTION], [{"role": "user", "content": question}]

    def streamed():
        events = client.responses.create(input=question, stream=True, **fields)
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    def turn():
        choice = {"type": "function", "name": "look"}
        with client.responses.stream(input=history, tools=tools, tool_choice=choice, **fields) as stream:
            answer = stream.get_final_response()
        call = next(part for part in answer.output if part.type == "function_call")
        arguments, same = json.loads(call.arguments), {"call_id": call.call_id}
        history.append(same | {"type": "function_call", "name": call.name, "arguments": call.arguments})
        history.append(same | {"type": "function_call_output", "output": look(**arguments)})
        return arguments, answer.usage.input_tokens_details.cached_tokens

    def schema():
        form = {"format": {"type": "json_schema", "name": "look", "schema": SCHEMA}}
        more = {"text": form, "temperature": 1, "max_output_tokens": DRAWN["max_tokens"]}
        return client.responses.create(input=question, **fields | more).output_text

    check(name, lambda: client.responses.create(input=question, **fields).output_text, streamed, turn, schema)


@contextmanager
def proxy():
    """The URL of litellm's proxy, which ends with the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with TemporaryDirectory() as folder:
        config, log = Path(folder, "proxy.yaml"), Path(folder, "log")
        config.write_text(json.dumps(CONFIG))  # JSON is YAML
        command = [Path(sys.executable).parent / "litellm", "--config", config, "--host", "127.0.0.1", "--port", port]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=os.environ | {"LITELLM_MASTER_KEY": KEY}, stdout=output, stderr=output
            )
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(600):
                assert process.poll() is None, log.read_text()[-3000:]
                try:
                    urllib.request.urlopen(f"{url}/health/liveliness", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield url
        except BaseException:
            print(log.read_text()[-5000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait()


def main():
    """Runs all of them."""
    create = openai.OpenAI(**ADDRESS, max_retries=0).chat.completions.create
    chat_client("openai", lambda **fields: create(model=MODEL, **fields))
    chat_client("litellm", lambda **fields: litellm.completion(f"hosted_vllm/{MODEL}", **ADDRESS, **fields))
    with_langchain("langchain")
    with_pydantic_ai("pydantic-ai")
    with_openai_agents("openai-agents")
    with_instructor("instructor")
    with proxy() as url:
        with_anthropic("anthropic", url)
        with_responses("responses", url)


if __name__ == "__main__":
    main()
