"""Tiles of the invariant product: which give the same bits, and how fast they are beside cuBLAS.

    python tests/gpu/bits_tiles.py --out out/bits     # about a minute on an H200

The products are those of the 4.1B hybrids. A decode reads weights that are not in the GPU's cache: calls take turns over
several copies. Calls are replayed from CUDA graphs; times are medians. ``--preset tiny --rows 2`` tries the script with
Triton's interpreter (``TRITON_INTERPRET=1``) on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron_hybrid_prefix.models.config import get_preset
from megatron_hybrid_prefix.ops.invariant.linear_triton import Tile, linear

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter knows no bfloat16
COLD_BYTES = 200 << 20  # of weights between two uses of one
SMALL = [
    Tile(64, 32, 128, 4, 3),
    Tile(64, 32, 128, 4, 6),
    Tile(64, 32, 256, 4, 4),
    Tile(64, 16, 128, 4, 8),
    Tile(64, 64, 128, 4, 5),
    Tile(64, 128, 64, 4, 6),
    Tile(16, 32, 128, 4, 8),
    Tile(16, 64, 128, 4, 6),
    Tile(128, 32, 128, 4, 4),
    Tile(128, 64, 64, 4, 6),
    Tile(128, 64, 128, 8, 4),
]
LARGE = [
    Tile(128, 128, 64, 4, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 64, 4, 5, persistent=True),
    Tile(128, 256, 64, 8, 3),
    Tile(128, 256, 64, 8, 4),
    Tile(128, 256, 64, 8, 3, group=16),
    Tile(128, 256, 64, 8, 3, persistent=True, parts=2),
    Tile(128, 256, 64, 8, 4, persistent=True, parts=2),
    Tile(256, 128, 64, 8, 3),
    Tile(256, 128, 64, 8, 4, persistent=True, parts=2),
]
SMALL_ROWS, LARGE_ROWS = (1, 16, 64, 128, 256), (512, 2048, 8192)


def shapes(*presets):
    """{(out features, in features): names} of a model's products."""
    found = {}
    for preset in presets:
        c = get_preset(preset)
        fc1 = c.ffn_hidden_size * (2 if c.activation == "swiglu" else 1)
        own = {
            "qkv": ((c.num_attention_heads + 2 * c.num_query_groups) * c.kv_channels, c.hidden_size),
            "proj": (c.hidden_size, c.num_attention_heads * c.kv_channels),
            "fc1": (fc1, c.hidden_size),
            "fc2": (c.hidden_size, c.ffn_hidden_size),
            "vocabulary": (c.vocab_size, c.hidden_size),
        }
        if "M" in c.symbols:
            inner = c.mamba_num_heads * c.mamba_head_dim
            width = 2 * inner + 2 * c.mamba_num_groups * c.mamba_state_dim + c.mamba_num_heads
            own |= {"mamba in": (width, c.hidden_size), "mamba out": (c.hidden_size, inner)}
        if "G" in c.symbols:
            values = c.gdn_num_value_heads * c.gdn_value_head_dim
            width = 2 * c.gdn_num_key_heads * c.gdn_key_head_dim + 2 * values + 2 * c.gdn_num_value_heads
            own |= {"gdn in": (width, c.hidden_size), "gdn out": (c.hidden_size, values)}
        for name, shape in own.items():
            found[shape] = found.get(shape, name)
    return found


def compile_tiles(tiles):
    """In a process of its own: Triton keeps what is compiled on disk."""
    failed = {}
    for tile in tiles:
        try:
            linear(
                torch.zeros(1024, 1024, dtype=DTYPE, device=DEVICE),
                torch.zeros(1024, 1024, dtype=DTYPE, device=DEVICE),
                tile,
            )
        except Exception as error:  # a tile that needs too much shared memory, for one: it is reported and left out
            failed[tile] = str(error).splitlines()[0]
    return failed


def time_us(call, copies, seconds=0.02):
    """Median time of one call; ``call`` takes the number of the copy."""
    if not ON_GPU:
        start = time.perf_counter()
        call(0)
        return (time.perf_counter() - start) * 1e6
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            call(copy)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / copies)
        if sum(times) * copies > seconds * 1e6 and len(times) >= 3:
            break
    return statistics.median(times[1:])


def same_bits(tiles, depth=4096, columns=768, rows=300):
    """{tile: whether each row has the bits that the first tile gives it alone}; values of very different sizes."""
    g = torch.Generator(DEVICE).manual_seed(0)

    def rand(*shape):
        values = torch.randn(*shape, generator=g, device=DEVICE)
        return (values * torch.exp(torch.randn(*shape, generator=g, device=DEVICE))).to(DTYPE)

    x, weight = rand(rows, depth), rand(columns, depth)
    truth = linear(x, weight, tiles[0])
    found = {}
    for tile in tiles:
        parts = [x[a:b] for a, b in ((0, 1), (1, 6), (6, 70), (70, 71), (71, rows))]
        apart = torch.cat([linear(part, weight, tile) for part in parts])
        found[tile] = torch.equal(linear(x, weight, tile), truth) and torch.equal(apart, truth)
    exact = x.double() @ weight.double().T
    error = [float((y.double() - exact).norm() / exact.norm()) for y in (truth, F.linear(x, weight))]
    return found, {"error": error[0], "cuBLAS error": error[1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", nargs="+", default=["hybrid-4b", "gdn-4b"])
    parser.add_argument("--rows", type=int, nargs="+", help="default: decodes of 1 to 256, prefills of 512 to 8,192")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    tiles, failed = SMALL + LARGE, {}
    if ON_GPU:
        with multiprocessing.get_context("spawn").Pool(8) as pool:
            for part in pool.map(compile_tiles, [tiles[i::8] for i in range(8)]):
                failed |= part
    for tile, error in failed.items():
        print(f"left out: {tile}: {error}", flush=True)
    tiles = [tile for tile in tiles if tile not in failed]
    print(f"compiled, {time.perf_counter() - begin:.1f} s since the start", flush=True)
    report = {"device": torch.cuda.get_device_name() if ON_GPU else "interpreter", "times": []}
    with torch.no_grad():
        bits, errors = same_bits(tiles) if ON_GPU else same_bits(tiles[:2], 64, 64, 80)
        report |= {"bits": [[*tile, same] for tile, same in bits.items()], **errors}
        print(f"errors: {errors}; tiles with other bits than {tiles[0]}:", flush=True)
        print(*[f"  {tile}" for tile, same in bits.items() if not same] or ["  none"], sep="\n", flush=True)
        own = shapes(*options.preset)
        rows_of = {True: SMALL_ROWS, False: LARGE_ROWS} if options.rows is None else {True: options.rows, False: ()}
        totals = {}
        for (columns, depth), name in own.items():
            copies = max(2, -(-COLD_BYTES // (columns * depth * 2))) if ON_GPU else 2
            weights = torch.randn(copies, columns, depth, device=DEVICE, dtype=torch.float32).to(DTYPE)
            for small, every in rows_of.items():
                tried = [tile for tile in tiles if (tile in SMALL) == small]
                for rows in every:
                    x = torch.randn(rows, depth, device=DEVICE).to(DTYPE)
                    calls = copies if small else 2
                    us = {"cuBLAS": time_us(lambda copy: F.linear(x, weights[copy]), calls)}  # noqa: B023
                    for tile in tried if ON_GPU else tried[:1]:
                        if tile.rows == 16 and rows > 64:
                            continue
                        us[tile] = time_us(lambda copy: linear(x, weights[copy], tile), calls)  # noqa: B023
                    for tile, time_of in us.items():
                        totals.setdefault(rows, {}).setdefault(tile, []).append(time_of)
                        report["times"].append(
                            [name, columns, depth, rows, list(tile) if tile != "cuBLAS" else tile, time_of]
                        )
                    best = min((t for t in us if t != "cuBLAS"), key=us.get)
                    print(
                        f"{name:>10} {columns:>6} x {depth:<6} {rows:>5} rows: cuBLAS {us['cuBLAS']:8.1f} us, best {us[best]:8.1f} us "
                        f"({us['cuBLAS'] / us[best]:.2f}) {tuple(best)}",
                        flush=True,
                    )
            (options.out / "bits_tiles.json").write_text(json.dumps(report, indent=1))
    print(f"{time.perf_counter() - begin:.1f} s since the start. Speed over cuBLAS: of the sum of all products")
    for rows, by_tile in totals.items():
        blas = sum(by_tile["cuBLAS"])
        for tile, times in sorted(by_tile.items(), key=lambda item: sum(item[1])):
            print(
                f"  {rows:>5} rows  {blas / sum(times):.3f}  {sum(times):9.1f} us  {tile if tile == 'cuBLAS' else tuple(tile)}"
            )


if __name__ == "__main__":
    main()
