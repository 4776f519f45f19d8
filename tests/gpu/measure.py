"""What the scripts that measure share: first tokens, and how far an engine was when.

Those scripts judge nothing; no test runs them. Without a GPU, tiny sizes try each of them; times are by the clock then.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from tests.harness.engine_helpers import greedy, kv_budget, run_to_end

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BLOCK_TOKENS = 256


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


def save(out: Path | None, name: str, found: Any) -> None:
    """Writes ``found`` to ``NAME.json`` in a folder, if one is given."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(found, indent=1))


def graph_fields(graphs: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `build_hybrid_model` and of `build_engine` for CUDA graphs; none without a GPU."""
    return ({"cuda_graph_impl": "local"}, {"num_cuda_graphs": 8}) if graphs and ON_GPU else ({}, {})


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
    """Sends prompts to engines, and times their first tokens.

    Attributes:
        milestones: When the parts of a step were reached; None: they are not noted.
    """

    def __init__(self, milestones: bool = True) -> None:
        self.milestones = Milestones() if milestones else None
        self._sent = 0

    @torch.inference_mode()
    def send(self, engine: Any, prompt: Sequence[int], count: int = 2) -> tuple[float, dict[str, Any], Any]:
        """Milliseconds until the step of the first token is over on the GPU, too; milestones; and the finished request.

        The default is two tokens: at its end megatron turns the whole prompt into text, after its last token.
        """
        self._sent += 1
        finished: dict[int, Any] = {}
        synchronize()
        if self.milestones is not None:
            self.milestones.start()
        start_s = time.perf_counter()
        engine.add_request(self._sent, prompt, greedy(count))
        accepted_ms = (time.perf_counter() - start_s) * 1e3
        run_to_end(engine, finished, steps=1)
        step_ms = (time.perf_counter() - start_s) * 1e3
        synchronize()
        ms = (time.perf_counter() - start_s) * 1e3
        parts = {} if self.milestones is None else self.milestones.found()
        for name, end_ms in (("request accepted", accepted_ms), ("step", step_ms), ("device", ms)):
            parts[name] = (0.0, end_ms, end_ms)
        run_to_end(engine, finished)
        return ms, parts, finished[self._sent]


class Milestones:
    """When the parts of a step were reached, in milliseconds since `start`; on any thread."""

    def __init__(self) -> None:
        from megatron_hybrid_prefix.cache import HybridPrefixCache
        from megatron_hybrid_prefix.mcore.context.context import HybridPrefixContext
        from megatron_hybrid_prefix.mcore.context.decode import DecodedStates
        from megatron_hybrid_prefix.mcore.context.request import RequestLoads
        from megatron_hybrid_prefix.mcore.engine.controller import HybridPrefixController
        from megatron_hybrid_prefix.mcore.engine.engine import HybridPrefixEngine
        from megatron_hybrid_prefix.mcore.state.moves import HostMoves
        from megatron_hybrid_prefix.tiers import file
        from megatron_hybrid_prefix.tiers.jobs import TierThreads
        from megatron_hybrid_prefix.tiers.loads import LoadCopies
        from megatron_hybrid_prefix.tiers.stores import StoreCopies
        from megatron_hybrid_prefix.upstream.context import ContextSeam

        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._spent: Counter[str] = Counter()
        self.start()
        for owner, name, label in (
            (RequestLoads, "load_back", "lookup"),
            (HostMoves, "start_load", "start"),
            (TierThreads, "read", "begin to read"),
            (file, "read_file", "read"),
            (LoadCopies, "run", "load launch"),
            (StoreCopies, "run", "store launch"),
            (StoreCopies, "send", "store launch: copies after the forward"),
            (HostMoves, "fetch", "wait"),
            (HybridPrefixContext, "prefix_request", "keys"),
            (HybridPrefixContext, "add_request", "admission"),
            (HybridPrefixCache, "admit", "admission: the cache"),
            (ContextSeam, "add_admitted", "admission: megatron"),
            (HybridPrefixCache, "plan", "admission: the plan"),
            (HybridPrefixContext, "initialize_attention_state", "metadata and preparation"),
            (HybridPrefixContext, "zero_live_states", "stores and zeros"),
            (HybridPrefixContext, "transfer_bookkeeping_to_gpu", "preparation"),
            (HybridPrefixCache, "publish", "publication"),
            (HybridPrefixContext, "forward_launched", "beside the forward"),
            (HybridPrefixContext, "update_requests", "bookkeeping"),
            (HybridPrefixContext, "release_memory_blocks_from_request_indexes", "bookkeeping: release"),
            (DecodedStates, "follow", "bookkeeping: decode"),
            (HybridPrefixController, "tokens_sampled", "sampled"),
            (HybridPrefixEngine, "post_process_requests", "answers"),
            (HostMoves, "launch", "launches of copies"),
            (file.FileTier, "look", "look of the thread"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), label))

    def start(self) -> None:
        """A request is about to be sent."""
        for each in (self._first, self._last, self._spent):
            each.clear()
        self._start_s = time.perf_counter()

    def _timed(self, work: Callable[..., Any], label: str) -> Callable[..., Any]:
        @wraps(work)
        def timed(*args: Any, **options: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return work(*args, **options)
            finally:
                end_s = time.perf_counter()
                self._first.setdefault(label, (begin_s - self._start_s) * 1e3)
                self._last[label] = (end_s - self._start_s) * 1e3
                self._spent[label] += (end_s - begin_s) * 1e3

        return timed

    def found(self) -> dict[str, tuple[float, float, float]]:
        """Label: (the first began, the last ended, all took)."""
        return {label: (self._first[label], self._last[label], self._spent[label]) for label in list(self._last)}


def milestones_table(found: Sequence[dict[str, tuple[float, float, float]]]) -> Iterator[str]:
    """Lines of a table of medians, from what `FirstTokens.send` returned for several requests."""
    labels = sorted(
        {label for one in found for label in one}, key=lambda label: min(o[label] for o in found if label in o)
    )
    yield "| | the first begins | the last ends | all take, ms | requests |"
    yield "|---|---|---|---|---|"
    for label in labels:
        cells = [statistics.median(each) for each in zip(*(one[label] for one in found if label in one), strict=True)]
        yield f"| {label} | {' | '.join(f'{ms:.2f}' for ms in cells)} | {sum(label in one for one in found)} |"
