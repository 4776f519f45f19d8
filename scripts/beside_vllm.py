"""vLLM with the shape of the preset `hybrid-4b`, the prompts of `hybrid-prefix bench` and its clock: docs/beside-vllm.md.

For the Python of an environment that has vLLM; nothing of this package is imported::

    python scripts/beside_vllm.py [SETTING ...] [--repeats 5] [--seed 0] [--json FILE]

A setting is NAME=VALUE,... of vLLM's engine (``enable_prefix_caching=true,mamba_cache_mode=align``); each runs in a process of its own
and is a line of the table. By default: caching off, and on. Weights are random. A round that warms up is not counted; figures are
medians. What vLLM says goes to stderr. Exit code 1: a setting failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The `config.json` that `save_hf_folder` writes of the preset. States in bfloat16, as by default there: vLLM's own choice is float32.
SHAPE = {
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "dtype": "bfloat16", "tie_word_embeddings": False,
    "hidden_size": 4096, "vocab_size": 32768, "max_position_embeddings": 65536, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504, "mamba_num_heads": 128, "mamba_head_dim": 64,
    "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-",
    "num_hidden_layers": 29, "chunk_size": 128, "layer_norm_epsilon": 1e-05, "time_step_min": 0.0,
    "mamba_ssm_cache_dtype": "bfloat16",
}  # fmt: skip
SETTINGS = ("enable_prefix_caching=false", "enable_prefix_caching=true")
ENGINE = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 16384, "max_num_seqs": 64}
ENGINE |= {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "bfloat16"}
SHARED_TOKENS, OWN_TOKENS, SIGHTINGS = 8192, 300, 3
AT_ONCE = ((32, 512, 128), (64, 64, 256))  # requests, tokens of a prompt, tokens of an answer
FIRST = [f"first_token_{n}_ms" for n in range(1, SIGHTINGS + 1)]
REUSED = [f"reused_tokens_{n}" for n in range(1, SIGHTINGS + 1)]
RATES = [f"tokens_per_second_{requests}" for requests, _, _ in AT_ONCE]


def different_prompts(rng: random.Random, count: int, prompt_tokens: int) -> list[list[int]]:
    """Those of `bench no_reuse`."""
    return [rng.choices(range(SHAPE["vocab_size"]), k=prompt_tokens) for _ in range(count)]


def sharing_prompts(rng: random.Random) -> list[list[int]]:
    """Those of `bench shared_prefix`: a prefix, and own tokens after it."""
    (shared,) = different_prompts(rng, 1, SHARED_TOKENS)
    return [shared + own for own in different_prompts(rng, SIGHTINGS, OWN_TOKENS)]


def send(llm: Any, prompts: list[list[int]], generate: int) -> tuple[list[Any], float]:
    """The answers, each of so many tokens, and the seconds from the call until all are there."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=generate, ignore_eos=True, detokenize=False)
    began_s = time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    wall_s = time.perf_counter() - began_s
    if any(len(answer.outputs[0].token_ids) != generate for answer in answers):
        raise RuntimeError(f"an answer does not have {generate} tokens")
    return answers, wall_s


def one_round(llm: Any, seed: str) -> dict[str, float | None]:
    sample: dict[str, float | None] = {}
    for n, prompt in enumerate(sharing_prompts(random.Random(seed))):  # one after another, each on an idle device
        (answer,), wall_s = send(llm, [prompt], 1)
        sample |= {FIRST[n]: 1e3 * wall_s, REUSED[n]: answer.num_cached_tokens}
    for name, (requests, prompt_tokens, generate) in zip(RATES, AT_ONCE, strict=True):
        llm.reset_prefix_cache()  # in `bench` each scenario has new engines: prompts of one seed begin with the same tokens
        _, wall_s = send(llm, different_prompts(random.Random(seed), requests, prompt_tokens), generate)
        sample[name] = requests * generate / wall_s
    return sample


def measure(setting: str, repeats: int, seed: int) -> dict[str, Any]:
    """In a process of its own: all rounds of a setting."""
    import vllm
    from vllm.platforms import current_platform

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        llm = vllm.LLM(model=folder, **ENGINE | engine_arguments(setting))
        samples = []
        for repeat in range(-1, repeats):  # -1 warms up
            gc.collect()
            gc.disable()
            samples.append(one_round(llm, f"{seed} {repeat}"))
            gc.enable()
    del samples[0]
    known = {name: [sample[name] for sample in samples if sample[name] is not None] for name in samples[0]}
    medians = {name: statistics.median(values) if values else None for name, values in known.items()}
    return {"vllm": vllm.__version__, "gpu": current_platform.get_device_name(), "median": medians, "samples": samples}


def engine_arguments(setting: str) -> dict[str, Any]:
    """Values are JSON; what is none is text."""
    arguments = {}
    for part in setting.split(","):
        name, _, value = part.partition("=")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown: a line for each setting."""
    sightings = [f"{n}. sighting, ms (reused)" for n in range(2, SIGHTINGS + 1)]
    rates = [f"{requests} x ({prompt} + {answer}), tokens/s" for requests, prompt, answer in AT_ONCE]
    lines = [["", f"cold {SHARED_TOKENS + OWN_TOKENS:,}, ms", *sightings, *rates]]
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    for setting, row in rows.items():
        if "error" in row:
            lines.append([setting, row["error"], *[""] * (len(lines[0]) - 2)])
            continue
        median = row["median"]
        reused = ["?" if median[name] is None else f"{median[name]:,.0f}" for name in REUSED]
        times = [f"{median[name]:.1f}" + (f" ({reused[n]})" if n else "") for n, name in enumerate(FIRST)]
        lines.append([f"vLLM {row['vllm']}, {setting}", *times, *(f"{median[name]:,.0f}" for name in RATES)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"(default: {' '.join(SETTINGS)})")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write medians and samples")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.worker.write_text(json.dumps(measure(args.settings[0], args.repeats, args.seed)), encoding="utf-8")
        return 0
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for setting in args.settings or SETTINGS:
            file = Path(folder, "measured.json")
            file.unlink(missing_ok=True)
            sizes = ["--repeats", str(args.repeats), "--seed", str(args.seed), "--worker", str(file)]
            code = subprocess.run([sys.executable, __file__, setting, *sizes], stdout=sys.stderr).returncode
            rows[setting] = json.loads(file.read_text()) if file.exists() else {"error": f"exit code {code}"}
    print(table(rows), flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({"command": sys.argv, "shape": SHAPE, "rows": rows}, indent=2), encoding="utf-8"
        )
    return int(any("error" in row for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
