"""KV and states as views of one buffer of 22 GiB: the same bits as in tensors of their own, and times side by side.

    one_memory.py [--out FOLDER]     # 1 GPU with 40 GiB free; --tiny: small sizes, also on a CPU

Prints a line per case: whether outputs and written states have the same bits, medians of GPU times of a call in contiguous
tensors and in the views, and their ratio. Sizes of KV blocks and states as of Nemotron-H-8B (heads of 128) and Qwen3-Next (heads of 256)
in bfloat16, states in float32. FOLDER gets ``one_memory.json``. Exit code 1 if bits differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_hybrid_prefix.ops.convolution import convolve_from_slots, write_conv_windows
from megatron_hybrid_prefix.ops.delta_rule import scan_delta_rule, update_delta_rule
from megatron_hybrid_prefix.ops.slot_copies import copy_slots
from megatron_hybrid_prefix.ops.state_passing import pass_states
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.one_memory import OneMemory, bits

LAYERS = 4  # of each pool; calls take one after another
DRAFTS = 2


class Sizes(NamedTuple):
    """Sizes of a run; tokens of a KV block, and of a prefill, and of a context."""

    pages: int = 216
    page_bytes: int = 104 * 2**20
    page_blocks: int = 26
    block: int = 256
    rows: int = 64
    prefill: int = 2048
    context: int = 16384
    conv: tuple[int, int] = (10240, 4)
    ssm: tuple[int, ...] = (128, 64, 128)
    matrix: tuple[int, ...] = (32, 128, 128)
    heads: tuple[tuple[int, int, int], ...] = ((32, 8, 128), (16, 2, 256))
    repeats: int = 7


SMALL = {"pages": 24, "page_bytes": 26 * 8192, "block": 16, "rows": 3, "prefill": 320, "context": 64, "repeats": 2}
TINY = Sizes(**SMALL, conv=(10, 4), ssm=(4, 3, 8), matrix=(4, 16, 16), heads=((4, 2, 16),))
Call = Callable[[int], Any]  # of a layer


class Bench:
    """Runs each case in the views and in contiguous tensors."""

    def __init__(self, device: str, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.memory = OneMemory(
            pages=sizes.pages, page_bytes=sizes.page_bytes, device=device, sparse=True, page_blocks=sizes.page_blocks
        )
        self.rows: list[dict[str, Any]] = []
        self._generator = torch.Generator(device).manual_seed(0)

    def rand(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device).to(dtype)

    def ids(self, values: Sequence[int] | torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.as_tensor(values).to(self.device, dtype)

    def far(self, total: int, count: int) -> torch.Tensor:
        """``count`` of the last places of ``total``, in no order."""
        last = min(total, max(count, total // 2))
        return total - 1 - torch.randperm(last, generator=torch.Generator().manual_seed(count))[:count]

    def compare(self, name: str, plain: Call, views: Call, written: Callable[[], Sequence[tuple[Any, Any]]]) -> None:
        """Runs both once and compares; then times them, in turns.

        Args:
            name: Of the case.
            plain: The call on contiguous tensors; returns a tensor, several, or None.
            views: The same on views.
            written: Returns pairs of what both wrote.
        """
        outputs = [[x for x in (r if isinstance(r, tuple) else (r,)) if x is not None] for r in (plain(0), views(0))]
        pairs = [*zip(*outputs, strict=True), *written()]
        equal = all(torch.equal(bits(one), bits(other)) for one, other in pairs)
        times: tuple[list[float], list[float]] = ([], [])
        for repeat in range(self.sizes.repeats + 1):
            for call, found in zip((plain, views), times, strict=True):
                us = self._time_us(call)
                if repeat:
                    found.append(us)
        first, second = map(statistics.median, times)
        row = {"case": name, "equal": equal, "contiguous_us": first, "views_us": second, "ratio": second / first}
        self.rows.append(row)
        said = "same bits" if equal else "OTHER BITS"
        print(f"{name:44} {said}  {first:9.1f} us  {second:9.1f} us  {second / first:.3f}", flush=True)

    def _time_us(self, call: Call, calls: int = 20) -> float:
        if self.device == "cpu":
            start_s = time.perf_counter()
            call(0)
            return (time.perf_counter() - start_s) * 1e6
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(40_000_000)  # all calls are launched before the first runs
        start.record()
        for number in range(calls):
            call(number % LAYERS)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    # -- KV ------------------------------------------------------------------------------------------------------------

    def attention(self, attend: Callable[..., torch.Tensor] | None, append: Callable[..., None]) -> None:
        """Attention of a prefill, a decode, and a decode with drafts; appends."""
        sizes = self.sizes
        pages = -(-(sizes.context + sizes.prefill) // sizes.block)
        for heads, kv_heads, dim in sizes.heads:
            kv = self.memory.kv(LAYERS, sizes.block, kv_heads, dim, torch.bfloat16)
            requests = {"prefill": (1, sizes.prefill, pages)}
            requests |= {"decode": (sizes.rows, 1, -(-pages // 4)), "drafts": (sizes.rows, DRAFTS + 1, -(-pages // 4))}
            for name, (rows, queries, own_pages) in requests.items():
                used = self.far(kv.shape[2], min(rows * own_pages, kv.shape[2]))
                count = len(used)
                for block in self.ids(used).split(64):
                    kv.index_copy_(2, block, self.rand(2, LAYERS, len(block), *kv.shape[3:]))
                plain = kv.index_select(2, self.ids(used))
                table = torch.arange(rows * own_pages).view(rows, own_pages) % count
                here, there = self.ids(table, torch.int32), self.ids(used[table], torch.int32)
                label = f"{name}, heads of {dim}"
                if attend is not None:
                    lengths = self.ids([own_pages * sizes.block - 3 - row for row in range(rows)], torch.int32)
                    starts = self.ids(torch.arange(rows + 1) * queries, torch.int32)
                    call = partial(attend, self.rand(rows * queries, heads, dim), starts, lengths, queries)
                    self.compare(
                        f"attention: {label}", partial(call, here, plain), partial(call, there, kv), lambda: ()
                    )
                tokens = rows * queries
                key, value = self.rand(tokens, 1, kv_heads, dim), self.rand(tokens, 1, kv_heads, dim)
                number = torch.arange(tokens)
                blocks = (number // queries * own_pages + number % queries // sizes.block) % count
                position = self.ids(number % sizes.block)
                to_plain = (tokens, self.ids(blocks), position)
                to_views = (tokens, self.ids(used[blocks]), position)
                self.compare(
                    f"append: {label}",
                    lambda layer: append(layer, key, value, plain, *to_plain),  # noqa: B023
                    lambda layer: append(layer, key, value, kv, *to_views),  # noqa: B023
                    lambda: [(plain, kv.index_select(2, self.ids(used)))],  # noqa: B023
                )

    # -- states --------------------------------------------------------------------------------------------------------

    def states(self, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Views of LAYERS layers, by rows: windows in bfloat16, matrices in float32."""
        dtypes = {"conv": torch.bfloat16}
        components = {name: (shape, dtypes.get(name, torch.float32)) for name, shape in shapes.items()}
        return self.memory.states(LAYERS, **components)

    def decode(self, kind: str, drafts: int, update: Callable[..., Any], **shapes: tuple[int, ...]) -> None:
        """``update(layer, states, slots, after)`` of as many rows as there is room for."""
        sizes = self.sizes
        live = sizes.pages // (drafts + 2) if drafts else sizes.pages
        rows = min(sizes.rows, live)
        used = self.memory.rows(self.ids(self.far(live, rows)))
        views, here = self.states(**shapes), self.ids(range(rows))
        for view in views.values():
            view.index_copy_(1, used, self.rand(LAYERS, rows, *view.shape[2:], dtype=view.dtype))
        plain = {name: view.index_select(1, used) for name, view in views.items()}
        after: dict[str, torch.Tensor] = {}
        plain_after: dict[str, torch.Tensor] = {}
        if drafts:
            after = {name: self.memory.drafted(view, live, drafts) for name, view in views.items()}
            plain_after = {name: view.index_select(1, used) for name, view in after.items()}
        there = used.clone()
        # The first row is padding: where no states are to be kept, megatron's kernel writes to the first element of its input.
        here[0] = there[0] = -1
        self.compare(
            f"{kind}: decode of {rows} rows" + (f" with {drafts} drafts" if drafts else ""),
            lambda layer: update(layer, plain, here, plain_after),
            lambda layer: update(layer, views, there, after),
            lambda: [
                (own, of_all[name].index_select(1, used))
                for tensors, of_all in ((plain, views), (plain_after, after))
                for name, own in tensors.items()
            ],
        )

    def prefill(self, kind: str, run: Callable[..., Any], chunk: int, **shapes: tuple[int, ...]) -> None:
        """``run(layer, states, slots, per_token, bounds)`` of two sequences; the first starts from a checkpoint."""
        tokens, views = self.sizes.prefill, self.states(**shapes)
        half = tokens // 2 // chunk * chunk or chunk
        bounds = sorted({*range(0, half, chunk), *range(half, tokens, chunk), tokens})
        chunks, first = len(bounds) - 1, bounds.index(half)
        used = self.memory.rows(self.far(self.sizes.pages, 5)).cpu()
        for view in views.values():
            view.index_copy_(1, self.ids(used), self.rand(LAYERS, 5, *view.shape[2:], dtype=view.dtype))
        plain = {name: view.index_select(1, self.ids(used)) for name, view in views.items()}

        def step(slots: torch.Tensor) -> dict[str, Any]:
            kept = torch.full((chunks,), -1)
            kept[first // 2] = slots[4]
            sources = torch.where(torch.arange(tokens) < half, slots[0], slots[1])
            return {
                "slots": {
                    "first_chunks": self.ids([0, first, chunks]),
                    "source_slots": self.ids(slots[[0, 1]]),
                    "live_slots": self.ids(slots[[2, 3]]),
                    "chunk_slots": self.ids(kept),
                },
                "sources": self.ids(sources, torch.int32),
                "starts": self.ids((torch.arange(tokens) >= half) * half, torch.int32),
                "bounds": self.ids(bounds, torch.int32),
            }

        here, there = step(torch.arange(5)), step(used)
        self.compare(
            f"{kind}: prefill of {tokens} tokens",
            lambda layer: run(layer, plain, **here),
            lambda layer: run(layer, views, **there),
            lambda: [(own, views[name].index_select(1, self.ids(used))) for name, own in plain.items()],
        )

    def copies(self) -> None:
        """States to other slots, and KV blocks to other places."""
        views = self.states(ssm=self.sizes.ssm)["ssm"]
        used = self.memory.rows(self.far(self.sizes.pages, 16)).cpu()
        plain = views.index_select(1, self.ids(used))
        order = (self.ids(range(8)), self.ids(range(8, 16)))
        far = [self.ids(used[part.cpu()]) for part in order]
        self.compare(
            f"copies of 8 states, {LAYERS} layers",
            lambda layer: copy_slots(plain, plain, *order),
            lambda layer: copy_slots(views, views, *far),
            lambda: [(plain, views.index_select(1, self.ids(used)))],
        )
        rows = self.memory.blocks()
        used = self.far(rows.shape[1], 32)
        own = rows.index_select(1, self.ids(used))
        order = (self.ids(range(16)), self.ids(range(16, 32)))
        there = [self.ids(used[part.cpu()]) for part in order]
        self.compare(
            "copies of 16 KV blocks",
            lambda layer: copy_slots(own, own, *order),
            lambda layer: copy_slots(rows, rows, *there),
            lambda: [(own, rows.index_select(1, self.ids(used)))],
        )


def run(bench: Bench) -> None:
    """All cases."""
    from megatron.core.inference.contexts import dynamic_context
    from megatron.core.ssm import mamba_mixer
    from megatron.core.transformer import attention

    from megatron_hybrid_prefix.upstream.mixer import convolve_step

    sizes, rand = bench.sizes, bench.rand

    def attend(q: Any, starts: Any, lengths: Any, queries: int, table: Any, kv: Any, layer: int) -> torch.Tensor:
        k, v = kv[0, layer], kv[1, layer]
        longest = table.shape[1] * k.shape[1]
        if bench.device == "cpu":
            ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            call = attention.flash_attn_varlen_func
            return call(q, k, v, starts, ends, queries, longest, causal=True, block_table=table)
        out, _ = attention.flash_attn4_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=starts,
            max_seqlen_q=queries,
            max_seqlen_k=longest,
            seqused_k=lengths,
            page_table=table,
            softmax_scale=q.shape[-1] ** -0.5,
            causal=True,
            window_size=(-1, -1),
            num_splits=0,
        )
        return out

    has_attention = bench.device == "cpu" or attention.HAVE_FA4
    if not has_attention:
        print("FA4 is not installed: no attention", flush=True)
    bench.attention(attend if has_attention else None, dynamic_context.triton_append_key_value_cache)

    heads, channels, width = sizes.ssm
    weight, bias = rand(*sizes.conv), rand(sizes.conv[0])
    for drafts in (0, DRAFTS):
        steps = drafts + 1
        x, inner = rand(sizes.rows, steps, sizes.conv[0]), rand(sizes.rows, steps, heads, channels)
        dt = rand(sizes.rows, steps, heads, 1).expand(-1, -1, -1, channels)
        a = -rand(heads, 1, 1, dtype=torch.float32).abs().expand(-1, channels, width)
        b, c = (rand(sizes.rows, steps, 2, width) for _ in range(2))

        def of_mamba2(layer, states, slots, after, x=x, inner=inner, dt=dt, a=a, b=b, c=c):
            own, n = {name: view[layer] for name, view in after.items()}, len(slots)
            return (
                convolve_step(
                    x=x[:n],
                    conv_state=states["conv"][layer],
                    weight=weight,
                    bias=bias,
                    silu_activation="silu",
                    conv_state_indices=slots,
                    intermediate_conv_states=own.get("conv"),
                ),
                mamba_mixer.selective_state_update(
                    states["ssm"][layer],
                    inner[:n],
                    dt[:n],
                    a,
                    b[:n],
                    c[:n],
                    dt_softplus=True,
                    state_batch_indices=slots,
                    intermediate_ssm_states=own.get("ssm"),
                ),
            )

        bench.decode("Mamba2", drafts, of_mamba2, conv=sizes.conv, ssm=sizes.ssm)

        value_heads, keys, values = sizes.matrix
        q, k = (rand(sizes.rows, steps, value_heads // 2, keys) for _ in range(2))
        v = rand(sizes.rows, steps, value_heads, values)
        decay = -rand(sizes.rows, steps, value_heads, dtype=torch.float32).abs()
        beta = rand(sizes.rows, steps, value_heads).sigmoid()

        def of_delta_net(layer, states, slots, after, q=q, k=k, v=v, decay=decay, beta=beta):
            own, n = None if not after else after["matrix"][layer], len(slots)
            inputs = (tensor[:n] for tensor in (q, k, v, decay, beta))
            return update_delta_rule(*inputs, states["matrix"][layer], slots, normalise=True, after=own)

        bench.decode("Gated DeltaNet", drafts, of_delta_net, matrix=sizes.matrix)

    tokens, chunk = sizes.prefill, 128
    inputs = rand(tokens, sizes.conv[0])
    chunks = -(-tokens // chunk) + 2
    added = rand(chunks, heads, channels * width, dtype=torch.float32)
    log_decay = -rand(heads, chunks, chunk, dtype=torch.float32).abs()

    def prefill_mamba2(layer, states, slots, sources, starts, bounds):
        convolved = convolve_from_slots(inputs, states["conv"][layer], weight, bias, sources=sources, starts=starts)
        write_conv_windows(inputs, states["conv"][layer], chunk_bounds=bounds, **slots)
        return convolved, pass_states(added, log_decay, states["ssm"][layer], **slots)[: len(bounds) - 1]

    bench.prefill("Mamba2", prefill_mamba2, chunk, conv=sizes.conv, ssm=sizes.ssm)

    q, k = (rand(tokens, value_heads // 2, keys) for _ in range(2))
    v, beta = rand(tokens, value_heads, values), rand(tokens, value_heads).sigmoid()
    decay = -rand(tokens, value_heads, dtype=torch.float32).abs()

    def prefill_delta_net(layer, states, slots, sources, starts, bounds):
        convolved = convolve_from_slots(inputs, states["conv"][layer], weight, None, sources=sources, starts=starts)
        write_conv_windows(inputs, states["conv"][layer], chunk_bounds=bounds, **slots)
        return convolved, scan_delta_rule(
            q, k, v, decay, beta, states["matrix"][layer], normalise=True, chunk_bounds=bounds, **slots
        )

    bench.prefill("Gated DeltaNet", prefill_delta_net, 64, conv=sizes.conv, matrix=sizes.matrix)
    bench.copies()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for one_memory.json")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU where there is no GPU")
    options = parser.parse_args()
    platform = ensure_platform()
    print(platform.describe(), flush=True)
    started_s = time.monotonic()
    with torch.no_grad():
        bench = Bench(platform.device.type, TINY if options.tiny else Sizes())
        print(f"{bench.memory.buffer.numel() / 2**30:.2f} GiB; times in contiguous tensors, and in views", flush=True)
        run(bench)
    shut_down()
    other = [row["case"] for row in bench.rows if not row["equal"]]
    ratio = statistics.geometric_mean(row["ratio"] for row in bench.rows)
    print(f"{len(bench.rows)} cases, {time.monotonic() - started_s:.0f} s; other bits: {other or 'none'}")
    print(json.dumps({"cases": len(bench.rows), "other_bits": other, "mean_ratio": round(ratio, 3)}))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "one_memory.json").write_text(json.dumps(bench.rows, indent=1))
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
