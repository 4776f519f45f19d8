"""Generate with a hybrid model, on one or more caching engines side by side.

The input is prompts, a conversation or recorded sessions. The output is a table: how many prompt tokens of each request
were computed, how many were reused, and how long it took. With several engines (--compare) their answers are compared.

examples:
    hybrid-prefix generate "Hello" --preset tiny
    hybrid-prefix generate "Once upon a time" --hf ./Nemotron-H-8B
    hybrid-prefix generate --conversation session.json --compare off,upstream,ours --json result.json --plot result.png
    hybrid-prefix generate --jsonl prompts.jsonl --compare off,ours --cache-gb 20
    hybrid-prefix generate --sessions agents.jsonl --compare off,upstream,ours
    torchrun --nproc-per-node 2 -m megatron_hybrid_prefix generate --jsonl prompts.jsonl --preset small --tp 2

engines:
    off         megatron-core without prefix caching
    upstream    megatron-core with its own prefix caching
    ours        megatron-core with this package's cache: KV and states share one memory (--cache-gb)

By default `ours` gets --buffer-gb and --mamba-gb together, so all engines with a cache have the same memory.

--jsonl: one JSON object per line, with "prompt" (text) or "tokens" (ids). A line may set its own sampling parameters:
"num_tokens_to_generate", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop_words", "termination_id",
"stop_token_ids", "top_n_logprobs". For the engine "ours" it may also set:
    "cache_salt"          text; requests with different salts share nothing
    "cache_read"          false: do not reuse cached prefixes
    "cache_write"         false: do not cache this request
    "cache_breakpoints"   token positions up to which other prompts will share this one

--conversation: one JSON object in one of two forms.
    {"system": "...", "context": "...", "turns": ["...", {"regenerate": true}, ...]}
        {"regenerate": true} sends the previous prompt again. The new answer replaces the old one.
    {"messages": [{"role": "user", "content": "..."}, ...]}
        An "assistant" message is used in the history instead of the generated answer.
The first engine's answers become the history for all engines, so all engines get the same prompts. The end of each
message is sent as a breakpoint ("cache_breakpoints").

--sessions: one JSON object per line, with "timestamp" (a number) and "input" (the whole prompt as text). Requests are
sent one after another, by timestamp. Other fields are ignored. The report shows totals only. "least possible" is what a
perfect cache would compute: the tokens after each prompt's longest common prefix with an earlier prompt.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_hybrid_prefix.console.engine_options import (
    ENGINE_ADVICE,
    ENGINES,
    UPSTREAM,
    Budgets,
    add_engine_options,
    add_model_options,
    budget_of,
    cache_figures,
    check_engine_options,
    check_memory,
    engine_fields,
    engine_names,
    hardware,
    plain,
    positive_int,
    started_platform,
    state_dtype_field,
    stop_requested,
    versions,
)
from megatron_hybrid_prefix.console.hf import (
    add_bos_option,
    add_tokenizer_options,
    build_model,
    default_sampling,
    tokenizer_of,
)
from megatron_hybrid_prefix.console.prompts import Work, for_megatron, read_work
from megatron_hybrid_prefix.console.sessions import against_least, least_tokens, print_sessions
from megatron_hybrid_prefix.console.terminal import (
    ArgumentParser,
    EngineRun,
    InputError,
    Interrupt,
    Request,
    Stopped,
    as_input_errors,
    as_memory_errors,
    check_can_plot,
    check_folder,
    check_writable,
    compare,
    is_main_rank,
    output_console,
    print_report,
    progress,
    run_command,
    save_plot,
    totals,
    write_json,
    write_whole,
)
from megatron_hybrid_prefix.errors import PlatformError
from megatron_hybrid_prefix.tokenizer import Tokenizer

# --- Options ---------------------------------------------------------------------------------------------------------


def make_parser() -> ArgumentParser:
    """The command's parser."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("input").add_argument
    add("prompt", nargs="*", metavar="PROMPT", help="a prompt, as text; - is standard input, also for the files below")
    add(
        "--text-file",
        action="append",
        default=[],
        type=Path,
        metavar="F",
        help="a text file with one prompt (repeatable)",
    )
    add(
        "--jsonl",
        action="append",
        default=[],
        type=Path,
        metavar="F",
        help="prompts as JSON lines, see below (repeatable)",
    )
    add("--conversation", type=Path, metavar="F", help="a conversation as JSON, see below; sent turn by turn")
    add(
        "--sessions",
        action="append",
        default=[],
        type=Path,
        metavar="F",
        help="recorded requests as JSON lines, see below; sent by timestamp (repeatable)",
    )

    add = parser.add_argument_group("model").add_argument
    add_model_options(add)
    add("--load", type=Path, metavar="DIR", help="load the weights from a checkpoint written by --save")
    add("--save", type=Path, metavar="DIR", help="save the weights before generating")
    add_tokenizer_options(add)

    add = parser.add_argument_group("engine").add_argument
    add(
        "--compare",
        default="off",
        metavar="NAMES",
        help=f"engines to run, comma-separated: {', '.join(ENGINES)} (default: off)",
    )
    add(
        "--concurrency",
        choices=("sequential", "batch"),
        help="send prompts one by one or all at once (default: batch; conversations and sessions: sequential)",
    )
    add("--max-sequence-length", type=positive_int, help="longest prompt plus answer, in tokens (default: the model's)")
    add_engine_options(add, max_requests=16, max_requests_text="default: %(default)s", cuda_graphs_text="default: none")

    sampling = parser.add_argument_group("sampling")
    add = sampling.add_argument
    add(
        "--num-tokens-to-generate",
        type=positive_int,
        default=32,
        metavar="N",
        help="length of an answer (default: %(default)s)",
    )
    how = "(with none of --temperature, --top-k and --top-p: as --hf says, else greedy)"
    add("--temperature", type=float, help=f"sampling temperature; 0 is greedy {how}")
    add("--top-k", type=int, help="sample from the K likeliest tokens; 1 is greedy, 0 is off (default: 0)")
    add("--top-p", type=float, help="nucleus sampling, 0 to 1; 0 is off (default: 0)")
    add("--stop-word", action="append", default=[], metavar="TEXT", help="stop before this text (repeatable)")
    end = sampling.add_mutually_exclusive_group()
    end.add_argument(
        "--termination-id", type=int, metavar="ID", help="stop at this token id (default: the tokenizer's end of text)"
    )
    end.add_argument("--ignore-eos", action="store_true", help="do not stop at an end token")
    add(
        "--log-probs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="return log-probs of the generated tokens",
    )
    add(
        "--top-n-logprobs",
        type=int,
        default=0,
        metavar="N",
        help="also return the N likeliest tokens per position, in --json (default: 0)",
    )
    add_bos_option(add)

    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="PATH", help="write all results as JSON")
    add(
        "--plot",
        type=Path,
        metavar="PATH",
        help="plot computed prompt tokens and time to first token per request, as PNG, SVG or PDF",
    )
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments: prompts and options in any order, and after ``--`` only prompts. The prompt ``-`` is standard input."""
    own, literal = list(argv), []
    if "--" in argv:  # parse_intermixed_args would take what comes after it for options
        at = own.index("--")
        own, literal = own[:at], own[at + 1 :]
    args = make_parser().parse_intermixed_args(own)
    args.prompt = [*(Path(text) if text == "-" else text for text in args.prompt), *literal]
    return args


def check_options(args: argparse.Namespace) -> tuple[list[str], Any]:
    """Checks the options, without torch and without reading input. Returns engine names and model configuration."""
    config = check_engine_options(args)
    names = engine_names(args.compare, "--compare")
    if (args.max_sequence_length or 0) > config.max_sequence_length:
        raise InputError(f"--max-sequence-length: {args.preset} has at most {config.max_sequence_length}")
    if args.load is not None and not args.load.is_dir():
        raise InputError(f"--load: there is no folder {args.load}")
    if args.plot is not None:
        check_can_plot("--plot", args.plot)
    if args.save is not None:
        check_folder(args.save, "--save", empty=True)
    if args.json is not None:
        check_writable(args.json)
    return names, config


# --- Run -------------------------------------------------------------------------------------------------------------


class Runner:
    """Runs the same work on one engine after another."""

    def __init__(self, model: Any, tokenizer: Tokenizer, platform: Any, interrupt: Interrupt) -> None:
        self.model, self.tokenizer, self.platform, self._interrupt = model, tokenizer, platform, interrupt

    def should_stop(self) -> bool:
        """Whether Ctrl-C was pressed on any rank; see `stop_requested`."""
        return stop_requested(self.platform, self._interrupt)

    def run(
        self,
        name: str,
        fields: dict[str, Any],
        work: Work,
        sent: list[Request] | None,
        on_done: Callable[[int], None],
    ) -> EngineRun:
        """Builds the engine ``name``, sends ``sent`` (None: the work's own requests), and releases the engine."""
        from megatron_hybrid_prefix.mcore import build_engine
        from megatron_hybrid_prefix.mcore.runner import check_fits, release_engine

        with as_input_errors(ValueError, prefix=f"engine {name}: "), as_memory_errors(f"engine {name}", ENGINE_ADVICE):
            engine = build_engine(self.model, tokenizer=self.tokenizer, **fields)
        try:
            for request in work.longest():
                with as_input_errors(ValueError, prefix=f"{request.label}: "):
                    check_fits(engine, len(request.tokens), request.sampling["num_tokens_to_generate"])
            # Warm up: the first forward of a process does lazy set-up. Two tokens are too few to be cached.
            sampling = work.longest()[0].sampling | {"num_tokens_to_generate": 2}
            sampling.pop("cache_breakpoints", None)
            warm_up = Request(label="", tokens=[0, 1], sampling=sampling)
            is_megatrons = name == UPSTREAM
            self._send(engine, is_megatrons, [warm_up], lambda count: None)
            started_s = time.perf_counter()
            if work.batched:
                sent = work.prompts
                results = self._send(engine, is_megatrons, sent, on_done)
            else:
                results = []

                def answer_to(request: Request) -> list[int]:
                    results.extend(self._send(engine, is_megatrons, [request], lambda count: None))
                    on_done(len(results))
                    generated: list[int] = results[-1].generated
                    return generated

                if sent is None and work.conversation is not None:
                    sent = work.conversation.play(answer_to)
                else:
                    sent = sent or work.prompts
                    for request in sent:
                        answer_to(request)
            wall_s = time.perf_counter() - started_s
            return EngineRun(
                name=name,
                requests=sent,
                results=results,
                wall_s=wall_s,
                prefix_stats=cache_figures(engine),
            )
        finally:
            release_engine(engine)

    def _send(
        self, engine: Any, is_megatrons: bool, requests: list[Request], on_done: Callable[[int], None]
    ) -> list[Any]:
        from megatron_hybrid_prefix.mcore.runner import run_batch
        from megatron_hybrid_prefix.upstream.names import SamplingParams

        results: list[Any] = run_batch(
            engine,
            [request.tokens for request in requests],
            [
                SamplingParams.deserialize(
                    for_megatron(request.sampling, self.tokenizer) if is_megatrons else request.sampling
                )
                for request in requests
            ],
            on_step=lambda done, total: on_done(done),
            should_stop=self.should_stop,
        )
        if any(result.status == "stopped" for result in results):
            raise Stopped
        return results


def run_engines(
    runner: Runner, names: Sequence[str], work: Work, args: argparse.Namespace
) -> tuple[list[EngineRun], dict[str, Any]]:
    """Runs each engine in turn. Returns the results and the engines' settings."""
    device_type = runner.platform.device.type
    longest = work.longest()
    longest_tokens = max(len(request.tokens) for request in longest)
    shared = engine_fields(args, device_type, longest_tokens, args.max_sequence_length)
    state_dtype = state_dtype_field(runner.model, args.state_dtype)
    budgets = Budgets.of(args, device_type)
    runs: list[EngineRun] = []
    with progress(names, len(longest)) as done:
        for name in names:
            sent = runs[0].requests if runs else None
            fields = shared | ENGINES[name](budgets) | state_dtype
            check_memory(budgets, fields, runner.platform.device, f"engine {name}: ")
            runs.append(runner.run(name, fields, work, sent, partial(done, name)))
            gc.collect()  # an engine has reference cycles
    return runs, {
        "budgets": {name: budget_of(ENGINES[name](budgets)) for name in names},
        "mamba_gb": budgets.mamba_gb,
        "host_gb": args.host_gb,
        "shared": args.shared,
        "state_dtype": args.state_dtype,
        **plain(shared),
    }


# --- Command ---------------------------------------------------------------------------------------------------------


def as_json(
    runs: list[EngineRun],
    comparisons: list[dict[str, Any]],
    settings: dict[str, Any],
    args: argparse.Namespace,
    least: list[int] | None,
) -> dict[str, Any]:
    """All results as JSON values. For sessions, also the least tokens to compute for each request."""
    return {
        "versions": versions(),
        "model": {"preset": args.preset, "hf": args.hf, "seed": args.seed, "load": args.load and str(args.load)},
        **settings,
        "engines": {
            run.name: {
                "totals": totals(run) if least is None else totals(run) | against_least(run, least),
                "prefix_stats": run.prefix_stats,
                "requests": [
                    {"label": request.label, "sampling": request.sampling, **asdict(result)}
                    | ({} if least is None else {"least_computed_tokens": least[number]})
                    for number, (request, result) in enumerate(zip(run.requests, run.results, strict=True))
                ],
            }
            for run in runs
        },
        "comparisons": comparisons,
    }


def run(argv: Sequence[str] | None, interrupt: Interrupt) -> None:
    """Runs the command."""
    args = parse(sys.argv[1:] if argv is None else argv)
    names, config = check_options(args)
    tokenizer = tokenizer_of(args, config.vocab_size)
    limit = args.max_sequence_length or config.max_sequence_length
    work = read_work(args, tokenizer, config.vocab_size, limit, default_sampling(args))
    if UPSTREAM in names:
        for request in work.longest():
            for_megatron(request.sampling, tokenizer)

    with started_platform(args) as platform:
        run_on(platform, names, config, tokenizer, work, args, interrupt)


def run_on(
    platform: Any,
    names: list[str],
    config: Any,
    tokenizer: Tokenizer,
    work: Work,
    args: argparse.Namespace,
    interrupt: Interrupt,
) -> None:
    """Builds the model, runs the engines, prints and writes the report."""
    from megatron_hybrid_prefix import models

    console = output_console() if is_main_rank() else Console(quiet=True)
    console.print(platform.describe(), markup=False, soft_wrap=True)
    budgets = Budgets.of(args, platform.device.type)
    for name in names:
        check_memory(budgets, ENGINES[name](budgets), platform.device, f"engine {name}: ", all_ranks=True)
    model = build_model(args, config, platform)
    with as_input_errors(ValueError, PlatformError):
        if args.load is not None:
            models.load_checkpoint(model, args.load)
        if args.save is not None:
            models.save_checkpoint(model, args.save)
    runner = Runner(model, tokenizer, platform, interrupt)
    if runner.should_stop():
        raise Stopped
    runs, fields = run_engines(runner, names, work, args)
    comparisons = [
        {"engine": other.name, "against": runs[0].name, "requests": compare(runs[0], other)} for other in runs[1:]
    ]
    if not is_main_rank():
        return
    least = None
    if work.sessions:
        least = least_tokens([request.tokens for request in runs[0].requests])
        print_sessions(console, runs, least, comparisons)
    else:
        print_report(console, runs, comparisons)
    if args.json is not None:
        settings = {"platform": platform.describe(), "engine_fields": fields}
        write_json(args.json, as_json(runs, comparisons, settings, args, least))
        console.print(f"wrote {args.json}", markup=False, soft_wrap=True)
    if args.plot is not None:
        facts = hardware(platform)
        title = f"{args.preset} on {facts.get('gpu') or facts['processor']}, tp={args.tp} pp={args.pp}. "
        title += f"{len(runs[0].requests)} requests, {'at once' if work.batched else 'one after another'}."
        write_whole(args.plot, lambda part: save_plot(part, runs, title))
        console.print(f"wrote {args.plot}", markup=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code."""
    return run_command(lambda interrupt: run(argv, interrupt))
