"""Decode of a model with experts: ours, PyTorch's grouped products, and those of megatron's inference-optimized layers. On an idle GPU::

    python -m tests.gpu.experts [--preset nemotron-3-nano-30b-a3b] [--rows 32,64,128,256] [--ways ours,...]

``floor``: bytes that a step must move (experts that the rows touch, other weights, states, KV), at the bandwidth of a plain copy.
``step``: a whole step, asynchronous, in graphs of the forward. ``experts``: one layer's, from routing to sum, in a graph of all layers,
with the step's routing and random tokens; ``error``: of the first layer's, against float64, by norm. Megatron's layers themselves need
Transformer Engine; their products do not, and take the place of ours in our layers.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from megatron_hybrid_prefix.bench.floor import copy_bandwidth, floor_bytes
from megatron_hybrid_prefix.mcore.runner import release_engine
from megatron_hybrid_prefix.models import experts
from megatron_hybrid_prefix.ops import experts as kernels
from megatron_hybrid_prefix.upstream import moe
from tests.gpu.decode_profile import OPTIONS, Engine
from tests.gpu.measure import started
from tests.gpu.ring_kernels import us_of
from tests.kernels.test_experts import reference


def megatrons(
    backend: str, x: torch.Tensor, chosen: torch.Tensor, probs: torch.Tensor, up: Any, down: Any, top_k: int
) -> Any:
    """`experts_of_few` by a backend of ``inference_grouped_gemm_backend``. Megatron's router has the numbers; here they are sought."""
    from megatron.core.inference.moe import fused_moe, vllm_fused_moe

    numbers = chosen.to(torch.uint8).topk(top_k).indices
    count = torch.full((1,), len(x), dtype=torch.int32, device=x.device)
    given = (
        x,
        probs.gather(1, numbers).float(),
        up,
        down,
        fused_moe.ActivationType.SQUARED_RELU,
        len(up),
        0,
        count,
        numbers.int(),
    )
    if backend == "torch":
        return fused_moe.mcore_fused_moe(*given)
    return vllm_fused_moe.vllm_fused_moe(*given, num_tokens_hint=len(x)).to(x.dtype)


def of_way(way: str) -> AbstractContextManager[Any]:
    """In which our layers have the products of a way."""
    if way == "ours":
        return nullcontext()
    if way == "grouped":
        return patch.object(kernels, "MOST_TOKENS", 0)
    return patch.object(experts, "experts_of_few", partial(megatrons, way.partition("-")[2]))


@torch.inference_mode()
def routes(engine: Engine, rows: int, maps: list[torch.Tensor]) -> list[torch.Tensor]:
    """(rows, experts) bool of each layer, in the last of some steps."""
    step = engine.engine.step_modern

    def zeroed() -> Any:
        for each in maps:
            each.zero_()
        return step()

    with patch.object(engine.engine, "step_modern", zeroed):
        engine.measure(rows, profile=False)
    return [each.clone() for each in maps if len(each) == rows and each.any()]


def compute(layers: list[Any], x: torch.Tensor, maps: list[torch.Tensor], number: int) -> torch.Tensor:
    """Experts of a layer, with 0.4 for the router's weights."""
    dispatcher, chosen = layers[number].token_dispatcher, maps[number]
    sent = dispatcher.dispatch_preprocess(x, chosen, 0.4 * chosen)
    rows, _ = layers[number].experts(*dispatcher.dispatch_postprocess(*sent))
    return dispatcher.combine_postprocess(rows)


@torch.inference_mode()
def lines(args: Any, engine: Engine, maps: list[torch.Tensor], bandwidth: float) -> None:
    layers = [each for each in engine.model.decoder.modules() if isinstance(each, experts.ExpertsLayer)]
    up, down = layers[0].experts.linear_fc1_weight, layers[0].experts.linear_fc2_weight
    for rows in map(int, args.rows.split(",")):
        step_ms = engine.measure(rows, profile=False)[0]
        found = routes(engine, rows, maps)[-len(layers) :]
        touched = sum(int(each.any(0).sum()) for each in found) / len(layers)
        x = torch.randn(rows, up.shape[2], device=up.device).to(up.dtype)
        wanted = reference(x, found[0], 0.4 * found[0], up, down, 0)[0]
        error = float((compute(layers, x, found, 0) - wanted).norm() / wanted.norm())
        us = us_of(partial(compute, layers, x, found), len(layers))
        floor = floor_bytes(engine.engine, rows, args.tokens, touched / len(up))
        floor_us = touched * (up[0].nbytes + down[0].nbytes) / bandwidth * 1e6
        ms = floor / bandwidth * 1e3
        print(
            f"{rows:5} {touched:8.1f} {floor / 1e9:10.2f} {ms:6.2f} {step_ms:9.2f} {ms / step_ms:10.3f} {us:11.1f} {floor_us / us:12.3f}"
            f"  {error:.1e}",
            flush=True,
        )


def main(args: Any) -> None:
    bandwidth, counts = copy_bandwidth(args.platform.device), set(map(int, args.rows.split(",")))
    print(f"a copy reads and writes {bandwidth / 1e12:.2f} TB/s")
    for way in args.ways.split(","):
        maps: list[torch.Tensor] = []

        def keep(module: Any, _: Any, output: Any, maps: list[torch.Tensor] = maps) -> None:
            if isinstance(module, moe.TopKRouter) and len(output[1]) in counts:
                maps.append(output[1])  # a graph does not use its memory for anything else

        hook = torch.nn.modules.module.register_module_forward_hook(keep)
        with of_way(way):
            engine = Engine(args, "ours-block-async", max(counts))
            print(
                f"\n{way}\n rows  touched  floor, GB     ms  step, ms  floor/step  experts, us  floor/experts  error",
                flush=True,
            )
            lines(args, engine, maps, bandwidth)
        hook.remove()
        release_engine(engine.engine)
        del engine, maps, keep
        gc.collect()  # else the next model finds no room
        torch.cuda.empty_cache()


if __name__ == "__main__":
    found = {
        "preset": "nemotron-3-nano-30b-a3b",
        "rows": "32,64,128,256",
        "ways": "ours,grouped,megatron-vllm,megatron-torch",
    }
    with started(__doc__, **OPTIONS | found) as arguments:
        main(arguments)
