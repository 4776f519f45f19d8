"""Time and error of the gated norm, this package's and mamba-ssm's (where it is installed). Usage: ``norm_cost.py [--json PATH]``.

bf16, 8192 features in 8 groups (Nemotron-H-8B) and 4096 in one, for decodes and prefills. Medians of CUDA event times over 200
calls each, in turns; the error is the largest against float64 over the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import types

import torch

from megatron_hybrid_prefix.platform.kernels.norm import rmsnorm_fn
from megatron_hybrid_prefix.platform.kernels.norm_triton import gated_rms_norm

CASES = [(rows, dim, group) for dim, group in ((8192, 1024), (4096, 4096)) for rows in (1, 64, 8192)]


def of_mamba_ssm():
    """mamba-ssm's function, or None."""
    for name in ("selective_scan_cuda", "causal_conv1d_cuda"):
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
    try:
        from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn as theirs
    except ImportError:
        return None
    return theirs


def time_us(call):
    """CUDA event time of one call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH")
    options = parser.parse_args()
    theirs, found = of_mamba_ssm(), []
    with torch.no_grad():
        for rows, dim, group in CASES:
            generator = torch.Generator("cuda").manual_seed(rows)
            wide = torch.randn(rows, 2 * dim, generator=generator, device="cuda").bfloat16()
            x, z = wide[:, :dim].contiguous(), wide[:, dim:].contiguous()
            weight = torch.randn(dim, generator=generator, device="cuda").bfloat16()
            calls = {"ours": lambda: gated_rms_norm(x, weight, z, 1e-5, group, False)}  # noqa: B023
            if theirs is not None:
                calls["mamba-ssm"] = lambda: theirs(x, weight, None, z, 1e-5, group, False)  # noqa: B023
            exact = rmsnorm_fn(x.double(), weight.double(), None, z.double(), 1e-5, group, False)
            times = {name: [] for name in calls}
            for repeat in range(220):
                for name, call in calls.items():
                    us = time_us(call)
                    if repeat >= 20:
                        times[name].append(us)
            row = {"rows": rows, "features": dim, "group": group}
            row |= {f"{name}_us": round(statistics.median(values), 2) for name, values in times.items()}
            row |= {f"{name}_error": float((call() - exact).abs().max()) for name, call in calls.items()}
            found.append(row)
            print(json.dumps(row), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"device": torch.cuda.get_device_name(), "cases": found}, file, indent=1)


if __name__ == "__main__":
    main()
