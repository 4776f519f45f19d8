"""Loads and stores of the host tier, and plain copies of as many bytes. No model is needed::

    python -m tests.gpu.transfer_speed [--kv-blocks 32] [--states 1] [--out DIR]

Entries have the sizes of `hybrid-4b`: 16 KV blocks and states fill about 77 MB. "launch" is the time that the CPU needs
to launch all copies.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.tiers.arena import HostArena
from megatron_hybrid_prefix.tiers.pinned import choose_page_bytes
from megatron_hybrid_prefix.tiers.units import DEVICE as ON_DEVICE
from megatron_hybrid_prefix.tiers.units import HOST, BlockTransfer, EntryKind, Load, LoadState, Tag
from tests.gpu.measure import DEVICE, ON_GPU, save, synchronize

REPEATS = 41 if ON_GPU else 5


def timed(move: Callable[[], object]) -> tuple[float, float]:
    """Median seconds until the CPU has launched it, and until it is over."""
    launched, over = [], []
    for _ in range(REPEATS):
        synchronize()
        start_s = time.perf_counter()
        move()
        launched.append(time.perf_counter() - start_s)
        synchronize()
        over.append(time.perf_counter() - start_s)
    return statistics.median(launched[3:]), statistics.median(over[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-blocks", type=int, default=32)
    parser.add_argument("--states", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    counts = {EntryKind.KV: args.kv_blocks, EntryKind.STATE: args.states}
    shapes = {EntryKind.KV: [(2 * 6, args.kv_blocks + 8, 256 * 8 * 64)]}  # (keys or values of a layer, blocks, ...)
    shapes[EntryKind.STATE] = [(26, args.states + 4, 4, 6144), (26, args.states + 4, 64, 64, 128)]
    tensors = {kind: [torch.randn(*shape, device=DEVICE).bfloat16() for shape in own] for kind, own in shapes.items()}
    sizes = {kind: sum(t[:, 0].numel() * t.element_size() for t in own) for kind, own in tensors.items()}
    page_bytes = choose_page_bytes(sizes.values())
    pages_of = {kind: ceil_div(size, page_bytes) for kind, size in sizes.items()}
    pages = list(range(2 * sum(counts[kind] * pages_of[kind] for kind in counts)))
    arena = HostArena(
        lambda: tensors, pages=len(pages), page_bytes=page_bytes, pages_of=pages_of, device=torch.device(DEVICE)
    )
    random.Random(0).shuffle(pages)  # as after a while
    load = Load(load_id=1, request_id=1, state=LoadState.ASKED, depth_tokens=1, pinned=())

    def units(source: str, target: str, of_load: Load | None = None) -> list[BlockTransfer]:
        found, at = [], 0
        for kind, count in counts.items():
            for number in range(count):
                own, at = tuple(pages[at : at + pages_of[kind]]), at + pages_of[kind]
                tag = Tag(kind=kind, key=f"{kind} {number}".encode(), depth_tokens=1, epoch=0)
                found.append(
                    BlockTransfer(source=source, target=target, device_id=number, pages=own, tag=tag, load=of_load)
                )
        return found

    stores, loads = units(ON_DEVICE, HOST), units(HOST, ON_DEVICE, load)
    moved_bytes = sum(counts[kind] * sizes[kind] for kind in counts)
    host, copy = torch.empty(moved_bytes, dtype=torch.uint8), torch.empty(moved_bytes, dtype=torch.uint8, device=DEVICE)
    host = host.pin_memory() if ON_GPU else host
    rows, device = [], torch.cuda.get_device_name() if ON_GPU else "CPU"
    print(f"{device}, {moved_bytes / 1e6:.0f} MB in pages of {page_bytes / 1e6:.2f} MB", flush=True)
    print(f"{'':38} {'GB/s':>6} {'of plain':>8} {'launch ms':>9}", flush=True)

    def row(name: str, move: Callable[[], object], plain: float | None = None) -> float:
        """Prints a row. Returns the GB/s; ``plain`` are those of a plain copy."""
        launch_s, over_s = timed(move)
        speed = moved_bytes / over_s / 1e9
        share = speed / (plain or speed)
        rows.append({"name": name, "s": over_s, "of plain": share, "launch_s": launch_s})
        print(f"{name:38} {speed:6.1f} {share:8.3f} {launch_s * 1e3:9.2f}", flush=True)
        return speed

    to_device = row("plain copy to the device", lambda: copy.copy_(host, non_blocking=True))
    to_host = row("plain copy to the host", lambda: host.copy_(copy, non_blocking=True))
    expected = {kind: [tensor.clone() for tensor in own] for kind, own in tensors.items()}
    row("store", lambda: arena.carry_out(stores), to_host)

    def carry_out_loads() -> None:
        load.transfers.clear()  # they are launched again
        arena.carry_out(loads)

    for own in tensors.values():
        for tensor in own:
            tensor.zero_()
    row("load", carry_out_loads, to_device)
    arena.finish()
    assert not arena.loads.is_wrong(load)
    for kind, count in counts.items():
        for tensor, right_one in zip(tensors[kind], expected[kind], strict=True):
            assert torch.equal(tensor[:, :count], right_one[:, :count]), kind
    save(args.out, "transfer_speed", {"device": device, "rows": rows})
    arena.close()


if __name__ == "__main__":
    main()
