"""What the scripts here share. Without a GPU, tiny sizes try most of them; times are by the clock then."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.engine_helpers import greedy, kv_budget, run_to_end

ON_GPU = torch.cuda.is_available()
BLOCK_TOKENS = 256


@contextmanager
def started(
    doc: str | None, *words: str, sizes: Callable[[Any], dict[str, int]] = lambda args: {}, **options: Any
) -> Iterator[argparse.Namespace]:
    """A script's arguments, while the platform runs with ``sizes``.

    ``words`` are positional, "name" or "name=default". An option has its default's type, or (a tuple) choices.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, _, default in (word.partition("=") for word in words):
        parser.add_argument(name, **({"nargs": "?", "default": default} if default else {}))
    for name, value in {"device": (None, "cpu", "cuda"), **options}.items():
        kind = str if value is None else type(value)
        of = {"action": "store_true"} if value is False else {"default": value, "type": kind}
        if isinstance(value, tuple):
            of = {"default": value[0], "choices": value}
        parser.add_argument("--" + name.replace("_", "-"), **of)
    args = parser.parse_args()
    args.platform = ensure_platform(device=args.device, **sizes(args))
    print(args.platform.describe(), flush=True)
    yield args
    shut_down()


def report(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """The last line, as JSON."""
    print(json.dumps({"platform": args.platform.describe()} | found), flush=True)


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


def graph_fields(graphs: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `build_hybrid_model` and of `build_engine` for CUDA graphs; none without a GPU."""
    return (
        ({"cuda_graph_impl": "local"}, {"num_cuda_graphs": -1})
        if graphs and ON_GPU
        else ({"cuda_graph_impl": "none"}, {})
    )


def engine_fields(model: Any, tokens: int, prompts: int, requests: int = 4) -> dict[str, Any]:
    """Fields of `build_engine` for prompts of so many tokens, each one step: KV has room for ``prompts`` of them."""
    blocks = prompts * (tokens // BLOCK_TOKENS + 2)
    return {
        "max_sequence_length": tokens + BLOCK_TOKENS,
        "max_requests": requests,
        "max_tokens": (tokens // 64 + 1) * 64,
        "block_size_tokens": BLOCK_TOKENS,
        **kv_budget(model, blocks, block_tokens=BLOCK_TOKENS, max_requests=requests),
    }


class FirstTokens:
    """Sends prompts to engines, and times their first tokens."""

    sent = 0

    @torch.inference_mode()
    def send(self, engine: Any, prompt: Sequence[int], count: int = 2) -> tuple[float, Any]:
        """Milliseconds until the step of the first token is over on the GPU, too; and the finished request.

        The default is two tokens: at its end megatron turns the whole prompt into text, after its last token.
        """
        self.sent += 1
        finished: dict[int, Any] = {}
        synchronize()
        start_s = time.perf_counter()
        engine.add_request(self.sent, prompt, greedy(count))
        run_to_end(engine, finished, steps=1)
        synchronize()
        ms = (time.perf_counter() - start_s) * 1e3
        run_to_end(engine, finished)
        return ms, finished[self.sent]
