"""Where the time of a decode step goes: kernels of the GPU, gaps between them, and the least time that memory allows. On an idle GPU::

    python -m tests.gpu.decode_profile [--preset hybrid-4b] [--rows 1,8,32,64,128,256] [--tokens 600] [--ways ours-layer,...]

A way is an engine and what its CUDA graphs capture, such as ``off-layer``, ``ours-block``, ``ours-layer-async`` or
``off-layer-fp32`` (states in float32; else as the parameters), ``ours-block-bits`` (``exact="bits"``) or ``ours-block-drafts`` (3 of them, by attention, all
of which are accepted: the head's weights are zero). "off" is megatron-core without caching, by its own classes.
``step``: milliseconds of a step, over ``--steps`` steps without a profiler: of a chunk, so each row writes its state as often as
it does in the mean. ``busy``: time in which a kernel ran, with one.
``floor``: (weights but the input embedding + states read and written + KV read) / bandwidth of a plain copy, measured here.
``--graphs 0``: none; ``--kernels 9`` lists so many kernels and gaps. ``--preset tiny --device cpu --rows 2 --tokens 40`` tries the script.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from dataclasses import replace

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.bench.floor import copy_bandwidth, floor_bytes
from megatron_hybrid_prefix.mcore import build_upstream_engine
from megatron_hybrid_prefix.mcore.runner import release_engine
from megatron_hybrid_prefix.models import build_hybrid_model
from tests.gpu.measure import BLOCK_TOKENS, started, synchronize
from tests.harness.engine_helpers import cache_gb_for, greedy, kv_budget
from tests.harness.named_models import named

PREFILL_TOKENS = 4096  # of a step
# Parts of a step by the names of kernels: the first pattern that is found.
PARTS = {
    "products": r"gemm|nvjet|xmma|splitk|gemv",
    "attention": r"flash|attention|fmha|append_key",
    # `_update_kernel` is that of Mamba2 and that of Gated DeltaNet in this package, the second is megatron's.
    "state update": r"^_update_kernel|selective_scan_update|^_gates_kernel|^_chunk_|^_pass_|^_prepare_kernel",
    "convolution": r"conv",
    "norms": r"norm|rms",
    "sampling": r"softmax|argmax|sort|topk|multinomial|philox|radix",
    "copies": r"Memcpy|Memset|copy|CatArray|fill|index",
}


def part_of(kernel: str) -> str:
    return next((part for part, words in PARTS.items() if re.search(words, kernel, re.IGNORECASE)), "other")


class Engine:
    """One way, with ``rows`` requests that decode."""

    def __init__(self, args, way: str, most_rows: int) -> None:
        from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config
        from megatron_hybrid_prefix.upstream.config import AsyncScheduleMode

        kind, scope, *more = way.split("-")
        fields = (
            {"cuda_graph_impl": "local", "inference_cuda_graph_scope": scope}
            if args.graphs
            else {"cuda_graph_impl": "none"}
        )
        dimensions, drafts = named(args.preset), 3 * ("drafts" in more)
        if drafts:
            dimensions = replace(dimensions, mtp_num_layers=drafts, mtp_layer_pattern="*-", tie_embeddings=False)
        self.model = build_hybrid_model(dimensions, seed=0, **fields)
        if drafts:
            self.model.output_layer.weight.data.zero_()
        self.state_dtype = torch.float32 if "fp32" in more else None
        # The first row decodes while the others are prefilled.
        self.answer = (1 + drafts) * (args.steps + 32 + 2 * most_rows * args.tokens // PREFILL_TOKENS)
        total = args.tokens + self.answer
        blocks = most_rows * (-(-total // BLOCK_TOKENS) + 1)
        fields = {
            "max_sequence_length": total,
            "max_requests": most_rows,
            "max_tokens": PREFILL_TOKENS,
            "block_size_tokens": BLOCK_TOKENS,
            "num_cuda_graphs": args.graphs or None,
            "enable_chunked_prefill": True,
            "num_speculative_tokens": drafts,
        }
        fields["async_sched_mode"] = AsyncScheduleMode.ASYNC if "async" in more else AsyncScheduleMode.LEGACY
        state = mamba_state_config(self.model)
        if self.state_dtype is not None:
            state.ssm_states_dtype = self.state_dtype
            fields["mamba_inference_state_config"] = state
        sizes = {"block_tokens": BLOCK_TOKENS, "max_requests": most_rows}
        if kind == "ours":
            gb = cache_gb_for(self.model, blocks, states=(4 if "bits" in more else 2) * most_rows + 8, **sizes)
            config = HybridPrefixConfig(cache_gb=gb, exact="bits" if "bits" in more else None)
            self.engine = build_engine(self.model, config, **fields)
        else:
            self.engine = build_upstream_engine(self.model, **kv_budget(self.model, 2 * blocks, **sizes), **fields)
        self.vocabulary = self.model.hybrid_config.vocab_size
        self.steps, self.tokens, self.next_id = args.steps, args.tokens, 0

    @torch.inference_mode()
    def measure(self, rows: int, profile: bool) -> tuple[float, float, Counter[str], Counter[str], Counter[str]]:
        """Milliseconds of a step; of it busy; by part; by kernel; in which the GPU waits, by the kernels around."""
        dice = random.Random(rows)
        for _ in range(rows):
            prompt = [dice.randrange(self.vocabulary) for _ in range(self.tokens)]
            self.engine.add_request(self.next_id, prompt, greedy(self.answer))
            self.next_id += 1
        while self.engine.waiting_request_ids or self.engine.context.num_prefill_requests:
            self.engine.step_modern()
        for _ in range(4):
            self.engine.step_modern()
        synchronize()
        start_s = time.perf_counter()
        for _ in range(self.steps):
            self.engine.step_modern()
        synchronize()
        assert self.engine.context.total_request_count == rows, "a row has ended: its answer is too short"
        step_ms = (time.perf_counter() - start_s) * 1e3 / self.steps
        parts, kernels, gaps, busy = Counter(), Counter(), Counter(), 0.0
        if profile and torch.cuda.is_available():
            count = 4
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
                for _ in range(count):
                    self.engine.step_modern()
                synchronize()
            spans = []
            for event in profiled.events():
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    spans.append((event.time_range.start, event.time_range.end, event.name))
                    ms = (event.time_range.end - event.time_range.start) / 1e3 / count
                    kernels[event.name[:90]] += ms
                    parts[part_of(event.name)] += ms
            end, last = 0.0, ""
            for start, stop, name in sorted(spans):
                if last and start > end:
                    gaps[f"{last[:44]} ... {name[:44]}"] += (start - end) / 1e3 / count
                busy += max(0.0, stop - max(start, end)) / 1e3 / count
                if stop > end:
                    end, last = stop, name
        self.engine.reset()
        return step_ms, busy, parts, kernels, gaps


OPTIONS = {"preset": "hybrid-4b", "rows": "1,8,32,64,128,256", "tokens": 600, "steps": 128, "graphs": 16, "kernels": 0}


def main(args) -> None:
    if args.platform.device.type == "cpu":
        args.graphs = 0
    bandwidth = copy_bandwidth(args.platform.device)
    print(f"a copy reads and writes {bandwidth / 1e12:.2f} TB/s")
    rows = [int(word) for word in args.rows.split(",")]
    for way in args.ways.split(","):
        start_s = time.monotonic()
        engine = Engine(args, way, max(rows))
        print(f"\n{way}: ready after {time.monotonic() - start_s:.0f} s", flush=True)
        print(f"{'rows':>5} {'step':>7} {'busy':>7} {'floor':>7}  step/floor  by part, ms")
        for count in rows:
            step_ms, busy_ms, parts, kernels, gaps = engine.measure(count, profile=True)
            floor_ms = floor_bytes(engine.engine, count, args.tokens) / bandwidth * 1e3
            listed = ", ".join(f"{part} {ms:.2f}" for part, ms in parts.most_common())
            print(
                f"{count:5d} {step_ms:7.2f} {busy_ms:7.2f} {floor_ms:7.2f} {step_ms / floor_ms:8.2f}    {listed}",
                flush=True,
            )
            for kernel, ms in kernels.most_common(args.kernels):
                print(f"        {ms:8.3f}  {kernel}")
            for around, ms in gaps.most_common(args.kernels):
                print(f"        {ms:8.3f}  gap: {around}")
        release_engine(engine.engine)
        del engine


if __name__ == "__main__":
    with started(__doc__, ways="off-layer,ours-layer,ours-block,ours-layer-async", **OPTIONS) as arguments:
        main(arguments)
