"""Where the time of a load or store goes: ways over the host link, kinds of host memory, launches, small copies beside it. No model::

    python tests/gpu/transfer_parts.py [--out DIR] [--scale 1]

Entries are those of `transfer_speed.py`. Times are medians; "GPU" is between two events around the launches. Without a GPU
everything runs at once, which only tries the script: use ``--scale 0.01`` there.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megatron_hybrid_prefix.ops import page_copies
from megatron_hybrid_prefix.ops.engine_copies import copy_ranges
from megatron_hybrid_prefix.ops.page_copies import copy_pages
from megatron_hybrid_prefix.tiers import entry_copies
from megatron_hybrid_prefix.tiers.arena import HostArena
from megatron_hybrid_prefix.tiers.pinned import allocate, choose_page_bytes, pin, unpin
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, EntryKind, Load, LoadState, Tag

REPEATS = 13
ON_GPU = torch.cuda.is_available()
PLACE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def timed(move: Callable[[], object]) -> tuple[float, float, float]:
    """Milliseconds until launched, until over, and on the GPU; medians."""
    found = []
    for _ in range(REPEATS):
        synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if ON_GPU else []
        start = time.perf_counter()
        if events:
            events[0].record()
        move()
        if events:
            events[1].record()
        launched = time.perf_counter() - start
        synchronize()
        over = time.perf_counter() - start
        found.append((launched * 1e3, over * 1e3, events[0].elapsed_time(events[1]) if events else over * 1e3))
    return tuple(statistics.median(part) for part in zip(*found[3:], strict=True))  # type: ignore[return-value]


class Table:
    """Rows, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, moved_bytes: int, move: Callable[[], object], plain_ms: float | None = None) -> float:
        launch, over, gpu = timed(move)
        share = f"{plain_ms / over:6.3f} {plain_ms / gpu:6.3f}" if plain_ms else " " * 13
        self.rows.append({"name": name, "launch_ms": launch, "over_ms": over, "gpu_ms": gpu, "bytes": moved_bytes})
        print(f"{name:66} {launch:7.3f} {over:7.3f} {gpu:7.3f} {moved_bytes / over / 1e6:6.1f} {share}", flush=True)
        return over


def host_memories(size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Kinds of host memory, (size,) uint8. They differ in where they begin, in their pages, and in whether processes could share them."""
    yield "driver's", torch.zeros(size, dtype=torch.uint8, pin_memory=ON_GPU)
    for name, make in {
        "PyTorch's": lambda: torch.empty(size, dtype=torch.uint8),
        "the arena's": lambda: allocate(size),
        "the arena's, 64 bytes on": lambda: allocate(size + 64)[64:],
    }.items():
        start = time.perf_counter()
        memory = make()
        if ON_GPU:
            pin(memory, PLACE)
        else:
            memory.fill_(0)
        print(
            f"{name}, from byte {memory.data_ptr() % 4096} of a page: {size / 1e6:.0f} MB made and pinned in {time.perf_counter() - start:.3f} s",
            flush=True,
        )
        yield name, memory


def kernels(table: Table, count_bytes: int, page_bytes: int) -> None:
    """Plain copies and the kernel alone, on several kinds of host memory."""
    pages_count = count_bytes // page_bytes
    count_bytes = pages_count * page_bytes
    device = torch.zeros(count_bytes, dtype=torch.uint8, device=PLACE)
    memories = dict(host_memories(2 * count_bytes))
    order = list(range(2 * pages_count))
    random.Random(0).shuffle(order)
    pages = torch.tensor(order[:pages_count], device=PLACE)[:, None]
    rows, numbers = device.view(pages_count, -1), torch.arange(pages_count, device=PLACE)
    sums = torch.zeros(pages_count, dtype=torch.int64, device=PLACE)
    plain: dict[bool, float] = {}
    for name, memory in memories.items():
        part, paged = memory[:count_bytes], memory.view(-1, page_bytes)
        for to_host in (False, True):
            way = "to the host" if to_host else "to the device"
            pair = (part, device) if to_host else (device, part)
            own = table.add(
                f"plain copy, {name} memory, {way}",
                count_bytes,
                lambda pair=pair: pair[0].copy_(pair[1], non_blocking=True),
                plain.get(to_host),
            )
            plain.setdefault(to_host, own)
            ranges = [(number * page_bytes, page * page_bytes, page_bytes) for number, page in enumerate(order)]
            table.add(
                f"  a copy for each page, {way}",
                count_bytes,
                lambda memory=memory, ranges=ranges, to_host=to_host: copy_ranges(
                    device, memory, ranges[:pages_count], to_host=to_host
                ),
                plain[to_host],
            )
            table.add(
                f"  the kernel, {way}",
                count_bytes,
                lambda paged=paged, to_host=to_host: copy_pages(
                    rows[None], paged, numbers, pages, to_pages=to_host, sums=sums
                ),
                plain[to_host],
            )
    small_copies(table, memories["the arena's"], device, rows, numbers, pages, page_bytes, order)
    synchronize()
    if ON_GPU:
        for name, memory in memories.items():
            if name != "driver's":
                unpin(memory, PLACE)


def small_copies(table, memory, device, rows, numbers, pages, page_bytes, order) -> None:
    """How long a copy of 4 KiB takes on another stream while a large one runs."""
    if not ON_GPU:
        return
    paged, count_bytes = memory.view(-1, page_bytes), device.numel()
    small, here = torch.zeros(512, dtype=torch.int64).pin_memory(), torch.zeros(512, dtype=torch.int64, device=PLACE)
    stream = torch.cuda.Stream(PLACE, priority=-1)

    def by_pages(to_host: bool) -> None:
        ranges = [
            (number * page_bytes, page * page_bytes, page_bytes) for number, page in enumerate(order[: len(rows)])
        ]
        copy_ranges(device, memory, ranges, to_host=to_host)

    def by_parts(to_host: bool) -> None:
        ranges = [(start, start, min(1 << 18, count_bytes - start)) for start in range(0, count_bytes, 1 << 18)]
        copy_ranges(device, memory, ranges, to_host=to_host)

    def plain(to_host: bool) -> None:
        a, b = memory[:count_bytes], device
        (a if to_host else b).copy_(b if to_host else a, non_blocking=True)

    def kernel(to_host: bool) -> None:
        copy_pages(rows[None], paged, numbers, pages, to_pages=to_host)

    ways: dict[str, Callable[[bool], None]] = {
        "nothing": lambda to_host: None,
        "the kernel": kernel,
        "one plain copy": plain,
        "a copy for each page": by_pages,
        "copies of 256 KiB": by_parts,
    }
    for name, run in ways.items():
        for big_to_host in (False, True):
            found = {}
            for small_to_host in (False, True):
                times = []
                for _ in range(REPEATS):
                    synchronize()
                    with torch.cuda.stream(stream):
                        run(big_to_host)
                    start = time.perf_counter()
                    (small if small_to_host else here).copy_(here if small_to_host else small, non_blocking=True)
                    torch.cuda.current_stream().synchronize()
                    times.append((time.perf_counter() - start) * 1e3)
                found[small_to_host] = statistics.median(times)
                table.rows.append(
                    {
                        "name": "small copy",
                        "beside": name,
                        "big to host": big_to_host,
                        "to host": small_to_host,
                        "ms": found[small_to_host],
                    }
                )
            print(
                f"4 KiB beside {name} {'to the host' if big_to_host else 'to the device'}: "
                f"to the device {found[False]:.3f} ms, to the host {found[True]:.3f} ms",
                flush=True,
            )


def transfers(table: Table, scale: float, kv_blocks: int, states: int) -> None:
    """Loads and stores of an arena, and when their first copies are launched and begin."""
    kv = torch.randn(2 * 6, kv_blocks + 8, max(1, int(256 * 8 * scale)) * 64, device=PLACE).bfloat16()
    conv = torch.randn(26, states + 4, 4, max(8, int(6144 * scale)), device=PLACE).bfloat16()
    ssm = torch.randn(26, states + 4, max(1, int(64 * scale)), 64, 128, device=PLACE).bfloat16()
    tensors = {EntryKind.KV: [kv], EntryKind.STATE: [conv, ssm]}
    sizes = {kind: sum(t[:, 0].numel() * t.element_size() for t in own) for kind, own in tensors.items()}
    page_bytes = choose_page_bytes(sizes.values())
    pages_of = {kind: -(-size // page_bytes) for kind, size in sizes.items()}
    counts = {EntryKind.KV: kv_blocks, EntryKind.STATE: states}
    pages = list(range(2 * sum(counts[kind] * pages_of[kind] for kind in counts)))
    arena = HostArena(lambda: tensors, pages=len(pages), page_bytes=page_bytes, pages_of=pages_of, device=PLACE)
    random.Random(0).shuffle(pages)
    load = Load(load_id=1, request_id=1, state=LoadState.ASKED, depth_tokens=1, pinned=())

    def units(to_host: bool) -> list[BlockTransfer]:
        found, at = [], 0
        for kind, count in counts.items():
            for number in range(count):
                own, at = tuple(pages[at : at + pages_of[kind]]), at + pages_of[kind]
                tag = Tag(kind=kind, key=f"{kind} {number}".encode(), depth_tokens=1, epoch=0)
                source, target = (DEVICE, HOST) if to_host else (HOST, DEVICE)
                of_load = None if to_host else load
                found.append(
                    BlockTransfer(source=source, target=target, device_id=number, pages=own, tag=tag, load=of_load)
                )
        return found

    moved = sum(counts[kind] * sizes[kind] for kind in counts)
    print(f"--- {moved / 1e6:.0f} MB in {len(pages) // 2} pages of {page_bytes / 1e6:.2f} MB", flush=True)
    host = torch.empty(moved, dtype=torch.uint8)
    host = host.pin_memory() if ON_GPU else host
    there = torch.empty(moved, dtype=torch.uint8, device=PLACE)
    plain = {
        False: table.add("plain copy to the device", moved, lambda: there.copy_(host, non_blocking=True)),
        True: table.add("plain copy to the host", moved, lambda: host.copy_(there, non_blocking=True)),
    }
    for to_host in (True, False):
        own = units(to_host)
        name = "store" if to_host else "load"

        def move(own: list[BlockTransfer] = own) -> None:
            load.transfers.clear()  # they are launched again
            arena.carry_out(own)
            if ON_GPU:
                torch.cuda.current_stream().wait_stream(arena.stores.queue._stream)  # always after its other stream
                torch.cuda.current_stream().wait_stream(arena.loads.queue._stream)

        table.add(f"{name}", moved, move, plain[to_host])
        phases(table, arena, own, name)
    arena.finish()
    assert not arena.loads.is_wrong(load)
    by_programs(table, arena, units(True), plain[True], moved, sizes[EntryKind.KV])
    arena.close()


def by_programs(
    table: Table, arena: HostArena, own: list[BlockTransfer], plain_ms: float, moved: int, kv_bytes: int
) -> None:
    """How many programs copy to the host. "GPU" is how long the model waits for its reads."""

    def move(units: list[BlockTransfer]) -> None:
        arena.carry_out(units)
        arena.stores.wait()

    for programs in (1, 2, 3, 4, 32):
        with patch.object(page_copies, "_TO_HOST_PROGRAMS", programs):
            table.add(f"store by {programs} programs, the model waits", moved, partial(move, own), plain_ms)
            for count in (1, 5):
                row = f"  of {count} KV block{'s' * (count > 1)}"
                table.add(row, count * kv_bytes, partial(move, own[:count]))


def phases(table: Table, arena: HostArena, own: list[BlockTransfer], name: str) -> None:
    """Calls of the kernels in a transfer: when the CPU launches them, when the GPU begins and ends."""
    found: list[dict[str, list[float]]] = []
    names = ["copy_pages", "copy_ranges", "ids_on_device"]
    originals = {each: getattr(entry_copies, each) for each in names}
    for _ in range(REPEATS):
        synchronize()
        calls: list[tuple[str, float, float, Any, Any]] = []

        def wrap(each: str, calls: list[Any] = calls) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if ON_GPU else [None, None]
                before = time.perf_counter()
                if ON_GPU:
                    events[0].record()
                result = originals[each](*args, **options)
                if ON_GPU:
                    events[1].record()
                calls.append((each, before, time.perf_counter(), *events))
                return result

            return run

        for each in names:
            setattr(entry_copies, each, wrap(each))
        first = torch.cuda.Event(enable_timing=True) if ON_GPU else None
        for unit in own:
            if unit.load is not None:
                unit.load.transfers.clear()  # they are launched again
        start = time.perf_counter()
        if first is not None:
            first.record()
        arena.carry_out(own)
        for each in names:
            setattr(entry_copies, each, originals[each])
        synchronize()
        times: dict[str, list[float]] = {}
        for number, (each, before, after, begin, end) in enumerate(calls):
            gpu = [first.elapsed_time(begin), first.elapsed_time(end)] if first is not None else [0.0, 0.0]
            times[f"{number} {each}"] = [(before - start) * 1e3, (after - start) * 1e3, *gpu]
        found.append(times)
    for each in found[-1]:
        parts = [statistics.median(part) for part in zip(*(times[each] for times in found[3:]), strict=True)]
        table.rows.append({"name": f"{name}: {each}", "ms": parts})
        print(
            f"    {name}: {each:24} CPU {parts[0]:7.3f} to {parts[1]:7.3f}, GPU {parts[2]:7.3f} to {parts[3]:7.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of the entries' sizes")
    parser.add_argument("--no-kernels", action="store_true", help="transfers only")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(torch.cuda.get_device_name() if ON_GPU else "CPU", flush=True)
    for name in ("enabled", "shmem_enabled", "defrag"):
        path = Path("/sys/kernel/mm/transparent_hugepage") / name
        print(f"transparent huge pages, {name}: {path.read_text().strip() if path.exists() else '?'}", flush=True)
    header = f"{'':66} {'launch':>7} {'over':>7} {'GPU':>7} {'GB/s':>6} {'/plain':>6} {'GPU/pl':>6}"
    table = Table()
    print(header, flush=True)
    for kv_blocks, states in ((32, 1), (64, 6)):
        transfers(table, args.scale, kv_blocks, states)
    if not args.no_kernels:
        print(header, flush=True)
        kernels(table, int(373e6 * args.scale), 512 * max(1, int(6144 * args.scale)))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "transfer_parts.json").write_text(json.dumps(table.rows, indent=1))


if __name__ == "__main__":
    main()
