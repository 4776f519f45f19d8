"""How fast the entries of a hit come from a shared folder into the host's pages, beside plain reads of the same bytes.

Usage: ``python -m tests.gpu.folder_read [--folder DIR] [--threads 1 4 8 16] [--out DIR]``. Needs no GPU; with one, the pages
are pinned, and *to the device* is how long it takes until the device has the bytes, too. Without ``--folder`` it measures a
temporary folder and one in ``/dev/shm``. Sizes are those of 8,448 tokens of hybrid-4b in bfloat16. *CPU* is the processor time
of the process: on a machine that other work shares, compare that. *One file* is a floor: one read per thread, of its share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import torch

from megatron_hybrid_prefix.ops.checksum import checksum_rows
from megatron_hybrid_prefix.policy.boundaries import CheckpointReason
from megatron_hybrid_prefix.policy.registry import make_eviction_policy
from megatron_hybrid_prefix.tiers.arena import HostArena
from megatron_hybrid_prefix.tiers.base import Entry
from megatron_hybrid_prefix.tiers.file import HEADER_BYTES, FileTier
from megatron_hybrid_prefix.tiers.pinned import choose_page_bytes
from megatron_hybrid_prefix.tiers.shared import FolderSettings
from megatron_hybrid_prefix.tiers.shared_tier_moves import PART_BYTES
from megatron_hybrid_prefix.tiers.units import DEVICE, HOST, BlockTransfer, EntryKind, Tag

BLOCK, BLOCKS = 256, 33
KV_BYTES, STATE_BYTES = 3 * 2**20, 28 * 2**20


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--scale", type=int, default=1, help="divides the sizes, to try the script")
    parser.add_argument("--out", type=Path, default=Path())
    return parser.parse_args()


class Hit:
    """The entries of a hit in a folder, and an arena to read them to."""

    def __init__(self, folder, threads, scale, device):
        self.sizes = {EntryKind.KV: KV_BYTES // scale, EntryKind.STATE: STATE_BYTES // scale}
        self.tier = FileTier(
            FolderSettings(folder=folder, budget_bytes=10**10, min_tokens=0, threads=threads),
            block_tokens=BLOCK,
            make_ranking=lambda: make_eviction_policy("lru"),
            reason=CheckpointReason.TAIL,
        )
        self.tier.name_entries(lambda: b"n" * 16)
        keys = [b"", *(bytes([depth]) * 16 for depth in range(1, BLOCKS + 1))]
        self.tags = [
            Tag(kind=kind, key=keys[depth], depth_tokens=depth * BLOCK, epoch=0, parent=keys[depth - 1])
            for kind, first in ((EntryKind.KV, 1), (EntryKind.STATE, BLOCKS))
            for depth in range(first, BLOCKS + 1)
        ]
        for tag in self.tags:
            data = torch.full((self.sizes[tag.kind],), tag.depth_tokens % 251, dtype=torch.uint8)
            checksum = (
                int(checksum_rows(data.view(torch.int64)[None])[0]) ^ tag.digest
            )  # as a store from the device makes it
            assert self.tier.put([Entry(tag, memoryview(data.numpy()), checksum)]) == [True]
        self.bytes = sum(self.sizes[tag.kind] for tag in self.tags)
        page = choose_page_bytes(self.sizes.values())
        pages_of = {kind: -(-size // page) for kind, size in self.sizes.items()}
        tensors = {
            kind: [torch.zeros(1, BLOCKS, size, dtype=torch.uint8, device=device)] for kind, size in self.sizes.items()
        }
        pages = sum(pages_of[tag.kind] for tag in self.tags)
        self.arena = HostArena(
            lambda: tensors, pages=pages, page_bytes=page, pages_of=pages_of, device=device, behind=self.tier
        )
        self.run_loads = self.arena.loads.run
        self.arena.memory.fill_(1)  # touch the pages
        self.whole = folder / "whole"
        self.whole.write_bytes(bytes(self.bytes))
        self.memory = memoryview(self.arena.memory.numpy())
        self.transfers, self.parts, self.loads, at = [], [], 0, 0
        for tag in self.tags:
            self.transfers.append((tag, tuple(range(at, at + pages_of[tag.kind]))))
            path, size = str(self.tier.folder.path(self.tier._file_name(tag))), self.sizes[tag.kind]
            for start in range(0, size, PART_BYTES):
                self.parts.append((path, start, at * page + start, min(PART_BYTES, size - start)))
            at += pages_of[tag.kind]

    def read(self, *, to_device=False):
        """By the arena, as a request waits for it."""
        self.loads += 1
        self.arena.loads.run = self.run_loads if to_device else lambda units, prepared=None: None
        pages = [{"pages": pages, "tag": tag} for tag, pages in self.transfers]
        places = [tag.depth_tokens // BLOCK - 1 for tag, _ in self.transfers]
        self.arena.carry_out([BlockTransfer(source="shared", target=HOST, **each) for each in pages])
        back = [
            BlockTransfer(source=HOST, target=DEVICE, device_id=place, load_id=self.loads, **each)
            for each, place in zip(pages, places, strict=True)
        ]
        self.arena.carry_out(back)
        assert self.arena.fetched(self.loads, 20), self.tier.counts
        self.arena.run_put_off(self.loads)
        if to_device:
            self.arena.wait_for_load(self.loads)
            torch.cuda.synchronize()
            assert not self.arena.has_failed(self.loads)
        self.arena._shared._fetching.clear()

    def read_one_file(self, threads):
        """All bytes from one file, a share for each thread."""

        def work(start, end):
            while start < end:
                start += os.preadv(file, [self.memory[start:end]], start)

        file = os.open(self.whole, os.O_RDONLY)
        shares = [self.bytes * number // threads for number in range(threads + 1)]
        running = [threading.Thread(target=work, args=ends) for ends in pairwise(shares)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        os.close(file)

    def read_plainly(self, threads, flags=0):
        """The same parts, with nothing around them. Returns the errors."""
        parts, lock, errors = iter(self.parts), threading.Lock(), set()

        def work():
            while True:
                with lock:
                    path, start, at, size = next(parts, (None, 0, 0, 0))
                if path is None:
                    return
                file = os.open(path, os.O_RDONLY)
                try:
                    done = 0
                    while done < size:
                        views = [self.memory[at + done : at + size]]
                        done += os.preadv(file, views, HEADER_BYTES + start + done, flags)
                except OSError as error:
                    errors.add(os.strerror(error.errno))
                os.close(file)

        running = [threading.Thread(target=work) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return sorted(errors)


def measure(folder, args, device):
    """Rows of the table, one per number of threads."""
    for threads in args.threads:
        hit = Hit(folder, threads, args.scale, device)
        ways = {
            "arena": hit.read,
            "plain": lambda hit=hit, threads=threads: hit.read_plainly(threads),
            "one file": lambda hit=hit, threads=threads: hit.read_one_file(threads),
        }
        if device == "cuda":
            ways["to the device"] = lambda hit=hit: hit.read(to_device=True)
        spent = {name: [] for name in ways}
        for number in range(args.repeats + 2):
            for name, way in ways.items():
                start, cpu = time.perf_counter(), time.process_time()
                way()
                if number > 1:
                    spent[name].append(((time.perf_counter() - start) * 1e3, (time.process_time() - cpu) * 1e3))
        row = {"folder": str(folder), "threads": threads, "mb": hit.bytes / 1e6, "in memory": hit.tier._in_memory}
        row["only what is in memory"] = hit.read_plainly(threads, os.RWF_NOWAIT) or "no error"
        for name, times in spent.items():
            row[f"{name} ms"], row[f"{name} CPU ms"] = (
                round(statistics.median(each), 2) for each in zip(*times, strict=True)
            )
        row["share of plain"] = round(row["plain ms"] / row["arena ms"], 2)
        row["share of plain, CPU"] = round(row["plain CPU ms"] / row["arena CPU ms"], 2)
        print(json.dumps(row), flush=True)
        hit.tier.close()
        hit.arena.close()
        yield row


def main():
    args = parse()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryDirectory(dir="/dev/shm") as in_memory:
        for folder in [args.folder] if args.folder else [Path(temporary), Path(in_memory)]:
            rows += measure(folder, args, device)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "folder_read.json").write_text(json.dumps(rows, indent=1))
    print(
        "\n| folder | threads | arena, ms | to the device | plain, ms | one file | share | arena, GB/s | share, CPU |"
        "\n|---|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        names = ("folder", "threads", "arena ms", "to the device ms", "plain ms", "one file ms", "share of plain")
        cells = " | ".join(str(row.get(name, "")) for name in names)
        print(f"| {cells} | {row['mb'] / row['arena ms']:.1f} | {row['share of plain, CPU']} |")


if __name__ == "__main__":
    main()
