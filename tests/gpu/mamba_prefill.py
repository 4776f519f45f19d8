"""A Mamba2 layer's prefill of one prompt: megatron-core's and this package's, in turns in one process. On an idle GPU::

    python -m tests.gpu.mamba_prefill [--preset hybrid-4b] [--tokens 8192] [--rounds 20]

Medians of milliseconds, each after `torch.cuda.synchronize`, without the layer's two products; the largest difference of the outputs; then
the kernels of each. For megatron-core's 0.19.2, whose layer has the method that is called. ``--preset tiny`` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch

from megatron_hybrid_prefix.layers.step import PrefillSpan, PrefillStep
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.gpu.measure import BLOCK_TOKENS, DEVICE, ON_GPU, synchronize
from tests.harness.named_models import named


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="hybrid-4b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    ensure_platform()  # before layers are imported
    from megatron_hybrid_prefix.layers.kinds import use_slot_mixers
    from megatron_hybrid_prefix.layers.mamba2 import HybridPrefixMambaMixer
    from megatron_hybrid_prefix.upstream.mixer import MambaMixer

    model = build_hybrid_model(replace(named(args.preset), layer_pattern="M*-"), seed=0)
    use_slot_mixers(model)
    mixer = next(module for module in model.modules() if isinstance(module, HybridPrefixMambaMixer))
    tokens, chunk = args.tokens, mixer.chunk_size
    dtype = mixer.config.params_dtype
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = torch.randn(
        (tokens, 1, mixer.in_proj.weight.shape[0]), generator=generator, device=DEVICE, dtype=torch.float32
    ).to(dtype)
    conv, ssm = (
        torch.zeros((3, *shape), dtype=dtype, device=DEVICE) for shape in mixer.mamba_state_shapes_per_request()
    )
    step = PrefillStep(quanta=[chunk], block_tokens=BLOCK_TOKENS, max_tokens=tokens, max_sequences=1, device=DEVICE)
    step.prepare([PrefillSpan(start_tokens=0, tokens=tokens, source_slot=0, live_slot=1)], tokens=tokens, sequences=1)
    step.copy()
    step.show()
    whole = {"dtype": torch.int32, "device": DEVICE}
    bounds = torch.tensor([*range(0, tokens, chunk), tokens], **whole)
    theirs = {
        "seq_idx": torch.zeros((1, tokens), **whole),
        "cu_seqlens": torch.tensor([0, tokens], **whole),
        "batch_indices": torch.tensor([2], device=DEVICE),
        "cu_chunk_seqlens": bounds,
        "last_chunk_indices": torch.tensor([len(bounds) - 2], **whole),
        "seq_idx_for_varlen": torch.zeros(len(bounds) - 1, **whole),
        "conv_seq_idx": torch.zeros(tokens, **whole),
        "conv_seq_start": torch.zeros(tokens, **whole),
    }

    def of_megatron() -> torch.Tensor:
        for state in (conv, ssm):
            state[2].zero_()  # it starts where it ends
        return MambaMixer._ssm_prefill(mixer, inputs, conv_state=conv, ssm_state=ssm, **theirs)

    ways = {"megatron-core": of_megatron, "this package": lambda: mixer.prefill(inputs, step, conv, ssm)}
    outputs = {name: way() for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            synchronize()
            began_s = time.perf_counter()
            way()
            synchronize()
            times[name].append((time.perf_counter() - began_s) * 1e3)
    for name, found in times.items():
        print(f"{name:14} {statistics.median(found):8.3f} ms ({min(found):.3f} to {max(found):.3f})")
    one, other = (output.float() for output in outputs.values())
    print(f"largest difference {float((one - other).abs().max()):.3g} of {float(one.abs().max()):.3g}")
    for state in (conv, ssm):
        print(
            f"of a state {float((state[1].float() - state[2].float()).abs().max()):.3g} of {float(state[1].abs().max()):.3g}"
        )
    for name, way in ways.items() if ON_GPU else ():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            way()
            synchronize()
        print(f"\n{name}: ms of each kernel")
        found = [event for event in profiled.key_averages() if event.self_device_time_total]
        for event in sorted(found, key=lambda event: -event.self_device_time_total):
            print(f"{event.self_device_time_total / 1e3:8.3f} ({event.count:2}) {event.key[:100]}")
    shut_down()


if __name__ == "__main__":
    main()
