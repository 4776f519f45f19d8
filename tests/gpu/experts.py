"""Decode of a model with experts: ours, PyTorch's grouped products, and those of megatron's inference-optimized layers. On an idle GPU::

    python -m tests.gpu.experts [--preset nemotron-3-nano-30b-a3b] [--rows 32,64,128,256] [--ways ours,...]

``floor``: bytes that a step must move (experts that the rows touch, other weights, states, KV), at the bandwidth of a plain copy.
``step``: a whole step, asynchronous, in graphs of the forward. ``experts``: one layer's, sorting and sums included, in a graph of all
layers. Their routing is the step's. First, each is compared with float64. Megatron's layers themselves need Transformer Engine; their
products do not, and take the place of ours in our layers.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from megatron_hybrid_prefix.bench.floor import copy_bandwidth, floor_bytes
from megatron_hybrid_prefix.mcore.runner import release_engine
from megatron_hybrid_prefix.models import experts
from megatron_hybrid_prefix.ops.experts import experts_of_few
from megatron_hybrid_prefix.upstream import moe
from tests.gpu.decode_profile import OPTIONS, Engine
from tests.gpu.decode_speed import us_of
from tests.gpu.measure import started
from tests.kernels.test_experts import reference


def grouped(x, chosen, probs, up, down, top_k):
    """`experts_of_few` by ``grouped_mm``: what many tokens go through, and few before."""
    numbers = chosen.to(torch.uint8).topk(top_k).indices.sort(1).values
    order = numbers.flatten().argsort(stable=True)
    ends = chosen.sum(0).cumsum(0).to(torch.int32)
    inner = torch.nn.functional.grouped_mm(x[order // top_k], up.transpose(1, 2), offs=ends)
    inner = experts.squared_relu(inner) * probs.gather(1, numbers).flatten()[order, None]
    out = torch.nn.functional.grouped_mm(inner.to(x.dtype), down.transpose(1, 2), offs=ends)
    return torch.empty_like(out).index_copy_(0, order, out).view(len(x), top_k, -1).sum(1)


def megatrons(backend):
    """`experts_of_few` by a backend of ``inference_grouped_gemm_backend``. Megatron's router has the numbers; here they are sought."""
    from megatron.core.inference.moe import fused_moe, vllm_fused_moe

    compute = {"torch": fused_moe.mcore_fused_moe, "vllm": vllm_fused_moe.vllm_fused_moe}[backend]

    def run(x, chosen, probs, up, down, top_k):
        numbers = chosen.to(torch.uint8).topk(top_k).indices
        given = x, probs.gather(1, numbers).float(), up, down, fused_moe.ActivationType.SQUARED_RELU, len(up), 0
        hint = {"num_tokens_hint": len(x)} if backend == "vllm" else {}
        count = torch.full((1,), len(x), dtype=torch.int32, device=x.device)
        return compute(*given, count, numbers.to(torch.int32), **hint).to(x.dtype)

    return run


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
    return [each for each in maps if len(each) == rows and each.any()]


def main(args) -> None:
    bandwidth = copy_bandwidth(args.platform.device)
    print(f"a copy reads and writes {bandwidth / 1e12:.2f} TB/s")
    ways, counts = {"ours": experts_of_few, "grouped": grouped}, [int(word) for word in args.rows.split(",")]
    with suppress(ImportError):
        ways |= {f"megatron-{backend}": megatrons(backend) for backend in ("vllm", "torch")}
    for way in args.ways.split(",") if args.ways else ways:
        products = ways[way]
        maps: list[torch.Tensor] = []

        def keep(module: Any, _: Any, output: Any, maps: list[torch.Tensor] = maps) -> None:
            if isinstance(module, moe.TopKRouter) and len(output[1]) in counts:
                maps.append(output[1])  # a graph does not use its memory for anything else

        hook = torch.nn.modules.module.register_module_forward_hook(keep)
        with patch.object(experts, "experts_of_few", products):
            engine = Engine(args, "ours-block-async", max(counts))
            layers = [each for each in engine.model.decoder.modules() if isinstance(each, experts.GroupedExperts)]
            up, down, top_k = layers[0].linear_fc1_weight, layers[0].linear_fc2_weight, layers[0].config.moe_router_topk
            print(
                f"\n{way}\n rows  touched  floor, GB    ms   step, ms  floor/step  experts, us  floor/experts  error",
                flush=True,
            )
            for rows in counts:
                step_ms = engine.measure(rows, profile=False)[0]
                chosen = routes(engine, rows, maps)[-len(layers) :]
                touched = sum(int(each.any(0).sum()) for each in chosen) / len(chosen)
                x = torch.randn(rows, up.shape[2], device="cuda").to(up.dtype)
                given = [(x, each, each * 0.4, layer.linear_fc1_weight.data, layer.linear_fc2_weight.data, top_k)
                         for each, layer in zip(chosen, layers, strict=True)]  # fmt: skip
                with torch.inference_mode():
                    wanted = reference(*given[0])[0]
                    error = float((products(*given[0]) - wanted).norm() / wanted.norm())
                    us = us_of(
                        partial(lambda products, given, layer: products(*given[layer]), products, given), len(layers)
                    )
                floor = floor_bytes(engine.engine, rows, args.tokens, touched / len(up))
                floor_us = touched * (up[0].nbytes + down[0].nbytes) / bandwidth * 1e6
                ms = floor / bandwidth * 1e3
                print(f"{rows:5} {touched:8.1f} {floor / 1e9:10.2f} {ms:6.2f} {step_ms:9.2f} {ms / step_ms:10.3f} "
                      f"{us:11.1f} {floor_us / us:12.3f}   {error:.1e}", flush=True)  # fmt: skip
        hook.remove()
        release_engine(engine.engine)
        del engine, layers, given, maps, up, down


if __name__ == "__main__":
    with started(
        __doc__, **OPTIONS | {"preset": "nemotron-3-nano-30b-a3b", "rows": "32,64,128,256", "ways": ""}
    ) as arguments:
        main(arguments)
