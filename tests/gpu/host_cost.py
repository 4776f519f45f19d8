"""First token of prompts that evict KV and states: without a cache, without a host tier, and with one. On an idle GPU::

    python tests/gpu/host_cost.py [--preset hybrid-4b] [--tokens 8492] [--warm-up 6] [--prompts 32] [--row 4] [--host-gb 16] [--rows NAME ...]
                                  [--variants] [--parts]

Every prompt is new. Once the device is full, each one evicts what an earlier one left. After 50 or 60 of them an engine has learned that
guesses are of no use here, and evicts less: ``--warm-up 80`` times that. The engines take turns, prompt by prompt, in
random order, and each prompt's time is divided by that of the prompt without a cache of the same round. Rows with "at once"
copy what is evicted before the forward that evicts it. Those with "published late" publish when the forward is over. ``--rows`` chooses some (``off`` is always there). A prompt begins when the GPU is idle. What
still goes to the host after its token is shown beside it, and costs the next prompt: so prompts are also sent ``--row`` at a time,
one right after the other, and that time is divided likewise (0: they are not). ``--variants`` copies what was gathered by
a kernel of some programs, not by the copy engines. ``--parts`` says how far the engine was when; noting that takes some time, too.
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
from megatron_hybrid_prefix.tiers import entry_copies
from tests.gpu.shared_tier import Milestones, milestones_table
from tests.harness.engine_helpers import greedy, run_to_end

AT_ONCE, LATE = ", at once", ", published late"


@contextmanager
def by_kernel(programs):
    """What was gathered is copied to the host by a kernel of so many programs."""
    copies = entry_copies.EntryCopies
    with (
        patch.object(page_copies, "_TO_HOST_PROGRAMS", programs),
        patch.object(copies, "_to_pages_by_engine", copies._to_pages_by_kernel),
    ):
        yield


def tokens_ms(engine, prompts, synchronize):
    """Milliseconds until each of these prompts has its only token, and until the GPU is idle."""
    synchronize()
    start = time.perf_counter()
    for number, tokens in enumerate(prompts):
        engine.add_request(number, tokens, greedy(1))
    run_to_end(engine, {})
    told = time.perf_counter()
    synchronize()
    return (told - start) * 1e3, (time.perf_counter() - start) * 1e3


def paired(times, off):
    """Median time, and the median of its ratios to ``off`` with the middle half of them, as text."""
    ratios = sorted(own / other for own, other in zip(times, off, strict=True))
    quarter = len(ratios) // 4
    return (
        f"{statistics.median(times):8.2f} ms, {statistics.median(ratios):.3f} of off ({ratios[quarter]:.3f} to "
        f"{ratios[-1 - quarter]:.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="hybrid-4b")
    parser.add_argument("--tokens", type=int, default=8492)
    parser.add_argument("--warm-up", type=int, default=6, help="prompts that fill the device and compile kernels")
    parser.add_argument("--prompts", type=int, default=32, help="of each engine")
    parser.add_argument("--row", type=int, default=4, help="prompts one right after the other")
    parser.add_argument("--host-gb", type=float, default=16.0)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these")
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

    found, idle, rowed, stored = (defaultdict(list) for _ in range(4))
    milestones = Milestones() if args.parts else None
    parts = defaultdict(list)

    def new_prompts(count):
        return [[dice.randrange(model.hybrid_config.vocab_size) for _ in range(args.tokens)] for _ in range(count)]

    def send(name, engine):
        moves = getattr(engine.context, "host_moves", None)
        before = 0 if moves is None else moves.arena.stores.bytes
        prompts = new_prompts(1)
        if milestones is not None:
            milestones.start()
        told, over = tokens_ms(engine, prompts, synchronize)
        if milestones is not None:
            parts[name].append(milestones.found())
        found[name].append(told)
        idle[name].append(over)
        stored[name].append(0 if moves is None else (moves.arena.stores.bytes - before) / 2**20)

    with torch.inference_mode():
        one, host = {"cache_gb": kv_gb + states_gb}, {"host_gb": args.host_gb}
        settings: dict[str, dict[str, float] | None] = {
            "off": None,
            "no host tier": one,
        }
        for when in ("", AT_ONCE, LATE):
            settings[f"host tier{when}"] = one | host
        if args.rows is not None:
            unknown = [name for name in args.rows if name not in settings]
            if unknown:
                parser.error(f"no row {unknown[0]!r}; there are: {', '.join(settings)}")
            settings = {name: settings[name] for name in dict.fromkeys(["off", *args.rows])}
        engines = {}
        for name, memory in settings.items():
            kv = {"buffer_size_gb": kv_gb} if memory is None else {}
            prefix = None if memory is None else HybridPrefixConfig(**memory)
            engines[name] = build_engine(model, prefix, **kv, **common)
            if name.endswith(AT_ONCE):
                engines[name].context.host_moves.sends_later = False
            if name.endswith(LATE):
                engines[name].context._can_be_published = lambda plans: False
        rows = {name: (name, nullcontext) for name in engines}
        for programs in (2, 4, 8) if args.variants else ():
            rows[f"host tier, by {programs} programs"] = "host tier", partial(by_kernel, programs)

        def turns():
            return dice.sample(list(rows), len(rows))

        for number in range(args.warm_up + args.prompts):
            if number == args.warm_up:
                for each in (found, idle, stored, parts):
                    each.clear()
            for row in turns():
                name, variant = rows[row]
                with variant():
                    send(row, engines[name])
        for _ in range(args.prompts // args.row if args.row else 0):
            for row in turns():
                name, variant = rows[row]
                with variant():
                    rowed[row].append(tokens_ms(engines[name], new_prompts(args.row), synchronize)[0] / args.row)
    for row in rows:
        print(
            f"{row:40} {paired(found[row], found['off'])}, GPU idle after {statistics.median(idle[row]):.2f} ms, "
            f"{statistics.fmean(stored[row]):.0f} MiB stored a prompt",
            flush=True,
        )
        if args.row:
            print(f"{'':20} {args.row} in a row, each {paired(rowed[row], rowed['off'])}", flush=True)
        if milestones is not None:
            print(*milestones_table(parts[row]), "", sep="\n", flush=True)
    shut_down()


if __name__ == "__main__":
    main()
