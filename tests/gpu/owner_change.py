"""What it costs to give pages of KV to states, many in one step: milliseconds of the CPU and of the GPU.

    owner_change.py [--out FOLDER]     # 1 GPU with 80 GiB free; --tiny: small sizes, also on a CPU

As many short prompts as pages start in one step. Each keeps one state, and there is no empty page. So a page is emptied for each
state: its blocks move to other pages. With "half" of the blocks of each page cached, half of the bytes that change their owner
are copied. With "all but one" nearly all are: more is not possible, because pages without a free block are emptied by eviction.

Prints a line per case: pages and GiB that change their owner, GiB that are copied, and milliseconds, each the median and the most
of the repeats: of the CPU (choice of pages, new places of the blocks, launching the copies) and of the GPU (upload of the
ids, and copies; "-": the memory is too large). Sizes near those of the 4.1B hybrid of the benchmarks (10 blocks of 3 MiB in a page; with
padding it has 9) and of Nemotron-H-8B with states in float32 (26 of 4 MiB; it has 25), from one page to 10 GiB. The last line is the other direction: a prompt of
100,000 tokens starts in a memory full of short prompts and their states, and evicts many of them. FOLDER gets ``owner_change.json``. Exit code 1 if a
block has the bytes of another one.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.bench.engines import timed_round
from megatron_hybrid_prefix.cache import HybridPrefixCache
from megatron_hybrid_prefix.index.settings import CacheSettings
from megatron_hybrid_prefix.mcore.state.moves import Moves
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from megatron_hybrid_prefix.policy.boundaries import Boundary, CheckpointReason
from megatron_hybrid_prefix.pool.layout import SlotLayout, StateComponent, StateLayout
from megatron_hybrid_prefix.pool.pages import PageLayout
from megatron_hybrid_prefix.pool.shared_memory import BlockShape, SharedMemory
from tests.harness.cached import watched_calls

BLOCK_TOKENS = 4
GIB = 2**30


class RoomTimes:
    """Measures what making room costs an engine with this package's cache. Nothing for other engines.

    The CPU's time is by the clock, and has all that finds blocks and slots: eviction, the choice of pages, new places of
    blocks that move, and launching their copies. So a call that waited for the device would be seen. The device's time is
    from before the upload of the ids to the end of the copy; it is read after the traffic.

    On the CPU the copies run while they are launched, and are counted as copies alone.
    """

    def __init__(self) -> None:
        self._seconds = {"room": 0.0, "copies": 0.0}
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def watch(self, engine: Any) -> Iterator[None]:
        """A context in which the engine is measured."""
        context = engine.context
        cache, moves = getattr(context, "prefix_cache", None), getattr(context, "moves", None)
        memory = getattr(context, "shared_memory", None)
        making_room = partial(self._timed, "room")
        with ExitStack() as stack:
            if cache is not None:
                store = cache._store
                stack.enter_context(watched_calls(store, ("take_blocks",), making_room))
                stack.enter_context(
                    watched_calls(store.checkpoints, ("take_slot", "take_probationary_slot"), making_room)
                )
            if moves is not None:
                stack.enter_context(watched_calls(moves, ("launch",), making_room))
            if memory is not None:
                copying = self._copying_on_gpu if memory.buffer.is_cuda else partial(self._timed, "copies")
                stack.enter_context(watched_calls(memory, ("move_blocks",), copying))
            yield

    def take(self) -> tuple[float, Callable[[], float]]:
        """What was measured since the last call: the CPU's ms, and a function that waits for the copies and returns theirs."""
        events, copies_ms = self._events, 1e3 * self._seconds["copies"]
        room_ms = 1e3 * (self._seconds["room"] - self._seconds["copies"])
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._events = []

        def copied_ms() -> float:
            for _, end in events:
                end.synchronize()
            on_gpu_ms: float = sum(start.elapsed_time(end) for start, end in events)
            return copies_ms + on_gpu_ms

        return room_ms, copied_ms

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - start_s

    @contextmanager
    def _copying_on_gpu(self) -> Iterator[None]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((start, end))


class Sizes(NamedTuple):
    """Of a model: blocks in a page, their bytes, and the numbers of pages that change their owner."""

    name: str
    page_blocks: int
    block_bytes: int
    pages: tuple[int, ...]


MODELS = (
    Sizes("4.1B hybrid", 10, 3 * 2**20, (1, 10, 34, 342)),
    Sizes("Nemotron-H-8B", 26, 4 * 2**20, (1, 10, 99)),
)
TINY = (Sizes("tiny", 10, 1024, (1, 10, 34)), Sizes("tiny", 26, 256, (1, 10)))


class Case:
    """Pages that change their owner in a memory without an empty page.

    Args:
        sizes: Of a model.
        pages: How many.
        cached: Cached blocks of each page; the others are free.
        device: Of the memory.

    Attributes:
        memory: The memory; None if the device has too little.
    """

    def __init__(self, sizes: Sizes, pages: int, cached: int, device: torch.device) -> None:
        size = sizes.page_blocks
        self.pages, self.cached = pages, cached
        # The blocks of the emptied pages, and one of each prompt, go into the holes of the others.
        others = ceil_div(pages * (cached + 1), size - cached) + 1
        self.layout = PageLayout(
            block_bytes=sizes.block_bytes,
            state_bytes=size * sizes.block_bytes,
            page_blocks=size,
            page_states=1,
            total_blocks=(pages + others) * size,
        )
        gc.collect()  # the memory of the case before
        if device.type == "cuda":
            torch.cuda.empty_cache()
        needed = self.layout.total_blocks * sizes.block_bytes + 2 * GIB
        fits = device.type == "cpu" or torch.cuda.mem_get_info()[0] > needed
        self.memory = self._memory(device) if fits else None

    def _memory(self, device: torch.device) -> SharedMemory:
        component = StateComponent(name="state", shape=(1,), dtype="bfloat16")
        slots = SlotLayout((StateLayout(kind="any", layers=1, components=(component,)),))
        block = BlockShape(before=(), after=(self.layout.block_bytes,), dtype=torch.uint8)
        return SharedMemory(slots, layout=self.layout, block=block, own_slots=0, device=device)

    def _cache(self) -> HybridPrefixCache:
        """Each page has as many cached blocks as wanted, and no request holds one. Prompts keep the state at their end from now on."""
        keeps = False

        def rule(*, prompt_tokens: int, **others: Any) -> tuple[Boundary, ...]:
            return (Boundary(prompt_tokens, CheckpointReason.TAIL),) if keeps else ()

        size = self.layout.page_blocks
        cache = HybridPrefixCache(
            CacheSettings(
                block_tokens=BLOCK_TOKENS,
                kv_blocks=self.layout.total_blocks,
                page_blocks=size,
                live_states=False,
                boundary_rule=rule,
            )
        )
        for page in range(self.layout.pages):  # new blocks come from the fullest page with a hole, so page by page
            self.start(cache, page, BLOCK_TOKENS * self.cached)
            assert cache.blocks.allocate(size - self.cached) is not None
        cache.release_all()
        keeps = True
        return cache

    @staticmethod
    def start(cache: HybridPrefixCache, number: int, tokens: int) -> None:
        """A prompt starts, is computed in one step, and keeps running."""
        assert cache.admit(number, cache.match(cache.chain([number] * tokens))) is not None
        cache.publish(cache.plan(number, 0, tokens))

    def run(self) -> dict[str, Any]:
        """One step: what it took, what changed, and whether each block has its bytes."""
        cache, memory, times = self._cache(), self.memory, RoomTimes()
        moves = Moves(SimpleNamespace(shared_memory=memory))
        moves.serve(cache)
        origin: dict[int, int] = {}
        cache._store.on_move = lambda source, target: origin.update({target: origin.pop(source, source)})
        if memory is not None:
            labels = memory.kv_rows[0, :, :8].view(torch.int64)[:, 0]
            labels.copy_(torch.arange(len(labels)))
            _synchronize()
        engine = SimpleNamespace(context=SimpleNamespace(prefix_cache=cache, moves=moves, shared_memory=memory))
        with timed_round(), times.watch(engine):
            for number in range(self.pages):
                self.start(cache, self.layout.pages + number, BLOCK_TOKENS)
            if memory is not None:
                moves.launch()
        cpu_ms, copied_ms = times.take()
        use = cache.memory_use()
        assert use.pages_to_states == self.pages and cache.stats().evictions == 0
        found = {"cpu_ms": cpu_ms, "moved_blocks": use.moved_blocks, "gpu_ms": None, "right": True}
        if memory is not None:
            found["gpu_ms"] = copied_ms()
            values = labels.tolist()
            found["right"] = all(values[block_id] == source for block_id, source in origin.items())
        return found


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(sizes: Sizes, pages: int, fill: str, device: torch.device, repeats: int) -> dict[str, Any]:
    """A case: prints its line, and returns its figures."""
    cached = sizes.page_blocks // 2 if fill == "half" else sizes.page_blocks - 1
    case = Case(sizes, pages, cached, device)
    found = [case.run() for _ in range(repeats + 1)][1:]  # the first compiles the kernel
    block_gib = sizes.block_bytes / GIB
    row: dict[str, Any] = {
        "model": sizes.name,
        "fill": fill,
        "pages": pages,
        "right": all(one["right"] for one in found),
    }
    row |= {"changed_gib": pages * sizes.page_blocks * block_gib, "copied_gib": found[0]["moved_blocks"] * block_gib}
    said = f"{sizes.name:14} {fill:12} {pages:4} pages, {row['changed_gib']:6.2f} GiB, copied {row['copied_gib']:6.2f} GiB:"
    for name, label in (("cpu_ms", "CPU"), ("gpu_ms", "copies")):
        times = [one[name] for one in found if one[name] is not None]
        row[name] = {"median": statistics.median(times), "most": max(times)} if times else None
        said += f"  {label} " + (f"{row[name]['median']:7.3f} ({row[name]['most']:.3f}) ms" if times else "-")
    print(f"{said}  {'right' if row['right'] else 'WRONG BYTES'}", flush=True)
    return row


def long_prompt(prompt_blocks: int = 391, pages: int = 1000, page_blocks: int = 10) -> dict[str, float]:
    """A prompt of 100,000 tokens gets the memory of states of prompts of four blocks. Numbers only: no KV moves for it."""
    cache = HybridPrefixCache(
        CacheSettings(block_tokens=BLOCK_TOKENS, kv_blocks=pages * page_blocks, page_blocks=page_blocks)
    )
    number = 0
    while cache.stats().evictions < 200:
        Case.start(cache, number, 4 * BLOCK_TOKENS)
        cache.release(number)
        cache.take_copies()
        number += 1
    before, evicted, times = cache.memory_use(), cache.stats().evictions, RoomTimes()
    with timed_round(), times.watch(SimpleNamespace(context=SimpleNamespace(prefix_cache=cache))):
        Case.start(cache, number, prompt_blocks * BLOCK_TOKENS)
    use = cache.memory_use()
    return {
        "cpu_ms": times.take()[0],
        "pages_to_kv": use.pages_to_kv - before.pages_to_kv,
        "moved_blocks": use.moved_blocks - before.moved_blocks,
        "evicted_states": cache.stats().evictions - evicted,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for owner_change.json")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU where there is no GPU")
    options = parser.parse_args()
    platform = ensure_platform()
    print(platform.describe(), flush=True)
    started_s = time.monotonic()
    rows = [
        measure(sizes, pages, fill, platform.device, options.repeats)
        for sizes in (TINY if options.tiny else MODELS)
        for fill in ("half", "all but one")
        for pages in sizes.pages
    ]
    shut_down()
    found = [long_prompt() for _ in range(options.repeats)]
    cpu_ms = sorted(one.pop("cpu_ms") for one in found)
    print(f"a prompt of 391 blocks: CPU {statistics.median(cpu_ms):.3f} ({cpu_ms[-1]:.3f}) ms, {found[0]}")
    wrong = sum(not row["right"] for row in rows)
    print(f"{time.monotonic() - started_s:.0f} s")
    print(json.dumps({"cases": len(rows), "wrong": wrong}))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "owner_change.json").write_text(json.dumps(rows, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
