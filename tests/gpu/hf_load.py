"""How fast a Hugging Face folder is loaded, beside a plain read of the same bytes, and how much memory that takes.

    python -m tests.gpu.hf_load --layers 16 --device cpu
    torchrun --nproc-per-node 2 -m tests.gpu.hf_load --tp 2

Makes a folder with Nemotron-H-8B's widths and random bfloat16 weights (2.1 GB of embeddings, 0.55 GB a pair of layers), unless --folder has one. Files
are read once before, so both find them in the page cache; reads and loads take turns. Prints JSON on rank 0.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_hybrid_prefix.models import build_hybrid_model, get_preset, open_folder
from megatron_hybrid_prefix.models.hf_load import load_hf_weights
from megatron_hybrid_prefix.models.hf_weights import hf_shapes
from megatron_hybrid_prefix.platform import ensure_platform, shut_down

SHARD_BYTES = 4 << 30
ROUNDS = 3


def make_folder(folder, layers):
    """Random weights with Nemotron-H-8B's widths; its pattern begins and ends as that of the whole model."""
    preset = get_preset("nemotron-h-8b")
    pattern = ("*-" + "M-" * layers)[: 2 * (layers // 2)]
    config = replace(preset, layer_pattern=pattern)
    given = {
        **{"model_type": "nemotron_h", "hybrid_override_pattern": pattern, "torch_dtype": "bfloat16"},
        **{"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "conv_kernel": config.d_conv},
        **{"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_query_groups},
        **{
            "head_dim": config.kv_channels,
            "intermediate_size": config.ffn_hidden_size,
            "max_position_embeddings": 8192,
        },
        **{"mamba_num_heads": config.mamba_num_heads, "mamba_head_dim": config.mamba_head_dim},
        **{"ssm_state_size": config.mamba_state_dim, "n_groups": config.mamba_num_groups},
    }
    (folder / "config.json").write_text(json.dumps(given))
    shards, index = [{}], {}
    for name, shape in hf_shapes(config).items():
        if sum(weight.nbytes for weight in shards[-1].values()) > SHARD_BYTES:
            write(shards, folder, index)
            shards.append({})
        shards[-1][name] = (torch.rand(shape) - 0.5).bfloat16()
    write(shards, folder, index)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write(shards, folder, index):
    """The last shard, which is then emptied."""
    file = f"model-{len(shards):05}.safetensors"
    save_file(shards[-1], folder / file)
    index |= dict.fromkeys(shards[-1], file)
    shards[-1] = {}


def plain_read(folder):
    """Seconds to read all files into one buffer of 16 MiB."""
    buffer, start = bytearray(16 << 20), time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - start


def own_bytes():
    """This process's memory without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure(path, args):
    platform = ensure_platform(tp=args.tp, device=args.device)
    folder = open_folder(path)
    model = build_hybrid_model(folder.config, platform=platform)  # fills the memory, so that it counts before
    before, peak, done = own_bytes(), 0, threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    load_hf_weights(model, folder)
    done.set()
    watcher.join()
    reads, loads = [], []
    for _ in range(ROUNDS):
        reads.append(plain_read(path))
        start = time.perf_counter()
        load_hf_weights(model, folder)
        if platform.device.type == "cuda":
            torch.cuda.synchronize()
        loads.append(time.perf_counter() - start)
    found = {
        "device": str(platform.device),
        "tp": args.tp,
        "folder_gb": folder.weight_bytes / 1e9,
        "share_gb": sum(value.nbytes for value in model.parameters()) / 1e9,
        "plain_read_s": sorted(reads)[ROUNDS // 2],
        "load_s": sorted(loads)[ROUNDS // 2],
        "largest_fused_tensor_gb": max(value.nbytes for value in model.parameters()) / 1e9,
        "peak_beside_the_share_gb": (peak - before) / 1e9,
    }
    found["load_bytes_per_s_of_plain_read"] = (found["share_gb"] / found["load_s"]) / (
        found["folder_gb"] / found["plain_read_s"]
    )
    if platform.rank == 0:
        print(json.dumps(found, indent=2))
    shut_down()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(exist_ok=True)
        if not (args.folder / "config.json").is_file():
            make_folder(args.folder, args.layers)
        measure(args.folder, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), args.layers)
        measure(Path(folder), args)


if __name__ == "__main__":
    main()
