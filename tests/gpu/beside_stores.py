"""What the model's kernels lose while copies to the host run beside them. On an idle GPU::

    python -m tests.gpu.beside_stores [--mib 1024] [--page-kib 3250] [--decodes]

A copy of a store fills the host link, by `copy_pages` with some number of programs, or by the copy engines. Beside it run many
small kernels, then matrix products, each launch after the other. Columns: milliseconds that 100 of them take alone and beside the
copy, and the speed of the copy. The last rows are copies of 4 KiB to the host on another stream, one after the other: the longest.

``--decodes`` times decode steps with CUDA graphs of `hybrid-4b`, alone and beside a store.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config, state_bytes
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.ops import engine_copies, page_copies
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from megatron_hybrid_prefix.tiers.pinned import allocate, pin, unpin
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, EntryKind, Tag
from tests.gpu.host_cost import by_kernel
from tests.harness.engine_helpers import greedy, run_to_end

KERNELS, REPEATS = 100, 7
PROGRAMS = (1, 2, 3, 4, 6, 8, 16, 32)


def timed(beside: Callable[[], object], kernel: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of `KERNELS` kernels, and of what runs beside them on another stream; medians."""
    found = []
    own, other = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    for _ in range(REPEATS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            events[0].record()
            beside()
            events[1].record()
        with torch.cuda.stream(own):
            torch.cuda._sleep(2_000_000)  # until the copy runs and all kernels are launched
            events[2].record()
            for _ in range(KERNELS):
                kernel()
            events[3].record()
        torch.cuda.synchronize()
        found.append((events[2].elapsed_time(events[3]), events[0].elapsed_time(events[1])))
    ms, beside_ms = (statistics.median(part) for part in zip(*found[2:], strict=True))
    return ms, beside_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--page-kib", type=int, default=3250)
    parser.add_argument("--decodes", action="store_true")
    args = parser.parse_args()
    page_bytes = args.page_kib * 1024
    pages = args.mib * 2**20 // page_bytes
    device = torch.device("cuda", 0)
    staging = torch.ones(pages * page_bytes, dtype=torch.uint8, device=device)
    memory = allocate(pages * page_bytes)
    pin(memory, device)
    ids = torch.arange(pages, device=device)
    backwards = ids.flip(0)[:, None].contiguous()
    rows, on_host = staging.view(1, pages, page_bytes), memory.view(pages, page_bytes)
    by_kernel = partial(page_copies.copy_pages, rows, on_host, ids, backwards, to_pages=True)
    ranges = [(page * page_bytes, (pages - 1 - page) * page_bytes, page_bytes) for page in range(pages)]
    by_engines = partial(engine_copies.copy_ranges, staging, memory, ranges, to_host=True)

    small = torch.ones(2**16, dtype=torch.bfloat16, device=device)
    medium, wide = (torch.ones(2**13, n, dtype=torch.bfloat16, device=device) for n in (2**11, 2**12))
    weight = torch.ones(2**11, 2**12, dtype=torch.bfloat16, device=device)
    beside: dict[str, Callable[[], object]] = {
        "small kernels": lambda: small.add_(1),
        "products of 8,192 tokens": lambda: torch.mm(medium, weight, out=wide),
    }
    print(f"{torch.cuda.get_device_name()}: {pages} pages of {page_bytes / 1e6:.2f} MB to the host")
    print(f"{'ms of 100':28} {'alone':>8} " + "".join(f"{f'{n} pr.':>15}" for n in PROGRAMS) + f"{'engines':>15}")
    for name, kernel in beside.items():
        cells = [f"{timed(lambda: None, kernel)[0]:8.3f} "]
        for programs in PROGRAMS:
            with patch.object(page_copies, "_TO_HOST_PROGRAMS", programs):
                ms, copy_ms = timed(by_kernel, kernel)
            cells.append(f"{ms:8.3f} ({staging.numel() / copy_ms / 1e6:4.1f})")
        ms, copy_ms = timed(by_engines, kernel)
        cells.append(f"{ms:8.3f} ({staging.numel() / copy_ms / 1e6:4.1f})")
        print(f"{name:28} " + "".join(cells), flush=True)
    print("(in parentheses: GB/s of the copy; after it ends, kernels run alone)")
    print(f"{'longest copy of 4 KiB':28} {longest_copy(lambda: None):8.3f}  ", end="")
    for programs in PROGRAMS:
        with patch.object(page_copies, "_TO_HOST_PROGRAMS", programs):
            print(f"{longest_copy(by_kernel):8.3f}       ", end="")
    print(f"{longest_copy(by_engines):8.3f}", flush=True)
    unpin(memory, device)
    if args.decodes:
        decodes()


def longest_copy(beside: Callable[[], object]) -> float:
    """Milliseconds of the longest of 30 copies of 4 KiB to the host; median."""
    here, there = torch.zeros(512, dtype=torch.int64, device="cuda"), torch.zeros(512, dtype=torch.int64).pin_memory()
    other, found = torch.cuda.Stream(priority=-1), []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            beside()
        times = []
        for _ in range(30):
            start = time.perf_counter()
            there.copy_(here, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        found.append(max(times))
    return statistics.median(found[2:])


@torch.inference_mode()
def decodes(requests: int = 8, rounds: int = 12) -> None:
    """Steps of running requests, right after a store was launched that nothing in the cache needs."""
    ensure_platform()
    model = build_hybrid_model("hybrid-4b", seed=0, cuda_graph_impl="local")
    states_gb = 18 * state_bytes(mamba_state_config(model)) / 2**30
    engine = build_engine(
        model,
        HybridPrefixConfig(mamba_gb=states_gb, host_gb=4),
        buffer_size_gb=2.0,
        max_requests=requests,
        max_tokens=2048,
        max_sequence_length=4096,
        num_cuda_graphs=2,
    )
    arena, dice = engine.context.host_moves.arena, random.Random(0)
    pages_of, pages = ceil_div(arena.copies.bytes[EntryKind.KV], arena.pages.page_bytes), len(arena.pages.rows)

    def store(count: int) -> None:
        own = dice.sample(range(pages // 2, pages), count * pages_of)
        arena.carry_out(
            [
                BlockTransfer(
                    source=DEVICE,
                    target=HOST,
                    device_id=block,
                    pages=tuple(own[block * pages_of : (block + 1) * pages_of]),
                    tag=Tag(kind=EntryKind.KV, key=b"%d" % block, depth_tokens=1, epoch=0),
                )
                for block in range(count)
            ]
        )
        arena.stores.wait()

    for number in range(requests):
        tokens = [dice.randrange(model.hybrid_config.vocab_size) for _ in range(120)]
        engine.add_request(number, tokens, greedy(3000))
    run_to_end(engine, {}, 12)
    nothing = contextlib.nullcontext
    ways = {
        "alone": (0, nothing),
        "beside a store by the kernel": (150, partial(by_kernel, 2)),
        "by the copy engines": (150, nothing),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (blocks, way) in ways.items():
            torch.cuda.synchronize()
            if blocks:
                with way():
                    store(blocks)
            start = time.perf_counter()
            run_to_end(engine, {}, 2)
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - start) * 1e3)
    print(
        f"ms of 2 decode steps of {requests} requests; a store has {150 * arena.copies.bytes[EntryKind.KV] / 1e6:.0f} MB"
    )
    for name, times in found.items():
        own = times[2:]
        print(f"{name:28} {statistics.median(own):8.2f} ({min(own):.2f} to {max(own):.2f})", flush=True)
    shut_down()


if __name__ == "__main__":
    main()
