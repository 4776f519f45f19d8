"""Show in one session what this cache does that megatron-core's own does not, against caching off.

    hybrid-prefix demo                                       # in less than a minute on a CPU
    hybrid-prefix demo --context notes.txt --question "What is this about?" --seed 3
    hybrid-prefix demo --json out.json --plot out.png

Users ask questions about a text: by default this package's own source. The weights are random, so the answers are
noise; what is shown is the cache. Each of three engines (caching off, megatron-core's cache, this cache) gets the same
prompts in the same order:

1. A first question. Nothing is cached yet.
2. The next turn. The answer before it is longer than a block, and the turn continues it.
3. The same prompt again. The answer is as long as this prompt needs to end 2 tokens behind a block boundary.
4. Another user asks about the same text. Nobody has shown before where the two prompts part.
5. A herd: several users ask about one new text at once.
6. With chunked prefill: a prompt whose beginning is cached, in the same steps as a prompt that is not.

The model computes in float32, so that another answer is an error and no rounding. An answer is "exact" if it has the
tokens of caching off, and log-probs within 0.0001 of its own. The text is
cut 8 tokens before a block boundary, so that every question crosses it, as one longer than a block does anyway.

Exit code: 0; 1 if this cache gave a wrong answer; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_hybrid_prefix.arithmetic import ceil_div
from megatron_hybrid_prefix.console.demo_report import WIDTH, Part, as_json, outcomes, print_demo, save_demo_plot
from megatron_hybrid_prefix.console.demo_session import (
    CONTEXT_TOKENS,
    FOLLOW_UP,
    SHORT_ANSWER_TOKENS,
    Send,
    Session,
    default_context,
    default_questions,
    make_session,
    play,
    play_chunked,
    titles,
)
from megatron_hybrid_prefix.console.engine_options import (
    DEFAULT_BUFFER_GB,
    DEFAULT_ENGINES,
    DEFAULT_MAMBA_GB,
    DEFAULT_MAX_TOKENS,
    ENGINES,
    Budgets,
    cache_figures,
    hardware,
    positive_int,
    started_platform,
    step_tokens,
    stop_requested,
    versions,
)
from megatron_hybrid_prefix.console.hf import add_hf_option, build_model, choose_model
from megatron_hybrid_prefix.console.terminal import (
    ArgumentParser,
    EngineRun,
    InputError,
    Interrupt,
    Request,
    Stopped,
    as_input_errors,
    check_can_plot,
    check_writable,
    compare,
    is_main_rank,
    output_console,
    progress,
    read_text,
    run_command,
    write_json,
    write_whole,
)

PRESETS = {"cpu": "tiny", "cuda": "small"}
STATES_KEPT = 64
EXIT_WRONG = 1


# --- Run -------------------------------------------------------------------------------------------------------------


class Stage:
    """Builds engines around one model and plays the session on them."""

    def __init__(self, model: Any, platform: Any, args: argparse.Namespace, interrupt: Interrupt) -> None:
        self._model, self._platform, self._args, self._interrupt = model, platform, args, interrupt
        self.prefix_stats: dict[str, Any] = {}

    def mamba_gb(self, max_tokens: int) -> float:
        """GiB for kept states. megatron-core takes its scratch, two for each block of a step at most, out of it."""
        from megatron_hybrid_prefix.mcore.state.layout import mamba_state_config, state_bytes

        slots = STATES_KEPT + 2 * ceil_div(max_tokens, self._args.block_size_tokens)
        need_gb = slots * state_bytes(mamba_state_config(self._model)) / 2**30
        return max(DEFAULT_MAMBA_GB[self._platform.device.type], need_gb)

    def fields(self, session: Session) -> dict[str, Any]:
        """Fields of megatron's ``InferenceConfig`` that all engines share."""
        longest = session.longest_tokens() + SHORT_ANSWER_TOKENS
        max_tokens = max(DEFAULT_MAX_TOKENS[self._platform.device.type], step_tokens(longest))
        block_tokens = self._args.block_size_tokens
        return {
            "block_size_tokens": block_tokens,
            "max_requests": max(16, len(session.herd)),
            "max_tokens": max_tokens,
            "max_sequence_length": ceil_div(longest, block_tokens) * block_tokens,
        }

    def run(self, name: str, session: Session, answer: list[int] | None) -> dict[str, list[Any]]:
        """All parts on the engine ``name``; see `play`."""
        shared = self.fields(session)
        with _Engine(self, name, shared) as send:
            found = play(session, send, answer)
        with _Engine(self, name, shared | {"max_tokens": session.step_tokens, "enable_chunked_prefill": True}) as send:
            return found | play_chunked(session, send)

    def build(self, name: str, fields: dict[str, Any]) -> Any:
        """The engine ``name``."""
        from megatron_hybrid_prefix.mcore import build_engine

        budgets = Budgets(
            buffer_gb=DEFAULT_BUFFER_GB[self._platform.device.type], mamba_gb=self.mamba_gb(fields["max_tokens"])
        )
        with as_input_errors(ValueError, prefix=f"engine {name}: "):
            return build_engine(self._model, **fields, **ENGINES[name](budgets))

    def send(self, engine: Any, prompts: list[list[int]], count: int) -> list[Any]:
        """Send prompts at once.

        Raises:
            InputError: The engine refused one.
            Stopped: Ctrl-C.
        """
        from megatron_hybrid_prefix.mcore.runner import run_batch
        from megatron_hybrid_prefix.upstream.names import SamplingParams

        sampling = SamplingParams(
            num_tokens_to_generate=count,
            top_k=1,
            termination_id=-1,
            return_log_probs=True,
            skip_prompt_log_probs=True,
        )
        should_stop = partial(stop_requested, self._platform, self._interrupt)
        results: list[Any] = run_batch(engine, prompts, sampling, should_stop=should_stop)
        if any(result.status == "stopped" for result in results):
            raise Stopped
        failed = [result.error for result in results if result.status == "failed"]
        if failed:
            raise InputError(failed[0])
        return results


class _Engine:
    """Context manager: an engine that has run once; gives what sends prompts to it."""

    def __init__(self, stage: Stage, name: str, fields: dict[str, Any]) -> None:
        self._stage, self._name, self._fields = stage, name, fields

    def __enter__(self) -> Send:
        self._engine = self._stage.build(self._name, self._fields)
        # The first forwards pay for lazy set-up. One token and its answer are too few to be cached.
        self._stage.send(self._engine, [[0, 1]], 2)
        return partial(self._stage.send, self._engine)

    def __exit__(self, *_: object) -> None:
        from megatron_hybrid_prefix.mcore.runner import release_engine

        self._stage.prefix_stats.setdefault(self._name, cache_figures(self._engine))
        release_engine(self._engine)
        del self._engine
        gc.collect()  # the engine's parts refer to each other


# --- Command ---------------------------------------------------------------------------------------------------------


def make_parser() -> ArgumentParser:
    """All options."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(description=summary, epilog=rest, formatter_class=raw, allow_abbrev=False)
    add = parser.add_argument_group("session").add_argument
    add(
        "--context",
        action="append",
        default=[],
        type=Path,
        metavar="F",
        help="text to ask about (repeat; default: this package's source)",
    )
    add("--question", action="append", default=[], metavar="TEXT", help="a question (repeat; they are asked in turn)")
    add("--users", type=positive_int, default=4, metavar="N", help="users of the herd (default: %(default)s)")
    add(
        "--answer-tokens",
        type=positive_int,
        default=600,
        metavar="N",
        help="tokens of the first answer, or up to a block more (default: %(default)s)",
    )
    add(
        "--rounds",
        type=positive_int,
        default=1,
        metavar="N",
        help="rounds; first tokens are their medians (default: %(default)s)",
    )
    add(
        "--block-size-tokens",
        type=positive_int,
        default=256,
        metavar="N",
        help="tokens of a KV block (default: %(default)s)",
    )
    add = parser.add_argument_group("model").add_argument
    add("--preset", help="default: tiny on CPU, small on GPU")
    add_hf_option(add)
    add("--seed", type=int, default=0, help="seed of the random weights (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is a device")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("out"), help="folder for the results (default: %(default)s)")
    add("--json", type=Path, metavar="PATH", help="everything, as JSON (default: demo.json in that folder)")
    add("--plot", type=Path, metavar="PATH", help="first tokens side by side (default: demo.png in that folder)")
    parser.set_defaults(tp=1, pp=1)
    return parser


def prepare(args: argparse.Namespace) -> tuple[Session, Any]:
    """Fill in what depends on the device, and check all input before anything runs; returns session and model config."""
    with as_input_errors(OSError, prefix=f"cannot make {args.out}: "):
        args.out.mkdir(parents=True, exist_ok=True)
    args.json, args.plot = args.json or args.out / "demo.json", args.plot or args.out / "demo.png"
    check_writable(args.json)
    check_can_plot("--plot", args.plot)
    if args.answer_tokens <= args.block_size_tokens:
        raise InputError(
            f"--answer-tokens {args.answer_tokens} must be more than --block-size-tokens {args.block_size_tokens}"
        )
    device_type = args.device or default_device()
    config = dataclasses.replace(choose_model(args, PRESETS[device_type]), dtype="float32")
    if config.vocab_size < 258:
        raise InputError(f"{args.preset} has a vocabulary of {config.vocab_size}: demo needs 258, a token per byte")
    # With other blocks megatron-core keeps few states, which would be no fair comparison.
    if args.block_size_tokens % config.chunk_size:
        raise InputError(
            f"--block-size-tokens {args.block_size_tokens} must be a multiple of {config.chunk_size}, "
            f"the SSM chunk of {args.preset}"
        )
    context = "\n\n".join(map(read_text, args.context)) or default_context(CONTEXT_TOKENS[device_type])
    questions = args.question or default_questions()
    session = make_session(
        context,
        questions,
        args.question[1 % len(args.question)] if args.question else FOLLOW_UP,
        users=args.users,
        answer_tokens=args.answer_tokens,
        block_tokens=args.block_size_tokens,
    )
    longest = session.longest_tokens() + SHORT_ANSWER_TOKENS
    if longest > config.max_sequence_length:
        raise InputError(
            f"prompts of {longest:,} tokens are too long for {args.preset}, which takes {config.max_sequence_length:,}: "
            "give a shorter --context or fewer --answer-tokens"
        )
    return session, config


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> int:
    """The whole command; see the module's docstring."""
    args = make_parser().parse_args(argv)
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # on a GPU, products of float32 in float32
    session, config = prepare(args)
    with started_platform(args) as platform:
        return run_on(platform, session, config, args, interrupt)


def run_on(platform: Any, session: Session, config: Any, args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Build the model, play the session on each engine, report."""
    console = output_console() if is_main_rank() else Console(quiet=True)
    console.width = min(console.width, WIDTH)
    facts = hardware(platform)
    machine = facts.get("gpu") or f"CPU ({facts['processor']})"
    console.print("One session on three engines: caching off, megatron-core's cache, this cache.")
    console.print(f"Model: {args.preset}, float32, on {machine}.", markup=False)
    if args.hf is None:
        console.print("The weights are random, so the answers are noise. The caching is real.")
    else:
        console.print("Prompts are bytes, not this model's tokens, so the answers are noise. The caching is real.")
    console.print(f"First tokens are medians of {args.rounds} rounds.\n" if args.rounds > 1 else "")
    model = build_model(args, config, platform)
    stage = Stage(model, platform, args, interrupt)
    results: dict[str, list[dict[str, list[Any]]]] = {name: [] for name in DEFAULT_ENGINES}
    answer = None
    with progress(list(DEFAULT_ENGINES), args.rounds) as done:
        for number in range(1, args.rounds + 1):
            for name, rounds in results.items():
                done(name, number - 1)
                rounds.append(stage.run(name, session, answer))
                answer = answer or rounds[0]["first_question"][0].generated
                done(name, number)
    parts = [
        Part(
            key=key,
            title=title,
            short=short,
            rounds={name: [found[key] for found in rounds] for name, rounds in results.items()},
        )
        for key, (title, short) in titles(session).items()
    ]
    found = [outcomes(part) for part in parts]
    wrong = any(not by_engine["ours"].exact for by_engine in found)
    if not is_main_rank():
        return EXIT_WRONG if wrong else 0
    print_demo(console, parts, found)
    shown = as_json(parts, found)
    subtitle = (
        f"{args.preset} hybrid model, float32, on {machine}. Questions about a text of {len(session.text):,} tokens."
    )
    subtitle += f" Medians of {args.rounds} rounds." if args.rounds > 1 else ""
    settings = {"platform": platform.describe(), "hardware": facts, "engine_fields": stage.fields(session)}
    settings |= {"workload": subtitle, "parts": shown}
    write_json(args.json, _everything(parts, stage, settings, args))
    write_whole(args.plot, lambda path: save_demo_plot(path, shown, subtitle))
    console.print(f"\nwrote {args.json} and {args.plot}", markup=False, soft_wrap=True)
    return EXIT_WRONG if wrong else 0


def _everything(
    parts: Sequence[Part], stage: Stage, settings: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """The JSON: verdicts, then each request of each engine, and each compared with caching off."""
    runs = {name: _as_run(name, parts) for name in DEFAULT_ENGINES}
    return {
        "versions": versions(),
        "model": {"preset": args.preset, "hf": args.hf, "dtype": "float32", "seed": args.seed},
        **settings,
        "engines": {
            name: {
                "prefix_stats": stage.prefix_stats[name],
                "requests": [
                    {"label": request.label, **asdict(result)}
                    for request, result in zip(run.requests, run.results, strict=True)
                ],
            }
            for name, run in runs.items()
        },
        "comparisons": [
            {"engine": name, "against": "off", "requests": compare(runs["off"], run)}
            for name, run in runs.items()
            if name != "off"
        ],
    }


def _as_run(name: str, parts: Sequence[Part]) -> EngineRun:
    """All requests of an engine, round by round."""
    requests, results = [], []
    for number in range(len(parts[0].rounds[name])):
        for part in parts:
            for result in part.rounds[name][number]:
                requests.append(Request(label=f"{part.key}, round {number + 1}", tokens=[], sampling={}))
                results.append(result)
    return EngineRun(name=name, requests=requests, results=results, wall_s=0.0)


def default_device() -> str:
    """CUDA where there is a device."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns its exit code."""
    return run_command(lambda interrupt: run(argv, interrupt))
