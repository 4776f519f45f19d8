"""Folders that transformers saved, on a GPU: logits against transformers on the same GPU. Usage: ``hf_parity.py [--out DIR]``.

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
import traceback
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # before Triton is imported

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
    "nemotron_h": NEMOTRON_H_ASKED,
    "nemotron_h_experts": NEMOTRON_H_EXPERTS_ASKED,
    "bamba": BAMBA_ASKED,
    "bamba_even": even(BAMBA_ASKED, hidden_size=128, mamba_n_heads=8, mamba_d_state=32, intermediate_size=256),
    "qwen3_next": QWEN3_NEXT_ASKED,
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


def compare(path, reference, platform):
    """Figures of one folder."""
    folder, cases = open_folder(path), reference["cases"]
    right = torch.cat([case["logits"] for case in cases])
    model = build_hybrid_model(hf=folder, platform=platform)
    found = {
        "logits_gap": float((logits_of(model, cases) - right).abs().max()),
        "largest_logit": float(right.abs().max()),
        "router_margin": reference["router_margin"],
    }
    found["same_tokens"], found["tokens"] = batch_tokens(model, reference)
    del model
    model = build_hybrid_model(replace(folder.config, dtype="bfloat16"), hf=folder, platform=platform)
    theirs = torch.cat([case["bfloat16_logits"] for case in cases])

    def error(logits):
        return float((logits - right).double().pow(2).mean().sqrt())

    found["bfloat16"] = {"error_here": error(logits_of(model, cases)), "error_of_transformers": error(theirs)}
    if folder.config.float32_norms:
        with torch.no_grad():
            for _, parameter in parameters_by_global_name(model):
                if parameter.dtype == torch.float32:
                    parameter.copy_(parameter.bfloat16())
        found["bfloat16"]["norms_rounded"] = error(logits_of(model, cases))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="*", choices=ASKED, default=list(ASKED))
    args = parser.parse_args()
    platform = ensure_platform(device=args.device)
    print(platform.describe(), flush=True)
    found, failed = {}, []
    with tempfile.TemporaryDirectory() as root:
        asked = {Path(root) / name: ASKED[name] | LENGTHS | {"bfloat16": True} for name in args.only}
        references = make_references(asked, device=platform.device.type)
        for folder, reference in references.items():
            try:
                found[folder.name] = compare(folder, reference, platform)
            except Exception as error:  # the other families are worth a run
                traceback.print_exc()
                failed.append(folder.name)
                found[folder.name] = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({folder.name: found[folder.name]}), flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        device = torch.cuda.get_device_name() if platform.device.type == "cuda" else "cpu"
        text = json.dumps({"device": device, "platform": platform.describe(), "families": found}, indent=1)
        (args.out / f"hf_parity_{platform.device.type}.json").write_text(text)
    shut_down()
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
