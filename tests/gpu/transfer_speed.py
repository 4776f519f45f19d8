"""Loads and stores of the host tier beside plain copies, and what they cost a busy GPU. No model is needed::

    python tests/gpu/transfer_speed.py [--kv-blocks 32] [--states 1] [--out DIR]

Entries have the sizes of `hybrid-4b`: 16 KV blocks and states fill about 77 MB. "launch" is the time that the CPU needs to
launch all copies. "beside products" is how much longer matrix products take that run at the same time, as a share of the
transfer's own time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from megatron_hybrid_prefix.ops import page_copies
from megatron_hybrid_prefix.tiers.arena import HostArena
from megatron_hybrid_prefix.tiers.pinned import choose_page_bytes
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, EntryKind, Load, LoadState, Tag

REPEATS = 41
MS = 1e3


def timed(move: Callable[[], None]) -> tuple[float, float]:
    """Median seconds until the CPU has launched it, and until it is over."""
    launched, over = [], []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        move()
        launched.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        over.append(time.perf_counter() - start)
    return statistics.median(launched[3:]), statistics.median(over[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-blocks", type=int, default=32)
    parser.add_argument("--states", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    kv = torch.randn(
        2 * 6, args.kv_blocks + 8, 256 * 8 * 64, device=device
    ).bfloat16()  # (key or value and layer, blocks, ...)
    conv = torch.randn(26, args.states + 4, 4, 6144, device=device).bfloat16()
    ssm = torch.randn(26, args.states + 4, 64, 64, 128, device=device).bfloat16()
    tensors = {EntryKind.KV: [kv], EntryKind.STATE: [conv, ssm]}
    sizes = {kind: sum(t[:, 0].numel() * t.element_size() for t in own) for kind, own in tensors.items()}
    page_bytes = choose_page_bytes(sizes.values())
    pages_of = {kind: -(-size // page_bytes) for kind, size in sizes.items()}
    pages = list(range(2 * (args.kv_blocks * pages_of[EntryKind.KV] + args.states * pages_of[EntryKind.STATE])))
    arena = HostArena(lambda: tensors, pages=len(pages), page_bytes=page_bytes, pages_of=pages_of, device=device)
    random.Random(0).shuffle(pages)  # as after a while

    load = Load(load_id=1, request_id=1, state=LoadState.ASKED, depth_tokens=1, pinned=())

    def units(to_host: bool) -> list[BlockTransfer]:
        found, at = [], 0
        for kind, count in ((EntryKind.KV, args.kv_blocks), (EntryKind.STATE, args.states)):
            for number in range(count):
                own, at = tuple(pages[at : at + pages_of[kind]]), at + pages_of[kind]
                tag = Tag(kind=kind, key=f"{kind} {number}".encode(), depth_tokens=1, epoch=0)
                ends = (DEVICE, HOST) if to_host else (HOST, DEVICE)
                found.append(
                    BlockTransfer(
                        source=ends[0],
                        target=ends[1],
                        device_id=number,
                        pages=own,
                        tag=tag,
                        load=None if to_host else load,
                    )
                )
        return found

    stores, loads = units(True), units(False)
    moved_bytes = args.kv_blocks * sizes[EntryKind.KV] + args.states * sizes[EntryKind.STATE]
    host, copy = (
        torch.empty(moved_bytes, dtype=torch.uint8).pin_memory(),
        torch.empty(moved_bytes, dtype=torch.uint8, device=device),
    )
    left, right = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))

    def products() -> None:
        for _ in range(16):
            torch.mm(left, right)

    product_s = timed(products)[1]
    print(
        f"{torch.cuda.get_device_name()}, {moved_bytes / 1e6:.0f} MB in pages of {page_bytes / 1e6:.2f} MB", flush=True
    )
    print(f"{'':38} {'GB/s':>6} {'of plain':>8} {'launch ms':>9} {'beside products':>15}", flush=True)
    rows = []

    def row(name: str, move: Callable[[], None], plain: float | None = None, own_bytes: int = moved_bytes) -> float:
        """Prints a row. Returns the GB/s; ``plain`` are those of a plain copy."""
        launch_s, over_s = timed(move)

        def both() -> None:
            move()
            products()

        beside = (timed(both)[1] - product_s) / over_s
        speed = own_bytes / over_s / 1e9
        share = speed / (plain or speed)
        rows.append({"name": name, "s": over_s, "of plain": share, "launch_s": launch_s, "beside products": beside})
        print(f"{name:38} {speed:6.1f} {share:8.3f} {launch_s * MS:9.2f} {beside:15.3f}", flush=True)
        return speed

    to_device = row("plain copy to the device", lambda: copy.copy_(host, non_blocking=True))
    to_host = row("plain copy to the host", lambda: host.copy_(copy, non_blocking=True))
    expected = [tensor.clone() for own in tensors.values() for tensor in own]
    staged = torch.empty(1, len(pages) // 2, page_bytes, dtype=torch.uint8, device=device)
    numbers, whole_pages = (
        torch.arange(staged.shape[1], device=device),
        torch.tensor(pages, device=device)[: staged.shape[1], None],
    )
    for name, way, plain in (("to the host", True, to_host), ("to the device", False, to_device)):
        move = partial(page_copies.copy_pages, staged, arena.pages.rows, numbers, whole_pages, to_pages=way)
        row(f"kernel alone {name}", move, plain, staged.nbytes)
    row("store", lambda: arena.carry_out(stores), to_host)

    def carry_out_loads() -> None:
        load.transfers.clear()  # they are launched again
        arena.carry_out(loads)

    for by_engine in (True, False):
        arena.copies.by_engine = by_engine
        for own in tensors.values():
            for tensor in own:
                tensor.zero_()
        row(f"load {'by the copy engines' if by_engine else 'by the kernel'}", carry_out_loads, to_device)
        arena.finish()
        assert not arena.loads.is_wrong(load)
        for kind, own, count in zip(tensors, (expected[:1], expected[1:]), (args.kv_blocks, args.states), strict=True):
            for tensor, right_one in zip(tensors[kind], own, strict=True):
                assert torch.equal(tensor[:, :count], right_one[:, :count]), kind
                tensor.copy_(right_one)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "transfer_speed.json").write_text(json.dumps(rows, indent=1))
    arena.close()


if __name__ == "__main__":
    main()
