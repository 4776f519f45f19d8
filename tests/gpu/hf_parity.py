"""Folders that transformers saved, on a GPU: logits against transformers on the CPU. Usage: ``hf_parity.py [--out DIR]``.

On the CPU, because transformers 5.23 itself computes other logits for Bamba on a GPU than on a CPU.

Tiny models of each family with random weights, in float32 without TF32: logits after every token of prompts and answers, and
the greedy tokens of a batch. ``odd`` are the dimensions of the CPU's tests; ``even`` have powers of two, as real models do.
Then in bfloat16: the error of this package and that of transformers, against transformers in float32. A norm of
Qwen3-Next keeps its 1 + weight in float32; ``norms_rounded`` is the error without that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # before Triton is imported
os.environ.setdefault("MAMBA_DETERMINISTIC", "1")  # megatron's kernels are not autotuned: minutes for each shape

import torch

from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.mcore.runner import release_engine
from megatron_hybrid_prefix.models import build_hybrid_model, open_folder
from megatron_hybrid_prefix.models.weights import parameters_by_global_name
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.engine_helpers import greedy, run_to_end
from tests.harness.hf_helpers import (
    BAMBA_ASKED,
    NEMOTRON_H_ASKED,
    NEMOTRON_H_EXPERTS_ASKED,
    NEW_TOKENS,
    QWEN3_NEXT_ASKED,
    PromptLogits,
    make_references,
)

FIELDS = {"max_sequence_length": 512, "max_requests": 16, "buffer_size_gb": 0.5}
LENGTHS = {"prompt_lengths": (1, 3, 64, 129)}


def even(asked, **changes):
    """The same with other dimensions."""
    return asked | {"model": asked["model"] | changes}


ASKED = {
    "bamba_even": even(BAMBA_ASKED, hidden_size=128, mamba_n_heads=8, mamba_d_state=32, intermediate_size=256),
    "qwen3_next_even": even(
        QWEN3_NEXT_ASKED,
        **{"hidden_size": 128, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
        **{
            "head_dim": 32,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "bamba": BAMBA_ASKED,
    "qwen3_next": QWEN3_NEXT_ASKED,
    "nemotron_h": NEMOTRON_H_ASKED,
    "nemotron_h_experts": NEMOTRON_H_EXPERTS_ASKED,
}


def batch_tokens(model, reference):
    """Greedy answers of all prompts together: how many tokens are transformers', of how many."""
    engine, finished = build_engine(model, **FIELDS), {}
    with torch.inference_mode():
        for number, case in enumerate(reference["cases"]):
            engine.add_request(number, case["tokens"][: case["length"]], greedy(NEW_TOKENS))
        run_to_end(engine, finished)
    release_engine(engine)
    right = [case["tokens"][case["length"] :] for case in reference["cases"]]
    got = [list(map(int, finished[number].generated_tokens)) for number in range(len(right))]
    pairs = [pair for one, other in zip(got, right, strict=True) for pair in zip(one, other, strict=True)]
    return sum(one == other for one, other in pairs), len(pairs)


def logits_of(model, cases):
    """Of every case, as one tensor of all its positions."""
    prompt_logits = PromptLogits(model, **FIELDS)
    with torch.inference_mode():
        found = torch.cat([prompt_logits(case["tokens"]).float() for case in cases])
    release_engine(prompt_logits.engine)
    return found


def in_float32(path, reference, platform):
    """Largest gap of the logits, and how many greedy tokens are the same."""
    model, right = build_hybrid_model(hf=path, platform=platform), logits_of_reference(reference, "logits")
    gap = float((logits_of(model, reference["cases"]) - right).abs().max())
    same, tokens = batch_tokens(model, reference)
    found = {"logits_gap": gap, "largest_logit": float(right.abs().max()), "same_tokens": same, "tokens": tokens}
    return found | {"router_margin": reference["router_margin"]}


def in_bfloat16(path, reference, platform):
    """Errors of logits, as roots of a mean square, against transformers in float32."""
    folder, right = open_folder(path), logits_of_reference(reference, "logits")

    def error(logits):
        return float((logits - right).double().pow(2).mean().sqrt())

    model = build_hybrid_model(replace(folder.config, dtype="bfloat16"), hf=folder, platform=platform)
    found = {
        "error_here": error(logits_of(model, reference["cases"])),
        "error_of_transformers": error(logits_of_reference(reference, "bfloat16_logits")),
    }
    if folder.config.float32_norms:
        with torch.no_grad():
            for _, parameter in parameters_by_global_name(model):
                if parameter.dtype == torch.float32:
                    parameter.copy_(parameter.bfloat16())
        found["norms_rounded"] = error(logits_of(model, reference["cases"]))
    return found


def logits_of_reference(reference, name):
    """Of all cases, as one tensor of all their positions."""
    return torch.cat([case[name] for case in reference["cases"]])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="*", choices=ASKED, default=list(ASKED))
    args = parser.parse_args()
    start, found, failed = time.perf_counter(), {name: {} for name in args.only}, []
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(1) as pool:
        asked = {Path(root) / name: ASKED[name] | LENGTHS | {"bfloat16": True} for name in args.only}
        making = pool.submit(make_references, asked, "cpu")  # while megatron is imported
        platform = ensure_platform(device=device)
        print(platform.describe(), flush=True)
        references = making.result()
        for what in (in_float32, in_bfloat16):
            for folder, reference in references.items():
                try:
                    figures = what(folder, reference, platform)
                except Exception as error:  # the other families are worth a run
                    traceback.print_exc()
                    failed.append(f"{folder.name} {what.__name__}")
                    figures = {"error": f"{type(error).__name__}: {error}"}
                found[folder.name][what.__name__] = figures
                text = json.dumps({folder.name: {what.__name__: figures}})
                print(f"[{time.perf_counter() - start:5.0f} s] {text}", flush=True)
                if args.out is not None:
                    save(args.out / f"hf_parity_{device}.json", platform, found)
    shut_down()
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def save(path, platform, found):
    """After each family: a run that is cut leaves what it found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if platform.device.type == "cuda" else "cpu"
    text = json.dumps({"device": name, "platform": platform.describe(), "families": found}, indent=1)
    path.write_text(text)


if __name__ == "__main__":
    main()
