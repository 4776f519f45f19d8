"""What the server adds to a cached turn of a chat: the first token over HTTP, with an engine that answers at once, over one tokenization.

python -m scripts.chat_turns [FOLDER]    # of a tokenizer with a chat template; else one with 4,096 tokens is trained
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_hybrid_prefix.serve.app import Api, Limits
from megatron_hybrid_prefix.serve.backend import Backend, GenerationTask, Update
from megatron_hybrid_prefix.serve.chat_template import load_chat_form
from megatron_hybrid_prefix.serve.http_server import HttpServer, bound_socket
from megatron_hybrid_prefix.serve.metrics import ServerMetrics
from megatron_hybrid_prefix.serve.protocol import ServedModel
from megatron_hybrid_prefix.text.tokenizer import HuggingFaceTokenizer

CHATS = ((100, 33_000), (200, 137_000))  # messages, tokens
ROUNDS = 7
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class AtOnce(Backend):
    """Answers each request with a token."""

    problem = None

    def submit(self, task: GenerationTask) -> None:
        task.deliver(Update(tokens=[1], finished=True))

    def abort(self, task: GenerationTask) -> None: ...
    def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def snapshots(self) -> Any: ...
    async def explain(self, prompt: list[int], sampling: dict[str, Any]) -> Any: ...
    async def reset_cache(self) -> None: ...


def make_folder(folder: Path) -> Path:
    """A byte-level BPE tokenizer, trained on this package's sources."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train(sorted(map(str, Path(__file__).parents[1].glob("megatron_hybrid_prefix/**/*.py"))), trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def seconds(*runs: Callable[[], Any]) -> list[float]:
    """The shortest of `ROUNDS` calls of each, which take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for own, run in zip(times, runs, strict=True):
            began_s = time.perf_counter()
            run()
            own.append(time.perf_counter() - began_s)
    return [min(own) for own in times]


def main(folder: Path) -> None:
    """Prints a line for each chat."""
    tokenizer, chat = HuggingFaceTokenizer(folder), load_chat_form(None, folder)
    fields = {
        "vocab_size": tokenizer.vocab_size,
        "check_fits": lambda *_: None,
        "limit_tokens": 10**6,
        "add_bos": False,
    }
    served = ServedModel(model="m", tokenizer=tokenizer, chat=chat, **fields)  # type: ignore[arg-type]  # several types
    api = Api(AtOnce(), served, Limits(sequences=9), ServerMetrics(1))
    listener = bound_socket("127.0.0.1", 0)
    server = HttpServer(api.app(), drain_s=0.0, log_level="warning")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    client = http.client.HTTPConnection(*listener.getsockname())
    source = "\n".join(
        path.read_text() for path in sorted(Path(__file__).parents[1].glob("megatron_hybrid_prefix/**/*.py"))
    )
    of_source = len(source) / len(tokenizer.tokenize(source))  # characters per token
    for messages, tokens in CHATS:
        size = int(of_source * tokens / messages)
        roles = ("user", "assistant")
        said = [{"role": roles[at % 2], "content": source[at * 997 % 100_000 :][:size]} for at in range(messages - 1)]
        text = chat.render(said)

        def turn(said: Any = said, **fields: Any) -> None:
            body = json.dumps({"model": "m", "messages": said, "max_tokens": 1, "stream": True} | fields)
            client.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            assert client.getresponse().read().startswith(b"data: {")

        once, whole, rest = seconds(partial(tokenizer.tokenize, text), turn, partial(turn, cache_breakpoints=[]))
        print(
            f"{len(said)} messages, {len(tokenizer.tokenize(text)):,} tokens: tokenized {1e3 * once:.0f} ms, first token "
            f"{1e3 * whole:.0f} ms ({whole / once:.2f}), without message ends {1e3 * rest:.0f} ms"
        )
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(sys.argv[1]) if sys.argv[1:] else make_folder(Path(made)))
