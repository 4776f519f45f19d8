"""First token of prompts that evict KV and states: without a cache, without a host tier, and with one. On an idle GPU::

    python tests/gpu/host_cost.py [--preset hybrid-4b] [--tokens 8492] [--prompts 32] [--host-gb 16] [--variants] [--parts]

Every prompt is new. Once the device is full, each one evicts what an earlier one left. The engines take turns, prompt by prompt, in
one order and then in the other, and each prompt's time is divided by that of the prompt without a cache beside it. Rows with "at once"
launch the copies to the host before the forward; one leaves them out, to show what they cost. ``--variants`` copies what was gathered
by a kernel of some programs, not by the copy engines. ``--parts`` says how far the engine was when; noting that takes some time, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import torch

from megatron_hybrid_prefix import HybridPrefixConfig, build_engine
from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config, state_bytes
from megatron_hybrid_prefix.models import build_hybrid_model
from megatron_hybrid_prefix.ops import page_copies
from megatron_hybrid_prefix.platform import ensure_platform, shut_down
from megatron_hybrid_prefix.tiers import entry_copies, stores
from tests.gpu.shared_tier import Milestones, milestones_table
from tests.harness.engine_helpers import greedy, run_to_end

WARM_UP = 6  # prompts that fill the device and compile kernels


@contextmanager
def by_kernel(programs):
    """What was gathered is copied to the host by a kernel of so many programs."""
    copies = entry_copies.EntryCopies
    with (
        patch.object(page_copies, "_TO_HOST_PROGRAMS", programs),
        patch.object(copies, "_to_pages_by_engine", copies._to_pages_by_kernel),
    ):
        yield


@contextmanager
def nothing_copied():
    """What is gathered is not copied to the host."""

    def nothing(*args):
        """In place of a copy."""

    with (
        patch.object(stores.Stores, "_store", nothing),
        patch.object(entry_copies.EntryCopies, "straight_to_pages", nothing),
    ):
        yield


def first_token_ms(engine, tokens, synchronize):
    """Milliseconds to the only token of a request."""
    synchronize()
    start = time.perf_counter()
    engine.add_request(0, tokens, greedy(1))
    run_to_end(engine, {})
    synchronize()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="hybrid-4b")
    parser.add_argument("--tokens", type=int, default=8492)
    parser.add_argument("--prompts", type=int, default=32, help="of each engine")
    parser.add_argument("--host-gb", type=float, default=16.0)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    platform = ensure_platform()
    print(platform.describe(), flush=True)
    synchronize: Callable[[], None] = torch.cuda.synchronize if platform.device.type == "cuda" else lambda: None
    model = build_hybrid_model(args.preset, seed=0)
    states_gb = 18 * state_bytes(mamba_state_config(model)) / 2**30
    kv_gb = 0.2 if platform.device.type == "cpu" else 1.0
    dice = random.Random(0)
    common = {"max_requests": 4, "max_tokens": 64 * (args.tokens // 64 + 1), "max_sequence_length": args.tokens + 64}

    found, stored = defaultdict(list), defaultdict(float)
    milestones = Milestones() if args.parts else None
    parts = defaultdict(list)

    def send(name, engine):
        moves = getattr(engine.context, "host_moves", None)
        before = 0 if moves is None else moves.arena.bytes_stored
        tokens = [dice.randrange(model.hybrid_config.vocab_size) for _ in range(args.tokens)]
        if milestones is not None:
            milestones.start()
        found[name].append(first_token_ms(engine, tokens, synchronize))
        if milestones is not None:
            parts[name].append(milestones.found())
        stored[name] += 0 if moves is None else (moves.arena.bytes_stored - before) / 2**20

    with torch.inference_mode():
        split = {"mamba_gb": states_gb}
        engines = {
            "off": build_engine(model, buffer_size_gb=kv_gb, **common),
            "no host tier": build_engine(model, HybridPrefixConfig(**split), buffer_size_gb=kv_gb, **common),
            "host tier": build_engine(
                model, HybridPrefixConfig(**split, host_gb=args.host_gb), buffer_size_gb=kv_gb, **common
            ),
            "one memory, host tier": build_engine(
                model, HybridPrefixConfig(cache_gb=kv_gb + states_gb, host_gb=args.host_gb), **common
            ),
        }
        rows = {name: (name, nullcontext) for name in engines}
        for name in ("host tier", "one memory, host tier"):
            moves = engines[name].context.host_moves
            rows[f"{name}, at once"] = name, partial(patch.object, moves, "sends_later", False)
        rows["nothing copied to the host"] = "host tier", nothing_copied
        if args.variants:
            for programs in (2, 4, 8):
                for name in ("host tier", "one memory, host tier"):
                    rows[f"{name}, by {programs} programs"] = name, partial(by_kernel, programs)
        order = list(rows)
        for number in range(WARM_UP + args.prompts):
            if number == WARM_UP:
                for each in (found, stored, parts):
                    each.clear()
            for row in order if number % 2 else reversed(order):
                name, variant = rows[row]
                with variant():
                    send(row, engines[name])
    for row in order:
        times = found[row]
        ratios = sorted(own / off for own, off in zip(times, found["off"], strict=True))
        quarter = len(ratios) // 4
        print(
            f"{row:40} {statistics.median(times):8.2f} ms, {statistics.median(ratios):.3f} of off "
            f"({ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}), {stored[row] / args.prompts:.0f} MiB stored a prompt",
            flush=True,
        )
        if milestones is not None:
            print(*milestones_table(parts[row]), "", sep="\n", flush=True)
    shut_down()


if __name__ == "__main__":
    main()
