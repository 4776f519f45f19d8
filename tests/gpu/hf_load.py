"""How fast a Hugging Face folder is loaded, beside a plain read of the same bytes, and how much memory that takes.

    python -m tests.gpu.hf_load make FOLDER --layers 16
    python -m tests.gpu.hf_load load FOLDER [--out DIR] [--cold] [--first-tokens]
    torchrun --nproc-per-node 2 -m tests.gpu.hf_load load FOLDER --out DIR

``make`` writes a folder with Nemotron-H-8B's widths and random bfloat16 weights: 2.1 GB of embeddings and 0.55 GB a pair of
layers; without ``--layers`` the whole model, 16.2 GB. ``load`` reads it with a rank for each process: once from the disk
(``--cold``: the files' pages are dropped before), then three times from the page cache, in turns with plain reads.

A plain read: ``readinto`` of every file into one buffer as large as a file, whose pages were touched before. With several
ranks each reads its part of every file. It is taken with one thread, and with as many threads as the loader has.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset, open_folder
from megatron_hybrid_prefix.models.hf_load import load_hf_weights
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end
from tests.harness.hf_state_dict import hf_shapes

SHARD_BYTES = 4 << 30
ROUNDS = 3
THREADS = 4
SLOW_S = 60.0  # a disk that takes longer for all files is measured with the first one only
GB = 1e9


def say(text):
    """A line of rank 0, at once."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, flush=True)


# --- The folder ------------------------------------------------------------------------------------------------------


def make_folder(folder, layers):
    """Random weights with Nemotron-H-8B's widths; a shorter pattern begins with an attention layer."""
    preset = get_preset("nemotron-h-8b")
    pattern = preset.layer_pattern if layers is None else ("*-" + "M-" * layers)[: 2 * (layers // 2)]
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    shards, index = [{}], {}
    for name, shape in hf_shapes(config).items():
        if sum(weight.nbytes for weight in shards[-1].values()) > SHARD_BYTES:
            write(shards, folder, index)
            shards.append({})
        shards[-1][name] = random_weight(name, shape, device, generator).cpu()
    write(shards, folder, index)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def random_weight(name, shape, device, generator):
    """Values that a model can compute with."""
    weight = torch.randn(shape, device=device, generator=generator)
    if name.endswith("A_log"):
        weight = weight.abs().add(1).log()
    elif len(shape) == 1:
        weight = weight.mul(0.1) + ("norm" in name or name.endswith(".D"))
    elif "embeddings" not in name:
        weight *= shape[-1] ** -0.5
    return weight.bfloat16()


def write(shards, folder, index):
    """The last shard, which is then emptied."""
    file = f"model-{len(shards):05}.safetensors"
    save_file(shards[-1], folder / file)
    index |= dict.fromkeys(shards[-1], file)
    shards[-1] = {}
    say(f"wrote {file}")


# --- Plain reads -----------------------------------------------------------------------------------------------------


class PlainReads:
    """Reads of this rank's part of every file into one buffer."""

    def __init__(self, folder, rank, ranks):
        self.parts = []
        for file in sorted(folder.glob("*.safetensors")):
            size = file.stat().st_size
            self.parts.append((file, rank * size // ranks, (rank + 1) * size // ranks))
        self.bytes = sum(end - begin for _, begin, end in self.parts)
        self.buffer = memoryview(bytearray(max(end - begin for _, begin, end in self.parts)))
        self.buffer[:: resource.getpagesize()] = bytes(-(-len(self.buffer) // resource.getpagesize()))  # touched

    def __call__(self, threads=1, files=None):
        """Seconds."""
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            for part in self.parts[:files]:
                list(pool.map(lambda number, part=part: self._read(part, number, threads), range(threads)))
        return time.perf_counter() - start

    def _read(self, part, number, threads):
        file, begin, end = part
        low, high = (number * (end - begin) // threads, (number + 1) * (end - begin) // threads)
        with open(file, "rb", buffering=0) as opened:
            opened.seek(begin + low)
            while low < high:
                low += opened.readinto(self.buffer[low:high])


def drop(folder):
    """Drops the files' pages from the page cache. Returns the part of sampled pages that is still there."""
    there, samples = 0, 0
    for file in sorted(folder.glob("*.safetensors")):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        page = bytearray(1)
        for at in range(0, os.fstat(descriptor).st_size, 64 << 20):
            samples += 1
            with suppress(OSError):  # it would wait for the disk, or this system cannot tell
                there += os.preadv(descriptor, [page], at, os.RWF_NOWAIT)
        os.close(descriptor)
    return there / samples


# --- Loads -----------------------------------------------------------------------------------------------------------


def own_bytes():
    """This process's memory without mapped files: (private, shared). Pinned memory may count as shared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
    return found["RssAnon"] + found["RssShmem"]


class PeakMemory:
    """A context: the most that `own_bytes` says, beside what it said before."""

    def __enter__(self):
        self.before, self.peak, self._done = own_bytes(), 0, threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self):
        while not self._done.wait(0.002):
            self.peak = max(self.peak, own_bytes())

    def __exit__(self, *_):
        self._done.set()
        self._watcher.join()

    @property
    def gb(self):
        """GB beside what there was before."""
        return (max(self.peak, own_bytes()) - self.before) / GB


def measure(path, args):
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    platform = ensure_platform(tp=ranks, device=args.device)
    folder, cuda = open_folder(path), platform.device.type == "cuda"
    found = {"device": torch.cuda.get_device_name() if cuda else "cpu", "tp": ranks, "cores": os.cpu_count()}
    say(f"{platform.describe()}; {found}")
    plain = PlainReads(path, platform.rank, ranks)

    def barrier():
        if cuda:
            torch.cuda.synchronize()
        torch.distributed.barrier()

    def timed_load(model):
        barrier()
        start = time.perf_counter()
        load_hf_weights(model, folder)
        barrier()
        return time.perf_counter() - start

    if args.cold:
        if platform.rank == 0:
            found["cold_pages_left"] = drop(path)
            say(f"dropped the files' pages; {found['cold_pages_left']:.0%} of the sampled ones are still there")
        barrier()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with PeakMemory() as peak:
        moments = [time.perf_counter()]
        model = build_hybrid_model(hf=folder, platform=platform, on_read=lambda *_: moments.append(time.perf_counter()))
        barrier()
        found["build_and_first_load_s"] = time.perf_counter() - moments[0]
        found["first_load_s"] = time.perf_counter() - moments[1]  # from the first slice on
    share = sum(value.nbytes for value in model.parameters())
    found |= {
        "folder_gb": folder.weight_bytes / GB,
        "share_gb": share / GB,
        "largest_fused_tensor_gb": max(value.nbytes for value in model.parameters()) / GB,
        "peak_host_gb_of_building_and_loading": peak.gb,
        "gpu_gb": torch.cuda.max_memory_allocated() / GB if cuda else None,
    }
    say(json.dumps(found))
    if args.cold:
        if platform.rank == 0:
            drop(path)
        barrier()
        slow = found["first_load_s"] > SLOW_S
        seconds = plain(files=1 if slow else None)
        found["cold_plain_read_s"] = seconds * (plain.bytes / (plain.parts[0][2] - plain.parts[0][1]) if slow else 1)
        say(f"cold plain read: {found['cold_plain_read_s']:.2f} s")
    plain(THREADS)  # all files are in the page cache now
    times = {"plain_read_s": [], "plain_read_threads_s": [], "load_s": []}
    with PeakMemory() as peak:
        for _ in range(ROUNDS):
            barrier()
            times["plain_read_s"].append(plain())
            barrier()
            times["plain_read_threads_s"].append(plain(THREADS))
            times["load_s"].append(timed_load(model))
            say(json.dumps({name: round(values[-1], 3) for name, values in times.items()}))
    found |= {name: statistics.median(values) for name, values in times.items()} | {"rounds": times}
    found["peak_host_gb_beside_the_share"] = peak.gb
    speed = share / found["load_s"]
    found["load_gb_per_s"] = speed / GB
    for name in ("plain_read", "plain_read_threads"):
        found[f"{name}_gb_per_s"] = plain.bytes / found[f"{name}_s"] / GB
        found[f"load_part_of_{name}"] = speed / (plain.bytes / found[f"{name}_s"])
    if args.first_tokens:
        try:
            found |= first_tokens(model)
        except Exception as error:  # the times stand without it
            found["first_tokens_error"] = f"{type(error).__name__}: {error}"
            print(traceback.format_exc(), flush=True)
    every_rank = [None] * ranks
    torch.distributed.all_gather_object(every_rank, found)
    say(json.dumps({name: value for name, value in found.items() if name != "rounds"}, indent=1))
    if args.out is not None and platform.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        name = f"hf_load_{platform.device.type}_tp{ranks}.json"
        (args.out / name).write_text(json.dumps({"config": asdict(folder.config), "ranks": every_rank}, indent=1))
    shut_down()


def first_tokens(model):
    """Greedy tokens of two prompts, the second one with its prefix cached."""
    fields = {"max_sequence_length": 2048, "max_requests": 8, "buffer_size_gb": 4}
    engine = build_engine(model, HybridPrefixConfig(mamba_gb=0.5), **fields)
    prompt, finished, times = random_tokens(1024, seed=1), {}, []
    with torch.inference_mode():
        for number in range(2):
            start = time.perf_counter()
            engine.add_request(number, prompt + random_tokens(9, seed=2), greedy(8))
            run_to_end(engine, finished)
            times.append(time.perf_counter() - start)
    return {
        "tokens": [list(map(int, finished[number].generated_tokens)) for number in range(2)],
        "log_probs": [[round(value, 4) for value in finished[number].generated_log_probs] for number in range(2)],
        "seconds_of_8_tokens": times,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "load"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--cold", action="store_true", help="the first load reads the disk")
    parser.add_argument("--first-tokens", action="store_true", help="generate with the loaded model")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "load":
        measure(args.folder, args)
        return
    args.folder.mkdir(exist_ok=True)
    start = time.perf_counter()
    make_folder(args.folder, args.layers)
    say(f"made {args.folder} in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
