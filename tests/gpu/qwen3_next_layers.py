"""Layers of Qwen3-Next at real dimensions, as many as fit the GPU: first tokens cold, of a hit, of a hit from the host.

    python tests/gpu/qwen3_next_layers.py --out out/qwen3-next            # --device cpu --preset tiny-qwen3-next: to try it

A group of layers is ``GEGEGE*E``; the model has 12, and random weights. Two scenarios of ``hybrid-prefix bench`` run with this
package's cache, each in a process: `shared_prefix` (sightings of 8,192 shared + 300 own tokens) and `host_tier` (prompts that
come back from the host). If memory does not suffice, a group less is tried. Prints a line per figure as it goes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from megatron_hybrid_prefix.lab.capacity import sizes_of_config
from megatron_hybrid_prefix.lab.fit import parameter_count
from megatron_hybrid_prefix.models.config import PRESETS, HybridModelConfig

GROUP = "GEGEGE*E"
NAME = "some-layers"  # of the shortened model, for the bench
GIB = 2**30
SHOWN = {
    "shared_prefix": (
        *(f"first_token_{sighting}_ms" for sighting in (1, 2, 3, 4)),
        *("cold_first_token_ms", "hit_first_token_ms", "hit_over_cold", "computed_tokens_2", "computed_tokens_4"),
    ),
    "host_tier": ("cold_ms", "back_ms", "again_ms", "back_over_cold", "reused_share", "loaded_mb"),
}


def shortened(preset: str, groups: int) -> HybridModelConfig:
    """The preset with so many groups of layers."""
    return replace(PRESETS[preset], layer_pattern=GROUP * groups)


def groups_that_fit(preset: str, reserve_gib: float, device: str) -> int:
    """As many groups as leave ``reserve_gib`` of the GPU free."""
    most = PRESETS[preset].num_layers // len(GROUP)
    if device == "cpu":
        return min(2, most)
    free_bytes = torch.cuda.get_device_properties(0).total_memory - reserve_gib * GIB
    counts = [parameter_count(shortened(preset, groups)) for groups in (1, 2)]
    item_bytes = getattr(torch, PRESETS[preset].dtype).itemsize
    return min(most, 1 + int((free_bytes / item_bytes - counts[0]) // (counts[1] - counts[0])))


def report_sizes(preset: str, groups: int) -> dict[str, int]:
    """Bytes of a state and of KV, of these layers and of all."""
    found: dict[str, int] = {}
    for name, config in (("all layers", PRESETS[preset]), (f"{groups} groups", shortened(preset, groups))):
        sizes = sizes_of_config(preset, config)
        own = {"state_bytes": sizes.state_bytes, "kv_block_bytes": sizes.kv_block_bytes(256)}
        own |= {f"states_in_{gib}_gib": gib * GIB // sizes.state_bytes for gib in (4, 10, 20)}
        print(f"{name}: {config.num_layers} layers, {parameter_count(config) / 1e9:.2f}B parameters, {own}", flush=True)
        found |= {f"{name}, {key}": value for key, value in own.items()}
    return found


def run_bench(scenario: str, arguments: argparse.Namespace, groups: int) -> dict | None:
    """Figures of a scenario, by name; None if memory did not suffice."""
    path = arguments.out / f"{scenario}.json"
    command = [
        sys.executable,
        str(Path(__file__)),
        "--bench",
        str(groups),
        "--preset",
        arguments.preset,
        "--",
        scenario,
    ]
    command += ["--preset", NAME, "--engine", "ours", "--repeats", str(arguments.repeats), "--json", str(path)]
    if scenario == "shared_prefix":  # the other one sets its budgets
        command += ["--mamba-gb", str(arguments.mamba_gb), "--buffer-gb", str(arguments.buffer_gb)]
    command += ["--device", arguments.device]
    path.unlink(missing_ok=True)
    started_s = time.perf_counter()
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started_s
    (arguments.out / f"{scenario}.log").write_text(process.stdout + process.stderr)
    said = process.stdout + process.stderr
    if process.returncode or not path.is_file():
        if "OutOfMemoryError" in said or "out of memory" in said:
            print(f"{scenario}, {groups} groups: out of memory after {seconds:.0f} s", flush=True)
            return None
        raise SystemExit(f"{scenario} ended with {process.returncode}:\n{said[-4000:]}")
    found = json.loads(path.read_text())
    error = found["engines"]["ours"]["error"]
    if error is not None:
        raise SystemExit(f"{scenario}: {error}")
    print(f"{scenario}, {groups} groups: {seconds:.0f} s", flush=True)
    if scenario == "shared_prefix":
        slots = int(arguments.mamba_gb * GIB) // sizes_of_config(NAME, shortened(arguments.preset, groups)).state_bytes
        print(
            f"  slots in {arguments.mamba_gb} GiB: engine {found['engines']['ours']['state_slots']}, plan {slots}",
            flush=True,
        )
    return {name: metric["median"]["ours"] for name, metric in found["metrics"].items() if metric["median"]}


def bench(preset: str, groups: int, argv: list[str]) -> int:
    """In a process for it: ``hybrid-prefix bench`` with the shortened model as a preset."""
    from megatron_hybrid_prefix.cli import bench as command

    PRESETS[NAME] = shortened(preset, groups)
    return command.main(argv)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="qwen3-next-80b-a3b")
    parser.add_argument("--groups", type=int, help="groups of layers; default: as many as fit")
    parser.add_argument("--reserve-gib", type=float, default=15.0, help="left for KV, states and activations")
    parser.add_argument("--buffer-gb", type=float, default=3.0)
    parser.add_argument("--mamba-gb", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scenarios", nargs="+", choices=SHOWN, default=list(SHOWN))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out/qwen3-next"))
    parser.add_argument("--bench", type=int, help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if arguments.bench:
        return bench(arguments.preset, arguments.bench, [word for word in rest if word != "--"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    groups = arguments.groups or groups_that_fit(arguments.preset, arguments.reserve_gib, arguments.device)
    report: dict = {"preset": arguments.preset}
    for scenario in arguments.scenarios:
        while (found := run_bench(scenario, arguments, groups)) is None:
            groups -= 1
            if not groups:
                raise SystemExit("not even one group of layers fits")
        report[scenario] = found | {"groups": groups}
        for name in SHOWN[scenario]:
            print(f"  {name:20} {found.get(name)}", flush=True)
    report |= report_sizes(arguments.preset, groups)
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
