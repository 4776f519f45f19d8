"""What the model's kernels lose while copies to the host run beside them. On an idle GPU::

    python tests/gpu/beside_stores.py [--mib 1024] [--page-kib 3250]

A copy of a store fills the host link, by `copy_pages` with some number of programs, or by the copy engines. Beside it run many
small kernels, then matrix products, each launch after the other. Columns: milliseconds that 100 of them take alone and beside the
copy, and the speed of the copy.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch

from megatron_hybrid_prefix.ops import engine_copies, page_copies
from megatron_hybrid_prefix.tiers.pinned import allocate, pin, unpin

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
    unpin(memory, device)


if __name__ == "__main__":
    main()
