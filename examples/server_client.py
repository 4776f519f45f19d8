"""A conversation with a server, using the ``openai`` client: ``python examples/server_client.py [URL]``.

Start the server first, in another terminal: ``hybrid-prefix serve --preset tiny --port 8000``.
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")  # a server with --api-keys needs a real key
messages = [{"role": "system", "content": "You answer questions about one long text. " * 20}]
for question in ("Who wrote it?", "When?", "What is it about?"):
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=16,
        temperature=0,
        extra_body={"cache_salt": "the example"},  # requests with another salt share nothing with these
    )
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    usage = answer.usage
    print(f"{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens were not computed")
